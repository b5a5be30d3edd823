"""The user's own table of GPUs: what `plan --calibrate` stores and later plans read."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from finlm.base.errors import UserError
from finlm.cli import main
from finlm.plan import calibration, gpus
from finlm.train import calibrate

from helpers import QUICKSTART

ROW = {
    "name": "NVIDIA A100-SXM4-80GB",
    "host": "h",
    "torch": "2",
    "memory_bytes": 80 * 2**30,
    "capability": 8.0,
    "products": {"bf16": 246e12, "fp16": 246e12, "fp32": 19e12},
    "copy_bytes_per_second": 1.8e12,
    "pcie_bytes_per_second": 20e9,
    "link_bytes_per_second": None,
}


@pytest.fixture(autouse=True)
def _apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setattr(gpus, "_declared", {})
    gpus.find.cache_clear()


def test_a_known_kind_keeps_its_peak_and_gets_the_share_it_reaches() -> None:
    gpu = calibration.calibrated(ROW)
    assert gpu.peak_flops == gpus.kinds()["A100-80G"].peak_flops
    # 246 of 312 TFLOP/s are the share that H200's products reach, so it gets H200's share.
    assert gpu.mfu == pytest.approx(gpus.kinds()["H200"].mfu, rel=0.01)
    assert gpu.link_bytes_per_second == gpus.kinds()["A100-80G"].link_bytes_per_second


def test_an_unknown_kind_is_all_measured() -> None:
    gpu = calibration.calibrated(ROW | {"name": "Strange 9000", "link_bytes_per_second": 40e9})
    assert gpu.peak_flops == pytest.approx(246e12 / calibration.PRODUCT_SHARE)
    assert (gpu.link_bytes_per_second, gpu.memory_bandwidth) == (40e9, 2e12)


def test_what_is_stored_is_found_by_later_plans_under_the_printed_name() -> None:
    calibration.store([calibration.calibrated(ROW)])
    calibration.store([calibration.calibrated(ROW | {"name": "Strange 9000"})])
    assert calibration.read() == [ROW["name"], "Strange 9000"]
    assert "calibrate" in gpus.find(str(ROW["name"])).source
    assert gpus.find("Strange 9000").fp8_flops is None


def test_what_the_command_line_says_of_a_kind_counts_more_than_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    calibration.store([calibration.calibrated(ROW | {"name": "Strange 9000"})])
    command = ["plan", str(QUICKSTART), "--gpu", "Strange 9000", "--gpu-memory", "47GiB"]
    assert main([*command, "--set", "hardware.hosts=[{name: a, slots: 1, gpu: Strange 9000}]"]) == 0
    assert " of 47.0 GiB" in capsys.readouterr().err


def test_a_broken_table_and_a_machine_without_gpus_are_the_users_to_know() -> None:
    calibration.path().parent.mkdir(parents=True)
    calibration.path().write_text("kinds: {X: {memory: 3}}")
    with pytest.raises(UserError, match="not a table of GPUs"):
        calibration.read()
    calibration.store([calibration.calibrated(ROW)])  # the fix that the message names
    assert calibration.read() == [ROW["name"]]
    with pytest.raises(UserError, match="--gpu NAME"):
        calibration.describe(None, "48GiB", None, None, None)
    with pytest.raises(UserError, match="--gpu-memory"):
        calibration.describe("X", "48 apples", 1e14, None, None)


def test_the_measurements_run_on_any_device(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, small in {"ROWS": 32, "WIDTH": 16, "DEPTH": 16, "COPIED_BYTES": 1 << 12, "SECONDS": 0.01}.items():
        monkeypatch.setattr(calibrate, name, small)
    monkeypatch.setattr(torch, "empty", lambda *size, pin_memory=False, **kinds: torch.zeros(*size, **kinds))
    cpu = torch.device("cpu")
    assert calibrate.products(cpu, torch.float32) > 0
    assert calibrate.copied(cpu, cpu) > 0
