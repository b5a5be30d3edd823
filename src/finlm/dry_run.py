"""Do `finlm train --dry-run`, which lists the steps, and `--print`, which writes another launcher's files."""

from __future__ import annotations

from finlm import pipeline, prepare
from finlm.base import screen
from finlm.base.rundir import RunDir
from finlm.launch import adapters
from finlm.plan.plan import Plan
from finlm.recipe import parents, recipe, weights
from finlm.record import trackers
from finlm.runs import lineage

DONE, TO_DO, NOT_NEEDED = "done", "to do", "-"


def print_steps(t: pipeline.Training) -> None:
    """Print each step of `finlm train` with its state: done, to do, or - if not needed. Starts nothing.

    Writes at most a missing index of rows and a list of broken rows, to the cache. Sets t.loaded, t.shards, t.plan,
    t.ds_config and t.resumed where known. Raises UserError for what would stop the run: a missing package or source,
    prepared data or a model that cannot be used, nothing that fits.
    """
    trackers.check_installed(t.recipe.record.tracking)
    known = _look_before_launch(t)
    known |= _look_after_launch(t)
    screen.heading(f"steps of {t.loaded.path}")
    for step in pipeline.STEPS:
        state, words = known.get(step.name, (TO_DO, step.does))
        screen.show(f"  {step.name:<14} {state:<6} {words}")
    screen.show("nothing was started; the same command without --dry-run does the steps to do")


Known = dict[str, tuple[str, str]]  # state and words of a step, by its name


def _look_before_launch(t: pipeline.Training) -> Known:
    """Return {step name: (state, words)} of the steps before launch whose state is known without doing them.

    Sets t.loaded (model.init_from, grpo.reward, warm-up), t.shards, t.plan, t.ds_config and t.resumed where known, and
    prints what it sets in t.loaded. Raises UserError for a source without a file, prepared data or a model that cannot
    be used, or when nothing fits.
    """
    init_from = t.recipe.model.init_from
    known: Known = {"parent": (NOT_NEEDED, f"starts from {init_from or 'scratch'}")}
    lacks = f"first: {t.runs} holds no finished run of it as it is written"
    if parents.is_recipe(init_from):
        export, _ = lineage.find_export(t.read(init_from).recipe, t.runs, t.read)
        known["parent"] = TO_DO, f"train {init_from} {lacks}"
        if export is not None:
            pipeline.set_start_model(t, export)
            known["parent"] = DONE, str(screen.relative(export))
    for place, named in weights.reward_recipes(t.recipe):
        export, _ = lineage.find_export(t.read(named).recipe, t.runs, t.read)
        if export is None:
            known["parent"] = TO_DO, f"train {named} {lacks}"
        else:
            pipeline.set_reward_model(t, place, export)
    shards = None if parents.is_recipe(t.recipe.model.init_from) else prepare.locate(t.recipe)
    if shards is None:
        prepare.check_sources(t.recipe)
    else:
        t.shards = shards
        if t.recipe.train.epochs is not None:
            t.loaded = recipe.fit_warmup(t.loaded, prepare.epoch_tokens(t.recipe, shards))
        known["data"] = DONE, str(screen.relative(shards.directory))
    if shards is not None or pipeline.plans_without_data(t.recipe):
        t.plan, t.ds_config = pipeline.decide(t.recipe, t.hosts, shards)
        words = f"ZeRO-{t.plan.zero_stage}, {t.plan.precision}, world size {t.plan.world_size}, "
        words += f"micro-batch {t.plan.micro_batch}, {t.plan.steps:,} steps of {t.plan.tokens_per_step:,} tokens"
        known["plan"] = DONE, words
    if shards is not None:
        known |= _look_for_runs(t)
    if t.is_trained or t.recipe.stage == "pretrain":
        known["labels"] = NOT_NEEDED, "trained already" if t.is_trained else "pretraining has none"
    names = ", ".join(f"{host.name} ({host.slots} x {host.gpu or 'CPU rank'})" for host in t.hosts.hosts)
    known["hosts"] = (NOT_NEEDED, "trained already") if t.is_trained else (TO_DO, f"check {names}")
    return known


def _look_for_runs(t: pipeline.Training) -> Known:
    """Return {step name: (state, words)} of `resume` and `run directory`; set t.resumed to the unfinished run, or None.

    With an unfinished run, also sets t.plan to its plan. Takes no lock and reads no checkpoint. Prints why a run is not
    continued. Raises UserError if no run can be continued, and one with a checkpoint differs by its hosts alone.
    """
    where = t.recipe, t.plan, t.shards.directory, t.runs
    t.resumed = None if t.new else lineage.find_unfinished(*where)
    if t.resumed is not None:
        t.plan = Plan.read(t.resumed.plan)
        return {"resume": (DONE, "unfinished"), "run directory": (DONE, str(screen.relative(t.resumed.path)))}
    if earlier := None if t.new else next(lineage.find_continuable(*where), None):
        shown, step = screen.relative(earlier.run.path), earlier.run.newest_recorded()
        words = f"make one that continues {shown} from step {step:,} under this plan"
        return {"resume": (NOT_NEEDED, "planned otherwise"), "run directory": (TO_DO, words)}
    finished = lineage.find_finished(t.recipe, t.shards.directory, t.runs)
    why = f"{screen.relative(finished.path)} is finished, this would be another run" if finished else ""
    why = "--new" if t.new else why or f"{t.runs} holds no unfinished run of this"
    return {"resume": (NOT_NEEDED, why), "run directory": (TO_DO, f"make {t.runs}/{t.recipe.name}-<time>")}


def _look_after_launch(t: pipeline.Training) -> Known:
    """Return {step name: (state, words)} of the steps from `train` to `expectations` whose state is known."""
    known: Known = {}
    if t.is_trained:
        known["train"] = DONE, f"{t.plan.steps:,} steps"
    elif t.resumed is not None:
        known["train"] = TO_DO, f"from step {t.resumed.newest_recorded():,} of {t.plan.steps:,}"
    if len(t.hosts.hosts) == 1:
        known["gather"] = NOT_NEEDED, "one host"
    if t.resumed is not None and t.resumed.export.exists():
        known["export"] = DONE, str(screen.relative(t.resumed.export))
    if t.recipe.stage == "reward":
        known["sample"] = NOT_NEEDED, "a reward model writes nothing"
    known["questions"] = (TO_DO, ", ".join(t.recipe.eval.suites)) if t.recipe.eval.suites else (NOT_NEEDED, "none")
    if t.recipe.expect is None:
        known["expectations"] = TO_DO, "compare with the plan; the recipe has no expect: for this"
    return known


def adapt(t: pipeline.Training, adapter: str) -> list[str]:
    """Make or reuse the run directory, write another launcher's files there, and return its shell commands to type.

    `adapter` is torchrun, accelerate, slurm, k8s or ray. Reuses the directory of an unfinished run that is not trained.
    Prepares the data if necessary and sets fields of `t`. Raises UserError when a parent recipe has no finished run,
    nothing fits, the run is in use, or the launcher cannot express it.
    """
    if parents.is_recipe(init_from := t.recipe.model.init_from):
        pipeline.set_start_model(t, lineage.export_directory(init_from, t.runs, t.read))
    for place, named in weights.reward_recipes(t.recipe):
        pipeline.set_reward_model(t, place, lineage.export_directory(named, t.runs, t.read))
    for act in (pipeline.prepare_data, pipeline.plan_run, pipeline.find_unfinished):
        act(t)
    t.resumed = None if t.is_trained else t.resumed
    pipeline.open_run(t)
    return adapters.write_files(adapter, RunDir(t.run.path.absolute()), t.recipe, Plan.read(t.run.plan), t.hosts)
