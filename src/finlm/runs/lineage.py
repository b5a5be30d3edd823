"""Decide which run a `finlm train` goes on with, and where it starts from when model.init_from names a recipe.

Plans never change. When the cluster, ZeRO stage, micro-batch or another part of how to train differs from an unfinished
run's plan, but what it trains is the same (data, order, tokens a step, schedule, seed, precision), a new run directory
begins where that run stopped: its events are copied, its newest intact checkpoint is linked below continued/, and the
manifest names the parent. The parent stays as it is.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from finlm.base import checkpoints as disk
from finlm.base import files, runs, screen
from finlm.base.checkpoints import Manifest
from finlm.base.errors import UserError
from finlm.base.rundir import RunDir
from finlm.base.runs import is_finished, list_runs, lock_run
from finlm.base.step_cache import NotPrepared
from finlm.doctor import gpus
from finlm.hosts import checkpoint_parts
from finlm.launch import restart
from finlm.plan.plan import Plan, hosts_error
from finlm.recipe import parents, rules
from finlm.recipe import recipe as recipes
from finlm.recipe.cluster import Cluster, Host
from finlm.recipe.parents import Load
from finlm.recipe.schema import HostAccess, Launch, Optim, Recipe
from finlm.tokens import pretrained

WAYS = {"hosts": {}, "launch": Launch()}  # how hosts are reached and watched: may be mended between two launches
SIZES = ("steps", "tokens_per_step", "sequence_length", "vocab_size", "padded_vocab_size", "parameters")
TRAINED = ("precision", "device", *SIZES)  # keys of the plan that say what is trained; the others say how
SHOWN = ("world_size", "zero_stage", "offload_optimizer", "offload_param", "micro_batch", "gradient_accumulation_steps")


# What a finished run may be continued with. Without a schedule the rate is the one in the optimizer's saved state.
LONGER = ("train.steps", "train.tokens", "train.epochs")
ANOTHER_RATE = ("optim.lr", "optim.min_lr", "optim.schedule", "optim.warmup_steps", "optim.decay_steps")
_OF_THE_END = ["end", "proof", "copied", "export", "sample", "suite", "tasks", "prediction", "expect"]  # events


class Known(NamedTuple):
    """A run with its recipe and the JSON of its plan.json."""

    run: RunDir
    recipe: Recipe
    plan: Mapping[str, Any]  # also of versions whose plans had other keys


@dataclasses.dataclass(frozen=True)
class Earlier:
    """An earlier run that a new run continues, its checkpoint to take over, and the keys that change."""

    run: RunDir
    checkpoint: Path
    step: int
    changed: tuple[str, ...]
    former: tuple[Optim, int] | None = None  # of a finished run: its schedule and its steps

    def copy_into(self, run: RunDir) -> None:
        """Hard-link, else copy, the checkpoint into continued/ of the new run `run`, and write the events into it.

        Leaves out the events of the end of a finished run. Raises OSError for a missing file, UserError for a bad
        manifest.
        """
        runs.link_checkpoint(self.checkpoint, run.path / "continued" / self.checkpoint.name)
        rows = self.run.read_events()
        kept = [row for row in rows if self.former is None or row["kind"] not in _OF_THE_END]
        files.write_text(run.events, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in kept))

    def to_json(self) -> dict[str, object]:
        """Return what the new run's manifest says about the run it continues: run, step, changed."""
        return {"run": str(self.run.path), "step": self.step, "changed": list(self.changed)}


def hosts_of(planned: Plan, recipe: Recipe) -> Cluster:
    """Return the hosts of a plan as a Cluster, with the access that the recipe's hosts: gives."""
    hosts = (Host(h.name, h.slots, h.gpu, access=recipe.hosts.get(h.name, HostAccess())) for h in planned.hosts)
    return Cluster(tuple(hosts))


def find_unfinished(wanted: Recipe, plan: Plan, shards: Path, runs: Path) -> RunDir | None:
    """Return the newest unfinished run below `runs` of the same recipe, plan and data, else None; may print about it.

    hosts: and launch: may differ, and the plan may be one that ran out of memory there. A run whose training is done
    needs only the same training: exports, evals and reports may differ. Raises NotJson for a damaged plan.N.json.
    """
    for run, former, planned in _list_same_data(wanted, shards, runs):
        if run.is_trained():
            if former.name != wanted.name or _blocking_keys(former, wanted):
                continue
            if _list_changes(TRAINED, planned, plan):
                continue
            screen.say(f"{run.path} is trained; going on with what follows (--new starts afresh)")
            return run
        plans = [planned, *map(files.read_json, run.former_plans)]
        is_other = former.model_copy(update=WAYS) != wanted.model_copy(update=WAYS)
        if is_other or all(_list_differences(each, plan) for each in plans):
            continue
        if len(plans) > 1:
            screen.say(f"{run.path} goes on by its plan.json: {planned['reasons'][0]}")
        return run
    return None


def find_finished(wanted: Recipe, shards: Path, runs: Path) -> RunDir | None:
    """Return the newest finished run of the same training and data, under any plan, else None. Prints damaged runs."""
    for run, former, _ in _list_same_data(wanted, shards, runs, finished=True):
        if former.name == wanted.name and not _blocking_keys(former, wanted):
            return run
    return None


def find_earlier(wanted: Recipe, plan: Plan, shards: Path, runs: Path, accept_new_keys: bool = False) -> Earlier | None:
    """Return the newest unfinished run of the same training that has a checkpoint, and print it; None if there is none.

    Gathers its newest whole checkpoint here; `accept_new_keys` stores unknown ssh host keys. Raises UserError when it
    runs or was started elsewhere, when no checkpoint is whole and intact, or a run differs by its hosts alone.
    """
    for run, former, planned in find_continuable(wanted, plan, shards, runs):
        check_free(run, wanted, accept_new_keys)
        with lock_run(run):
            checkpoint = _find_proved_checkpoint(run, former, Plan.from_json(dict(planned)), accept_new_keys)
        if checkpoint is not None:
            keys = [key for key, _, _ in rules.recipe_differences(former, wanted)]
            changed = tuple(_list_differences(planned, plan)) or tuple(keys)
            step = Manifest.read(checkpoint).step
            screen.say(f"continuing {run.path} from step {step:,} in a new run directory (--new starts afresh)")
            screen.say(f"  changed: {'; '.join(changed)}; data, order and tokens a step are the same")
            return Earlier(run, checkpoint, step, changed)
    return None


def check_run_to_extend(wanted: Recipe, runs: Path) -> None:
    """Raise UserError when `runs` has no finished run of this recipe's name, on any data."""
    if not any(former.name == wanted.name for _, former, _ in _list_same_data(wanted, None, runs, finished=True)):
        raise UserError(
            f"there is no finished run of {wanted.name} to continue",
            evidence=f"looked in {runs}/",
            fix="train it first without --continue; `finlm runs` lists what there is",
        )


def find_run_to_extend(wanted: Recipe, plan: Plan, shards: Path, runs: Path, accept_new_keys: bool = False) -> Earlier:
    """Return the newest finished run of the recipe and data, for a longer run to go on from, and print it.

    Raises UserError if there is none, it has no intact checkpoint, no steps are left, or more than length and learning
    rate (without a schedule, length alone) differ. `accept_new_keys` stores unknown ssh host keys.
    """
    for run, former, planned in _list_same_data(wanted, shards, runs, finished=True):
        if former.name != wanted.name:
            continue
        has_schedule = (wanted.optim.schedule, wanted.optim.warmup_steps) != ("constant", 0)
        free = (*LONGER, *ANOTHER_RATE) if has_schedule else LONGER
        other = [key for key in _blocking_keys(former, wanted) if not rules.is_within(key, free)]
        other += _list_changes([key for key in TRAINED if key != "steps"], planned, plan)
        if other:
            raise UserError(
                f"{run.path} cannot be continued by this recipe",
                evidence=f"{', '.join(other)} differ; --continue may change {', '.join(free)}",
                fix="take the others back, or train anew without --continue",
            )
        if planned["steps"] >= plan.steps:
            raise UserError(
                f"{run.path} has its {planned['steps']:,} steps already, and the recipe says {plan.steps:,}",
                fix=f"ask for more, for example --set train.steps={2 * planned['steps']}",
            )
        with lock_run(run):
            checkpoint = _find_proved_checkpoint(run, former, Plan.from_json(dict(planned)), accept_new_keys)
        if checkpoint is None:
            raise UserError(f"{run.path} has no checkpoint to go on from", fix="train anew without --continue")
        changed = tuple(key for key, _, _ in rules.recipe_differences(former, wanted))
        step = Manifest.read(checkpoint).step
        screen.say(f"continuing {run.path} from step {step:,} to {plan.steps:,} in a new run directory")
        screen.say(f"  changed: {'; '.join(changed)}; the rows go on where they ended")
        if wanted.data.mixture:
            screen.say("  data.mixture is divided over the longer run: some of its rows may have been read before")
        return Earlier(run, checkpoint, step, changed, (former.optim, planned["steps"]))
    raise UserError(
        f"no finished run of {wanted.name} in {runs}/ has read the same data",
        fix="take the changes of data, tokenizer and model back, or train anew without --continue",
    )


def find_continuable(wanted: Recipe, plan: Plan, shards: Path, runs: Path) -> Iterator[Known]:
    """Yield the runs of this training whose training is not done, newest first; print why others are left out.

    Their plan may be this one or another. Raises UserError at the end if a run with a checkpoint differs by its hosts
    alone, such as in tokens a step.
    """
    has_printed, refused = False, list[UserError]()
    for run, former, planned in _list_same_data(wanted, shards, runs):
        if run.is_trained() or former.name != wanted.name:  # quickstart-* are runs of quickstart-sft too
            continue
        # A recipe may state the tokens that other hosts rounded its step to: they are compared below.
        if what := [key for key in _blocking_keys(former, wanted) if key != "batch.tokens_per_step"]:
            if not has_printed:  # of many former trials the newest is the one that may have been meant
                screen.say(f"{run.path} is not continued: {', '.join(what)} differ")
            has_printed = True
            continue
        if other := _list_changes(TRAINED, planned, plan):
            screen.say(f"{run.path} is not continued: {', '.join(other)} trains something else")
            if (step := run.newest_recorded()) and former.batch.tokens_per_step == wanted.batch.tokens_per_step:
                refused.append(hosts_error(run.path, step, planned, plan, other))
            continue
        stages = planned["zero_stage"], plan.zero_stage
        if "nvme" in (planned["offload_optimizer"], plan.offload_optimizer) or (0 in stages and stages != (0, 0)):
            screen.say(f"{run.path} is not continued: optimizer states move between ZeRO stages 1, 2 and 3 only")
            continue
        yield Known(run, former, planned)
    if refused:
        raise refused[0]


def way_out(wanted: Recipe, runs: Path | None, lost: Sequence[str]) -> str:
    """Return a clause to add behind an error's fix, often beginning with "or": what to do without the hosts `lost`.

    If the newest unfinished run of this name below `runs` used them, it says which checkpoint is left. `runs` is None
    for a new run. Prints the runs whose manifest or plan is damaged.
    """
    for run, former, planned in _list_same_data(wanted, None, runs) if runs else ():
        if former.name == wanted.name and not run.is_trained():
            if any(host["name"] in lost for host in planned["hosts"]):
                return checkpoint_parts.way_out(run, lost)
            break
    return f"or go on without: --exclude {'@'.join(lost)}"


def check_free(run: RunDir, recipe: Recipe, accept_new_keys: bool) -> None:
    """Raise UserError if another process runs the run or another host started it; may store unknown ssh host keys."""
    with lock_run(run):
        checkpoint_parts.check_started_here(run, hosts_of(Plan.read(run.plan), recipe), accept_new_keys)


def _blocking_keys(former: Recipe, wanted: Recipe) -> list[str]:
    """Return the keys in which two recipes differ and for which a run cannot be continued."""
    keys = [key for key, _, _ in rules.recipe_differences(former, wanted)]
    # A start brings its config.json, in reach when the recipe was read or not.
    same = (*rules.SAME_RUN, *(["model.config"] if wanted.model.init_from is not None else []))
    return [key for key in keys if not rules.is_within(key, same)]


def _list_same_data(wanted: Recipe, shards: Path | None, runs: Path, *, finished: bool = False) -> Iterator[Known]:
    """Yield the unfinished (or `finished`) runs of these data, newest first, but none that another run continues.

    Their names begin with the recipe's name and a dash. `shards` None allows any data. Prints runs whose manifest or
    plan is damaged; skips recipes that cannot be read.
    """
    continued = set()
    for run in list_runs(runs, wanted.name):
        if not run.manifest.exists():
            continue
        try:
            content, planned = files.read_json(run.manifest), files.read_json(run.plan)
        except (OSError, files.NotJson):
            screen.say(f"{run.path} is left out: its manifest.json or plan.json is missing or damaged")
            continue
        if "continues" in content:
            continued.add(Path(content["continues"]["run"]).name)  # beside it, by whatever path it was found then
        if run.path.name in continued or (shards and content["shards"]["path"] != str(shards.resolve())):
            continue  # what continues it is newer
        if is_finished(run) != finished:
            continue
        try:
            yield Known(run, recipes.load(run.recipe).recipe, planned)
        except UserError:  # written by a version with other keys
            continue


def _list_changes(keys: Sequence[str], planned: Mapping[str, Any], plan: Plan) -> list[str]:
    """Return `key old -> new` for each of `keys` in which `planned` (of plan.json) and the plan differ."""
    pairs = ((key, planned.get(key), getattr(plan, key)) for key in keys)
    return [f"{key} {old} -> {new}" for key, old, new in pairs if old != new]


def _list_differences(old: Mapping[str, Any], plan: Plan) -> list[str]:
    """Return `key old -> new` for keys in SHOWN in which `old` (plan.json) and the plan differ, else other keys."""
    new = json.loads(json.dumps(plan.to_json()))  # tuples become lists, as in plan.json
    return _list_changes(SHOWN, old, plan) or [key for key in new if old.get(key) != new[key]]


def _list_checkpoints(run: RunDir) -> list[tuple[int, Path]]:
    """Return (step, directory) of the run's and its origin's checkpoints here, then later ones that others may hold."""
    checkpoints = [*run.continued_checkpoints(), *run.complete_checkpoints()]
    for written in sorted((run.recorded_checkpoint(), run.recorded_in_memory())):
        if written > max((step for step, _ in checkpoints), default=0):
            checkpoints.append((written, run.checkpoint(written)))
    return sorted(checkpoints)


def _find_proved_checkpoint(run: RunDir, former: Recipe, planned: Plan, accept_new_keys: bool) -> Path | None:
    """Return the newest checkpoint whose files are all here and intact; None if none was ever saved.

    Gathers other hosts' parts, and prints damaged checkpoints. `accept_new_keys` stores unknown ssh host keys. Raises
    Incomplete when a host does not give its part and no older one is whole, UserError when all are damaged.
    """
    missing: checkpoint_parts.Incomplete | None = None
    saved = _list_checkpoints(run)
    for step, directory in reversed(saved):
        if directory.parent == run.checkpoints:
            try:
                checkpoint_parts.gather_checkpoint(run, hosts_of(planned, former), step, accept_new_keys)
            except checkpoint_parts.Incomplete as error:
                missing = missing or error
                continue
        try:
            damage = disk.find_faults(directory, Manifest.read(directory).files, disk.THREADS)
        except (OSError, disk.Unreadable) as error:
            damage = [f"{disk.MANIFEST}: {error}"]
        if not damage:
            if missing:
                screen.say(f"{missing.problem}: step {step:,} is the newest that is complete here")
            return directory
        screen.say(f"{directory} is damaged and not used: {'; '.join(damage[:5])}")
    if missing:
        raise missing
    if saved:
        raise UserError(
            f"no whole checkpoint of {run.path} is left, so nothing was started",
            evidence=f"saved after steps {', '.join(f'{step:,}' for step, _ in saved)}",
            fix="restore one of them from a copy, or start another run with --new",
        )
    return None


PASSED_OVER = 5  # runs that are named


def find_export(wanted: Recipe, runs: Path, load: Load) -> tuple[Path | None, list[str]]:
    """Return (export/ of the newest trained run that matches the recipe, or None; why each newer run does not match).

    `load` reads the recipe named in model.init_from: recipes.load or derive.load_toy.
    """
    passed = []
    for run in list_runs(runs, wanted.name):
        if not (run.is_trained() and (run.export / "config.json").exists()):
            continue
        try:
            former = recipes.load(run.recipe).recipe
            if former.name != wanted.name:
                continue
            difference = _find_difference(run, former, wanted, load)
        except UserError as error:
            passed.append(f"{run.path}: it cannot be read: {error.evidence or error.problem}")
            continue
        if difference is None:
            return Path(run.export), passed
        passed.append(f"{run.path}: {difference}")
    return None, passed


def _find_difference(run: RunDir, former: Recipe, wanted: Recipe, load: Load) -> str | None:
    """Return as text the first key, or export step, by which a run differs, else None. Raises UserError, OSError."""
    start = parents.start_recorded(run, former)
    theirs = parents.settings_of(former, start.settings if start else None)
    ours = parents.settings_of(wanted, _settings_of_parent(wanted, load))
    for key, value, stated in rules.differing_values(theirs, ours):
        shown = [each["name"] if isinstance(each, dict) else each for each in (value, stated)]
        return f"{key} {shown[0]}, the recipe says {shown[1]}"
    steps = files.read_json(run.plan)["steps"]
    origin = parents.read_origin(run.export)
    exported = origin.step if origin else steps
    return None if exported == steps else f"its export is of step {exported:,} of {steps:,}"


def _settings_of_parent(wanted: Recipe, load: Load) -> Mapping[str, Any] | None:
    """Return the settings that trained a recipe's start; None from scratch or if unknown. Raises what `load` raises."""
    init_from = wanted.model.init_from
    if init_from is None or not parents.is_recipe(init_from):
        start = parents.start_of(wanted)
        return start.settings if start else None
    parent = load(init_from).recipe
    return parents.settings_of(parent, _settings_of_parent(parent, load))


def export_directory(named: str, runs: Path, load: Load) -> Path:
    """Return the export of the newest trained run of the recipe `named`, read by `load`. UserError if none matches."""
    export, passed = find_export(load(named).recipe, runs, load)
    if export is None:
        missing = f"no finished run of it as it is written in {runs.absolute()}"
        raise UserError(
            f"the model that {named} makes is not there yet",
            evidence="\n".join([missing, *passed[:PASSED_OVER]]),
            fix=f"`finlm train {named}` makes it, as `finlm train` of this recipe does first; to start from another "
            "run: --set model.init_from=runs/RUN",
        )
    return export


def model_directory(wanted: Recipe, runs: Path, *, must_exist: bool = True) -> Path:
    """Return the directory of model.init_from: itself, the export of that recipe's newest run, or the Hub's snapshot.

    Downloads a Hub id if must_exist, and raises UserError without a model. If not must_exist, raises NotPrepared
    without a model here, also for a Hub id.
    """
    init_from = wanted.model.init_from
    assert init_from is not None  # recipe.parents asks for it
    if parents.is_recipe(init_from):
        if must_exist:
            return export_directory(init_from, runs, recipes.load)
        export, _ = find_export(recipes.load(init_from).recipe, runs, recipes.load)
        if export is None:
            raise NotPrepared("model")
        return export
    path = Path(init_from)
    if path.is_dir():
        return path
    if not must_exist:
        raise NotPrepared("model")
    return pretrained.snapshot(init_from, wanted.model.revision)


def other_hosts(
    recipe: Recipe, hosts: Cluster, lost: Mapping[str, bool], accept_new_keys: bool
) -> Iterator[tuple[Cluster, str]]:
    """Yield (cluster, what is done, in words) for each cluster that may go on without lost hosts, the best first.

    `lost` maps names to whether the host may come back, and so stays among the spares or those away. Usable spares
    replace lost hosts: all of them, then without the first, and so on; last the others go on alone. First asks every
    spare over ssh for its GPUs, and prints why it cannot be used. `accept_new_keys` stores unknown ssh host keys.
    """
    usable, silent = list[Host](), restart.list_silent(hosts.spares)
    for spare in hosts.spares:
        if spare.name in silent:
            screen.say(f"the spare {spare.name} does not answer")
            continue
        try:
            usable += gpus.ask_kinds(recipe, dataclasses.replace(hosts, hosts=(spare,)), accept_new_keys).hosts
        except UserError as error:
            screen.say(f"the spare {spare.name} cannot be used: {error}")
    for first in range(len(usable)):
        yield hosts.leave(lost, usable[first:])
    if len(lost) < len(hosts.hosts):
        yield hosts.leave(lost, ())


def can_go_on(run: RunDir, recipe: Recipe, plan: Plan, shards: Path) -> bool:
    """Return whether `finlm train` under this plan would continue the run (True if it saved nothing); print why not."""
    if not run.newest_recorded():
        return True
    known = find_continuable(recipe, plan, shards, run.path.parent)
    with suppress(UserError):
        return any(each.run.path.resolve() == run.path.resolve() for each in known)
    return False
