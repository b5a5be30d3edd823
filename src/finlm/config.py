"""Make DeepSpeed's JSON from (Recipe, Plan): the only producer of DeepSpeed settings, concrete numbers only.

Read against DeepSpeed 0.19.8. What it refuses or silently ignores is refused here, all at once. Left out on purpose:
`activation_checkpointing` (read only by deepspeed.checkpointing; the trainer uses the model's own). `lr_at` gives the
learning rate of every optimizer step as DeepSpeed's schedulers do: the first TWO steps have the rate of the ramp's
start, and the last step is one short of the schedule's end.

`python -m finlm.config` writes configs/ds/<family>-<stage>.json of every recipe on its own hardware; --check compares.
`finlm new` writes the same file for a new recipe, and its README.md with the plan's numbers.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path

from finlm.base import files
from finlm.base.errors import UserError
from finlm.base.units import format_bytes, format_count, format_duration
from finlm.plan import gpus, host_memory, memory, planner
from finlm.plan.plan import ON_HOST, Plan, is_contiguous
from finlm.recipe import cluster, rules, shape
from finlm.recipe import recipe as recipes
from finlm.recipe.schema import Optim, Recipe

NEVER = 1_000_000_000  # steps_per_print: events.jsonl has the numbers
Settings = dict[str, object]  # of DeepSpeed's JSON, or of a section of it


def deepspeed_settings(recipe: Recipe, plan: Plan) -> Settings:
    """Return DeepSpeed's settings for a plan. Raises UserError that lists every setting DeepSpeed would not honour."""
    refused = list(problems(recipe, plan))
    if refused:
        raise UserError(
            f"DeepSpeed would refuse or ignore {len(refused)} setting(s) of {recipe.name}",
            evidence="\n".join(f"{key}: {sentence}" for key, sentence in refused),
            fix="change the recipe, or leave these keys at auto",
        )
    settings: Settings = {
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
        scale = recipe.train.fp16  # whose keys are DeepSpeed's
        settings["fp16"] = {"enabled": True} | scale.model_dump() | {"min_loss_scale": int(scale.min_loss_scale)}
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
    """Yield (recipe key, sentence) for all that DeepSpeed 0.19.8 refuses or ignores. PlanError for an unknown GPU."""
    zero = recipe.zero
    yield from rules.zero_problems(zero, plan.zero_stage, plan.offload_optimizer, plan.offload_param)
    yield from rules.warmup_problems(recipe.optim, plan.steps)
    hosts = tuple(cluster.Host(host.name, host.slots, host.gpu) for host in plan.hosts)
    wrong = gpus.precision_problem(plan.precision, cluster.Cluster(hosts))
    if wrong is not None:
        yield "train.precision", wrong[0]
    if plan.precision == "fp16" and plan.zero_stage == 0:
        yield "zero.stage", "0 in fp16 is DeepSpeed's oldest optimizer, whose loss scale cannot be followed; use 1"
    if plan.precision == "fp16" and not recipe.train.fp16.min_loss_scale.is_integer():
        yield "train.fp16.min_loss_scale", f"{recipe.train.fp16.min_loss_scale:g}: DeepSpeed takes whole numbers only"
    if plan.zero_stage == 3:
        yield from _zero_plus_plus(recipe, plan)


def _zero_plus_plus(recipe: Recipe, plan: Plan) -> Iterator[tuple[str, str]]:
    """Yield (recipe key, sentence) for what is wrong with the ZeRO++ settings: hpZ, quantized weights and gradients."""
    zero = recipe.zero
    slots = {host.slots for host in plan.hosts}
    if plan.world_size % zero.hpz_partition_size:
        yield ("zero.hpz_partition_size", f"{zero.hpz_partition_size} does not divide the {plan.world_size} ranks")
    if zero.quantized_weights and plan.device == "cpu":
        yield "zero.quantized_weights", "needs GPUs (DeepSpeed: This op had not been implemented on CPU backend)"
    if zero.quantized_gradients and len(plan.hosts) == 1:
        yield "zero.quantized_gradients", "has no effect on one host: DeepSpeed quantizes only between hosts"
    elif zero.quantized_gradients and len(slots) > 1:
        yield (
            "zero.quantized_gradients",
            f"needs the same number of GPUs on every host, found {', '.join(map(str, sorted(slots)))}",
        )


def _zero(recipe: Recipe, plan: Plan) -> Settings:
    """Return the section zero_optimization; at stage 0 it has the stage alone."""
    model = shape.of(recipe, plan.vocab_size)
    sizes = memory.bucket_sizes(plan.zero_stage, plan.offload_optimizer, model)
    zero: Settings = {"stage": plan.zero_stage}
    if plan.zero_stage == 0:
        return zero
    zero |= {
        "contiguous_gradients": is_contiguous(plan.zero_stage, plan.world_size, plan.offload_optimizer),
        "overlap_comm": plan.device == "cuda" and plan.world_size > 1,
        "reduce_scatter": True,
        "reduce_bucket_size": sizes.reduce,
        "allgather_partitions": True,
        "allgather_bucket_size": sizes.allgather,
    }
    if plan.offload_optimizer in ON_HOST:
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
        largest, unit = max(plan.padded_vocab_size * model.hidden, *model.layer_sizes), 2**20
        buffer: Settings = {
            "buffer_count": host_memory.NVME_PARAM_BUFFERS,
            "buffer_size": -(-largest // plan.world_size // unit) * unit,  # a rank's part of any weight fits
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


def _offload(recipe: Recipe, plan: Plan, device: str, buffers: Settings) -> Settings:
    """Return the section for offload to `device` (cpu or nvme); `buffers` and the NVMe path are added for nvme only."""
    offload: Settings = {"device": device, "pin_memory": plan.device == "cuda"}
    return offload | {"nvme_path": recipe.zero.nvme_path} | buffers if device == "nvme" else offload


def _optimizer(recipe: Recipe, plan: Plan) -> Settings:
    """Return the optimizer section: Adam or AdamW with the recipe's values; torch's fused one if not offloaded."""
    optim = recipe.optim
    params: Settings = optim.model_dump(mode="json", include={"lr", "betas", "eps", "weight_decay"})
    if optim.optimizer == "adam":
        # Without it DeepSpeed's "Adam" is AdamW (engine.py, ADAM_W_MODE_DEFAULT).
        params["adam_w_mode"] = False
    if plan.offload_optimizer not in ON_HOST:
        # torch's fused AdamW needs no compiler; DeepSpeed's FusedAdam is built at first use.
        params |= {"torch_adam": True, "fused": True}
    return {"type": "AdamW" if optim.optimizer == "adamw" else "Adam", "params": params}


def _scheduler(recipe: Recipe, plan: Plan) -> Settings | None:
    """Return the scheduler section, whose rates lr_at computes; None for a constant rate without warm-up."""
    optim = recipe.optim
    steps = optim.decay_steps or plan.steps
    if optim.schedule == "constant":
        if optim.warmup_steps == 0:
            return None
        params: Settings = {"warmup_min_lr": 0.0, "warmup_max_lr": optim.lr}
        name = "WarmupLR"
    elif optim.schedule == "linear":
        name = "WarmupDecayLR"
        params = {"total_num_steps": steps, "warmup_min_lr": optim.min_lr, "warmup_max_lr": optim.lr}
    else:
        name = "WarmupCosineLR"
        params = {"total_num_steps": steps, "warmup_min_ratio": 0.0, "cos_min_ratio": optim.min_lr / optim.lr}
    return {"type": name, "params": {**params, "warmup_num_steps": optim.warmup_steps, "warmup_type": optim.warmup}}


def _text(settings: Settings) -> str:
    """Return the text of a file in configs/ds."""
    return json.dumps(settings, ensure_ascii=False, indent=2) + "\n"


def settings_of_all_recipes(root: Path) -> dict[Path, str]:
    """Return {path: JSON text} of configs/ds/<family>-<stage>.json for all of root/recipes; writes nothing.

    Raises UserError for an invalid recipe, one that does not fit, or a setting that DeepSpeed would not honour.
    """
    texts = {}
    for path in sorted((root / "recipes").glob("*/*.yaml")):
        recipe = recipes.load(path).recipe
        plan = planner.make(recipe, cluster.from_hardware(recipe.hardware), shape.of(recipe))
        target = root / "configs" / "ds" / f"{path.parent.name}-{path.stem}.json"
        texts[target] = _text(deepspeed_settings(recipe, plan))
    return texts


def differences(root: Path, texts: dict[Path, str]) -> Iterator[str]:
    """Yield a sentence for every file of root/configs/ds that is missing, is orphaned or differs from {path: text}."""
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
    """Write configs/ds/*.json of all recipes, or with --check only compare them; return the exit code.

    `arguments` replace sys.argv[1:]. Prints written paths and differences to stdout. Returns 0 when nothing differs, 1
    when a file differs or has no recipe, 2 after a UserError, which is printed to stderr.
    """
    parser = argparse.ArgumentParser(prog="python -m finlm.config", description=__doc__.split("\n")[0])
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 and name every file that differs")
    parser.add_argument("--root", type=Path, default=Path(), help="directory with recipes/ and configs/ (default: .)")
    options = parser.parse_args(arguments)
    try:
        texts = settings_of_all_recipes(options.root)
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    for path, text in texts.items() if not options.check else ():
        files.write_text(path, text)
        print(path)
    stale = list(differences(options.root, texts))
    for line in stale:
        print(line)
    return int(bool(stale))


def describe_rates(former: Optim, former_steps: int, optim: Optim, steps: int, step: int) -> str:
    """Return a line with the rates at which a finished run ended and at which a longer one goes on after `step`.

    `former` and `former_steps` are of the finished run, `optim` and `steps` of the longer one. If the rate more than
    doubles, the line also says how to keep it low.
    """
    last, then = lr_at(former, former_steps, former_steps - 1), lr_at(optim, steps, step + 1)
    text = f"  learning rate of a run of {steps:,} steps: it ended at {last:.3g} and goes on at {then:.3g}"
    return text + ("; --set optim.schedule=constant --set optim.lr=... would keep it low" if then > 2 * last else "")


def lr_at(optim: Optim, steps: int, step: int) -> float:
    """Return the learning rate of optimizer step `step` (0-based) in a run of `steps` steps, as DeepSpeed sets it.

    optim.decay_steps, if set, replaces `steps`.
    """
    steps = optim.decay_steps or steps
    if optim.schedule == "constant" and optim.warmup_steps == 0:
        return optim.lr
    warmup = max(2, optim.warmup_steps)
    iteration = step - 1  # DeepSpeed's schedules count from -1
    ramp = max(0, iteration) / warmup
    if optim.warmup == "log":
        ramp = math.log(max(0, iteration) + 1) / math.log(warmup)
    if optim.schedule == "constant":
        return optim.lr * (ramp if iteration < warmup else 1.0)
    if optim.schedule == "linear":
        # WarmupDecayLR knows one minimum: it starts the ramp and ends the decay.
        left = max(0.0, (steps - iteration) / max(1.0, steps - warmup))
        return optim.min_lr + (optim.lr - optim.min_lr) * (ramp if iteration < warmup else left)
    if iteration < warmup:
        return optim.lr * ramp
    floor = optim.min_lr / optim.lr
    progress = min(1.0, (iteration - warmup + 1) / max(1, steps - warmup))
    return optim.lr * max(0.0, floor + (1.0 - floor) * (1 + math.cos(math.pi * progress)) / 2)


def write_page(path: Path, parent: Path) -> list[Path]:
    """Append a section about a new recipe to README.md beside it, or write that file; return the paths written.

    `path` is the new recipe, `parent` the one it was made from. If `path` is recipes/FAMILY/STAGE.yaml, relative, and
    configs/ds is in the current directory, also writes configs/ds/FAMILY-STAGE.json. Without a plan (data or parent
    model are missing), numbers and settings are left out. Raises UserError for an invalid recipe, or settings that
    DeepSpeed would refuse, before it writes.
    """
    wanted = recipes.load(path).recipe
    plan, settings = None, None
    with contextlib.suppress(UserError):  # its data or its parent may not be here yet
        plan = planner.make(wanted, cluster.from_hardware(wanted.hardware), shape.of(wanted))
    page, folder = path.parent / "README.md", Path("configs/ds")
    if plan is not None and folder.is_dir() and path.parent.parent == Path("recipes"):
        settings = folder / f"{path.parent.name}-{path.stem}.json"
    text = None if plan is None or settings is None else _text(deepspeed_settings(wanted, plan))
    before = page.read_text(encoding="utf-8").rstrip() + "\n\n#" if page.exists() else ""
    title = wanted.name if before else path.parent.name
    lines = _page_lines(path, parent, settings, wanted, plan)
    files.write_text(page, f"{before}# {title}\n\n" + "\n".join(lines) + "\n")
    if settings is None or text is None:
        return [page]
    files.write_text(settings, text)
    return [page, settings]


def train_command(path: Path) -> str:
    """Return the command that trains a recipe: its stage's script if here, else `finlm train`. Raises as load()."""
    script = Path("scripts") / f"{recipes.load(path).recipe.stage}_run.sh"  # pretrain and sft have one
    return f"bash {script} {path}" if script.is_file() else f"finlm train {path}"


def _page_lines(path: Path, parent: Path, settings: Path | None, wanted: Recipe, plan: Plan | None) -> Iterator[str]:
    """Yield the lines of a new recipe's section in README.md, below the title; fewer without a plan or its settings."""
    yield f"Made from `{parent}` by `finlm new`."
    yield f"`finlm diff {path}` says what differs and what follows."
    yield from ("", "```", f"finlm plan {path}", train_command(path), "```", "", "| | |", "|---|---|")
    hosts = (f"{host.count * host.slots} x {host.gpu or 'CPU rank'}" for host in wanted.hardware.hosts)
    yield f"| hardware | {', '.join(hosts)} |"
    if plan is not None:
        rows = f"micro-batch {plan.micro_batch}, {plan.tokens_per_step:,} tokens a step"
        yield f"| plan | {plan.precision}, ZeRO-{plan.zero_stage}, {rows} |"
        of = f" of {format_bytes(plan.gpu_memory_bytes)} a GPU" if plan.device != "cpu" else " a rank"
        yield f"| memory (plan) | {format_bytes(plan.gpu_bytes)}{of} |"
        length = f"{plan.steps:,} steps, {format_count(plan.steps * plan.tokens_per_step)} tokens"
        if plan.days is not None and plan.tokens_per_second is not None:
            time = f"{format_duration(plan.days * 86400)} at {plan.tokens_per_second:,.0f} tokens/s"
            yield f"| time (plan) | {time}, {length} |"
        else:  # CPU ranks
            yield f"| length (plan) | {length} |"
    yield "| measured | not yet |"
    if settings is not None:
        yield f"| DeepSpeed settings | `{settings}` |"
    yield ""
    yield f"Chosen by us: everything that differs from `{parent}`."
    yield "Say here why, what came out, and on which hardware."


if __name__ == "__main__":
    sys.exit(main())
