"""The model a recipe starts from, looked for before anything is prepared; files that are not whole."""

from __future__ import annotations

import fnmatch
import json
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import vocabularies
from finlm import prepare
from finlm.base.errors import UserError
from finlm.cli import main
from finlm.recipe import recipe, weights
from finlm.recipe.models import traits

from helpers import NO_WEIGHTS, QUICKSTART, sets

CONFIG = {"num_hidden_layers": 2, "vocab_size": 6, "hidden_size": 4}
SHAPES = {"model.embed_tokens.weight": [6, 4]} | {
    f"model.layers.{layer}.{name}.weight": [4] for layer in (0, 1) for name in ("input_layernorm", "norm")
}


LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 4096, "hidden_size": 64}
LLAMA |= {"num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 128, "rms_norm_eps": 1e-5}
OUTER = {"model.embed_tokens.weight": [4096, 64], "lm_head.weight": [4096, 64], "model.norm.weight": [64]}


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
        weights.check_weight_files(directory, CONFIG)
    return caught.value.evidence


def test_a_whole_model_is_whole_and_one_of_another_kind_is_left_to_its_loading(tmp_path: Path) -> None:
    write(tmp_path / "model.safetensors", SHAPES)
    weights.check_weight_files(tmp_path, CONFIG)
    write(tmp_path / "model.safetensors", {"transformer.h.0.attn": [4]})
    weights.check_weight_files(tmp_path, CONFIG)


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


def whole(directory: Path, changes: dict[str, list[int] | None] | None = None) -> Path:
    """A Llama's directory with tokenizer and chat template; `changes` are tensors of another shape, or without one."""
    vocabularies.byte_level(directory, 4000)
    (directory / "config.json").write_text(json.dumps(LLAMA))
    shapes = {name: [4096, 64] for name in ("model.embed_tokens.weight", "lm_head.weight")}
    shapes["model.norm.weight"] = [64]
    for layer in range(2):
        shapes |= {f"model.layers.{layer}.{name}": list(size) for name, size in traits.read(LLAMA).layer}
    changed = {name: size for name, size in (shapes | (changes or {})).items() if size}
    write(directory / "model.safetensors", changed)
    return directory


LAYER = "model.layers.1."
SWALLOWS = {"chat_template": "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}"}
UNFIT: dict[str, tuple[dict[str, list[int] | None], str]] = {
    "a matrix": (
        {f"{LAYER}self_attn.q_proj.weight": [64, 32]},
        "q_proj.weight has the shape [64, 32]; by config.json it",
    ),
    "a norm": ({"model.norm.weight": None}, "model.norm.weight is missing; by config.json it has [64]"),
    "the head": (
        {"lm_head.weight": [300, 64]},
        "lm_head.weight has the shape [300, 64]; by config.json it has [4096, 64]",
    ),
    "no head": ({"lm_head.weight": None}, "lm_head.weight is missing"),
    "a kind": ({f"model.layers.{n}.mlp.up_proj.weight": None for n in (0, 1)}, "and 1 more"),
    "biases": ({f"model.layers.{n}.mlp.up_proj.bias": [128] for n in (0, 1)}, "up_proj.bias is none of a llama"),
}
UNFIT["a kind"][0]["lm_head.weight"] = UNFIT["a kind"][0]["model.norm.weight"] = None


def asked(command: list[str], start: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """What the command refuses of this start of the quickstart's fine-tuning; "" when it takes it."""
    name, *options = command
    settings = (f"model.init_from={start}", "chat.template=model", "data.mixture=[]", "eval.suites=[]")
    code = main.main([name, str(QUICKSTART.parent / "sft.yaml"), *options, *sets(settings)])
    said = capsys.readouterr().err
    assert code == (2 if said.startswith("error") else 0)
    return said if code else ""


@pytest.mark.parametrize("command", [["plan"], ["train", "--dry-run"]], ids=str)
def test_a_start_that_cannot_be_trained_ends_plan_and_dry_run(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    start = whole(tmp_path / "start")
    assert asked(command, start, capsys) == ""
    for changes, words in UNFIT.values():
        whole(start, changes)
        assert words in asked(command, start, capsys)
    start = whole(tmp_path / "silent")  # a tokenizer is opened once
    (start / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|endoftext|>"} | SWALLOWS))
    assert "leaves out some of what the assistant says" in asked(command, start, capsys)
    (start / "tokenizer.json").unlink()
    assert "silent holds no tokenizer" in asked(command, start, capsys)
    (start / "config.json").write_text(json.dumps(LLAMA | {"model_type": "nosuch"}))
    assert "transformers has no model_type 'nosuch'" in asked(command, start, capsys)


def test_layers_without_experts_a_routers_buffer_and_predictors_of_further_tokens_are_no_misfits(
    tmp_path: Path,
) -> None:
    config = LLAMA | {"model_type": "deepseek_v3", "first_k_dense_replace": 1, "n_routed_experts": 2}
    config |= {"num_nextn_predict_layers": 1}
    read = traits.read(config)
    shapes = dict(OUTER)
    for number, tensors in enumerate((read.dense_layer, read.layer, read.layer)):
        shapes |= {f"model.layers.{number}.{name}": list(size) for name, size in tensors if len(size) < 3}
    shapes |= {"model.layers.1.mlp.gate.e_score_correction_bias": [2], "model.layers.2.eh_proj.weight": [64, 128]}
    write(tmp_path / "model.safetensors", shapes)
    weights.check_weight_files(tmp_path, config)
    write(tmp_path / "model.safetensors", shapes | {"model.layers.0.mlp.gate.weight": [2, 64]})
    with pytest.raises(UserError, match="do not fit") as caught:
        weights.check_weight_files(tmp_path, config)
    assert "model.layers.0.mlp.gate.weight is none of a deepseek_v3" in caught.value.evidence


def test_experts_may_lie_one_by_one_and_older_files_hold_buffers(tmp_path: Path) -> None:
    whole(tmp_path, {"model.layers.0.self_attn.rotary_emb.inv_freq": [16]})
    weights.check_weight_files(tmp_path, LLAMA)
    config = LLAMA | {"model_type": "mixtral", "num_local_experts": 2, "num_experts_per_tok": 1}
    layer = [(name, size) for name, size in traits.read(config).layer if len(size) < 3]
    shapes = dict(OUTER)
    for number in range(2):
        shapes |= {f"model.layers.{number}.{n.replace('mlp.', 'block_sparse_moe.')}": list(s) for n, s in layer}
        shapes |= {f"model.layers.{number}.block_sparse_moe.experts.{n}.w1.weight": [128, 64] for n in (0, 1)}
    write(tmp_path / "model.safetensors", shapes)
    weights.check_weight_files(tmp_path, config)


@pytest.mark.parametrize(
    ("model_type", "new", "old"),
    [
        ("ernie4_5_moe", "mlp.gate.moe_statics.", "mlp.moe_statics."),
        ("exaone_moe", "mlp.gate.e_score_", "mlp.e_score_"),
        ("hy_v3", "mlp.gate.weight", "mlp.router.gate.weight"),
        ("hy_v3", "mlp.shared_experts.", "mlp.shared_mlp."),
    ],
)
def test_tensors_have_the_names_that_models_are_released_with(
    model_type: str, new: str, old: str, tmp_path: Path
) -> None:
    config = LLAMA | {"model_type": model_type, "tie_word_embeddings": False} | dict.fromkeys(traits.EXPERTS, 2)
    read, row = traits.read(config), traits.shipped()[model_type]
    shapes = dict(OUTER)
    for number in range(2):
        layer = {name: size for name, size in read.layer if len(size) < 3} | dict.fromkeys(row.buffers, (2,))
        layer = dict(read.dense_layer) if number in read.dense else layer
        shapes |= {f"model.layers.{number}.{name.replace(new, old)}": list(size) for name, size in layer.items()}
    assert any(old in name for name in shapes)
    write(tmp_path / "model.safetensors", shapes)
    weights.check_weight_files(tmp_path, config)
    write(tmp_path / "model.safetensors", {name.replace(old, "mlp.no."): size for name, size in shapes.items()})
    with pytest.raises(UserError, match="do not fit"):
        weights.check_weight_files(tmp_path, config)


def test_a_plan_by_config_json_alone_says_that_weights_are_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    assert asked(["plan"], tmp_path, capsys) == ""
    wanted = recipe.load(QUICKSTART.parent / "sft.yaml", (f"model.init_from={tmp_path}",)).recipe
    assert list(weights.missing_start(wanted)) == [
        f"model.init_from: {tmp_path} has no *.safetensors, which training starts from"
    ]
    assert "lacks config.json or *.safetensors" in asked(["train", "--dry-run"], tmp_path, capsys)


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


WRITTEN = "model={hidden_size: 64, layers: 2, heads: 2, ffn_size: 128, vocab_size: 4096}"
OTHERS = (
    ({"output_router_logits": True}, "output_router_logits true"),
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
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {"is_causal": False}))
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
    (cached / "config.json").write_text(json.dumps(LLAMA | {"is_causal": False}))
    for look in (
        lambda: recipe.load(QUICKSTART, sets),
        lambda: weights.check_model(wanted),
        lambda: prepare.run(wanted),
    ):
        with pytest.raises(UserError, match="owner/name is not a model that finlm trains") as caught:
            look()
        assert "attention to later tokens" in caught.value.evidence
    assert not (tmp_path / "cache").exists()


def test_recipes_and_models_of_the_hub_are_not_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for named in ("mistralai/Mistral-7B-v0.1", "gpt2", str(QUICKSTART)):
        check(named)


SFT = QUICKSTART.parent / "sft.yaml"
OF_MODELSCOPE = ("model.init_from=modelscope:org/tiny", "model.revision=master")


@pytest.fixture
def modelscope(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str, str]]:
    """A stand-in for the package modelscope-hub that serves one model; what was asked of it. Works in tmp_path."""
    served, asked = whole(tmp_path / "served"), list[tuple[str, str, str]]()

    class HubError(Exception):
        pass

    class HubApi:
        def download_repo(
            self, repo_id: str, repo_type: str, *, revision: str, local_dir: str, allow_patterns: list[str]
        ) -> Path:
            Path(local_dir).mkdir(parents=True, exist_ok=True)
            if repo_id != "org/tiny":
                raise HubError("404: no such model\nRequest: GET ...")
            asked.append((repo_type, revision, local_dir))
            for path in served.iterdir():
                if any(fnmatch.fnmatch(path.name, pattern) for pattern in allow_patterns):
                    shutil.copy(path, local_dir)
            return Path(local_dir)

    monkeypatch.setitem(sys.modules, "modelscope_hub", SimpleNamespace(HubApi=HubApi, HubError=HubError))
    monkeypatch.chdir(tmp_path)
    return asked


def test_a_model_of_modelscope_is_planned_by_its_config_and_its_weights_are_fetched_once(
    modelscope: list[tuple[str, str, str]],
) -> None:
    directory = Path("models/org/tiny@master")
    wanted = recipe.load(SFT, OF_MODELSCOPE).recipe
    assert recipe.load(SFT, OF_MODELSCOPE).recipe == wanted, "nothing is asked again"
    assert modelscope == [("model", "master", str(directory))]
    assert wanted.model.init_from == str(directory) and wanted.model.hidden_size == 64
    assert wanted.tokenizer.path == str(directory / "tokenizer.json")
    assert not list(directory.glob("*.safetensors")) and not list(weights.missing_start(wanted))
    weights.check_model(wanted)  # of what is to be fetched, nothing is missing
    weights.fetch_weights(wanted)
    weights.fetch_weights(wanted)
    assert len(modelscope) == 2
    weights.check_model(wanted)
    file = directory / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-9])
    weights.fetch_weights(wanted)
    assert len(modelscope) == 3 and weights.check_weight_files(directory, LLAMA) is None


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (("model.init_from=modelscope:org/none", "model.revision=master"), "404: no such model"),
        (OF_MODELSCOPE[:1], "needs model.revision"),
        (("model.init_from=modelscope:tiny", "model.revision=master"), "is not modelscope:ORG/NAME"),
        ((OF_MODELSCOPE[0], "model.revision=a/b"), "a/b is none of ModelScope"),
    ],
)
def test_what_modelscope_does_not_give_is_told(
    modelscope: list[tuple[str, str, str]], overrides: tuple[str, ...], says: str
) -> None:
    with pytest.raises(UserError) as caught:
        recipe.load(SFT, overrides)
    assert says in caught.value.problem + caught.value.evidence and caught.value.fix
    assert not modelscope and not list(Path("models").rglob("*@*"))


def test_without_its_package_a_model_of_modelscope_can_be_put_there_by_hand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "modelscope_hub", None)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="needs the package modelscope-hub") as caught:
        recipe.load(SFT, OF_MODELSCOPE)
    assert "put the model's files into models/org/tiny@master" in caught.value.fix
    whole(Path("models/org/tiny@master"))
    wanted = recipe.load(SFT, OF_MODELSCOPE).recipe
    weights.fetch_weights(wanted)
    weights.check_model(wanted)


def test_a_recipe_is_written_for_a_model_of_modelscope(
    modelscope: list[tuple[str, str, str]], capsys: pytest.CaptureFixture[str]
) -> None:
    line = ["new", "mine", "--model", "modelscope:org/tiny", "--revision", "master", "--stage", "sft"]
    assert main.main(line) == 0, capsys.readouterr().err
    path = Path(capsys.readouterr().out.split()[0])
    assert "init_from: modelscope:org/tiny" in path.read_text(encoding="utf-8")
    assert recipe.load(path).recipe.model.init_from == "models/org/tiny@master" and len(modelscope) == 1


def test_adapters_are_no_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "org/base"}))
    for line in (["new", "mine", "--model", str(tmp_path)], ["plan", str(SFT), "--set", f"model.init_from={tmp_path}"]):
        assert main.main(line) == 2
        said = capsys.readouterr().err
        assert "holds adapters, not a model" in said and "of org/base" in said and "merge them" in said
