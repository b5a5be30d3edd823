"""Find and read a model's config.json, and check that what is installed here knows the model; without torch."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from finlm.base import files
from finlm.base.errors import UserError
from finlm.recipe.models import traits

_OF_THE_WHOLE = ("quantization_config", "bos_token_id", "eos_token_id", "pad_token_id", "torch_dtype", "dtype")
# Text decoders that compute what another type does as long as no token is a picture's: their RoPE has three positions.
_READS_AS = {"qwen2_vl_text": "qwen2", "qwen2_5_vl_text": "qwen2", "qwen3_vl_text": "qwen3"}
# What tensors of a text decoder are called in a model of more than text, and alone.
TEXT_NAMES = {
    **{"^language_model.lm_head": "lm_head", "^language_model.model": "model"},
    **dict.fromkeys(("^model.language_model", "^model.text_model"), "model"),
}


def text_part(config: traits.Config) -> traits.Config:
    """Return the config.json of the text decoder of a model that reads more than text; any other config.json as it is.

    Sizes that it leaves to its class are filled in. Raises UserError for a damaged file of the user's records.
    """
    text, flat = config.get("text_config"), f"{config.get('model_type')}_text"
    if text is None and flat in _READS_AS:  # as published: the keys of both in one
        text = {key: value for key, value in config.items() if not key.startswith(("vision_", "image_", "video_"))}
        text["model_type"] = flat
    if not isinstance(text, dict) or not isinstance(text.get("model_type"), str):
        return config
    name: str = _READS_AS.get(text["model_type"]) or text["model_type"]
    row = traits.records().get(name)
    sizes = {key: row.defaults[key] for key in traits.NEEDED if key in row.defaults} if row else {}
    part = sizes | {key: config[key] for key in _OF_THE_WHOLE if key in config} | text | {"model_type": name}
    if "tie_word_embeddings" in config:  # by which the whole model ties them, whatever the part says
        part["tie_word_embeddings"] = config["tie_word_embeddings"]
    for key in ("rope_parameters", "rope_scaling") if name != text["model_type"] else ():
        if isinstance(part.get(key), dict):
            part[key] = {
                of: "default" if value == "mrope" else value for of, value in part[key].items() if "mrope" not in of
            }
    return part


_COMMIT = re.compile("[0-9a-f]{40}")


def cached_config_path(init_from: str, revision: str | None) -> Path | None:
    """Return the path of config.json in a model directory, or of a cached Hub model at `revision`, else None.

    Asks no network. A Hub id without a revision gives None. Raises UserError for an impossible Hub id with a revision.
    """
    path = Path(init_from) / "config.json"
    if path.is_file() or revision is None:
        return path if path.is_file() else None
    from huggingface_hub import try_to_load_from_cache  # a quarter of a second that only Hub ids need

    try:
        cached = try_to_load_from_cache(init_from, "config.json", revision=revision)
    except ValueError:
        raise _no_model(init_from, "neither a directory here nor an id of the Hub") from None
    return Path(cached) if isinstance(cached, str) else None


def _no_model(init_from: str, evidence: str) -> UserError:
    """Return the error, not raised, that model.init_from names no model."""
    fix = "give a directory with config.json, runs/RUN, a recipe (*.yaml), or a Hub model with model.revision"
    return UserError(f"model.init_from: there is no model in {init_from}", evidence=evidence, fix=fix)


def config_path(init_from: str, revision: str | None) -> Path:
    """Return the path of config.json of a model directory or Hub model, fetched if need be. UserError if that fails."""
    path = Path(init_from) / "config.json"
    if path.is_file():
        return path
    if revision is None:
        raise _no_model(init_from, f"no {path}")
    # A commit never changes: what was fetched of it needs no network, and no look at whether there is one.
    if _COMMIT.fullmatch(revision) and (cached := cached_config_path(init_from, revision)) is not None:
        return cached
    from huggingface_hub import hf_hub_download  # a quarter of a second that only Hub ids need

    problem = f"model.init_from: cannot fetch config.json of {init_from}"
    with hub_errors(problem, "check id and revision, or write the model's shape into the recipe"):
        return Path(hf_hub_download(init_from, "config.json", revision=revision))


@contextmanager
def hub_errors(problem: str, fix: str) -> Iterator[None]:
    """Turn errors of the block's access to the Hub into UserError(problem, fix=fix). Imports huggingface_hub (0.25 s).

    If the Hub's host name cannot be resolved, the block runs with constants.HF_HUB_OFFLINE set and reads only the
    cache: the client would retry for half a minute.
    """
    import socket
    from urllib.parse import urlsplit
    from urllib.request import getproxies

    from huggingface_hub import constants
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled

    # Errors of the connection, such as a proxy that refuses it, are those of its HTTP library: httpx, since 2.0 httpx2.
    of_connection: type[Exception] = HfHubHTTPError.__mro__[1]
    was_offline, reason = constants.HF_HUB_OFFLINE, ""
    if not was_offline and not getproxies():
        host = urlsplit(constants.ENDPOINT).hostname or ""
        try:
            socket.getaddrinfo(host, None)
        except OSError as error:
            reason = f"{host}: {error.strerror or error}; is there a network?"
    constants.HF_HUB_OFFLINE = was_offline or bool(reason)
    try:
        yield
    except (OSError, ValueError, of_connection) as error:  # ValueError: the id is none
        is_cache = isinstance(error, (LocalEntryNotFoundError, OfflineModeIsEnabled))
        said = reason if reason and is_cache else " ".join(str(error).split())[:300]
        raise UserError(problem, evidence=said, fix=fix) from None
    finally:
        constants.HF_HUB_OFFLINE = was_offline


def read_config(path: Path) -> traits.Config:
    """Return a config.json without auto_map and _name_or_path; of more than text, that of the text decoder.

    Raises UserError when it is no JSON object, its RoPE parameters are no object, or transformers has no class for it;
    OSError when it cannot be read.
    """
    config = files.read_json(path)
    fix = "put the config.json of a model that transformers saved in its place"
    if not isinstance(config, dict):
        raise UserError(f"{path} describes no model", evidence="it is no JSON object", fix=fix)
    config = text_part(config)
    for key in ("rope_parameters", "rope_scaling"):
        if not isinstance(config.get(key) or {}, dict):
            raise UserError(f"{path} describes no model", evidence=f"{key}: {config[key]!r} is no object", fix=fix)
    check_class(config, str(path))
    return {key: value for key, value in config.items() if key not in ("auto_map", "_name_or_path")}


def check_class(config: traits.Config, named: str) -> None:
    """Raise UserError when the installed transformers has no class for config.json's model_type.

    `config` still has its auto_map, if any; `named` is what the error calls the model. Does nothing if transformers is
    not installed.
    """
    name, package = str(config.get("model_type")), importlib.util.find_spec("transformers")
    folder = Path(package.origin or "").parent / "models" if package else Path()
    known = "model_type" not in config or name in traits.records() or (folder / name.removesuffix("_text")).is_dir()
    if known or not folder.is_dir():
        return
    code = "auto_map names code of the model's own directory, which is never run" if config.get("auto_map") else ""
    raise UserError(
        f"{named}: transformers has no model_type {name!r}",
        evidence=code,
        fix="start from a model whose class is transformers' own, such as a qwen2, qwen3 or llama",
    )


def check_kernels(config: traits.Config, device: str) -> None:
    """Raise UserError if linear attention is to run on "cuda" and the package flash-linear-attention is missing."""
    row = traits.records().get(str(config.get("model_type")))
    if row and row.linear and device == "cuda" and importlib.util.find_spec("fla") is None:
        raise UserError(
            f"a {config['model_type']} has layers of linear attention, which need flash-linear-attention on a GPU",
            evidence="no package fla beside this finlm",
            fix=".venv/bin/pip install --no-deps -r requirements-linear.lock, on every host",
        )
