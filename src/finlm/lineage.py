"""Which run a `finlm train` goes on with: the same directory, or a new one that continues another plan's training.

Plans never change. When the cluster, the ZeRO stage, the micro-batch or another part of how to train is not what an
unfinished run was planned for, and what it trains is the same (data, order, tokens a step, schedule, seed, precision),
a new run directory begins where that one stopped: its events are copied, its newest proved checkpoint is linked below
continued/, and its manifest names the parent. The parent stays as it is.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finlm.base import checkpoints as disk
from finlm.base import files, screen
from finlm.base.checkpoints import Manifest
from finlm.base.errors import UserError
from finlm.base.rundir import RunDir, locked
from finlm.ops import gather
from finlm.plan.plan import Plan
from finlm.recipe import differences
from finlm.recipe import recipe as recipes
from finlm.recipe.cluster import Cluster, Host
from finlm.recipe.schema import HostAccess, Launch, Recipe

WAYS = {"hosts": {}, "launch": Launch()}  # how hosts are reached and watched: may be mended between two launches
WHAT = (
    *("precision", "steps", "tokens_per_step", "sequence_length", "vocab_size", "padded_vocab_size", "parameters"),
    "device",
)  # of the plan; what it says besides is how
SHOWN = ("world_size", "zero_stage", "offload_optimizer", "offload_param", "micro_batch", "gradient_accumulation_steps")
THREADS = 16


@dataclass(frozen=True)
class Earlier:
    """An unfinished run of the same training under another plan, and what is taken from it."""

    run: RunDir
    checkpoint: Path
    step: int
    changed: tuple[str, ...]

    def bring(self, run: RunDir) -> None:
        """Put the checkpoint (links where the file system allows) and the events into a new run directory."""
        target = run.path / "continued" / self.checkpoint.name
        target.mkdir(parents=True)
        for name in [*Manifest.read(self.checkpoint).files, disk.MANIFEST]:
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            try:
                os.link(self.checkpoint / name, target / name)
            except OSError:
                shutil.copyfile(self.checkpoint / name, target / name)
        shutil.copyfile(self.run.events, run.events)

    def to_json(self) -> dict[str, Any]:
        """For the manifest of the new run."""
        return {"run": str(self.run.path), "step": self.step, "changed": list(self.changed)}


def is_trained(run: RunDir) -> bool:
    """Whether the ranks of a run are done; its export and what follows may be missing."""
    return any(event["status"] == "finished" for event in run.read_events("end"))


def hosts_of(planned: Plan, recipe: Recipe) -> Cluster:
    """The hosts of a plan, reached as the recipe says."""
    return Cluster(
        tuple(
            Host(host.name, host.slots, host.gpu, access=recipe.hosts.get(host.name, HostAccess()))
            for host in planned.hosts
        )
    )


def unfinished(wanted: Recipe, plan: Plan, shards: Path, runs: Path) -> RunDir | None:
    """The newest run of the same recipe, plan and data that is not trained, or not exported and examined to its end.

    Of a trained run the plan may be another one of the same training, and what follows may be asked for otherwise than
    before: an exam that failed is left out, and nothing is lost. Raises UserError when that run is running.
    """
    for run, former, planned in _open(wanted, shards, runs):
        if is_trained(run):
            keys = [key for key, _, _ in differences.differing(former, wanted)]
            if former.name != wanted.name or not all(recipes.is_within(key, recipes.SAME_RUN) for key in keys):
                continue
            if _changed(WHAT, planned, plan):
                continue
            _check_idle(run)
            screen.say(f"{run.path} is trained; going on with what follows (--new starts afresh)")
            return run
        if _differences(planned, plan) or former.model_copy(update=WAYS) != wanted.model_copy(update=WAYS):
            continue
        _check_idle(run)
        step = max((step for step, _ in _checkpoints(run)), default=0)
        screen.say(f"resuming {run.path} from step {step:,} (--new starts afresh)")
        return run
    return None


def earlier(wanted: Recipe, plan: Plan, shards: Path, runs: Path, accept_new: bool = False) -> Earlier | None:
    """What the newest unfinished run of the same training under another plan leaves to go on from; it is said aloud.

    Raises UserError when that run is running, or a host that holds a part of its checkpoint cannot give it.
    """
    told = False
    for run, former, planned in _open(wanted, shards, runs):
        if is_trained(run) or former.name != wanted.name:  # quickstart-* are runs of quickstart-sft too
            continue
        keys = [key for key, _, _ in differences.differing(former, wanted)]
        if what := [key for key in keys if not recipes.is_within(key, recipes.SAME_RUN)]:
            if not told:  # of many former trials the newest is the one that may have been meant
                screen.say(f"{run.path} is not continued: {', '.join(what)} differ")
            told = True
            continue
        if other := _changed(WHAT, planned, plan):
            screen.say(f"{run.path} is not continued: {', '.join(other)} trains something else")
            continue
        stages = planned["zero_stage"], plan.zero_stage
        if "nvme" in (planned["offload_optimizer"], plan.offload_optimizer) or (0 in stages and stages != (0, 0)):
            screen.say(f"{run.path} is not continued: optimizer states move between ZeRO stages 1, 2 and 3 only")
            continue
        with locked(run):
            found = _proved(run, former, Plan.from_json(planned), accept_new)
        if found is not None:
            changed = tuple(_differences(planned, plan)) or tuple(keys)
            step = Manifest.read(found).step
            screen.say(f"continuing {run.path} from step {step:,} in a new run directory (--new starts afresh)")
            screen.say(f"  changed: {'; '.join(changed)}; data, order and tokens a step are the same")
            return Earlier(run, found, step, changed)
    return None


def _check_idle(run: RunDir) -> None:
    """Raises UserError when another process runs it: before doctor asks about the GPUs that it is on."""
    with locked(run):
        pass


def _open(wanted: Recipe, shards: Path, runs: Path) -> Iterator[tuple[RunDir, Recipe, dict[str, Any]]]:
    """Runs of this name and data that `finlm train` has not ended, newest first, with their recipes and plans."""
    every = [RunDir(directory) for directory in sorted(runs.glob(f"{wanted.name}-*"), reverse=True)]
    parents = set()
    for run in every:
        if not (run.manifest.exists() and run.recipe.exists()):
            continue
        try:
            content, planned = files.read_json(run.manifest), files.read_json(run.plan)
        except (OSError, files.NotJson):
            screen.say(f"{run.path} is left out: its manifest.json or plan.json is missing or damaged")
            continue
        if "continues" in content:
            parents.add(Path(content["continues"]["run"]).name)  # beside it, by whatever path it was found then
        if run.path.name in parents or content["shards"]["path"] != str(shards.resolve()):
            continue  # what continues it is newer
        if any(run.read_events("prediction")):  # the last row of `finlm train`
            continue
        try:
            yield run, recipes.load(run.recipe).recipe, planned
        except UserError:  # written by a version with other keys
            continue


def _changed(keys: Sequence[str], planned: Mapping[str, Any], plan: Plan) -> list[str]:
    """`key old -> new` for the keys that two plans do not have alike; the old one as JSON."""
    pairs = ((key, planned.get(key), getattr(plan, key)) for key in keys)
    return [f"{key} {old} -> {new}" for key, old, new in pairs if old != new]


def _differences(old: Mapping[str, Any], plan: Plan) -> list[str]:
    """`key old -> new` for the differing parts of two plans, those that matter most in words; the old one as JSON."""
    new = json.loads(json.dumps(plan.to_json()))
    return _changed(SHOWN, old, plan) or [key for key in new if old.get(key) != new[key]]


def _checkpoints(run: RunDir) -> list[tuple[int, Path]]:
    """(step, directory) of what can be gone on from, oldest first; also the newest, where only other hosts have it."""
    found = [*run.continued_checkpoints(), *run.complete_checkpoints()]
    written = max((row["step"] for row in run.read_events("checkpoint")), default=0)
    if written > max((step for step, _ in found), default=0):
        found.append((written, run.checkpoint(written)))
    return found


def _proved(run: RunDir, former: Recipe, planned: Plan, accept_new: bool) -> Path | None:
    """The newest checkpoint of a run whose files are all here and whole; parts on other hosts are brought here."""
    for step, directory in reversed(_checkpoints(run)):
        if directory.parent == run.checkpoints:
            gather.checkpoint(run, hosts_of(planned, former), step, accept_new)
        try:
            found = disk.faults(directory, Manifest.read(directory).files, THREADS)
        except (OSError, disk.Unreadable) as error:
            found = [f"{disk.MANIFEST}: {error}"]
        if not found:
            return directory
        screen.say(f"{directory} is damaged and not used: {'; '.join(found[:5])}")
    return None
