"""Resuming: which checkpoint, proved how, loaded into which layout.

The newest one that every rank's directory has; each rank proves its share of the files by their hashes, in parallel,
before anything is loaded. A damaged one is set aside and named, and the one before it is used.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from finlm.base import checkpoints as disk
from finlm.base.checkpoints import Manifest
from finlm.base.errors import UserError
from finlm.train import checkpoint_layout, checkpoint_store, generators, groups

if TYPE_CHECKING:
    from finlm.train.checkpoint import Checkpoints


def newest(c: Checkpoints, at_most: int | None = None) -> tuple[Path, Manifest] | None:
    """The newest checkpoint (of step at_most or before) that is whole on all ranks' disks; None when there was none.

    Raises UserError when there were checkpoints and none can be used.
    """
    while candidates := _common(c, at_most):
        step = max(candidates)
        directory = candidates[step]
        manifest, problem = _proved(c, directory)
        problems = c.told(problem)
        if manifest and not problems:
            return directory, manifest
        kept = disk.set_aside(directory).name if c.leads else ""
        names = ", ".join(dict.fromkeys(name for name in groups.gathered(kept) if name))
        c.tell(step, "damaged checkpoint", f"{'; '.join(problems[:5])}; set aside as {names}, not used")
    folders = c.run.checkpoints, c.run.path / "continued"
    damaged = [str(path) for folder in folders for path in sorted(folder.glob("step-*.damaged"))]
    if at_most is None and (every := [name for names in groups.gathered(damaged) for name in names]):
        raise UserError(
            "no whole checkpoint is left",
            evidence="damaged: " + ", ".join(dict.fromkeys(every)),
            fix="restore one of them from a copy, or start another run with --new",
        )
    return None


def _common(c: Checkpoints, at_most: int | None) -> dict[int, Path]:
    """Checkpoints that all ranks have, with the one of another run that this run continues."""
    own = dict((*c.run.continued_checkpoints(), *c.run.complete_checkpoints()))
    every = groups.gathered(sorted(own))
    common = set(every[0]).intersection(*every)
    if every[0] and not common:  # rank 0's is published last, so the others had it
        without = min(rank for rank, steps in enumerate(every) if not set(steps) & set(every[0]))
        raise UserError(
            f"rank {without} has none of the checkpoints that rank 0 has",
            evidence=f"rank 0: steps {every[0]}; rank {without}: {every[without] or 'none'}",
            fix=f"bring {c.run.checkpoints} back to the host of rank {without}, or start another run with --new",
        )
    return {step: own[step] for step in common if at_most is None or step <= at_most}


def _proved(c: Checkpoints, directory: Path) -> tuple[Manifest | None, str]:
    """The manifest, and what is wrong with this rank's share of the files."""
    try:
        manifest = Manifest.read(directory)
    except disk.Unreadable as error:
        return None, error.problem
    return manifest, _damage(c, directory, manifest)


def _damage(c: Checkpoints, directory: Path, manifest: Manifest) -> str:
    """What is wrong with this rank's share of the files: those it wrote, and a part of those of absent ranks."""
    owners = {part.rank for part in manifest.files.values()} & set(c.members)
    mine = {}
    for number, (name, part) in enumerate(manifest.files.items()):
        owner = part.rank if part.rank in owners else c.members[number % len(c.members)]
        if owner == c.rank:
            mine[name] = part
    if c.leads and (unknown := disk.strangers(directory, manifest)):
        print(f"{directory}: not in its manifest, ignored: {', '.join(unknown)}", flush=True)
    return "; ".join(disk.faults(directory, mine, c.threads))


def load(c: Checkpoints, directory: Path, manifest: Manifest) -> None:
    """Bring a proved checkpoint into the engine, cut for its ranks, ZeRO stage and groups, and the generators."""
    layout, own = manifest.layout, (c.world_size, c.plan.zero_stage, c.plan.offload_optimizer)
    folder, tag = str(directory.parent), directory.name
    name = c.engine._get_ckpt_name(folder, tag)
    if manifest.zero_stage == c.plan.zero_stage == 0 or (layout == own and _has_groups(c.engine, Path(name))):
        c.store.given = {disk.MANIFEST: c.store.load(name)}
    else:
        shards = checkpoint_layout.Shards(directory, manifest)
        shard = Path(c.engine._get_zero_ckpt_name(folder, tag)).name
        c.store.given = {
            disk.MANIFEST: checkpoint_layout.model_state(c.engine, shards, c.world_size),
            shard: checkpoint_layout.optimizer_state(c.engine, shards, c.rank, c.world_size),
        }
        c.events.record("resharded", step=manifest.step, saved=list(layout), loaded=list(own))
    if c.plan.offload_optimizer == "none":
        free_moments(c.engine.module, c.engine.basic_optimizer)
    loaded, _ = c.engine.load_checkpoint(folder, tag=tag)
    c.store.given = {}
    if loaded is None:
        raise RuntimeError(f"DeepSpeed did not load {directory}")
    if c.plan.offload_optimizer == "cpu":
        replay_powers(c.engine.basic_optimizer)
    if (file := directory / f"loop_rank_{c.rank}.pt").exists() and manifest.world_size == c.world_size:
        generators.restore(c.store.load(str(file))["generators"])


def _has_groups(engine: Any, model_states: Path) -> bool:
    """Whether a checkpoint's optimizer has the engine's groups; other versions cut other ones."""
    saved = checkpoint_store.load(model_states, mmap=True)["param_shapes"]
    return [list(group) for group in engine._get_zero_param_shapes()] == [list(group) for group in saved]


def free_moments(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Make room for what is loaded: after a roll back, torch would build Adam's moments beside those that are there.

    8 bytes a parameter of a rank's share, which no plan counts. DeepSpeed's parameters hold views of them.
    """
    for parameter in model.parameters():
        if (mapping := getattr(parameter, "_hp_mapping", None)) is not None and mapping.optim_fragment:
            mapping.optim_fragment.clear()
    optimizer.state.clear()


def replay_powers(optimizer: Any) -> None:
    """Bring DeepSpeed's CPU Adam to the powers of its betas that it had when the checkpoint was written.

    It keeps them in C++ as products of one factor a step and, after a load, computes the next ones by pow(): other last
    bits in every weight (cpu_adam.h, IncrementStep). Steps of a single element go through the same products: 1 us each.
    """
    if not hasattr(optimizer, "ds_opt_adam"):
        return
    group = optimizer.param_groups[0]
    settings = group["lr"], *group["betas"], group["eps"], group["weight_decay"], group["bias_correction"]
    scratch = [torch.zeros(1) for _ in range(4)]  # weight, gradient, moments
    for step in range(1, max((int(state["step"]) for state in optimizer.state.values() if state), default=0) + 1):
        optimizer.ds_opt_adam.adam_update(optimizer.opt_id, step, *settings, *scratch)
