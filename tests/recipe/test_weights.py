"""The model a recipe starts from, looked for before anything is prepared; files that are not whole."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from finlm import prepare
from finlm.base.errors import UserError
from finlm.cli import main
from finlm.recipe import recipe, weights

from helpers import NO_WEIGHTS, QUICKSTART, sets

CONFIG = {"num_hidden_layers": 2, "vocab_size": 6, "hidden_size": 4}
SHAPES = {"model.embed_tokens.weight": [6, 4]} | {
    f"model.layers.{layer}.{name}.weight": [4] for layer in (0, 1) for name in ("input_layernorm", "norm")
}


def write(path: Path, shapes: dict[str, list[int]]) -> bytes:
    """A file of fp16 zeros with these shapes."""
    header, end = {}, 0
    for name, shape in shapes.items():
        size = 2 * shape[0] * shape[-1] if len(shape) > 1 else 2 * shape[0]
        header[name] = {"dtype": "F16", "shape": shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header | {"__metadata__": {"format": "pt"}}).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(end))
    return path.read_bytes()


def refused(directory: Path) -> str:
    with pytest.raises(UserError, match="holds no whole model") as caught:
        weights.check(directory, CONFIG)
    return caught.value.evidence


def test_a_whole_model_is_whole_and_one_of_another_kind_is_left_to_its_loading(tmp_path: Path) -> None:
    write(tmp_path / "model.safetensors", SHAPES)
    weights.check(tmp_path, CONFIG)
    write(tmp_path / "model.safetensors", {"transformer.h.0.attn": [4]})
    weights.check(tmp_path, CONFIG)


@pytest.mark.parametrize(
    ("length", "says"),
    [(-1, "bytes, its header says"), (40, "its header is cut short"), (5, "its header is cut short"), (0, "cut short")],
)
def test_a_file_that_is_cut_short_is_named_with_its_size(tmp_path: Path, length: int, says: str) -> None:
    whole = write(tmp_path / "model.safetensors", SHAPES)
    (tmp_path / "model.safetensors").write_bytes(whole[:length])
    assert says in refused(tmp_path) and refused(tmp_path).startswith("model.safetensors: ")


def test_a_page_of_html_in_the_place_of_weights_is_no_traceback(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_text("<html>404</html>" * 9)
    assert "is none of safetensors" in refused(tmp_path)
    (tmp_path / "model.safetensors").write_bytes((4).to_bytes(8, "little") + b"[1]\n")
    assert "its header is damaged" in refused(tmp_path)


def test_files_layers_and_embeddings_that_are_missing_or_of_another_shape_are_named(tmp_path: Path) -> None:
    write(tmp_path / "model.safetensors", SHAPES)
    parts = {"a": "model.safetensors", "b": "model-00002.safetensors"}
    (tmp_path / weights.INDEX).write_text(json.dumps({"weight_map": parts}))
    assert refused(tmp_path) == f"model-00002.safetensors: is not there, and {weights.INDEX} names it"
    (tmp_path / weights.INDEX).unlink()
    less = {name: shape for name, shape in SHAPES.items() if name != "model.layers.1.norm.weight"}
    write(tmp_path / "model.safetensors", less)
    assert refused(tmp_path) == "layer 1 lacks norm.weight"
    write(tmp_path / "model.safetensors", SHAPES | {"model.layers.2.norm.weight": [4]})
    assert "tensors of 3 layers, and num_hidden_layers is 2" in refused(tmp_path)
    write(tmp_path / "model.safetensors", SHAPES | {"model.embed_tokens.weight": [6, 2]})
    assert refused(tmp_path) == "model.embed_tokens.weight is 6 x 2, config.json says 6 x 4"


@pytest.mark.parametrize("command", ["plan", "train"])
def test_a_start_that_is_cut_short_is_told_before_anything_is_prepared(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    start = tmp_path / "start"
    start.mkdir()
    config = {"model_type": "llama", "num_attention_heads": 6, "intermediate_size": 512, "rms_norm_eps": 1e-5}
    config |= {"num_hidden_layers": 4, "vocab_size": 4096, "hidden_size": 192}
    (start / "config.json").write_text(json.dumps(config))
    whole = write(start / "model.safetensors", {"model.embed_tokens.weight": [4096, 192]})
    (start / "model.safetensors").write_bytes(whole[:-7])
    assert main.main([command, str(QUICKSTART), *sets([f"model.init_from={start}"])]) == 2
    assert "model.safetensors: 1,572," in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["start"]
    assert main.main([command, str(QUICKSTART), *sets([f"model.init_from={start}", "model.layers=3"])]) == 2
    assert "model.layers: 3, but" in capsys.readouterr().err


def check(init_from: str) -> None:
    wanted = recipe.load(QUICKSTART).recipe
    weights.check_model(wanted.model_copy(update={"model": wanted.model.model_copy(update={"init_from": init_from})}))


def test_a_directory_must_hold_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("llama").mkdir()
    for missing in ("models/llama", str(tmp_path / "nope"), "llama/nope"):
        with pytest.raises(UserError, match=f"there is no model in {missing}") as caught:
            check(missing)
        assert caught.value.evidence.endswith("does not exist")
    for name, enough in (("config.json", False), ("pytorch_model.bin", False), ("model.safetensors", True)):
        Path("llama", name).write_bytes(NO_WEIGHTS if enough else b'{"model_type": "llama"}')
        if not enough:
            with pytest.raises(UserError) as caught:
                check("llama")
            assert caught.value.evidence == f"{tmp_path / 'llama'} lacks config.json or *.safetensors"


def test_the_judge_of_grpo_is_an_exported_reward_model(tmp_path: Path) -> None:
    wanted = recipe.load(QUICKSTART.parent / "grpo.yaml", (f"grpo.reward={tmp_path / 'judge'}",)).recipe
    with pytest.raises(UserError, match=r"grpo.reward: there is no model in") as caught:
        weights.check_model(wanted)
    assert caught.value.evidence.endswith("does not exist")
    (tmp_path / "judge").mkdir()
    (tmp_path / "judge/model.safetensors").write_bytes(NO_WEIGHTS)
    config = tmp_path / "judge/config.json"
    config.write_text('{"architectures": ["LlamaForCausalLM"]}')
    with pytest.raises(UserError, match="is not a reward model"):
        weights.check_model(wanted)
    assert main.main(["plan", str(QUICKSTART.parent / "grpo.yaml"), "--set", f"grpo.reward={tmp_path / 'judge'}"]) == 2
    config.write_text('{"architectures": ["LlamaForSequenceClassification"]}')
    weights.check_model(wanted)


def test_a_recipe_of_stage_reward_stands_for_its_reward_model(tmp_path: Path) -> None:
    grpo, reward = QUICKSTART.parent / "grpo.yaml", QUICKSTART.parent / "reward.yaml"
    wanted = recipe.load(grpo, (f"grpo.reward={reward}",)).recipe
    assert weights.reward_recipes(wanted) == [(0, str(reward))]
    weights.check_judge(wanted)  # looked at once it is trained
    made = weights.with_reward_model(wanted, 0, str(tmp_path))
    assert weights.reward_recipes(made) == [] and made.grpo is not None and made.grpo.reward[0].path == str(tmp_path)
    for named, says in ((QUICKSTART, "is of stage pretrain: name one of stage reward"), ("nope.yaml", "cannot read")):
        with pytest.raises(UserError, match=says if named == "nope.yaml" else "1 mistake") as caught:
            recipe.load(grpo, (f"grpo.reward={named}",))
        assert says in str(caught.value) + caught.value.evidence


def test_a_reward_model_is_no_start_for_a_stage_that_writes(tmp_path: Path) -> None:
    shape = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 128}
    config = shape | {"model_type": "llama", "vocab_size": 4096, "architectures": ["LlamaForSequenceClassification"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    for stage in ("pretrain", "sft", "dpo", "grpo"):
        with pytest.raises(UserError) as caught:
            recipe.load(QUICKSTART.parent / f"{stage}.yaml", (f"model.init_from={tmp_path}",))
        assert "model.init_from" in caught.value.evidence and "is a reward model" in caught.value.evidence
    recipe.load(QUICKSTART.parent / "reward.yaml", (f"model.init_from={tmp_path}",))


LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 4096, "hidden_size": 64}
LLAMA |= {"num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 128, "rms_norm_eps": 1e-5}
WRITTEN = "model={hidden_size: 64, layers: 2, heads: 2, ffn_size: 128, vocab_size: 4096}"
OTHERS = (
    ({"attention_dropout": 0.1}, "attention_dropout 0.1"),
    ({"is_causal": False}, "later tokens"),
    ({"quantization_config": {"quant_method": "gptq"}}, "quantised weights (gptq)"),
    ({"logit_scale": 0.25}, "logit_scale 0.25"),
)


@pytest.mark.parametrize(("changes", "said"), OTHERS, ids=lambda value: next(iter(value)) if value else "")
def test_a_start_that_computes_something_else_is_refused_whatever_the_stage(
    changes: dict[str, object], said: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | changes))
    for stage in ("pretrain", "sft"):
        for written in ((), (WRITTEN, "tokenizer={path: tokenizer.model}")):
            sets = (*written, f"model.init_from={tmp_path}")
            with pytest.raises(UserError, match="not a model that finlm trains") as caught:
                recipe.load(QUICKSTART.parent / f"{stage}.yaml", sets)
            assert said in caught.value.evidence
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {"hidden_act": "swish", "rope_scaling": None}))
    recipe.load(QUICKSTART.parent / "sft.yaml", (f"model.init_from={tmp_path}",))


def test_a_run_is_read_though_its_start_would_be_refused_today(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    loaded = recipe.load(QUICKSTART.parent / "sft.yaml", (f"model.init_from={tmp_path}",)).recipe
    run = tmp_path / "run"
    run.mkdir()
    (run / "recipe.yaml").write_text(recipe.dump(loaded), encoding="utf-8")
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {"attention_dropout": 0.1}))
    with pytest.raises(UserError):
        recipe.load(run / "recipe.yaml")
    (run / "plan.json").touch()
    assert recipe.load(run / "recipe.yaml").recipe == loaded


def test_a_model_of_the_hub_is_refused_before_anything_is_prepared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = "0123456789abcdef0123456789abcdef01234567"
    cached = tmp_path / "models--owner--name/snapshots" / commit
    cached.mkdir(parents=True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.file_download.constants.HF_HUB_OFFLINE", True)
    sets = (WRITTEN, "model.init_from=owner/name", f"model.revision={commit}", f"data.cache_dir={tmp_path / 'cache'}")
    wanted = recipe.load(QUICKSTART, sets).recipe  # no network, nothing cached: the loading of the weights will look
    weights.check_model(wanted)
    (cached / "config.json").write_text(json.dumps(LLAMA | {"attention_dropout": 0.1}))
    for look in (
        lambda: recipe.load(QUICKSTART, sets),
        lambda: weights.check_model(wanted),
        lambda: prepare.run(wanted),
    ):
        with pytest.raises(UserError, match="owner/name is not a model that finlm trains") as caught:
            look()
        assert "attention_dropout 0.1" in caught.value.evidence
    assert not (tmp_path / "cache").exists()


def test_recipes_and_models_of_the_hub_are_not_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for named in ("mistralai/Mistral-7B-v0.1", "gpt2", str(QUICKSTART)):
        check(named)
