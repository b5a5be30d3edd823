"""The planner: what it chooses, what it never changes, what it says when nothing fits."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from finlm.base.errors import UserError
from finlm.plan import gpus, planner
from finlm.plan.gpus import PlanError
from finlm.plan.plan import Plan
from finlm.recipe import cluster, recipe, shape

RECIPES = Path(__file__).resolve().parents[2] / "recipes"
QUICKSTART = RECIPES / "quickstart/pretrain.yaml"
MIXED = RECIPES / "llama2-7b-fincorpus/pretrain.yaml"
SIX_B = RECIPES / "xuanyuan-6b/pretrain.yaml"
AUTO = ["zero.stage=auto", "zero.offload_optimizer=auto", "zero.offload_param=auto", "train.recompute=auto"]
AUTO += ["batch.micro_batch=auto", "train.precision=auto"]


def host(**fields: Any) -> str:
    return f"hardware.hosts=[{json.dumps({'name': 'h', **fields})}]"


def make(path: Path, *overrides: str, train_tokens: int | None = None) -> Plan:
    wanted = recipe.load(path, overrides).recipe
    return planner.make(wanted, cluster.from_hardware(wanted.hardware), shape.of(wanted), train_tokens)


def test_the_quickstart_plans_two_cpu_ranks() -> None:
    plan = make(QUICKSTART)
    assert (plan.device, plan.precision, plan.zero_stage) == ("cpu", "fp32", 1)
    assert (plan.micro_batch, plan.gradient_accumulation_steps, plan.steps) == (8, 1, 250)
    assert plan.tokens_per_second is None
    assert plan.days is None
    assert plan.peak_flops is None
    assert plan.fits
    assert plan.gpu_bytes == sum(plan.gpu_bytes_items.values()) < plan.gpu_memory_bytes


def test_a_plan_survives_json() -> None:
    plan = make(MIXED)
    assert Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan


def test_explicit_values_are_never_changed() -> None:
    plan = make(MIXED)
    assert (plan.zero_stage, plan.offload_optimizer, plan.offload_param) == (3, "cpu", "cpu")
    assert (plan.recompute, plan.micro_batch, plan.tokens_per_step) == ("full", 1, 16384)


def test_the_mixed_clusters_run_does_not_fit_without_offload_and_the_error_says_what_would() -> None:
    for rows in (4, 1):
        tokens = 4 * 4096 * rows
        with pytest.raises(PlanError) as caught:
            make(
                MIXED,
                "zero.offload_optimizer=none",
                "zero.offload_param=none",
                f"batch.micro_batch={rows}",
                f"batch.tokens_per_step={tokens}",
            )
        assert "of 31.8 GiB a GPU" in caught.value.evidence
        assert "zero.offload_optimizer: cpu" in caught.value.fix


def test_a_v100_makes_the_whole_cluster_fp16_and_says_which_host() -> None:
    plan = make(MIXED)
    assert plan.precision == "fp16"
    assert "fp16: host v100 has V100-32G, compute capability 7.0 < 8.0" in plan.reasons


def test_the_smallest_memory_binds_a_mixed_cluster() -> None:
    plan = make(MIXED)
    assert plan.gpu_memory_bytes == int(32 * 2**30 * (1 - gpus.DRIVER_SHARE))
    assert any(reason.startswith("mixed GPUs") for reason in plan.reasons)


def test_auto_finds_a_faster_plan_for_the_mixed_cluster_than_the_record() -> None:
    plan, theirs = make(MIXED, *AUTO), make(MIXED)
    assert plan.fits
    assert (plan.tokens_per_second or 0) > 1.3 * (theirs.tokens_per_second or 0)
    assert plan.zero_stage < 3  # stage 3 gathers the weights over the network in every micro-step


def test_bf16_on_a_v100_is_refused() -> None:
    with pytest.raises(PlanError, match=r"compute capability 7\.0 < 8\.0"):
        make(MIXED, "train.precision=bf16")


@pytest.mark.parametrize(
    ("gpu", "instead"), [("A800-80G", "use bf16"), ("V100-32G", "use fp16"), ("NVIDIA A10", "use bf16")]
)
def test_fp8_on_a_gpu_without_it_names_the_gpu_and_the_precision_to_take(gpu: str, instead: str) -> None:
    with pytest.raises(PlanError) as caught:
        make(SIX_B, host(slots=8, gpu=gpu, memory="1TiB"), "train.precision=fp8", "model.init_from=null")
    kind = gpus.find(gpu).name
    assert caught.value.problem.endswith(f"float8 matrix units on every GPU: {kind} of host h has none")
    assert caught.value.fix.startswith(instead)


def test_fp16_on_cpu_is_refused() -> None:
    with pytest.raises(PlanError, match="fp16 does not run on CPU"):
        make(QUICKSTART, "train.precision=fp16")


def test_fp16_with_a_high_learning_rate_is_warned_about() -> None:
    warned = make(SIX_B, host(slots=8, gpu="V100-32G", memory="1TiB"), *AUTO)
    assert any("Current loss scale already at minimum" in reason for reason in warned.reasons)
    calm = make(MIXED)
    assert not any("loss scale" in reason for reason in calm.reasons)


def test_a_speed_beyond_what_was_measured_is_warned_about() -> None:
    world = RECIPES / "synthetic-world-100m/pretrain.yaml"
    assert any("fitted to hidden sizes from 1,024 on" in reason for reason in make(world).reasons)
    assert not any("fitted to" in reason for reason in make(MIXED).reasons)


@pytest.mark.parametrize(
    ("gpu", "slots"), [("H200", 1), ("H200", 4), ("A800-80G", 8), ("A100-40G", 8), ("RTX-4090", 8)]
)
def test_auto_fits_every_host_it_is_given(gpu: str, slots: int) -> None:
    plan = make(SIX_B, host(slots=slots, gpu=gpu, memory="512GiB"), *AUTO)
    assert plan.fits
    assert plan.gpu_bytes <= plan.gpu_memory_bytes
    assert plan.host_bytes <= 0.9 * 512 * 2**30
    assert plan.zero_stage > 0


def test_more_memory_means_less_machinery() -> None:
    large = make(SIX_B, host(slots=8, gpu="H200", memory="1TiB"), *AUTO)
    small = make(SIX_B, host(slots=8, gpu="V100-16G", memory="1TiB"), *AUTO)
    assert (large.zero_stage, large.offload_optimizer, large.recompute) == (1, "none", "none")
    assert (small.zero_stage, small.recompute) > (1, "none")


def test_the_faster_gpu_of_a_mixed_cluster_does_more_rows_of_the_same_step() -> None:
    wanted = ["batch.tokens_per_step=1048576", "hardware.network_gbit=200"]
    plan, equal = (make(MIXED, *wanted, f"batch.micro_batch={rows}") for rows in ("auto", "4"))
    fast, slow = plan.hosts
    assert fast.micro_batch > 2 * slow.micro_batch
    assert plan.rank_micro_batches == (*[fast.micro_batch] * 2, *[slow.micro_batch] * 2)
    assert plan.micro_batch == fast.micro_batch
    assert plan.tokens_per_step == equal.tokens_per_step == 1_048_576
    assert sum(plan.rank_micro_batches) * plan.gradient_accumulation_steps * 4096 == plan.tokens_per_step
    assert (plan.tokens_per_second or 0) > 1.6 * (equal.tokens_per_second or 0)
    assert fast.gpu_bytes <= 40 * 2**30 and slow.gpu_bytes <= 32 * 2**30 and slow.gpu_bytes < fast.gpu_bytes
    assert any("sets the speed of all" in reason for reason in plan.reasons)


def test_a_recipe_may_give_each_gpu_kind_or_host_its_micro_batch() -> None:
    plan = make(MIXED, "batch.micro_batch={a100-40g: 3, v100: 1}", "batch.tokens_per_step=50k")
    assert [host.micro_batch for host in plan.hosts] == [3, 1]
    assert plan.tokens_per_step == 2 * (2 * 3 + 2 * 1) * 4096  # 50,000 in whole micro-steps of all ranks
    assert any("rounded to 65,536: 16 rows" in reason for reason in plan.reasons)
    with pytest.raises(PlanError) as caught:
        make(MIXED, "batch.micro_batch={A100-80G: 3, v100: 1}")
    assert "nothing for a100 (A100-40G)" in caught.value.evidence and "A100-80G" in caught.value.evidence
    with pytest.raises(PlanError, match="does not fit"):
        make(MIXED, "batch.micro_batch={A100-40G: 1, v100: 40}", "batch.tokens_per_step=1M")


def test_host_memory_is_a_limit_too() -> None:
    with pytest.raises(PlanError) as caught:
        make(MIXED, host(slots=1, gpu="T4", memory="32GiB"), *AUTO)
    assert "host memory" in caught.value.evidence
    assert caught.value.fix.startswith("use ")


def test_more_ranks_than_a_hosts_memory_holds_are_told_how_many_it_holds() -> None:
    with pytest.raises(PlanError) as caught:
        make(RECIPES / "quickstart/pretrain.yaml", "hardware.hosts=[{name: localhost, slots: 64, memory: 8GiB}]")
    assert caught.value.fix == "give a host at most slots=12 in the hostfile (or hardware.hosts) instead of 64"


def test_what_fits_nowhere_says_how_many_hosts_would_do() -> None:
    with pytest.raises(PlanError) as caught:
        make(RECIPES / "xuanyuan-70b/pretrain.yaml", host(slots=8, gpu="A100-80G", memory="256GiB"), *AUTO)
    assert "such hosts instead of 1" in caught.value.fix


def refusal(path: Path, *overrides: str) -> PlanError:
    with pytest.raises(PlanError) as caught:
        make(path, *overrides)
    return caught.value


def test_the_advice_names_only_keys_that_the_recipe_fixes_and_that_help() -> None:
    small = host(slots=8, gpu="A100-40G", memory="1TiB")
    fixed = (*AUTO, small, "zero.stage=1", "train.recompute=full")
    asked = refusal(SIX_B, *fixed, "zero.offload_optimizer=none", "batch.sequence_length=8192")
    (found,) = re.findall(r"^set (.*) \(needs", asked.fix)
    keys = dict(one.split(": ") for one in found.split(", "))
    assert "train.recompute" not in keys and "batch.micro_batch" not in keys, "it has them, or leaves them open"
    changed = [f"{key}={value}" for key, value in keys.items()]
    assert make(SIX_B, *fixed, "zero.offload_optimizer=none", "batch.sequence_length=8192", *changed).fits


def test_what_fits_nowhere_is_told_rows_and_gpus_that_were_tried() -> None:
    wide = refusal(RECIPES / "xuanyuan-70b/pretrain.yaml", "hardware.hosts=[{name: h, slots: 8, gpu: A100-40G}]", *AUTO)
    for part in wide.fix.split("; or "):
        key, _, value = part.removeprefix("set ").partition(": ")
        kind = part.rpartition(" ")[2] if part.startswith("use GPUs") else "A100-40G"
        hosts = int(part.split()[1]) if "such hosts" in part else 1
        row = ", ".join(f"{{name: h{n}, slots: 8, gpu: {kind}}}" for n in range(hosts))
        sets = [f"{key}={value}"] if key == "batch.sequence_length" else []
        if "such hosts" not in part or "set" not in part:
            assert make(RECIPES / "xuanyuan-70b/pretrain.yaml", f"hardware.hosts=[{row}]", *AUTO, *sets).fits


def test_the_host_that_is_short_of_memory_is_named() -> None:
    hosts = "[{name: rich, slots: 1, gpu: H200, memory: 64GiB}, {name: poor, slots: 4, gpu: H200, memory: 100GiB}]"
    asked = refusal(SIX_B, f"hardware.hosts={hosts}", *AUTO, "zero.offload_optimizer=cpu", "zero.stage=2")
    assert "if poor has more than 100.0 GiB of memory, say so" in asked.fix


def test_rounding_of_tokens_per_step_is_said() -> None:
    plan = make(QUICKSTART, "batch.tokens_per_step=8000", "batch.micro_batch=3")
    assert plan.tokens_per_step == 2 * 15 * 256
    assert any("tokens_per_step 8,000 rounded to 7,680" in reason for reason in plan.reasons)
    assert not any("rounded" in reason for reason in make(QUICKSTART).reasons)


@pytest.mark.parametrize(("tokens", "rows"), [(512, 1), (1024, 2), (5120, 5), (7680, 5), (65536, 8)])
def test_the_cpu_micro_batch_is_the_largest_up_to_eight_that_divides_the_rows(tokens: int, rows: int) -> None:
    plan = make(QUICKSTART, f"batch.tokens_per_step={tokens}")
    assert plan.micro_batch == rows
    assert plan.tokens_per_step == tokens == 2 * rows * plan.gradient_accumulation_steps * 256


def test_a_cpu_takes_fewer_rows_before_it_computes_activations_twice() -> None:
    roomy, tight = (make(QUICKSTART, "hardware.hosts[0].memory=" + memory) for memory in ("8GiB", "2GiB"))
    assert (roomy.recompute, roomy.micro_batch) == ("none", 8)
    assert (tight.recompute, tight.micro_batch) == ("none", 4)
    assert any(re.search(r"micro-batch 4: 8 rows would need .* usable host memory", why) for why in tight.reasons)


def test_length_comes_from_steps_tokens_or_epochs() -> None:
    assert make(QUICKSTART, "train.steps=null", "train.tokens=4M").steps == 4_000_000 // 4096
    epochs = ["train.steps=null", "train.epochs=1.5"]
    assert make(QUICKSTART, *epochs, train_tokens=819_200).steps == 300
    with pytest.raises(PlanError, match=r"train\.epochs needs"):
        make(QUICKSTART, *epochs)
    with pytest.raises(PlanError, match="warmup_steps"):
        make(QUICKSTART, *epochs, train_tokens=50_000)


def test_unknown_host_memory_is_not_checked_and_said() -> None:
    plan = make(SIX_B, host(slots=8, gpu="A800-80G"))
    assert plan.fits
    assert any("memory of some hosts is unknown" in reason for reason in plan.reasons)


def test_a_host_without_gpu_among_gpu_hosts_is_refused() -> None:
    hosts = "[{name: a, slots: 2, gpu: H200}, {name: b, slots: 2}]"
    with pytest.raises(PlanError, match="some hosts have GPUs"):
        make(SIX_B, f"hardware.hosts={hosts}")


def test_nvidia_smi_names_become_kinds() -> None:
    plan = make(SIX_B, host(slots=8, gpu="NVIDIA A800-SXM4-80GB", memory="1TiB"))
    assert {one.gpu for one in plan.hosts} == {"A800-80G"}


def test_a_hundred_hosts_plan_in_a_second() -> None:
    plan = make(RECIPES / "xuanyuan-70b/pretrain.yaml")
    assert (len(plan.hosts), plan.world_size, plan.gradient_accumulation_steps) == (100, 800, 1)
    assert plan.hosts[99].name == "a800-100"


def test_stage_0_in_16_bits_is_warned_about_and_never_chosen() -> None:
    plan = make(SIX_B, host(slots=1, gpu="B200", memory="1TiB"), "zero.stage=0", "batch.micro_batch=1")
    assert any("step on zero gradients" in reason for reason in plan.reasons)
    assert make(SIX_B, host(slots=1, gpu="B200", memory="1TiB"), *AUTO).zero_stage == 1


def test_a_plan_of_another_version_says_where_its_code_is() -> None:
    value = {"recipe": "old", "hosts": [], "reasons": []}
    with pytest.raises(UserError, match="another version of finlm"):
        Plan.from_json(value)
