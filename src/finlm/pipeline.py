"""`finlm train`: prepare -> plan -> doctor -> run directory -> launch -> export -> sample -> report.

The one place that calls every other module in order. The same command goes on with a run that is not at its end.
"""

from __future__ import annotations

import dataclasses
import gc
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from finlm import config, lineage
from finlm.base import files, screen, units
from finlm.base.errors import UserError
from finlm.base.rundir import RunDir, locked, reserved
from finlm.data import lint, lint_show, prepare, start
from finlm.data.shards import Shards
from finlm.lineage import Earlier
from finlm.ops import adapters, doctor, doctor_gather, doctor_network, gather, launch_restart
from finlm.plan import planner, show
from finlm.plan.plan import Plan
from finlm.recipe import parents, recipe, shape
from finlm.recipe.cluster import Cluster
from finlm.recipe.recipe import Loaded
from finlm.recipe.schema import Recipe
from finlm.record import expectations, manifest, prediction, report, trackers, tracking

Read = Callable[[str], Loaded]
SAMPLE_TOKENS = 80
HELD_OUT = ("loss", "perplexity", "accuracy", "margin", "reward")  # of a source, as far as its stage has them


def train(
    loaded: Loaded, hosts: Cluster, runs: Path, new: bool, accept_new: bool = False, read: Read = recipe.load
) -> int:
    """Run a recipe to its report, and before it the recipe it starts from; 0, or 1 when something found an error.

    read: how the recipe it starts from is read, recipe.load or toy.load.
    """
    trackers.check(loaded.recipe.record.tracking)
    started = _started(loaded, hosts, runs, accept_new, read)
    if started is None:
        return 1
    loaded, wanted = started, started.recipe
    shards, plan, ds_config = _planned(loaded, hosts)
    resumed = None if new else lineage.unfinished(wanted, plan, shards, runs)
    if resumed is not None and lineage.is_trained(resumed):
        planned = Plan.read(resumed.plan)
        with locked(resumed):
            return _completed(resumed, planned, wanted, lineage.hosts_of(planned, wanted), accept_new)
    labels = _linted(wanted, shards)
    # Of an unfinished run, whose checkpoints need no second room.
    facts = doctor_gather.gather(wanted, plan, hosts, resumed.path if resumed else runs, accept_new=accept_new)
    findings = doctor.judge(wanted, plan, hosts, facts)
    doctor.show(findings)
    found: list[doctor.Finding | lint.Finding] = [*findings, *labels]
    if any(finding.level == "error" for finding in found):
        return 1
    run = resumed or _new_run(loaded, plan, ds_config, shards, runs, new, accept_new, facts)
    with locked(run):
        files.write_json(run.doctor, {"findings": [finding.to_json() for finding in found]})
        return _completed(run, plan, wanted, hosts, accept_new, doctor_network.host_env(facts))


def _completed(
    run: RunDir,
    plan: Plan,
    wanted: Recipe,
    hosts: Cluster,
    accept_new: bool,
    network: Mapping[str, Mapping[str, str]] | None = None,
) -> int:
    """Train a locked run unless that is done, then all that follows; 0, or 1 when it is not what its recipe promises.

    The row `prediction` comes last: without it the same command goes on here.
    """
    try:
        with tracking.beside(run, wanted.record.tracking):
            if not lineage.is_trained(run):
                launch_restart.run_ranks(run, plan, wanted, hosts, network=network, accept_new=accept_new)
            gather.checkpoint(run, hosts, plan.steps, accept_new)
            _export(run)
            _ask(run, wanted)
            _give_back()
        kept = _keeps_promises(run, wanted)
        prediction.record(run)
    finally:
        report.build(run, ended=True)
    _finish(run)
    return 0 if kept else 1


def _keeps_promises(run: RunDir, wanted: Recipe) -> bool:
    """Whether the run gave what the recipe's expect: says; recorded."""
    if wanted.expect is None:
        return True
    outcome = expectations.check(run, wanted.expect)
    run.append_event("expect", **outcome.to_json())
    return outcome.ok


def _linted(wanted: Recipe, shards: Path) -> list[lint.Finding]:
    """What is wrong with the labels of dialogues, said; nothing in pretraining."""
    if wanted.stage != "sft":
        return []
    found = lint.check(wanted, Shards(shards))
    lint_show.findings(found)
    return found


def _started(loaded: Loaded, hosts: Cluster, runs: Path, accept_new: bool, read: Read) -> Loaded | None:
    """The recipe with a directory in model.init_from; a recipe there without a finished run is run. None = failed."""
    init_from = loaded.recipe.model.init_from
    if not parents.is_recipe(init_from):
        return loaded
    parent = read(str(init_from))
    found = parents.find(parent.recipe, runs)
    if found is None:
        screen.say(f"{loaded.path} starts from {init_from}, which has no finished run in {runs}: that is trained first")
        if train(parent, hosts, runs, False, accept_new, read) != 0:
            return None
        found = parents.find(parent.recipe, runs)
        assert found is not None  # that run has just finished
    return _with_parent(loaded, found)


def _with_parent(loaded: Loaded, directory: Path) -> Loaded:
    """The recipe that starts from this directory."""
    screen.say(f"starting from {_shown(directory)}")
    model = loaded.recipe.model.model_copy(update={"init_from": str(directory)})
    return dataclasses.replace(loaded, recipe=loaded.recipe.model_copy(update={"model": model}))


def adapt(loaded: Loaded, hosts: Cluster, runs: Path, new: bool, adapter: str) -> list[str]:
    """Make or find the run directory, and the files that start it under another launcher; the commands to type."""
    if parents.is_recipe(loaded.recipe.model.init_from):
        loaded = _with_parent(loaded, start.directory(loaded.recipe, runs))
    shards, plan, ds_config = _planned(loaded, hosts)
    run = None if new else lineage.unfinished(loaded.recipe, plan, shards, runs)
    if run is None or lineage.is_trained(run):
        run = _new_run(loaded, plan, ds_config, shards, runs, new, accept_new=False)
    return adapters.write(adapter, RunDir(run.path.absolute()), loaded.recipe, plan, hosts)


def _planned(loaded: Loaded, hosts: Cluster) -> tuple[Path, Plan, dict[str, Any]]:
    """Prepared data, plan and DeepSpeed settings, shown."""
    wanted = loaded.recipe
    if wanted.train.epochs is None and (wanted.tokenizer.pieces or wanted.model.vocab_size != "auto"):
        # What can be refused without the data is refused before hours go into preparing it.
        config.deepspeed(wanted, planner.make(wanted, hosts, shape.of(wanted)))
    shards = prepare.run(wanted)
    vocab, tokens = prepare.sizes(shards, wanted)
    plan = planner.make(wanted, hosts, shape.of(wanted, vocab), tokens)
    if plan.vocab_size < vocab:
        raise UserError(
            f"the tokenizer has {vocab:,} pieces, the model {plan.vocab_size:,} rows",
            fix="raise model.vocab_size or leave it at auto",
        )
    ds_config = config.deepspeed(wanted, plan)
    show.plan(plan, loaded)
    if hosts.unequal_slots:
        screen.say(hosts.unequal_slots)
    return shards, plan, ds_config


def _new_run(
    loaded: Loaded,
    plan: Plan,
    ds_config: dict[str, Any],
    shards: Path,
    runs: Path,
    new: bool,
    accept_new: bool,
    facts: Mapping[str, Mapping[str, Any]] | None = None,
) -> RunDir:
    """A run directory that continues another plan's run, or begins at step 0."""
    earlier = None if new else lineage.earlier(loaded.recipe, plan, shards, runs, accept_new)
    return create_run(loaded, plan, ds_config, shards, runs, earlier, facts)


def create_run(
    loaded: Loaded,
    plan: Plan,
    ds_config: dict[str, object],
    shards: Path,
    runs: Path,
    earlier: Earlier | None = None,
    facts: Mapping[str, Mapping[str, Any]] | None = None,
) -> RunDir:
    """A new run directory with everything that is decided before launch; it goes on from `earlier`.

    facts: what doctor saw of the hosts, by name.
    """
    stem = f"{loaded.recipe.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    with reserved(runs.absolute(), stem) as path, files.new_directory(path) as temporary:
        run = RunDir(temporary)
        files.write_text(run.recipe, recipe.dump(loaded.recipe))
        files.write_json(run.origins, dict(loaded.origins))
        files.write_json(run.plan, plan.to_json())
        files.write_json(run.ds_config, ds_config)
        files.write_json(run.data, prepare.summary(shards, loaded.recipe))
        manifest.copy_code(run.code)
        continues = {"continues": earlier.to_json()} if earlier else {}
        made = manifest.make(loaded.recipe, plan, shards.resolve(), facts=facts)
        files.write_json(run.manifest, made | continues)
        if changes := manifest.changes():
            files.write_text(run.code_diff, changes)
        if earlier:
            earlier.bring(run)
    return RunDir(path)


def _export(run: RunDir) -> None:
    """The last checkpoint as a Hugging Face model, and a sample of what it writes."""
    from finlm import export  # loads torch

    step, checkpoint = run.complete_checkpoints()[-1]
    if not run.export.exists():
        export.export(checkpoint, run.export)
        run.append_event("export", path=str(run.export), bytes=_size(run.export))
    if recipe.load(run.recipe).recipe.stage == "reward":  # it says how good a text is, and writes none
        return
    prompt = "公司"
    run.append_event("sample", step=step, prompt=prompt, text=export.generate(run.export, prompt, SAMPLE_TOKENS))


def _ask(run: RunDir, wanted: Recipe) -> None:
    """Put the recipe's questions to the model, and to the one it started from."""
    if wanted.eval.suites:
        from finlm.evals import suite  # loads torch

        start = Path(wanted.model.init_from or "")
        mode = None if wanted.eval.mode == "auto" else wanted.eval.mode
        suite.after_training(run, wanted.eval.suites, mode, start if (start / "config.json").is_file() else None)


def _give_back() -> None:
    """The GPU memory that exporting and asking took: ranks of the recipe that starts from this run may need it."""
    import torch

    gc.collect()
    torch.cuda.empty_cache()  # does nothing where there is no GPU


def _finish(run: RunDir) -> None:
    """What the user wants to know at the end, and what to try next."""
    steps, evals = list(run.read_events("step")), list(run.read_events("eval"))
    speeds = sorted(step["tokens_per_second"] for step in steps)
    screen.say(f"\nrun directory   {_shown(run.path)}")
    screen.say(f"training loss   {steps[-1]['loss']:.4f} after {steps[-1]['step']:,} steps")
    if evals:
        first, last = evals[0], evals[-1]
        if "loss" in last:
            fall = 100 * (1 - last["loss"] / first["loss"])
            change = f"{abs(fall):.1f} % {'lower' if fall > 0 else 'higher'}"
            screen.say(f"held-out loss   {first['loss']:.4f} -> {last['loss']:.4f} ({change})")
        for name, source in last["sources"].items():
            shown = [f"{key} {source[key]:,.4f}" for key in HELD_OUT if key in source]
            screen.say(f"  {name:<24} {'  '.join(shown)}")
    suites = {(row["suite"], row["mode"], row["model"]): row for row in run.read_events("suite")}
    for row in suites.values():
        low, high = (100 * bound for bound in row["micro_interval"])
        right = f"{100 * row['micro']:.1f} % right [{low:.1f}, {high:.1f}]"
        screen.say(f"{row['suite']:<15} {right} of {row['questions']:,}, {row['mode']}: {row['model']}")
    screen.say(f"speed           {speeds[len(speeds) // 2]:,.0f} tokens/s (median step)")
    for row in list(run.read_events("prediction"))[-1:]:
        screen.say(f"plan            {prediction.sentence(row)}")
    for sample in list(run.read_events("sample"))[-1:]:
        screen.say(f"sample          {sample['prompt']}{sample['text']}")
    screen.say(f"report          {_shown(run.report)}")
    for row in list(run.read_events("expect"))[-1:]:
        for line in expectations.Outcome.from_json(row).lines():
            screen.say(line)
    screen.say("\ntry next:")
    finlm = f"{_shown(Path(sys.executable))} -m finlm"
    stage = recipe.load(run.recipe).recipe.stage
    if stage != "reward":  # it says how good a text is, and writes none
        screen.say(f"  {finlm} sample {_shown(run.export)} 净利润同比")
    if stage in ("pretrain", "sft"):  # pairs and prompts have no perplexity
        screen.say(f"  {finlm} eval {_shown(run.complete_checkpoints()[-1][1])}")
    screen.say(f"  {finlm} plan recipes/xuanyuan-6b/pretrain.yaml")
    screen.say(f"the model is in {_shown(run.export)} ({units.format_bytes(_size(run.export))}, Hugging Face format)")


def _shown(path: Path) -> Path:
    """Shorter where it lies below the current directory."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def _size(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())
