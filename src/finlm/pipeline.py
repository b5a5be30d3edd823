"""Do the steps of `finlm train` in order, from the recipe that a run starts from to its report.

STEPS lists them, below the functions that do them; `finlm train --dry-run` prints the list with what is done. Each step
stores in Training what later steps need, and reuses its earlier result: the same command resumes. finished.json is
written last. How a run goes on after a host is lost stands at the end.
"""

from __future__ import annotations

import dataclasses
import gc
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from finlm import config, prepare
from finlm.base import files, runs, screen
from finlm.base.errors import UserError
from finlm.base.rundir import RunDir
from finlm.base.runs import COMPLETION, RunFailed, lock_run, reserve_run
from finlm.dialogues import lint
from finlm.doctor import gather, preflight
from finlm.hosts import checkpoint_parts
from finlm.launch import head, restart, start
from finlm.plan import gpus, search, show
from finlm.plan.plan import Plan
from finlm.recipe import parents, recipe, weights
from finlm.recipe.cluster import Cluster
from finlm.recipe.recipe import Loaded
from finlm.recipe.schema import Recipe
from finlm.record import expectations, manifest, trackers
from finlm.record.report import run_page
from finlm.rows.shards import Shards
from finlm.runs import lineage

PROMPT, SAMPLE_TOKENS = "公司", 80


@dataclass
class Training:
    """The state of one `finlm train`: the command line's values, then what each step leaves to later steps."""

    loaded: Loaded  # from the step `parent` on, model.init_from is a directory
    hosts: Cluster
    runs: Path
    new: bool = False  # start afresh even if an unfinished run exists
    accept_new_keys: bool = False  # record the ssh keys of new hosts
    read: Callable[[str], Loaded] = recipe.load  # of the recipe in model.init_from; derive.load_toy under --toy
    extends: bool = False  # --continue: train the newest finished run further, with more steps
    shards: Shards = field(init=False)  # step data
    plan: Plan = field(init=False)  # step plan; of a resumed run its own
    ds_config: config.Settings = field(init=False)
    resumed: RunDir | None = None  # step resume: the unfinished run that goes on
    findings: list[preflight.Finding | lint.Finding] = field(default_factory=list)  # steps labels and hosts
    facts: gather.AllFacts = field(default_factory=dict)  # step hosts: what doctor saw
    run: RunDir = field(init=False)  # step run directory
    outcome: expectations.Outcome | None = None  # step expectations
    is_recovery: bool = False  # it goes on with a failed run by itself: `run`, `plan` and `shards` are that run's
    newcomers: tuple[str, ...] = ()  # hosts that join a run that goes on: without them it goes on too

    @property
    def recipe(self) -> Recipe:
        """The recipe of `loaded`."""
        return self.loaded.recipe

    @property
    def is_trained(self) -> bool:
        """Whether the resumed run has done its last training step, so that only later steps are missing."""
        return self.resumed is not None and self.resumed.is_trained()

    def with_hosts(self, hosts: Cluster) -> Training:
        """Return a Training to go on with this run on `hosts`: no step done, precision and checkpoints of its plan."""
        train = self.recipe.train.model_copy(update={"precision": self.plan.precision})
        wanted = search.as_planned(self.recipe.model_copy(update={"train": train}), self.plan.asynchronous_checkpoints)
        loaded = dataclasses.replace(self.loaded, recipe=wanted)
        known = {host.name for host in self.hosts.hosts}
        newcomers = tuple(host.name for host in hosts.hosts if host.name not in known)
        other = Training(loaded, hosts, self.runs, False, self.accept_new_keys, self.read, newcomers=newcomers)
        other.is_recovery, other.run, other.plan, other.shards = True, self.run, self.plan, self.shards
        return other


class StepFailed(Exception):
    """Raised when a step found an error and printed it: `finlm train` ends with exit code 1."""


def train(t: Training) -> int:
    """Do every step; return the exit code: 1 when doctor, lint or the recipe's expect: reports an error, else 0.

    When a host is lost or comes back, goes on with the other set of hosts and records a `restart` event. Raises
    UserError for a mistake of the user, RunFailed (HostLost if it was a host) when ranks do not reach the last step,
    SystemExit on a signal.
    """
    trackers.check_installed(t.recipe.record.tracking)
    prepare.check_engine(t.recipe)
    while True:
        try:
            with head.exit_on_signals() if t.is_recovery else nullcontext():
                return _train_on(t)
        except head.HostsBack as back:
            restart.record_restart(t.run, t.recipe, f"{back} answers again", "", f"with {back} again")
            t = t.with_hosts(t.hosts.with_back(back.names))
        except (StepFailed, UserError) as error:
            other = _recover(t, error) if t.is_recovery or isinstance(error, restart.HostLost) else None
            if other is None:
                if isinstance(error, StepFailed):
                    return 1
                raise
            t = other
        except BaseException as error:
            if t.is_recovery:
                restart.notify_end(t.run, t.recipe, error)
            raise


def _train_on(t: Training) -> int:
    """Do every step on t.hosts and return the exit code: 1 when a number of expect: is out of bounds, else 0.

    Locks the run directory after the steps before launch. An error in later steps writes the report, runs launch.notify
    unless the run may go on, and is raised again. Raises StepFailed when doctor or lint found an error.
    """
    for step in BEFORE_LAUNCH:
        step.act(t)
    with lock_run(t.run):
        if not t.is_trained:
            files.write_json(t.run.doctor, {"findings": [dataclasses.asdict(finding) for finding in t.findings]})
        try:
            with head.exit_on_signals(), trackers.track_beside(t.run, t.recipe.record.tracking):
                for step in TRACKED:
                    step.act(t)
            for step in AFTER:
                step.act(t)
        except BaseException as error:
            restart.write_report(t.run)
            if not t.is_recovery and not isinstance(error, head.HostsBack | restart.HostLost):
                restart.notify_end(t.run, t.recipe, error)
            raise
    start.notify(t.recipe.launch.notify, "end", t.run.path, "finished")
    return 0 if t.outcome is None or t.outcome.ok else 1


def train_parent(t: Training) -> None:
    """Replace recipes in model.init_from and grpo.reward of t.loaded by exports of their finished runs; print those.

    Trains such a recipe first if it has no finished run. Raises StepFailed or RunFailed when that training fails.
    """
    if parents.is_recipe(init_from := t.recipe.model.init_from):
        set_start_model(t, _export_or_train(t, "model.init_from", init_from))
    for place, named in weights.reward_recipes(t.recipe):
        set_reward_model(t, place, _export_or_train(t, f"grpo.reward[{place}].path", named))


def _export_or_train(t: Training, key: str, named: str) -> Path:
    """Return the export of the recipe `named`'s newest run; train it first if need be. StepFailed if that fails."""
    parent = t.read(named)
    export, passed = lineage.find_export(parent.recipe, t.runs, t.read)
    for sentence in passed[: lineage.PASSED_OVER]:
        screen.say(f"passed over {sentence} (--set {key}=RUN takes it)")
    if export is not None:
        return export
    prepare.check_sources(t.recipe)  # rather than when the other recipe has been trained
    screen.say(f"{t.loaded.path} needs {named}, of which, as it is written, no finished run is in {t.runs}:")
    screen.say("that is trained first")
    if train(Training(parent, t.hosts, t.runs, accept_new_keys=t.accept_new_keys, read=t.read)) != 0:
        raise StepFailed
    return lineage.export_directory(named, t.runs, t.read)


def set_reward_model(t: Training, place: int, directory: Path) -> None:
    """Set the path of grpo.reward[place] to `directory` and print it. Raises UserError when that is no reward model."""
    t.loaded = dataclasses.replace(t.loaded, recipe=weights.with_reward_model(t.recipe, place, str(directory)))
    screen.say(f"answers are judged by {screen.relative(directory)}")
    weights.check_judge(t.recipe)


def set_start_model(t: Training, directory: Path) -> None:
    """Set model.init_from of t.loaded to `directory` and print it. Raises UserError if finlm cannot train it."""
    model = t.recipe.model.model_copy(update={"init_from": str(directory)})
    t.loaded = dataclasses.replace(t.loaded, recipe=t.recipe.model_copy(update={"model": model}))
    start = parents.start_of(t.recipe)
    assert start is not None
    screen.say(f"starting from {start} in {screen.relative(directory)}")
    weights.check_model(t.recipe)


def prepare_data(t: Training) -> None:
    """Prepare the token shards, or take them from the cache, and set t.shards; may shorten the warm-up in t.loaded.

    Raises PlanError when nothing fits (before preparing if no data are needed to plan), UserError for unusable data.
    """
    gpus.precision(t.recipe, t.hosts)
    if plans_without_data(t.recipe):
        decide(t.recipe, t.hosts, None)  # what does not fit is refused before hours go into preparing
    t.shards = prepare.run(t.recipe, t.hosts, accept_new_keys=t.accept_new_keys)
    if t.recipe.train.epochs is not None:
        t.loaded = recipe.fit_warmup(t.loaded, prepare.epoch_tokens(t.recipe, t.shards))


def plans_without_data(wanted: Recipe) -> bool:
    """Return whether a plan needs no prepared data: the recipe itself sets the run's length and vocabulary size."""
    return wanted.train.epochs is None and bool(wanted.tokenizer.pieces or wanted.model.vocab_size != "auto")


def plan_run(t: Training) -> None:
    """Set t.plan and t.ds_config, print the plan. UserError if nothing fits or DeepSpeed would not honour a setting."""
    t.plan, t.ds_config = decide(t.recipe, t.hosts, t.shards)
    show.print_plan(t.plan, t.loaded)
    if t.hosts.unequal_slots:
        screen.say(t.hosts.unequal_slots)


def decide(wanted: Recipe, hosts: Cluster, shards: Shards | None) -> tuple[Plan, config.Settings]:
    """Return (plan, DeepSpeed's settings); `shards` is None before the data are prepared.

    Raises PlanError when nothing fits, UserError for too large a tokenizer or settings that DeepSpeed would refuse.
    """
    plan = prepare.plan_with_data(wanted, hosts, shards)
    if shards is not None and plan.vocab_size < shards.vocab_size:
        raise UserError(
            f"the tokenizer has {shards.vocab_size:,} pieces, the model {plan.vocab_size:,} rows",
            fix="raise model.vocab_size or leave it at auto",
        )
    return plan, config.deepspeed_settings(wanted, plan)


def find_unfinished(t: Training) -> None:
    """Set t.resumed to the unfinished run of the same command, if any, and t.plan to its plan; do nothing under --new.

    If that run is trained, also sets t.hosts to its hosts. Raises UserError if it runs, or another host started it.
    """
    if t.new:
        return
    t.resumed = lineage.find_unfinished(t.recipe, t.plan, t.shards.directory, t.runs)
    if t.resumed is None:
        return
    lineage.check_free(t.resumed, t.recipe, t.accept_new_keys)
    t.plan = Plan.read(t.resumed.plan)  # of a run that ran out of memory another one than is planned now
    if t.is_trained:
        t.hosts = lineage.hosts_of(t.plan, t.recipe)


def check_labels(t: Training) -> None:
    """Print findings on labels, add them to t.findings; not if pretraining or trained. Raises as lint.check() does."""
    if t.recipe.stage != "pretrain" and not t.is_trained:
        findings = lint.check(t.recipe, t.shards)
        lint.print_findings(findings, t.shards)
        t.findings += findings


def check_hosts(t: Training) -> None:
    """Check hosts, print and set t.findings, set t.facts; nothing if trained. Raises StepFailed if any is an error."""
    if t.is_trained:
        return
    place = t.resumed.path if t.resumed else t.runs  # an unfinished run's checkpoints need no second room
    t.facts = gather.gather(t.recipe, t.plan, t.hosts, place, accept_new_keys=t.accept_new_keys)
    findings = preflight.judge(t.recipe, t.plan, t.hosts, t.facts)
    preflight.show(findings)
    t.findings = [*findings, *t.findings]
    if any(finding.level == "error" for finding in t.findings):
        raise StepFailed("doctor or lint found an error")


def open_run(t: Training) -> None:
    """Set t.run to t.resumed, else make a new run directory and set t.run to it.

    A new run goes on from a copied checkpoint: of the newest finished run with t.extends, else, unless t.new, of an
    unfinished run of this training, if any. UserError if t.extends finds no run, or a run cannot be continued.
    """
    if t.resumed is not None:
        t.run = t.resumed
        return
    earlier = None
    if t.extends:
        earlier = lineage.find_run_to_extend(t.recipe, t.plan, t.shards.directory, t.runs, t.accept_new_keys)
        former, steps = earlier.former or (t.recipe.optim, t.plan.steps)
        screen.say(config.describe_rates(former, steps, t.recipe.optim, t.plan.steps, earlier.step))
    elif not t.new:
        earlier = lineage.find_earlier(t.recipe, t.plan, t.shards.directory, t.runs, t.accept_new_keys)
    t.run = create_run(t, earlier)


def create_run(t: Training, earlier: lineage.Earlier | None = None) -> RunDir:
    """Make the run directory with recipe, plan, DeepSpeed settings, manifest and a copy of the code; return it.

    Named by recipe and time. Takes over checkpoint and events of `earlier`. An error is raised and leaves no directory.
    """
    stem = f"{t.recipe.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    with reserve_run(t.runs.absolute(), stem) as path, files.new_directory(path) as temporary:
        run = RunDir(temporary)
        files.write_text(run.recipe, recipe.dump(t.recipe))
        files.write_json(run.origins, dict(t.loaded.origins))
        files.write_json(run.plan, t.plan.to_json())
        files.write_json(run.ds_config, t.ds_config)
        files.write_json(run.data, prepare.summary(t.shards, t.recipe))
        manifest.copy_code(run.code)
        manifest.copy_rewards(t.recipe, run)
        facts = {host: seen.for_manifest() for host, seen in t.facts.items()}
        made = manifest.make(t.recipe, t.plan, t.shards.directory.resolve(), facts=facts)
        continues = {"continues": earlier.to_json()} if earlier else {}
        files.write_json(run.manifest, made.to_json() | continues | {COMPLETION: run.finished.name})
        if changes := manifest.changes():
            files.write_text(run.code_diff, changes)
        if earlier:
            earlier.copy_into(run)
    return RunDir(path)


def train_ranks(t: Training) -> None:
    """Train from the newest checkpoint to the last step, unless the run is trained; in both cases clear t.newcomers.

    Raises RunFailed, HostLost if other hosts can go on, HostsBack if hosts are back, UserError if it cannot start.
    """
    if not t.run.is_trained():
        known = start.Network(preflight.host_env(t.facts), preflight.find_addresses(t.facts))
        restart.run_ranks(t.run, t.plan, t.recipe, t.hosts, network=known, accept_new_keys=t.accept_new_keys)
    t.newcomers = ()  # they have trained: what fails from here on is not theirs


def gather_checkpoint(t: Training) -> None:
    """Copy the last checkpoint's files from other hosts to this one. Raises UserError if some are missing."""
    checkpoint_parts.gather_checkpoint(t.run, t.hosts, t.plan.steps, t.accept_new_keys)


def export_model(t: Training) -> None:
    """Unless export/ exists, export the last checkpoint to it; append an `export` event. Raises as export() does."""
    from finlm.inference import export  # loads torch, which planning does without

    if not t.run.export.exists():
        export.export(t.run.complete_checkpoints()[-1][1], t.run.export)
        t.run.append_event("export", path=str(t.run.export), bytes=runs.tree_bytes(t.run.export))


def write_sample(t: Training) -> None:
    """Append a `sample` event: the export's text after PROMPT; not for reward models. Raises as sample_text()."""
    from finlm.inference import export  # loads torch

    if t.recipe.stage != "reward":
        text = export.sample_text(t.run.export, PROMPT, SAMPLE_TOKENS)
        t.run.append_event("sample", step=t.run.complete_checkpoints()[-1][0], prompt=PROMPT, text=text)


def ask_questions(t: Training) -> None:
    """Evaluate eval.suites, if any, on the trained model, and before that on its start model; append `suite` events.

    A start model is asked if model.init_from is a directory here. Frees cached GPU memory, also without suites. Raises
    UserError if a model cannot be opened, or questions or the answers' file are unusable.
    """
    wanted = t.recipe
    if wanted.eval.suites:
        from finlm.evals import suite  # loads torch

        begin = Path(wanted.model.init_from or "")
        mode = None if wanted.eval.mode == "auto" else wanted.eval.mode
        suite.evaluate_run(t.run, wanted.eval.suites, mode, begin if (begin / "config.json").is_file() else None)
    import torch

    gc.collect()
    torch.cuda.empty_cache()  # the ranks of the recipe that starts from this run may need it


def check_expectations(t: Training) -> None:
    """Compare the run with the recipe's expect: (if set) and with its plan; append `expect` and `prediction` events.

    Sets t.outcome if the recipe has expect:. Saves speeds and raises as record_prediction() does.
    """
    if t.recipe.expect is not None:
        t.outcome = expectations.check_expectations(t.run, t.recipe.expect)
        t.run.append_event("expect", **t.outcome.to_json())
    expectations.record_prediction(t.run)


def write_report(t: Training) -> None:
    """Write report.html, then finished.json, which marks the run as finished, and print the outcome."""
    run_page.build(t.run, ended=True)
    kept = None if t.outcome is None or t.outcome.elsewhere else t.outcome.ok
    files.write_json(t.run.finished, {"time": round(time.time(), 3), "steps": t.plan.steps, "promises_kept": kept})
    expectations.print_outcome(t.run, t.recipe.stage)


class Step(NamedTuple):
    """One step: its name, a phrase for what it does, and the function that does it."""

    name: str
    does: str
    act: Callable[[Training], None]


BEFORE_LAUNCH = (
    Step("parent", "train the recipe that this one starts from", train_parent),
    Step("data", "turn the sources into shards", prepare_data),
    Step("plan", "decide ZeRO stage, micro-batch, precision", plan_run),
    Step("resume", "find the run that was left unfinished", find_unfinished),
    Step("labels", "check the labels of the dialogues", check_labels),
    Step("hosts", "check every host", check_hosts),
    Step("run directory", "write recipe, plan, code", open_run),
)
TRACKED = (  # beside them the recipe's trackers run
    Step("train", "start the ranks and follow them", train_ranks),
    Step("gather", "bring the last checkpoint's parts from the other hosts", gather_checkpoint),
    Step("export", "write the model in Hugging Face format", export_model),
    Step("sample", f"let the model continue {PROMPT}", write_sample),
    Step("questions", "ask the model the recipe's questions", ask_questions),
)
AFTER = (
    Step("expectations", "compare with the recipe's expect: and with the plan", check_expectations),
    Step("report", "write report.html and finished.json", write_report),
)
STEPS = (*BEFORE_LAUNCH, *TRACKED, *AFTER)


def _recover(t: Training, error: StepFailed | UserError) -> Training | None:
    """Return the Training with which the run goes on after `error`; None when there is none.

    Tries other hosts (spares first) until their plan can resume the run; else, if all lost hosts may come back, waits
    until they answer. Prints and records (`restart`) what is done. Runs launch.notify before it returns None.
    """
    lost = _find_lost_hosts(t, error)
    said = error.problem if isinstance(error, UserError) else str(error)
    problem = said if isinstance(error, RunFailed) or not lost else f"{' and '.join(lost)} cannot train: {said}"
    for hosts, action in lineage.other_hosts(t.recipe, t.hosts, lost, t.accept_new_keys) if lost else ():
        changed = t.with_hosts(hosts)
        try:
            plan, _ = decide(changed.recipe, hosts, t.shards)
        except UserError as wrong:
            screen.say(f"not {action}: {wrong}")
            continue
        if lineage.can_go_on(t.run, changed.recipe, plan, t.shards.directory):
            screen.say(f"{problem}\nthe run goes on: {action}")
            restart.record_restart(t.run, t.recipe, problem, next(iter(lost)), action)
            return changed
    if lost and all(lost.values()) and restart.wait_for_hosts(t.run, t.recipe, t.hosts, problem):
        return t.with_hosts(t.hosts)
    restart.notify_end(t.run, t.recipe, error)
    return None


def _find_lost_hosts(t: Training, error: StepFailed | UserError) -> dict[str, bool]:
    """Return {name: whether it may come back} of the hosts because of which training ended with `error`.

    Asks all hosts over ssh; if all answer, names those that have just joined. Names none if no host failed the run.
    """
    if isinstance(error, RunFailed) and not isinstance(error, restart.HostLost):
        return {}
    silent = dict.fromkeys(restart.list_silent(t.hosts.hosts), True)
    if isinstance(error, restart.HostLost):
        return {error.host: error.is_gone} | silent
    return silent or dict.fromkeys(t.newcomers, False)
