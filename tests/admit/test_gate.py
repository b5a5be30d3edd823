"""The gate: every type that finlm claims passes its cells again, and a model that would be trained wrongly does not."""

from __future__ import annotations

import dataclasses
import functools
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING

from finlm.admit import cells, command, record
from finlm.base import files
from finlm.base.errors import UserError
from finlm.plan import planner
from finlm.plan.plan import Plan
from finlm.recipe import cluster, recipe, shape
from finlm.recipe.models import refusals, traits
from finlm.recipe.schema import Recipe
from finlm.train import batches
from finlm.train.model import kernels
from train.test_documents import attend_by_definition

from helpers import QUICKSTART, ROOT

SHIPPED = sorted(traits.shipped())
ADMITTED = [name for name in SHIPPED if not traits.shipped()[name].failing]


@functools.cache
def small_run() -> tuple[Recipe, Plan]:
    """The recipe whose plan the cells change."""
    loaded = recipe.load(QUICKSTART, ("hardware.hosts=[{name: localhost, slots: 1}]",)).recipe
    return loaded, planner.make(loaded, cluster.from_hardware(loaded.hardware), shape.of(loaded))


def case(model_type: str, **changes: Any) -> cells.Case:
    """A type's case by its class's own configuration."""
    config = command.read_config(model_type)[0] | changes
    row = traits.shipped().get(model_type) or record.record(model_type)
    return cells.make_case(config, row, *small_run())


@pytest.mark.parametrize("model_type", SHIPPED)
def test_the_shipped_row_is_what_transformers_has(model_type: str) -> None:
    row = traits.shipped()[model_type]
    assert dataclasses.replace(row, cells={}, held={}) == record.record(model_type)


@pytest.mark.parametrize("model_type", ADMITTED)
def test_an_admitted_type_passes(model_type: str) -> None:
    at = case(model_type)
    wrong = {name: why for name, cell in cells.CELLS.items() if name != "compiled" and (why := cell(at))}
    assert not wrong


SCALED = {
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 32768},
    "linear": {"factor": 4.0},
}


@pytest.mark.parametrize("kind", SCALED)
def test_a_scaled_rope_passes_and_is_not_the_plain_one(kind: str) -> None:
    rope = {"rope_type": kind, "rope_theta": 500000.0, **SCALED[kind]}
    scaled, plain = case("llama", rope_parameters=rope, head_dim=160), case("llama", head_dim=160)
    assert scaled.small.rope_parameters["rope_type"] == kind and scaled.small.head_dim == cells.HEAD
    for name in ("loss", "packed rows", "parameters"):
        assert cells.CELLS[name](scaled) == ""
    assert abs(scaled.expected[0] - plain.expected[0]) > 1e-3


def test_a_window_counts_and_what_ignores_it_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    at = case("mistral", sliding_window=4096)
    assert cells.CELLS["loss"](at) == ""
    monkeypatch.setattr(cells, "WINDOW", None)
    blind = dataclasses.replace(at, small=cells.shrink(at.config, at.row, cells.VOCABULARY))
    blind.__dict__["expected"] = at.expected  # of the windowed model
    assert cells.CELLS["loss"](blind).startswith("loss ")


def test_documents_that_see_each_other_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels.batches, "document_positions", lambda _bounds, shape: torch.arange(shape[1])[None])
    assert cells.CELLS["packed rows"](case("qwen3")).startswith("documents of a row see each other")


@pytest.mark.parametrize("model_type", ADMITTED)
def test_documents_are_apart_under_the_attention_of_gpus(model_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    attend_by_definition(monkeypatch)
    at = case(model_type)
    plain = cells.plain_attention(at.small)
    monkeypatch.setattr(cells, "plain_attention", lambda _config: plain if plain == "eager" else batches.NAME)
    assert cells.CELLS["packed rows"](at) == ""


@pytest.mark.parametrize("lost", ["sinks", "window"])
def test_sinks_or_windows_that_are_lost_fail(lost: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = batches.attend_with_sinks

    def attend(q: Any, k: Any, v: Any, sinks: Any, bounds: Any, longest: int, scale: float, left: int) -> Any:
        return whole(q, k, v, sinks - 9 * (lost == "sinks"), bounds, longest, scale, -1 if lost == "window" else left)

    monkeypatch.setattr(batches, "attend_with_sinks", attend)
    assert cells.CELLS["loss"](case("gpt_oss")).startswith("loss ")


def test_a_bias_that_is_dropped_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    at, kept = case("qwen2"), cells.start.Nf4Linear
    monkeypatch.setattr(cells.start, "Nf4Linear", lambda matrix, _bias: kept(matrix))
    assert "logits are" in cells.CELLS["4 bits"](at)


def test_a_key_whose_other_value_is_planned_wrongly_is_held() -> None:
    at = case("cohere")
    assert at.row.held == {"use_qk_norm": False}
    unheld = dataclasses.replace(at, row=dataclasses.replace(at.row, held={}))
    assert "parameters planned" in cells.check_settings(unheld) and cells.fill_held(unheld).held == at.row.held


def test_logits_times_a_key_that_others_divide_by_are_read_off_the_class(monkeypatch: pytest.MonkeyPatch) -> None:
    times, over = traits.shipped()["hyperclovax"], traits.shipped()["granite"]
    assert (times.scales, over.scales) == ({"logits_scaling": 1}, {"logits_scaling": -1})
    at = case("hyperclovax", logits_scaling=0.25)
    assert cells.CELLS["loss"](at) == ""
    monkeypatch.setattr(traits, "records", lambda: {"hyperclovax": dataclasses.replace(times, scales=over.scales)})
    assert cells.CELLS["loss"](at).startswith("loss ")


@pytest.mark.parametrize(
    ("model_type", "blind"),
    [
        ("arcee", {"ffn_bytes": 8}),  # two matrices, not three
        ("olmo", {"bare_norms": []}),  # norms without weights
        ("glm", {"copies_output": False}),  # part of a head is rotated
        ("gpt_oss", {"ffn_bytes": 8}),  # experts that clamp gate and up
    ],
)
def test_what_a_layer_keeps_is_measured_for_the_type(model_type: str, blind: dict[str, Any]) -> None:
    at = case(model_type)
    found = cells.CELLS["activations"](dataclasses.replace(at, row=dataclasses.replace(at.row, **blind)))
    assert "bytes a token and layer planned" in found


@pytest.mark.parametrize(
    ("named", "why"),
    [
        ("no_such_type", "there is no model no_such_type"),
        ("t5", "config.json has no"),
        ("gemma3", "it reads more than text"),
        ("gpt2", "config.json has no"),
        ("bloom", "config.json has no"),
        ("phi", "has a head with a bias"),
        ("granitemoe", "feed-forward block is not called mlp"),
        ("olmo_hybrid", "which do not know where a document of a packed row ends"),
        ("mimo_v2_flash", "layers of several kinds"),
        ("gemma4_assistant", "has no default configuration"),
    ],
)
def test_what_is_no_decoder_of_this_kind_is_refused_in_a_sentence(named: str, why: str) -> None:
    with pytest.raises(UserError) as error:
        command.admit(named)
    assert why in f"{error.value.problem} {error.value.evidence}"


SIZES = {
    **{"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8},
    **{"num_key_value_heads": 2, "vocab_size": 1024, "max_position_embeddings": 4096, "pad_token_id": 0},
}
UNUSUAL: dict[str, dict[str, Any]] = {
    "old RoPE keys": {
        **{"model_type": "llama", "rope_theta": 500000, "rope_scaling": {"type": "linear", "factor": 2}},
        **{"torch_dtype": "bfloat16"},
    },
    "new RoPE keys and heads of their own": {
        **{"model_type": "qwen3", "head_dim": 48, "dtype": "bfloat16"},
        "rope_parameters": {
            **{"rope_type": "yarn", "rope_theta": 1000000, "factor": 4.0},
            "original_max_position_embeddings": 1024,
        },
    },
    "dropout, which is not drawn": {"model_type": "granite", "attention_dropout": 0.1, "logits_scaling": 8.0},
    "experts whose heads have no size of their own": {
        **{"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    },
    "a rotated part that is a number": {
        **{"model_type": "minimax_m2", "head_dim": 64, "rotary_dim": 32, "num_local_experts": 8},
        **{"num_experts_per_tok": 2},
    },
    "no key/value heads": {"model_type": "llama", "num_key_value_heads": None},
    "a window from the second layer on": {
        **{"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 64, "max_window_layers": 2},
    },
    "kinds of layers that no pattern gives": {
        **{"model_type": "gemma3_text", "head_dim": 40, "sliding_window": 128, "rope_theta": 1000000},
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
    },
    "soft caps": {
        **{"model_type": "gemma2", "head_dim": 32, "sliding_window": 128, "query_pre_attn_scalar": 24},
        **{"attn_logit_softcapping": 20.0, "final_logit_softcapping": 5.0},
    },
    "whole factors": {
        **{"model_type": "granite", "logits_scaling": 8, "embedding_multiplier": 12, "residual_multiplier": 0.22},
        **{"attention_multiplier": 0.0156, "tie_word_embeddings": True},
    },
    "biases and part of a head rotated": {
        **{"model_type": "glm4", "head_dim": 64, "partial_rotary_factor": 0.5, "attention_bias": True},
    },
    "a norm for two blocks": {
        **{"model_type": "stablelm", "use_qkv_bias": True, "use_parallel_residual": True, "tie_word_embeddings": True},
    },
    "latent attention whose queries are made from hidden states": {
        **{"model_type": "deepseek_v3", "q_lora_rank": None, "qk_nope_head_dim": 24, "qk_rope_head_dim": 8},
        **{"kv_lora_rank": 48, "v_head_dim": 32, "first_k_dense_replace": 2, "moe_intermediate_size": 96},
        **{"n_routed_experts": 16, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 4, "num_key_value_heads": 8},
    },
    "latent attention with biases": {
        **{"model_type": "deepseek_v3", "attention_bias": True, "q_lora_rank": 40, "qk_nope_head_dim": 24},
        **{"qk_rope_head_dim": 8, "kv_lora_rank": 48, "v_head_dim": 32, "moe_intermediate_size": 96},
        **{"n_routed_experts": 16, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 4, "num_key_value_heads": 8},
    },
    "layers with and without experts": {
        **{"model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 96},
        **{"head_dim": 32, "mlp_only_layers": [0, 3]},
    },
    "a fused product that windows cut": {
        **{"model_type": "phi3", "partial_rotary_factor": 0.75, "sliding_window": 64, "tie_word_embeddings": True},
        "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 12, "long_factor": [1.5] * 12},
    },
    "a single key for all heads, under windows": {
        **{"model_type": "gemma3_text", "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 256},
        **{"sliding_window": 512, "sliding_window_pattern": 6, "rope_local_base_freq": 10000.0},
    },
    "a single key for all heads, whose scores have a cap": {
        **{"model_type": "gemma2", "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 64},
        **{"sliding_window": 128, "attn_logit_softcapping": 20.0},
    },
    "experts at every second layer, none shared": {
        **{"model_type": "ernie4_5_moe", "moe_num_experts": 8, "moe_k": 3, "moe_num_shared_experts": 0},
        **{
            "moe_intermediate_size": 96,
            "moe_layer_start_index": 1,
            "moe_layer_interval": 2,
            "tie_word_embeddings": True,
        },
    },
    "shared experts, and another width where there are none": {
        **{"model_type": "cohere2_moe", "num_experts": 8, "num_experts_per_tok": 2, "num_shared_experts": 2},
        **{"prefix_dense_intermediate_size": 1024, "first_k_dense_replace": 1, "sliding_window": 64, "head_dim": 64},
        **{"rms_norm_eps": None, "expert_selection_fn": "sigmoid", "logit_scale": 0.25},
    },
    "several shared experts": {
        **{"model_type": "exaone_moe", "num_experts": 8, "num_experts_per_tok": 2, "num_shared_experts": 2},
        **{"moe_intermediate_size": 96, "first_k_dense_replace": 2, "sliding_window": 64},
    },
    "a gate of attention, and a number of layers without experts": {
        **{"model_type": "afmoe", "num_experts": 8, "num_experts_per_tok": 2, "num_shared_experts": 1, "head_dim": 32},
        **{"moe_intermediate_size": 96, "num_dense_layers": 2, "sliding_window": 64, "mup_enabled": True},
    },
    "a list of the experts of a token": {
        **{"model_type": "hunyuan_v1_moe", "num_experts": 8, "moe_topk": [2] * 4, "head_dim": 32},
    },
    "attention with sinks, without biases, one kind of layer": {
        **{"model_type": "gpt_oss", "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 64},
        **{"attention_bias": False, "layer_types": ["full_attention"] * 4, "rope_theta": 150000},
    },
    "layers without RoPE": {"model_type": "smollm3", "no_rope_layers": [1, 1, 1, 0], "rope_theta": 2000000.0},
}


def test_a_small_model_keeps_every_kind_of_layer() -> None:
    kinds = {
        "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
        "mlp_layer_types": ["dense"] + ["sparse"] * 5,
    }
    config = command.read_config("qwen3")[0] | kinds | {"num_hidden_layers": 6, "no_rope_layers": [1] * 6}
    found = cells.few_layers(config, config, 0)
    assert found["layer_types"] == ["sliding_attention", "full_attention", "sliding_attention"]
    assert found["mlp_layer_types"] == ["dense", "sparse", "sparse"] and found["no_rope_layers"] == [1, 1, 1]
    alike = config | {"mlp_layer_types": ["sparse"] * 6}
    assert cells.few_layers(alike, alike, 0)["mlp_layer_types"] == ["sparse"] * 3


@pytest.mark.parametrize("name", UNUSUAL)
def test_unusual_configurations_are_what_transformers_makes_of_them(name: str) -> None:
    said = {
        key: value
        for key, value in (SIZES | UNUSUAL[name]).items()
        if value is not None or key == "q_lora_rank"  # whose null is a choice of its own
    }
    refusals.refuse_model(said, name)
    at = cells.make_case(said, traits.shipped()[said["model_type"]], *small_run())
    wrong = {
        each: why for each in ("loss", "packed rows", "parameters", "activations") if (why := cells.CELLS[each](at))
    }
    assert not wrong


def test_the_last_layer_with_experts_is_of_the_models_own_depth() -> None:
    said = SIZES | {"model_type": "ernie4_5_moe", "num_hidden_layers": 40, "moe_intermediate_size": 96}
    assert traits.read(said).dense == (0,)
    assert traits.read(said | {"moe_layer_end_index": 37}).dense == (0, 38, 39)


def test_a_base_models_tokenizer_without_a_template_is_no_failure(tmp_path: Path) -> None:
    files.write_json(tmp_path / "tokenizer.json", {})
    files.write_json(tmp_path / "tokenizer_config.json", {"chat_template": None})
    assert not command._has_template(tmp_path)
    files.write_json(tmp_path / "tokenizer_config.json", {"chat_template": "{{ messages }}"})
    assert command._has_template(tmp_path)


def test_adapters_beside_experts_are_of_attention() -> None:
    found = shape.of_config(case("deepseek_v2").small.to_dict(), cells.VOCABULARY)
    assert {"q_a_proj", "kv_b_proj", "o_proj", "gate_proj"} <= found.matrices.keys()
    gated = shape.of_config(case("afmoe").small.to_dict(), cells.VOCABULARY)  # whose gate is named as the experts' part
    assert gated.adaptable.keys() == {"q_proj", "k_proj", "v_proj", "o_proj"}
    assert found.adaptable.keys() == {"q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"}


def test_a_model_type_is_admitted_with_its_own_defaults() -> None:
    config, directory = command.read_config("qwen3")
    assert directory is None and config["head_dim"] == CONFIG_MAPPING["qwen3"]().head_dim


def test_the_pages_of_admitted_models_are_current() -> None:
    assert subprocess.run([sys.executable, ROOT / "scripts/models.py", "--check"], check=False).returncode == 0


def test_experts_are_never_quantized_unseen(monkeypatch: pytest.MonkeyPatch) -> None:
    at = case("qwen3_moe")
    assert cells.CELLS["4 bits"](at) == ""
    monkeypatch.setattr(cells.shape, "problems", lambda _: iter(()))
    assert "lora.quantize is not refused" in cells.CELLS["4 bits"](at)
