"""Train, copy or extend a sentencepiece BPE vocabulary.

Trained with Llama's settings, because transformers turns exactly these into LlamaTokenizer with the same ids: <unk> 0,
<s> 1, </s> 2, no padding; byte fallback, so that no text is unknown; identity normalisation, so that decoding gives
back the text; a space before the document (add_dummy_prefix) and none removed; single digits, as numbers are the point
of finance texts; pieces of at most 16 characters. A newline is the byte <0x0A>, as in Llama, never part of a piece.
32,000 pieces from 20 MB of text take 8 s and 0.6 GB, on one thread, so that the same sample always gives the same bytes
(threads win 7 %). What it is trained on is chosen in corpus/vocabulary.py.

Extended (XuanYuan's 32,000 -> 39,438), old ids stay and new pieces follow: the characters that it spells as bytes, the
most frequent first, then the longer pieces that sentencepiece learns from the sample's runs of ideographs. Longest 1
adds characters only, as XuanYuan did; where the sample has too few, those of GB 2312 follow, then Unicode order. A new
piece stands below the old ones in score, so old merges go first, and it is Chinese only, so text without Chinese cannot
hold it. Pieces that no merges reach are found by encoding each alone, dropped and counted.
"""

from __future__ import annotations

import io
import itertools
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import sentencepiece
from sentencepiece.sentencepiece_model_pb2 import ModelProto, TrainerSpec

from finlm.base import files
from finlm.base.errors import UserError

Described = dict[str, int | str]  # of a tokenizer, for manifests: sizes, special ids, hash
VERSION = 2
LIBRARY = str(sentencepiece.__version__)
UNK_ID, BOS_ID, EOS_ID = 0, 1, 2


def find(named: Path) -> Path:
    """Return the tokenizer's file: `named` itself, or tokenizer.json, else tokenizer.model, in the directory `named`.

    Raises UserError if the directory has neither. A file that is named may be missing.
    """
    if not named.is_dir():
        return named
    for name in ("tokenizer.json", "tokenizer.model"):
        if (named / name).is_file():
            return named / name
    raise UserError(
        f"{named} holds no tokenizer",
        evidence="looked for tokenizer.json and tokenizer.model",
        fix="put the tokenizer of the model there, or name its file in tokenizer.path",
    )


def load(path: Path) -> Any:
    """Return the SentencePieceProcessor of a tokenizer.model. Raises UserError when the file is missing or invalid."""
    try:
        return sentencepiece.SentencePieceProcessor(model_file=str(path))
    except (RuntimeError, OSError) as error:
        raise UserError(
            f"{path} is not a sentencepiece model",
            evidence=str(error) if path.exists() else "there is no such file",
            fix="fetch the file, for example `.venv/bin/hf download meta-llama/Llama-2-7b-hf tokenizer.model "
            f"--local-dir {path.parent}`; or train a tokenizer: tokenizer.vocab_size instead of tokenizer.path",
        ) from None


fingerprint = files.sha256_file  # the model is all of the tokenizer; see tokenizer_json.fingerprint()


def copy(path: Path, directory: Path) -> Described:
    """Copy a model to directory/tokenizer.model; return its description. UserError if unreadable or without </s>."""
    processor = load(path)
    if processor.eos_id() < 0:
        raise UserError(f"{path} has no end-of-document piece (</s>)", fix="use a tokenizer with an eos id")
    shutil.copyfile(path, directory / "tokenizer.model")
    return describe(directory / "tokenizer.model")


def train(lines: Iterable[str], directory: Path, vocab_size: int, character_coverage: float) -> Described:
    """Train a sentencepiece model on the lines, write directory/tokenizer.model, and return its description.

    Characters beyond the share character_coverage are spelt as bytes. UserError if sentencepiece refuses the size.
    """
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(lines),
            model_writer=model,
            model_type="bpe",
            vocab_size=vocab_size,
            character_coverage=character_coverage,
            byte_fallback=True,
            split_digits=True,
            normalization_rule_name="identity",
            add_dummy_prefix=True,
            remove_extra_whitespaces=False,
            allow_whitespace_only_pieces=True,
            max_sentencepiece_length=16,
            unk_id=UNK_ID,
            bos_id=BOS_ID,
            eos_id=EOS_ID,
            pad_id=-1,
            num_threads=1,
            minloglevel=2,
        )
    except RuntimeError as error:
        raise _explain_refusal(str(error), vocab_size) from None
    (directory / "tokenizer.model").write_bytes(model.getvalue())
    return describe(directory / "tokenizer.model")


def describe(path: Path) -> Described:
    """Return {vocab_size, unk_id, bos_id, eos_id (-1: missing), sha256}. Raises UserError if unreadable."""
    processor = load(path)
    return {
        "vocab_size": processor.vocab_size(),
        "unk_id": processor.unk_id(),
        "bos_id": processor.bos_id(),
        "eos_id": processor.eos_id(),
        "sha256": fingerprint(path),
    }


def encode(processor: Any, texts: Sequence[str]) -> list[npt.NDArray[np.int32]]:
    """Return the ids of each text, without <s> and </s>; `processor` is load()'s. Uses one thread."""
    encoded: list[npt.NDArray[np.int32]] = processor.encode(list(texts), out_type="numpy", num_threads=1)
    return encoded


def _explain_refusal(message: str, vocab_size: int) -> UserError:
    """Return the UserError for sentencepiece's message; it names the size that would do if vocab_size would not."""
    if too_high := re.search(r"too high .*<= (\d+)", message):
        return UserError(
            f"tokenizer.vocab_size {vocab_size:,} is too large for this text",
            evidence=f"it has {int(too_high[1]):,} different pieces at most",
            fix=f"set tokenizer.vocab_size to at most {too_high[1]}, or add text: tokenizer.sample_bytes, data.sources",
        )
    if too_low := re.search(r"smaller than required_chars. \d+ vs (\d+)", message):
        return UserError(
            f"tokenizer.vocab_size {vocab_size:,} is too small for this text",
            evidence=f"its characters, 256 bytes and 3 control pieces alone are {int(too_low[1]):,}",
            fix=f"set tokenizer.vocab_size to at least {too_low[1]}, or lower tokenizer.character_coverage",
        )
    return UserError("sentencepiece cannot train a tokenizer on this text", evidence=message)


_IDEOGRAPHS = "\u3005-\u3007\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
# CJK and full-width punctuation; not the dashes and quotation marks that Chinese shares with other scripts.
_MARKS = "\u3001-\u3004\u3008-\u303f\uff01-\uff60\uffe0-\uffe6"
CHINESE = re.compile(f"[{_IDEOGRAPHS}{_MARKS}]")
_RUN = re.compile(f"[{_IDEOGRAPHS}]+")
_MARK = re.compile(f"[{_MARKS}]")


@dataclass(frozen=True)
class Sample:
    """The Chinese of the sampled text: how often each run of ideographs and each mark occurs."""

    runs: Counter[str]
    marks: Counter[str]

    @classmethod
    def of(cls, lines: Iterable[str]) -> Sample:
        """Return the counts of the lines, in 2.5 bytes of memory a byte. Raises UserError if they have no ideograph."""
        sample = cls(Counter(), Counter())
        for line in lines:
            sample.runs.update(_RUN.findall(line))
            sample.marks.update(_MARK.findall(line))
        if not sample.runs:
            raise UserError("the sample holds no Chinese to extend the tokenizer with", fix="correct data.sources")
        return sample

    def characters(self) -> list[tuple[str, int]]:
        """Return (character, count) of every ideograph and mark, by falling count, then in Unicode's order."""
        counts = Counter(self.marks)
        for run, count in self.runs.items():
            for character in run:
                counts[character] += count
        return sorted(counts.items(), key=lambda item: (-item[1], item[0]))


def load_base(path: Path) -> Any:
    """Return the ModelProto of a tokenizer.model to extend. Raises UserError unless BPE with byte fallback and </s>."""
    processor = load(path)
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
) -> Described:
    """Write directory/tokenizer.model with base's pieces and new ones, `size` in all; return its description.

    `base` is load_base()'s. New pieces have at most `longest` characters. The new characters cover the share
    character_coverage of the Chinese in `lines`; with longest=1 all Chinese characters are tried. Raises UserError for
    a size that adds nothing, for lines without Chinese, and when they give too few pieces.
    """
    old = len(base.pieces)
    if size <= old:
        raise UserError(f"tokenizer.extend_to {size:,} adds nothing to {old:,} pieces", fix=f"set more than {old}")
    sample = Sample.of(lines)
    known = {piece.piece for piece in base.pieces}
    chosen, dead = _keep_living(
        base, _list_candidates(sample, known, size - old, longest, character_coverage), size - old
    )
    if len(chosen) < size - old:
        raise too_large(size, old + len(chosen), f"{old:,} old pieces, {len(chosen):,} new ones found")
    model = append_pieces(base, chosen)
    (directory / "tokenizer.model").write_bytes(model.SerializeToString())
    seen = {character for character, _ in sample.characters()}
    return describe(directory / "tokenizer.model") | {
        "old_pieces": old,
        "new_characters": sum(len(piece) == 1 for piece in chosen),
        "new_longer_pieces": sum(len(piece) > 1 for piece in chosen),
        "not_in_sample": sum(len(piece) == 1 and piece not in seen for piece in chosen),
        "dead_pieces_dropped": len(dead),
    }


def too_large(size: int, most: int, evidence: str) -> UserError:
    """Return the UserError for a tokenizer.extend_to of `size` where `most` is possible."""
    fix = f"set tokenizer.extend_to to at most {most}, or add text: tokenizer.sample_bytes, data.sources"
    return UserError(f"tokenizer.extend_to {size:,} is too large for this text", evidence=evidence, fix=fix)


def append_pieces(base: Any, pieces: Sequence[str]) -> Any:
    """Return a copy of the ModelProto `base` with the pieces added at its end, each with a score below all before it.

    trainer_spec.vocab_size is then the number of old pieces: train/model/causal_lm.py reads there which rows are new.
    """
    model = ModelProto.FromString(base.SerializeToString())
    model.trainer_spec.vocab_size = len(base.pieces)
    lowest = min(piece.score for piece in base.pieces)
    for place, piece in enumerate(pieces, start=1):
        model.pieces.add(piece=piece, score=lowest - place)
    return model


def check_unchanged(old: Path, new: Path, texts: Iterable[str]) -> int:
    """Check that two tokenizer.model give the same ids for the pieces of `old` and the texts, their Chinese left out.

    Returns how many were compared. Raises RuntimeError at the first that differs, UserError for an unreadable file.
    """
    before, after = load(old), load(new)
    pieces = (before.id_to_piece(number).replace("▁", " ") for number in range(before.vocab_size()))
    return count_unchanged(before.encode, after.encode, itertools.chain(pieces, texts))


def count_unchanged(old: Callable[[str], Any], new: Callable[[str], Any], texts: Iterable[str]) -> int:
    """Encode each text without its Chinese by both functions; return how many. RuntimeError at a difference."""
    count = 0
    for text in texts:
        plain = CHINESE.sub("", text)
        if old(plain) != new(plain):
            raise RuntimeError(f"the extended tokenizer encodes {plain[:200]!r} in another way than the old one")
        count += 1
    return count


def is_extension(model: Path, base: Path, size: int) -> bool:
    """Return whether the tokenizer.model `model` has `size` pieces and begins with those of `base`, another one."""
    extended, old = (ModelProto.FromString(path.read_bytes()) for path in (model, base))
    return len(extended.pieces) == size and list(extended.pieces[: len(old.pieces)]) == list(old.pieces)


def candidate_characters(sample: Sample, coverage: float, every: bool) -> list[str]:
    """Return the Chinese characters to add, in their order; the vocabulary may have some of them already.

    These are the most frequent, which make up the share `coverage` of the sample; with `every` all of the sample, then
    those of GB 2312, then U+4E00 to U+9FFF.
    """
    counted = sample.characters()
    if every:
        in_order = itertools.chain((character for character, _ in counted), _gb2312(), map(chr, range(0x4E00, 0xA000)))
        return list(dict.fromkeys(in_order))
    enough = coverage * sum(count for _, count in counted)
    before = itertools.accumulate((count for _, count in counted), initial=0)
    return [character for (character, _), sum_before in zip(counted, before, strict=False) if sum_before < enough]


def _list_candidates(sample: Sample, known: set[str], wanted: int, longest: int, coverage: float) -> list[str]:
    """Return new pieces in their order, perhaps more than `wanted`; `known` has the old ones, see extend()."""
    covering = candidate_characters(sample, coverage, every=longest == 1)
    characters = [character for character in covering if character not in known]
    if longest == 1:
        return characters
    usable = known.union(characters)
    in_known = sum(len(piece) > 1 and _RUN.fullmatch(piece) is not None for piece in known)
    longer = _learn(sample.runs, 2 * wanted + in_known, longest)  # twice: some will be dead
    return characters + [piece for piece in longer if piece not in known and usable.issuperset(piece)]


def _learn(runs: Counter[str], wanted: int, longest: int) -> list[str]:
    """Return about `wanted` pieces of 2 to `longest` ideographs, known ones too, in the order of their merges."""
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


def _keep_living(base: Any, candidates: list[str], wanted: int) -> tuple[list[str], set[str]]:
    """Return (the first `wanted` candidates that encode to their own id, or fewer, those before them that do not)."""
    dropped: set[str] = set()
    while True:
        chosen = list(itertools.islice((piece for piece in candidates if piece not in dropped), wanted))
        dead = _find_dead(append_pieces(base, chosen), len(base.pieces))
        if not dead:
            return chosen, dropped
        dropped |= dead


def _find_dead(model: Any, old: int) -> set[str]:
    """Return the pieces of a sentencepiece ModelProto, from id `old` on, that do not encode to their own id."""
    alone = ModelProto.FromString(model.SerializeToString())
    alone.normalizer_spec.add_dummy_prefix = False
    processor = sentencepiece.SentencePieceProcessor(model_proto=alone.SerializeToString())
    new = [piece.piece for piece in model.pieces[old:]]
    encoded = processor.encode(new)
    return {piece for place, (piece, ids) in enumerate(zip(new, encoded, strict=True), old) if ids != [place]}


def _gb2312() -> Iterator[str]:
    """Yield the 6,763 characters of GB 2312 in its order: the common ones by sound, then the rest by radical."""
    for lead, trail in itertools.product(range(0xB0, 0xF8), range(0xA1, 0xFF)):
        yield from bytes((lead, trail)).decode("gb2312", errors="ignore")
