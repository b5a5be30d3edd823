"""The tokenizer: a sentencepiece BPE model, trained on a sample of the documents or brought along.

Trained with Llama's settings, because transformers turns exactly these into LlamaTokenizer with the same ids: <unk> 0,
<s> 1, </s> 2, no padding; byte fallback, so that no text is unknown; identity normalisation, so that decoding gives
back the text; a space before the document (add_dummy_prefix) and none removed; single digits, as numbers are the point
of finance texts; pieces of at most 16 characters. A newline is the byte <0x0A>, as in Llama, never part of a piece.

32,000 pieces from 20 MB of text take 8 s and 0.6 GB, on one thread, so that the same sample always gives the same bytes
(threads win 7 %). What it is trained on is chosen in vocab_sample.py; vocab_extend.py adds to an existing one.
"""

from __future__ import annotations

import io
import re
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import sentencepiece

from finlm.base import files
from finlm.base.errors import UserError

VERSION = 2
LIBRARY = str(sentencepiece.__version__)
UNK_ID, BOS_ID, EOS_ID = 0, 1, 2


def load(path: Path) -> Any:
    """The SentencePieceProcessor of a tokenizer.model. Raises UserError when it is not one."""
    try:
        return sentencepiece.SentencePieceProcessor(model_file=str(path))
    except (RuntimeError, OSError) as error:
        raise UserError(
            f"{path} is not a sentencepiece model",
            evidence=str(error) if path.exists() else "there is no such file",
            fix="fetch the file, for example `.venv/bin/hf download meta-llama/Llama-2-7b-hf tokenizer.model "
            f"--local-dir {path.parent}`; or train a tokenizer: tokenizer.vocab_size instead of tokenizer.path",
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
