"""Encode documents: by the library that defines the ids, or by gigatoken, which is faster and gives the same ids.

tokenizer.model is sentencepiece's (gigatoken: twice as fast), tokenizer.json is tokenizers' (ten times: 24.7 MB/s a
core instead of 2.4 with Qwen3's, 20.4 with Llama 3's, on Chinese finance text). gigatoken (0.10) is a young library, so
it is used for a tokenizer only after it gave the same ids on texts made to trip it, and then checked on a sample of
every chunk; the first difference sends the whole step back. Two things are arranged here. Its own loader would read
"</s>" in a document as the document's end: control pieces are left out of what it matches and merges. Its caches grow
without limit on text with many spaces: it is built anew (0.1 s) when the process has grown too much.

Models that it does not take (unigram, without byte fallback, with unused pieces) are encoded by their library.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from finlm.base import files
from finlm.tokens import tokenizer_json, vocab

Ids = npt.NDArray[np.int32]
Encoded = tuple[npt.NDArray[Any], npt.NDArray[np.int64]]

_LONG = 2**20  # bytes of a text, above which it is cut
_BESIDE = 256  # bytes on both sides of a line's end that are encoded to see whether a cut there changes an id
_MOST_GROWTH = 192 * 2**20  # bytes of memory a process, before gigatoken is built anew
TRAPS = (
    *("", " ", "  ", "   a", " 前导空格", "尾随空格  ", "a  b   c    d", "\u2581", "\u2581\u2581前"),
    *("a\u2581b", "\u3000全角", "换行\n\n换行\r\n\t制表", "\0零\0", "\ufffd\ufeff", "😀👨‍👩‍👧‍👦🇨🇳"),
    *("𠮷𡈽㐂", "ﷺ", "e\u0301 é", "สวัสดี", "\U0010ffff"),
    *("<s>", "</s>", "<unk>", "<0x0A>", "a</s>b<s>c", "< s >", "<<s>>", "<pad>", "[INST]", "<|im_start|>user"),
    *("3.14159", "1,234,567.89元", "-0.5%", "２０２４年", "600000.SH", "EBITDA", "A股/H股", "（一）", "——", "…………"),
    *("公司" * 3000, "x" * 5000, "净利润同比增长12.3%，" * 200, " " * 1000 + "末", "\n" * 500, "😀" * 300),
)


class Encode(Protocol):
    """The interface of an encoder of documents."""

    name: str

    def __call__(self, texts: Sequence[bytes]) -> Encoded:
        """Return (ids of all texts end to end, the number of ids of each text) for UTF-8 texts."""


class Cuts:
    """Cuts long documents where that changes no id, because both encoders take 40 bytes of memory a character.

    A cut is at a character that no piece of the tokenizer.model holds together with another, so no merge crosses it.
    The rest is encoded with that character before it, whose ids are then left out, so that a leading space is added
    only once. There may be no such character. Raises UserError if the file cannot be read.
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

    def encode(self, encoder: Encode, texts: Sequence[bytes]) -> Encoded:
        """Return (ids of one or more texts end to end, the number of ids of each), the same as for whole texts.

        `encoder` gets all parts in one call. Texts of up to 1 MiB are not cut.
        """
        if max(map(len, texts)) <= _LONG:
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
        """Yield (part, how many of its first ids to leave out, whether it is the document's first)."""
        start, skip, first = 0, 0, True
        while self._marks and len(text) - start > _LONG:
            at, mark = max((text.rfind(mark, start + 1, start + _LONG), mark) for mark in self._marks)
            if at < 0:  # a long stretch without one: the next there is
                later = [(text.find(mark, start + _LONG), mark) for mark in self._marks]
                at, mark = min((entry for entry in later if entry[0] >= 0), default=(-1, b""))
            if at < 0:
                break
            yield text[start : at + len(mark)], skip, first
            start, skip, first = at, self._marks[mark], False
        yield text[start:], skip, first


class LineCuts(Cuts):
    """Cuts long documents for a tokenizer.json: behind a line's end where 256 bytes on both sides keep their ids.

    Raises UserError if the file cannot be read.
    """

    def __init__(self, model: Path) -> None:
        self._reference = Tokenizers(model)

    def _parts(self, text: bytes) -> Iterator[tuple[bytes, int, bool]]:
        """Yield (part, 0, whether it is the document's first)."""
        start, first = 0, True
        while len(text) - start > _LONG and (at := self._line_end(text, start)) > start:
            yield text[start:at], 0, first
            start, first = at, False
        yield text[start:], 0, first

    def _line_end(self, text: bytes, start: int) -> int:
        """Return the last offset behind a line's end where a cut changes no id, within 1 MiB of `start`; 0 for none."""
        at = text.rfind(b"\n", start, start + _LONG)
        while at > start:
            left = text[max(start, at + 1 - _BESIDE) : at + 1].decode(errors="ignore")
            right = text[at + 1 : at + 1 + _BESIDE].decode(errors="ignore")
            cut, whole = (
                self._reference([part.encode() for part in parts])[0] for parts in ((left, right), (left + right,))
            )
            if right and np.array_equal(cut, whole):
                return at + 1
            at = text.rfind(b"\n", start, at)
        return 0


class Sentencepiece:
    """The encoder that defines the ids of a tokenizer.model. Raises UserError if the file cannot be read."""

    name = "sentencepiece"

    def __init__(self, model: Path) -> None:
        self._processor = vocab.load(model)

    def __call__(self, texts: Sequence[bytes]) -> Encoded:
        """Return int32 ids; see Encode."""
        encoded = vocab.encode(self._processor, [text.decode("utf-8") for text in texts])
        lengths = np.array([len(ids) for ids in encoded], dtype=np.int64)
        return np.concatenate(encoded) if encoded else np.empty(0, dtype=np.int32), lengths


class Tokenizers:
    """The encoder that defines the ids of a tokenizer.json. Raises UserError if the file cannot be read."""

    name = "tokenizers"

    def __init__(self, model: Path) -> None:
        self._tokenizer = tokenizer_json.load(model)

    def __call__(self, texts: Sequence[bytes]) -> Encoded:
        """Return uint32 ids; see Encode."""
        # One text a call: a batch would start a thread a core in every worker, and hold all of its records.
        encoded = [
            np.array(self._tokenizer.encode_batch_fast([text.decode()], add_special_tokens=False)[0].ids, dtype="<u4")
            for text in texts
        ]
        lengths = np.array([len(ids) for ids in encoded], dtype=np.int64)
        return np.concatenate(encoded) if encoded else np.empty(0, dtype=np.uint32), lengths


def is_json(model: Path) -> bool:
    """Return whether a tokenizer's file is read by tokenizers (suffix .json), not by sentencepiece."""
    return model.suffix == ".json"


def reference(model: Path) -> Sentencepiece | Tokenizers:
    """Return the encoder that defines a tokenizer's ids. Raises UserError if the file cannot be read."""
    return Tokenizers(model) if is_json(model) else Sentencepiece(model)


def load_cutter(model: Path) -> Cuts:
    """Return the object that cuts long documents for this tokenizer. Raises UserError if it cannot be read."""
    return LineCuts(model) if is_json(model) else Cuts(model)


PROVEN = "gigatoken.json"  # beside a tokenizer: the settings with which gigatoken has passed check_gigatoken()


def check_gigatoken(model: Path) -> str:
    """Test gigatoken on a tokenizer of the cache: return "" if its ids are the library's, else what differs, as text.

    After a pass writes gigatoken's settings to gigatoken.json beside the tokenizer. With these, for the same file and
    versions, it is not tested again, and workers need not convert them. Raises UserError for an unreadable tokenizer.
    """
    if _read_proven(model):
        return ""
    different = find_disagreement(model)
    if not different:
        files.write_json(model.with_name(PROVEN), {"of": _identify(model), "settings": _settings(model)})
    return different


def _read_proven(model: Path) -> str:
    """Return the settings kept by check_gigatoken() for this file and versions, or "". NotJson if damaged."""
    kept = model.with_name(PROVEN)
    proven = files.read_json(kept) if kept.is_file() else {}
    return str(proven["settings"]) if proven and proven["of"] == _identify(model) else ""


def _identify(model: Path) -> list[str]:
    """Return [the file's sha256, "gigatoken VERSION", "LIBRARY VERSION"]; PackageNotFoundError without either."""
    library = Tokenizers.name if is_json(model) else Sentencepiece.name
    versions = [f"{name} {metadata.version(name)}" for name in ("gigatoken", library)]
    return [files.sha256_file(model), *versions]


class Gigatoken:
    """gigatoken's encoder, by gigatoken.json beside the tokenizer if that is up to date.

    Raises ValueError or RuntimeError for a tokenizer that gigatoken cannot take, ImportError if the package is missing,
    and UserError for an unreadable file.
    """

    name = "gigatoken"

    def __init__(self, model: Path) -> None:
        self._settings = _settings(model)
        self._build()

    def __call__(self, texts: Sequence[bytes]) -> Encoded:
        """Return what Encode does; build the tokenizer anew if the process has grown by over 192 MiB."""
        import awkward

        encoded = self._tokenizer.encode_batch(list(texts), parallel=False)
        lengths = np.asarray(awkward.num(encoded), dtype=np.int64)
        ids = np.asarray(awkward.flatten(encoded))
        if _resident_bytes() > self._most:
            self._build()
        return ids, lengths

    def _build(self) -> None:
        """Build the tokenizer, and set the memory size at which it is built again."""
        import gigatoken

        self._tokenizer: Any = None  # the old one goes before the new one comes
        self._tokenizer = gigatoken.Tokenizer.from_json(self._settings)
        self._most = _resident_bytes() + _MOST_GROWTH


def find_disagreement(model: Path) -> str:
    """Return "" if gigatoken and the library give the same ids for TRAPS and pieces, else what differs, as text.

    That it is missing or cannot load the tokenizer is text, too. Raises UserError for an unreadable tokenizer.
    """
    try:
        fast = Gigatoken(model)
    except (ValueError, RuntimeError, ImportError) as error:
        return str(error) or type(error).__name__
    return difference(fast, reference(model), [text.encode() for text in (*TRAPS, *_piece_traps(model))])


def difference(fast: Encode, reference: Encode, texts: Sequence[bytes]) -> str:
    """Return "" if both encoders give the same ids, else the start of the first text that differs, or a sentence."""
    (ids, lengths), (expected, wanted_lengths) = fast(texts), reference(texts)
    if np.array_equal(lengths, wanted_lengths) and np.array_equal(ids, expected):
        return ""
    for text in texts:
        if not np.array_equal(fast([text])[0], reference([text])[0]):
            return repr(text[:60].decode("utf-8", errors="replace"))
    return "its ids depend on the texts beside a text"


def _piece_traps(model: Path) -> Iterator[str]:
    """Yield test texts made of the tokenizer's pieces, user-defined and control ones inside text too."""
    if is_json(model):
        loaded = tokenizer_json.load(model)
        added = tokenizer_json.added_tokens(model)
        for first in range(0, len(added), 16):  # some models have thousands
            yield "".join(f"{token}后 {token} 前" for token in added[first : first + 16])
        for begin in range(0, loaded.get_vocab_size(), 64):
            yield loaded.decode(range(begin, begin + 64), skip_special_tokens=False)
        return
    processor = vocab.load(model)
    pieces = [processor.id_to_piece(number) for number in range(processor.vocab_size())]
    for number, piece in enumerate(pieces):
        # User-defined pieces have the score 0, as bytes and the first merge have.
        if processor.is_control(number) or processor.is_unused(number) or processor.get_score(number) == 0:
            yield from (f"前{piece}后", piece, f" {piece} ")
    for first in range(0, len(pieces), 64):
        yield "".join(pieces[first : first + 64])


def _settings(model: Path) -> str:
    """Return gigatoken's settings as JSON, without control pieces: those in gigatoken.json, or converted now.

    Conversion raises ValueError for a tokenizer.model with unused pieces, ImportError without gigatoken.
    """
    return _read_proven(model) or _convert(model, model.read_bytes())


@lru_cache(1)  # a second, for the test of the tokenizer and for the shards
def _convert(model: Path, content: bytes) -> str:
    """Return gigatoken's settings as JSON for the file `model` with these bytes; ValueError for unused pieces."""
    if is_json(model):
        return json.dumps(tokenizer_json.gigatoken_settings(model), ensure_ascii=False)
    from gigatoken._load.sentencepiece import sentencepiece_to_tokenizer_json

    processor = vocab.load(model)
    size = processor.vocab_size()
    if any(processor.is_unused(number) for number in range(size)):
        raise ValueError("it has unused pieces")
    settings = json.loads(sentencepiece_to_tokenizer_json(content))
    is_text = [not (processor.is_control(n) or processor.is_unknown(n) or processor.is_byte(n)) for n in range(size)]
    textual = {processor.id_to_piece(number) for number in range(size) if is_text[number]}
    settings["added_tokens"] = [token for token in settings["added_tokens"] if not token["special"]]
    settings["model"]["merges"] = [
        pair for pair in settings["model"]["merges"] if "".join(pair) in textual and textual.issuperset(pair)
    ]
    return json.dumps(settings, ensure_ascii=False)


def _resident_bytes() -> int:
    """Return the bytes of this process's memory that are in RAM."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
