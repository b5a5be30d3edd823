"""Derive from a plan epochs, GPU-hours and cost, end date, checkpoints and their disk, and what would make it faster.

A faster run is a single change of recipe or cluster, each planned anew, the best first. Nothing is decided or applied
here, and nothing is stored in a run.
"""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from finlm.base.units import format_bytes, format_count, format_duration, format_rate
from finlm.plan import gpus, host_memory, memory, search, speed
from finlm.plan.plan import CHOICES, Plan, best_interval, seconds_between
from finlm.plan.search import Candidate
from finlm.recipe import shape as shapes
from finlm.recipe.cluster import Cluster
from finlm.recipe.schema import Recipe
from finlm.recipe.shape import ModelShape

DISK_BYTES_PER_SECOND = 1e9  # a host writes its checkpoint shards; one NVMe disk, assumed
COPY_BYTES_PER_SECOND = 5e9  # a rank's copy to host memory that training waits for; assumed
NIGHT_HOURS = 12


@dataclass(frozen=True)
class Advice:
    """What a plan means. Bytes are of all hosts together, disk bytes of the host that needs most; seconds predicted.

    None is what is unknown or does not apply, as times and costs without a speed. night_steps are those of 12 hours.
    """

    tokens: int
    tokens_per_parameter: float
    epochs: float | None
    epoch_tokens: int | None
    gpu_hours: float | None
    price_per_gpu_hour: float | None
    cost: float | None
    finish: str | None
    night_steps: int | None
    checkpoint_bytes: int
    checkpoint_disk_bytes: int
    checkpoint_stall_seconds: float
    checkpoint_write_seconds: float
    checkpoint_every_steps: int | None
    checkpoint_advised_steps: int | None
    hosts_that_may_be_lost: int
    checkpoint_copy_bytes: int
    checkpoint_copy_disk_bytes: int
    memory_interval_seconds: float | None  # between checkpoints in memory; None = there are none
    memory_bytes: int  # of checkpoints in memory, of the host that needs most


def make_advice(
    recipe: Recipe,
    shape: ModelShape,
    plan: Plan,
    epoch_tokens: int | None = None,
    price: float | None = None,
    now: datetime.datetime | None = None,
) -> Advice:
    """Return the Advice about a plan of `recipe`, whose model has `shape`.

    `epoch_tokens` are the tokens of one epoch of the prepared data, None if unknown. `price` is that of a GPU-hour,
    None for the recipe's. `now` is when the run starts, None for the current time.
    """
    tokens = plan.steps * plan.tokens_per_step
    price = recipe.hardware.price_per_gpu_hour if price is None else price
    hours = None if plan.days is None or plan.device == "cpu" else plan.days * 24 * plan.world_size
    days = None if plan.days is None else datetime.timedelta(days=min(plan.days, 200_000))
    begin = now or datetime.datetime.now()
    whole, share = checkpoint_bytes(recipe, shape, plan)
    of_host = share * max(host.slots for host in plan.hosts)
    write = of_host / DISK_BYTES_PER_SECOND
    copied = copy_bytes(recipe, shape, plan)
    copies = copied * copies_kept(recipe, plan)
    disk = _most_saved(recipe, plan) * (whole if len(plan.hosts) == 1 else min(whole, of_host)) + copies
    copies_first = plan.asynchronous_checkpoints and host_memory.has_snapshot(recipe)
    stall = share / COPY_BYTES_PER_SECOND if copies_first else write
    seconds = plan.tokens_per_step / plan.tokens_per_second if plan.tokens_per_second else None
    return Advice(
        tokens=tokens,
        tokens_per_parameter=tokens / plan.parameters,
        epochs=tokens / epoch_tokens if epoch_tokens else None,
        epoch_tokens=epoch_tokens,
        gpu_hours=hours,
        price_per_gpu_hour=price,
        cost=None if price is None or hours is None else price * hours,
        finish=None if days is None else (begin + days).isoformat(sep=" ", timespec="minutes"),
        night_steps=None if seconds is None else int(NIGHT_HOURS * 3600 / seconds),
        checkpoint_bytes=whole,
        checkpoint_disk_bytes=disk + memory.ELEMENT_BYTES[plan.precision] * shape.parameters,  # the export
        checkpoint_stall_seconds=stall,
        checkpoint_write_seconds=write,
        checkpoint_every_steps=recipe.checkpoint.every_steps,
        checkpoint_advised_steps=_advised_steps(plan, stall, write, seconds),
        hosts_that_may_be_lost=hosts_that_may_be_lost(recipe, plan),
        checkpoint_copy_bytes=copied,
        checkpoint_copy_disk_bytes=copies,
        memory_interval_seconds=memory_interval(recipe, plan, share, stall),
        memory_bytes=plan.host_bytes_items.get(host_memory.IN_MEMORY, 0),
    )


def memory_interval(recipe: Recipe, plan: Plan, share: int, stall: float) -> float | None:
    """Return the seconds between checkpoints in memory, None without any; auto is measured anew while the run trains.

    `share` is the bytes of a rank's files, `stall` the seconds that training waits for a copy of them.
    """
    minutes = recipe.checkpoint.memory_minutes
    if minutes is None:
        return None
    if minutes != "auto":
        return 60.0 * minutes
    sends = len(plan.hosts) > 1 and plan.zero_stage > 0
    network = share * max(host.slots for host in plan.hosts) * 8 / (recipe.hardware.network_gbit * 1e9)
    write = share / COPY_BYTES_PER_SECOND + (network if sends else 0.0)
    return best_interval(stall, seconds_between(plan.world_size), write)


def hosts_that_may_be_lost(recipe: Recipe, plan: Plan) -> int:
    """Return how many hosts may be lost with their disks while the newest checkpoint (disk or memory) stays whole.

    The host that `train` runs on is not counted. Disks are taken to be the hosts' own.
    """
    if plan.zero_stage == 0 or recipe.checkpoint.copies:
        return len(plan.hosts) - 1
    return 1 if len(plan.hosts) > 1 and recipe.checkpoint.memory_minutes is not None else 0


def copy_bytes(recipe: Recipe, shape: ModelShape, plan: Plan) -> int:
    """Return the bytes per checkpoint that checkpoint.copies sends: the shards of all hosts but the first; else 0."""
    if not recipe.checkpoint.copies or plan.zero_stage == 0 or len(plan.hosts) == 1:
        return 0
    whole, largest = checkpoint_bytes(recipe, shape, plan)
    return (whole - largest) * (plan.world_size - plan.hosts[0].slots) // (plan.world_size - 1)


def copies_kept(recipe: Recipe, plan: Plan) -> int:
    """Return the most checkpoints whose copies are at once on the disk of the machine that `train` runs on."""
    return _most_saved(recipe, plan) + 1  # the newest whole one stays until a newer one is whole


def losable_hosts(recipe: Recipe, shape: ModelShape, plan: Plan) -> str:
    """Return a sentence about which hosts may be lost for good, and what that costs; "" for a single host."""
    others = len(plan.hosts) - 1
    if not others:
        return ""
    if plan.zero_stage == 0:
        return f"any but the one that `train` runs on, {others} of {others + 1} hosts: each has the whole checkpoint"
    if not recipe.checkpoint.copies and recipe.checkpoint.memory_minutes is not None:
        return (
            f"any one of {others + 1} hosts but the one that `train` runs on: its part of the newest checkpoint in "
            "memory is in a neighbour's memory too"
        )
    if not recipe.checkpoint.copies:
        return (
            "none: each host alone has its part of a checkpoint (checkpoint.copies: 1 copies them to the machine that "
            "`train` runs on; a shared file system needs none)"
        )
    copied = copy_bytes(recipe, shape, plan)
    stays = ", and needs one in its place: states on NVMe suit no other plan" * (plan.offload_optimizer == "nvme")
    return (
        f"any but the one that `train` runs on, {others} of {others + 1} hosts: it copies {format_bytes(copied)} of "
        f"each checkpoint over the network, which take up to "
        f"{format_bytes(copied * copies_kept(recipe, plan))} of its disk{stays}"
    )


def checkpoint_bytes(recipe: Recipe, shape: ModelShape, plan: Plan) -> tuple[int, int]:
    """Return (bytes of a checkpoint, bytes of the largest rank's files).

    They hold weights in the plan's precision, fp32 master and Adam's moments. Stage 3 keeps no separate weights, stage
    0 in fp32 no separate master. With adapters, frozen weights are kept too, except those in 4 bits.
    """
    e = memory.ELEMENT_BYTES[plan.precision]
    has_master = plan.zero_stage > 0 or e == 2
    trained = plan.parameters if recipe.lora is None else shapes.adapter_parameters(recipe, shape)
    frozen = e * shapes.frozen_parameters(shape, recipe.lora is not None, shapes.is_quantized(recipe))
    states = (8 + 4 * has_master) * trained
    weights = 0 if plan.zero_stage == 3 else e * trained
    ranks = plan.world_size if plan.zero_stage > 0 else 1
    kept = frozen // (ranks if plan.zero_stage == 3 else 1)
    return frozen + weights + states, kept + weights + states // ranks


def _most_saved(recipe: Recipe, plan: Plan) -> int:
    """Return the largest number of checkpoints on the disk at once, including the one that is being written."""
    every, keep = recipe.checkpoint.every_steps, recipe.checkpoint.keep_last
    saved = 1 if every is None else min(keep + 1, plan.steps // every + 1)
    if every and (always := recipe.checkpoint.keep_every_steps):
        saved += max(0, plan.steps // always - keep)
    return saved


def _advised_steps(plan: Plan, stall: float, write: float, step_seconds: float | None) -> int | None:
    """Return the steps between checkpoints that lose the least time, to two digits; None without a speed.

    `stall` and `write` are the seconds that training waits, and until the checkpoint is written. At most the run's
    steps.
    """
    if step_seconds is None:
        return None
    seconds = best_interval(stall, seconds_between(plan.world_size), write)
    steps = max(1, round(seconds / step_seconds))
    digits = max(0, len(str(steps)) - 2)
    return min(plan.steps, round(steps, -digits))


def sentences(advice: Advice, plan: Plan) -> list[tuple[str, str]]:
    """Return (label, sentence) pairs about data, end, GPU-hours and checkpoints, to be printed."""
    rows = []
    if advice.epoch_tokens:
        per = advice.epoch_tokens / plan.parameters
        epoch = f"1 epoch of this corpus = {format_count(advice.epoch_tokens)} tokens = {format_rate(per)} tokens per"
        rows.append(("data", f"{epoch} parameter; the run takes {advice.epochs:.3g} epochs"))
    if advice.finish is not None and plan.tokens_per_second and advice.night_steps is not None:
        night = advice.night_steps * plan.tokens_per_step
        rows.append(("end", f"started now: {advice.finish}"))
        if plan.days and plan.days > 1.5:
            done = f"{NIGHT_HOURS} hours do {advice.night_steps:,} steps = {format_count(night)} tokens"
            rows.append(("a night", f"{done}, {advice.night_steps / plan.steps:.2g} of the run"))
    if advice.gpu_hours is not None:
        cost = "" if advice.cost is None else f", {advice.cost:,.2f} at {advice.price_per_gpu_hour:g} an hour"
        rows.append(("GPU-hours", f"{advice.gpu_hours:,.{0 if advice.gpu_hours >= 100 else 2}f}{cost}"))
    rows.append(("checkpoint", _describe_checkpoint(advice, plan)))
    if advice.memory_interval_seconds is not None:
        size, every = format_bytes(advice.memory_bytes), format_duration(advice.memory_interval_seconds)
        between = format_duration(seconds_between(plan.world_size))
        why = f"of each host's memory (auto: what loses least at the measured stall and one failure in {between})"
        rows.append(("in memory", f"a checkpoint every {every}, in {size} {why}"))
    return rows


def _describe_checkpoint(advice: Advice, plan: Plan) -> str:
    """Return size, cost in time and advised interval of checkpoints in words."""
    every = advice.checkpoint_every_steps
    every = None if every and every >= plan.steps else every
    text = f"{format_bytes(advice.checkpoint_bytes)} each, {format_bytes(advice.checkpoint_disk_bytes)} of disk a host"
    if plan.tokens_per_second is None:
        return text + (f"; every {every:,} steps" if every else "; at the end only")
    step = plan.tokens_per_step / plan.tokens_per_second
    text += (
        f"; training waits {format_duration(advice.checkpoint_stall_seconds)}, the disk is busy for"
        f" {format_duration(advice.checkpoint_write_seconds)}"
    )
    if every is None:
        text += "; at the end only"
    else:
        share = advice.checkpoint_stall_seconds / (every * step + advice.checkpoint_stall_seconds)
        text += f"; every {every:,} steps = {format_duration(every * step)}, {share:.1%} of the time"
    advised = advice.checkpoint_advised_steps
    if advised is not None and advised < plan.steps and every != advised:
        text += f"; every {advised:,} steps = {format_duration(advised * step)} would lose least to failures"
    return text


MORE_HOSTS = (2, 4, 8, 16, 32)
Fitting = Callable[[Recipe, Cluster], list[Candidate]]


def fix_checkpoints(recipe: Recipe, cluster: Cluster, fitting: Fitting) -> str:
    """Return a sentence on the checkpoint key to change so that the recipe fits; "" if no such change is enough.

    Tries it without memory_minutes, then with asynchronous: false. `fitting` returns the candidates that fit a cluster.
    """
    without = recipe.model_copy(update={"checkpoint": recipe.checkpoint.model_copy(update={"memory_minutes": None})})
    if recipe.checkpoint.memory_minutes is not None and fitting(without, cluster):
        return "leave checkpoint.memory_minutes out: checkpoints on disk alone need none of this host memory"
    if fitting(search.with_waiting_checkpoints(recipe), cluster):
        return "set checkpoint.asynchronous: false, which needs no copy of the states in host memory"
    return ""


def other_hosts(recipe: Recipe, cluster: Cluster, fitting: Fitting) -> str:
    """Return in words what would make the recipe fit: fewer ranks a host, else more hosts, shorter rows or other GPUs.

    `fitting` returns the candidates of a recipe that fit a cluster. Names only what was tried and fits; where nothing
    does, says to take a smaller model.
    """
    most = max(host.slots for host in cluster.hosts)
    for slots in range(most - 1, 0, -1):
        fewer = tuple(dataclasses.replace(host, slots=min(slots, host.slots)) for host in cluster.hosts)
        if fitting(recipe, dataclasses.replace(cluster, hosts=fewer)):
            return f"give a host at most slots={slots} in the hostfile (or hardware.hosts) instead of {most}"
    tried = (way for find in (_more_hosts, _shorter_rows, _larger_gpus) for way in find(recipe, cluster, fitting))
    return "; or ".join(tried) or "take a smaller model: neither more hosts nor shorter rows nor a known GPU are enough"


def _more_hosts(recipe: Recipe, cluster: Cluster, fitting: Fitting) -> Iterator[str]:
    """Yield at most one sentence: how many such hosts, up to 32 times as many, would do, with the keys to set."""
    free, hosts = search.relax_recipe(recipe), len(cluster.hosts)
    for factor in MORE_HOSTS:
        if candidates := fitting(free, dataclasses.replace(cluster, hosts=cluster.hosts * factor)):
            keys, _ = nearest_settings(recipe, candidates)
            yield f"use {factor * hosts} such hosts instead of {hosts}" + (f" and set {keys}" if keys else "")
            return


def _shorter_rows(recipe: Recipe, cluster: Cluster, fitting: Fitting) -> Iterator[str]:
    """Yield at most one sentence: the longest of batch.sequence_length / 2, 4, ... 32 that fits; none for GRPO."""
    length = recipe.batch.sequence_length
    for shorter in (length // 2**times for times in range(1, 6) if recipe.stage != "grpo" and length % 2**times == 0):
        batch = recipe.batch.model_copy(update={"sequence_length": shorter})
        if fitting(recipe.model_copy(update={"batch": batch}), cluster):
            yield f"set batch.sequence_length: {shorter}"
            return


def _larger_gpus(recipe: Recipe, cluster: Cluster, fitting: Fitting) -> Iterator[str]:
    """Yield at most one sentence: the known GPU kind with the least memory that would do in every host.

    It has more memory than all present GPUs and is at least as new. Raises PlanError for an unknown GPU kind.
    """
    kinds = [gpus.find(host.gpu) for host in cluster.hosts if host.gpu]
    least, newest = (max((getattr(gpu, n) for gpu in kinds), default=0) for n in ("memory_bytes", "compute_capability"))
    known = (gpu for gpu in gpus.kinds().values() if gpu.compute_capability >= newest and gpu.memory_bytes > least > 0)
    for kind in sorted(known, key=lambda gpu: gpu.memory_bytes):
        hosts = tuple(dataclasses.replace(host, gpu=kind.name) for host in cluster.hosts)
        if fitting(recipe, dataclasses.replace(cluster, hosts=hosts)):
            yield f"use GPUs such as {kind.name}"
            return


def nearest_settings(recipe: Recipe, candidates: Sequence[Candidate]) -> tuple[str, Candidate]:
    """Return (text of the keys to set, the candidate) of the candidate that asks for the fewest changes of the recipe.

    Keys that the recipe leaves to auto, or has at that value, need no change. Raises ValueError for no candidates.
    """
    nearest = min(candidates, key=lambda each: (len(_to_change(recipe, each)), each.complexity))
    return ", ".join(f"{key}: {value}" for key, value in _to_change(recipe, nearest).items()), nearest


def _to_change(recipe: Recipe, other: Candidate) -> dict[str, object]:
    """Return {recipe key: value} for what the recipe fixes at another value than the candidate has."""
    changes: dict[str, object] = {}
    for name, key in CHOICES.items():
        section, _, field = key.partition(".")
        written, value = getattr(getattr(recipe, section), field, "auto"), getattr(other.layout, name)
        if isinstance(written, dict):
            written = value if set(written.values()) == set(other.micro_batches) else 0
        if written not in ("auto", value):
            changes[key] = "auto" if name == "micro_batch" and other.is_unequal else value
    return changes


FASTER_NETWORKS = (25.0, 100.0, 400.0)  # Gb/s
LARGER_STEP = 8
WORTH_SAYING = 1.05
MOST = 5

Fastest = Callable[[Recipe, Cluster], Candidate | None]


@dataclass(frozen=True)
class Change:
    """A single change of recipe or cluster in words, the tokens/s with it, and how many times faster that is."""

    what: str
    tokens_per_second: float
    times: float


def faster_changes(recipe: Recipe, cluster: Cluster, chosen: Candidate, fastest: Fastest) -> list[Change]:
    """Return up to 5 changes that make training at least 5 % faster, best first; [] if `chosen` has no predicted speed.

    `fastest` returns the candidate that the planner takes for a recipe on a cluster, None if nothing fits. Of changes
    that bring the same, returns the first. Raises PlanError for an unknown GPU kind.
    """
    now = chosen.tokens_per_second
    if now is None:
        return []
    changes = []
    for what, other, hosts in _possible_changes(recipe, cluster):
        candidate = fastest(other, hosts)
        if candidate is None or candidate.tokens_per_second is None:
            continue
        times = candidate.tokens_per_second / now
        if times >= WORTH_SAYING:
            differing = _differing_settings(chosen, candidate)
            text = what.format(settings=differing or "the same settings")
            if "{settings}" not in what and differing:
                text += f" (then {differing})"
            changes.append(Change(text, candidate.tokens_per_second, times))
    changes.sort(key=lambda change: -change.times)
    # Of networks that bring the same the slowest is enough.
    distinct: dict[float, Change] = {}
    for change in changes:
        distinct.setdefault(round(change.times, 2), change)
    return list(distinct.values())[:MOST]


def _differing_settings(before: Candidate, after: Candidate) -> str:
    """Return "key: value, ..." of `after` where the two differ, with micro_batch: auto if its are unequal; or ""."""
    old, new = ({name: getattr(each.layout, name) for name in CHOICES} for each in (before, after))
    values = {name: value for name, value in new.items() if value != old[name]}
    values |= {"micro_batch": "auto"} if after.is_unequal else {}
    return ", ".join(f"{CHOICES[name]}: {value}" for name, value in values.items())


def _possible_changes(recipe: Recipe, cluster: Cluster) -> Iterator[tuple[str, Recipe, Cluster]]:
    """Yield (text, recipe, cluster) for each change that might make training faster, with the change made.

    `{settings}` in the text stands for the planner's choices. Only that change, and those of the number of hosts, set
    the recipe's planner choices to auto. Raises PlanError for an unknown GPU kind.
    """
    free = search.relax_recipe(recipe)
    if free != recipe:
        yield "{settings}", free, cluster
    kinds = dict.fromkeys(host.gpu for host in cluster.hosts if host.gpu)
    is_open = recipe.stage == "pretrain" and recipe.train.precision in ("auto", "bf16")
    if is_open and kinds and all(gpus.find(kind).has_fp8 for kind in kinds):
        train = recipe.train.model_copy(update={"precision": "fp8"})
        yield "train.precision: fp8", recipe.model_copy(update={"train": train}), cluster
    larger = recipe.batch.model_copy(update={"tokens_per_step": LARGER_STEP * recipe.batch.tokens_per_step})
    yield (
        f"batch.tokens_per_step: {format_count(larger.tokens_per_step)}, {LARGER_STEP} times as many",
        recipe.model_copy(update={"batch": larger}),
        cluster,
    )
    if search.threads(recipe) < speed.THREADS:
        env = {name: value for name, value in recipe.env.items() if name != "OMP_NUM_THREADS"}
        few = recipe.env["OMP_NUM_THREADS"]
        yield f"OMP_NUM_THREADS: {speed.THREADS} instead of {few}", recipe.model_copy(update={"env": env}), cluster
    if len(cluster.hosts) > 1:
        for gbit in FASTER_NETWORKS:
            if gbit > cluster.network_gbit:
                faster = dataclasses.replace(cluster, network_gbit=gbit)
                yield f"{gbit:g} Gb/s between the hosts instead of {cluster.network_gbit:g}", recipe, faster
    if len(kinds) > 1:
        best = max(kinds, key=lambda kind: gpus.find(kind).peak_flops * gpus.find(kind).mfu)
        hosts = tuple(dataclasses.replace(host, gpu=best) for host in cluster.hosts)
        yield f"{best} in every host", recipe, dataclasses.replace(cluster, hosts=hosts)
        alone = tuple(host for host in cluster.hosts if host.gpu == best)
        yield f"the hosts with {best} alone", free, dataclasses.replace(cluster, hosts=alone)
    twice = dataclasses.replace(cluster, hosts=2 * cluster.hosts)
    yield f"{len(twice.hosts)} such hosts instead of {len(cluster.hosts)}", free, twice
