"""Doctor's GPU checks on facts as nvidia-smi, dmesg and torch give them on machines that are not here."""

from __future__ import annotations

from typing import Any

import pytest

from finlm.doctor import gpus
from finlm.recipe.cluster import Cluster, Host

from doctor_facts import CPU_PLAN, GIB, RECIPE, Facts, changed, device, examine, gpu_plan, healthy, judge, only

CU126 = ["sm_50", "sm_60", "sm_70", "sm_75", "sm_80", "sm_86"]
CU124 = ["sm_50", "sm_60", "sm_70", "sm_75", "sm_80", "sm_86", "sm_90"]


def devices(**fields: Any) -> list[Facts]:
    """Both GPUs, the second one with other fields."""
    return [device(0), device(1) | fields]


def test_a_process_that_leaves_too_little_memory_is_named() -> None:
    process = {"pid": 470, "bytes": 110 * GIB, "name": "/bin/python3"}
    found = only(examine(changed(gpu__devices=devices(memory_free=30 * GIB, processes=[process]))))
    assert (found.check, found.level) == ("gpu-memory", "error")
    for word in ("GPU 1", "30.0 GiB free of 140.4 GiB", "needs 100.0 GiB", "/bin/python3 (pid 470, 110.0 GiB)"):
        assert word in found.evidence


def test_a_foreign_process_that_leaves_enough_memory_is_a_warning() -> None:
    process = {"pid": 470, "bytes": None, "name": "/bin/python3"}
    found = only(examine(changed(gpu__devices=devices(processes=[process]))))
    assert (found.check, found.level) == ("gpu-processes", "warning") and "/bin/python3 (pid 470)" in found.evidence


def test_what_is_wrong_with_a_gpu_that_the_run_does_not_use_is_none_of_its_business() -> None:
    full = device(2) | {"memory_free": GIB, "ecc_errors": 4}
    assert examine(changed(gpu__devices=[device(0), device(1), full])) == []
    assert examine(changed(gpu__devices=[full | {"index": 0}, device(1), device(2)], gpu__visible="1,2")) == []


def test_slots_chosen_by_include_are_the_ones_examined() -> None:
    facts = changed(gpu__devices=[device(0) | {"memory_free": GIB}, device(1), device(2)])
    host = Host("h0", 2, "H200", devices=(1, 2))
    assert judge(RECIPE, gpu_plan(), Cluster((host,)), {"h0": facts}) == []
    facts["gpu"]["visible"] = "1,2"  # chosen by the variable: the same two
    assert judge(RECIPE, gpu_plan(), Cluster((host,)), {"h0": facts}) == []
    facts["gpu"]["devices"].pop()
    assert "GPUs 2 chosen" in only(judge(RECIPE, gpu_plan(), Cluster((host,)), {"h0": facts})).evidence


def test_gpus_may_be_chosen_by_uuid_and_mig_is_left_alone() -> None:
    assert examine(changed(gpu__visible="GPU-h0-1,GPU-h0-0")) == []
    assert examine(changed(gpu__visible="MIG-1,MIG-2")) == []


def test_a_gpu_that_is_listed_twice_is_caught_before_nccl_does() -> None:
    found = only(examine(changed(gpu__visible="1,1")))
    assert found.check == "gpus" and "CUDA_VISIBLE_DEVICES=1,1" in found.evidence and "Duplicate GPU" in found.evidence


def test_two_names_of_one_machine_are_caught_by_the_gpus_uuids() -> None:
    both = Cluster((Host("h0", 2, "H200"), Host("alias", 2, "H200")))
    facts = {"h0": healthy("h0"), "alias": healthy("h0")}
    found = only(judge(RECIPE, gpu_plan("h0", "alias"), both, facts))
    assert (found.check, found.host, found.level) == ("gpus", "alias", "error")
    assert "GPU-h0-0" in found.evidence and "also h0's" in found.evidence
    facts["alias"] = healthy("h1")
    assert judge(RECIPE, gpu_plan("h0", "alias"), both, facts) == []


@pytest.mark.parametrize(
    ("fields", "level", "words"),
    [
        ({"remap_failed": True}, "error", ["GPU 1", "GPU-h0-1", "could not be replaced"]),
        ({"remap_pending": True}, "warning", ["waits to be replaced"]),
        ({"ecc_errors": 3}, "warning", ["3 uncorrectable memory error(s)"]),
    ],
)
def test_failing_memory_of_a_gpu_is_told(fields: Facts, level: str, words: list[str]) -> None:
    found = only(examine(changed(gpu__devices=devices(**fields))))
    assert (found.check, found.level) == ("gpu-health", level)
    assert all(word in found.evidence for word in words), found.evidence


def xid(number: int, age: int) -> Facts:
    return {"xid": number, "pci": "0000:3b:00", "age_seconds": age, "text": "GPU has fallen off the bus."}


def test_a_recent_hardware_xid_is_told_once_and_a_programs_own_or_an_old_one_is_not() -> None:
    found = only(examine(changed(gpu__xids=[xid(79, 7300), xid(79, 7200), xid(13, 60), xid(31, 60)])))
    assert (found.check, found.level) == ("gpu-health", "warning")
    assert found.evidence.count("Xid") == 1 and "Xid 79 on PCI 0000:3b:00, 2 hours ago" in found.evidence
    assert examine(changed(gpu__xids=[xid(79, 3 * 86400)])) == []
    assert examine(changed(gpu__xids=None)) == []


def test_bf16_needs_ampere_and_fp16_does_not() -> None:
    old = [device(index) | {"name": "Tesla V100-SXM2-32GB", "compute_capability": "7.0"} for index in (0, 1)]
    facts = changed(gpu__devices=old, torch__arch=CU126)
    found = only(examine(facts))
    assert found.check == "precision" and "Tesla V100" in found.evidence and "7.0" in found.evidence
    assert examine(facts, gpu_plan(precision="fp16")) == []


@pytest.mark.parametrize(
    ("name", "capability", "arch", "own", "fix"),
    [
        ("NVIDIA RTX PRO 6000 Blackwell", "12.0", CU124, "sm_120", "cu128 or later"),
        ("NVIDIA B200", "10.0", CU126, "sm_100", "cu128 or later"),
        ("Tesla V100-SXM2-32GB", "7.0", healthy()["torch"]["arch"], "sm_70", "cu126"),
    ],
)
def test_a_torch_without_kernels_for_the_gpu_is_told_with_the_build_to_take(
    name: str, capability: str, arch: list[str], own: str, fix: str
) -> None:
    cards = [device(index) | {"name": name, "compute_capability": capability} for index in (0, 1)]
    found = only(examine(changed(gpu__devices=cards, torch__arch=arch), gpu_plan(precision="fp16")))
    assert (found.check, found.level) == ("torch", "error")
    assert own in found.evidence and name in found.evidence and "no kernel image" in found.evidence and fix in found.fix


@pytest.mark.parametrize(
    ("capability", "arch", "runs"),
    [
        ("9.0", ["sm_80"], False),  # machine code runs within its major version only
        ("8.9", ["sm_80"], True),
        ("8.0", ["sm_86"], False),
        ("9.0", ["compute_80"], True),  # PTX is compiled for whatever comes later
        ("12.1", ["sm_120"], True),
        ("9.0", ["sm_90a"], True),
        ("10.0", ["sm_90a"], False),
    ],
)
def test_kernels_run_by_cudas_rules(capability: str, arch: list[str], runs: bool) -> None:
    assert gpus.has_kernels(capability, arch) is runs


def test_torch_that_cannot_start_cuda_is_told_in_its_own_words() -> None:
    words = "The NVIDIA driver on your system is too old (found version 12040)."
    found = only(examine(changed(torch__error=words)))
    assert (
        (found.check, found.level) == ("torch", "error") and words in found.evidence and "CUDA 13.0" in found.evidence
    )


def test_only_one_nccl_may_be_loaded() -> None:
    own = healthy()["torch"]["nccl_files"][0]
    found = only(examine(changed(torch__nccl_files=[own, "/usr/lib/x86_64-linux-gnu/libnccl.so.2.18.3"])))
    assert (found.check, found.level) == ("nccl", "error") and own in found.evidence and "2.18.3" in found.evidence


def test_a_broken_driver_is_told_also_when_the_plan_fell_back_to_cpu_ranks() -> None:
    facts = changed(gpu__devices=[], gpu__error="couldn't communicate with the NVIDIA driver")
    found = only(examine(facts, CPU_PLAN))
    assert (found.check, found.level) == ("driver", "warning") and "2 NVIDIA GPU(s)" in found.evidence
    facts["gpu"]["pci"] = 0
    assert examine(facts, CPU_PLAN) == []  # nvidia-smi on a login node without GPUs is no fault


def test_infiniband_needs_memory_that_may_be_locked() -> None:
    port = {"device": "mlx5_0", "port": "1", "link": "InfiniBand", "active": True, "rate": "400 Gb/sec (4X NDR)"}
    links = {"port": None, "peers": {}, "ssh": {}, "network": [], "infiniband": [port]}
    facts = changed(links=links, limits__memlock=[8 * 2**20, None])
    found = only(examine(facts))
    assert (found.check, found.level) == ("memlock", "error") and "8.0 MiB" in found.evidence
    facts["links"]["infiniband"] = []
    assert examine(facts) == []
