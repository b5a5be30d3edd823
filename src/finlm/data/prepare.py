"""`finlm prepare`: a recipe's sources to a directory of token shards, in steps that are never done twice.

Each step (chain.py) is a directory named by the hash of what it depends on (steps.py): a killed run continues with the
finished steps, a changed setting redoes only what follows from it, and finding everything done takes milliseconds.
20 MB of text with a tokenizer of 32,000 pieces take 9 s on two cores; with a tokenizer at hand 250 MB take 14 s.

The shards directory alone is enough for training, export and report: it also holds tokenizer.model and documents.json,
the counts of every source. No process group is open and no torch is imported here, so nothing can time out.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from finlm.base import files
from finlm.base.errors import UserError
from finlm.data import (
    chain,
    chat,
    chat_tokens,
    dialogue_rows,
    lint_show,
    show,
    start,
    step_dialogues,
    vocab,
    vocab_extend,
)
from finlm.data.shards import Shards
from finlm.data.steps import Cache, NotPrepared
from finlm.recipe.schema import Recipe


def run(recipe: Recipe) -> Path:
    """The recipe's shards directory with the index of its rows, prepared where it is not yet. Raises UserError."""
    if recipe.data.prepared is not None:
        directory = _given(recipe, recipe.data.prepared)
        dialogue_rows.of(Shards(directory), recipe)
        return directory
    cache = Cache(Path(recipe.data.cache_dir), build=True)
    with cache.locked():
        directory = _checked(chain.shards(recipe, cache))
        show.say_reading(show.reading(recipe, Shards(directory)))
        return directory


def locate(recipe: Recipe) -> Path | None:
    """The recipe's shards directory when it is complete, else None, also where the sources are not: does no work.

    Raises UserError for a data.prepared that cannot be used, and for damaged shards.
    """
    if recipe.data.prepared is not None:
        return _given(recipe, recipe.data.prepared)
    try:
        return _checked(chain.shards(recipe, Cache(Path(recipe.data.cache_dir), build=False)))
    except NotPrepared:
        return None


def show_rows(recipe: Recipe, shards: Path, count: int) -> None:
    """Print the first rows of the recipe's run, or of its dialogues, as text on stderr."""
    (show.say_rows if recipe.stage == "pretrain" else lint_show.rows)(recipe, Shards(shards), count)


def sizes(shards: Path, recipe: Recipe) -> tuple[int, int]:
    """(pieces of the tokenizer, training tokens of an epoch) of a recipe's shards directory."""
    found = Shards(shards)
    return found.vocab_size, show.epoch_tokens(recipe, found)


def summary(shards: Path, recipe: Recipe | None = None) -> dict[str, Any]:
    """What a run records about its data: documents and tokens by source, lengths, reasons, files, the tokenizer.

    With the recipe also how the run reads them: packing and the tokens of each source.
    """
    manifest, counts = files.read_json(shards / "manifest.json"), files.read_json(shards / "documents.json")
    train, held_out = manifest["totals"]["train"], manifest["totals"].get("held_out", {})
    tokens = {
        source: {
            "train_tokens": row["tokens"],
            "held_out_tokens": held_out.get(source, {}).get("tokens", 0),
            "bytes_per_token": row["text_bytes"] / row["tokens"],
        }
        for source, row in train.items()
    }
    names = ("key", "dtype", "vocab_size", "tokenizer_sha256", "add_bos", "encoder")
    about = {name: manifest[name] for name in names if name in manifest}
    more = {name: counts[name] for name in ("files", "pinned", "lengths", "cleaned", "values") if name in counts}
    reading = {"reading": show.reading(recipe, Shards(shards))} if recipe else {}
    return about | {"documents": counts["sources"], "shards": tokens} | more | reading


def _checked(directory: Path) -> Path:
    """Raises UserError for a file that is not as long as it was written."""
    return Shards(directory).directory


def _given(recipe: Recipe, prepared: str) -> Path:
    """data.prepared after its checks. Raises UserError when it is incomplete or belongs to another recipe's model."""
    directory = Path(prepared)
    shards = Shards(directory)
    holds = shards.manifest.get("stage", "pretrain")
    if holds != recipe.stage:
        raise UserError(
            f"data.prepared was made for stage {holds}, this is stage {recipe.stage}",
            evidence=f"{directory}/manifest.json",
            fix=f"give the directory that `finlm prepare` printed for a recipe of stage {recipe.stage}, "
            "or drop data.prepared",
        )
    if recipe.stage != "pretrain":
        _given_dialogues(recipe, shards)
    elif recipe.tokenizer.path is not None:
        _given_documents(recipe, shards, Path(recipe.tokenizer.path).expanduser())
    return directory


def _given_documents(recipe: Recipe, shards: Shards, tokenizer: Path) -> None:
    """Raises UserError when another tokenizer encoded the shards."""
    vocab.load(tokenizer)
    found, wanted = vocab.fingerprint(tokenizer), shards.manifest["tokenizer_sha256"]
    size = recipe.tokenizer.extend_to
    fits = found == wanted if size is None else vocab_extend.is_extension(shards.tokenizer, tokenizer, size)
    if not fits:
        raise UserError(
            "the tokenizer does not match the shards",
            evidence=f"{tokenizer} has sha256 {found}\n{shards.directory} was encoded with {wanted}"
            + (f", which is not the former extended to {size:,} pieces" if size else ""),
            fix=f"set tokenizer.path to {shards.tokenizer}{' without extend_to' if size else ''}, "
            "or drop data.prepared to encode again",
        )


def _given_dialogues(recipe: Recipe, shards: Shards) -> None:
    """Raises UserError when the dialogues were written by other settings, another tokenizer or chat template.

    The last two are looked at where the model that the recipe starts from lies on this machine.
    """
    wanted = step_dialogues.settings(recipe)
    former = shards.manifest.get("settings", wanted)
    if former != wanted:
        raise UserError(
            "data.prepared was written by other settings than this recipe's",
            evidence="\n".join(
                f"{name}: then {former.get(name)}, now {value}"
                for name, value in wanted.items()
                if former.get(name) != value
            ),
            fix="set these as they were, or drop data.prepared to encode again",
        )
    try:
        begin = start.directory(recipe, chain.RUNS, must_exist=False)
    except NotPrepared:
        return
    theirs, ours = chat_tokens.fingerprint(begin), chat_tokens.fingerprint(shards.directory / "tokenizer")
    differing = [name for name in chat_tokens.COPIED if theirs.get(name) != ours.get(name)]
    if differing:
        raise UserError(
            "data.prepared was encoded with another tokenizer than the model's",
            evidence=f"{', '.join(differing)} of {begin}\nis not that of {shards.directory / 'tokenizer'}",
            fix="start from the model that the data was prepared for, or drop data.prepared to encode again",
        )
    assert recipe.chat is not None
    own = chat_tokens.open_tokenizer(begin).chat_template
    source = chat.source_of(recipe.chat.template, own, recipe.chat.system)
    if source != (shards.directory / "chat_template.jinja").read_text("utf-8"):
        raise UserError(
            f"data.prepared was written with another chat template than {recipe.chat.template}",
            evidence=f"{shards.directory}/chat_template.jinja",
            fix="set chat.template as it was, or drop data.prepared to encode again",
        )
