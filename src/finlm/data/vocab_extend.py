"""More Chinese in an existing Llama-style vocabulary: old ids stay, new pieces follow (XuanYuan's 32,000 -> 39,438).

Llama-2 spells most Chinese characters as three bytes. Added are the characters it lacks, the most frequent first, then
the longer pieces that sentencepiece learns from the sample's runs of ideographs. Longest 1 adds characters only, as
XuanYuan did; where the sample has too few, those of GB 2312 follow, then Unicode's order.

A new piece stands after the old ones in id and below them in score, so old merges go first, and it is Chinese only, so
text without Chinese cannot hold it and is encoded as before. A piece that no merges reach (an old one cuts through it)
would be a row that is never used: such pieces are found by encoding each alone, dropped and counted.
"""

from __future__ import annotations

import io
import itertools
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sentencepiece
from sentencepiece.sentencepiece_model_pb2 import ModelProto, TrainerSpec

from finlm.base.errors import UserError
from finlm.data import vocab

_IDEOGRAPHS = "\u3005-\u3007\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
# CJK and full-width punctuation; not the dashes and quotation marks that Chinese shares with other scripts.
_MARKS = "\u3001-\u3004\u3008-\u303f\uff01-\uff60\uffe0-\uffe6"
CHINESE = re.compile(f"[{_IDEOGRAPHS}{_MARKS}]")
_RUN = re.compile(f"[{_IDEOGRAPHS}]+")
_MARK = re.compile(f"[{_MARKS}]")


@dataclass(frozen=True)
class Sample:
    """What is Chinese in the sampled text: how often each run of ideographs and each mark occurs."""

    runs: Counter[str]
    marks: Counter[str]

    @classmethod
    def of(cls, lines: Iterable[str]) -> Sample:
        """Count the lines; 2.5 bytes of memory for each byte of 20 MB, less for more text."""
        sample = cls(Counter(), Counter())
        for line in lines:
            sample.runs.update(_RUN.findall(line))
            sample.marks.update(_MARK.findall(line))
        return sample

    def characters(self) -> list[tuple[str, int]]:
        """Every Chinese character with its count, the most frequent first, equal ones in Unicode's order."""
        counts = Counter(self.marks)
        for run, count in self.runs.items():
            for character in run:
                counts[character] += count
        return sorted(counts.items(), key=lambda item: (-item[1], item[0]))


def load(path: Path) -> Any:
    """The ModelProto of a vocabulary that can be extended. Raises UserError."""
    processor = vocab.load(path)
    model = ModelProto.FromString(path.read_bytes())
    if model.trainer_spec.model_type != TrainerSpec.BPE or not model.trainer_spec.byte_fallback:
        kind = TrainerSpec.ModelType.Name(model.trainer_spec.model_type).lower()
        raise UserError(
            f"{path} cannot be extended: it is not a BPE vocabulary with byte fallback, as Llama's is",
            evidence=f"model_type {kind}, byte_fallback {model.trainer_spec.byte_fallback}",
            fix="use it as it is (without tokenizer.extend_to), or give Llama-2's",
        )
    if processor.eos_id() < 0:
        raise UserError(f"{path} has no end-of-document piece (</s>)", fix="use a tokenizer with an eos id")
    return model


def extend(
    base: Any, lines: Iterable[str], directory: Path, size: int, longest: int, character_coverage: float
) -> dict[str, Any]:
    """Write directory/tokenizer.model with the pieces of base and new ones up to size; the manifest.

    New pieces have at most `longest` characters; the characters added cover that share of the sample's Chinese unless
    longest is 1. Raises UserError when the sample has too few.
    """
    old = len(base.pieces)
    if size <= old:
        raise UserError(f"tokenizer.extend_to {size:,} adds nothing to {old:,} pieces", fix=f"set more than {old}")
    sample = Sample.of(lines)
    if not sample.runs:
        raise UserError("the sample holds no Chinese to extend the tokenizer with", fix="correct data.sources")
    known = {piece.piece for piece in base.pieces}
    chosen, dead = _living(base, _candidates(sample, known, size - old, longest, character_coverage), size - old)
    if len(chosen) < size - old:
        raise UserError(
            f"tokenizer.extend_to {size:,} is too large for this text",
            evidence=f"{old:,} old pieces, {len(chosen):,} new ones found",
            fix=f"set tokenizer.extend_to to at most {old + len(chosen)}, or add text: tokenizer.sample_bytes, "
            "data.sources",
        )
    model = extended(base, chosen)
    (directory / "tokenizer.model").write_bytes(model.SerializeToString())
    seen = {character for character, _ in sample.characters()}
    return vocab.describe(directory / "tokenizer.model") | {
        "old_pieces": old,
        "new_characters": sum(len(piece) == 1 for piece in chosen),
        "new_longer_pieces": sum(len(piece) > 1 for piece in chosen),
        "not_in_sample": sum(len(piece) == 1 and piece not in seen for piece in chosen),
        "dead_pieces_dropped": len(dead),
    }


def extended(base: Any, pieces: Sequence[str]) -> Any:
    """base with pieces after its own, each with a score below all before it.

    trainer_spec.vocab_size is then the number of old pieces: train/embeddings.py reads there which rows are new.
    """
    model = ModelProto.FromString(base.SerializeToString())
    model.trainer_spec.vocab_size = len(base.pieces)
    lowest = min(piece.score for piece in base.pieces)
    for place, piece in enumerate(pieces, start=1):
        model.pieces.add(piece=piece, score=lowest - place)
    return model


def check_unchanged(old: Any, new: Any, texts: Iterable[str]) -> int:
    """Encode old's own pieces and the texts, all without their Chinese, with both processors; how many there were.

    Raises RuntimeError where the ids differ, which is a bug here.
    """
    pieces = (old.id_to_piece(number).replace("▁", " ") for number in range(old.vocab_size()))
    count = 0
    for text in itertools.chain(pieces, texts):
        plain = CHINESE.sub("", text)
        if old.encode(plain) != new.encode(plain):
            raise RuntimeError(f"the extended tokenizer encodes {plain[:200]!r} in another way than the old one")
        count += 1
    return count


def is_extension(model: Path, base: Path, size: int) -> bool:
    """Whether a tokenizer.model has that size and begins with the pieces of another."""
    found, old = (ModelProto.FromString(path.read_bytes()) for path in (model, base))
    return len(found.pieces) == size and list(found.pieces[: len(old.pieces)]) == list(old.pieces)


def _candidates(sample: Sample, known: set[str], wanted: int, longest: int, coverage: float) -> list[str]:
    """New pieces in the order in which they are taken, some more than wanted."""
    counted = sample.characters()
    if longest == 1:
        every = itertools.chain((character for character, _ in counted), _gb2312(), map(chr, range(0x4E00, 0xA000)))
        return [character for character in dict.fromkeys(every) if character not in known]
    enough = coverage * sum(count for _, count in counted)
    before = itertools.accumulate((count for _, count in counted), initial=0)
    covering = [character for (character, _), sum_before in zip(counted, before, strict=False) if sum_before < enough]
    characters = [character for character in covering if character not in known]
    usable = known.union(characters)
    in_known = sum(len(piece) > 1 and _RUN.fullmatch(piece) is not None for piece in known)
    longer = _learn(sample.runs, 2 * wanted + in_known, longest)  # twice: some will be dead
    return characters + [piece for piece in longer if piece not in known and usable.issuperset(piece)]


def _learn(runs: Counter[str], wanted: int, longest: int) -> list[str]:
    """About `wanted` pieces of two or more ideographs in the order in which BPE merges them, fewer in a short text."""
    model = io.BytesIO()
    different = len(set().union(*runs))
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=(f"{run}\t{count}" for run, count in runs.items()),
        input_format="tsv",  # a run and its count: the same pieces as from the text
        model_writer=model,
        model_type="bpe",
        vocab_size=different + 3 + wanted,
        hard_vocab_limit=False,
        character_coverage=1.0,
        normalization_rule_name="identity",
        add_dummy_prefix=False,
        max_sentencepiece_length=longest,
        num_threads=1,
        minloglevel=2,
    )
    return [piece.piece for piece in ModelProto.FromString(model.getvalue()).pieces[3:] if len(piece.piece) > 1]


def _living(base: Any, candidates: list[str], wanted: int) -> tuple[list[str], set[str]]:
    """The first `wanted` candidates that encode to themselves, and those dropped because they do not."""
    dropped: set[str] = set()
    while True:
        chosen = list(itertools.islice((piece for piece in candidates if piece not in dropped), wanted))
        dead = _dead(extended(base, chosen), len(base.pieces))
        if not dead:
            return chosen, dropped
        dropped |= dead


def _dead(model: Any, old: int) -> set[str]:
    """The new pieces that no merges lead to; whether one is reached inside a text depends on its own merges only."""
    alone = ModelProto.FromString(model.SerializeToString())
    alone.normalizer_spec.add_dummy_prefix = False
    processor = sentencepiece.SentencePieceProcessor(model_proto=alone.SerializeToString())
    new = [piece.piece for piece in model.pieces[old:]]
    encoded = processor.encode(new)
    return {piece for place, (piece, ids) in enumerate(zip(new, encoded, strict=True), old) if ids != [place]}


def _gb2312() -> Iterator[str]:
    """The 6,763 characters of GB 2312 in its order: the common ones by sound, then the rest by radical."""
    for lead, trail in itertools.product(range(0xB0, 0xF8), range(0xA1, 0xFF)):
        yield from bytes((lead, trail)).decode("gb2312", errors="ignore")
