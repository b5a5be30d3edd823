"""The model of a recipe and its loss."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, LlamaForCausalLM, MistralConfig, MistralForCausalLM

from finlm.base.errors import UserError
from finlm.inference import export
from finlm.plan import planner
from finlm.plan.plan import Plan
from finlm.recipe import cluster, recipe, shape
from finlm.recipe.schema import Recipe
from finlm.train.model import causal_lm
from finlm.train.post import start

from helpers import QUICKSTART, TINY


def planned(*overrides: str) -> tuple[Recipe, Plan]:
    """The tiny recipe and its plan."""
    loaded = recipe.load(QUICKSTART, (*TINY, "hardware.hosts=[{name: localhost, slots: 1}]", *overrides)).recipe
    return loaded, planner.make(loaded, cluster.from_hardware(loaded.hardware), shape.of(loaded))


def built(*overrides: str) -> LlamaForCausalLM:
    """The tiny model."""
    loaded, plan = planned(*overrides)
    shape_config = causal_lm.model_config(loaded, plan, 1, 2)
    return start.load_model(loaded, plan, Path("ds_config.json"), shape_config, Path("tokenizer.model"))


def test_the_plan_counts_the_parameters_that_the_model_has() -> None:
    for overrides in ((), ("model.tie_embeddings=true",), ("model.kv_heads=1",)):
        assert sum(p.numel() for p in built(*overrides).parameters()) == planned(*overrides)[1].parameters


def test_weights_depend_on_seed_and_name_only() -> None:
    first, again, other = built(), built("model.layers=3"), built("train.seed=8")
    name = "model.layers.1.mlp.up_proj.weight"
    assert torch.equal(first.get_parameter(name), again.get_parameter(name))
    assert not torch.equal(first.get_parameter(name), other.get_parameter(name))
    assert first.get_parameter(name).std().item() == pytest.approx(0.02, rel=0.02)
    assert torch.equal(first.model.norm.weight, torch.ones_like(first.model.norm.weight))


def test_a_start_from_weights_of_another_shape_is_refused_with_both_numbers(tmp_path: Path) -> None:
    built("model.hidden_size=32").save_pretrained(tmp_path)
    with pytest.raises(UserError, match="1 mistake in the recipe") as error:
        built(f"model.init_from={tmp_path}")
    assert error.value.evidence == f"--set: model.hidden_size: 64, but {tmp_path} has 32: write 32"


@pytest.fixture
def source(tmp_path: Path) -> LlamaForCausalLM:
    """A model whose weights lie in tmp_path."""
    model = built("train.seed=9")
    model.save_pretrained(tmp_path)
    return model


def test_a_start_from_weights_takes_exactly_those(source: LlamaForCausalLM, tmp_path: Path) -> None:
    started = built(f"model.init_from={tmp_path}")
    for name, parameter in source.named_parameters():
        assert torch.equal(started.get_parameter(name), parameter)


@pytest.mark.parametrize("name", ["lm_head.weight", "model.norm.weight"])
def test_a_start_that_lacks_weights_is_refused(source: LlamaForCausalLM, tmp_path: Path, name: str) -> None:
    weights = load_file(tmp_path / "model.safetensors")
    tensor = weights.pop(name)
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match="lack 1 of the model's weights") as missing:
        built(f"model.init_from={tmp_path}")
    assert missing.value.evidence == f"{name} is missing"
    save_file(weights | {name: tensor[:-1].clone()}, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match="lack 1 of the model's weights") as other:
        built(f"model.init_from={tmp_path}")
    assert f"{name} has {[len(tensor) - 1, *tensor.shape[1:]]} there, {list(tensor.shape)} here" in other.value.evidence


def test_a_start_whose_file_is_cut_is_a_mistake_of_the_user(source: LlamaForCausalLM, tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    with pytest.raises(UserError, match="cannot be loaded"):
        built(f"model.init_from={tmp_path}")


def test_a_model_of_the_hub_keeps_its_context(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commit = "0123456789abcdef0123456789abcdef01234567"
    cached = tmp_path / "models--owner--name/snapshots" / commit
    mistral(cached, window=32)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.file_download.constants.HF_HUB_OFFLINE", True)
    loaded, plan = planned("batch.sequence_length=16")
    hub = loaded.model.model_copy(update={"init_from": "owner/name", "revision": commit})
    assert causal_lm.context_length(loaded.model_copy(update={"stage": "sft", "model": hub}), plan) == 131072
    assert start.start_path(hub) == str(cached), "trl would read the reference's newest revision"


def test_another_rope_base_is_refused_unless_the_recipe_says_that_it_knows(
    source: LlamaForCausalLM, tmp_path: Path
) -> None:
    with pytest.raises(UserError) as error:
        built(f"model.init_from={tmp_path}", "model.rope_theta=500000")
    assert "model.rope_theta: 500000, but" in error.value.evidence and "has 10000.0" in error.value.evidence
    with pytest.raises(UserError, match="1 mistake") as error:
        built(f"model.init_from={tmp_path}", "model.norm_eps=1e-6")
    longer = built(f"model.init_from={tmp_path}", "model.rope_theta=500000", "model.former_rope_theta=10000")
    assert longer.config.rope_parameters["rope_theta"] == 500000
    ids = torch.arange(40)[None]
    with torch.no_grad():
        here, there = (model.model(ids).last_hidden_state for model in (longer, source))
    torch.testing.assert_close(here[:, 0], there[:, 0])  # where nothing is rotated yet
    assert not torch.allclose(here[:, -1], there[:, -1])
    config = json.loads((tmp_path / "config.json").read_text())
    config["rope_parameters"] = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}
    (tmp_path / "config.json").write_text(json.dumps(config))
    scaled = built(f"model.init_from={tmp_path}")
    assert scaled.config.rope_parameters == config["rope_parameters"]
    with torch.no_grad():
        assert not torch.allclose(scaled.model(ids).last_hidden_state[:, -1], there[:, -1])


def test_what_the_start_says_of_itself_is_kept_and_the_run_decides_the_rest(
    source: LlamaForCausalLM, tmp_path: Path
) -> None:
    config_file = tmp_path / "config.json"
    said = json.loads(config_file.read_text())
    said |= {"pad_token_id": 7, "eos_token_id": [2, 9], "max_position_embeddings": 512, "initializer_range": 0.5}
    config_file.write_text(json.dumps(said | {"rope_theta": 10000.0, "of_the_author": [1], "auto_map": {"a": "b.c"}}))
    found = built(f"model.init_from={tmp_path}").config.to_dict()
    assert found["of_the_author"] == [1] and "auto_map" not in found and "rope_theta" not in found
    assert {key: found[key] for key in said if key != "use_cache"} == {
        key: value for key, value in said.items() if key != "use_cache"
    }
    config_file.write_text(json.dumps(said | {"eos_token_id": 9, "max_position_embeddings": 32}))
    found = built(f"model.init_from={tmp_path}").config.to_dict()
    assert found["eos_token_id"] == 2, "the end of the run's documents"
    assert found["max_position_embeddings"] == 64, "the rows of the run"


def test_the_configuration_is_looked_at_again_where_the_weights_are(source: LlamaForCausalLM, tmp_path: Path) -> None:
    """A model of the Hub may be out of reach before."""
    loaded, plan = planned(f"model.init_from={tmp_path}")
    said = json.loads((tmp_path / "config.json").read_text())
    for changes, evidence in (({"hidden_act": "gelu"}, "hidden_act: gelu there"), ({"model_type": "qwen2"}, "qwen2")):
        (tmp_path / "config.json").write_text(json.dumps(said | changes))
        arguments = Path("ds_config.json"), causal_lm.model_config(loaded, plan, 1, 2), tmp_path
        with pytest.raises(UserError, match="does not have the recipe's shape") as caught:
            start.load_model(loaded, plan, *arguments)
        assert evidence in caught.value.evidence


def test_pretraining_goes_on_from_a_model_whose_vocabulary_was_extended(
    source: LlamaForCausalLM, tmp_path: Path
) -> None:
    tokenizer = "tokenizer={path: tokenizer.model, extend_to: 2048}"
    again = built(f"model.init_from={tmp_path}", "tokenizer.vocab_size=null", tokenizer)
    assert torch.equal(again.lm_head.weight, source.lm_head.weight)


OLDER: dict[str, dict[str, object]] = {
    "gemma3_text": {
        **{"rope_theta": 1000000, "rope_local_base_freq": 10000, "rope_scaling": None, "sliding_window_pattern": 6},
        **{"sliding_window": 16, "head_dim": 32, "query_pre_attn_scalar": 32},
    },
    "olmo3": {
        "layer_types": ["sliding_attention", "full_attention"],
        **{"rope_theta": 500000, "sliding_window": 16, "attention_dropout": 0.1},
        "rope_scaling": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 32},
    },
    "granite": {"attention_dropout": 0.1, "logits_scaling": 8.0, "rope_theta": 10000000},
}


@pytest.mark.parametrize("model_type", OLDER)
def test_a_start_whose_config_has_older_keys_is_loaded_without_dropout_and_keeps_them(
    model_type: str, tmp_path: Path
) -> None:
    said = {"model_type": model_type, "vocab_size": 2048, "hidden_size": 64, "intermediate_size": 128}
    said |= {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "rms_norm_eps": 1e-6}
    said |= {"tie_word_embeddings": True, "pad_token_id": None, "max_position_embeddings": 256} | OLDER[model_type]
    torch.manual_seed(0)
    theirs = AutoModelForCausalLM.from_config(AutoConfig.for_model(**said)).eval()
    theirs.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(said))
    base = f"model.rope_theta={OLDER[model_type]['rope_theta']}"
    shared = ("model.kv_heads=1", "model.tie_embeddings=true", "model.norm_eps=1.0e-6", base)
    loaded, plan = planned(f"model.init_from={tmp_path}", *shared)
    config = causal_lm.model_config(loaded, plan, 1, 2)
    ours = causal_lm.load(loaded, plan, Path("ds_config.json"), config, Path("tokenizer.json")).train()
    ids = torch.arange(9, 57)[None]
    with torch.no_grad():
        torch.testing.assert_close(ours(ids).logits, theirs(ids).logits)
    written = export._merge_start_config(ours.config.to_dict() | {"dtype": "float32"}, loaded.model)
    assert {key: written[key] for key in OLDER[model_type] if key != "rope_scaling"} == {
        key: value for key, value in OLDER[model_type].items() if key != "rope_scaling"
    }
    assert AutoConfig.for_model(**written).rope_parameters == ours.config.rope_parameters


def mistral(directory: Path, window: int) -> MistralForCausalLM:
    """A Mistral of the tiny recipe's shape, with fewer key heads than heads."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 2048, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "sliding_window": window}
    model = MistralForCausalLM(MistralConfig(**sizes, **heads, rms_norm_eps=1e-5, tie_word_embeddings=False))
    model.save_pretrained(directory)
    return model.eval()


def test_a_mistral_keeps_its_window(tmp_path: Path) -> None:
    theirs = mistral(tmp_path, window=16)
    sets = ("model.kv_heads=1", f"model.init_from={tmp_path}", "batch.sequence_length=64")
    ours = built(*sets).eval()
    assert type(ours) is MistralForCausalLM and ours.config.sliding_window == 16
    ids = torch.arange(64)[None] * 7 % 2048
    with torch.no_grad():
        found = ours.model(ids).last_hidden_state
        torch.testing.assert_close(found, theirs.model(ids).last_hidden_state)
        theirs.config.sliding_window = None
        assert not torch.allclose(found[:, -1], theirs.model(ids).last_hidden_state[:, -1])
    assert torch.equal(ours.lm_head.weight[:2048], theirs.lm_head.weight)
    loaded, plan = planned(*sets)
    assert shape.of(loaded).windows == (16, 16)
    assert causal_lm.context_length(loaded.model_copy(update={"stage": "sft"}), plan) == 131072


def test_padding_rows_are_zero_and_change_no_other_weight(tmp_path: Path) -> None:
    loaded, plan = planned()
    wide = dataclasses.replace(plan, padded_vocab_size=plan.vocab_size + 64)
    arguments = Path("ds_config.json"), causal_lm.model_config(loaded, plan, 1, 2), tmp_path
    narrow, padded = (start.load_model(loaded, one, *arguments) for one in (plan, wide))
    for name, parameter in narrow.named_parameters():
        found = padded.get_parameter(name)
        assert torch.equal(found[: len(parameter)], parameter)
        assert not found[len(parameter) :].any()
