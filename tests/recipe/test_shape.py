"""Parameter and FLOP counts against published models and against transformers."""

from __future__ import annotations

from pathlib import Path

import pytest

from finlm.base.errors import UserError
from finlm.recipe import recipe, shape
from finlm.recipe.shape import ModelShape

RECIPES = Path(__file__).resolve().parents[2] / "recipes"


def of(name: str, *overrides: str) -> ModelShape:
    return shape.of(recipe.load(RECIPES / name / "pretrain.yaml", overrides).recipe)


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("llama2-7b-fincorpus", 6_738_415_616),
        ("xuanyuan-13b", 13_015_864_320 + 2 * 7_438 * 5120),
        ("xuanyuan-70b", 68_976_648_192 + 2 * 7_438 * 8192),
        ("xuanyuan-6b", 6_394_580_992),
    ],
)
def test_the_parameters_of_the_recipes_are_those_of_the_models(name: str, parameters: int) -> None:
    assert of(name).parameters == parameters


def test_flops_a_token_follow_the_palm_formula() -> None:
    assert of("xuanyuan-6b").flops_per_token(2048) == pytest.approx(40.42e9, rel=1e-3)


def test_a_tied_head_is_counted_once_but_multiplies() -> None:
    tied, untied = of("quickstart", "model.tie_embeddings=true"), of("quickstart")
    assert untied.parameters - tied.parameters == 4096 * 192
    assert tied.flops_per_token(256) == untied.flops_per_token(256)


def test_the_counts_equal_those_of_transformers() -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    mine = of("quickstart", "model.kv_heads=2")
    with torch.device("meta"):
        theirs = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=mine.vocab,
                hidden_size=mine.hidden,
                num_hidden_layers=mine.layers,
                num_attention_heads=mine.heads,
                num_key_value_heads=mine.kv_heads,
                intermediate_size=mine.ffn,
            )
        )
    assert sum(parameter.numel() for parameter in theirs.parameters()) == mine.parameters


def test_the_vocabulary_comes_from_model_data_or_tokenizer() -> None:
    wanted = recipe.load(RECIPES / "quickstart/pretrain.yaml").recipe
    assert (shape.of(wanted).vocab, shape.of(wanted, 4000).vocab) == (4096, 4000)
    assert of("quickstart", "model.vocab_size=5000").vocab == 5000
    with pytest.raises(UserError, match=r"model\.vocab_size is auto"):
        of("quickstart", "tokenizer={path: tokenizer.model}")


def test_heads_need_not_divide_the_width_where_the_type_has_a_head_size_of_its_own() -> None:
    gemma = ("model.hidden_size=1152", "model.heads=4", "model.kv_heads=1", "model.config={model_type: gemma3_text}")
    assert of("quickstart", *gemma).head_size == 256
    with pytest.raises(UserError) as error:
        of("quickstart", "model.hidden_size=190", "model.heads=4")
    assert "4 heads do not divide hidden_size 190" in error.value.evidence
