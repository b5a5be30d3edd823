"""The model of a recipe and its loss."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from finlm import config
from finlm.base.errors import UserError
from finlm.data.shards import IGNORED
from finlm.plan import planner
from finlm.plan.plan import Plan
from finlm.recipe import cluster, recipe, shape
from finlm.recipe.schema import Recipe
from finlm.train import model as models

from helpers import QUICKSTART, TINY


def planned(*overrides: str) -> tuple[Recipe, Plan]:
    """The tiny recipe and its plan."""
    loaded = recipe.load(QUICKSTART, (*TINY, "hardware.hosts=[{name: localhost, slots: 1}]", *overrides)).recipe
    return loaded, planner.make(loaded, cluster.from_hardware(loaded.hardware), shape.of(loaded))


def built(*overrides: str) -> LlamaForCausalLM:
    """The tiny model."""
    loaded, plan = planned(*overrides)
    return models.build(loaded, plan, config.deepspeed(loaded, plan), models.llama_config(loaded, plan, 1, 2))


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


def test_the_loss_is_the_sum_over_labels_that_are_not_minus_100() -> None:
    model = built()
    inputs, labels = torch.randint(0, 4096, (2, 2, 16)).unbind(0)
    alone = models.summed_loss(model, inputs, labels)
    logits = model(input_ids=inputs).logits.log_softmax(-1)
    assert alone.item() == pytest.approx(-logits.gather(-1, labels[..., None]).sum().item(), rel=1e-5)
    padded = labels.clone()
    padded[:, 10:] = IGNORED
    kept = -logits[:, :10].gather(-1, labels[:, :10, None]).sum().item()
    assert models.summed_loss(model, inputs, padded).item() == pytest.approx(kept, rel=1e-5)


def test_a_start_from_weights_of_another_shape_is_refused_with_both_numbers(tmp_path: Path) -> None:
    built("model.hidden_size=32").save_pretrained(tmp_path)
    with pytest.raises(UserError, match="does not have the recipe's shape") as error:
        built(f"model.init_from={tmp_path}")
    assert "hidden_size: 32 there, 64 in the recipe" in error.value.evidence


def test_a_start_from_weights_takes_exactly_those(tmp_path: Path) -> None:
    source = built("train.seed=9")
    source.save_pretrained(tmp_path)
    started = built(f"model.init_from={tmp_path}")
    for name, parameter in source.named_parameters():
        assert torch.equal(started.get_parameter(name), parameter)
