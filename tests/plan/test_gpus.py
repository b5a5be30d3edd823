"""GPU kinds: names people write, names nvidia-smi prints, facts that must not contradict each other."""

from __future__ import annotations

import pytest

from finlm.plan import gpus
from finlm.plan.gpus import PlanError


@pytest.mark.parametrize(
    ("printed", "kind"),
    [
        ("NVIDIA A100-SXM4-40GB", "A100-40G"),
        ("NVIDIA A100 80GB PCIe", "A100-80G"),
        ("Tesla V100-PCIE-32GB", "V100-32G"),
        ("Tesla V100-SXM2-16GB", "V100-16G"),
        ("Tesla T4", "T4"),
        ("NVIDIA A10", "A10"),
        ("NVIDIA A800-SXM4-80GB", "A800-80G"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA H100 PCIe", "H100-PCIe"),
        ("NVIDIA GH200 480GB", "GH200"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX-6000-Ada"),
        ("NVIDIA H20", "H20"),
        ("NVIDIA GeForce RTX 4090", "RTX-4090"),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "RTX-PRO-6000"),
        ("a100-40g", "A100-40G"),
    ],
)
def test_names_printed_by_nvidia_smi_find_their_kind(printed: str, kind: str) -> None:
    assert gpus.find(printed).name == kind


def test_an_unknown_kind_is_refused_with_near_names() -> None:
    with pytest.raises(PlanError) as caught:
        gpus.find("A100-20G")
    assert "A100-40G" in caught.value.evidence.splitlines()[0].partition("known:")[0]
    assert "--gpu" in caught.value.fix


def test_every_kind_is_consistent() -> None:
    wanted = {"V100-16G", "V100-32G", "T4", "A10", "A100-40G", "A100-80G", "A800-80G", "L40S", "RTX-3090", "RTX-4090"}
    wanted |= {"RTX-5090", "RTX-PRO-6000", "H100", "H200", "H800", "H20", "B200"}
    assert set(gpus.kinds()) >= wanted
    for gpu in gpus.kinds().values():
        assert gpu.has_bf16 == (gpu.bf16_flops is not None), gpu.name
        assert 2**33 < gpu.memory_bytes < 2**38, gpu.name
        assert 0.2 < gpu.mfu < 0.8, gpu.name
        assert gpu.pcie_bytes_per_second <= gpu.link_bytes_per_second < gpu.memory_bandwidth, gpu.name
        assert gpu.source, gpu.name
        assert gpus.find(gpu.name) is gpu


def test_a_kind_that_nobody_knows_is_described_by_memory_and_flops() -> None:
    with pytest.raises(PlanError):
        gpus.describe_gpu("Huge-1", memory_bytes=2**37)
    gpu = gpus.describe_gpu("Huge-1", memory_bytes=2**37, flops=1e15, capability=9.0)
    assert (gpu.memory_bytes, gpu.peak_flops, gpu.has_bf16) == (2**37, 1e15, True)
    assert gpus.describe_gpu("T4", flops=50e12).bf16_flops is None
    smaller = gpus.describe_gpu("A100-40G", memory_bytes=2**34)
    assert (smaller.memory_bytes, smaller.peak_flops) == (2**34, gpus.find("A100-40G").peak_flops)
