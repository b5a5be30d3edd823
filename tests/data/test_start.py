"""The model a recipe starts from, looked for before anything is prepared."""

from __future__ import annotations

from pathlib import Path

import pytest

from finlm.base.errors import UserError
from finlm.data import start
from finlm.recipe import recipe

from helpers import QUICKSTART


def check(init_from: str) -> None:
    wanted = recipe.load(QUICKSTART).recipe
    start.check(wanted.model_copy(update={"model": wanted.model.model_copy(update={"init_from": init_from})}))


def test_a_directory_must_hold_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("llama").mkdir()
    for missing in ("models/llama", str(tmp_path / "nope"), "llama/nope"):
        with pytest.raises(UserError, match=f"there is no model in {missing}") as caught:
            check(missing)
        assert caught.value.evidence.endswith("does not exist")
    for name, enough in (("config.json", False), ("pytorch_model.bin", False), ("model.safetensors", True)):
        Path("llama", name).touch()
        if not enough:
            with pytest.raises(UserError) as caught:
                check("llama")
            assert caught.value.evidence == f"{tmp_path / 'llama'} lacks config.json or *.safetensors"
    check("llama")


def test_recipes_and_models_of_the_hub_are_not_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for named in ("mistralai/Mistral-7B-v0.1", "gpt2", str(QUICKSTART)):
        check(named)
