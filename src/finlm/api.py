"""Use finlm from Python: read a recipe, plan it, open a run. `import finlm` offers these names and loads nothing.

    recipe = finlm.load_recipe("quickstart", "train.steps=500")
    plan = finlm.make_plan(recipe, gpu="H100-80G")
    run = finlm.open_run("latest")

(`finlm.plan` is the folder of the planner.) Mistakes raise UserError with problem, evidence and fix.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from finlm.base import rundir
from finlm.base.rundir import RunDir
from finlm.cli import hosts
from finlm.plan.plan import Plan
from finlm.recipe import cluster
from finlm.recipe import recipe as recipes
from finlm.recipe.schema import Recipe
from finlm.record import history
from finlm.record.history import History


@dataclass(frozen=True)
class Run:
    """A run as it was when it was opened: directory, recipe, plan, recorded history and state in a word."""

    directory: RunDir
    recipe: Recipe
    plan: Plan
    history: History
    state: str


def load_recipe(path: str | Path, *overrides: str) -> Recipe:
    """Return the recipe of a file, or of a short name as on the command line; overrides as `--set` takes them.

    Raises UserError that lists every mistake.
    """
    return recipes.load(hosts.recipe_file(path), overrides).recipe


def make_plan(recipe: Recipe, *, hostfile: str | Path | None = None, gpu: str | None = None) -> Plan:
    """Return the plan of a recipe, made without a GPU and without torch.

    hostfile: in DeepSpeed's format, instead of the recipe's hardware. gpu: the kind of every host. Raises UserError
    when nothing fits, with the nearest plan that would.
    """
    from finlm import prepare

    if hostfile is None:
        where = cluster.from_hardware(recipe.hardware, gpu)
    else:
        where = cluster.add_hardware(cluster.load(hostfile, recipe.hardware, gpu, recipe.hosts), recipe.hardware)
    return prepare.make_plan(recipe, where, prepare.locate(recipe))


def open_run(path: str | Path = hosts.LATEST) -> Run:
    """Return the run of a directory or of a short name: latest, a recipe's name, or how the run's name begins.

    Raises UserError when there is none.
    """
    directory = rundir.open_run(hosts.run_directory(path, must_exist=True))
    rows = history.read_history(directory)
    recipe = recipes.load(directory.recipe).recipe
    return Run(directory, recipe, Plan.read(directory.plan), rows, history.state(directory, rows))
