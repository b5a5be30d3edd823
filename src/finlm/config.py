"""DeepSpeed's JSON from (Recipe, Plan): the only producer of DeepSpeed settings, concrete numbers only.

Read against DeepSpeed 0.19.8. What it refuses or silently ignores is refused here, all at once. Left out on purpose:
`activation_checkpointing` (read only by deepspeed.checkpointing; the trainer uses the model's own).

`python -m finlm.config` writes configs/ds/<family>-<stage>.json of every recipe on its own hardware; --check compares.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from finlm.base import files
from finlm.base.errors import UserError
from finlm.plan import buckets, memory, planner
from finlm.plan.plan import Plan
from finlm.recipe import cluster, rules, shape
from finlm.recipe import recipe as recipes
from finlm.recipe.schema import Recipe

NEVER = 1_000_000_000  # steps_per_print: events.jsonl has the numbers


def deepspeed(recipe: Recipe, plan: Plan) -> dict[str, Any]:
    """The DeepSpeed settings of a plan. Raises UserError that lists every combination DeepSpeed would not honour."""
    found = list(problems(recipe, plan))
    if found:
        raise UserError(
            f"DeepSpeed would refuse or ignore {len(found)} setting(s) of {recipe.name}",
            evidence="\n".join(f"{key}: {sentence}" for key, sentence in found),
            fix="change the recipe, or leave these keys at auto",
        )
    settings: dict[str, Any] = {
        # DeepSpeed holds the product of the three against the world size and counts samples with it, no more: where
        # micro-batches differ, the largest stands for all.
        "train_batch_size": plan.micro_batch * plan.gradient_accumulation_steps * plan.world_size,
        "train_micro_batch_size_per_gpu": plan.micro_batch,
        "gradient_accumulation_steps": plan.gradient_accumulation_steps,
        "gradient_clipping": recipe.optim.clip,
        "zero_optimization": _zero(recipe, plan),
        "optimizer": _optimizer(recipe, plan),
    }
    scheduler = _scheduler(recipe, plan)
    if scheduler is not None:
        settings["scheduler"] = scheduler
    if plan.precision in ("bf16", "fp8"):
        settings["bf16"] = {"enabled": True}
    elif plan.precision == "fp16":
        settings["fp16"] = _fp16(recipe)
    if plan.fp32_gradients:  # never at stage 1, where DeepSpeed takes another optimizer for it
        settings["data_types"] = {"grad_accum_dtype": "fp32"}
    if "nvme" in (plan.offload_optimizer, plan.offload_param):
        settings["aio"] = {
            "block_size": 1048576,
            "queue_depth": 8,
            "intra_op_parallelism": 1,
            "single_submit": False,
            "overlap_events": True,
        }
    settings |= {"steps_per_print": NEVER, "wall_clock_breakdown": False}
    # On by default: it waits for the GPU twice in every micro-step, which then stands still until the host catches up.
    settings["timers"] = {"throughput": {"enabled": False}}
    return settings


def problems(recipe: Recipe, plan: Plan) -> Iterator[tuple[str, str]]:
    """(recipe key, sentence) for everything DeepSpeed 0.19.8 refuses or silently ignores in this plan."""
    zero = recipe.zero
    yield from rules.zero_problems(zero, plan.zero_stage, plan.offload_optimizer, plan.offload_param)
    yield from rules.warmup_problems(recipe.optim, plan.steps)
    hosts = tuple(cluster.Host(host.name, host.slots, host.gpu) for host in plan.hosts)
    wrong = planner.precision_problem(plan.precision, cluster.Cluster(hosts))
    if wrong is not None:
        yield "train.precision", wrong[0]
    if plan.precision == "fp16" and plan.zero_stage == 0:
        yield "zero.stage", "0 in fp16 is DeepSpeed's oldest optimizer, whose loss scale cannot be followed; use 1"
    if plan.precision == "fp16" and not recipe.train.fp16.min_loss_scale.is_integer():
        yield "train.fp16.min_loss_scale", f"{recipe.train.fp16.min_loss_scale:g}: DeepSpeed takes whole numbers only"
    if plan.zero_stage == 3:
        yield from _zero_plus_plus(recipe, plan)


def _zero_plus_plus(recipe: Recipe, plan: Plan) -> Iterator[tuple[str, str]]:
    zero = recipe.zero
    slots = {host.slots for host in plan.hosts}
    if plan.world_size % zero.hpz_partition_size:
        yield (
            "zero.hpz_partition_size",
            f"{zero.hpz_partition_size} does not divide the {plan.world_size} ranks",
        )
    if zero.quantized_weights and plan.device == "cpu":
        yield "zero.quantized_weights", "needs GPUs (DeepSpeed: This op had not been implemented on CPU backend)"
    if zero.quantized_gradients and len(plan.hosts) == 1:
        yield "zero.quantized_gradients", "has no effect on one host: DeepSpeed quantizes only between hosts"
    elif zero.quantized_gradients and len(slots) > 1:
        yield (
            "zero.quantized_gradients",
            f"needs the same number of GPUs on every host, found {', '.join(map(str, sorted(slots)))}",
        )


def _zero(recipe: Recipe, plan: Plan) -> dict[str, Any]:
    sizes = buckets.buckets(plan.zero_stage, plan.offload_optimizer, shape.of(recipe, plan.vocab_size))
    zero: dict[str, Any] = {"stage": plan.zero_stage}
    if plan.zero_stage == 0:
        return zero
    zero |= {
        "contiguous_gradients": buckets.is_contiguous(plan.zero_stage, plan.world_size, plan.offload_optimizer),
        "overlap_comm": plan.device == "cuda" and plan.world_size > 1,
        "reduce_scatter": True,
        "reduce_bucket_size": sizes.reduce,
        "allgather_partitions": True,
        "allgather_bucket_size": sizes.allgather,
    }
    if plan.offload_optimizer in buckets.ON_HOST:
        zero["offload_optimizer"] = _offload(recipe, plan, plan.offload_optimizer, {"buffer_count": 4})
    if plan.zero_stage < 3:
        return zero
    del zero["allgather_partitions"], zero["allgather_bucket_size"]  # stages 1 and 2 only
    zero |= {
        "sub_group_size": sizes.sub_group,
        "stage3_prefetch_bucket_size": sizes.prefetch,
        "stage3_param_persistence_threshold": sizes.persistence,
        "stage3_max_live_parameters": sizes.live,
        "stage3_max_reuse_distance": sizes.live,
        "stage3_gather_16bit_weights_on_model_save": True,
    }
    if plan.compiled:
        # DeepSpeed's own F.linear frees weights that eager autograd would keep; compiled code keeps none. Traced by
        # torch 2.11 it asks for a weight's number, so that every layer is compiled anew: a second each.
        zero["memory_efficient_linear"] = False
    if plan.offload_param != "none":
        buffer = {
            "buffer_count": memory.NVME_PARAM_BUFFERS,
            "buffer_size": _nvme_buffer(recipe, plan),
            "max_in_cpu": sizes.live,
        }
        zero["offload_param"] = _offload(recipe, plan, plan.offload_param, buffer)
    if recipe.zero.hpz_partition_size > 1:
        zero["zero_hpz_partition_size"] = recipe.zero.hpz_partition_size
    if recipe.zero.quantized_weights:
        zero["zero_quantized_weights"] = True
    if recipe.zero.quantized_gradients:
        zero["zero_quantized_gradients"] = True
    return zero


def _offload(recipe: Recipe, plan: Plan, device: str, buffers: dict[str, int]) -> dict[str, Any]:
    offload: dict[str, Any] = {"device": device, "pin_memory": plan.device == "cuda"}
    if device == "nvme":
        offload |= {"nvme_path": recipe.zero.nvme_path, **buffers}
    return offload


def _nvme_buffer(recipe: Recipe, plan: Plan) -> int:
    """Elements: DeepSpeed asserts that a rank's part of every parameter fits one buffer."""
    model = recipe.model
    largest = max(plan.padded_vocab_size, model.ffn_size) * model.hidden_size
    unit = 2**20
    return -(-largest // plan.world_size // unit) * unit


def _optimizer(recipe: Recipe, plan: Plan) -> dict[str, Any]:
    optim = recipe.optim
    params: dict[str, Any] = {
        "lr": optim.lr,
        "betas": list(optim.betas),
        "eps": optim.eps,
        "weight_decay": optim.weight_decay,
    }
    if optim.optimizer == "adam":
        # Without it DeepSpeed's "Adam" is AdamW (engine.py, ADAM_W_MODE_DEFAULT).
        params["adam_w_mode"] = False
    if plan.offload_optimizer not in buckets.ON_HOST:
        # torch's fused AdamW needs no compiler; DeepSpeed's FusedAdam is built at first use.
        params |= {"torch_adam": True, "fused": True}
    return {"type": "AdamW" if optim.optimizer == "adamw" else "Adam", "params": params}


def _scheduler(recipe: Recipe, plan: Plan) -> dict[str, Any] | None:
    """The scheduler whose values plan/schedule.py computes."""
    optim = recipe.optim
    steps = optim.decay_steps or plan.steps
    if optim.schedule == "constant":
        if optim.warmup_steps == 0:
            return None
        params: dict[str, Any] = {"warmup_min_lr": 0.0, "warmup_max_lr": optim.lr}
        name = "WarmupLR"
    elif optim.schedule == "linear":
        name = "WarmupDecayLR"
        params = {"total_num_steps": steps, "warmup_min_lr": optim.min_lr, "warmup_max_lr": optim.lr}
    else:
        name = "WarmupCosineLR"
        params = {"total_num_steps": steps, "warmup_min_ratio": 0.0, "cos_min_ratio": optim.min_lr / optim.lr}
    return {"type": name, "params": {**params, "warmup_num_steps": optim.warmup_steps, "warmup_type": "linear"}}


def _fp16(recipe: Recipe) -> dict[str, Any]:
    fp16 = recipe.train.fp16
    return {
        "enabled": True,
        "loss_scale": fp16.loss_scale,
        "initial_scale_power": fp16.initial_scale_power,
        "loss_scale_window": fp16.loss_scale_window,
        "hysteresis": fp16.hysteresis,
        "consecutive_hysteresis": fp16.consecutive_hysteresis,
        "min_loss_scale": int(fp16.min_loss_scale),
    }


def for_file(path: Path) -> dict[str, Any]:
    """The settings of a recipe file on the hardware it names."""
    recipe = recipes.load(path).recipe
    hosts = cluster.from_hardware(recipe.hardware)
    return deepspeed(recipe, planner.make(recipe, hosts, shape.of(recipe)))


def committed(root: Path) -> dict[Path, str]:
    """Text of every configs/ds/*.json that ought to exist below root."""
    texts = {}
    for path in sorted((root / "recipes").glob("*/*.yaml")):
        settings = for_file(path)
        target = root / "configs" / "ds" / f"{path.parent.name}-{path.stem}.json"
        texts[target] = json.dumps(settings, ensure_ascii=False, indent=2) + "\n"
    return texts


def differences(root: Path) -> Iterator[str]:
    """One sentence for every missing, stale or orphaned file."""
    texts = committed(root)
    for path, text in texts.items():
        name = path.relative_to(root).as_posix()
        if not path.exists():
            yield f"{name} is missing: run `python -m finlm.config`"
        elif path.read_text(encoding="utf-8") != text:
            yield f"{name} is stale: run `python -m finlm.config` and look at the difference"
    for path in sorted((root / "configs" / "ds").glob("*.json")):
        if path not in texts:
            yield f"{path.relative_to(root).as_posix()} has no recipe: remove it with `git rm`"


def main(arguments: list[str] | None = None) -> int:
    """Write or check configs/ds/. Exit 0 = done or equal, 1 = differences, 2 = a mistake in a recipe."""
    parser = argparse.ArgumentParser(prog="python -m finlm.config", description=__doc__.split("\n")[0])
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 and name every file that differs")
    parser.add_argument("--root", type=Path, default=Path(), help="directory with recipes/ and configs/ (default: .)")
    options = parser.parse_args(arguments)
    try:
        if not options.check:
            for path, text in committed(options.root).items():
                files.write_text(path, text)
                print(path)
        found = list(differences(options.root))
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    for line in found:
        print(line)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
