"""The model a recipe starts from, looked for before anything is prepared."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from finlm import cli
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


def test_the_judge_of_grpo_is_an_exported_reward_model(tmp_path: Path) -> None:
    wanted = recipe.load(QUICKSTART.parent / "grpo.yaml", (f"grpo.reward={tmp_path / 'judge'}",)).recipe
    with pytest.raises(UserError, match=r"grpo.reward: there is no model in") as caught:
        start.check(wanted)
    assert caught.value.evidence.endswith("does not exist")
    (tmp_path / "judge").mkdir()
    (tmp_path / "judge/model.safetensors").touch()
    config = tmp_path / "judge/config.json"
    config.write_text('{"architectures": ["LlamaForCausalLM"]}')
    with pytest.raises(UserError, match="is not a reward model"):
        start.check(wanted)
    assert cli.main(["plan", str(QUICKSTART.parent / "grpo.yaml"), "--set", f"grpo.reward={tmp_path / 'judge'}"]) == 2
    config.write_text('{"architectures": ["LlamaForSequenceClassification"]}')
    start.check(wanted)


def test_a_reward_model_is_no_start_for_a_stage_that_writes(tmp_path: Path) -> None:
    shape = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 128}
    config = shape | {"model_type": "llama", "vocab_size": 4096, "architectures": ["LlamaForSequenceClassification"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    for stage in ("pretrain", "sft", "dpo", "grpo"):
        with pytest.raises(UserError) as caught:
            recipe.load(QUICKSTART.parent / f"{stage}.yaml", (f"model.init_from={tmp_path}",))
        assert "model.init_from" in caught.value.evidence and "is a reward model" in caught.value.evidence
    recipe.load(QUICKSTART.parent / "reward.yaml", (f"model.init_from={tmp_path}",))


def test_recipes_and_models_of_the_hub_are_not_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for named in ("mistralai/Mistral-7B-v0.1", "gpt2", str(QUICKSTART)):
        check(named)
