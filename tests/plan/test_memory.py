"""Predicted memory against what was measured on H200s (XuanYuan-6B, sequence 2048, DeepSpeed 0.19.8)."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from finlm.plan import memory
from finlm.plan.memory import GIB, Layout
from finlm.recipe.shape import ModelShape

XUANYUAN_6B = ModelShape(hidden=4096, layers=30, heads=32, kv_heads=32, ffn=11008, vocab=39438, tied=False)
BASE = Layout(
    device="cuda",
    precision="bf16",
    zero_stage=1,
    offload_optimizer="none",
    offload_param="none",
    recompute="none",
    micro_batch=2,
    sequence_length=2048,
    world_size=1,
)
OFFLOADED: dict[str, Any] = {
    "zero_stage": 3,
    "offload_optimizer": "cpu",
    "offload_param": "cpu",
    "recompute": "full",
    "micro_batch": 8,
}
ANCHORS: dict[str, tuple[float, dict[str, Any]]] = {
    "reference recipe": (131, {"recompute": "full", "micro_batch": 6}),
    "compiled layers, chunked loss": (131, {"kernels": "fused"}),
    "ZeRO-1 on four": (104, {"world_size": 4, "micro_batch": 8, "kernels": "fused"}),
    "ZeRO-3 on four": (114, {"world_size": 4, "micro_batch": 8, "zero_stage": 3}),
    "ZeRO-3, everything offloaded": (12, OFFLOADED),
}


def predicted(shape: ModelShape = XUANYUAN_6B, **changes: Any) -> dict[str, int]:
    return memory.gpu_items(shape, dataclasses.replace(BASE, **changes))


@pytest.mark.parametrize("name", ANCHORS)
def test_the_allocated_peak_is_within_five_percent_of_the_measured_one(name: str) -> None:
    measured, changes = ANCHORS[name]
    assert memory.allocated_bytes(predicted(**changes)) / GIB == pytest.approx(measured, rel=0.05)


def test_bf16_without_master_weights_in_plain_pytorch_confirms_the_activations() -> None:
    # 94 GiB measured with pure bf16 AdamW: 8 bytes a parameter, micro-batch 6, compiled, logits in one piece.
    layout = dataclasses.replace(BASE, micro_batch=6, kernels="fused")
    states = 8 * XUANYUAN_6B.parameters
    activations = memory.activation_bytes(XUANYUAN_6B, layout)
    assert (states + activations) / GIB == pytest.approx(94, rel=0.05)


def test_one_gpu_needs_22_bytes_a_parameter_in_the_optimizer_step() -> None:
    items = predicted(recompute="full", micro_batch=1)
    assert memory.allocated_bytes(items) == pytest.approx(22 * XUANYUAN_6B.parameters, rel=1e-6)


def test_activations_are_132_kb_a_token_and_layer_when_fused() -> None:
    assert memory.layer_activation_bytes(XUANYUAN_6B, "fused", 2) == pytest.approx(132_000, rel=0.01)
    assert memory.layer_activation_bytes(XUANYUAN_6B, "eager", 2) > 180_000


def test_each_zero_stage_and_offload_needs_less_device_memory() -> None:
    ladder: list[dict[str, Any]] = [
        {"zero_stage": 0},
        {"zero_stage": 1},
        {"zero_stage": 2},
        {"zero_stage": 3},
        {"zero_stage": 3, "offload_optimizer": "cpu"},
        {"zero_stage": 3, "offload_optimizer": "cpu", "offload_param": "cpu"},
    ]
    sizes = [sum(predicted(world_size=8, recompute="full", **step).values()) for step in ladder]
    assert sizes == sorted(sizes, reverse=True)
    assert len(set(sizes)) == len(sizes)


def test_what_leaves_the_device_arrives_on_the_host() -> None:
    layout = dataclasses.replace(BASE, zero_stage=3, world_size=4, offload_optimizer="cpu", offload_param="cpu")
    none = dataclasses.replace(layout, offload_optimizer="none", offload_param="none")
    host = memory.host_items(XUANYUAN_6B, layout, 2)
    extra = sum(host.values()) - sum(memory.host_items(XUANYUAN_6B, none, 2).values())
    # Two of four ranks: half of 4 master + 8 Adam + 4 gradients + 2 staging + 2 weights bytes a parameter.
    assert extra == pytest.approx(20 * XUANYUAN_6B.parameters / 2, rel=1e-6)


def test_nvme_keeps_the_states_out_of_host_memory() -> None:
    cpu = dataclasses.replace(BASE, zero_stage=3, offload_optimizer="cpu", offload_param="cpu")
    nvme = dataclasses.replace(cpu, offload_optimizer="nvme", offload_param="nvme")
    assert sum(memory.host_items(XUANYUAN_6B, nvme, 1).values()) < 0.6 * sum(
        memory.host_items(XUANYUAN_6B, cpu, 1).values()
    )


def test_the_buffers_never_exceed_the_model() -> None:
    sizes = memory.buckets(3, "none", 1000, 64)
    assert all(getattr(sizes, name) <= 1000 for name in ("reduce", "allgather", "prefetch", "persistence", "live"))


def test_the_items_are_never_negative() -> None:
    for stage in (0, 1, 2, 3):
        for precision in ("bf16", "fp32"):
            assert min(predicted(zero_stage=stage, precision=precision).values()) >= 0
