"""The user's own table of GPUs: what `plan --calibrate` stores and later plans read."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from finlm.base.errors import UserError
from finlm.cli.main import main
from finlm.plan import gpus, planner
from finlm.plan.plan import Plan
from finlm.recipe import cluster, recipe, shape
from finlm.train import measure_hardware

from helpers import QUICKSTART, ROOT

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
    gpu = gpus.calibrate_gpu(ROW)
    assert gpu.peak_flops == gpus.kinds()["A100-80G"].peak_flops
    # 246 of 312 TFLOP/s are the share that H200's products reach, so it gets H200's share.
    assert gpu.mfu == pytest.approx(gpus.kinds()["H200"].mfu, rel=0.01)
    assert gpu.link_bytes_per_second == gpus.kinds()["A100-80G"].link_bytes_per_second


def test_an_unknown_kind_is_all_measured() -> None:
    gpu = gpus.calibrate_gpu(ROW | {"name": "Strange 9000", "link_bytes_per_second": 40e9})
    assert gpu.peak_flops == pytest.approx(246e12 / gpus.PRODUCT_SHARE)
    assert (gpu.link_bytes_per_second, gpu.memory_bandwidth) == (40e9, 2e12)


def test_what_is_stored_is_found_by_later_plans_under_the_printed_name() -> None:
    gpus.store([gpus.calibrate_gpu(ROW)])
    gpus.store([gpus.calibrate_gpu(ROW | {"name": "Strange 9000"})])
    assert gpus.declare_calibrated() == [ROW["name"], "Strange 9000"]
    assert "calibrate" in gpus.find(str(ROW["name"])).source
    assert gpus.find("Strange 9000").fp8_flops is None


def test_what_the_command_line_says_of_a_kind_counts_more_than_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    gpus.store([gpus.calibrate_gpu(ROW | {"name": "Strange 9000"})])
    command = ["plan", str(QUICKSTART), "--gpu", "Strange 9000", "--gpu-memory", "47GiB"]
    assert main([*command, "--set", "hardware.hosts=[{name: a, slots: 1, gpu: Strange 9000}]"]) == 0
    assert " of 46.7 GiB" in capsys.readouterr().out


def test_a_broken_table_and_a_machine_without_gpus_are_the_users_to_know() -> None:
    gpus.user_file().parent.mkdir(parents=True)
    gpus.user_file().write_text("kinds: {X: {memory: 3}}")
    with pytest.raises(UserError, match="not a table of GPUs"):
        gpus.declare_calibrated()
    gpus.store([gpus.calibrate_gpu(ROW)])  # the fix that the message names
    assert gpus.declare_calibrated() == [ROW["name"]]
    with pytest.raises(UserError, match="--gpu NAME"):
        gpus.declare_described(None, "48GiB", None, None, None)
    with pytest.raises(UserError, match="--gpu-memory"):
        gpus.declare_described("X", "48 apples", 1e14, None, None)


def test_the_measurements_run_on_any_device(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, small in {"ROWS": 32, "WIDTH": 16, "DEPTH": 16, "COPIED_BYTES": 1 << 12, "SECONDS": 0.01}.items():
        monkeypatch.setattr(measure_hardware, name, small)
    monkeypatch.setattr(torch, "empty", lambda *size, pin_memory=False, **kinds: torch.zeros(*size, **kinds))
    cpu = torch.device("cpu")
    assert measure_hardware.measure_products(cpu, torch.float32) > 0
    assert measure_hardware.measure_copy_rate(cpu, cpu) > 0


ONE_H100 = ("hardware={hosts: [{name: n0, slots: 1, gpu: H100-80G, memory: 1TiB}]}", "zero.offload_optimizer=stream")


def plan_xuanyuan(*overrides: str) -> Plan:
    """XuanYuan-6B on one H100."""
    wanted = recipe.load(ROOT / "recipes/xuanyuan-6b/pretrain.yaml", (*ONE_H100, *overrides)).recipe
    return planner.make(wanted, cluster.from_hardware(wanted.hardware), shape.of(wanted, 39_424))


def test_a_finished_run_corrects_the_next_plan_for_its_gpu_kind_which_says_so() -> None:
    before = plan_xuanyuan()
    speed = before.tokens_per_second
    assert speed is not None
    for number, factor in enumerate((1.02, 1.10, 1.12)):  # the median counts
        assert gpus.remember_run(f"run-{number}", before, "pretrain", speed, speed * factor)
    gpus.declare_calibrated()
    after = plan_xuanyuan()
    assert after.tokens_per_second == pytest.approx(1.10 * speed, rel=0.01)
    (reason,) = [reason for reason in after.reasons if "finished runs" in reason]
    assert "H100" in reason and "(3, the newest run-2)" in reason
    assert gpus.remember_run("run-2", after, "sft", after.tokens_per_second, 1.10 * speed), "again, as resumed"
    assert len(gpus.runs_file().read_text(encoding="utf-8").splitlines()) == 3
    assert plan_xuanyuan("train.precision=fp16").tokens_per_second == pytest.approx(1.10 * speed, rel=0.05)


def test_a_run_that_does_not_tell_the_gpus_speed_changes_nothing() -> None:
    plan = plan_xuanyuan()
    speed = plan.tokens_per_second
    assert speed is not None
    transfers = dataclasses.replace(plan, step_seconds=plan.step_seconds | {"exposed": 10.0})
    small, fp8 = dataclasses.replace(plan, parameters=10**8), dataclasses.replace(plan, precision="fp8")
    for other, stage, measured in (
        *((each, "pretrain", speed) for each in (transfers, small, fp8)),
        *((plan, "grpo", speed), (plan, "pretrain", 0.1 * speed), (plan, "pretrain", None)),
    ):
        assert gpus.remember_run("run", other, stage, speed, measured) is None
    assert not gpus.runs_file().exists()


def test_a_damaged_list_of_runs_is_named() -> None:
    gpus.runs_file().parent.mkdir(parents=True)
    gpus.runs_file().write_text('{"kind": "H100-80G"}\n')
    with pytest.raises(UserError, match=r"runs.jsonl is not a list of finished runs"):
        gpus.declare_calibrated()


def test_a_kind_that_nobody_knows_any_more_breaks_no_plan() -> None:
    before = plan_xuanyuan()
    gpus.runs_file().parent.mkdir(parents=True)
    gpus.runs_file().write_text('{"kind": "Strange 9000", "run": "a", "mfu": 0.4}\n')
    assert before.tokens_per_second
    assert gpus.remember_run("b", before, "pretrain", before.tokens_per_second, 1.1 * before.tokens_per_second)
    assert gpus.declare_calibrated() == []
    assert any("finished runs" in reason for reason in plan_xuanyuan().reasons)
