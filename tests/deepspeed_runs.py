"""Run DeepSpeed settings on two forked CPU ranks: `python deepspeed_runs.py CASES.json`.

CASES.json is {name: settings}. Prints {name: {"lrs": [...], "losses": [...], "optimizer": ..., "wrapper": ...}} or
{name: {"error": ...}} as the last line. torch and deepspeed are imported once; a case takes a second.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import deepspeed
import deepspeed.ops
import torch
from deepspeed.accelerator import get_accelerator

import ranks

STEPS = 6
# Otherwise compiled at first use (25-48 s); gloo gives the same bits.
deepspeed.ops.__compatible_ops__ = {}
# For the tests only: this CPU has no fp16 units, torch computes fp16 all the same.
type(get_accelerator()).is_fp16_supported = lambda self: True


def train(settings: dict[str, Any], rank: int) -> dict[str, Any]:
    """A few optimizer steps of a two-layer network."""
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    torch.manual_seed(1)
    stage = settings["zero_optimization"]["stage"]
    with deepspeed.zero.Init(config_dict_or_path=settings, enabled=stage == 3):
        model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.SiLU(), torch.nn.Linear(128, 64))
    engine, optimizer, _, _ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=settings)
    dtype = torch.bfloat16 if engine.bfloat16_enabled() else torch.float16 if engine.fp16_enabled() else torch.float32
    lrs, losses = [], []
    for step in range(STEPS):
        lrs.append(engine.basic_optimizer.param_groups[0]["lr"])
        for micro_step in range(settings["gradient_accumulation_steps"]):
            torch.manual_seed(100 * step + 10 * micro_step + rank)
            batch = torch.randn(settings["train_micro_batch_size_per_gpu"], 64)
            loss = (engine(batch.to(dtype)).float() - batch).pow(2).mean()
            engine.backward(loss)
            engine.step()
        losses.append(loss.item())
    names = {"optimizer": type(engine.basic_optimizer).__name__, "wrapper": type(optimizer).__name__}
    return {"lrs": lrs, "losses": losses, "defaults": engine.basic_optimizer.defaults, **names}


def rank_main(settings: dict[str, Any], rank: int, port: int, out: Path) -> None:
    """One forked rank; never returns."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", LOCAL_SIZE="2")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    try:
        result = train(settings, rank)
    except BaseException as error:
        traceback.print_exc()
        result = {"error": f"{type(error).__name__}: {error}"}
    if rank == 0 or "error" in result:
        out.write_text(json.dumps(result, default=str))
    sys.stdout.flush()
    # gloo's threads sometimes abort in a normal exit, after all work is done.
    os._exit(0)


def run(settings: dict[str, Any]) -> dict[str, Any]:
    """Fork two ranks and return what rank 0 (or a failing rank) wrote."""
    with socket.socket() as free, tempfile.TemporaryDirectory() as directory:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        out = Path(directory) / "result.json"
        children = []
        for rank in range(2):
            child = os.fork()
            if child == 0:
                rank_main(settings, rank, port, out)
            children.append(child)
        for child in children:
            os.waitpid(child, 0)
        result: dict[str, Any] = json.loads(out.read_text())
        return result


if __name__ == "__main__":
    cases = json.loads(Path(sys.argv[1]).read_text())
    ranks.warm_up()
    print("\n" + json.dumps({name: run(settings) for name, settings in cases.items()}))
