"""The directory of the model a recipe starts from, for its tokenizer and chat template; weights are not read here."""

from __future__ import annotations

from pathlib import Path

from finlm.base import files
from finlm.base.errors import UserError
from finlm.data import chat_tokens
from finlm.data.steps import NotPrepared
from finlm.recipe import hub_errors, parents, recipe
from finlm.recipe.schema import Recipe


def directory(wanted: Recipe, runs: Path, *, must_exist: bool = True) -> Path:
    """Where model.init_from lies: itself, the newest run's export of a recipe below runs, or the Hub's snapshot.

    Raises UserError when there is none, or NotPrepared where must_exist is False.
    """
    init_from = wanted.model.init_from
    assert init_from is not None  # recipe.parents asks for it
    if parents.is_recipe(init_from):
        parent = recipe.load(init_from).recipe
        found = parents.find(parent, runs)
        if found is None and not must_exist:
            raise NotPrepared("model")
        if found is None:
            raise UserError(
                f"the model that {init_from} makes is not there yet",
                evidence=f"no finished run with the model and tokenizer that it says in {runs.absolute()}",
                fix=f"finlm train {init_from}; `finlm train` of this recipe does that first. To start from a run "
                "with other settings: --set model.init_from=runs/RUN/export",
            )
        return found
    path = Path(init_from)
    if path.is_dir():
        return path
    if not must_exist:
        raise NotPrepared("model")
    return _snapshot(init_from, wanted.model.revision)


def check(wanted: Recipe) -> None:
    """Raises UserError when model.init_from is a directory without a model; before hours go into preparing data."""
    check_judge(wanted)
    init_from = wanted.model.init_from
    if init_from is None or parents.is_recipe(init_from) or not parents.is_directory(init_from):
        return
    _check_directory(
        "model.init_from",
        init_from,
        "put config.json and *.safetensors there, or name another directory or a model of the Hub",
    )


def check_judge(wanted: Recipe) -> None:
    """Raises UserError when grpo.reward names no reward model's directory."""
    if wanted.grpo is None or wanted.grpo.reward == "choice":
        return
    fix = "write choice, or name the export of a run of stage reward from the same start"
    path = _check_directory("grpo.reward", wanted.grpo.reward, fix)
    config = files.read_json(path / "config.json")
    if not parents.is_judge(config):
        raise UserError(
            f"grpo.reward: {wanted.grpo.reward} is not a reward model",
            evidence=f"architectures in its config.json: {', '.join(config.get('architectures') or ['none'])}",
            fix=fix,
        )


def _check_directory(key: str, named: str, fix: str) -> Path:
    path = Path(named)
    if not (path / "config.json").is_file() or not any(path.glob("*.safetensors")):
        found = "lacks config.json or *.safetensors" if path.is_dir() else "does not exist"
        raise UserError(f"{key}: there is no model in {named}", evidence=f"{path.absolute()} {found}", fix=fix)
    return path


def _snapshot(identity: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download  # a quarter of a second that only Hub ids need

    problem = f"cannot fetch the tokenizer of {identity}"
    with hub_errors.told(problem, "give a directory in model.init_from, or check id and revision"):
        return Path(snapshot_download(identity, revision=revision, allow_patterns=list(chat_tokens.FILES)))
