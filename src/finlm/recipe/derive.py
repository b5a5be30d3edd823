"""Make a recipe from another one: `finlm new`, the toy of `train --toy`, and what is published of a recipe.

A fork inherits (`base:`) and holds only what differs. A recipe that inherits already cannot be inherited from, so it
is copied, as --copy does with any: lines and comments stay, `name` changes. Either has `forked_from: path@sha256`,
which `finlm diff RECIPE` compares with and which goes with every run of it.

The toy trains on a laptop in a minute. Kept: optimizer, schedule, clipping, ZeRO stage, recompute, packing, masks,
seeds. Shrunk: model, batch, steps, corpus (the synthetic one) and tokenizer. A stage after pretraining starts from the
toy of the recipe it names, else from the quickstart's. Losses mean nothing by themselves; `expect.toy` holds them.

`for_publication` gives a recipe for model cards and trackers, without credentials, addresses and names of machines.
"""

from __future__ import annotations

import dataclasses
import io
import json
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any

from ruamel.yaml import YAML

from finlm.base import files
from finlm.base.errors import UserError
from finlm.base.secrets import redact_key
from finlm.recipe import parents, recipe
from finlm.recipe.models import traits
from finlm.recipe.recipe import Loaded
from finlm.recipe.schema import Recipe
from finlm.recipe.schema_train import Expect

_DESCRIPTION = "A fork of {}; say here what it is for."
_NAME = re.compile(r"[a-z0-9][a-z0-9._-]*")


def new_path(name: str, file: str, recipes: Path) -> Path:
    """Return the path recipes/NAME/FILE for a new recipe, without making it; `recipes` is the folder of all recipes.

    Raises UserError for an invalid name, or when the file exists.
    """
    if not _NAME.fullmatch(name) or name.endswith((".yaml", ".yml")):  # recipes/NAME is a directory
        raise UserError(
            f"{name!r} is no name of a recipe", fix="small letters, digits, '.', '-' and '_', for example wider-2"
        )
    path = recipes / name / file
    if path.exists():
        raise UserError(f"{path} exists already", fix="edit it, or choose another name")
    return path


@contextmanager
def draft_of(path: Path, text: str) -> Iterator[Path]:
    """Write `text` to a draft beside `path` and yield the draft's path; rename it to `path` when the block ends.

    Makes the folder if necessary, and replaces a file at `path`. When the block raises, removes the draft, and the
    folder if it is then empty.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}")
    try:
        files.write_text(draft, text)
        yield draft
        draft.rename(path)
    finally:
        draft.unlink(missing_ok=True)
        if not any(path.parent.iterdir()):
            path.parent.rmdir()


def fork(
    name: str, parent: Path, recipes: Path = Path("recipes"), copy: bool = False, overrides: Sequence[str] = ()
) -> Path:
    """Write recipes/NAME/<parent's file name> from a parent recipe and return its path.

    The new recipe inherits from the parent (`base:`); with `copy`, or if the parent inherits itself or lies outside the
    current directory, it copies the parent's text. `overrides` ("key=value" as for `--set`) are written into it. Raises
    UserError, and writes nothing, for an invalid or taken name, and for a parent or override that cannot be used.
    """
    given, parent = parent, parents.find_shipped(parent)
    path = new_path(name, parent.name, recipes)
    loaded = recipe.load(parent, overrides)
    text = parent.read_text(encoding="utf-8")
    shown = recipe.relative(parent) if given == parent else str(given)  # not where pip put it here
    lineage = f"{shown}@{files.sha256_file(parent)[:12]}"
    new_name = name if path.stem == "pretrain" else f"{name}-{path.stem}"
    inherits = _entry("base").search(text) is not None
    # What lies outside the working directory may be gone or another version tomorrow.
    copy = copy or inherits or not parent.resolve().is_relative_to(Path.cwd())
    if copy:
        made = _copy_recipe(text, new_name, lineage, parent, path)
    else:
        made = _inherit_recipe(new_name, lineage, parent, path)
    with draft_of(path, _say_overrides(made, overrides, parent)) as draft:
        try:
            is_same = _content(recipe.load(draft)) == _content(loaded)
        except UserError:
            is_same = False
        if not is_same:
            raise UserError(
                f"{given} cannot be copied as it is written",
                evidence="with another name it would be another recipe, or none",
                fix="begin a line with each key of its top level: name, expect, base, ...",
            )
    return path


def _say_overrides(text: str, overrides: Sequence[str], parent: Path) -> str:
    """Return the recipe text with the overrides of `--set` written into it; comments and formats stay.

    `parent` supplies inherited lists that an override changes in part. Raises UserError for an invalid override, a key
    that leads past what the recipe has, and an unreadable parent.
    """
    if not overrides:
        return text
    yaml, out = YAML(), io.StringIO()
    yaml.width = 120
    document, inherited = yaml.load(text), recipe.read_with_base(parent).values
    for override in overrides:
        parts, value = recipe.parse_override(override)
        recipe.set_value(document, parts, value, override, inherited)
    yaml.dump(document, out)
    return out.getvalue()


def _content(loaded: recipe.Loaded) -> Recipe:
    """Return the recipe with name, description, forked_from and expect emptied, to compare two recipes by the rest."""
    return loaded.recipe.model_copy(update={"name": "", "description": "", "forked_from": None, "expect": None})


def parent_of(path: Path) -> Path:
    """Return the path of the recipe that the recipe at `path` was made from, by its forked_from.

    Raises UserError when forked_from is absent, when that recipe is missing, or when this recipe has mistakes.
    """
    lineage = recipe.load(path).recipe.forked_from
    if lineage is None:
        raise UserError(
            f"{path} does not say what it was made from",
            evidence="no forked_from: in it",
            fix="name the other recipe too: finlm diff OTHER " + str(path),
        )
    parent = parents.find_shipped(Path(lineage.rpartition("@")[0]))
    if not parent.exists():
        raise UserError(f"{parent} is not there any more", evidence=f"forked_from: {lineage} in {path}")
    return parent


def _inherit_recipe(name: str, lineage: str, parent: Path, path: Path) -> str:
    """Return the text of a recipe at `path` that inherits everything from `parent`; `lineage` is its forked_from."""
    base = Path(os.path.relpath(parent.resolve(), path.parent.resolve())).as_posix()
    after = path.stem != "pretrain"
    example = f"model: {{init_from: {path.parent.as_posix()}/pretrain.yaml}}" if after else "optim: {lr: 1.0e-3}"
    return f"""# Everything that is not said here is {base}'s. What differs was chosen by us.
base: {base}
name: {name}
description: {_DESCRIPTION.format(lineage.partition("@")[0])}
forked_from: {lineage}

# Write what differs, for example:
# {example}
"""


def _copy_recipe(text: str, name: str, lineage: str, parent: Path, path: Path) -> str:
    """Return the parent's text as a recipe at `path`, with a new name, description and forked_from, and without expect.

    `lineage` becomes forked_from. Expects that keys of the top level start their line and that their values are
    indented below them. A `base:` is rewritten to be relative to `path`.
    """
    origin = lineage.partition("@")[0]
    head = f"# Made from {origin}; what differs was chosen by us.\nname: {name}\n"
    head += f"description: {_DESCRIPTION.format(origin)}\nforked_from: {lineage}"
    for key in ("forked_from", "description", "expect"):  # the last was measured on the parent
        text = _entry(key).sub("", text)
    text, count = _entry("name").subn(lambda entry: f"{head}{entry['comment'] or ''}\n", text, count=1)
    if not count:
        text = f"{head}\n{text}"

    def replace_base(entry: re.Match[str]) -> str:
        """Return the entry `base:` as seen from `path`, its comment included."""
        target = (parent.parent / YAML(typ="safe", pure=True).load(entry[0])["base"]).resolve()
        base = Path(os.path.relpath(target, path.parent.resolve())).as_posix()
        return f"base: {base}{entry['comment'] or ''}\n"

    return _entry("base").sub(replace_base, text, count=1)


def _entry(key: str) -> re.Pattern[str]:
    """Return a pattern for a top-level key with all lines of its value; group `comment` is the first line's comment."""
    quoted = rf"""(?:{key}|"{key}"|'{key}')[ \t]*:"""
    first = rf"^{quoted}(?:[^#\n]|(?<=\S)\#)*?(?P<comment>[ \t]+\#.*)?(?:\n|\Z)"
    return re.compile(rf"{first}(?:(?:[ \t]*\n)*[ \t]+\S.*(?:\n|\Z))*", re.MULTILINE)


STEPS = 10
TOLERANCE = 0.001  # rounding of another CPU moves these losses by 1e-5
_EVERY_STAGE = (
    "data.decontaminate=none",
    "data.num_proc=2",
    "zero.offload_optimizer=none",
    "zero.offload_param=none",
    f"train.steps={STEPS}",
    "train.tokens=null",
    "train.epochs=null",
    "optim.warmup_steps=2",
    "checkpoint.every_steps=null",
    "eval={every_steps: null, max_tokens_per_source: 2000}",
    "hardware={hosts: [{name: localhost, slots: 1, memory: 8GiB}]}",
    "train.cpu_ranks=1",
)
_PRETRAIN = (
    "model.init_from=null",
    "model.revision=null",
    "model.former_rope_theta=null",
    "model.hidden_size=64",
    "model.layers=2",
    "model.heads=2",
    "model.kv_heads=null",
    "model.ffn_size=128",
    "model.vocab_size=auto",
    "tokenizer={vocab_size: 4096}",
    "data.sources=[{synthetic: {size: 1MB, held_out_size: 100KB, seed: 3}}]",
    "batch={sequence_length: 64, tokens_per_step: 1024}",
)
_AFTER = {  # rows hold a question of the exam, or two
    "sft": (
        "data.sources=[{synthetic: {size: 1MB, held_out_size: 100KB, seed: 3, dialogues: true}}]",
        "batch={sequence_length: 256, tokens_per_step: 1024}",
    ),
    **dict.fromkeys(
        ("dpo", "reward", "grpo"),
        (
            "data.sources=[{synthetic: {size: 1MB, held_out_size: 100KB, seed: 3}}]",
            "batch={sequence_length: 512, tokens_per_step: 4096}",
        ),
    ),
}
_TEXT = "{name: text, synthetic: {size: 1MB, held_out_size: 100KB, seed: 3}}"
_MIXED = (  # hybrid tuning stays one, whatever its weights
    _AFTER["sft"][0].replace("]", f", {_TEXT}]"),
    "data.mixture=[{weights: {'*_chat': 3, 'text-*': 1}}]",
)
_WEIGHED = "data.mixture=[{weights: {'fin_*': 3, announcement: 1}}]"  # of the invented sources, for the recipe's
_ANSWER_TOKENS = 64  # of GRPO's answers at most
_PARENT = "recipes/quickstart/pretrain.yaml"
_TEMPLATES = ("xuanyuan", "llm-code", "llama2")  # whose turns end with </s>, which the toy's tokenizer has


def load_toy(path: str, overrides: Sequence[str] = ()) -> Loaded:
    """Load a recipe shrunk to toy scale, with `overrides` ("key=value") applied last.

    The toy's `expect` holds the losses of expect.toy, if the recipe has them and no override changes the training. Else
    it is None. A recipe named in model.init_from becomes a toy too. Raises UserError for a recipe or override that
    cannot be used.
    """
    written = recipe.load(path).recipe
    shrunk = (*_EVERY_STAGE, *(_PRETRAIN if written.stage == "pretrain" else _AFTER[written.stage]))
    for source in written.data.sources:
        if source.synthetic is not None and source.synthetic.about != "exam":
            shrunk += (f"data.sources[0].synthetic.about={source.synthetic.about}",)
    if written.stage == "pretrain":
        shrunk += (f"model.config={json.dumps(toy_config(written.model.config))}",)
        shrunk += (_WEIGHED,) if written.data.mixture else ()
    else:
        init_from = written.model.init_from
        shrunk += (f"model={{init_from: {init_from if parents.is_recipe(init_from) else _PARENT}}}",)
        shrunk += _MIXED if written.data.mixture else ()
        if written.grpo is not None and written.grpo.max_new_tokens > _ANSWER_TOKENS:
            shrunk += (f"grpo.max_new_tokens={_ANSWER_TOKENS}",)
        if written.chat is not None and written.chat.template not in _TEMPLATES:
            shrunk += ("chat.template=xuanyuan",)
    toy = recipe.load(path, (*shrunk, *overrides), parent=load_toy)
    curve = written.expect.toy if written.expect and not recipe.changes_training(overrides) else {}
    expect = Expect(hardware="cpu", loss=curve, tolerance=TOLERANCE) if curve else None
    return dataclasses.replace(toy, recipe=toy.recipe.model_copy(update={"expect": expect}))


def toy_config(config: traits.Config | None) -> traits.Config | None:
    """Return a small model.config of the same type; None for a Llama or no config. UserError for an unknown type."""
    if config is None or config["model_type"] == "llama":
        return None
    row = traits.record_of(config)
    known = row.defaults
    sizes = {"head_dim": 32, "moe_intermediate_size": 64} | dict.fromkeys(traits.EXPERTS, 4)
    sizes |= dict.fromkeys(traits.CHOSEN, 2) | {"n_group": 1, "topk_group": 1} | dict.fromkeys(traits.DENSE, 1)
    sizes |= {"kv_lora_rank": 32, "q_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16}
    sizes |= dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads"), 2)
    sizes |= dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 16)
    kinds = {"layer_types": [traits.LINEAR, "full_attention"]} if row.linear else {}
    return {"model_type": config["model_type"]} | {key: size for key, size in sizes.items() if known.get(key)} | kinds


def for_publication(recipe: Recipe) -> Recipe:
    """Return a valid recipe for the same training without private details, for model cards and trackers.

    Removes env, hosts:, self_qa and checkpoint.memory_directory, names hosts host1, host2 and so on, and masks
    credentials. Of an absolute path keeps the last part; of one within an export, all from the run's name on.
    """
    aliases: dict[str, str] = {}

    def alias(name: str) -> str:
        """Return host1, host2, ... in the place of a host's name, the same for the same name."""
        return aliases.setdefault(name, f"host{len(aliases) + 1}")

    hosts = tuple(host.model_copy(update={"name": alias(host.name)}) for host in recipe.hardware.hosts)
    rows, kinds = recipe.batch.micro_batch, {host.gpu for host in hosts}
    if isinstance(rows, dict):
        rows = {name if name in kinds else alias(name): count for name, count in rows.items()}
    shown = recipe.model_copy(
        update={
            "hardware": recipe.hardware.model_copy(update={"hosts": hosts}),
            "batch": recipe.batch.model_copy(update={"micro_batch": rows}),
            **{"env": {}, "hosts": {}, "self_qa": None},
        }
    )
    published = _without_directories(shown.model_dump(mode="json"))
    del published["checkpoint"]["memory_directory"]  # must be absolute; the default is every Linux host's
    return Recipe.model_validate(published)


def _without_directories(value: Any) -> Any:
    """Return a copy of a JSON value in which absolute paths have lost their directories and credentials are masked.

    A path keeps its last part; one with a part `export`, as in a run's export, keeps all from the part before it on.
    """
    if isinstance(value, dict):
        return {key: _without_directories(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_without_directories(inner) for inner in value]
    if not isinstance(value, str) or not value.startswith("/"):
        return redact_key("", value)
    parts = PurePosixPath(value).parts
    return "/".join(parts[parts.index("export") - 1 if "export" in parts[2:] else -1 :])
