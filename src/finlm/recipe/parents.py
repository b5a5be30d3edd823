"""Read shape and tokenizer from the model that a recipe starts from, so that no recipe repeats its parent's numbers.

model.init_from names a directory, a model of the Hugging Face Hub (then model.revision says which commit) or another
recipe, whose own values are taken and which stands for its newest finished run (runs/lineage.py finds it); recipes that
come with finlm are found from every directory. Only missing keys are filled in; a key that is written and differs is a
mistake. For stages after pretraining only: a pretraining recipe states its own shape, which must equal that of its
start, as must RoPE base and norm epsilon, which no tensor's shape would betray.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

import finlm
from finlm.base import checkpoints, files
from finlm.base.errors import UserError
from finlm.base.rundir import RunDir
from finlm.recipe.models import config_json, refusals, traits
from finlm.recipe.rules import SAME_MODEL
from finlm.recipe.schema import Recipe

SHAPE = (
    *("hidden_size", "layers", "heads", "kv_heads", "ffn_size", "vocab_size"),
    *("tie_embeddings", "rope_theta", "norm_eps"),
)
_NAMES = {  # of config.json
    "hidden_size": "hidden_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "vocab_size": "vocab_size",
    "tie_embeddings": "tie_word_embeddings",
}
PREFERENCE = ("dpo", "reward", "grpo")  # stages with a section of their own name
_HELD = ("hidden_size", "layers", "heads", "kv_heads", "ffn_size", "tie_embeddings")  # by a start that is trained on
_NEEDED = ("hidden_size", "layers", "heads", "ffn_size")

Keys = MutableMapping[str, Any]  # of a section of a recipe, as they are written
Load = Callable[[str], Any]  # recipe.recipe.load, which calls this module


@dataclass(frozen=True)
class Parent:
    """The model and tokenizer keys that a recipe may take from its start; is_judge says that this is a reward model."""

    model: Mapping[str, Any]
    tokenizer: Mapping[str, Any]
    is_judge: bool

    @property
    def config(self) -> traits.Config | None:
        """The start's config.json as a dict; None for a recipe without model.config, which is a Llama."""
        config: traits.Config | None = self.model.get("config")
        return config


@dataclass(frozen=True)
class Start:
    """The model that a run starts from: a run's export (run, recipe, step) or another model, by name and not by path.

    `settings` is what decided the weights of that run (settings_of), None if unknown.
    """

    run: str | None = None
    recipe: str | None = None
    step: int = 0
    model: str = ""
    revision: str | None = None
    settings: Mapping[str, Any] | None = None

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> Start:
        """Return the start that a manifest records in `value`; unknown keys are ignored."""
        return Start(**{key: value[key] for key in Start.__dataclass_fields__ if key in value})

    def to_json(self) -> Mapping[str, Any]:
        """Return the start for a run's manifest: run, recipe, step and known settings, or model and revision."""
        if self.run is None:
            return {"model": self.model, "revision": self.revision}
        origin = {"run": self.run, "recipe": self.recipe, "step": self.step}
        return origin if self.settings is None else origin | {"settings": self.settings}

    def __str__(self) -> str:
        """Return the start in words: step, run and recipe, or the model's name and revision."""
        if self.run is not None:
            return f"step {self.step:,} of {self.run} (recipe {self.recipe})"
        return f"{self.model} at {self.revision}" if self.revision else self.model


def is_recipe(init_from: str | None) -> TypeGuard[str]:
    """Return whether model.init_from names a recipe, a .yaml or .yml file."""
    return init_from is not None and init_from.endswith((".yaml", ".yml"))


def is_directory(init_from: str) -> bool:
    """Return whether model.init_from, not a recipe, is a local path: by its look, or if it or its parent exists."""
    path = Path(init_from)
    beside = path.parent != Path() and path.parent.is_dir()
    return path.is_dir() or beside or init_from.startswith(("/", ".", "~", "models/"))


def inherit(values: Keys, load: Load, *, of_run: bool) -> tuple[list[tuple[str, str]], dict[str, str]]:
    """Fill in a recipe's values from its start model, in place; return ([(key, mistake)], {key filled in: init_from}).

    In a pretraining recipe fills in only model.config; in others also empty sections of the stage and
    data.document_masks. `load` loads a recipe named in model.init_from. With `of_run`, for a run's recipe, does not
    read the start, which may be gone, unless a tuning recipe lacks keys. Raises UserError for a needed start that
    cannot be read, and for a start that finlm cannot train.
    """
    model = values.get("model")
    if not isinstance(model, dict):
        return [], {}
    if values.get("stage", "pretrain") == "pretrain":
        return ([], {}) if of_run else _check_pretraining(model, load)
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
    if of_run and is_complete:
        return [], {}
    parent = _parent(init_from, model.get("revision"), load, is_needed=not is_complete)
    if parent is None:
        return [], {}
    mistakes = list(_start_mistakes(values["stage"], model, init_from, parent))
    mistakes += [
        (f"model.{key}", f"{model[key]}, but {init_from} has {parent.model[key]}: leave it out")
        for key in SHAPE
        if model.get(key, "auto") not in ("auto", None) and key in parent.model
        if parent.model[key] not in ("auto", None, model[key])
    ]
    filled = {f"model.{key}": init_from for key in parent.model if key not in model}
    values["model"] = {**parent.model, **model, "config": parent.config}
    if "tokenizer" not in values:
        values["tokenizer"] = dict(parent.tokenizer)
        filled |= {f"tokenizer.{key}": init_from for key in parent.tokenizer}
    return mistakes, filled


def _check_pretraining(model: Keys, load: Load) -> tuple[list[tuple[str, str]], dict[str, str]]:
    """Check a pretraining `model` section against its start's config.json, if that is here, and set model["config"].

    Return ([(key, mistake)], {key filled in: init_from}), ([], {}) without a start or its config.json. Raises UserError
    for a start that finlm cannot train.
    """
    init_from, revision = model.get("init_from"), model.get("revision")
    parent = _parent(init_from, revision, load, is_needed=False) if isinstance(init_from, str) else None
    if parent is None:
        return [], {}
    named = str(init_from)
    mistakes = [*_start_mistakes("pretrain", model, named, parent), *_shape_mistakes(model, named, parent)]
    filled = {} if "config" in model else {"model.config": named}
    model["config"] = parent.config
    return mistakes, filled


def _shape_mistakes(model: Keys, init_from: str, parent: Parent) -> Iterator[tuple[str, str]]:
    """Yield (key, mistake) where a pretraining recipe's `model` differs from its start in shape, RoPE or epsilon."""
    if model.get("former_rope_theta") and len(traits.ropes(parent.config or {})) > 1:
        yield "model.former_rope_theta", f"{init_from} has a RoPE for each kind of layer, of which none can be changed"
    for key in _HELD:  # the vocabulary may grow
        theirs, ours = parent.model.get(key), model.get(key)
        if theirs is not None and ours is not None and theirs != ours:
            yield f"model.{key}", f"{ours}, but {init_from} has {theirs}: write {theirs}"
    theirs, wanted = parent.model.get("rope_theta"), model.get("rope_theta", 10000.0)
    if theirs is not None and theirs != (model.get("former_rope_theta") or wanted):
        longer = f"write {theirs}, or for longer rows also model.former_rope_theta: {theirs}"
        yield "model.rope_theta", f"{wanted}, but {init_from} has {theirs}: {longer}"
    theirs, wanted = parent.model.get("norm_eps"), model.get("norm_eps", 1e-5)
    if theirs is not None and theirs != wanted:
        yield "model.norm_eps", f"{wanted}, but {init_from} has {theirs}: write that"


def _start_mistakes(stage: str, model: Keys, init_from: str, parent: Parent) -> Iterator[tuple[str, str]]:
    """Yield (key, mistake) if a stage but reward starts from a reward model, and for other values in model.config."""
    if stage != "reward" and parent.is_judge:  # it has no head for text
        yield "model.init_from", f"{init_from} is a reward model; stage {stage} starts from one that writes"
    written, theirs = model.get("config"), parent.config or {"model_type": "llama"}
    for key, value in written.items() if isinstance(written, dict) else ():
        if value != theirs.get(key):
            yield f"model.config.{key}", f"{value}, but {init_from} has {theirs.get(key)}: leave it out"


def settings_of(recipe: Recipe, start: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """Return the values that decide the weights a recipe trains, as a JSON object: name and all keys but SAME_MODEL.

    `start` has these values of the run that it starts from, if known, and then replaces model.init_from. After
    pretraining, of the model only init_from and revision stay.
    """
    values = recipe.model_dump(mode="json")
    for key in SAME_MODEL:
        section, _, name = key.partition(".")
        (values[section] or {} if name else values).pop(name or section, None)
    if recipe.stage != "pretrain":  # shape and tokenizer are the start's, by whatever name it is given
        values["model"] = {key: values["model"][key] for key in ("init_from", "revision")}
        del values["tokenizer"]
    elif recipe.model.init_from is not None:  # it has its own, which may not have been in reach
        del values["model"]["config"]
    if start is not None:
        values["model"]["init_from"] = start
    return {"name": recipe.name} | values


def start_of(recipe: Recipe) -> Start | None:
    """Return the model that a recipe starts from; None for a start from scratch. Reads the run that made it, if any.

    A missing model is no error. Raises NotJson for a damaged plan.json, finlm.json or manifest.json.
    """
    from finlm.recipe.recipe import load

    init_from = recipe.model.init_from
    if init_from is None:
        return None
    directory = Path(init_from).resolve()
    run, made = RunDir(directory.parent), read_origin(directory)
    if run.export != directory or not (run.recipe.exists() and run.plan.exists()):
        name = directory.name if is_directory(init_from) else init_from
        return made or Start(model=name, revision=recipe.model.revision)
    plan = files.read_json(run.plan)
    start = made or Start(run.path.name, plan.get("recipe"), plan["steps"])
    try:
        former = load(run.recipe).recipe
    except UserError:  # written by a version with other keys
        return start
    earlier = start_recorded(run, former)
    return dataclasses.replace(start, settings=settings_of(former, earlier.settings if earlier else None))


def read_origin(directory: Path) -> Start | None:
    """Return run, recipe and step by finlm.json of an export, None without these. NotJson, a UserError, if damaged."""
    path = directory / checkpoints.MODEL_MANIFEST
    said = files.read_json(path) if path.is_file() else {}
    return Start(said["run"], said["recipe"], said["step"]) if "run" in said else None


def start_recorded(run: RunDir, recipe: Recipe) -> Start | None:
    """Return what a run of this recipe started from; None if from scratch.

    For a start whose own run is not here or cannot be read, returns the record in this run's manifest, if any. Raises
    NotJson for a damaged plan.json, finlm.json or manifest.json.
    """
    start = start_of(recipe)
    if start is None or start.settings is not None or not run.manifest.exists():
        return start
    manifest = files.read_json(run.manifest)
    recorded = manifest.get("start", start.to_json())
    return None if recorded is None else Start.from_json(recorded)


def export_of(key: str, named: str) -> str:
    """Return the model directory that the value `named` of a key means: export/ if it is a run, else `named` itself.

    Raises UserError for a run without an export, for a checkpoint and for adapters.
    """
    path, adapters = Path(named), Path(named) / "adapter_config.json"
    if adapters.is_file():
        raise UserError(
            f"{key}: {named} holds adapters, not a model",
            evidence=f"{adapters}: of {files.read_json(adapters).get('base_model_name_or_path')}",
            fix="merge them into that model (finlm export does without --adapter, peft's merge_and_unload otherwise)",
        )
    is_run, is_checkpoint = (path / "plan.json").is_file(), path.parent.name == "checkpoints" and path.is_dir()
    if is_run and (path / "export" / "config.json").is_file():
        return str(path / "export")
    if is_run or is_checkpoint:
        raise UserError(
            f"{key}: {named} is a {'run without an export' if is_run else 'checkpoint, not a model directory'}",
            fix=f"finlm export {named} DIRECTORY, then {key}: DIRECTORY",
        )
    return named


def _parent(init_from: str, revision: str | None, load: Load, is_needed: bool) -> Parent | None:
    """Return the Parent of the recipe or model that `init_from` names; None if it is not here.

    With `is_needed`, fetches a missing config.json and raises UserError if it cannot. Always raises UserError for a
    recipe with mistakes or a model that finlm cannot train.
    """
    if is_recipe(init_from):
        if not is_needed and not find_shipped(Path(init_from)).exists():
            return None
        recipe = load(init_from).recipe
        model = recipe.model.model_dump(include={*SHAPE, "init_std", "config"})
        return Parent(model, recipe.tokenizer.model_dump(mode="json"), recipe.stage == "reward")
    directory = Path(init_from)
    find = config_json.config_path if is_needed else config_json.cached_config_path
    config = find(init_from, revision)
    if config is None:
        return None
    files_here = (directory / name for name in ("tokenizer.json", "tokenizer.model") if (directory / name).is_file())
    return _of_config(config, init_from, str(next(files_here, directory)))


def shape_of(init_from: str, revision: str | None) -> Mapping[str, int | float | bool]:
    """Return {key of SHAPE: value} of a model directory or Hub model; keys that its config.json lacks are left out.

    Raises UserError if config.json cannot be had or finlm does not train the model.
    """
    model = _of_config(config_json.config_path(init_from, revision), init_from, "").model
    return {key: model[key] for key in SHAPE if key in model}


def _of_config(path: Path, init_from: str, tokenizer: str) -> Parent:
    """Return the Parent of the config.json at `path`, with `tokenizer`, which is not checked, as its tokenizer.path.

    `init_from` only names the model in errors. Raises UserError if finlm does not train the model.
    """
    config = config_json.read_config(path)
    refusals.refuse_model(config, init_from)
    model = {ours: config[theirs] for ours, theirs in _NAMES.items() if config.get(theirs) is not None}
    model["ffn_size"] = config[traits.record_of(config).ffn_key]
    known = {**traits.record_of(config).defaults, **config}
    model["norm_eps"] = next((float(known[key]) for key in traits.NORM_EPS if known.get(key) is not None), 1e-5)
    model["tie_embeddings"] = bool(known.get("tie_word_embeddings"))
    model |= {"rope_theta": traits.rope_theta(config), "config": config}
    return Parent(model, {"path": tokenizer}, is_reward_model(config))


def find_shipped(path: Path) -> Path:
    """Return the path if it exists, else the file of this name (recipes/...) that came with finlm, else the path."""
    if path.exists() or path.is_absolute() or path.parts[:1] != ("recipes",):
        return path
    return shipped_file(path) or path


def list_recipes() -> dict[str, Path]:
    """Return {recipes/<family>/<stage>.yaml: path} of finlm's recipes and of ./recipes, which has precedence."""
    shipped, here = shipped_file(Path("recipes/quickstart/pretrain.yaml")), Path("recipes")
    folders = [shipped.parents[1], here] if shipped else [here]
    paths = [path for folder in folders for path in folder.glob("*/*.yaml") if not path.name.startswith(".")]
    return dict(sorted((f"recipes/{path.parent.name}/{path.name}", path) for path in paths))


def shipped_file(path: Path) -> Path | None:
    """Return the file at this relative path in finlm's checkout or in what pip installed; None if there is none."""
    in_checkout = Path(finlm.__file__).resolve().parents[2] / path
    if in_checkout.exists():
        return in_checkout
    try:
        installed = importlib.metadata.files("finlm") or []
    except importlib.metadata.PackageNotFoundError:
        return None
    name = f"/share/finlm/{path.as_posix()}"  # where pyproject.toml's data-files put them
    return next((Path(str(file.locate())).resolve() for file in installed if file.as_posix().endswith(name)), None)


def context_tokens(directory: Path) -> int:
    """Return the context in tokens by config.json of a model directory, 2**31 without one. NotJson if damaged."""
    path = directory / "config.json"
    config = config_json.text_part(files.read_json(path)) if path.is_file() else {}
    return int(config.get("max_position_embeddings") or 2**31)


def is_reward_model(config: traits.Config) -> bool:
    """Return whether a config.json is a reward model's, a sequence classifier."""
    return any("SequenceClassification" in name for name in config.get("architectures") or ())
