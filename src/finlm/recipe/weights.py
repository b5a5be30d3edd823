"""Check that the model a recipe starts from is here, whole, and trainable by finlm; without torch.

Of weights only the headers of the safetensors files are read: eight bytes of length, a JSON with every tensor's shape
and place, then the tensors (https://huggingface.co/docs/safetensors). A download that was cut short is seen by its
size.
"""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import suppress
from pathlib import Path
from typing import Any

from finlm.base import files, runs, screen
from finlm.base.errors import UserError
from finlm.base.units import format_bytes
from finlm.recipe import parents
from finlm.recipe.models import config_json, refusals, traits
from finlm.recipe.schema import Model, Recipe

TOKENIZERS = ("tokenizer.json", "*.model", "vocab.*", "*.tiktoken")  # what transformers reads one from
INDEX = "model.safetensors.index.json"
_LONGEST_HEADER = 100_000_000  # bytes, safetensors' own limit
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")
FORMER = (  # parts of tensors' names in files, and what transformers' classes call them
    *((".block_sparse_moe.", ".mlp."), (".mlp.moe_statics.", ".mlp.gate.moe_statics.")),
    *((".mlp.router.gate.", ".mlp.gate."), (".mlp.shared_mlp.", ".mlp.shared_experts.")),
    *((".mlp.expert_bias", ".mlp.e_score_correction_bias"), (".mlp.e_score_", ".mlp.gate.e_score_")),
)
VLLM = ">=0.22,<=0.31"  # that trl 1.16 takes (trl/import_utils.py)
_MODELSCOPE = re.compile(r"modelscope:([\w.-]+)/([\w.-]+)")
_FETCHED = re.compile(r"models/([\w.-]+)/([\w.-]+)@([\w.-]+)")  # organization, name, revision
_SMALL = ("*.json", "*.jinja", "*.model", "*.txt")  # what a plan reads: shape, tokenizer, template


def fetch_description(init_from: str, revision: str | None) -> str:
    """Download modelscope:ORG/NAME without its weights and return the directory models/ORG/NAME@REVISION.

    Does nothing if its config.json is there; returns any other init_from unchanged. Raises UserError without a
    revision, without the package modelscope-hub, or when the download fails. Prints what it downloads.
    """
    if not init_from.startswith("modelscope:"):
        return init_from
    named = _MODELSCOPE.fullmatch(init_from)
    if named is None or revision is None:
        problem = "needs model.revision" if named else "is not modelscope:ORG/NAME"
        raise UserError(f"model.init_from: {init_from} {problem}", fix="add model.revision: a commit, a tag or master")
    directory = f"models/{named[1]}/{named[2]}@{revision}"
    if not (Path(directory) / "config.json").is_file():
        _fetch(directory, _SMALL)
    return directory


def fetch_weights(recipe: Recipe) -> None:
    """Download the weights of a ModelScope model in model.init_from if they are missing, cut short or unfit.

    Does nothing for other models. Prints what it downloads. Raises UserError without the package modelscope-hub, or
    when the download fails.
    """
    directory = Path(recipe.model.init_from or "-")
    if not _FETCHED.fullmatch(str(directory)):
        return
    with suppress(UserError):
        check_weights(recipe)
        if any(directory.glob("*.safetensors")):
            return
    _fetch(str(directory), (*_SMALL, "*.safetensors"))


def _fetch(directory: str, patterns: Sequence[str]) -> None:
    """Download the files that match these patterns into `directory`, models/ORG/NAME@REVISION; print that to stderr.

    Raises UserError for an impossible revision, without the package modelscope-hub, and when the download fails. A
    failed download removes the directory if it is empty.
    """
    match = _FETCHED.fullmatch(directory)
    if match is None:
        raise UserError(f"model.revision: {directory.partition('@')[2]} is none of ModelScope", fix="write a commit")
    model = f"{match[1]}/{match[2]}"
    by_hand = f"or put the model's files into {directory}"
    try:
        import modelscope_hub  # optional, and asked for by a recipe alone
    except ImportError:
        raise UserError(
            f"model.init_from: modelscope:{model} needs the package modelscope-hub",
            fix=f"{screen.relative(Path(sys.executable))} -m pip install modelscope-hub, {by_hand}",
        ) from None
    screen.say(f"fetching {model} from ModelScope into {directory}")
    try:
        modelscope_hub.HubApi().download_repo(
            model, "model", revision=match[3], local_dir=directory, allow_patterns=list(patterns)
        )
    except (modelscope_hub.HubError, OSError) as error:
        with suppress(OSError):
            Path(directory).rmdir()  # where nothing came, nothing is left
        problem = f"model.init_from: cannot fetch {model} from ModelScope"
        said, fix = str(error).partition("\n")[0], f"check id, model.revision and network, {by_hand}"
        raise UserError(problem, evidence=said, fix=fix) from None


def check_model(recipe: Recipe) -> None:
    """Raise UserError when finlm cannot train the model of model.init_from; called before data are prepared.

    Weights in a directory must be whole and fit config.json and finlm.json, unless they are still to be fetched. Also
    raises it for an unfit reward model of grpo and for a missing vLLM. May download config.json of a Hub model.
    """
    check_judge(recipe)
    engine = recipe.grpo.engine if recipe.grpo else "transformers"
    if engine != "transformers" and importlib.util.find_spec("vllm") is None:
        raise UserError(
            f"grpo.engine: {engine} needs vLLM, which is not installed here",
            evidence="no package vllm beside this finlm",
            fix=f"pip install 'vllm{VLLM}' into .venv on every host, or leave grpo.engine out",
        )
    if engine != "transformers" and (said := list(text_alone(recipe.model))):
        raise UserError(
            f"grpo.engine: {engine} would load the whole model of model.init_from",
            evidence=said[0],
            fix="leave grpo.engine out, or start from an export of the text decoder (any stage before this writes it)",
        )
    named = recipe.model.init_from
    is_here = named is not None and not parents.is_recipe(named) and parents.is_directory(named)
    if named is not None and is_here and not _is_unfetched(named):
        fix = "put config.json and *.safetensors there, or name another directory or a model of the Hub"
        _check_directory("model.init_from", named, fix)
    check_layers(recipe)


def _is_unfetched(directory: str) -> bool:
    """Return whether the directory is that of a ModelScope model whose weights are not here yet."""
    return _FETCHED.fullmatch(directory) is not None and not any(Path(directory).glob("*.safetensors"))


def check_weights(recipe: Recipe) -> None:
    """Raise UserError when weights of model.init_from are here, and cut short or unfit for config.json, or that is."""
    directory = Path(recipe.model.init_from or "-")
    if (directory / "config.json").is_file() and any(directory.glob("*.safetensors*")):
        check_weight_files(directory, config_json.read_config(directory / "config.json"))


def text_alone(model: Model) -> Iterator[str]:
    """Yield a sentence if the start of a recipe's model reads more than text, of which its text decoder is trained.

    Raises UserError for a damaged config.json.
    """
    named = model.init_from
    path = None if named is None or parents.is_recipe(named) else config_json.cached_config_path(named, model.revision)
    if path is None:
        return
    whole, text = files.read_json(path), config_json.read_config(path)
    if whole.get("model_type") != text.get("model_type"):
        yield (
            f"model.init_from: {named} is a {whole.get('model_type')}: its text decoder alone, a {text['model_type']}, "
            "is trained and exported, without the weights for pictures and sound"
        )


def missing_start(recipe: Recipe) -> Iterator[str]:
    """Yield a warning if model.init_from names no weights on this machine and no Hub model with a model.revision."""
    named, revision = recipe.model.init_from, recipe.model.revision
    if named is None or parents.is_recipe(named) or _is_unfetched(named):
        return
    if Path(named).is_dir():
        if not any(Path(named).glob("*.safetensors")):
            yield f"model.init_from: {named} has no *.safetensors, which training starts from"
        return
    if parents.is_directory(named) or revision is None:
        yield f"model.init_from: {named} is not here" + ("" if revision else ", nor does model.revision say a commit")


def check_layers(recipe: Recipe) -> None:
    """Raise UserError when config.json of model.init_from has something that finlm does not train.

    Downloads config.json of a Hub model if need be. Checks nothing if it cannot be had, or if init_from is a recipe;
    loading the weights (train.model) looks again.
    """
    model = recipe.model
    if model.init_from is None or parents.is_recipe(model.init_from):
        return
    try:
        path = config_json.config_path(model.init_from, model.revision)
    except UserError:  # not there, or no network here
        return
    refusals.refuse_model(
        config_json.read_config(path), model.init_from, recipe.batch.sequence_length // recipe.sequences_per_row
    )


def reward_recipes(recipe: Recipe) -> list[tuple[int, str]]:
    """Return [(index of a term of grpo.reward, path of the recipe that trains its reward model)]; may be empty."""
    terms = enumerate(recipe.grpo.reward if recipe.grpo else ())
    return [(place, str(term.path)) for place, term in terms if term.rule == "model" and parents.is_recipe(term.path)]


def with_reward_model(recipe: Recipe, place: int, directory: str) -> Recipe:
    """Return a copy of the recipe in which grpo.reward[place].path is `directory`."""
    assert recipe.grpo is not None
    terms = list(recipe.grpo.reward)
    terms[place] = terms[place].model_copy(update={"path": directory})
    return recipe.model_copy(update={"grpo": recipe.grpo.model_copy(update={"reward": tuple(terms)})})


def check_judge(recipe: Recipe) -> None:
    """Raise UserError when a `model` term of grpo.reward names no complete reward model; skip terms that name a recipe.

    A complete one has config.json and whole weights that fit it. If it has finlm.json, the sha256 of all its files is
    compared with those there, and this is printed when it takes over a second.
    """
    fix = "write choice, or name the export of a run of stage reward from the same start"
    for term in recipe.grpo.reward if recipe.grpo else ():
        if term.rule != "model" or parents.is_recipe(term.path):
            continue
        path = _check_directory("grpo.reward", str(term.path), fix)
        config = files.read_json(path / "config.json")
        if not parents.is_reward_model(config):
            raise UserError(
                f"grpo.reward: {term.path} is not a reward model",
                evidence=f"architectures in its config.json: {', '.join(config.get('architectures') or ['none'])}",
                fix=fix,
            )


def _check_directory(key: str, named: str, fix: str) -> Path:
    """Return the model directory `named`, after checking its weights against config.json and finlm.json.

    Raises UserError when it is not whole, and one about `key` with this `fix` when there is no model.
    """
    path = Path(named)
    if not (path / "config.json").is_file() or not any(path.glob("*.safetensors")):
        lacks = "lacks config.json or *.safetensors" if path.is_dir() else "does not exist"
        raise UserError(f"{key}: there is no model in {named}", evidence=f"{path.absolute()} {lacks}", fix=fix)
    check_weight_files(path, config_json.read_config(path / "config.json"))
    runs.prove_model(path)
    return path


def check_files(directory: Path) -> None:
    """Raise UserError when a model directory lacks whole *.safetensors or a tokenizer; OSError without config.json."""
    config = config_json.read_config(directory / "config.json")
    if not any(directory.glob("*.safetensors")):
        names = ", ".join(sorted(path.name for path in directory.iterdir() if path.name != "config.json")[:8])
        fix = "put its *.safetensors there; of a *.bin or *.gguf: save_pretrained of transformers, `finlm import-gguf`"
        raise UserError(f"{directory} has no *.safetensors", evidence=f"it has {names or 'config.json alone'}", fix=fix)
    _read_headers(directory, config)
    if not any(any(directory.glob(name)) for name in TOKENIZERS):
        fix = "copy the tokenizer's files of the model there, for example tokenizer.json and tokenizer_config.json"
        raise UserError(f"{directory} has no tokenizer", evidence=f"none of {', '.join(TOKENIZERS)}", fix=fix)


def check_weight_files(directory: Path, config: Mapping[str, Any]) -> None:
    """Raise UserError when a safetensors file in `directory` is cut short or missing, or does not fit `config`."""
    if wrong := list(_list_misfits(_read_headers(directory, config), config)):
        raise UserError(
            f"the weights in {directory} do not fit its config.json",
            evidence="\n".join([*wrong[:3], *([f"and {len(wrong) - 3} more"] if len(wrong) > 3 else [])]),
            fix="take config.json and *.safetensors from one model",
        )


def _read_headers(directory: Path, config: Mapping[str, Any]) -> dict[str, list[int]]:
    """Return {tensor: shape} of a directory's safetensors files; of more than text, of the text decoder's tensors.

    Raises UserError if one is cut short, damaged, missing by the index, or does not fit `config` (config.json).
    """
    shapes: dict[str, list[int]] = {}
    problems = []
    for path in sorted(directory.glob("*.safetensors")):
        tensors, problem = _read_header(path)
        shapes |= tensors
        problems += [problem] if problem else []
    if (directory / INDEX).is_file():
        named = files.read_json(directory / INDEX).get("weight_map") or {}
        missing = sorted({name for name in named.values() if not (directory / name).is_file()})
        problems += [f"{name}: is not there, and {INDEX} names it" for name in missing]
    shapes = _text_tensors(shapes)
    if not problems:
        problems = list(_compare(shapes, config))
    if problems:
        fix = "download or copy the model again, and compare the sizes of its files"
        raise UserError(f"{directory} holds no whole model", evidence="\n".join(problems[:8]), fix=fix)
    return shapes


def _text_tensors(shapes: Mapping[str, list[int]]) -> dict[str, list[int]]:
    """Return {name: shape} of the text decoder's tensors, as it alone names them; for a model of text a plain copy."""
    named = {name: name for name in shapes}
    for old, new in config_json.TEXT_NAMES.items():
        named = {name: re.sub(old, new, text) for name, text in named.items()}
    if all(name == text for name, text in named.items()):
        return dict(shapes)
    is_whole = re.compile(r"model\.(embed_tokens|layers|norm)\.|lm_head\.")
    return {text: shapes[name] for name, text in named.items() if is_whole.match(text)}


def _list_misfits(shapes: Mapping[str, list[int]], config: traits.Config) -> Iterator[str]:
    """Yield a sentence for each tensor that is missing, of another shape than config.json says, or unknown.

    Yields nothing for a type that is not admitted. Experts' tensors are not checked: older files have them one by one.
    Raises UserError if the user's file of model types is damaged.
    """
    row = traits.records().get(str(config.get("model_type")))
    if row is None:
        return
    known, read = {**row.defaults, **config}, traits.read(config)
    table, expected = [config["vocab_size"], config["hidden_size"]], dict[str, list[int]]()
    expected["model.embed_tokens.weight"] = table
    for number in range(config["num_hidden_layers"]):
        sizes = {name: list(size) for name, size in read.tensors(number).items() if ".experts." not in name}
        expected |= {f"model.layers.{number}.{name}": size for name, size in sizes.items()}
    if not parents.is_reward_model(config) and (not known.get("tie_word_embeddings") or "lm_head.weight" in shapes):
        expected["lm_head.weight"] = table
    if row.outer:
        expected["model.norm.weight"] = [config["hidden_size"]]
    named = {f"model.layers.{number}.{name}" for number in range(config["num_hidden_layers"]) for name in row.buffers}
    shapes = {_rename(name, named | expected.keys()): size for name, size in shapes.items()}
    for name, size in expected.items():
        if shapes.get(name) != size:
            has = f"has the shape {shapes[name]}" if name in shapes else "is missing"
            yield f"{name} {has}; by config.json it has {size}"
    for name in shapes:
        match = _LAYER.match(name)
        if not match or ".experts." in name or match[2] in row.buffers or int(match[1]) >= config["num_hidden_layers"]:
            continue
        if match[2] not in read.tensors(int(match[1])):
            yield f"{name} is none of a {config['model_type']} with this config.json"


def _rename(name: str, known: Set[str]) -> str:
    """Return the class's name of a file's tensor: the name itself, or what it becomes by FORMER if that is known."""
    return name if name in known else next((new for old, by in FORMER if (new := name.replace(old, by)) in known), name)


def _read_header(path: Path) -> tuple[dict[str, list[int]], str]:
    """Return (tensor shapes by name, problem) from a safetensors file's header; problem is "" if the file is whole.

    Shapes are empty if the header is damaged, and leave out *.inv_freq. Raises OSError if the file cannot be read.
    """
    size = path.stat().st_size
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 2 <= length <= min(size - 8, _LONGEST_HEADER):
                return {}, f"{path.name}: {format_bytes(size)}, its header is cut short or is none of safetensors"
            header = json.loads(file.read(length))
        tensors = {name: about for name, about in header.items() if name != "__metadata__"}
        whole = 8 + length + max((about["data_offsets"][1] for about in tensors.values()), default=0)
        shapes = {name: about["shape"] for name, about in tensors.items() if not name.endswith(".inv_freq")}  # RoPE's
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        return {}, f"{path.name}: its header is damaged: {error}"
    if size != whole:
        return shapes, f"{path.name}: {size:,} bytes, its header says {whole:,}"
    return shapes, ""


def _compare(shapes: Mapping[str, list[int]], config: Mapping[str, Any]) -> list[str]:
    """Return sentences about layers that lack tensors, surplus layers, and embeddings that config.json does not fit.

    Ignores num_nextn_predict_layers layers after the last, and the tensors in which a type's kinds of layers differ.
    Returns [] if the tensors' names have no layers. Raises UserError if the user's file of model types is damaged.
    """
    layers: dict[int, set[str]] = {}
    count, row = config.get("num_hidden_layers"), traits.records().get(str(config.get("model_type")))
    further = int(config.get("num_nextn_predict_layers") or 0)  # of multi-token prediction
    mixed = ("mlp.",) * bool(row and row.dense) + ("self_attn.", "linear_attn.") * bool(row and row.linear)
    for name in shapes:
        match = _LAYER.match(name)
        if match and not (further and isinstance(count, int) and count <= int(match[1]) < count + further):
            in_layer = layers.setdefault(int(match[1]), set())
            if not match[2].startswith(mixed):
                in_layer.add(match[2])
    if not layers or not isinstance(count, int):
        return []  # of another kind; loading it says what is wrong
    every = set[str]().union(*layers.values())
    problems = [
        f"layer {number} lacks {', '.join(sorted(lacking)[:3])}"
        for number in range(count)
        if (lacking := every - layers.get(number, set()))
    ]
    if max(layers) >= count:
        problems.append(f"tensors of {max(layers) + 1} layers, and num_hidden_layers is {count}")
    wanted = [config.get("vocab_size"), config.get("hidden_size")]
    for name, shape in shapes.items():
        if name.endswith("embed_tokens.weight") and None not in wanted and shape != wanted:
            problems.append(f"{name} is {shape[0]} x {shape[-1]}, config.json says {wanted[0]} x {wanted[1]}")
    return problems
