"""Doctor: silent on healthy machines, and each fault told with its numbers and a way out."""

from __future__ import annotations

import dataclasses
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from finlm.doctor import gather, machine, preflight
from finlm.hosts.remote import probe
from finlm.recipe import recipe
from finlm.recipe.cluster import Cluster, Host

from doctor_facts import CPU_PLAN, GIB, RECIPE, Facts, changed, device, examine, gpu_plan, healthy, judge, only
from helpers import QUICKSTART


def test_a_healthy_gpu_host_gives_no_finding() -> None:
    assert examine(healthy()) == []


@pytest.mark.parametrize("offload", [("cpu", "none"), ("nvme", "nvme")])
def test_a_healthy_host_gives_no_finding_with_offload(offload: tuple[str, str]) -> None:
    assert examine(healthy(), gpu_plan(zero_stage=3, offload_optimizer=offload[0], offload_param=offload[1])) == []


def test_this_machine_gives_no_finding_for_the_quickstart(tmp_path: Path) -> None:
    here = preflight.this_machine(CPU_PLAN)
    facts = gather.gather(RECIPE, CPU_PLAN, here, tmp_path / "runs")
    assert preflight.judge(RECIPE, CPU_PLAN, here, facts) == []


def test_facts_that_could_not_be_gathered_give_no_finding() -> None:
    facts = healthy() | dict.fromkeys(
        ("python", "memory", "disks", "shm", "limits", "tools", "libaio", "gpu", "torch", "packages", "extensions")
    )
    assert examine(facts, gpu_plan(zero_stage=2, offload_optimizer="cpu")) == []


@pytest.mark.parametrize(
    ("facts", "check", "words"),
    [
        (changed(python={"version": "3.10.12", "executable": "/usr/bin/python3"}), "python", ["3.10.12", "3.11"]),
        (changed(packages__deepspeed=None), "packages", ["deepspeed==0.19.8"]),
        (changed(packages__torch="2.13.0+cpu"), "torch", ["2.13.0+cpu"]),
        (changed(gpu__devices=[device(0)]), "gpus", ["1 visible", "uses 2", "lists 1"]),
        (changed(gpu__visible="1"), "gpus", ["1 visible", "CUDA_VISIBLE_DEVICES=1"]),
        (changed(gpu__visible=""), "gpus", ["0 visible"]),
        (changed(gpu__visible="0,7,1"), "gpus", ["1 visible"]),
        (changed(gpu__devices=[], gpu__nvidia_smi=None), "gpus", ["nvidia-smi is not installed"]),
        (changed(gpu__devices=[], gpu__error="Driver/library version mismatch"), "driver", ["version mismatch"]),
        (changed(memory__available=10 * GIB), "memory", ["10.0 GiB", "128.0 GiB", "20.0 GiB"]),
        (changed(shm={"total": 64 * 2**20, "free": 60 * 2**20}), "shm", ["60.0 MiB", "64.0 MiB"]),
        (changed(limits__nofile=[256, 4096]), "open-files", ["256", "4096", "1024"]),
    ],
)
def test_one_fault_gives_one_error_with_its_numbers(facts: Facts, check: str, words: list[str]) -> None:
    found = only(examine(facts))
    assert (found.check, found.level, found.host) == (check, "error", "h0")
    assert all(word in found.evidence for word in words), found.evidence


@pytest.mark.parametrize(
    ("facts", "check", "words"),
    [
        (changed(packages__numpy="2.0.0"), "packages", ["numpy 2.0.0", "pinned: 2."]),
        (changed(packages__torch="2.10.0"), "packages", ["torch 2.10.0"]),
        (changed(**{"packages__nvidia-nccl-cu12": "2.26.2"}), "nccl", ["cu12 2.26.2", "cu13 2.28.9"]),
        (changed(shm={"total": 64 * 2**20, "free": 64 * 2**20}), "shm", ["Docker"]),
    ],
)
def test_what_may_work_is_only_a_warning(facts: Facts, check: str, words: list[str]) -> None:
    found = only(examine(facts))
    assert (found.check, found.level) == (check, "warning")
    assert all(word in found.evidence for word in words), found.evidence


def test_memory_that_a_recipe_states_over_what_the_host_shows_is_only_a_warning() -> None:
    little = {"h0": changed(memory={"total": 16 * GIB, "available": 15 * GIB, "cgroup_limit": None})}
    measured, stated = (Cluster((Host("h0", 2, "H200", size * GIB),)) for size in (16, 200))
    found = only(judge(RECIPE, gpu_plan(), measured, little))
    assert found.level == "error" and "hardware.hosts[].memory" in found.fix
    found = only(judge(RECIPE, gpu_plan(), stated, little))
    assert found.level == "warning" and "planned for 200.0 GiB, as hardware.hosts[].memory says" in found.evidence


@pytest.mark.parametrize("version", ["2.11.0+cu130", "2.12.1", "2.13.0+cu126"])
def test_torch_may_be_any_version_from_2_11_to_2_13(version: str) -> None:
    assert examine(changed(packages__torch=version)) == []


def test_the_disk_must_hold_one_checkpoint_more_than_are_kept() -> None:
    plan = gpu_plan(parameters=7_000_000_000)
    need = 3 * 14 * plan.parameters  # keep_last 2, one being written; bf16: 14 bytes a parameter
    place = healthy()["disks"]["run"]
    assert examine(changed(disks={"run": place | {"free": need}}), plan) == []
    found = only(examine(changed(disks={"run": place | {"free": need - 1}}), plan))
    assert found.check == "disk" and "3 checkpoints of 91.3 GiB" in found.evidence
    kept = place | {"free": need // 3, "checkpoint_bytes": 2 * need // 3 + 1}
    assert examine(changed(disks={"run": kept}), plan) == []
    assert only(examine(changed(disks={"run": place | {"writable": False}}), plan)).check == "disk"
    found = only(examine(changed(disks={"run": place | {"is_directory": False}}), plan))
    assert found.level == "error" and "runs is a file" in found.evidence


def test_the_tmpfs_must_hold_the_checkpoints_in_memory() -> None:
    plan = dataclasses.replace(gpu_plan(), host_bytes_items={"checkpoints in memory": 8 * GIB})
    place = healthy()["disks"]["run"] | {"path": "/dev/shm"}

    def disks(free: int, kept: int) -> Facts:
        return changed(disks={"memory": place | {"free": free, "checkpoint_bytes": kept}})

    assert examine(disks(8 * GIB, 0), plan) == []
    found = only(examine(disks(8 * GIB - 1, 0), plan))
    assert (found.check, found.level) == ("memory", "error") and "8.0 GiB needed" in found.evidence
    assert "checkpoint.memory_directory" in found.fix
    assert examine(disks(4 * GIB, 4 * GIB), plan) == [], "the former launch's checkpoint is one of the two"
    assert examine(disks(3 * GIB, 5 * GIB), plan), "but not more of other runs"


def test_a_host_of_several_needs_room_for_its_own_share_only() -> None:
    plan = gpu_plan("h0", "h1", parameters=7_000_000_000)
    disk = healthy()["disks"]["run"] | {"free": 3 * 14 * plan.parameters // 2}
    facts = {name: changed(name, disks={"run": disk}) for name in ("h0", "h1")}
    both = Cluster((Host("h0", 2, "H200"), Host("h1", 2, "H200")))
    assert judge(RECIPE, plan, both, facts) == []
    facts["h0"]["is_here"] = True
    found = only(judge(RECIPE, plan, both, facts))  # 2 x 45.6 GiB, 45.6 GiB of h1's and 13 GiB of weights
    assert (found.check, found.host) == ("disk", "h0") and "149.9 GiB needed for 2 checkpoints" in found.evidence
    assert "the other hosts' parts of the last and the export" in found.evidence


@pytest.mark.parametrize(
    ("tool", "words"), [("g++", "apt-get install g++"), ("ninja", "requirements.txt"), ("nvcc", "CUDA_HOME")]
)
def test_offload_needs_a_compiler_and_other_plans_do_not(tool: str, words: str) -> None:
    facts = changed(**{f"tools__{tool}": None})
    found = only(examine(facts, gpu_plan(zero_stage=2, offload_optimizer="cpu")))
    assert (found.check, found.level) == ("compiler", "error")
    assert "cpu_adam" in found.evidence and tool in found.evidence and words in found.fix
    assert examine(facts, gpu_plan(compiled=False)) == []
    prebuilt = changed(**{f"tools__{tool}": None, "extensions__prebuilt": ["cpu_adam"]})
    assert examine(prebuilt, gpu_plan(zero_stage=2, offload_optimizer="cpu", compiled=False)) == []


def test_compiled_layers_need_a_c_compiler() -> None:
    found = only(examine(changed(**{"tools__g++": None}), gpu_plan(compiled=True)))
    assert found.check == "compiler" and "train.compile: false" in found.fix


def test_float8_and_4_bits_need_torchao_and_adapters_need_peft() -> None:
    facts = changed(packages__torchao=None, packages__peft=None)
    assert examine(facts, gpu_plan()) == []
    found = only(examine(facts, gpu_plan(precision="fp8")))
    assert found.check == "packages" and found.evidence.startswith("not installed: torchao==")
    adapters = recipe.load(QUICKSTART.with_name("sft.yaml"), ["lora={quantize: nf4}"]).recipe
    found = only(examine(facts, wanted=adapters))
    assert found.evidence.startswith("not installed: peft==") and "torchao==" in found.evidence


def test_a_host_is_asked_for_every_package_that_a_plan_may_need() -> None:
    assert {*machine.ALL_STAGES, "peft", "torchao"} <= set(probe.PACKAGES)


def test_a_ninja_off_the_path_is_not_enough() -> None:
    facts = changed(tools__ninja={"path": "/v/bin/ninja", "version": "1.13", "on_path": False})
    found = only(examine(facts, gpu_plan(zero_stage=2, offload_optimizer="cpu")))
    assert "/v/bin/ninja" in found.evidence and "PATH" in found.evidence


def test_nvme_needs_libaio_and_room() -> None:
    plan = gpu_plan(zero_stage=3, offload_optimizer="nvme", offload_param="nvme", parameters=7_000_000_000)
    assert only(examine(changed(libaio=False), plan)).check == "libaio"
    full = healthy()["disks"]["run"] | {"path": "/nvme", "free": 50 * GIB}
    found = only(examine(changed(disks={"nvme": full}), plan))
    assert found.check == "nvme" and "50.0 GiB" in found.evidence and "91.3 GiB" in found.evidence


def lock(**fields: Any) -> Facts:
    return {"path": "/c/torch_extensions/py311_cpu/cpu_adam/lock", "age_seconds": 40, "held": False} | fields


def test_a_stale_build_lock_is_named_with_the_command_that_removes_it() -> None:
    offload = gpu_plan(zero_stage=2, offload_optimizer="cpu")
    found = only(examine(changed(extensions__locks=[lock()]), offload))
    assert (found.check, found.level, found.fix) == ("build-lock", "error", f"`rm {lock()['path']}`")
    assert only(examine(changed(extensions__locks=[lock()]))).level == "warning"


@pytest.mark.parametrize(
    "extensions",
    [
        {"locks": [lock(held=True)], "compilers": [], "network": False, "prebuilt": []},
        {"locks": [lock()], "compilers": [{"pid": 7, "name": "cc1plus"}], "network": False, "prebuilt": []},
        {"locks": [lock()], "compilers": [], "network": True, "prebuilt": []},
    ],
)
def test_a_lock_of_a_build_that_runs_is_left_alone(extensions: Facts) -> None:
    assert examine(changed(extensions=extensions), gpu_plan(zero_stage=2, offload_optimizer="cpu")) == []


def test_cpu_ranks_need_neither_gpu_nor_shm_nor_compiler() -> None:
    facts = changed(shm={"total": 64 * 2**20, "free": 0}, gpu__devices=[], gpu__nvidia_smi=None, gpu__pci=0)
    facts["tools"] = dict.fromkeys(("g++", "ninja", "nvcc"))
    assert examine(facts, CPU_PLAN) == []


def test_errors_come_before_warnings_and_findings_are_json() -> None:
    findings = examine(changed(packages__numpy="2.0.0", limits__nofile=[10, 10]))
    assert [one.level for one in findings] == ["error", "warning"]
    assert set(json.loads(json.dumps(dataclasses.asdict(findings[0])))) == {"check", "host", "level", "evidence", "fix"}


def test_findings_are_shown_with_evidence_and_fix_on_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    preflight.show(examine(changed(limits__nofile=[10, 10])))
    shown = capsys.readouterr()
    assert shown.err == ""
    for word in ("error: open-files on h0", "evidence: 10 open files", "fix:      `ulimit", "1 error(s), 0 warning(s)"):
        assert word in shown.out


def test_pins_are_those_of_requirements_txt() -> None:
    pins = machine.pins()
    assert pins["deepspeed"] == "0.19.8" and pins["ruamel.yaml"] == "0.19.1"
    assert set(machine.ALL_STAGES) <= set(pins)


def test_a_real_stale_lock_is_found_on_this_machine(tmp_path: Path) -> None:
    (tmp_path / "cpu_adam").mkdir()
    (tmp_path / "cpu_adam/lock").touch()
    wanted = RECIPE.model_copy(update={"env": {"TORCH_EXTENSIONS_DIR": str(tmp_path)}})
    facts = gather.gather(wanted, CPU_PLAN, preflight.this_machine(CPU_PLAN), tmp_path)["localhost"]
    if facts.extensions and facts.extensions.compilers:
        pytest.skip("a compiler runs on this machine, so its locks may be alive")
    plan = dataclasses.replace(CPU_PLAN, offload_optimizer="cpu")
    found = only(preflight.judge(wanted, plan, preflight.this_machine(CPU_PLAN), {"localhost": facts}))
    assert found.check == "build-lock" and str(tmp_path / "cpu_adam/lock") in found.evidence
    subprocess.run(["bash", "-c", found.fix.strip("`")], check=True)
    assert not (tmp_path / "cpu_adam/lock").exists()
