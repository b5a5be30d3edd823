"""Use finlm from Python: read a recipe, plan it, open a run. `import finlm` loads nothing that these need.

    recipe = finlm.load_recipe("quickstart", "train.steps=500")
    plan = finlm.make_plan(recipe, gpu="H100-80G")
    run = finlm.open_run("latest")

(`finlm.plan` is the folder of the planner.) Mistakes raise UserError with problem, evidence and fix.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from finlm.base.rundir import RunDir
    from finlm.plan.plan import Plan
    from finlm.recipe.schema import Recipe
    from finlm.record.history import History

__all__ = ["Run", "load_recipe", "make_plan", "open_run"]


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
    from finlm.cli import command_line
    from finlm.recipe import recipe as recipes

    return recipes.load(command_line.recipe_file(path), overrides).recipe


def make_plan(recipe: Recipe, *, hostfile: str | Path | None = None, gpu: str | None = None) -> Plan:
    """Return the plan of a recipe as `finlm plan` makes it, without a GPU and without torch.

    hostfile: in DeepSpeed's format, instead of the recipe's hardware. gpu: the kind of every host. GPUs that
    `finlm plan --calibrate` or finished runs measured here count with these speeds. Raises UserError for weights or a
    template that cannot be used, and when nothing fits, with the nearest plan that would.
    """
    import argparse

    from finlm.cli import command_line, recipes

    options = argparse.Namespace(hostfile=hostfile, local=False, gpu=gpu)
    plan, _ = recipes.make_plan(recipe, command_line.to_plan(options, recipe))
    return plan


def open_run(path: str | Path = "latest") -> Run:
    """Return the run of a directory or of a short name: latest, a recipe's name, or how the run's name begins.

    Raises UserError when there is none.
    """
    from finlm.base import rundir
    from finlm.cli import command_line
    from finlm.plan.plan import Plan
    from finlm.recipe import recipe as recipes
    from finlm.record import history

    directory = rundir.open_run(command_line.run_directory(path, must_exist=True))
    rows = history.read_history(directory)
    recipe = recipes.load(directory.recipe).recipe
    return Run(directory, recipe, Plan.read(directory.plan), rows, history.state(directory, rows))
