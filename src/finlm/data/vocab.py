"""The tokenizer: a sentencepiece BPE model, trained on a sample of the documents or brought along.

Trained with Llama's settings, because transformers turns exactly these into LlamaTokenizer with the same ids: <unk> 0,
<s> 1, </s> 2, no padding; byte fallback, so that no text is unknown; identity normalisation, so that decoding gives
back the text; a space before the document (add_dummy_prefix) and none removed; single digits, as numbers are the point
of finance texts; pieces of at most 16 characters. A newline is the byte <0x0A>, as in Llama, never part of a piece.

32,000 pieces from 20 MB of text take 8 s and 0.6 GB, on one thread, so that the same sample always gives the same bytes
(threads win 7 %). It does not extend an existing vocabulary.
"""

from __future__ import annotations

import io
import re
import shutil
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import sentencepiece

from finlm.base import files, units
from finlm.base.errors import UserError
from finlm.data import workers
from finlm.data.dedup import TRAIN, Decisions, Table

VERSION = 1
LIBRARY = str(sentencepiece.__version__)
UNK_ID, BOS_ID, EOS_ID = 0, 1, 2

# sentencepiece drops lines over 4,192 bytes without a word; a character has at most 4.
_LINE_CHARACTERS = 1000
_MEMORY_PER_SAMPLE_BYTE = 30  # 26 measured at 21 MB


def load(path: Path) -> Any:
    """The SentencePieceProcessor of a tokenizer.model. Raises UserError when it is not one."""
    try:
        return sentencepiece.SentencePieceProcessor(model_file=str(path))
    except (RuntimeError, OSError) as error:
        raise UserError(
            f"{path} is not a sentencepiece model",
            evidence=str(error) if path.exists() else "there is no such file",
            fix="set tokenizer.path to a tokenizer.model, or tokenizer.vocab_size to train one",
        ) from None


def fingerprint(path: Path) -> str:
    """sha256 of the model file."""
    return files.sha256_file(path)


def copy(path: Path, directory: Path) -> dict[str, Any]:
    """Copy an existing model to directory/tokenizer.model; the manifest. Raises UserError when it cannot be used."""
    processor = load(path)
    if processor.eos_id() < 0:
        raise UserError(f"{path} has no end-of-document piece (</s>)", fix="use a tokenizer with an eos id")
    shutil.copyfile(path, directory / "tokenizer.model")
    return describe(directory / "tokenizer.model")


def train(lines: Iterable[str], directory: Path, vocab_size: int, character_coverage: float) -> dict[str, Any]:
    """Train directory/tokenizer.model with vocab_size pieces, no fewer; the manifest. Raises UserError otherwise."""
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
        raise _explained(str(error), vocab_size) from None
    (directory / "tokenizer.model").write_bytes(model.getvalue())
    return describe(directory / "tokenizer.model")


def describe(path: Path) -> dict[str, Any]:
    """Size, special ids and hash of a model, for manifests."""
    processor = load(path)
    return {
        "vocab_size": processor.vocab_size(),
        "unk_id": processor.unk_id(),
        "bos_id": processor.bos_id(),
        "eos_id": processor.eos_id(),
        "sha256": fingerprint(path),
    }


def sample(table: Table, decision: Decisions, sample_bytes: int) -> npt.NDArray[np.bool_]:
    """Which training documents to train on: bool [documents], each source with its share of sample_bytes.

    Chosen by the second half of the hash; the first half chose the held-out documents. Raises UserError when the sample
    would not fit in memory.
    """
    is_train = decision == TRAIN
    total = int(table.text_bytes[is_train].sum())
    needed, available = _MEMORY_PER_SAMPLE_BYTE * min(total, sample_bytes), workers.available_memory()
    if needed > available:
        raise UserError(
            f"training a tokenizer on {units.format_bytes(min(total, sample_bytes))} of text does not fit in memory",
            evidence=f"about {units.format_bytes(needed)} needed, {units.format_bytes(available)} available",
            fix=f"lower tokenizer.sample_bytes to {max(1, available // _MEMORY_PER_SAMPLE_BYTE // 10**6)}MB",
        )
    if total <= sample_bytes:
        return np.asarray(is_train)
    chosen = np.zeros(len(decision), dtype=np.bool_)
    for number in np.unique(table.source[is_train]).tolist():
        here = np.flatnonzero(is_train & (table.source == number))
        here = here[np.argsort(table.hash[here, 1], kind="stable")]
        ends = np.cumsum(table.text_bytes[here])
        chosen[here[: 1 + np.searchsorted(ends, sample_bytes * int(ends[-1]) // total)]] = True
    return chosen


def lines(texts: Iterable[str]) -> Iterator[str]:
    """Documents as the lines that sentencepiece learns from; a long line is cut, which splits a word now and then."""
    for text in texts:
        for line in text.split("\n"):
            for start in range(0, len(line), _LINE_CHARACTERS):
                yield line[start : start + _LINE_CHARACTERS]


def encode(processor: Any, texts: Sequence[str]) -> list[npt.NDArray[np.int32]]:
    """The ids of each text, without <s> and </s>; those names inside a text are ordinary characters. One thread."""
    encoded: list[npt.NDArray[np.int32]] = processor.encode(list(texts), out_type="numpy", num_threads=1)
    return encoded


def _explained(message: str, vocab_size: int) -> UserError:
    """sentencepiece's refusal as a user mistake with the sizes that would do."""
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
