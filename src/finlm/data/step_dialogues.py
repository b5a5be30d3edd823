"""The step `dialogues`: instruction files to a shards directory with, beside each .bin, a .mask of what is learnt from.

The parent reads blocks of rows, workers make messages, tokens and masks of them, and the parent drops duplicates, holds
a share out and writes in order: the bytes do not depend on the number of workers. Every row that is left out is counted
under its reason. The directory also holds the tokenizer and the chat template, so that export and chat use what the
training used.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from finlm.base import files
from finlm.base.errors import UserError
from finlm.data import (
    chat,
    chat_encode,
    chat_read,
    chat_tokens,
    dialogue_shards,
    pairs,
    readers,
    step_sources,
    streams,
    workers,
)
from finlm.data.chat import Refused
from finlm.data.context import Context
from finlm.data.dialogue_shards import Encoded, Piece, Tally, Writer
from finlm.data.readers import Block
from finlm.data.shards import Split
from finlm.data.sources import Input
from finlm.data.steps import Step, bar
from finlm.recipe.schema import Recipe
from finlm.recipe.schema_post import Sft

VERSION = 1
CHECKED = 50  # dialogues of each block whose text and prompt are encoded and decoded once more


@dataclass(frozen=True)
class Task:
    """A block to encode."""

    number: int  # of the input
    block: Block
    tokenizer: Path
    rules: str
    limit: int
    stage: str


def run(context: Context, tokenizer: Path) -> Step:
    """The shards directory of the recipe's dialogues; tokenizer is the directory of the model it starts from."""
    recipe = context.recipe
    assert recipe.chat is not None
    sft = recipe.sft or Sft()
    inputs = [replace(item, text_field=readers.WHOLE_ROW) for item in step_sources.inputs(context)]
    rules = f"{recipe.chat.model_dump_json()}\n{_rules(sft)}"
    limit = pairs.longest(recipe) or recipe.batch.sequence_length + 1  # T inputs and the label of the last
    encoder = chat_encode.encoder(tokenizer, rules, limit)
    check_template(recipe.chat.template, encoder.tokenizer)

    def make(directory: Path) -> dict[str, Any]:
        like = Task(0, Block("jsonl", Path(), 1, b""), tokenizer, rules, limit, recipe.stage)
        tallies, entries = _written(context, directory, inputs, like, _dtype(encoder.tokenizer))
        chat_tokens.copy_files(tokenizer, directory / "tokenizer")
        files.write_text(directory / "chat_template.jinja", encoder.template.source)
        return _manifest(recipe, directory, tallies, entries, encoder)

    depends_on = {
        "version": VERSION,
        "inputs": [item.identity() for item in inputs],
        "tokenizer": chat_tokens.fingerprint(tokenizer),
        "template": encoder.template.source,
        "rules": rules,
        "limit": limit,
        "stage": recipe.stage,
        "held_out": [recipe.data.held_out_fraction, recipe.data.held_out_documents],
        "dedup": recipe.data.dedup.method,
        "broken": recipe.data.max_broken_fraction,
    }
    size = sum(path.stat().st_size for item in inputs for path in item.paths)
    step = context.cache.step("dialogues", depends_on, make, 4 * size)
    context.say(step, _sentence(step.manifest))
    return step


def check_template(name: str, tokenizer: chat_tokens.Tokenizer) -> None:
    """Raises UserError when the template writes control tokens that the tokenizer does not have."""
    missing = [token for token in chat.NEEDED.get(name, ()) if token not in tokenizer.control]
    if missing:
        raise UserError(
            f"chat.template {name} needs tokens that this tokenizer does not have: {', '.join(missing)}",
            evidence=f"its control tokens: {', '.join(tokenizer.control)}",
            fix="choose xuanyuan or llama2, which end a turn with </s>, or model, the tokenizer's own",
        )


def encode(task: Task) -> Encoded:
    """A block's dialogues as tokens. Runs in a worker."""
    encoder = chat_encode.encoder(task.tokenizer, task.rules, task.limit)
    found = Encoded(task.number)
    for raw in _rows(task.block):
        found.counts["rows"] += 1
        try:
            row = orjson.loads(raw) if isinstance(raw, bytes) else raw
        except orjson.JSONDecodeError:
            found.counts["broken"] += 1
            found.refused["not JSON"] += 1
            continue
        try:
            (_add if task.stage == "sft" else _add_preference)(found, encoder, row, task.stage)
        except Refused as error:
            found.refused[str(error)] += 1
    return found


def _add(found: Encoded, encoder: chat_encode.Encoder, row: Any, _: str) -> None:
    messages = chat_read.messages_of(row)
    if isinstance(messages, str):
        pieces = [encoder.document(messages)]
        found.counts["documents"] += 1
    else:
        messages = chat_read.checked(messages, encoder.tokenizer.control)
        pieces = list(encoder.pieces(messages, found.counts))
        found.counts["dialogues"] += 1
        if found.counts["checked"] < CHECKED:
            found.counts["checked"] += 1
            for what, holds in encoder.round_trip(messages).items():
                found.counts[f"{what} differs"] += not holds
    canonical = json.dumps(messages, ensure_ascii=False).encode("utf-8", "replace")
    number = int.from_bytes(hashlib.blake2b(canonical, digest_size=8).digest(), "little")
    text_bytes = (
        len(messages.encode()) if isinstance(messages, str) else sum(len(m["content"].encode()) for m in messages)
    )
    _keep(found, pieces, number, text_bytes)


def _add_preference(found: Encoded, encoder: chat_encode.Encoder, row: Any, stage: str) -> None:
    preference = pairs.preference_of(row)
    pieces = pairs.pieces(encoder, preference, stage, encoder.rules.limit)
    found.counts["preferences"] += 1
    texts = [message["content"] for message in preference.prompt] + [preference.chosen or "", preference.rejected or ""]
    # The low half decides what is held out: all pairs of a prompt together.
    whole, prompt = (hashlib.blake2b(json.dumps(part).encode(), digest_size=4).digest() for part in (texts, texts[:-2]))
    _keep(found, pieces, int.from_bytes(prompt + whole, "little"), sum(len(text.encode()) for text in texts))


def _keep(found: Encoded, pieces: list[chat_encode.Encoded], number: int, text_bytes: int) -> None:
    for piece in pieces:
        found.ids += piece.ids
        found.mask += piece.mask
        found.pieces.append(Piece(len(piece.ids), text_bytes // len(pieces), len(found.dialogues)))
    found.dialogues.append(number)


def _rows(block: Block) -> Iterator[Any]:
    """Rows of a block: bytes of JSON, or what a table holds."""
    if block.cut:
        yield b"{"  # counts as broken
    elif block.kind == "arrow":
        import pyarrow as pa

        with pa.ipc.open_stream(block.data) as stream:
            for batch in stream:
                yield from batch.to_pylist()
    elif block.kind == "jsonl":
        assert isinstance(block.data, bytes)
        yield from (line for line in block.data.split(b"\n") if line and not line.isspace())
    else:
        raise UserError(
            f"{block.path}: text files hold no dialogues", fix="give .jsonl, .json, .parquet or a saved set"
        )


def _blocks(item: Input, advance: Any) -> Iterator[Block]:
    """The input's blocks; a file that is one JSON list (Alpaca's) is read as its rows."""
    for path in item.paths:
        one = replace(item, paths=(path,))
        if item.format != "jsonl" or not _is_list(path, item.encoding):
            yield from readers.blocks(one, advance)
            continue
        data = b"".join(streams.pieces(path, item.encoding, 2**20, advance))
        try:
            rows = orjson.loads(data)
        except orjson.JSONDecodeError as error:
            raise UserError(f"{path} is not valid JSON", evidence=str(error), fix="fetch the file again") from None
        for first in range(0, len(rows), 10_000):
            yield Block("jsonl", path, first + 1, b"\n".join(map(orjson.dumps, rows[first : first + 10_000])))


def _is_list(path: Path, encoding: str) -> bool:
    start = next(streams.pieces(path, encoding, 4096, lambda amount, description=None: None), b"")
    return start.lstrip()[:1] == b"["


def _written(
    context: Context, directory: Path, inputs: Sequence[Input], like: Task, dtype: np.dtype[Any]
) -> tuple[list[Tally], list[dict[str, Any]]]:
    """The shards of all inputs: (counts, the manifest's entries). Raises UserError when too little can be used."""
    tallies = [Tally(item, context.data) for item in inputs]
    writers: dict[tuple[Split, str], Writer] = {}
    seen: set[int] | None = None if context.data.dedup.method == "none" else set()
    total = sum(path.stat().st_size for item in inputs for path in item.paths)
    used = min(context.processes, max(1, total // readers.BLOCK_BYTES))
    with bar("dialogues", total, fast_bytes=5_000_000) as advance, workers.pool(used) as pool:
        tasks = (
            replace(like, number=number, block=block)
            for number, item in enumerate(inputs)
            for block in _blocks(item, advance)
        )
        for encoded in workers.in_order(pool, used, encode, tasks):
            tally = tallies[encoded.number]
            for split, start, piece in tally.chosen(encoded, seen):
                key = split, tally.item.source
                writer = writers.get(key) or writers.setdefault(key, Writer(directory, *key, dtype))
                stop = start + piece.tokens
                writer.add(encoded.ids[start:stop], bytes(encoded.mask[start:stop]), piece.text_bytes)
    for tally in tallies:
        tally.check()
    if not any(split == "train" for split, _ in writers):
        reasons = sum((tally.refused for tally in tallies), Counter[str]())
        raise UserError(
            "no dialogue is left to train on",
            evidence="\n".join(f"{count:,} rows: {reason}" for reason, count in reasons.most_common(8)),
            fix="look at the first rows of the files: which keys they have, and who says what",
        )
    by_split = sorted(writers, key=lambda key: key[0] != "train")  # stable: the recipe's order within a split
    return tallies, [writers[key].close() for key in by_split]


def _manifest(
    recipe: Recipe,
    directory: Path,
    tallies: Sequence[Tally],
    entries: Sequence[Mapping[str, Any]],
    encoder: chat_encode.Encoder,
) -> dict[str, Any]:
    tokenizer = encoder.tokenizer
    files.write_json(directory / "documents.json", dialogue_shards.about(directory, tallies, entries))
    return {
        "version": VERSION,
        "stage": recipe.stage,
        "dtype": _dtype(tokenizer).name,
        "vocab_size": tokenizer.vocab_size,
        "bos_id": tokenizer.bos[1] if tokenizer.bos else -1,
        "eos_id": tokenizer.eos[1],
        "end_of_turn_id": encoder.end_id,
        "add_bos": tokenizer.bos is not None,
        "encoder": tokenizer.library,
        "tokenizer_sha256": files.sha256_json(chat_tokens.fingerprint(directory / "tokenizer")),
        "totals": dialogue_shards.totals(entries),
        **_unpacked(recipe, entries),
        "shards": list(entries),
        "dialogues": dialogue_shards.by_source(tallies, "counts"),
        "refused": dialogue_shards.by_source(tallies, "refused"),
    }


def _unpacked(recipe: Recipe, entries: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """train_tokens, where rows are not filled: what an epoch counts as."""
    if recipe.stage == "sft" and (recipe.sft is None or recipe.sft.packing):
        return {}
    pieces = sum(entry["documents"] for entry in entries if entry["split"] == "train")
    rows = pieces // 2 if recipe.stage in ("dpo", "reward") else pieces
    return {"train_tokens": rows * recipe.batch.sequence_length}


def _dtype(tokenizer: chat_tokens.Tokenizer) -> np.dtype[Any]:
    return np.dtype("<u2" if tokenizer.vocab_size <= 65536 else "<u4")


def _rules(sft: Sft) -> str:
    """The part of the section that decides tokens and masks; the rest is about rows."""
    kept = {"assistant_only_loss", "answer_apart", "mask_eos", "tokenizer"}
    return sft.model_dump_json(include=kept)


def _sentence(manifest: Mapping[str, Any]) -> str:
    train = manifest["totals"]["train"]
    tokens = sum(row["tokens"] for row in train.values())
    learnt = sum(row["learnt"] for row in train.values())
    counts = sum((Counter(row) for row in manifest["dialogues"].values()), Counter[str]())
    refused = sum((Counter(row) for row in manifest.get("refused", {}).values()), Counter[str]())
    text = f"{counts['kept']:,} dialogues, {tokens:,} tokens, {learnt / max(1, tokens):.1%} learnt from"
    text += f"; {counts['split']:,} split" if counts["split"] else ""
    text += f"; {counts['truncated']:,} cut" if counts["truncated"] else ""
    return text + "".join(f"; {count:,} left out: {reason}" for reason, count in refused.most_common(3))
