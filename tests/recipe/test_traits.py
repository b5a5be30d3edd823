"""What config.json says of a model's layers: counts, windows, RoPE, and what is refused before anything is read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from finlm.base.errors import UserError
from finlm.recipe import derive, recipe, shape
from finlm.recipe.models import config_json, refusals, traits
from finlm.recipe.settings import config_of

from helpers import QUICKSTART

QWEN25_7B = {
    **{"model_type": "qwen2", "hidden_size": 3584, "num_hidden_layers": 28, "num_attention_heads": 28},
    **{"num_key_value_heads": 4, "intermediate_size": 18944, "vocab_size": 152064, "rms_norm_eps": 1e-6},
    **{"rope_theta": 1e6, "tie_word_embeddings": False, "sliding_window": 131072, "use_sliding_window": False},
    **{"max_window_layers": 28, "max_position_embeddings": 32768},
}
QWEN3_4B = {
    **{"model_type": "qwen3", "hidden_size": 2560, "num_hidden_layers": 36, "num_attention_heads": 32},
    **{"num_key_value_heads": 8, "intermediate_size": 9728, "vocab_size": 151936, "rms_norm_eps": 1e-6},
    **{"rope_theta": 1e6, "tie_word_embeddings": True, "head_dim": 128, "use_sliding_window": False},
}
MISTRAL_7B = {
    **{"model_type": "mistral", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32},
    **{"num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 32000, "rms_norm_eps": 1e-5},
    **{"tie_word_embeddings": False, "sliding_window": 4096},
}


@pytest.mark.parametrize(
    ("config", "parameters", "windows"),
    [(QWEN25_7B, 7_615_616_512, 0), (QWEN3_4B, 4_022_468_096, 0), (MISTRAL_7B, 7_241_732_096, 32)],
    ids=["qwen2", "qwen3", "mistral"],
)
def test_published_models_have_their_parameters_and_windows(
    config: dict[str, Any], parameters: int, windows: int
) -> None:
    found = shape.of_config(config, config["vocab_size"])
    assert (found.parameters, len(found.windows)) == (parameters, windows)


DEEPSEEK_V3 = {
    **{"model_type": "deepseek_v3", "hidden_size": 7168, "num_hidden_layers": 61, "num_attention_heads": 128},
    **{"num_key_value_heads": 128, "intermediate_size": 18432, "vocab_size": 129280, "tie_word_embeddings": False},
}
DEEPSEEK_V2_LITE = {
    **{"model_type": "deepseek_v2", "hidden_size": 2048, "num_hidden_layers": 27, "num_attention_heads": 16},
    **{"num_key_value_heads": 16, "intermediate_size": 10944, "vocab_size": 102400, "tie_word_embeddings": False},
    **{"moe_intermediate_size": 1408, "num_experts_per_tok": 6, "first_k_dense_replace": 1, "q_lora_rank": None},
}

DOTS_LLM1 = {
    **{"model_type": "dots1", "hidden_size": 4096, "num_hidden_layers": 62, "num_attention_heads": 32},
    **{"num_key_value_heads": 32, "intermediate_size": 10944, "vocab_size": 152064, "tie_word_embeddings": False},
    **{"moe_intermediate_size": 1408, "n_routed_experts": 128, "n_shared_experts": 2, "num_experts_per_tok": 6},
    **{"first_k_dense_replace": 1, "max_position_embeddings": 32768, "rope_theta": 10000000},
}


def test_a_dots1_has_its_parameters_and_says_its_experts() -> None:
    assert shape.of_config(DOTS_LLM1, 152064).parameters == 142_774_373_888
    assert not list(refusals.explain(DOTS_LLM1, 4096))
    silent = {key: value for key, value in DOTS_LLM1.items() if key != "n_shared_experts"}
    assert ["config.json has no n_shared_experts, without which" in s for s in refusals.explain(silent, 4096)] == [True]


@pytest.mark.parametrize(
    ("config", "parameters", "active"),
    [(DEEPSEEK_V3, 671_026_404_352, 37_552_282_624), (DEEPSEEK_V2_LITE, 15_706_484_224, 2_661_150_208)],
    ids=["V3", "V2-Lite"],
)
def test_a_model_of_latent_attention_and_experts_has_its_parameters(
    config: dict[str, Any], parameters: int, active: int
) -> None:
    found = shape.of_config(config, config["vocab_size"])
    assert (found.parameters, found.active_parameters) == (parameters, active)
    assert sum(found.sizes) == parameters
    assert found.cached_width == 512 + 64  # what keys and values of all heads are made from
    assert (found.q_width, found.output_width) == (192 * found.heads, 128 * found.heads) and found.pads_values


def test_layers_without_experts_are_found_under_every_key() -> None:
    moe = QWEN3_4B | {"model_type": "qwen3_moe"}
    assert traits.read(moe).dense == ()
    assert traits.read(moe | {"mlp_only_layers": [0, 3]}).dense == (0, 3)
    assert traits.read(moe | {"decoder_sparse_step": 2}).dense == tuple(range(0, 36, 2))
    assert traits.read(DEEPSEEK_V3).dense == (0, 1, 2)
    flash = DEEPSEEK_V3 | {"model_type": "glm4_moe_lite"}
    assert traits.read(flash).dense == (0,)  # the class's own
    assert traits.read(flash | {"mlp_layer_types": ["sparse", "dense"] + ["sparse"] * 59}).dense == (1,)


def test_an_absent_window_is_the_classs_own_and_null_is_none() -> None:
    absent = {key: value for key, value in MISTRAL_7B.items() if key != "sliding_window"}
    assert traits.read(absent).windows == (4096,) * 32
    assert traits.read(MISTRAL_7B | {"sliding_window": None}).windows == ()
    upper = QWEN25_7B | {"use_sliding_window": True, "max_window_layers": 20, "sliding_window": 512}
    assert traits.read(upper).windows == (512,) * 8


def test_a_head_of_its_own_size_and_a_window_change_what_a_token_costs() -> None:
    narrow = shape.of_config(QWEN3_4B | {"head_dim": 80}, 151936)
    wide = shape.of_config(QWEN3_4B, 151936)
    assert (narrow.q_width, wide.q_width, wide.kv_width) == (2560, 4096, 1024)
    attention = 12.0 * 36 * 4096 * 4096
    assert wide.flops_per_token(4096) == 6.0 * wide.parameters + attention
    seen = shape.of_config(MISTRAL_7B | {"sliding_window": 512}, 32000)
    assert seen.attended(8192) == 1024 and seen.attended(512) == 512


def start(directory: Path, config: dict[str, Any]) -> str:
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    return str(directory)


def test_a_recipe_takes_the_whole_configuration_of_its_start(tmp_path: Path) -> None:
    config = QWEN3_4B | {"of_the_author": [1], "auto_map": {"AutoModel": "code.py"}}
    sets = ("stage=sft", f"model={{init_from: {start(tmp_path, config)}}}", "train.steps=30", "tokenizer={}")
    loaded = recipe.load(QUICKSTART, sets)
    assert loaded.recipe.model.config == {key: value for key, value in config.items() if key != "auto_map"}
    assert loaded.recipe.model.rope_theta == 1e6 and loaded.origins["model.config"] == str(tmp_path)
    with pytest.raises(UserError) as error:
        recipe.load(QUICKSTART, (*sets, "model.config={model_type: qwen3, head_dim: 64}"))
    assert f"model.config.head_dim: 64, but {tmp_path} has 128" in error.value.evidence


@pytest.mark.parametrize(
    ("changes", "evidence"),
    [
        ({"model_type": "gpt_neox"}, "admitted: "),
        ({"rope_scaling": {"rope_type": "mystery"}}, "RoPE 'mystery', not default"),
        (
            {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}, "max_position_embeddings": 64},
            "once one exceeds 64",
        ),
        ({"layer_types": ["linear_attention"] * 36}, "36 layers of linear_attention, which do not know where"),
        ({"layer_types": ["chunked_attention"] * 36}, "36 layers of chunked_attention, which do not know where"),
        ({"text_config": {"model_type": "llama4_text"}}, "admitted: "),
        ({"text_config": {}}, "it reads more than text: text_config, and has no text_config with a model_type"),
        ({"vision_config": {}, "rope_scaling": {"type": "mrope"}}, "it reads more than text: vision_config"),
        (
            {"quantization_config": {"quant_method": "mxfp4"}},
            "quantised weights (mxfp4): start from a copy of the model in bf16 (docs/extending.md shows how",
        ),
        ({"logit_scale": 0.5}, "logit_scale 0.5, which qwen3's layers do not compute"),
        ({"num_attention_heads": None}, "config.json has no num_attention_heads: it has no attention"),
        ({"output_router_logits": True}, "transformers adds the router's own loss"),
        ({"router_jitter_noise": 0.01}, "router_jitter_noise 0.01, which no router here draws"),
        ({"hidden_size": "2560"}, "hidden_size '2560' is no whole number above 0"),
        ({"intermediate_size": 9728.0}, "intermediate_size 9728.0 is no whole number above 0"),
        ({"num_key_value_heads": 0}, "num_key_value_heads 0 is no whole number above 0"),
        ({"num_key_value_heads": 5}, "num_key_value_heads 5 does not divide num_attention_heads 32"),
        ({"layer_types": ["full_attention"] * 35}, "layer_types: 35 kinds for 36 layers"),
        ({"rope_theta": None}, "rope_theta null"),
        ({"pad_token_id": 151_936}, "pad_token_id 151936 is no token of a vocabulary of 151936"),
        (
            {"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0] * 3}},
            "has 3 numbers, and a head rotates 64",
        ),
        ({"rope_scaling": "linear"}, "rope_scaling: 'linear' is no object"),
        ({"rope_scaling": {"rope_type": "linear"}}, "RoPE 'linear' needs factor, a number above 0; it has None"),
        ({"rope_scaling": {"type": "yarn", "factor": "4"}}, "RoPE 'yarn' needs factor, a number above 0; it has '4'"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "RoPE 'llama3' needs low_freq_factor, a number"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "RoPE 'longrope' needs short_factor, a list of numbers above 0"),
        ({"rope_scaling": {"factor": 2.0}}, "RoPE has a factor of 2.0 and no rope_type that would use it"),
        ({"rope_scaling": {"rope_type": ["yarn"]}}, "RoPE ['yarn'], not default"),
        ({"rope_theta": "1e6"}, 'rope_theta "1e6", which no class reads'),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": "x"}},
            "original_max_position_embeddings 'x' is no number above 0",
        ),
        ({"attention_bias": 1}, "attention_bias 1, where transformers' class of qwen3 takes true or false"),
        ({"rms_norm_eps": 1}, "rms_norm_eps 1, where transformers' class of qwen3 takes a number with a point"),
        ({"model_type": "cohere", "use_qk_norm": True}, "use_qk_norm True: finlm trains a cohere as transformers does"),
        ({"model_type": "hunyuan_v1_dense", "head_dim": None}, "config.json has no head_dim, without which"),
    ],
)
def test_what_no_layer_here_computes_is_refused_when_the_recipe_is_read(
    tmp_path: Path, changes: dict[str, Any], evidence: str
) -> None:
    sets = ("stage=sft", f"model={{init_from: {start(tmp_path, QWEN3_4B | changes)}}}", "tokenizer={}")
    with pytest.raises(UserError) as error:
        loaded = recipe.load(QUICKSTART, (*sets, "train.steps=30")).recipe
        refusals.refuse_model(loaded.model.config or {}, str(tmp_path), loaded.batch.sequence_length)
    assert evidence in error.value.evidence


def test_a_type_with_a_failing_cell_is_refused_with_the_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    row = traits.TypeRecord(
        layer={}, outer=[], switches={}, defaults={}, cells={"loss": "", "packed rows": "they leak"}
    )
    monkeypatch.setattr(traits, "records", lambda: {"new": row})
    with pytest.raises(UserError, match="'new' is not admitted: packed rows failed") as error:
        refusals.check_admitted({"model_type": "new"})
    assert error.value.evidence == "packed rows: they leak"


def test_a_class_that_transformers_lacks_is_told_with_its_code(tmp_path: Path) -> None:
    code = {"auto_map": {"AutoConfig": "configuration_baichuan.BaichuanConfig"}}
    path = Path(start(tmp_path, QWEN3_4B | code | {"model_type": "baichuan"})) / "config.json"
    with pytest.raises(UserError, match="transformers has no model_type 'baichuan'") as error:
        config_json.read_config(path)
    assert error.value.evidence.startswith("auto_map names code")
    start(tmp_path, QWEN3_4B | code)
    assert "auto_map" not in config_json.read_config(path)
    start(tmp_path, QWEN3_4B | {"model_type": "qwen3_5_text"})  # known to transformers, and told by others
    config_json.read_config(path)


def test_a_mixtral_needs_no_head_dim_where_a_hunyuan_does() -> None:
    sizes = {**MISTRAL_7B, "model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2}
    assert not list(refusals.explain(sizes, 4096))
    assert shape.of_config(sizes, 32000).parameters == 46_702_792_704
    assert list(refusals.explain(sizes | {"model_type": "hunyuan_v1_dense"}, 4096))


def test_dropout_is_left_out_and_said(tmp_path: Path) -> None:
    config = QWEN3_4B | {"attention_dropout": 0.1, "resid_pdrop": 0.2, "hidden_dropout": 0.0, "classifier_dropout": 0.3}
    assert traits.dropouts(config) == {"attention_dropout": 0.1, "resid_pdrop": 0.2}
    plain = traits.without_dropout(config)
    assert (plain["attention_dropout"], plain["resid_pdrop"], plain["classifier_dropout"]) == (0.0, 0.0, 0.3)
    sets = ("stage=sft", f"model={{init_from: {start(tmp_path, config)}}}", "train.steps=30", "tokenizer={}")
    loaded = recipe.load(QUICKSTART, sets)
    assert loaded.recipe.model.config == config
    assert [s for s in loaded.said if "attention_dropout 0.1, resid_pdrop 0.2: finlm trains without dropout" in s]


def test_a_hybrid_model_keeps_a_layer_of_full_attention_in_its_toy_and_is_refused_without_one() -> None:
    kinds = {"layer_types": ["linear_attention", "full_attention"], "linear_num_value_heads": 2}
    config = {"model_type": "qwen3_5_text", "linear_num_value_heads": 64}
    assert kinds.items() <= (derive.toy_config(config) or {}).items()
    with pytest.raises(UserError) as refused:
        recipe.load(QUICKSTART, [f"model.config={json.dumps(config)}", "model.layers=2"])
    assert "all layers have linear attention" in str(refused.value.evidence)


def test_adapters_of_a_hybrid_model_are_those_that_its_kinds_of_layers_have() -> None:
    found = shape.of_config(QWEN3_4B | {"model_type": "qwen3_5_text", "num_hidden_layers": 8}, 1000)
    assert (found.linear, found.count_matrices({"q_proj"}), found.count_matrices({"in_proj_qkv"})) == (6, 2, 6)
    shared = ("gate_proj", "up_proj", "down_proj")
    assert found.count_matrices(shared) == 3 * 8
    plain = shape.of_config(QWEN3_4B, 1000)
    assert plain.count_matrices(("q_proj", "v_proj")) == 2 * 36


def test_experts_keep_their_width_beside_the_blocks_which_a_recipe_says_in_a_key_of_its_own() -> None:
    experts = {"model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
    wanted = recipe.load(QUICKSTART, [f"model.config={json.dumps(experts)}", "model.ffn_size=512"]).recipe
    config = config_of(wanted.model)
    assert (config["moe_intermediate_size"], config["intermediate_size"]) == (48, 512)
    alone = {**experts, "model_type": "qwen3_5_moe_text", "layer_types": ["linear_attention", "full_attention"] * 2}
    wanted = recipe.load(QUICKSTART, [f"model.config={json.dumps(alone)}", "model.ffn_size=512"]).recipe
    assert config_of(wanted.model)["moe_intermediate_size"] == 512, "this type's layers have experts alone"
