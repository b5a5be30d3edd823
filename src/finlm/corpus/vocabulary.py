"""Run the step `tokenizer`: copy an existing model, extend it by Chinese pieces, or train one on a sample of documents.

The sample is chosen by hash from every source's training documents, in proportion to their text unless weights say
otherwise; it depends on the documents only. A sample that training would not have the memory for is refused before
anything is read. The weights of data.mixture are not taken over: changing the mixture of a run would then make another
tokenizer and encode everything again.

How much text a token holds, by source, is measured once on held-out documents (at most 2 MB a source), kept in the
manifest and printed: fewer tokens mean shorter rows for the same text, and cost falls by the same factor.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path

import numpy as np
import numpy.typing as npt

from finlm.base import processes, screen, units
from finlm.base.errors import UserError
from finlm.base.step_cache import NotPrepared, Step
from finlm.corpus import documents, selection
from finlm.corpus.documents import Documents
from finlm.corpus.selection import TRAIN, Decisions, Selection, Table
from finlm.corpus.workers import Context
from finlm.rows import packing
from finlm.rows.shards import tokenizer_file
from finlm.tokens import encoders, pretrained, tokenizer_json, vocab

VERSION = 2
# sentencepiece drops lines over 4,192 bytes without a word; a character has at most 4.
_LINE_CHARACTERS = 1000
_MEMORY_PER_SAMPLE_BYTE = 30  # 26 measured at 21 MB


def choose_sample(
    table: Table,
    decision: Decisions,
    sources: Sequence[str],
    sample_bytes: int,
    weights: Mapping[str, float] | None = None,
) -> npt.NDArray[np.bool_]:
    """Return which training documents the tokenizer learns from: bool [documents].

    `sources` names the source of each input. Takes about sample_bytes of text, by source in proportion to `weights`, or
    to the text if None. Documents are ordered by the second half of their hash; the first half chose the held-out
    documents. Raises UserError when the sample would not fit in memory, and for weights of an unknown source.
    """
    is_train = decision == TRAIN
    names = list(dict.fromkeys(sources))
    number = np.array([names.index(name) for name in sources], dtype=np.int32)[table.source]  # source of each document
    text_bytes = np.bincount(number[is_train], table.text_bytes[is_train], minlength=len(names))
    available = {name: int(size) for name, size in zip(names, text_bytes, strict=True)}
    weight = weights and packing.weights_by_source(weights, available, "tokenizer.sample_weights")
    wanted = shares(available, sample_bytes, weight)
    check_memory(sum(wanted.values()))
    chosen = np.zeros(len(decision), dtype=np.bool_)
    for place, share in enumerate(wanted.values()):
        here = np.flatnonzero(is_train & (number == place))
        here = here[np.argsort(table.hash[here, 1], kind="stable")]
        size = table.text_bytes[here].astype(np.int64)
        fitting = size <= share
        if fitting.any():
            here, size = here[fitting], size[fitting]
            chosen[here[: np.searchsorted(np.cumsum(size), share, side="right")]] = True
        elif share:
            chosen[here[np.argmin(size)]] = True  # each is longer than the share; lines() takes its beginning
    return chosen


def shares(available: Mapping[str, int], wanted: int, weights: Mapping[str, float] | None) -> dict[str, int]:
    """Return {source: bytes to take}, together `wanted` or all, in proportion to the weights, or without to the text.

    A source with less text than its share gives all of it, and the others share the rest.
    """
    result, left = dict.fromkeys(available, 0), wanted
    given: Mapping[str, float] = available if weights is None else weights
    weight = {name: given[name] for name in available if given.get(name, 0) > 0}
    while weight:
        total = sum(weight.values())
        exhausted = [name for name in weight if available[name] * total <= left * weight[name]]
        if not exhausted:
            return result | {name: int(left * part / total) for name, part in weight.items()}
        for name in exhausted:
            result[name] = available[name]
            left -= available[name]
            del weight[name]
    return result


def lines(texts: Iterable[str], longest: int = sys.maxsize) -> Iterator[str]:
    """Yield the lines of documents for sentencepiece, in pieces of at most 1000 characters; a cut may split a word.

    Of a document of more than `longest` bytes only the beginning is used.
    """
    for text in texts:
        if len(text) > longest // 4:
            text = text.encode()[:longest].decode(errors="ignore")
        for line in text.split("\n"):
            for start in range(0, len(line), _LINE_CHARACTERS):
                yield line[start : start + _LINE_CHARACTERS]


def check_memory(sample_bytes: int) -> None:
    """Raise UserError when training a tokenizer on this many bytes of text does not fit in memory."""
    needed, available = _MEMORY_PER_SAMPLE_BYTE * sample_bytes, processes.available_bytes()
    if needed > available:
        raise UserError(
            f"training a tokenizer on {units.format_bytes(sample_bytes)} of text does not fit in memory",
            evidence=f"about {units.format_bytes(needed)} needed, {units.format_bytes(available)} available",
            fix=f"lower tokenizer.sample_bytes to {max(1, available // _MEMORY_PER_SAMPLE_BYTE // 10**6)}MB",
        )


_BYTES_A_SOURCE = 2_000_000


def sample_texts(read: Documents, decision: selection.Decisions) -> Iterator[tuple[str, str]]:
    """Yield (source, document) to measure compression on, until a source has given 2 MB.

    The documents are held-out ones, or training documents of a source that has none held out.
    """
    left = dict.fromkeys((chunk.source for chunk in read.chunks), _BYTES_A_SOURCE)
    has_held_out = {chunk.source for chunk in read.chunks if (decision[chunk.rows] == selection.HELD_OUT).any()}
    for chunk in read.chunks:
        wanted = decision[chunk.rows] == (selection.HELD_OUT if chunk.source in has_held_out else selection.TRAIN)
        if left[chunk.source] <= 0 or not np.any(wanted):
            continue
        for text in documents.read_texts(chunk.path, wanted):
            left[chunk.source] -= len(text.encode())
            yield chunk.source, text
            if left[chunk.source] <= 0:
                break


@dataclass
class Compression:
    """How many tokens each tokenizer needs for some text of a source."""

    tokens: dict[str, int]  # by the tokenizer's name
    documents: int = 0
    bytes: int = 0
    characters: int = 0


def compressions(tokenizer: Step) -> dict[str, Compression]:
    """Return {source: Compression} from the tokenizer's manifest; empty for a tokenizer that was only copied."""
    return {source: Compression(**row) for source, row in tokenizer.manifest.get("compression", {}).items()}


def compression_table(measured: Mapping[str, Compression]) -> list[str]:
    """Return aligned lines of source, bytes and characters per token; of several tokenizers joined by ->."""
    rows: list[tuple[str, ...]] = [("source", "bytes a token", "characters a token")]
    for source, row in measured.items():
        sizes = (row.bytes, row.characters)
        ratios = (" -> ".join(f"{size / max(1, tokens):.2f}" for tokens in row.tokens.values()) for size in sizes)
        rows.append((source, *ratios))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def check_file(context: Context, file: Path | None) -> None:
    """Raise UserError if the tokenizer `file` cannot be used; do nothing if it is None or the cache may not build.

    Checks that it can be read and extended, fits model.vocab_size, and has document_begin and document_end.
    """
    if context.cache.build and file is not None:
        kind = tokenizer_json if encoders.is_json(file) else vocab
        if context.recipe.tokenizer.extend_to is not None:
            kind.load_base(file)
        size = kind.describe(file)["vocab_size"]
        rows = context.recipe.model.vocab_size
        if rows != "auto" and size > rows:
            raise UserError(
                f"the tokenizer has {size:,} pieces, the model {rows:,} rows",
                evidence=str(file),
                fix="name the tokenizer of model.init_from, or raise model.vocab_size",
            )
        special_ids(context, file)


def special_ids(context: Context, file: Path) -> tuple[int | None, int | None]:
    """Return the ids of document_begin and document_end, None where unset; UserError if the tokenizer lacks one."""
    settings = context.recipe.tokenizer
    given = {"document_begin": settings.document_begin, "document_end": settings.document_end}
    if not any(given.values()):
        return None, None
    opened = pretrained.open_tokenizer(file.parent, "tokenizers" if encoders.is_json(file) else "sentencepiece")
    ids = [None if token is None else opened.id_of(token) for token in given.values()]
    for (key, token), number in zip(given.items(), ids, strict=True):
        if token is not None and number is None:
            raise UserError(
                f"tokenizer.{key}: the tokenizer has no token {token}",
                evidence=f"its control tokens: {', '.join(opened.control[:12])}",
                fix=f"name one of them, or leave tokenizer.{key} out",
            )
    return ids[0], ids[1]


def make_tokenizer(context: Context, read: Documents, chosen: Selection, file: Path | None) -> Step:
    """Run the step `tokenizer` unless cached: train when `file` is None, else extend or copy it. Print the result.

    Raises UserError when it cannot be used or made, NotPrepared when it is missing and the cache may not build.
    """
    if file is None:
        step = _train_tokenizer(context, read, chosen)
    else:
        if not context.cache.build and not file.is_file():
            raise NotPrepared("tokenizer")
        if context.recipe.tokenizer.extend_to is not None:
            step = _extend_tokenizer(context, read, chosen, file)
        else:
            kind = tokenizer_json if encoders.is_json(file) else vocab
            kind.load(file)  # tells a file that cannot be read; the fingerprint takes any
            depends_on = {"version": kind.VERSION, "sha256": kind.fingerprint(file)}
            step = context.cache.step("tokenizer", depends_on, lambda directory: kind.copy(file, directory), 0)
    made = step.manifest
    about = f"{made['vocab_size']:,} pieces, sha256 {made['sha256'][:16]}"
    if "old_pieces" in made:
        unseen = f" ({made['not_in_sample']:,} of them not in the sample)" if made["not_in_sample"] else ""
        about += (
            f"; {made['old_pieces']:,} old, {made['new_characters']:,} new characters{unseen}, "
            f"{made['new_longer_pieces']:,} longer new pieces"
        )
    context.say(step, about)
    if not step.reused and "compression" in made:
        for line in compression_table(compressions(step)):
            screen.say(f"  {line}")
    return step


def _train_tokenizer(context: Context, read: Documents, chosen: Selection) -> Step:
    """Run the step `tokenizer` unless cached: print the size of the sample and train a sentencepiece model on it.

    Raises UserError if it cannot be trained, NotPrepared if the step is missing and the cache may not build.
    """
    settings = context.recipe.tokenizer
    assert settings.vocab_size is not None  # recipe.rules asks for a path or a size
    vocab_size = settings.vocab_size

    def make(directory: Path) -> dict[str, object]:
        """Write tokenizer.model into directory; return the manifest."""
        lines = _sampled_lines(context, read, chosen)
        manifest = vocab.train(lines, directory, vocab_size, settings.character_coverage)
        return {**manifest, **_compression_entry({"trained": directory / "tokenizer.model"}, read, chosen)}

    return context.cache.step("tokenizer", _depends_on(context, chosen), make, 64 * vocab_size)


def _extend_tokenizer(context: Context, read: Documents, chosen: Selection, path: Path) -> Step:
    """Run the step `tokenizer` unless cached: extend a tokenizer by pieces of the sample, whose size is printed.

    Checks the new one: raises RuntimeError if text without Chinese is not encoded as before. Raises UserError when the
    tokenizer cannot be extended, NotPrepared if the step is missing and the cache may not build.
    """
    settings, is_json = context.recipe.tokenizer, encoders.is_json(path)
    assert settings.extend_to is not None
    size, how = settings.extend_to, (settings.extend_longest, settings.character_coverage)
    kind = tokenizer_json if is_json else vocab
    base = kind.load_base(path)

    def make(directory: Path) -> dict[str, object]:
        """Write the extended tokenizer into directory; return the manifest."""
        manifest = kind.extend(base, _sampled_lines(context, read, chosen), directory, size, *how)
        made = tokenizer_file(directory)
        checked = kind.check_unchanged(path, made, (text for _, text in sample_texts(read, chosen.decisions())))
        measured = _compression_entry({"before": path, "after": made}, read, chosen)
        return {**manifest, "texts_encoded_as_before": checked, **measured}

    depends_on = _depends_on(context, chosen) | {
        "base": kind.fingerprint(path),
        "extend_to": size,
        "extend_longest": settings.extend_longest,
    }
    if is_json:
        depends_on |= {"json": tokenizer_json.VERSION, "tokenizers": metadata.version("tokenizers")}
    return context.cache.step("tokenizer", depends_on, make, 128 * size)


def _depends_on(context: Context, chosen: Selection) -> dict[str, object]:
    """Return the settings and versions that a trained or extended tokenizer depends on, for its step key."""
    settings = context.recipe.tokenizer
    return {
        "version": vocab.VERSION,
        "selection": chosen.key,
        "vocab_size": settings.vocab_size,
        "sample": VERSION,
        "sample_bytes": settings.sample_bytes,
        "sample_weights": settings.sample_weights,
        "character_coverage": settings.character_coverage,
        "sentencepiece": vocab.LIBRARY,
    }


def _sampled_lines(context: Context, read: Documents, chosen: Selection) -> Iterator[str]:
    """Return the lines of a sample, whose size is printed. UserError if it is too large, or a weight is wrong."""
    settings = context.recipe.tokenizer
    table, sources = selection.Table.read(read.chunks), [item.source for item in read.inputs]
    wanted = choose_sample(table, chosen.decisions(), sources, settings.sample_bytes, settings.sample_weights)
    size = units.format_bytes(int(np.minimum(table.text_bytes[wanted].astype(np.int64), settings.sample_bytes).sum()))
    screen.say(
        f"tokenizer: {'extending to' if settings.extend_to else 'training'} {settings.pieces:,} pieces on {size}"
    )
    texts = (text for chunk in read.chunks for text in documents.read_texts(chunk.path, wanted[chunk.rows]))
    return lines(texts, settings.sample_bytes)


def _compression_entry(tokenizers: Mapping[str, Path], read: Documents, chosen: Selection) -> dict[str, object]:
    """Encode sample_texts() with each tokenizer, {name: file}; return {"compression": {source: fields of Compression}}.

    Raises UserError if a tokenizer cannot be read.
    """
    encode = {name: encoders.reference(path) for name, path in tokenizers.items()}
    sums: dict[str, Compression] = {}
    for source, text in sample_texts(read, chosen.decisions()):
        row = sums.setdefault(source, Compression(dict.fromkeys(encode, 0)))
        row.documents += 1
        row.bytes += len(text.encode())
        row.characters += len(text)
        for name, encoder in encode.items():
            row.tokens[name] += len(encoder([text.encode()])[0])
    return {"compression": {source: asdict(row) for source, row in sums.items()}}
