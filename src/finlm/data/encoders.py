"""Two encoders with the same ids: sentencepiece, which defines them, and gigatoken, twice as fast.

gigatoken (0.10) is a young library, so it is used for a tokenizer only after it gave sentencepiece's ids on texts made
to trip it, and then checked on a sample of every chunk; the first difference sends the whole step back to
sentencepiece. Two things are arranged here. Its own loader would read "</s>" in a document as the document's end:
control pieces are left out of what it matches and merges, as in sentencepiece. Its caches grow without limit on text
with many spaces: it is built anew (0.1 s) when the process has grown too much.

Models that it does not take (unigram, without byte fallback, with unused pieces) are encoded by sentencepiece.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from finlm.data import vocab

Ids = npt.NDArray[np.int32]
Encode = Callable[[Sequence[bytes]], tuple[npt.NDArray[Any], npt.NDArray[np.int64]]]

_LONG = 2**20  # bytes of a text, above which it is cut
_MOST_GROWTH = 192 * 2**20  # bytes of memory a process, before gigatoken is built anew
TRAPS = (
    *(
        "",
        " ",
        "  ",
        "   a",
        " 前导空格",
        "尾随空格  ",
        "a  b   c    d",
        "\u2581",
        "\u2581\u2581前",
        "a\u2581b",
        "\u3000全角",
    ),
    *(
        "换行\n\n换行\r\n\t制表",
        "\0零\0",
        "\ufffd\ufeff",
        "😀👨‍👩‍👧‍👦🇨🇳",
        "𠮷𡈽㐂",
        "ﷺ",
        "e\u0301 é",
        "สวัสดี",
        "\U0010ffff",
    ),
    *("<s>", "</s>", "<unk>", "<0x0A>", "a</s>b<s>c", "< s >", "<<s>>", "<pad>", "[INST]", "<|im_start|>user"),
    *("3.14159", "1,234,567.89元", "-0.5%", "２０２４年", "600000.SH", "EBITDA", "A股/H股", "（一）", "——", "…………"),
    *("公司" * 3000, "x" * 5000, "净利润同比增长12.3%，" * 200, " " * 1000 + "末", "\n" * 500, "😀" * 300),
)


class Cuts:
    """Cuts long documents where that changes no id, because both encoders take 40 bytes of memory a character.

    No piece of the tokenizer holds the character of the cut and another one, so no merge crosses it. The rest is
    encoded behind that character, whose ids are then left out: the space that a document may begin with comes once.
    """

    def __init__(self, model: Path) -> None:
        processor = vocab.load(model)
        pieces = [processor.id_to_piece(number) for number in range(processor.vocab_size())]
        self._marks = {
            mark.encode(): len(processor.encode(mark))
            for mark in "\n。；，"
            if processor.decode(processor.encode(f"甲{mark}乙")) == f"甲{mark}乙"
            and not any(mark in piece and len(piece) > 1 for piece in pieces)
        }

    def encode(self, encoder: Encode, texts: Sequence[bytes]) -> tuple[npt.NDArray[Any], npt.NDArray[np.int64]]:
        """(ids of all texts end to end, [texts] how many each has), as the encoder gives them for whole texts."""
        if not self._marks or max(map(len, texts)) <= _LONG:
            return encoder(texts)
        parts = [part for text in texts for part in self._parts(text)]
        ids, lengths = encoder([part for part, _, _ in parts])
        skipped = np.array([skip for _, skip, _ in parts], dtype=np.int64)
        begins = np.cumsum(lengths) - lengths
        is_kept = np.ones(len(ids), dtype=np.bool_)
        for begin, skip in zip(begins[skipped > 0].tolist(), skipped[skipped > 0].tolist(), strict=True):
            is_kept[begin : begin + skip] = False
        is_first = np.array([first for _, _, first in parts], dtype=np.bool_)
        return ids[is_kept], np.add.reduceat(lengths - skipped, np.flatnonzero(is_first))

    def _parts(self, text: bytes) -> Iterator[tuple[bytes, int, bool]]:
        """(part, how many of its first ids to leave out, is the document's first)."""
        start, skip, first = 0, 0, True
        while len(text) - start > _LONG:
            at, mark = max((text.rfind(mark, start + 1, start + _LONG), mark) for mark in self._marks)
            if at < 0:  # a long stretch without one: the next there is
                later = [(text.find(mark, start + _LONG), mark) for mark in self._marks]
                at, mark = min((entry for entry in later if entry[0] >= 0), default=(-1, b""))
            if at < 0:
                break
            yield text[start : at + len(mark)], skip, first
            start, skip, first = at, self._marks[mark], False
        yield text[start:], skip, first


class Sentencepiece:
    """The reference."""

    name = "sentencepiece"

    def __init__(self, model: Path) -> None:
        self._processor = vocab.load(model)

    def __call__(self, texts: Sequence[bytes]) -> tuple[npt.NDArray[Any], npt.NDArray[np.int64]]:
        """(ids of all texts end to end, [texts] how many each has)."""
        encoded = vocab.encode(self._processor, [text.decode("utf-8") for text in texts])
        lengths = np.array([len(ids) for ids in encoded], dtype=np.int64)
        return np.concatenate(encoded) if encoded else np.empty(0, dtype=np.int32), lengths


class Gigatoken:
    """The faster one. Raises ValueError for a model that it cannot take."""

    name = "gigatoken"

    def __init__(self, model: Path) -> None:
        self._settings = _settings(model)
        self._build()

    def __call__(self, texts: Sequence[bytes]) -> tuple[npt.NDArray[Any], npt.NDArray[np.int64]]:
        """(ids of all texts end to end, [texts] how many each has)."""
        import awkward

        encoded = self._tokenizer.encode_batch(list(texts), parallel=False)
        lengths = np.asarray(awkward.num(encoded), dtype=np.int64)
        ids = np.asarray(awkward.flatten(encoded))
        if _resident_bytes() > self._most:
            self._build()
        return ids, lengths

    def _build(self) -> None:
        import gigatoken

        self._tokenizer: Any = None  # the old one goes before the new one comes
        self._tokenizer = gigatoken.Tokenizer.from_json(self._settings)
        self._most = _resident_bytes() + _MOST_GROWTH


def agrees(model: Path) -> str:
    """ "" when gigatoken gives sentencepiece's ids for this model on TRAPS and its own pieces, else what differs."""
    try:
        fast = Gigatoken(model)
    except (ValueError, RuntimeError, ImportError) as error:
        return str(error) or type(error).__name__
    return difference(fast, Sentencepiece(model), [text.encode() for text in (*TRAPS, *_own_traps(model))])


def difference(fast: Encode, reference: Encode, texts: Sequence[bytes]) -> str:
    """ "" when both give the same ids, else the first text that has others."""
    (ids, lengths), (wanted, wanted_lengths) = fast(texts), reference(texts)
    if np.array_equal(lengths, wanted_lengths) and np.array_equal(ids, wanted):
        return ""
    for text in texts:
        if not np.array_equal(fast([text])[0], reference([text])[0]):
            return repr(text[:60].decode("utf-8", errors="replace"))
    return "its ids depend on the texts beside a text"


def _own_traps(model: Path) -> Iterator[str]:
    """Every piece among others, and those that a user defined or that control in the middle of text."""
    processor = vocab.load(model)
    pieces = [processor.id_to_piece(number) for number in range(processor.vocab_size())]
    for number, piece in enumerate(pieces):
        # User-defined pieces have the score 0, as bytes and the first merge have.
        if processor.is_control(number) or processor.is_unused(number) or processor.get_score(number) == 0:
            yield from (f"前{piece}后", piece, f" {piece} ")
    for first in range(0, len(pieces), 64):
        yield "".join(pieces[first : first + 64])


def _settings(model: Path) -> str:
    """gigatoken's settings of a sentencepiece model, with the control pieces out of reach of text."""
    from gigatoken._load.sentencepiece import sentencepiece_to_tokenizer_json

    processor = vocab.load(model)
    size = processor.vocab_size()
    if any(processor.is_unused(number) for number in range(size)):
        raise ValueError("it has unused pieces")
    settings = json.loads(sentencepiece_to_tokenizer_json(model.read_bytes()))
    is_text = [not (processor.is_control(n) or processor.is_unknown(n) or processor.is_byte(n)) for n in range(size)]
    textual = {processor.id_to_piece(number) for number in range(size) if is_text[number]}
    settings["added_tokens"] = [token for token in settings["added_tokens"] if not token["special"]]
    settings["model"]["merges"] = [
        pair for pair in settings["model"]["merges"] if "".join(pair) in textual and textual.issuperset(pair)
    ]
    return json.dumps(settings, ensure_ascii=False)


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
