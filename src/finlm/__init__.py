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
    """A run as read when it was opened: its directory, recipe, plan and event history, and its state as one word.

    `state` is running, finished, interrupted, failed, killed or not started (see record.history.state).
    """

    directory: RunDir
    recipe: Recipe
    plan: Plan
    history: History
    state: str


def load_recipe(path: str | Path, *overrides: str) -> Recipe:
    """Load and check a recipe from a file, or from a short name as on the command line, such as quickstart.

    Each override is a string "key=value" as `--set` takes it. Raises UserError that lists every mistake, or when there
    is no such recipe.
    """
    from finlm.cli import command_line
    from finlm.recipe import recipe as recipes

    return recipes.load(command_line.recipe_file(path), overrides).recipe


def make_plan(recipe: Recipe, *, hostfile: str | Path | None = None, gpu: str | None = None) -> Plan:
    """Return the plan that `finlm plan` would make for a recipe; needs no GPU and does not import torch.

    `hostfile`, in DeepSpeed's format, replaces the hosts of the recipe's hardware:. `gpu` is the GPU kind of every
    host. GPU speeds that `finlm plan --calibrate` or finished runs measured for this user are used. Raises UserError
    for a hostfile, weights or chat template that cannot be used, and when nothing fits; the error's fix then names the
    nearest plan that would.
    """
    import argparse

    from finlm.cli import command_line, recipes

    options = argparse.Namespace(hostfile=hostfile, local=False, gpu=gpu)
    plan, _ = recipes.check_and_plan(recipe, command_line.to_plan(options, recipe))
    return plan


def open_run(path: str | Path = "latest") -> Run:
    """Return the run of a directory or of a short name: `latest`, a recipe's name, or the beginning of a run's name.

    Raises UserError when there is no such run, the name fits several, or another version of finlm wrote it.
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
