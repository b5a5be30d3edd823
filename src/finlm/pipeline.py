"""`finlm train`: prepare -> plan -> doctor -> run directory -> launch -> export -> sample -> report.

The one place that calls every other module in order. A run is found again by the hash of its resolved recipe: the same
command resumes an unfinished run and does not repeat a finished one's preparation.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from finlm import config
from finlm.base import files, screen, units
from finlm.base.errors import UserError
from finlm.base.rundir import RunDir
from finlm.data import prepare
from finlm.ops import adapters, doctor, doctor_gather, doctor_network, gather, launch
from finlm.plan import planner, show
from finlm.plan.plan import Plan
from finlm.recipe import recipe, shape
from finlm.recipe.cluster import Cluster
from finlm.recipe.recipe import Loaded
from finlm.recipe.schema import Launch, Recipe
from finlm.record import manifest, report

SAMPLE_TOKENS = 80


def train(loaded: Loaded, hosts: Cluster, runs: Path, new: bool, accept_new: bool = False) -> int:
    """Run a recipe to its report; 0, or 1 when doctor found an error."""
    wanted = loaded.recipe
    shards, plan, ds_config = _planned(loaded, hosts)
    facts = doctor_gather.gather(wanted, plan, hosts, runs, accept_new=accept_new)
    findings = doctor.judge(wanted, plan, hosts, facts)
    doctor.show(findings)
    if any(finding.level == "error" for finding in findings):
        return 1
    run = None if new else _unfinished(loaded, plan, shards, runs)
    if run is None:
        run = create_run(loaded, plan, ds_config, shards, runs)
    files.write_json(run.doctor, {"findings": [finding.to_json() for finding in findings]})
    try:
        network = doctor_network.host_env(facts)
        launch.run_ranks(run, plan, wanted, hosts, network=network, accept_new=accept_new)
        gather.checkpoint(run, hosts, plan.steps, accept_new)
        _export(run)
    finally:
        report.build(run, ended=True)
    _finish(run)
    return 0


def adapt(loaded: Loaded, hosts: Cluster, runs: Path, new: bool, adapter: str) -> list[str]:
    """Make or find the run directory, and the files that start it under another launcher; the commands to type."""
    shards, plan, ds_config = _planned(loaded, hosts)
    run = None if new else _unfinished(loaded, plan, shards, runs)
    if run is None:
        run = create_run(loaded, plan, ds_config, shards, runs)
    return adapters.write(adapter, RunDir(run.path.absolute()), loaded.recipe, plan, hosts)


def _planned(loaded: Loaded, hosts: Cluster) -> tuple[Path, Plan, dict[str, Any]]:
    """Prepared data, plan and DeepSpeed settings, shown."""
    wanted = loaded.recipe
    if wanted.train.epochs is None and (wanted.tokenizer.pieces or wanted.model.vocab_size != "auto"):
        # What can be refused without the data is refused before hours go into preparing it.
        config.deepspeed(wanted, planner.make(wanted, hosts, shape.of(wanted)))
    shards = prepare.run(wanted)
    vocab, tokens = prepare.sizes(shards)
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


def _unfinished(loaded: Loaded, plan: Plan, shards: Path, runs: Path) -> RunDir | None:
    """The newest run of the same recipe, plan and data that has not finished."""
    for directory in sorted(runs.glob(f"{loaded.recipe.name}-*"), reverse=True):
        run = RunDir(directory)
        if not (run.manifest.exists() and _same_training(run, loaded.recipe)):
            continue
        same_data = files.read_json(run.manifest)["shards"]["path"] == str(shards.resolve())
        if any(event["status"] == "finished" for event in run.read_events("end")):
            continue
        if same_data and files.read_json(run.plan) == json.loads(json.dumps(plan.to_json())):
            step = max((step for step, _ in run.complete_checkpoints()), default=0)
            screen.say(f"resuming {run.path} from step {step:,} (--new starts afresh)")
            return run
    return None


def _same_training(run: RunDir, wanted: Recipe) -> bool:
    """Equal but for how hosts are reached and watched, which may be mended between two launches of a run."""
    try:
        former = recipe.load(run.recipe).recipe
    except UserError:  # written by a version with other keys
        return False
    ways = {"hosts": {}, "launch": Launch()}
    return former.model_copy(update=ways) == wanted.model_copy(update=ways)


def create_run(loaded: Loaded, plan: Plan, ds_config: dict[str, object], shards: Path, runs: Path) -> RunDir:
    """A new run directory with everything that is decided before launch."""
    path = runs / f"{loaded.recipe.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    count = 1
    while path.exists():
        count += 1
        path = path.with_name(f"{path.name.partition('.')[0]}.{count}")
    with files.new_directory(path.absolute()) as temporary:
        run = RunDir(temporary)
        files.write_text(run.recipe, recipe.dump(loaded.recipe))
        files.write_json(run.origins, dict(loaded.origins))
        files.write_json(run.plan, plan.to_json())
        files.write_json(run.ds_config, ds_config)
        files.write_json(run.data, prepare.summary(shards, loaded.recipe))
        manifest.copy_code(run.code)
        files.write_json(run.manifest, manifest.make(loaded.recipe, plan, shards.resolve()))
    return RunDir(path.absolute())


def _export(run: RunDir) -> None:
    """The last checkpoint as a Hugging Face model, and a sample of what it writes."""
    from finlm import export  # loads torch

    step, checkpoint = run.complete_checkpoints()[-1]
    if not run.export.exists():
        export.export(checkpoint, run.export)
        run.append_event("export", path=str(run.export), bytes=_size(run.export))
    prompt = "公司"
    run.append_event("sample", step=step, prompt=prompt, text=export.generate(run.export, prompt, SAMPLE_TOKENS))


def _finish(run: RunDir) -> None:
    """What the user wants to know at the end, and what to try next."""
    steps, evals = list(run.read_events("step")), list(run.read_events("eval"))
    speeds = sorted(step["tokens_per_second"] for step in steps)
    screen.say()
    screen.say(f"run directory   {_shown(run.path)}")
    screen.say(f"training loss   {steps[-1]['loss']:.4f} after {steps[-1]['step']:,} steps")
    if evals:
        first, last = evals[0], evals[-1]
        fall = 100 * (1 - last["loss"] / first["loss"])
        screen.say(f"held-out loss   {first['loss']:.4f} -> {last['loss']:.4f} ({fall:.1f} % lower)")
        for name, source in last["sources"].items():
            screen.say(f"  {name:<24} loss {source['loss']:.4f}  perplexity {source['perplexity']:,.2f}")
    screen.say(f"speed           {speeds[len(speeds) // 2]:,.0f} tokens/s (median step)")
    sample = list(run.read_events("sample"))[-1]
    screen.say(f"sample          {sample['prompt']}{sample['text']}")
    screen.say(f"report          {_shown(run.report)}")
    screen.say()
    screen.say("try next:")
    finlm = f"{_shown(Path(sys.executable))} -m finlm"
    screen.say(f"  {finlm} sample {_shown(run.export)} 净利润同比")
    screen.say(f"  {finlm} eval {_shown(run.complete_checkpoints()[-1][1])}")
    screen.say(f"  {finlm} plan recipes/xuanyuan-6b/pretrain.yaml")
    screen.say(f"the model is in {_shown(run.export)} ({units.format_bytes(_size(run.export))}, Hugging Face format)")


def _shown(path: Path) -> Path:
    """Shorter where it lies below the current directory."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def _size(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())
