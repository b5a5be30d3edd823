"""What adapters and weights in 4 bits change in a plan."""

from __future__ import annotations

import pytest

from finlm.base.errors import UserError
from finlm.plan import advice
from finlm.plan.plan import Plan
from finlm.recipe import recipe, shape
from plan.test_planner import RECIPES, make

QLORA = RECIPES / "mistral-7b-deita/sft-qlora.yaml"
GIB = 2**30


def test_weights_in_four_bits_put_7b_on_24_gb_where_16_bits_do_not_fit() -> None:
    plan = make(QLORA)
    assert plan.fits and plan.zero_stage == 1 and not plan.compiled
    assert plan.gpu_bytes_items["weights"] == pytest.approx(7.0e9 * 0.516 + 0.26e9 * 2, rel=0.02)
    assert plan.gpu_bytes_items["Adam states"] == 8 * 41_943_040  # rank x (inputs + outputs) of seven matrices a layer
    whole = make(QLORA, "lora.quantize=none")
    assert whole.gpu_bytes_items["weights"] > 14e9


def test_adapters_take_no_gradients_of_weights() -> None:
    def seconds(*overrides: str) -> float:
        plan = make(
            RECIPES / "mistral-7b-deita/sft-1gpu.yaml", "batch.micro_batch=4", "train.recompute=full", *overrides
        )
        return plan.step_seconds["compute"]

    assert seconds("lora={rank: 16}") == pytest.approx(0.77 * seconds(), rel=0.05)


def checkpoint(path: str, *overrides: str) -> tuple[int, Plan]:
    wanted = recipe.load(RECIPES / path, overrides).recipe
    plan = make(RECIPES / path, *overrides)
    return advice.checkpoint_bytes(wanted, shape.of(wanted, plan.vocab_size), plan)[0], plan


def test_a_checkpoint_holds_what_is_trained_and_what_else_is_a_parameter() -> None:
    full, plan = checkpoint("mistral-7b-deita/sft-1gpu.yaml")
    assert full == 14 * plan.parameters
    adapters, _ = checkpoint("mistral-7b-deita/sft-1gpu.yaml", "lora={rank: 16}")
    assert adapters == 2 * plan.parameters + 14 * 41_943_040
    packed, _ = checkpoint("mistral-7b-deita/sft-qlora.yaml")
    assert packed == pytest.approx(2 * 0.262e9 + 14 * 41_943_040, rel=0.01)


TWO_KINDS = "hardware.hosts=[{name: a, slots: 2, gpu: A100-80G}, {name: b, slots: 2, gpu: V100-32G}]"


def test_grpo_counts_its_other_models_and_takes_whole_groups() -> None:
    grpo, gpu = RECIPES / "quickstart/grpo.yaml", "hardware.hosts=[{name: a, slots: 3, gpu: A100-80G}]"
    plain = make(grpo, gpu, "grpo.beta=0")
    assert plain.micro_batch * plain.gradient_accumulation_steps * 3 % 8 == 0  # grpo.generations
    assert plain.padded_vocab_size == plain.vocab_size  # it samples from every row of the head
    assert "reference model" not in plain.gpu_bytes_items
    full = make(grpo, gpu, "grpo.beta=0.04", "grpo.reward=models/judge").gpu_bytes_items
    assert full["reference model"] == full["reward model"] == 2 * plain.parameters
    assert "reference model" not in make(grpo, gpu, "grpo.beta=0.04", "lora={rank: 4}").gpu_bytes_items


@pytest.mark.parametrize("stage", ["dpo", "reward", "grpo"])
def test_stages_with_rows_of_many_lengths_compile_nothing_and_weigh_ranks_alike(stage: str) -> None:
    plan = make(RECIPES / f"quickstart/{stage}.yaml", TWO_KINDS, "train.precision=fp16")
    assert not plan.compiled and len({host.micro_batch for host in plan.hosts}) == 1
    for override in ("train.compile=true", "batch.micro_batch={a: 2, b: 1}"):
        with pytest.raises(UserError):
            recipe.load(RECIPES / f"quickstart/{stage}.yaml", (override,))


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("zero.stage=3", "zero.stage: 3 divides weights"),
        ("zero.offload_param=cpu", "zero.offload_param: moves parameters"),
        ("train.compile=true", "train.compile: has not been tried"),
        ("model.hidden_size=4000", "nf4 has a scale for 64 weights"),
    ],
)
def test_what_four_bits_exclude_is_said_before_the_run(override: str, sentence: str) -> None:
    with pytest.raises(UserError) as raised:
        recipe.load(QLORA, (override, "model.heads=8", "model.kv_heads=8"))
    assert sentence in str(raised.value.evidence)
