"""`finlm new NAME --model`: a recipe for a model that no recipe here knows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from finlm.cli import main, recipes
from finlm.recipe import recipe
from finlm.tokens import pretrained
from vocabularies import byte_level

CONFIG = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
CONFIG |= {"num_key_value_heads": 2, "intermediate_size": 128, "vocab_size": 800, "rms_norm_eps": 1e-6}
CONFIG |= {"rope_theta": 500000.0, "tie_word_embeddings": True, "max_position_embeddings": 2048}
SWALLOWS = "{% for m in messages %}{{ m.content.split('</think>')[-1] }}<|endoftext|>{% endfor %}"


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    byte_level(tmp_path / "model", begins=True)
    (tmp_path / "model/config.json").write_text(json.dumps(CONFIG))
    return tmp_path / "model"


def settings(model: Path, **changed: str) -> None:
    path = model / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changed))
    pretrained._open_cached.cache_clear()


@pytest.mark.parametrize("stage", ["pretrain", "sft"])
def test_what_is_written_loads_plans_and_has_the_models_shape(
    model: Path, stage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.main(["new", "mine", "--model", str(model), "--stage", stage]) == 0
    out, err = capsys.readouterr()
    path = Path(out.strip())
    assert f"{model} has no *.safetensors, which training starts from" in err
    wanted = recipe.load(path).recipe
    assert path == Path(f"recipes/mine/{stage}.yaml") and wanted.stage == stage
    shape = wanted.model
    assert (shape.hidden_size, shape.layers, shape.heads, shape.kv_heads, shape.ffn_size) == (64, 2, 4, 2, 128)
    assert (shape.vocab_size, shape.rope_theta, shape.norm_eps, shape.tie_embeddings) == (800, 500000.0, 1e-6, True)
    assert wanted.batch.sequence_length == 2048 and "chosen by us" in path.read_text()
    assert main.main(["plan", str(path)]) == 0
    assert main.main(["new", "mine", "--model", str(model), "--stage", stage]) == 2
    assert "exists already" in capsys.readouterr().err


def test_a_run_stands_for_its_export(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = model.parent / "runs/mine-20260101-000000"
    run.mkdir(parents=True)
    (run / "plan.json").write_text("{}")
    model.rename(run / "export")
    assert main.main(["new", "mine", "--model", str(run)]) == 0
    assert recipe.load(Path(capsys.readouterr().out.strip())).recipe.model.init_from == str(run / "export")


def test_documents_do_not_end_with_the_end_of_a_turn(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings(model, eos_token="<|im_end|>")
    assert main.main(["new", "mine", "--model", str(model)]) == 0
    assert recipe.load(Path("recipes/mine/pretrain.yaml")).recipe.tokenizer.document_end == "<|endoftext|>"


def test_the_template_is_one_that_keeps_the_whole_answer(model: Path) -> None:
    assert recipes.template_for(pretrained.open_tokenizer(model)) == "model"
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    added = tokenizer["added_tokens"]
    added.append(added[-1] | {"id": 1 + max(token["id"] for token in added), "content": "</think>"})
    (model / "tokenizer.json").write_text(json.dumps(tokenizer))
    settings(model, chat_template=SWALLOWS)
    assert recipes.template_for(pretrained.open_tokenizer(model)) == "chatml"


@pytest.mark.parametrize(
    ("name", "what", "says"),
    [("Mine", "model", "is no name"), ("mine", "nothing", "there is no model"), ("mine", "odd", "model_type")],
)
def test_a_mistake_leaves_nothing(
    model: Path, name: str, what: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("odd").mkdir()
    Path("odd/config.json").write_text(json.dumps(CONFIG | {"model_type": "mamba"}))
    assert main.main(["new", name, "--model", str(model.parent / what)]) == 2
    assert says in capsys.readouterr().err and not list(Path("recipes").glob("**/*"))
