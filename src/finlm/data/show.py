"""What `prepare` shows of the result: tokens by source as a run will read them, and packed rows as text.

A row is printed as the model sees it: every document on its own lines below a rule with its number and tokens, and
tokens whose label does not count between ⟦ and ⟧. Nothing is decided here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from finlm.base import screen
from finlm.data import dialogue_rows, mixture, packed, vocab
from finlm.data.shards import IGNORED, Rows, Shards
from finlm.recipe.schema import Recipe

_CONTROL = str.maketrans({code: f"\\x{code:02x}" for code in (*range(9), *range(11, 32), 127)})


def run_tokens(recipe: Recipe, shards: Shards) -> int:
    """Tokens that the recipe's run reads, as far as the recipe alone says it."""
    train, step = recipe.train, recipe.batch.tokens_per_step
    if train.steps is not None:
        return train.steps * step
    if train.tokens is not None:
        return train.tokens
    return int((train.epochs or 1) * epoch_tokens(recipe, shards))


def epoch_tokens(recipe: Recipe, shards: Shards) -> int:
    """Tokens of a pass over the training rows of prepared shards; rows that are not filled count as full."""
    return len(dialogue_rows.of(shards, recipe)) * recipe.batch.sequence_length


def reading(recipe: Recipe, shards: Shards) -> dict[str, Any]:
    """How a run reads the shards: {packing, rows, sources: [{source, tokens, share, epochs, share_by_part}]}."""
    length = recipe.batch.sequence_length
    rows = dialogue_rows.of(shards, recipe)
    ranges = rows.source_ranges()
    tokens = run_tokens(recipe, shards)
    run_rows = max(1, tokens // length)
    if recipe.data.mixture:
        mixture.check(recipe.data.mixture, tokens)
        parts = mixture.parts(ranges, recipe.data.mixture, run_rows, length)
    else:
        sizes = tuple(len(part) for part in ranges.values())
        whole = mixture.Part(0, sum(sizes), sizes)
        parts = [whole]
    sources = mixture.drawn(ranges, parts, length)
    if not recipe.data.mixture:
        epochs = run_rows / max(1, len(rows))
        sources = [row | {"tokens": round(row["tokens"] * epochs), "epochs": epochs} for row in sources]
    how = dialogue_rows.how(recipe) if "stage" in shards.manifest else recipe.data.packing
    return {"packing": how, "sequence_length": length, "rows": len(rows), "sources": sources}


def say_reading(about: dict[str, Any]) -> None:
    """One line a source."""
    screen.say(f"rows: {about['rows']:,} of {about['sequence_length']:,} tokens ({about['packing']}); the run reads")
    width = max(len(row["source"]) for row in about["sources"])
    for row in about["sources"]:
        parts = row["share_by_part"]
        change = f", {parts[0]:.1%} -> {parts[-1]:.1%}" if len(parts) > 1 else ""
        screen.say(
            f"  {row['source']:<{width}}  {row['tokens']:>15,} tokens  {row['share']:>6.1%}{change}"
            f"  ({row['epochs']:.2f} epochs)"
        )


def say_rows(recipe: Recipe, shards: Shards, count: int) -> None:
    """Print the first `count` rows of the run on stderr."""
    rows = packed.rows(shards, recipe.batch.sequence_length, recipe.data.packing)
    ranges = rows.source_ranges()
    run_rows = max(count, run_tokens(recipe, shards) // rows.sequence_length)
    order = mixture.order(ranges, recipe.data.mixture, run_rows, rows.sequence_length, recipe.train.seed)
    processor = vocab.load(shards.tokenizer)
    for position, row in enumerate(order[np.arange(count)].tolist()):
        source = next(name for name, part in ranges.items() if row in part)
        screen.say("\n".join(row_lines(rows, row, source, processor, position)))


def row_lines(rows: Rows | packed.PackedRows, row: int, source: str, processor: Any, position: int) -> list[str]:
    """A row as lines of text."""
    ids = np.array([row])
    (inputs,), (labels,) = rows.read(ids)
    (documents,) = rows.documents(ids)
    used, counted = int((documents >= 0).sum()), int((labels != IGNORED).sum())
    lines = [
        "",
        f"== position {position}: row {row:,} of {source}, {len(set(documents[documents >= 0].tolist()))} documents, "
        f"{used:,} tokens, {counted:,} labels, {len(inputs) - used:,} padding",
    ]
    for number in dict.fromkeys(documents[documents >= 0].tolist()):
        here = np.flatnonzero(documents == number)
        begins = int(inputs[here[0]]) == processor.bos_id() if processor.bos_id() >= 0 else here[0] > 0
        lines.append(f"-- document {number + 1}, {len(here):,} tokens{'' if begins else ', continued'}")
        lines += _text(processor, inputs[here], labels[here] == IGNORED).translate(_CONTROL).split("\n")
    return lines


def _text(processor: Any, ids: Sequence[int], masked: Sequence[bool]) -> str:
    """Decoded tokens; runs whose label does not count between ⟦ and ⟧, control pieces by name."""
    text, run = "", list[int]()
    names = {processor.bos_id(): "<s>", processor.eos_id(): "</s>"}

    def flush() -> str:
        decoded = str(processor.decode(run)) if run else ""
        run.clear()
        return decoded

    inside = False
    for token, is_masked in zip(map(int, ids), masked, strict=True):
        if bool(is_masked) != inside:
            text += flush() + ("⟦" if is_masked else "⟧")
            inside = bool(is_masked)
        if token in names:
            text += flush() + names[token]
        else:
            run.append(token)
    return text + flush() + ("⟧" if inside else "")
