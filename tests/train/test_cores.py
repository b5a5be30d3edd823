"""Which cores a rank keeps to: those beside its GPU, and only where the host says which these are."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from finlm.train import __main__

NVIDIA_SMI = "#!/bin/sh\necho GPU-8f, 00000000:0A:00.0\necho GPU-9a, 00000000:1B:00.0\n"


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A host whose GPU 9a is at 1b:00.0; files of its PCI devices."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/nvidia-smi").write_text(NVIDIA_SMI)
    (tmp_path / "bin/nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(__main__, "DEVICES", tmp_path)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid="9a"))
    (tmp_path / "0000:1b:00.0").mkdir()
    return tmp_path / "0000:1b:00.0"


def plan(**changed: str) -> Any:
    return SimpleNamespace(**{"device": "cuda", "offload_optimizer": "stream", "offload_param": "none"} | changed)


def test_the_cores_of_a_gpus_side_are_read_from_the_host(host: Path) -> None:
    (host / "numa_node").write_text("1\n")
    (host / "local_cpulist").write_text("2-4,9,12-13\n")
    assert __main__.near_cores(__main__.bus_address("9a")) == {2, 3, 4, 9, 12, 13}
    assert __main__.near_cores(__main__.bus_address("another")) == set()


@pytest.mark.parametrize(("node", "cpus"), [("-1", "0-7"), ("0", ""), (None, "0-7"), ("0", None)])
def test_a_host_that_does_not_say_binds_nothing(host: Path, node: str | None, cpus: str | None) -> None:
    for name, text in (("numa_node", node), ("local_cpulist", cpus)):
        if text is not None:
            (host / name).write_text(f"{text}\n")
    before = os.sched_getaffinity(0)
    __main__.bind_cores(plan())
    assert os.sched_getaffinity(0) == before


def test_only_ranks_whose_states_are_moved_are_bound_and_their_threads_with_them(
    host: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = os.sched_getaffinity(0)
    one = min(before)
    (host / "numa_node").write_text("0\n")
    (host / "local_cpulist").write_text(f"{one},{max(before) + 1}\n")
    for unmoved in (plan(offload_optimizer="none"), plan(device="cpu")):
        __main__.bind_cores(unmoved)
        assert os.sched_getaffinity(0) == before
    try:
        with monkeypatch.context() as more:
            more.setattr(torch, "get_num_threads", lambda: 2)
            __main__.bind_cores(plan())
            assert os.sched_getaffinity(0) == before, "one core is not enough for two threads"
        __main__.bind_cores(plan())
        child = [sys.executable, "-c", "import os; print(os.sched_getaffinity(0))"]
        assert os.sched_getaffinity(0) == {one}, "not a core that the process may not use"
        assert subprocess.run(child, capture_output=True, text=True, check=True).stdout.strip() == f"{{{one}}}"
    finally:
        os.sched_setaffinity(0, before)
