"""What adapters and weights in 4 bits change in a plan."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from finlm.base import files
from finlm.base.errors import UserError
from finlm.plan import advice, memory
from finlm.plan.plan import Plan
from finlm.plan.show import rows
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


def test_a_row_of_a_pair_is_counted_once_and_its_reference_asked_once() -> None:
    plan = make(RECIPES / "mistral-7b-deita/dpo.yaml")
    wanted = recipe.load(RECIPES / "mistral-7b-deita/dpo.yaml").recipe
    layout = memory.Layout(
        "cuda", "bf16", 1, "none", "none", "none", 1, 2048, 1, **shape.layout(wanted, shape.of(wanted))
    )
    assert (layout.tokens, layout.attended) == (2048, 1024)
    steps = plan.steps * plan.tokens_per_step / (plan.tokens_per_second or 1)
    (said,) = [reason for reason in plan.reasons if reason.startswith("reference: 6,400 pairs")]
    minutes = float(said.rsplit(" ", 2)[1])
    assert (plan.days or 0) * 86400 == pytest.approx(steps + 60 * minutes, rel=0.01)
    assert 0.2 < 60 * minutes / steps < 0.4  # a forward pass of three
    orpo = make(RECIPES / "mistral-7b-deita/dpo.yaml", "dpo.loss=orpo")
    assert not any(reason.startswith("reference") for reason in orpo.reasons)
    assert (orpo.days or 0) * 86400 == pytest.approx(steps, rel=0.01) and orpo.gpu_bytes == plan.gpu_bytes


ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@pytest.mark.parametrize(
    ("adapted", "dropout", "masked", "kept"),
    [
        # Bytes a token and layer of tensors saved for the backward pass: hidden 512, feed-forward 1,792, 2 of 8 key
        # heads, 512 tokens, adapters of rank 8; counted on a CPU, whose dropout masks have two bytes, not one.
        ((), 0.0, False, 25_161),
        ((), 0.0, True, 27_721),
        (ALL, 0.0, False, 23_225),
        (ALL, 0.05, False, 37_049),
        (ALL, 0.05, True, 39_609),
        (ALL[:4], 0.05, False, 25_737),
        (("q_proj", "v_proj"), 0.05, False, 21_609),
        (("q_proj", "v_proj"), 0.0, True, 21_097),
    ],
)
def test_activations_equal_the_tensors_saved(adapted: tuple[str, ...], dropout: float, masked: bool, kept: int) -> None:
    model = shape.ModelShape(hidden=512, layers=4, heads=8, kv_heads=2, ffn=1792, vocab=64, tied=False)
    layout = memory.Layout("cuda", "bf16", 1, "none", "none", "none", 2, 512, 1)
    layout = dataclasses.replace(
        layout,
        trainable=1 if adapted else None,
        adapted=adapted,
        rank=8 * bool(adapted),
        has_dropout=dropout > 0,
        repeats_keys=masked,
        has_full_masks=masked,
    )
    masks = sum(model.matrices[name][0] for name in adapted) * (dropout > 0)
    assert memory.layer_activation_bytes(model, layout) + masks == pytest.approx(kept, rel=0.003)


def test_masks_of_documents_count_where_attention_has_no_bounds() -> None:
    quarter = ("batch.sequence_length=16384", "batch.tokens_per_step=16384", "batch.micro_batch=1")
    path, hosts = (
        RECIPES / "xuanyuan-6b/pretrain.yaml",
        "hardware={hosts: [{name: a, slots: 8, gpu: %s, memory: 1TiB}]}",
    )
    sizes = [
        memory.gpu_items(model, dataclasses.replace(layout, has_full_masks=masked))["activations"]
        for masked in (False, True)
        for model, layout in [_layout(path, hosts % "V100-32G", *quarter)]
    ]
    assert sizes[1] - sizes[0] == 30 * 16384 * 2 * 16384  # 16 bits a place of the mask, in every layer


def _layout(path: Path, *overrides: str) -> tuple[shape.ModelShape, memory.Layout]:
    model = shape.of(recipe.load(path, overrides).recipe, 39438)
    return model, memory.Layout("cuda", "fp16", 1, "none", "none", "none", 1, 16384, 8)


def test_checkpoints_are_waited_for_where_nothing_else_fits_and_the_recipe_does_not_say() -> None:
    path = RECIPES / "llama2-7b-fincorpus/pretrain.yaml"
    one = ("hardware={hosts: [{name: a, slots: 1, gpu: H100, memory: 128GiB}]}", "zero={}", "batch.micro_batch=auto")
    wanted = ("train.recompute=auto", "checkpoint={every_steps: 100}", *one)
    plan = make(path, *wanted)
    assert plan.fits and not plan.asynchronous_checkpoints
    for ram in ("128GiB", "100GiB"):  # with less, plans that do not fit the GPU are nearer to fit
        tight = make(path, *wanted, f"hardware={{hosts: [{{name: a, slots: 1, gpu: H100, memory: {ram}}}]}}")
        (reason,) = [reason for reason in tight.reasons if reason.startswith("training waits for checkpoints")]
        assert reason.endswith("usable host memory at least")
    with pytest.raises(UserError, match=r"does not fit"):
        make(path, *wanted, "checkpoint.asynchronous=true")
    roomy = make(path, *wanted, "hardware={hosts: [{name: a, slots: 1, gpu: H100, memory: 512GiB}]}")
    assert roomy.asynchronous_checkpoints


ONE = "hardware={hosts: [{name: a, slots: 1, gpu: %s, memory: 512GiB}]}"
EIGHT = "hardware={hosts: [{name: a, slots: 8, gpu: H100, memory: 2TiB}]}"


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    """GRPO of Llama-2-7B's shape: 512 rows of 1,024 tokens a step, half of them the answer's."""
    about = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "hidden_act": "silu"}
    about |= {"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32, "rms_norm_eps": 1e-5}
    about |= {"intermediate_size": 11008, "vocab_size": 32000, "tie_word_embeddings": False}
    files.write_json(tmp_path / "start/config.json", about)
    grpo = {
        "name": "llama-grpo",
        "stage": "grpo",
        "model": {"init_from": str(tmp_path / "start")},
        "chat": {"template": "llama2"},
        "grpo": {"generations": 8, "max_new_tokens": 512},
        "data": {"sources": "prompts.jsonl"},
        "batch": {"sequence_length": 1024, "tokens_per_step": 524288},
        "optim": {"lr": 1e-6, "schedule": "constant", "warmup_steps": 0},
        "train": {"steps": 100},
    }
    files.write_json(tmp_path / "grpo.yaml", grpo)
    return tmp_path / "grpo.yaml"


def test_as_many_answers_are_generated_at_once_as_have_room_for_keys_and_values(llama: Path) -> None:
    an_answer = 2 * 32 * 4096 * 1024 * 2  # keys and values, layers, heads x head size, tokens, bytes
    plan = make(llama, ONE % "H100")
    assert plan.fits and 8 < plan.generation_rows < 512
    assert plan.generation_bytes_items["keys and values"] == plan.generation_rows * an_answer
    assert "gathered weights for generation" not in plan.generation_bytes_items
    states = plan.gpu_bytes_items["weights"] + plan.gpu_bytes_items.get("fp32 master", 0)
    assert states + sum(plan.generation_bytes_items.values()) < plan.gpu_bytes <= plan.gpu_memory_bytes
    assert any(f"answers: {plan.generation_rows} of a rank's 512" in reason for reason in plan.reasons)
    given = make(llama, ONE % "H100", "grpo.generation_rows=16")
    assert given.generation_rows == 16 and given.step_seconds["generation"] > plan.step_seconds["generation"]
    more = make(llama, ONE % "H200", "zero.offload_optimizer=stream")
    assert more.generation_rows > plan.generation_rows


def test_answers_that_have_no_room_are_refused_with_the_number_that_has(llama: Path) -> None:
    with pytest.raises(UserError, match="does not fit") as raised:  # 256 GiB
        make(llama, ONE % "H100", "grpo.generation_rows=512")
    assert "keys and values 256.0 GiB" in str(raised.value.evidence)
    assert "grpo.generation_rows: " in str(raised.value.fix)
    with pytest.raises(UserError, match="does not fit"):
        make(llama, ONE % "RTX-2080Ti")


def test_zero_3_gathers_all_weights_once_to_generate(llama: Path) -> None:
    plan = make(llama, EIGHT, "zero.stage=3")
    assert plan.generation_bytes_items["gathered weights for generation"] == 2 * plan.parameters
    one = make(llama, EIGHT, "zero.stage=1", "grpo.generation_rows=8", "batch.micro_batch=2")
    three = make(llama, EIGHT, "zero.stage=3", "grpo.generation_rows=8", "batch.micro_batch=2")
    assert three.step_seconds["generation"] > one.step_seconds["generation"]
    crowded = make(llama, EIGHT, "zero.stage=3", "batch.micro_batch=1", "train.recompute=full").gpu_bytes_items
    assert crowded["keys and values"] > 0 and crowded["gathered weights for generation"] == 2 * plan.parameters


def test_the_time_of_a_step_has_generation_and_scoring(llama: Path) -> None:
    fixed = (EIGHT, "zero.stage=1", "batch.micro_batch=2", "grpo.generation_rows=8")
    plain = make(llama, *fixed).step_seconds
    # 64 answers in chunks of 8, each of 512 tokens, each of which reads 13.5 GB at 3.35 TB/s at the very least.
    assert plain["generation"] > 8 * 512 * 13.5e9 / 3.35e12 and plain["scoring"] == 0
    shorter = make(llama, *fixed, "grpo.max_new_tokens=256").step_seconds["generation"]
    assert 0.4 < shorter / plain["generation"] < 0.6
    judged = make(llama, *fixed, "grpo.reward=models/judge", "grpo.beta=0.1", "grpo.iterations=2").step_seconds
    assert judged["generation"] == pytest.approx(plain["generation"] / 2)  # two steps learn from the same answers
    once = make(llama, *fixed, "grpo.reward=models/judge").step_seconds["scoring"]
    assert judged["scoring"] == pytest.approx(
        1.5 * once
    )  # reward model, reference and the model itself, every other step
    assert make(llama, *fixed, "grpo.form=ppo").step_seconds["scoring"] == pytest.approx(once, rel=0.1)
    assert "generation" in dict(rows(make(llama, *fixed)))["a step"]
    assert "8 of a rank's 64 at once: keys and values 4.0 GiB" in dict(rows(make(llama, *fixed)))["answers"]
