"""Failures provoked on this machine and diagnosed from the log they really wrote."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from finlm.diagnose import command as diagnose

from helpers import ROOT, finlm

# One process imports torch; each failure happens in a fork of it, whose output is the failure's log.
PROVOKE = r"""
import json, os, pickle, resource, socket, sys, traceback
from datetime import timedelta
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

TAKEN = socket.socket(); TAKEN.bind(("127.0.0.1", 0)); TAKEN.listen()
FREE = socket.socket(); FREE.bind(("127.0.0.1", 0)); free = FREE.getsockname()[1]; FREE.close()
SECOND = timedelta(seconds=1)
os.chdir(sys.argv[1])

def group(**env):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
    os.environ.update(env)
    dist.init_process_group("gloo", timeout=SECOND)

def alone():
    group(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free))

class Step:
    pass

def too_many_open_files():
    resource.setrlimit(resource.RLIMIT_NOFILE, (24, 24))
    [open(os.devnull) for _ in range(64)]
def host_memory_insufficient(): torch.empty(2**45, dtype=torch.uint8)
def disk_full():
    with open("/dev/full", "w") as file:
        file.write("x" * 100_000)
def json_malformed(): json.loads('{"text": "cut')
def worker_pickle_error(): pickle.dumps(lambda batch: batch)
def ckpt_corrupt():
    torch.save(torch.zeros(1000), "cut.pt"); os.truncate("cut.pt", 900); torch.load("cut.pt")
def lfs_pointer():
    with open("pointer.pt", "w") as file:
        file.write("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n")
    torch.load("pointer.pt")
def torch_load_weights_only(): torch.save(Step(), "object.pt"); torch.load("object.pt")
def token_id_out_of_range(): torch.nn.Embedding(10, 4)(torch.tensor([10]))
def vocab_size_mismatch():
    big, small = (torch.nn.ModuleDict({"embed_tokens": torch.nn.Embedding(n, 4)}) for n in (12, 10))
    small.load_state_dict(big.state_dict())
def no_grad_checkpointing(): torch.zeros(1).sum().backward()
def empty_dataset(): torch.utils.data.DataLoader([], shuffle=True)
def cuda_not_available(): torch.zeros(1).cuda()
def process_group_not_initialized(): dist.get_world_size()
def master_addr_empty(): group(RANK="0", WORLD_SIZE="1")
def port_in_use(): dist.TCPStore("127.0.0.1", TAKEN.getsockname()[1], 1, True)
def rdzv_nodes_missing(): dist.TCPStore("127.0.0.1", 0, 2, True, timeout=SECOND)
def rdzv_master_unreachable(): dist.TCPStore("127.0.0.1", free, 2, False, timeout=SECOND)
def hostname_unresolvable(): dist.TCPStore("no-such-node.invalid", 1, 2, False, timeout=SECOND)
def nccl_ifname_missing():
    os.environ["GLOO_SOCKET_IFNAME"] = "nonic0"; alone()
def ddp_unused_params():
    alone()
    pair = DistributedDataParallel(torch.nn.ModuleList([torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)]))
    pair.module.forward = lambda x: pair.module[0](x)
    for _ in range(2):
        pair(torch.zeros(1, 2)).sum().backward()
def unknown(): raise LookupError("phase 3 of the curriculum is empty")

for name, failure in list(globals().items()):
    if getattr(failure, "__module__", None) != "__main__" or name in ("group", "alone", "Step"):
        continue
    if (child := os.fork()) == 0:
        log = os.open(name + ".log", os.O_CREAT | os.O_WRONLY)
        os.dup2(log, 1); os.dup2(log, 2)
        try:
            failure()
        except BaseException:
            traceback.print_exc()
        sys.stderr.flush(); os._exit(1)
    os.waitpid(child, 0)
"""


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("logs")
    (directory / "provoke.py").write_text(PROVOKE)
    command = [sys.executable, directory / "provoke.py", directory]
    env = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr
    return directory


def failures() -> list[str]:
    """The functions of PROVOKE that fail, named after their cause."""
    names = [line[4:].partition("(")[0] for line in PROVOKE.splitlines() if line.startswith("def ")]
    return [name for name in names if name not in ("group", "alone")]


@pytest.mark.parametrize("cause", failures())
def test_a_provoked_failure_is_named(cause: str, logs: Path) -> None:
    log = logs / f"{cause}.log"
    found = [finding.cause for finding in diagnose.of_logs([str(log)])]
    assert found[:1] == [cause], log.read_text()


def diagnosed(tmp_path: Path, command: list[str], stop: int | None = None) -> str:
    """The first cause in the log of a command; `stop` is sent to it once it has printed "ready"."""
    log = tmp_path / "x.log"
    env = os.environ | {"PYTHONPATH": str(ROOT / "src"), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    with log.open("wb") as file:
        process = subprocess.Popen(command, env=env, stdout=file, stderr=file, cwd=tmp_path)
        deadline = time.monotonic() + 60
        while stop is not None and b"ready" not in log.read_bytes() and time.monotonic() < deadline:
            time.sleep(0.1)
        if stop is not None:
            process.send_signal(stop)
        try:
            process.wait(timeout=90)
        finally:
            process.kill()
    found = diagnose.of_logs([str(log)])
    assert found, log.read_text()
    return found[0].cause


def test_unreadable_rows_refused_by_prepare_are_named(tmp_path: Path) -> None:
    source = tmp_path / "broken.jsonl"
    source.write_text('{"text": "ok"}\n' + '{"text": "cut\n' * 9)
    options = ("--set", f"data.sources={source}", "--set", f"data.cache_dir={tmp_path}")
    result = finlm("prepare", ROOT / "recipes/quickstart/pretrain.yaml", *options)
    (tmp_path / "x.log").write_text(result.stderr)
    assert result.returncode == 2
    assert diagnose.of_logs([str(tmp_path / "x.log")])[0].cause == "json_malformed"


TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=1"]
LAUNCHED = [
    ("host_memory_insufficient", "import os; os.kill(os.getpid(), 9)", None),
    ("sigterm_preempted", "print('ready', flush=True); import time; time.sleep(60)", signal.SIGTERM),
    ("sighup_disconnect", "print('ready', flush=True); import time; time.sleep(60)", signal.SIGHUP),
]


@pytest.mark.slow
@pytest.mark.parametrize(("cause", "script", "stop"), LAUNCHED, ids=[case[0] for case in LAUNCHED])
def test_what_the_launcher_reports_is_named(cause: str, script: str, stop: int | None, tmp_path: Path) -> None:
    (tmp_path / "rank.py").write_text(script)
    assert diagnosed(tmp_path, [*TORCHRUN, str(tmp_path / "rank.py")], stop) == cause


OVERFLOW = """
import os, deepspeed, deepspeed.ops, torch
from deepspeed.accelerator import get_accelerator
deepspeed.ops.__compatible_ops__ = {}
type(get_accelerator()).is_fp16_supported = lambda self: True
os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", LOCAL_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
deepspeed.init_distributed(dist_backend="gloo", verbose=False)
fp16 = {"enabled": True, "loss_scale": 0, "initial_scale_power": 2, "hysteresis": 1, "min_loss_scale": 1}
optimizer = {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}
settings = {"train_batch_size": 1, "fp16": fp16, "zero_optimization": {"stage": 1}, "optimizer": optimizer}
model = torch.nn.Linear(8, 8).half()
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=settings)
for _ in range(8):
    engine.backward(engine(torch.full((1, 8), 60000.0, dtype=torch.half)).float().square().sum())
    engine.step()
"""
LIBRARIES = [
    ("ds_loss_scale_min", OVERFLOW),
    (
        "transformers_arg_removed",
        "from transformers import TrainingArguments\nTrainingArguments('out', evaluation_strategy='no')",
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize(("cause", "script"), LIBRARIES, ids=[case[0] for case in LIBRARIES])
def test_what_the_installed_libraries_raise_is_named(cause: str, script: str, tmp_path: Path) -> None:
    assert diagnosed(tmp_path, [sys.executable, "-c", script]) == cause
