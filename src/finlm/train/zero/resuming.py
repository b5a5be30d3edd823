"""Choose the checkpoint that the ranks of a run start from, prove it, and load it, cut for this run's ranks."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from finlm.base import checkpoints as disk
from finlm.base.checkpoints import Manifest
from finlm.base.errors import UserError
from finlm.base.rundir import host_name
from finlm.train import entry
from finlm.train.entry import is_due
from finlm.train.zero import storage

if TYPE_CHECKING:
    from finlm.train.zero.checkpoint import Checkpoints


def newest(c: Checkpoints, at_most: int | None = None) -> tuple[Path, Manifest] | None:
    """Return the newest checkpoint that is whole on all ranks' disks, None when there was none; set damaged ones aside.

    at_most: only scheduled ones of this step or before; None also where all of them are damaged. Raises UserError when
    there were checkpoints and all ranks can use none.
    """
    while candidates := _find_common(c, at_most):
        step = max(candidates)
        directory = candidates[step]
        manifest, problem = _prove_checkpoint(c, directory)
        problems = c.gather_problems(problem)
        if manifest and not problems:
            return directory, manifest
        kept = disk.set_aside(directory).name if c.leads else ""
        names = ", ".join(dict.fromkeys(name for name in entry.gather_values(kept) if name))
        c.note(step, "damaged checkpoint", f"{'; '.join(problems[:5])}; set aside as {names}, not used")
    folders = c.run.checkpoints, c.run.path / "continued"
    damaged = [str(path) for folder in folders for path in sorted(folder.glob("step-*.damaged"))]
    if at_most is None and (every := [name for names in entry.gather_values(damaged) for name in names]):
        raise UserError(
            "no whole checkpoint is left",
            evidence="damaged: " + ", ".join(dict.fromkeys(every)),
            fix="restore one of them from a copy, or start another run with --new",
        )
    if at_most is None and (recorded := entry.gather_values(c.run.recorded_checkpoint())[0]):
        raise disk.missing_error(c.run.path, dict.fromkeys(entry.gather_values(host_name()), ()), recorded=recorded)
    return None


def _find_common(c: Checkpoints, at_most: int | None) -> dict[int, Path]:
    """Return directories by step of the checkpoints that all ranks have, also of the run that this run continues.

    at_most: of those only scheduled ones of this step or before.
    Raises UserError when there is none though some rank has one.
    """
    # Of one step both are there when another plan cuts the shards anew: only the first has the parts of all hosts.
    here = dict((*c.run.complete_checkpoints(), *c.run.continued_checkpoints()))
    every = entry.gather_values((host_name(), disk.identities(here.items())))
    common = disk.common_steps([steps for _, steps in every])
    if not common and any(steps for _, steps in every):
        raise disk.missing_error(c.run.path, dict(every))
    if at_most is None:
        return {step: here[step] for step in common}
    scheduled = {step for step in common if here[step].parent != c.run.checkpoints or is_due(step, c.keep.every_steps)}
    return {step: here[step] for step in scheduled if step <= at_most}


def _prove_checkpoint(c: Checkpoints, directory: Path) -> tuple[Manifest | None, str]:
    """Return (manifest, what is wrong with this rank's share of the files, or ""); None for an unreadable manifest.

    The share: its own files, and some of absent ranks.
    """
    try:
        manifest = Manifest.read(directory)
    except disk.Unreadable as error:
        return None, error.problem
    owners = {part.rank for part in manifest.files.values()} & set(c.members)
    layout = c.world_size, c.plan.zero_stage, c.plan.offload_optimizer
    has_copies = directory.parent == c.run.checkpoints and manifest.layout == layout  # those hosts prove their own
    mine = {}
    for number, (name, part) in enumerate(manifest.files.items()):
        if has_copies and part.rank not in owners:
            continue
        owner = part.rank if part.rank in owners else c.members[number % len(c.members)]
        if owner == c.rank:
            mine[name] = part
    if c.leads and (unknown := disk.strangers(directory, manifest)):
        print(f"{directory}: not in its manifest, ignored: {', '.join(unknown)}", flush=True)
    return manifest, "; ".join(disk.faults(directory, mine, c.threads))


def load(c: Checkpoints, directory: Path, manifest: Manifest) -> None:
    """Load a proved checkpoint into the engine, cut for its ranks, ZeRO stage and groups, and into c.watch_loaded.

    Records where it had to be cut. Restores random generators where this rank saved some among as many
    ranks. Raises RuntimeError when DeepSpeed does not load it.
    """
    layout, wanted = manifest.layout, (c.world_size, c.plan.zero_stage, c.plan.offload_optimizer)
    folder, tag = str(directory.parent), directory.name
    name = c.engine._get_ckpt_name(folder, tag)
    if manifest.zero_stage == c.plan.zero_stage == 0 or (layout == wanted and storage.has_groups(c.engine, Path(name))):
        c.store.given = {disk.MANIFEST: c.store.load(name)}
    else:
        shards = storage.Shards(directory, manifest)
        shard = Path(c.engine._get_zero_ckpt_name(folder, tag)).name
        c.store.given = {
            disk.MANIFEST: storage.model_state(c.engine, shards, c.world_size),
            shard: storage.optimizer_state(c.engine, shards, c.rank, c.world_size),
        }
        c.events.record("resharded", step=manifest.step, saved=list(layout), loaded=list(wanted))
    if c.plan.offload_optimizer == "none":
        storage.free_moments(c.engine.module, c.engine.basic_optimizer)
    loaded, _ = c.engine.load_checkpoint(folder, tag=tag)
    c.store.given = {}
    if loaded is None:
        raise RuntimeError(f"DeepSpeed did not load {directory}")
    if c.plan.offload_optimizer == "cpu":
        storage.replay_powers(c.engine.basic_optimizer)
    names = sorted(name for name in manifest.files if name.startswith("loop_rank_") and (directory / name).exists())
    mine = f"loop_rank_{c.rank}.pt"
    loop = c.store.load(str(directory / (mine if mine in names else names[0]))) if names else {}
    if mine in names and manifest.world_size == c.world_size:
        entry.restore_generators(loop["generators"])
    c.watch_loaded = entry.gather_values(loop.get("watch"))[0]
