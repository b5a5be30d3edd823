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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from finlm.base import files
from finlm.base.errors import UserError
from finlm.data import (
    chat,
    chat_encode,
    chat_read,
    chat_tokens,
    clean_pii,
    cut_files,
    dialogue_blocks,
    dialogue_shards,
    pairs,
    readers,
    step_sources,
    workers,
)
from finlm.data.chat import Message, Refused
from finlm.data.context import Context
from finlm.data.dialogue_shards import Encoded, Piece, Tally, Writer
from finlm.data.readers import Block
from finlm.data.shards import Split
from finlm.data.sources import Input
from finlm.data.steps import Step, bar
from finlm.recipe.schema import Recipe
from finlm.recipe.schema_post import Sft

VERSION = 3
CHECKED = 50  # dialogues of each block whose text and prompt are encoded and decoded once more
_SFT = {"assistant_only_loss", "answer_apart", "mask_eos", "tokenizer"}  # decide tokens; the rest is about rows


@dataclass(frozen=True)
class Task:
    """A block to encode."""

    number: int  # of the input
    block: Block
    tokenizer: Path
    rules: str
    limit: int
    stage: str
    needs_letter: bool
    mask: tuple[str, ...]  # kinds of personal numbers


Mask = Callable[[str], str]


def run(context: Context, tokenizer: Path) -> Step:
    """The shards directory of the recipe's dialogues; tokenizer is the directory of the model it starts from."""
    recipe = context.recipe
    assert recipe.chat is not None
    sft = recipe.sft or Sft()
    inputs = [replace(item, text_field=readers.WHOLE_ROW) for item in step_sources.inputs(context)]
    rules = f"{recipe.chat.model_dump_json()}\n{sft.model_dump_json(include=_SFT)}"
    limit = pairs.longest(recipe) or recipe.batch.sequence_length + 1  # T inputs and the label of the last
    encoder = chat_encode.encoder(tokenizer, rules, limit)
    check_template(recipe.chat.template, encoder)
    mask, needs_letter = recipe.data.clean.mask, pairs.by_letter(recipe)

    def make(directory: Path) -> dict[str, Any]:
        like = Task(0, Block("jsonl", Path(), 1, b""), tokenizer, rules, limit, recipe.stage, needs_letter, mask)
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
        "needs_letter": needs_letter,
        "mask": sorted(mask),
        "held_out": [recipe.data.held_out_fraction, recipe.data.held_out_documents],
        "dedup": recipe.data.dedup.method,
        "broken": recipe.data.max_broken_fraction,
    }
    size = sum(path.stat().st_size for item in inputs for path in item.paths)
    step = context.cache.step("dialogues", depends_on, make, 4 * size)
    context.say(step, _sentence(step.manifest))
    return step


def settings(recipe: Recipe) -> dict[str, Any]:
    """The sections of a recipe as far as they decide the tokens and masks of a row, for data.prepared."""
    kept: dict[str, Any] = {"batch": {"sequence_length"}, "chat": {"system", "overlong"}, "sft": _SFT}
    found = recipe.model_dump(mode="json", include=kept | {"grpo": {"max_new_tokens"}, "data": {"clean": {"mask"}}})
    if pairs.by_letter(recipe):  # which reward model it is otherwise decides no token
        found["grpo"]["reward"] = "choice"
    return found


def check_template(name: str, encoder: chat_encode.Encoder) -> None:
    """Raises UserError for a template that takes no dialogue, or not today's, or needs tokens that are not there."""
    tokenizer = encoder.tokenizer
    missing = [token for token in chat.NEEDED.get(name, ()) if token not in tokenizer.control]
    if missing:
        raise UserError(
            f"chat.template {name} needs tokens that this tokenizer does not have: {', '.join(missing)}",
            evidence=f"its control tokens: {', '.join(tokenizer.control)}",
            fix="choose xuanyuan or llama2, which end a turn with </s>, or model, the tokenizer's own",
        )
    try:
        encoder.template.render(chat.PROBE)
    except Refused as error:
        if "strftime_now" in str(error):
            raise UserError(
                f"chat.template {name} writes today's date into every dialogue: tomorrow's data would be other data",
                evidence=str(error),
                fix="save the template as a file with a date in the place of strftime_now(...), and name it here",
            ) from None
        raise UserError(
            f"chat.template {name} does not take a question and its answer",
            evidence=str(error),
            fix="choose another template, or where it wants a system prompt set chat.system",
        ) from None


def encode(task: Task) -> Encoded:
    """A block's dialogues as tokens. Runs in a worker."""
    encoder = chat_encode.encoder(task.tokenizer, task.rules, task.limit)
    mask = clean_pii.masker(task.mask) if task.mask else str
    block = task.block
    found = Encoded(task.number, cut=(str(block.path), block.first, block.cut) if block.cut else None)
    for row, broken in dialogue_blocks.rows(block):
        found.counts["rows"] += 1
        reason = broken
        try:
            if not broken and task.stage == "sft":
                _add(found, encoder, mask, row)
            elif not broken:
                _add_preference(found, encoder, mask, row, task)
        except Refused as error:
            reason = str(error).encode("utf-8", "replace").decode()
        except UnicodeEncodeError:
            reason = broken = "half of a surrogate pair in the text"
        if reason:
            found.refused[reason] += 1
            found.counts["broken"] += bool(broken)
    return found


def _add(found: Encoded, encoder: chat_encode.Encoder, mask: Mask, row: Any) -> None:
    messages = chat_read.messages_of(row)
    messages = mask(messages) if isinstance(messages, str) else _masked(messages, mask)
    canonical = json.dumps(messages, ensure_ascii=False).encode("utf-8")
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
    number = int.from_bytes(hashlib.blake2b(canonical, digest_size=8).digest(), "little")
    text_bytes = (
        len(messages.encode()) if isinstance(messages, str) else sum(len(m["content"].encode()) for m in messages)
    )
    _keep(found, pieces, number, text_bytes)


def _add_preference(found: Encoded, encoder: chat_encode.Encoder, mask: Mask, row: Any, task: Task) -> None:
    preference = pairs.preference_of(row)
    chosen, rejected = mask(preference.chosen or ""), mask(preference.rejected or "")
    prompt = _masked(preference.prompt, mask)
    texts = [*(message["content"] for message in prompt), chosen, rejected]
    text_bytes = sum(len(text.encode("utf-8")) for text in texts)
    (preference.answer or "").encode("utf-8")  # raises here as those do, not within the tokenizer
    preference = preference._replace(prompt=prompt, chosen=chosen or None, rejected=rejected or None)
    pieces = pairs.pieces(encoder, preference, task.stage, task.limit, task.needs_letter)
    found.counts["preferences"] += 1
    # The low half decides what is held out: all pairs of a prompt together.
    low, high = (hashlib.blake2b(json.dumps(part).encode(), digest_size=4).digest() for part in (texts[:-2], texts))
    _keep(found, pieces, int.from_bytes(low + high, "little"), text_bytes)


def _masked(messages: list[Message], mask: Mask) -> list[Message]:
    return [message | {"content": mask(message["content"])} for message in messages]


def _keep(found: Encoded, pieces: list[chat_encode.Encoded], number: int, text_bytes: int) -> None:
    for piece in pieces:
        found.ids.extend(piece.ids)
        found.mask += piece.mask
        found.pieces.append(Piece(len(piece.ids), text_bytes // len(pieces), len(found.dialogues)))
    found.dialogues.append(number)


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
            for block in dialogue_blocks.of(item, advance)
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
        "settings": settings(recipe),
        "dtype": _dtype(tokenizer).name,
        "vocab_size": tokenizer.vocab_size,
        "bos_id": tokenizer.bos[1] if tokenizer.bos else -1,
        "eos_id": tokenizer.eos[1],
        "end_of_turn_id": encoder.end_id,
        "add_bos": tokenizer.bos is not None,
        "encoder": tokenizer.library,
        "tokenizer_sha256": files.sha256_json(chat_tokens.fingerprint(directory / "tokenizer")),
        "totals": dialogue_shards.totals(entries),
        "shards": list(entries),
        "dialogues": dialogue_shards.by_source(tallies, "counts"),
        "refused": dialogue_shards.by_source(tallies, "refused"),
    }


def _dtype(tokenizer: chat_tokens.Tokenizer) -> np.dtype[Any]:
    return np.dtype("<u2" if tokenizer.vocab_size <= 65536 else "<u4")


def _sentence(manifest: Mapping[str, Any]) -> str:
    train = manifest["totals"]["train"]
    tokens = sum(row["tokens"] for row in train.values())
    learnt = sum(row["learnt"] for row in train.values())
    counts = sum((Counter(row) for row in manifest["dialogues"].values()), Counter[str]())
    refused = sum((Counter(row) for row in manifest.get("refused", {}).values()), Counter[str]())
    text = f"{counts['kept']:,} dialogues, {tokens:,} tokens, {learnt / max(1, tokens):.1%} learnt from"
    left_out = chat_encode.LEFT_OUT
    for name, said in (("split", "split"), ("truncated", "cut"), (left_out, f"{left_out} left out")):
        text += f"; {counts[name]:,} {said}" if counts[name] else ""
    for reason, count in sorted(refused.most_common(), key=lambda item: not cut_files.is_cut(item[0]))[:3]:
        text += f"; {count:,} left out: {reason}" + (", the rest not read" if cut_files.is_cut(reason) else "")
    return text
