"""Which passages `finlm self-qa` asks about: training documents drawn by hash, and a part of those that are long.

The order of the draw depends on the seed and the document alone: asking about more documents, or a corpus that grows,
keeps what was drawn before.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from finlm.data import dedup, documents, step_documents, step_selection, step_sources
from finlm.data.context import Context
from finlm.data.hashing import GOLDEN, mix
from finlm.data.steps import Cache
from finlm.recipe.schema import Recipe
from finlm.recipe.schema_self_qa import SelfQA

_ENDS = "。！？!?\n"


@dataclass(frozen=True)
class Passage:
    """What is asked about; `document` is the hash of the whole document."""

    document: str
    source: str
    text: str


def passages(recipe: Recipe, settings: SelfQA) -> list[Passage]:
    """The drawn passages, by the order of the draw: more documents are these and further ones."""
    cache = Cache(Path(recipe.data.cache_dir), build=True)
    with cache.locked():
        context = Context(recipe, cache)
        inputs = step_sources.inputs(context)
        read = step_documents.run(context, inputs)
        chosen = step_selection.run(context, read, inputs)
        chunks = list(documents.chunks(read.path, read.manifest))
        decision = dedup.read(chosen.path)
        hashes = np.concatenate([documents.read_index(chunk.path)["hash"] for chunk in chunks])
        order = mix(hashes[:, 0] ^ np.uint64(settings.seed * int(GOLDEN) % 2**64))
        order[decision != dedup.TRAIN] = np.iinfo(np.uint64).max
        count = min(settings.documents, int((decision == dedup.TRAIN).sum()))
        places = np.argsort(order, kind="stable")[:count]
        found: dict[int, Passage] = {}
        for chunk in chunks:
            wanted = np.zeros(chunk.rows.stop - chunk.rows.start, dtype=np.bool_)
            here = np.sort(places[(places >= chunk.rows.start) & (places < chunk.rows.stop)])
            wanted[here - chunk.rows.start] = True
            for place, text in zip(here.tolist(), documents.read_texts(chunk.path, wanted), strict=True):
                part = cut(text, settings.passage_characters, int(order[place]))
                found[place] = Passage(hashes[place].tobytes().hex(), chunk.source, part)
    return [found[place] for place in places.tolist()]


def cut(text: str, longest: int, draw: int) -> str:
    """The text, or the draw's part of a longer one, from the end of a sentence to the end of another where it can."""
    if len(text) <= longest:
        return text
    start = draw % (len(text) - longest + 1)
    after = next((at + 1 for at in range(start, min(start + longest // 3, len(text))) if text[at] in _ENDS), start)
    begin = 0 if start == 0 else after
    part = text[begin : begin + longest]
    last = max(part.rfind(end) for end in _ENDS)
    return part[: last + 1].strip() if last > longest // 2 and begin + longest < len(text) else part.strip()
