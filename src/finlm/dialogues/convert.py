"""Run the step `dialogues`: instruction files to a shards directory, with a .mask of what is learnt beside each .bin.

The parent reads blocks of rows, workers convert them to messages, tokens and masks, and the parent drops duplicates,
selects the held-out share and writes in order: the bytes do not depend on the number of workers. Every row that is left
out is counted by its reason. The directory also has the tokenizer and the chat template, so that export and chat use
those of the training.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import tempfile
from array import array
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from finlm.base import files
from finlm.base.errors import UserError
from finlm.base.step_cache import Step, bar, ignore_progress
from finlm.corpus import normalize, steps, vocabulary
from finlm.corpus.read import parsing, readers
from finlm.corpus.read.readers import Block
from finlm.corpus.read.sources import Input
from finlm.corpus.workers import Context
from finlm.dialogues import encode, shards, templates
from finlm.dialogues.shards import Encoded, Spool, Tally
from finlm.dialogues.templates import LeftOut, Message, Refused
from finlm.recipe import parents
from finlm.recipe.schema import Recipe
from finlm.recipe.schema_train import Sft
from finlm.rows.shards import ShardEntry, totals
from finlm.tokens import pretrained, vocab

VERSION = 9
BEYOND = "beyond_context"  # rows longer than what the start model reads at once, among the counts
CHECKED = 50  # dialogues of each block whose text and prompt are encoded and decoded once more
_SFT = {"assistant_only_loss", "answer_apart", "mask_eos", "tokenizer"}  # decide tokens; the rest is about rows


@dataclass(frozen=True)
class Task:
    """A block to encode, with all settings that decide its tokens; sent to a worker."""

    number: int  # of the input
    block: Block
    tokenizer: Path  # a model's directory
    rules: str  # JSON lines, as encode.encoder() takes them
    limit: int  # tokens of a piece at most
    stage: str
    checked: tuple[str, ...]  # rules of the reward that need a right answer
    mask: tuple[str, ...]  # kinds of personal numbers
    context: int  # tokens that the start model can read at once
    answer_tokens: int  # that grpo writes at most


Mask = Callable[[str], str]


def make_shards(context: Context, tokenizer: Path) -> Step:
    """Convert the recipe's dialogues to token shards, unless cached, and return the step; print a line about it.

    `tokenizer` is the directory of the model that training starts from. Raises UserError when the chat template cannot
    be used, data.sides is set, the tokenizer lacks a token that the recipe names, too many rows of a source are broken,
    or a source has nothing to train on. Raises NotPrepared if the step is missing and the cache may not build.
    """
    recipe = context.recipe
    assert recipe.chat is not None
    if recipe.data.sides:
        raise UserError(
            f"data.{next(iter(recipe.data.sides))} holds out documents, and stage {recipe.stage} reads dialogues",
            fix="take the key out; dialogues are held out by data.held_out_fraction",
        )
    sft = recipe.sft or Sft()
    inputs = [replace(item, text_field=readers.WHOLE_ROW) for item in steps.list_inputs(context)]
    rules = f"{recipe.chat.model_dump_json()}\n{sft.model_dump_json(include=_SFT)}"
    if _named_ends(recipe):
        ends = vocabulary.special_ids(context, vocab.find(tokenizer))
        rules += f"\n{json.dumps([recipe.tokenizer.add_bos, *ends])}"
    limit = encode.longest_piece(recipe) or recipe.batch.sequence_length + 1  # T inputs and the label of the last
    encoder = encode.encoder(tokenizer, rules, limit)
    encode.check_template(recipe.chat.template, encoder)
    mask, checked = recipe.data.clean.mask, encode.checking_rules(recipe)
    context_tokens = parents.context_tokens(tokenizer)

    def make(directory: Path) -> dict[str, object]:
        """Write shards, tokenizer and chat template into `directory`; return the manifest. UserError for bad rows."""
        block, answer_tokens = Block("jsonl", Path(), 1, b""), recipe.grpo.max_new_tokens if recipe.grpo else 0
        like = Task(0, block, tokenizer, rules, limit, recipe.stage, checked, mask, context_tokens, answer_tokens)
        tallies, entries = _write_shards(context, directory, inputs, like, _dtype(encoder.tokenizer))
        pretrained.copy_files(tokenizer, directory / "tokenizer")
        files.write_text(directory / "chat_template.jinja", encoder.template.source)
        return _make_manifest(recipe, directory, tallies, entries, encoder) | {"context_tokens": context_tokens}

    depends_on = {
        "version": VERSION,
        "inputs": [item.identity() for item in inputs],
        "tokenizer": pretrained.fingerprint(tokenizer),
        "template": encoder.template.source,
        "rules": rules,
        "limit": limit,
        "stage": recipe.stage,
        "checked": checked,
        "mask": sorted(mask),
        "held_out": [recipe.data.held_out_fraction, recipe.data.held_out_documents],
        "dedup": recipe.data.dedup.method,
        "broken": recipe.data.max_broken_fraction,
    }
    if encoder.tokenizer.bos and not encoder.tokenizer.begins:
        depends_on["begins"] = False  # former versions began documents with it all the same
    size = sum(path.stat().st_size for item in inputs for path in item.paths)
    step = context.cache.step("dialogues", depends_on, make, 4 * size)
    context.say(step, _describe_step(step.manifest))
    return step


def check_rows(recipe: Recipe, inputs: Sequence[Input]) -> None:
    """Raise UserError if too many rows have a form that make_shards would not accept; needs no tokenizer.

    Also raises it for stage sft, if all sources are local files and no first block has a dialogue. Reads a source of
    one block whole, of a longer one only the first rows. If a source of one block fails, its broken rows are written to
    a file in data.cache_dir.
    """
    allowed, cache = recipe.data.max_broken_fraction, Path(recipe.data.cache_dir)
    formats = templates.FORMATS if recipe.stage == "sft" else encode.FORMATS
    read, inputs = partial(_check_forms, recipe.stage), [replace(item, text_field=readers.WHOLE_ROW) for item in inputs]
    parsing.check_first_rows(inputs, allowed, parsing.Reader(parsing.dialogue_blocks, read, formats))
    counts, lines = list[parsing.RowCounts](), list[str]()
    for item in inputs:
        blocks = list(itertools.islice(parsing.dialogue_blocks(item, ignore_progress), 2))
        if len(blocks) == 1:
            rows, broken = read(blocks[0], item, None)
            counts.append(parsing.RowCounts(item.source, rows, len(broken), bool(blocks[0].cut)))
            lines += [parsing.json_line(item.source, row) for row in broken]
    with tempfile.TemporaryDirectory() as directory:
        files.write_text(Path(directory) / "broken.jsonl", "".join(lines))
        if lines:
            cache.mkdir(parents=True, exist_ok=True)
        parsing.check_broken_rows(Path(directory), counts, allowed, cache, formats)
    is_all = recipe.stage == "sft" and all(source.path for source in recipe.data.sources)
    if is_all and not any(map(_has_dialogue, inputs)):
        raise UserError(
            "data.sources has no dialogue: every row is a document",
            evidence=f"{inputs[0].paths[0]}: its rows have text alone",
            fix="write a dialogue a row, for example {messages: [{role, content}, ...]}; documents alone are for stage "
            "pretrain, which may start from a model too",
        )


def _has_dialogue(item: Input) -> bool:
    """Return whether any row of a source's first block is a dialogue. Raises UserError if the file is unreadable."""
    for block in itertools.islice(parsing.dialogue_blocks(item, ignore_progress), 1):
        for row in parsing.parse_dialogues(block):
            with suppress(Refused):
                if not isinstance(templates.read_messages(row.value), str):
                    return True
    return False


def _check_forms(stage: str, block: Block, item: Input, most: int | None) -> tuple[int, list[parsing.BrokenRow]]:
    """Return (number of rows read, the broken ones) of a block's first `most` rows, of all if None; tokenizes nothing.

    A row that would be left out is not broken. `item` is not used: it is there for parsing.Reader.
    """
    rows, broken = 0, list[parsing.BrokenRow]()
    for row in itertools.islice(parsing.parse_dialogues(block), most):
        rows, reason = rows + 1, row.broken
        try:
            if not reason and stage != "sft":
                encode.read_preference(row.value, needs_both=stage != "grpo")
            elif not reason and not isinstance(messages := templates.read_messages(row.value), str):
                templates.read_tools(row.value)
                templates.check_messages(messages, ())
        except LeftOut:
            continue
        except Refused as error:
            reason = str(error).encode("utf-8", "replace").decode()
        if reason:
            broken.append((block.path, row.line, reason, row.excerpt()))
    return rows, broken


def settings(recipe: Recipe) -> dict[str, object]:
    """Return the recipe's values that decide tokens and masks of a row, by section, to compare with prepared data."""
    sections = recipe.model_dump(
        mode="json",
        include={
            "batch": {"sequence_length"},
            "chat": {"system", "overlong"},
            "sft": _SFT,
            "grpo": {"max_new_tokens"},
            "data": {"clean": {"mask"}},
        },
    )
    if checked := encode.checking_rules(recipe):  # other terms decide no token
        sections["grpo"]["checked"] = list(checked)
    if ends := _named_ends(recipe):
        sections["tokenizer"] = ends
    return sections


def _named_ends(recipe: Recipe) -> dict[str, object]:
    """Return {key: value} of tokenizer's keys, not at their default, for documents' ends; {} unless stage is sft."""
    keys = {"add_bos", "document_begin", "document_end"} if recipe.stage == "sft" else set()
    return recipe.tokenizer.model_dump(include=keys, exclude_defaults=True)


def encode_block(task: Task, most: int | None = None) -> Encoded:
    """Return a block's dialogues, or those of its first `most` rows, as tokens and masks, with counts of rows left out.

    Runs in a worker. Bad rows do not raise: they are listed in the result's `broken`.
    """
    encoder = encode.encoder(task.tokenizer, task.rules, task.limit)
    mask = make_mask(task.mask)
    known = templates.KNOWN if task.stage == "sft" else encode.KNOWN
    result = Encoded(task.number)
    for row in itertools.islice(parsing.parse_dialogues(task.block), most):
        result.counts["rows"] += 1
        broken = row.broken
        asked = templates.suggest_key(tuple(row.value), known) if isinstance(row.value, dict) else ""
        try:
            if not broken and task.stage == "sft":
                _add(result, encoder, mask, row.value, task)
            elif not broken:
                _add_preference(result, encoder, mask, row.value, task)
            result.unread.update([asked] if asked else [])
        except LeftOut as error:
            result.left_out[str(error)] += 1
        except Refused as error:
            broken = str(error).encode("utf-8", "replace").decode() + (f"; {asked}" if asked else "")
        except UnicodeEncodeError:
            broken = "half of a surrogate pair in the text"
        if broken:
            result.broken.append((task.block.path, row.line, broken, row.excerpt()))
    return result


def _add(result: Encoded, encoder: encode.Encoder, mask: Mask, row: Any, task: Task) -> None:
    """Encode a row of sft, masked by `mask`, and append it to the block's result with its counts.

    Raises Refused or LeftOut with the reason, UnicodeEncodeError for half of a surrogate pair.
    """
    read, tools = templates.read_messages(row), templates.read_tools(row)
    if isinstance(read, str):
        document = mask(read)
        text, alike = document.encode(), document.strip().encode()
        pieces, text_bytes = [encoder.document(document)], len(text)
        result.counts["documents"] += 1
    else:
        messages = _mask_messages(read, mask)
        text, alike = (
            json.dumps([*said, tools] if tools else said, ensure_ascii=False).encode()
            for said in (messages, _mask_messages(messages, str.strip))
        )
        templates.check_messages(messages, encoder.tokenizer.control)
        text_bytes = sum(len(message["content"].encode()) for message in messages)
        pieces = list(encoder.pieces(messages, result.counts, tools))
        result.counts["dialogues"] += 1
        if result.counts["checked"] < CHECKED:
            result.counts["checked"] += 1
            for what, holds in encoder.round_trip(messages, tools).items():
                result.counts[f"{what} differs"] += not holds
    result.counts[BEYOND] += any(len(piece.ids) - 1 > task.context for piece in pieces)  # the last is no input
    _append(result, pieces, _digest(text, 16) + _digest(alike, 16), text_bytes)


def _add_preference(result: Encoded, encoder: encode.Encoder, mask: Mask, row: Any, task: Task) -> None:
    """Encode a row of preferences or prompts, masked by `mask`, and append it to the block's result with its counts.

    Raises Refused or LeftOut with the reason, UnicodeEncodeError for half of a surrogate pair.
    """
    preference = read_preference(row, mask, needs_both=task.stage != "grpo")
    prompt = preference.prompt
    texts = [*(message["content"] for message in prompt), preference.chosen or "", preference.rejected or ""]
    text_bytes = sum(len(text.encode("utf-8")) for text in texts)
    (preference.answer or "").encode("utf-8")  # raises here as those do, not within the tokenizer
    pieces = encode.encode_preference(encoder, preference, task.stage, task.limit, task.checked)
    result.counts["preferences"] += 1
    asks = [text.strip() for text in texts[:-2]]  # blanks around it make no other prompt
    hashes = b"".join(_digest(json.dumps(part).encode(), 16) for part in (texts, asks))
    asked = encoder.tokenizer.encode(encoder.template.render(prompt, generation=True)[0])[0]
    longest = len(asked) + task.answer_tokens if task.stage == "grpo" else max(len(piece.ids) for piece in pieces)
    result.counts[BEYOND] += longest > task.context
    _append(result, pieces, hashes, text_bytes, asked)


def make_mask(kinds: Sequence[str]) -> Mask:
    """Return the function that masks these kinds of personal numbers in a text (data.clean.mask); `str` for none."""
    return normalize.make_masker(kinds) if kinds else str


def read_preference(row: Any, mask: Mask, needs_both: bool) -> encode.Preference:
    """Return the row's preference with `mask` applied to prompt, chosen and rejected, not to the right answer.

    Raises Refused for a row of another form, or without both answers if `needs_both`; LeftOut if they are the same.
    """
    read = encode.read_preference(row, needs_both)
    chosen, rejected = (mask(text) if text else None for text in (read.chosen, read.rejected))
    return read._replace(prompt=_mask_messages(read.prompt, mask), chosen=chosen or None, rejected=rejected or None)


def _mask_messages(messages: list[Message], mask: Mask) -> list[Message]:
    """Return copies of the messages with `mask` applied to their content and to the arguments of tool calls."""
    masked = ("content", "tool_calls")
    return [{k: _mask_values(v, mask) if k in masked else v for k, v in message.items()} for message in messages]


def _mask_values(value: Any, mask: Mask) -> Any:
    """Return a copy of a JSON value with `mask` applied to all its strings except keys."""
    if isinstance(value, dict):
        return {key: _mask_values(inner, mask) for key, inner in value.items()}
    if isinstance(value, list):
        return [_mask_values(inner, mask) for inner in value]
    return mask(value) if isinstance(value, str) else value


def _append(
    result: Encoded, pieces: list[encode.Encoded], hashes: bytes, text_bytes: int, prompt: Sequence[int] = ()
) -> None:
    """Append a dialogue's pieces to the block's result.

    `hashes` has 16 bytes of all of it, and 16 of what training and held-out dialogues may not share: all but blanks, or
    a preference's prompt, whose tokens are `prompt`. `text_bytes` is the size of its text, divided among the pieces.
    """
    number = len(result.hashes) // 32
    for piece in pieces:
        alike = int.from_bytes(_digest(array("I", prompt or piece.ids).tobytes(), 8), "little")
        result.ids.extend(piece.ids)
        result.mask += piece.mask
        result.pieces.append((len(piece.ids), text_bytes // len(pieces), number, alike))
    result.hashes += hashes


def _digest(data: bytes, size: int) -> bytes:
    """Return the BLAKE2b hash of data in `size` bytes."""
    return hashlib.blake2b(data, digest_size=size).digest()


def _write_shards(
    context: Context, directory: Path, inputs: Sequence[Input], like: Task, dtype: np.dtype[Any]
) -> tuple[list[Tally], list[ShardEntry]]:
    """Encode all inputs, write their shards and broken.jsonl, and return (counts, the manifest's entries).

    `like` has the settings of every task. Reads the first rows of each input before all, starts workers and shows a
    progress bar. Raises UserError when too many rows of a source are broken, or it has nothing left to train on.
    """
    data, formats = context.data, templates.FORMATS if like.stage == "sft" else encode.FORMATS
    first = parsing.Reader(parsing.dialogue_blocks, partial(_check_first, like), formats)
    parsing.check_first_rows(inputs, data.max_broken_fraction, first)
    tallies = [Tally(item) for item in inputs]
    spool = Spool(directory, dtype)
    total = sum(path.stat().st_size for item in inputs for path in item.paths)
    used = max(1, total // readers.BLOCK_BYTES)
    with (
        (directory / "broken.jsonl").open("w", encoding="utf-8") as broken,
        bar("dialogues", total, fast_bytes=5_000_000) as advance,
        context.local.start(used) as run,
    ):
        tasks = (
            replace(like, number=number, block=block)
            for number, item in enumerate(inputs)
            for block in parsing.dialogue_blocks(item, advance)
        )
        for encoded in run(encode_block, tasks):
            tallies[encoded.number].add(encoded)
            spool.add(encoded)
            broken.writelines(parsing.json_line(inputs[encoded.number].source, row) for row in encoded.broken)
    read = [parsing.RowCounts(t.item.source, t.counts["rows"], t.counts["broken"], t.is_cut) for t in tallies]
    parsing.check_broken_rows(directory, read, data.max_broken_fraction, context.cache.directory, formats)
    entries = spool.split(tallies, data)
    used_entries = {tally.item.entry for tally in tallies if tally.counts["kept"]}
    for tally in tallies:
        if tally.item.entry not in used_entries:
            unused = ("duplicate", "equals_held_out", "reserved", "held_out")
            counts = Counter({name: tally.counts[name] for name in unused})
            raise UserError(
                f"source {tally.item.source} has nothing to train on",
                evidence=parsing.format_reasons(+counts + tally.refused),
                fix=f"take {tally.item.entry or 'it'} out, or look at batch.sequence_length where rows are too long, "
                "data.dedup, data.held_out_fraction and data.max_broken_fraction",
            )
    return tallies, entries


def _check_first(like: Task, block: Block, item: Input, most: int) -> tuple[int, list[parsing.BrokenRow]]:
    """Return (number of rows read, broken ones) of a block's first `most` rows, encoded as `like`; `item` is unused."""
    result = encode_block(replace(like, block=block), most)
    return result.counts["rows"], result.broken


def _make_manifest(
    recipe: Recipe, directory: Path, tallies: Sequence[Tally], entries: Sequence[ShardEntry], encoder: encode.Encoder
) -> dict[str, object]:
    """Write documents.json into `directory`, which has the tokenizer already; return the content of manifest.json."""
    tokenizer = encoder.tokenizer
    shards.write_description(directory, tallies, entries)
    return {
        "version": VERSION,
        "stage": recipe.stage,
        "settings": settings(recipe),
        "dtype": _dtype(tokenizer).name,
        "vocab_size": tokenizer.vocab_size,
        "bos_id": tokenizer.bos[1] if tokenizer.bos else -1,
        "eos_id": tokenizer.eos[1],
        "end_of_turn_id": encoder.end_id,
        "add_bos": tokenizer.bos is not None,
        "encoder": tokenizer.library,
        "tokenizer_sha256": files.sha256_json(pretrained.fingerprint(directory / "tokenizer")),
        "totals": totals(entries),
        "shards": [entry.to_json() for entry in entries],
        "dialogues": shards.by_source(tallies, "counts"),
        **{name: shards.by_source(tallies, name) for name in ("refused", "broken", "unread")},
    }


def _dtype(tokenizer: pretrained.Tokenizer) -> np.dtype[Any]:
    """Return the dtype of token ids: little-endian uint16, or uint32 for a vocabulary above 65,536."""
    return np.dtype("<u2" if tokenizer.vocab_size <= 65536 else "<u4")


def _describe_step(manifest: Mapping[str, Any]) -> str:
    """Return the line to print about the step: dialogues, tokens, and what was left out."""
    train = manifest["totals"]["train"]
    tokens = sum(row["tokens"] for row in train.values())
    learnt = sum(row["learnt"] for row in train.values())
    counts, refused = (shards.sum_counts(manifest, name) for name in ("dialogues", "refused"))
    text = f"{counts['kept']:,} dialogues, {tokens:,} tokens, {learnt / max(1, tokens):.1%} learnt from"
    left_out = encode.LEFT_OUT
    for name, said in (("split", "split"), ("truncated", "cut"), (left_out, f"{left_out} left out")):
        text += f"; {counts[name]:,} {said}" if counts[name] else ""
    if counts[BEYOND]:
        text += f"; {counts[BEYOND]:,} longer than the start model's context of {manifest['context_tokens']:,} tokens"
    for reason, count in sorted(refused.most_common(), key=lambda item: not readers.is_cut(item[0]))[:3]:
        text += f"; {count:,} left out: {reason}" + (", the rest not read" if readers.is_cut(reason) else "")
    return text
