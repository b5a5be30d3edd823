"""What a command does that needs no run: prepare, lint, self-qa, plan, new, diff; and watch, which only reads one."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from finlm.base import files, screen
from finlm.base.errors import UserError

if TYPE_CHECKING:
    from finlm.plan.plan import Plan
    from finlm.recipe.cluster import Cluster
    from finlm.recipe.recipe import Loaded
    from finlm.recipe.schema import Recipe


def load(options: argparse.Namespace) -> Loaded:
    """The recipe of the command line with its --set values."""
    from finlm.recipe import recipe

    return recipe.load(options.recipe, options.set)


def prepare(options: argparse.Namespace) -> int:
    """Documents to shards."""
    from finlm.data import prepare, start

    recipe = load(options).recipe
    start.check_judge(recipe)
    shards = prepare.run(recipe)
    if options.show > 0:
        prepare.show_rows(recipe, shards, options.show)
    print(shards)
    return 0


def lint(options: argparse.Namespace) -> int:
    """What dialogues teach, and what is wrong with the labels."""
    from finlm.data import lint, lint_show, prepare
    from finlm.data.shards import Shards

    recipe = load(options).recipe
    if recipe.stage == "pretrain":
        raise UserError(
            f"{options.recipe} trains on documents, which have no labels to look at", fix="finlm prepare --show 2"
        )
    shards = Shards(prepare.run(recipe))
    lint_show.rows(recipe, shards, options.rows)
    lint_show.summary(recipe, shards, lint.look(recipe, shards))
    found = lint.check(recipe, shards)
    lint_show.findings(found)
    if options.json:
        print(json.dumps({"findings": [finding.to_json() for finding in found]}, ensure_ascii=False))
    return 1 if any(finding.level == "error" for finding in found) else 0


def self_qa(options: argparse.Namespace) -> int:
    """Questions and answers about the documents."""
    from finlm.data import self_qa

    recipe = load(options).recipe
    if recipe.self_qa is None or recipe.self_qa.endpoint is not None:
        print(self_qa.run(recipe))
        return 0
    from finlm.local_model import Local  # loads torch

    model = Local(Path(recipe.self_qa.model), recipe.self_qa.seed)
    print(self_qa.run(recipe, model, model.fingerprint))
    return 0


def hosts_of(options: argparse.Namespace, recipe: Recipe) -> Cluster:
    """The hosts that --hostfile, --local or the recipe name."""
    from finlm.plan import calibration
    from finlm.recipe import cluster

    calibration.read()
    if "gpu_memory" in options:  # `finlm plan` alone; it comes second, so that what it says counts more
        calibration.describe(
            options.gpu, options.gpu_memory, options.gpu_flops, options.gpu_bandwidth, options.gpu_capability
        )
    if options.hostfile:
        return cluster.load(options.hostfile, recipe.hardware, options.gpu, recipe.hosts)
    if options.local:
        return cluster.local(recipe.train.cpu_ranks)
    return cluster.from_hardware(recipe.hardware, options.gpu)


def make_plan(recipe: Recipe, hosts: Cluster) -> Plan:
    """The plan, with the sizes of prepared data where the recipe asks for them."""
    from finlm.data import prepare, start
    from finlm.plan import planner
    from finlm.recipe import shape

    start.check_judge(recipe)
    needs_data = recipe.train.epochs is not None or recipe.model.vocab_size == "auto"
    prepared = prepare.locate(recipe) if needs_data else None
    vocab, tokens = prepare.sizes(prepared, recipe) if prepared else (None, None)
    return planner.make(recipe, hosts, shape.of(recipe, vocab), tokens)


def plan(options: argparse.Namespace) -> int:
    """What a run would do."""
    from finlm.data import prepare
    from finlm.plan import calibration, consult, show
    from finlm.recipe import cluster

    if options.calibrate:
        show.calibrated(calibration.measure(), calibration.path())
        if options.recipe is None:
            return 0
    if options.recipe is None:
        raise UserError("finlm plan needs a recipe", fix="give recipes/<family>/<stage>.yaml")
    loaded = load(options)
    hosts = hosts_of(options, loaded.recipe)
    if options.hostfile:
        hosts = cluster.described(hosts, loaded.recipe.hardware)
    plan = make_plan(loaded.recipe, hosts)
    prepared = prepare.locate(loaded.recipe)
    tokens = prepare.sizes(prepared, loaded.recipe)[1] if prepared else None
    found = consult.of(loaded.recipe, hosts, plan, tokens, options.price)
    show.plan(plan, loaded)
    show.consulted(found, plan)
    show.origins(loaded)
    if options.json:
        print(json.dumps(plan.to_json() | found.to_json(), ensure_ascii=False))
    return 0


def new(options: argparse.Namespace) -> int:
    """A recipe of one's own."""
    from finlm import recipe_page
    from finlm.recipe import fork

    path = fork.new(options.name, options.parent, options.recipes, options.copy)
    print(path)
    for written in recipe_page.write(path, options.parent):
        screen.say(f"also written: {written}")
    screen.say("try next:")
    screen.say(f"  edit {path}")
    screen.say(f"  {recipe_page.program()} diff {path}")
    screen.say(f"  {recipe_page.train_command(path)}")
    return 0


def diff(options: argparse.Namespace) -> int:
    """What two recipes or runs say differently, and what follows."""
    from finlm.plan import differences as consequences
    from finlm.recipe import differences, fork

    paths = [fork.parent_of(options.recipes[0]), *options.recipes] if len(options.recipes) == 1 else options.recipes
    if len(paths) != 2:
        raise UserError(f"{len(paths)} recipes or runs were named", fix="finlm diff A B, or finlm diff FORK")
    a, b = (_loaded(path) for path in paths)
    values = differences.between(a, b)
    follows: list[consequences.Consequence] | str
    try:
        follows = consequences.between(*(_planned(path, it, options) for path, it in zip(paths, (a, b), strict=True)))
    except UserError as error:  # a recipe that fits nowhere has differences too
        follows = error.problem
    consequences.show((str(paths[0]), str(paths[1])), values, follows)
    if options.json:
        plan = [asdict(row) for row in follows] if isinstance(follows, list) else []
        print(json.dumps({"values": [asdict(row) for row in values], "plan": plan}, ensure_ascii=False))
    return 0


def _loaded(path: Path) -> Loaded:
    """A recipe, or the one of a run directory with the origins it was started with."""
    from finlm.base import rundir
    from finlm.recipe import recipe

    if not path.is_dir():
        return recipe.load(path)
    run = rundir.open_run(path)
    return recipe.Loaded(recipe.load(run.recipe).recipe, files.read_json(run.origins), str(path))


def _planned(path: Path, loaded: Loaded, options: argparse.Namespace) -> Plan:
    """A run's own plan; a recipe's for the hosts asked for."""
    from finlm.base.rundir import RunDir
    from finlm.plan.plan import Plan

    if path.is_dir():
        return Plan.read(RunDir(path).plan)
    return make_plan(loaded.recipe, hosts_of(options, loaded.recipe))


def watch(options: argparse.Namespace) -> int:
    """A run as it goes, from anywhere its directory can be read."""
    from finlm.base import rundir
    from finlm.record import live

    return live.watch(rundir.open_run(options.run_dir))
