"""What a recipe takes from the model it starts from: shape and tokenizer, so that none repeats its parent's numbers.

model.init_from names a directory, a model of the Hugging Face Hub (then model.revision says which commit) or another
recipe, which stands for that recipe's newest finished run. Only missing keys are filled in; a key that is written and
differs is a mistake. Stages after pretraining only: a pretraining recipe says what it trains, and is held to the
start's RoPE base and epsilon, which no tensor's shape would betray.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from finlm.base import files
from finlm.base.errors import UserError
from finlm.base.rundir import RunDir
from finlm.recipe import hub_errors, shipped

SHAPE = (
    "hidden_size",
    "layers",
    "heads",
    "kv_heads",
    "ffn_size",
    "vocab_size",
    "tie_embeddings",
    "rope_theta",
    "norm_eps",
)
_NAMES = {  # of config.json
    "hidden_size": "hidden_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "ffn_size": "intermediate_size",
    "vocab_size": "vocab_size",
    "tie_embeddings": "tie_word_embeddings",
    "norm_eps": "rms_norm_eps",
}
# Mistral's layers are Llama's, but for attention to the last sliding_window tokens only: the same for shorter rows.
LLAMA_SHAPED = ("llama", "mistral")
PREFERENCE = ("dpo", "reward", "grpo")  # stages with a section of their own name
_NEEDED = ("hidden_size", "layers", "heads", "ffn_size")

Parent = dict[str, dict[str, Any]]  # sections of a recipe, model and tokenizer; limits: what recipes have no key for
Load = Callable[[str], Any]  # recipe.recipe.load, which calls this module


def is_recipe(init_from: str | None) -> bool:
    """Whether model.init_from names a recipe."""
    return init_from is not None and init_from.endswith((".yaml", ".yml"))


def is_directory(init_from: str) -> bool:
    """Whether model.init_from names a directory, which need not exist, and no model of the Hub (owner/name)."""
    path = Path(init_from)
    beside = path.parent != Path() and path.parent.is_dir()
    return path.is_dir() or beside or init_from.startswith(("/", ".", "~", "models/"))


def inherit(values: dict[str, Any], load: Load) -> tuple[list[tuple[str, str]], dict[str, str]]:
    """Fill in what a recipe's values leave to its parent: ([(key, mistake)], {key filled in: where it came from}).

    Raises UserError for a parent that is needed and cannot be read.
    """
    model = values.get("model")
    if not isinstance(model, dict):
        return [], {}
    if values.get("stage", "pretrain") == "pretrain":
        return list(_silent(model, load)), {}
    values.setdefault("chat", {})
    if values["stage"] == "sft":
        sft, data = values.setdefault("sft", {}), values.get("data")
        if isinstance(data, dict) and isinstance(sft, dict):  # packed dialogues never see each other
            data.setdefault("document_masks", sft.get("packing", True) is not False)
    elif values["stage"] in PREFERENCE:
        values.setdefault(values["stage"], {})
    init_from = model.get("init_from")
    if not isinstance(init_from, str):
        return [("model.init_from", f"stage {values['stage']} starts from a trained model: name it")], {}
    is_complete = "tokenizer" in values and all(key in model for key in _NEEDED)
    parent = _parent(init_from, model.get("revision"), load, is_needed=not is_complete)
    if parent is None:
        return [], {}
    mistakes = list(_writes_nothing(values["stage"], init_from, parent))
    mistakes += [
        (f"model.{key}", f"{model[key]}, but {init_from} has {parent['model'][key]}: leave it out")
        for key in SHAPE
        if model.get(key, "auto") not in ("auto", None) and key in parent["model"]
        if parent["model"][key] not in ("auto", None, model[key])
    ]
    mistakes += _too_long(values, init_from, parent["limits"].get("sliding_window"))
    filled = {f"model.{key}": init_from for key in parent["model"] if key not in model}
    values["model"] = parent["model"] | model
    if "tokenizer" not in values:
        values["tokenizer"] = parent["tokenizer"]
        filled |= {f"tokenizer.{key}": init_from for key in parent["tokenizer"]}
    return mistakes, filled


def _silent(model: dict[str, Any], load: Load) -> Iterator[tuple[str, str]]:
    """Mistakes of a pretraining recipe that would load without a word and be another model."""
    init_from = model.get("init_from")
    parent = _parent(init_from, None, load, is_needed=False) if isinstance(init_from, str) else None
    if parent is None:
        return
    yield from _writes_nothing("pretrain", str(init_from), parent)
    theirs, wanted = parent["model"].get("rope_theta"), model.get("rope_theta", 10000.0)
    if theirs is not None and theirs != (model.get("former_rope_theta") or wanted):
        longer = f"write {theirs}, or for longer rows also model.former_rope_theta: {theirs}"
        yield "model.rope_theta", f"{wanted}, but {init_from} has {theirs}: {longer}"
    theirs, wanted = parent["model"].get("norm_eps"), model.get("norm_eps", 1e-5)
    if theirs is not None and theirs != wanted:
        yield "model.norm_eps", f"{wanted}, but {init_from} has {theirs}: write that"


def _writes_nothing(stage: str, init_from: str, parent: Parent) -> Iterator[tuple[str, str]]:
    """The mistake of a language model whose head, which a reward model lacks, would be drawn at random."""
    if stage != "reward" and parent["limits"]["is_judge"]:
        yield "model.init_from", f"{init_from} is a reward model; stage {stage} starts from one that writes"


def _too_long(values: dict[str, Any], init_from: str, window: int | None) -> list[tuple[str, str]]:
    """The mistake of rows in which a Mistral would not attend to every token before."""
    rows = values["batch"].get("sequence_length") if isinstance(values.get("batch"), dict) else None
    if window is None or not isinstance(rows, int):
        return []
    longest = rows // 2 if values["stage"] in ("dpo", "reward") else rows  # a pair shares a row
    if longest <= window:
        return []
    return [("batch.sequence_length", f"{rows}, but {init_from} attends to the last {window} tokens only")]


def find(recipe: Any, runs: Path) -> Path | None:
    """export/ of the newest finished run of a recipe below runs: same name and stage, model and tokenizer."""
    from finlm.recipe.recipe import load  # which imports this module

    for directory in sorted(runs.glob(f"{recipe.name}-*"), reverse=True):
        run = RunDir(directory)
        if not (run.recipe.exists() and (run.export / "config.json").exists()):
            continue
        try:
            former = load(run.recipe).recipe
        except UserError:  # written by a version with other keys
            continue
        same = all(
            getattr(former, part) == getattr(recipe, part) for part in ("name", "stage", "tokenizer")
        ) and _shape(former) == _shape(recipe)
        if same and any(event["status"] == "finished" for event in run.read_events("end")):
            return Path(run.export)
    return None


def _shape(recipe: Any) -> dict[str, Any]:
    return {key: value for key, value in recipe.model.model_dump().items() if key not in ("init_from", "revision")}


def _parent(init_from: str, revision: str | None, load: Load, is_needed: bool) -> Parent | None:
    if is_recipe(init_from):
        if not is_needed and not shipped.find(Path(init_from)).exists():
            return None
        recipe = load(init_from).recipe
        model = recipe.model.model_dump(include={*SHAPE, "init_std"})
        limits = {"is_judge": recipe.stage == "reward"}
        return {"model": model, "tokenizer": recipe.tokenizer.model_dump(mode="json"), "limits": limits}
    directory = Path(init_from)
    if not is_needed and not (directory / "config.json").is_file():
        return None
    tokenizer = _tokenizer_of(directory) if directory.is_dir() else init_from
    return _of_config(config_path(init_from, revision), init_from, tokenizer)


def config_path(init_from: str, revision: str | None) -> Path:
    """config.json of a model directory, or of a model of the Hub, from its cache if it is there. Raises UserError."""
    path = Path(init_from) / "config.json"
    if path.is_file():
        return path
    if revision is None:
        raise UserError(
            f"model.init_from: there is no model in {init_from}",
            evidence=f"no {path}",
            fix="give a directory with config.json, a recipe (*.yaml), or for a model of the Hub also model.revision",
        )
    from huggingface_hub import hf_hub_download  # a quarter of a second that only Hub ids need

    problem = f"model.init_from: cannot fetch config.json of {init_from}"
    with hub_errors.told(problem, "check id and revision, or write the model's shape into the recipe"):
        return Path(hf_hub_download(init_from, "config.json", revision=revision))


def is_judge(config: dict[str, Any]) -> bool:
    """Whether a config.json is a reward model's."""
    return any("SequenceClassification" in name for name in config.get("architectures") or ())


def _of_config(path: Path, init_from: str, tokenizer: str) -> Parent:
    config = files.read_json(path)
    problems = list(_unsupported(config))
    if problems:
        raise UserError(
            f"model.init_from: {init_from} is not a model that finlm trains",
            evidence="\n".join(problems),
            fix="start from a Llama-shaped model",
        )
    model = {ours: config[theirs] for ours, theirs in _NAMES.items() if config.get(theirs) is not None}
    rope = config.get("rope_parameters") or config
    model["rope_theta"] = float(rope.get("rope_theta") or 10000.0)
    return {
        "model": model,
        "tokenizer": {"path": tokenizer},
        "limits": {"sliding_window": config.get("sliding_window"), "is_judge": is_judge(config)},
    }


def _unsupported(config: dict[str, Any]) -> Iterator[str]:
    if config.get("model_type") not in LLAMA_SHAPED:
        yield f"model_type {config.get('model_type')!r}, not {' or '.join(map(repr, LLAMA_SHAPED))}"
        return
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if rope.get("rope_type", rope.get("type", "default")) != "default":
        yield f"RoPE scaling {rope.get('rope_type', rope.get('type'))!r}"
    if config.get("attention_bias") or config.get("mlp_bias"):
        yield "linear layers with a bias"
    width = config["hidden_size"] // config["num_attention_heads"]
    if config.get("head_dim") not in (None, width):
        yield f"head size {config['head_dim']}, not hidden_size / heads = {width}"


def _tokenizer_of(directory: Path) -> str:
    names = [name for name in ("tokenizer.json", "tokenizer.model") if (directory / name).is_file()]
    return str(directory / names[0]) if names else str(directory)
