"""`extend_under_zero3.py START TOKENIZER ROWS OUT`: extend a model on two forked ZeRO-3 ranks and train a step.

OUT holds the tables as deepspeed.initialize got them, how much of each a rank keeps, and the loss of the step.
"""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path

import deepspeed
import deepspeed.ops
import torch
from transformers import LlamaForCausalLM
from transformers.integrations import HfDeepSpeedConfig

from finlm.train.model import causal_lm

deepspeed.ops.__compatible_ops__ = {}  # 25 s of compiling; gloo gives the same bits
SETTINGS = {
    "train_micro_batch_size_per_gpu": 1,
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
}


def work(start: str, tokenizer: Path, rows: int, out: Path) -> None:
    """What every rank does."""
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    keep_alive = HfDeepSpeedConfig(SETTINGS)
    model = LlamaForCausalLM.from_pretrained(start, dtype=torch.bfloat16)
    del keep_alive
    causal_lm.extend_embeddings(model, tokenizer, rows)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=SETTINGS)
    wanted = {n: p for n, p in engine.module.named_parameters() if "embed_tokens" in n or "lm_head" in n}
    kept = {name: parameter.ds_tensor.numel() for name, parameter in wanted.items()}
    with deepspeed.zero.GatheredParameters(list(wanted.values())):
        tables = {name: parameter.detach().clone() for name, parameter in wanted.items()}
    ids = torch.arange(rows - 32, rows)[None]
    loss = engine(input_ids=ids, labels=ids, use_cache=False).loss
    engine.backward(loss)
    engine.step()
    if os.environ["RANK"] == "0":
        torch.save({"tables": tables, "partition_elements": kept, "loss": loss.item()}, out)


def main() -> int:
    """Fork both ranks; 0 when both end well."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    children = []
    for rank in range(2):
        child = os.fork()
        if child == 0:
            os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", LOCAL_SIZE="2")
            os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
            code = 1
            try:
                work(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
                code = 0
            finally:
                os._exit(code)  # gloo's threads sometimes abort in a normal exit
        children.append(child)
    return max(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children)


if __name__ == "__main__":
    sys.exit(main())
