"""GPU facts from nvidia-smi, the kernel's log and torch, each of which may know nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from finlm.doctor import gather
from finlm.hosts.remote import gpu
from finlm.recipe import cluster
from finlm.recipe import recipe as recipes

# Recorded from an H200, driver 580.159.04; the second device as a MIG parent or an old card answers.
SMI = """#!/bin/sh
case "$1" in
  --query-gpu=index,name*) echo "0, NVIDIA H200, GPU-c3f8, 143771, 4715, 138442, 580.159.04"
                           echo "1, NVIDIA H200, GPU-aaaa, [N/A], [N/A], [N/A], 580.159.04" ;;
  --query-gpu=index,compute_cap) echo "0, 9.0"; echo "1, [N/A]" ;;
  --query-gpu=index,ecc*) echo "0, 3, Yes, No"; echo "1, [N/A], [N/A], [N/A]" ;;
  *) echo "GPU-c3f8, 470, 4706, /opt/x/python3" ;;
esac
"""
OLD = """#!/bin/sh
case "$1" in
  --query-gpu=index,name*) echo "0, Tesla V100-SXM2-32GB, GPU-7777, 32510, 0, 32510, 470.82.01" ;;
  *) echo 'Field "compute_cap" is not a valid field to query.'; exit 2 ;;
esac
"""
DMESG = """#!/bin/sh
echo "[    1.000001] NVRM: loading NVIDIA UNIX x86_64 Kernel Module  580.159.04"
echo "[   12.345678] NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus."
"""


def run(directory: Path, **scripts: str) -> dict[str, Any]:
    """The probe's document where these programs come first on the PATH."""
    for name, script in scripts.items():
        path = directory / name.replace("_", "-")
        path.write_text(script)
        path.chmod(0o755)
    env = os.environ | {"PATH": f"{directory}{os.pathsep}{os.environ['PATH']}", "CUDA_VISIBLE_DEVICES": "1"}
    command = [sys.executable, str(gpu.__file__)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    document: dict[str, Any] = json.loads(done.stdout)
    assert document["errors"] == {}
    facts: dict[str, Any] = document["gpu"]
    return facts


def test_gpus_their_health_and_their_processes_are_read_and_na_is_null(tmp_path: Path) -> None:
    gpu = run(tmp_path, nvidia_smi=SMI, dmesg=DMESG)
    first, second = gpu["devices"]
    assert first["memory_free"] == 138442 * 2**20
    assert first["compute_capability"] == "9.0"
    assert (first["ecc_errors"], first["remap_pending"], first["remap_failed"]) == (3, True, False)
    assert first["processes"] == [{"pid": 470, "bytes": 4706 * 2**20, "name": "/opt/x/python3"}]
    for name in ("memory_free", "compute_capability", "ecc_errors", "remap_pending"):
        assert second[name] is None
    assert gpu["visible"] == "1" and gpu["error"] is None
    (xid,) = gpu["xids"]
    assert (xid["xid"], xid["pci"]) == (79, "0000:3b:00") and "fallen off the bus" in xid["text"]


def test_an_old_driver_that_does_not_know_a_field_still_lists_its_gpus(tmp_path: Path) -> None:
    (one,) = run(tmp_path, nvidia_smi=OLD)["devices"]
    assert one["name"] == "Tesla V100-SXM2-32GB" and one["compute_capability"] is None and one["ecc_errors"] is None


def test_the_drivers_error_is_kept_word_for_word(tmp_path: Path) -> None:
    words = "Failed to initialize NVML: Driver/library version mismatch"
    gpu = run(tmp_path, nvidia_smi=f'#!/bin/sh\necho "{words}"\nexit 18\n')
    assert gpu["error"] == words and gpu["devices"] == []


def test_torch_tells_its_version_and_why_it_cannot_be_imported(tmp_path: Path) -> None:
    said = gpu.gather_facts(with_torch=True).torch
    assert said is not None and said.version.startswith("2.") and isinstance(said.arch, list)
    (tmp_path / "torch.py").write_text("raise ImportError('libcudart.so.13: cannot open shared object file')\n")
    env = os.environ | {"PYTHONPATH": str(tmp_path)}
    command = [sys.executable, str(gpu.__file__), "--torch"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    document = json.loads(done.stdout)
    assert document["torch"] is None and "libcudart.so.13" in document["errors"]["torch"]


def test_the_process_that_asks_is_no_stranger_on_its_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = f'*) echo "GPU-c3f8, 470, 4706, /opt/x/python3"; echo "GPU-c3f8, {os.getpid()}, 500, python3" ;;'
    smi = tmp_path / "nvidia-smi"
    smi.write_text(SMI.replace('*) echo "GPU-c3f8, 470, 4706, /opt/x/python3" ;;', own))
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    recipe = recipes.load("recipes/quickstart/pretrain.yaml").recipe
    (facts,) = gather.gather_hardware(recipe, cluster.local(2)).values()
    assert [process.pid for process in facts.devices[0].processes] == [470]
