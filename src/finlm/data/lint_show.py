"""The label lint for people: what was counted, and rows as the model will see them, the learnt words in colour."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from finlm.base import screen
from finlm.data import chat_tokens, dialogue_rows, lint
from finlm.data.chat_encode import LEFT_OUT
from finlm.data.shards import IGNORED, Shards
from finlm.recipe.schema import Recipe

LEARNT, CONTEXT, MARK = "bold green", "", "cyan"


def summary(recipe: Recipe, shards: Shards, seen: lint.Seen) -> None:
    """The shares, and why rows were left out."""
    counts = sum((Counter(row) for row in shards.manifest.get("dialogues", {}).values()), Counter[str]())
    rows = [
        ["dialogues kept", f"{counts['kept']:,} of {counts['rows']:,} rows; {counts['held_out']:,} held out"],
        ["duplicates", f"{counts['duplicate']:,}"],
        ["longer than a row", f"{counts['split']:,} split, {counts['truncated']:,} cut"],
        ["exchanges left out", f"{counts[LEFT_OUT]:,} longer than a row"],
        ["learnt from", f"{seen.learnt / max(1, seen.tokens):.1%} of the tokens of {seen.rows:,} rows"],
        ["end of turn learnt", f"{seen.ended:,} of {seen.dialogues - seen.unlearnt:,} dialogues"],
        ["dialogues a row", f"{seen.dialogues / max(1, seen.rows):.2f}"],
        ["padding", f"{seen.padding / max(1, seen.padding + seen.tokens):.1%}, {seen.padded:,} labels on it"],
    ]
    for source, reasons in shards.manifest.get("refused", {}).items():
        rows += [[f"left out of {source}", f"{count:,}: {reason}"] for reason, count in Counter(reasons).most_common(5)]
    screen.heading("labels")
    screen.table(["", ""], rows)


def findings(found: Sequence[lint.Finding]) -> None:
    """Each with its numbers and the way out."""
    if not found:
        screen.say("lint: nothing wrong")
    for finding in found:
        screen.say(f"{finding.level}: {finding.check}: {finding.evidence}")
        screen.say(f"  fix: {finding.fix}")


def rows(recipe: Recipe, shards: Shards, count: int) -> None:
    """The first rows of the data: what is learnt between ⟦ ⟧, bold and green on a terminal."""
    library = recipe.sft.tokenizer if recipe.sft else "auto"
    tokenizer = chat_tokens.open_tokenizer(Path(shards.directory) / "tokenizer", library)
    data = dialogue_rows.train_rows(shards, recipe)
    ids = np.arange(min(count, len(data)))
    for row, inputs, labels, documents in zip(ids, *data.read(ids), data.documents(ids), strict=True):
        used = int((documents >= 0).sum())
        screen.say(
            f"\n-- row {row}: {documents.max() + 1} dialogues, {used:,} tokens, "
            f"{int((labels != IGNORED).sum()):,} learnt, {len(inputs) - used:,} padding"
        )
        for number in range(int(documents.max()) + 1):
            here = np.flatnonzero(documents == number)
            screen.painted(_painted(tokenizer, inputs[here], labels[here]))
        if (outside := documents < 0).any() and (labels[outside] != IGNORED).any():
            filler = tokenizer.decode([int(inputs[-1])])
            screen.painted([("padding: ", MARK), (f"⟦{filler}⟧ x {outside.sum():,}", LEARNT)])


def _painted(
    tokenizer: chat_tokens.Tokenizer, inputs: npt.NDArray[np.int64], labels: npt.NDArray[np.int64]
) -> list[tuple[str, str]]:
    """A dialogue's stretches with their styles; a token is learnt when the label of the place before it counts."""
    ids = [*map(int, inputs)]
    learnt = [False, *(int(label) != IGNORED for label in labels[:-1])]
    if int(labels[-1]) != IGNORED:  # the last label's token, which is no input
        ids.append(int(labels[-1]))
        learnt.append(True)
    parts, start = [(f"[{len(ids):,} tokens] ", MARK)], 0
    while start < len(ids):
        stop = next((n for n in range(start, len(ids)) if learnt[n] != learnt[start]), len(ids))
        text = tokenizer.decode(ids[start:stop])
        parts.append((f"⟦{text}⟧", LEARNT) if learnt[start] else (text, CONTEXT))
        start = stop
    return parts
