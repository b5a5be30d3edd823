"""Predicted memory against what was measured on H200s (XuanYuan-6B, sequence 2048, DeepSpeed 0.19.8)."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from deepspeed.runtime.zero.linear import zero3_linear_wrap
from peft import LoraConfig, get_peft_model
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

from finlm.admit import record
from finlm.plan import host_memory, memory, plan
from finlm.plan.memory import GIB, Layout
from finlm.recipe.shape import ModelShape

XUANYUAN_6B = ModelShape(hidden=4096, layers=30, heads=32, kv_heads=32, ffn=11008, vocab=39552, tied=False)  # padded
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
    compiled=True,
)
OFFLOADED: dict[str, Any] = {
    "zero_stage": 3,
    "offload_optimizer": "cpu",
    "offload_param": "cpu",
    "recompute": "full",
    "micro_batch": 8,
}
# torch.cuda.max_memory_allocated in GiB, the largest of all ranks.
ANCHORS: dict[str, tuple[float, dict[str, Any]]] = {
    "micro-batch 4": (121.9, {"micro_batch": 4}),
    "micro-batch 6": (135.1, {"micro_batch": 6}),
    "float8": (129.5, {"micro_batch": 6, "precision": "fp8"}),
    "selective recompute": (127.9, {"micro_batch": 8, "recompute": "selective"}),
    "ZeRO-1 on two": (115.4, {"world_size": 2, "micro_batch": 8}),
    "ZeRO-1 on four": (122.5, {"world_size": 4, "micro_batch": 12}),
    "ZeRO-3 on two": (103.3, {"world_size": 2, "micro_batch": 8, "zero_stage": 3}),
    "ZeRO-3 on four": (108.0, {"world_size": 4, "micro_batch": 12, "zero_stage": 3}),
}


def predicted(shape: ModelShape = XUANYUAN_6B, **changes: Any) -> dict[str, int]:
    return memory.gpu_items(shape, dataclasses.replace(BASE, **changes))


@pytest.mark.parametrize("name", ANCHORS)
def test_the_allocated_peak_is_within_four_percent_of_the_measured_one(name: str) -> None:
    measured, changes = ANCHORS[name]
    assert memory.allocated_bytes(predicted(**changes)) / GIB == pytest.approx(measured, rel=0.04)


def test_the_optimizer_step_holds_one_group_in_fp32() -> None:
    # A 16-bit copy of a group beside all gradients; of all parameters and in fp32 it would be 131 GiB, as it once was.
    items = predicted(recompute="full", micro_batch=1)
    group = 2
    step = (16 * XUANYUAN_6B.parameters + group * plan.OPTIMIZER_GROUP) / GIB
    assert memory.allocated_bytes(items) / GIB == pytest.approx(step, rel=0.01)


@pytest.mark.parametrize(("stage", "ranks"), [(2, 1), (2, 4), (3, 4)])
def test_fp32_sums_of_gradients_take_two_bytes_more_for_a_ranks_share(stage: int, ranks: int) -> None:
    each = (predicted(zero_stage=stage, world_size=ranks, fp32_gradients=is_fp32) for is_fp32 in (False, True))
    sums, more = (memory.allocated_bytes(items) for items in each)
    assert more - sums == pytest.approx(2 * XUANYUAN_6B.parameters / ranks, rel=0.01)


def test_a_rank_keeps_the_gradients_of_every_matrix_it_has_a_part_of() -> None:
    tiny = ModelShape(hidden=4, layers=1, heads=1, kv_heads=1, ffn=8, vocab=10, tied=False)
    sizes = [40, 16, 16, 16, 16, 32, 32, 32, 4, 4, 4, 40]
    assert (tiny.sizes, sum(sizes)) == (sizes, tiny.parameters)
    assert memory.most_reduced(tiny, 10**9, 1) == tiny.parameters
    # Halves of 126 elements: the first ends in the first of three matrices of the feed-forward block.
    assert memory.most_reduced(tiny, 10**9, 2) == sum(sizes[5:])
    # Each matrix a group, each rank a half of it and the whole gradient.
    assert memory.most_reduced(tiny, 1, 2) == tiny.parameters
    # Groups of 70 million on four H200s: 51.16 GB allocated, 43.03 if each rank kept a quarter.
    beyond = memory.most_reduced(XUANYUAN_6B, 70_000_000, 4) - XUANYUAN_6B.parameters / 4
    assert 2 * beyond == pytest.approx(51.16e9 - 43.03e9, rel=0.06)


def test_activations_are_110_kb_a_token_and_layer_when_compiled() -> None:
    assert memory.layer_activation_bytes(XUANYUAN_6B, BASE) == pytest.approx(109_600, rel=0.01)
    eager = dataclasses.replace(BASE, compiled=False)
    assert memory.layer_activation_bytes(XUANYUAN_6B, eager) > 180_000


@pytest.mark.parametrize(
    ("adapted", "dropout"), [(("q_proj", "v_proj"), 0.1), (("q_proj", "v_proj"), 0.0), (("o_proj", "down_proj"), 0.0)]
)
def test_deepspeeds_linear_keeps_the_inputs_of_frozen_matrices_under_zero_3(
    adapted: tuple[str, ...], dropout: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = ModelShape(hidden=64, layers=1, heads=4, kv_heads=2, ffn=176, vocab=128, tied=True)
    names = {"hidden_size": 64, "num_hidden_layers": 1, "intermediate_size": 176, "vocab_size": 128}
    config = LlamaConfig(**names, num_attention_heads=4, num_key_value_heads=2)
    kept, planned = {}, {}
    for stage, linear in ((1, functional.linear), (3, zero3_linear_wrap)):
        torch.manual_seed(0)
        lora = LoraConfig(r=4, lora_dropout=dropout, target_modules=list(adapted))
        model = get_peft_model(LlamaForCausalLM(config).bfloat16(), lora, autocast_adapter_dtype=False).train()
        decoder, states = model.base_model.model.model, torch.randn(1, 32, 64).bfloat16().requires_grad_()
        monkeypatch.setattr(functional, "linear", linear)
        positions = decoder.rotary_emb(states, torch.arange(32)[None])
        with record.collect_saved({part.untyped_storage().data_ptr() for part in model.parameters()}) as saved:
            decoder.layers[0](states, position_embeddings=positions, attention_mask=None)
        kept[stage] = sum(saved.values()) / 32
        layout = dataclasses.replace(
            BASE, zero_stage=stage, compiled=False, trainable=1, adapted=adapted, has_dropout=dropout > 0, rank=4
        )
        planned[stage] = memory.layer_activation_bytes(shape, layout)
    assert planned[3] - planned[1] == kept[3] - kept[1] > 0


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


def test_a_streamed_optimizer_leaves_weights_gradients_and_activations_on_the_gpu() -> None:
    # XuanYuan-6B on one H200, LOGBOOK.md of 2026-11-22: 37.1 GiB in bf16, 35.3 in float8.
    layout = {"offload_optimizer": "stream", "micro_batch": 2, "compiled": True}
    measured = {"bf16": 37.1, "fp8": 35.3}
    for precision, gib in measured.items():
        items = predicted(precision=precision, **layout)
        assert memory.allocated_bytes(items) / GIB == pytest.approx(gib, rel=0.02), precision
    moved = host_memory.host_items(XUANYUAN_6B, dataclasses.replace(BASE, offload_optimizer="stream"), 1)
    assert sum(moved.values()) - sum(host_memory.host_items(XUANYUAN_6B, BASE, 1).values()) == pytest.approx(
        12 * XUANYUAN_6B.parameters
    )


def test_what_leaves_the_device_arrives_on_the_host() -> None:
    layout = dataclasses.replace(BASE, zero_stage=3, world_size=4, offload_optimizer="cpu", offload_param="cpu")
    none = dataclasses.replace(layout, offload_optimizer="none", offload_param="none")
    host = host_memory.host_items(XUANYUAN_6B, layout, 2)
    extra = sum(host.values()) - sum(host_memory.host_items(XUANYUAN_6B, none, 2).values())
    # Two of four ranks: half of 4 master + 8 Adam + 4 and 2 gradients + 2 x 2 weights bytes a parameter, and what
    # the allocator of pinned memory adds.
    assert 1.0 < extra / (22 * XUANYUAN_6B.parameters / 2) < 1.4


def test_nvme_keeps_the_states_out_of_host_memory() -> None:
    cpu = dataclasses.replace(BASE, zero_stage=3, offload_optimizer="cpu", offload_param="cpu")
    nvme = dataclasses.replace(cpu, offload_optimizer="nvme", offload_param="nvme")
    assert sum(host_memory.host_items(XUANYUAN_6B, nvme, 1).values()) < 0.6 * sum(
        host_memory.host_items(XUANYUAN_6B, cpu, 1).values()
    )


def test_the_buffers_never_exceed_the_model() -> None:
    tiny = ModelShape(hidden=8, layers=1, heads=1, kv_heads=1, ffn=16, vocab=20, tied=True)
    sizes = memory.bucket_sizes(3, "none", tiny)
    assert all(getattr(sizes, name) <= 1000 for name in ("reduce", "allgather", "prefetch", "persistence", "live"))


def test_the_items_are_never_negative() -> None:
    for stage in (0, 1, 2, 3):
        for precision in ("bf16", "fp32"):
            assert min(predicted(zero_stage=stage, precision=precision).values()) >= 0
