"""Read, describe and extend a tokenizer.json: the vocabulary of Qwen, Llama 3 and most models since.

`tokenizers` defines the ids. A control token's name in a document (<|endoftext|>) is ordinary text, as it is to
sentencepiece; a document begins with a token where the tokenizer itself begins a text with one, and ends with the
tokenizer's end of text. Templates, special tokens and the rest of the files go along to the shards and the export.

Extending a byte-level one puts new merges behind all old ones, so a text is encoded as before and new merges then join
what is left. Each joins two neighbours whose bytes are the beginning of a Chinese character, a whole one, or several:
text without Chinese cannot hold them and keeps its ids. Missing characters come first, the most frequent before others,
then the merges that BPE learns from the sample's runs of ideographs as the old tokenizer spells them. New ids follow
those of the added tokens. A piece that is not reached when it stands alone is dropped and counted.
"""

from __future__ import annotations

import functools
import itertools
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finlm.base import files
from finlm.base.errors import UserError
from finlm.recipe.models import config_json
from finlm.tokens import pretrained
from finlm.tokens.vocab import CHINESE, Described, Sample, candidate_characters, count_unchanged, too_large

if TYPE_CHECKING:
    import tokenizers

VERSION = 1
NAME = "tokenizer.json"
BEFORE = "extension.json"  # beside an extended tokenizer.json: {old_ids, old_merges}, how many the base has
_FIRST = 0x10000  # code point of the letter that stands for token 0 while merges are learnt


@dataclass(frozen=True)
class Base:
    """A byte-level BPE tokenizer.json that can be extended: the content of the file `path`."""

    settings: dict[str, Any]
    path: Path

    @property
    def size(self) -> int:
        """The id that the first new piece gets."""
        added = [token["id"] for token in self.settings.get("added_tokens") or ()]
        return 1 + int(max(*self.settings["model"]["vocab"].values(), *added))

    def tokenizer(self, settings: Mapping[str, Any] | None = None) -> tokenizers.Tokenizer:
        """Return a new tokenizer from `settings`, by default the base's, that reads control tokens as text."""
        import tokenizers

        made = tokenizers.Tokenizer.from_str(json.dumps(settings or self.settings, ensure_ascii=False))
        made.encode_special_tokens = True
        return made


@dataclass
class Added:
    """New pieces in the order of their ids, and the merges that make them."""

    known: set[str]
    pieces: list[str] = field(default_factory=list)
    merges: list[tuple[str, str]] = field(default_factory=list)

    def join(self, left: str, right: str) -> None:
        """Add a merge of two neighbours; the joined piece is new unless it is in `known`."""
        self.merges.append((left, right))
        if left + right not in self.known:
            self.known.add(left + right)
            self.pieces.append(left + right)


def load_base(path: Path) -> Base:
    """Return a tokenizer.json that can be extended. Raises UserError if it is unreadable or no byte-level BPE one."""
    load(path)
    settings = files.read_json(path)
    kinds = {item["type"] for item in _flat(settings.get("pre_tokenizer")) if item}
    if settings["model"].get("type") != "BPE" or "ByteLevel" not in kinds:
        raise UserError(
            f"{path} cannot be extended: it is not a byte-level BPE vocabulary, as Qwen's and Llama 3's are",
            evidence=f"model {settings['model'].get('type')}, pre-tokenizers {', '.join(sorted(kinds)) or 'none'}",
            fix="use it as it is (without tokenizer.extend_to); of a sentencepiece model name tokenizer.model",
        )
    return Base(settings, path)


def extend(
    base: Base, lines: Iterable[str], directory: Path, size: int, longest: int, character_coverage: float
) -> Described:
    """Write directory/tokenizer with base's files, `size` ids and extension.json; return its description.

    New pieces have at most `longest` characters. The new characters cover the share character_coverage of the Chinese
    in `lines`; with longest=1 all Chinese characters are tried. Raises UserError for a size that adds nothing or equals
    vocab_size in config.json beside the base, for lines without Chinese, and when they give too few pieces.
    """
    if size <= base.size:
        raise UserError(
            f"tokenizer.extend_to {size:,} adds nothing to {base.size:,} ids", fix=f"set more than {base.size}"
        )
    config = base.path.with_name("config.json")
    if config.is_file() and config_json.text_part(files.read_json(config)).get("vocab_size") == size:
        raise UserError(
            f"tokenizer.extend_to {size:,} is the number of rows that the model has already",
            evidence=f"{config}; rows beyond {base.size:,} are spare, and would pass for trained ones",
            fix=f"set it to {size + 64}, or to less",
        )
    sample = Sample.of(lines)
    wanted, dropped = size - base.size, set[str]()
    while True:  # without what turned out not to be reached
        added = _add_characters(base, sample, wanted, longest, character_coverage, dropped)
        if longest > 1:
            _add_longer(base, sample, added, wanted, longest, dropped)
        made = enlarge(base, added)
        dead = _find_dead(base.tokenizer(made), added.pieces, base.size)
        if not dead:
            break
        dropped |= dead
    if len(added.pieces) != wanted:
        count = len(added.pieces)
        raise too_large(size, base.size + count, f"{base.size:,} old ids, {count:,} new pieces found")
    directory = directory / "tokenizer"
    pretrained.copy_files(base.path.parent, directory)
    files.write_text(directory / NAME, json.dumps(made, ensure_ascii=False, indent=2))
    old_merges = len(base.settings["model"]["merges"])
    files.write_json(directory / BEFORE, {"old_ids": base.size, "old_merges": old_merges})
    texts = [_text(piece) for piece in added.pieces]
    return describe(directory / NAME) | {
        "old_pieces": base.size,
        "new_characters": sum(len(text) == 1 for text in texts),
        "new_longer_pieces": sum(len(text) > 1 for text in texts),
        "not_in_sample": 0,
        "dead_pieces_dropped": len(dropped),
    }


def enlarge(base: Base, added: Added) -> dict[str, Any]:
    """Return a copy of base's settings with the new pieces, numbered from base.size, and the new merges at the end."""
    settings = deepcopy(base.settings)
    model = settings["model"]
    # Without its added tokens in the vocabulary the library would renumber them after the new pieces.
    model["vocab"] |= {token["content"]: token["id"] for token in settings.get("added_tokens") or ()}
    model["vocab"] |= {piece: number for number, piece in enumerate(added.pieces, start=base.size)}
    as_text = bool(model["merges"]) and isinstance(model["merges"][0], str)
    model["merges"] += [" ".join(pair) if as_text else list(pair) for pair in added.merges]
    return settings


def check_unchanged(old: Path, new: Path, texts: Iterable[str]) -> int:
    """Check that both files give the same ids for the old tokens and then the texts, their Chinese left out.

    Returns how many were compared. Raises RuntimeError at the first that differs, UserError for an unreadable file.
    """
    before, after = load(old), load(new)
    tokens = (before.decode([number], skip_special_tokens=False) for number in range(before.get_vocab_size()))
    every = itertools.chain(tokens, added_tokens(old), texts)
    return count_unchanged(
        lambda text: before.encode(text, add_special_tokens=False).ids,
        lambda text: after.encode(text, add_special_tokens=False).ids,
        every,
    )


def is_extension(extended: Path, base: Path, size: int) -> bool:
    """Return whether a tokenizer.json has `size` ids, and `base`'s pieces and first merges.

    Raises UserError if `extended` is not a byte-level BPE tokenizer, NotJson for damaged files.
    """
    large, small = (files.read_json(path)["model"] for path in (extended, base))
    begins = large["merges"][: len(small["merges"])] == small["merges"]
    return load_base(extended).size == size and begins and small["vocab"].items() <= large["vocab"].items()


def _flat(item: Any) -> Iterator[dict[str, Any]]:
    """Yield the settings of a pre-tokenizer, or of each in a sequence; {} if there is none."""
    if item and item.get("type") == "Sequence":
        for part in item["pretokenizers"]:
            yield from _flat(part)
    else:
        yield item or {}


def _letters(text: str) -> str:
    """Return the byte-level letters that spell a text in a vocabulary."""
    return "".join(_LETTER_OF[byte] for byte in text.encode())


def _text(piece: str) -> str:
    """Return the text of a piece of byte-level letters; � stands for a part of a character."""
    return bytes(_BYTE_OF[letter] for letter in piece).decode(errors="replace")


# GPT-2's alphabet: printable bytes are letters themselves, the others follow from code point 256.
_PLAIN = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_OTHERS = [byte for byte in range(256) if byte not in _PLAIN]
_LETTER_OF = {byte: chr(byte) for byte in _PLAIN} | {byte: chr(256 + place) for place, byte in enumerate(_OTHERS)}
_BYTE_OF = {letter: byte for byte, letter in _LETTER_OF.items()}


def _add_characters(base: Base, sample: Sample, wanted: int, longest: int, coverage: float, dropped: set[str]) -> Added:
    """Return pieces and merges for missing Chinese characters; each joins its old tokens from left to right.

    See extend(). Skips spellings in `dropped`, and characters of which a part may begin one that is not Chinese.
    """
    vocab, encoder = base.settings["model"]["vocab"], base.tokenizer().model
    added = Added(set(vocab))
    for character in candidate_characters(sample, coverage, every=longest == 1):
        spelt = _letters(character)
        if spelt in vocab or spelt in dropped:
            continue
        tokens = [token.value for token in encoder.tokenize(spelt)]
        begins = list(itertools.accumulate(tokens))[:-1]
        new = 1 + sum(begin not in added.known for begin in begins[1:])
        if len(added.pieces) + new <= wanted and all(_is_chinese_only(begin) for begin in begins[1:]):
            for left, right in zip(begins, tokens[1:], strict=True):
                if left + right not in added.known:
                    added.join(left, right)
    return added


def _add_longer(base: Base, sample: Sample, added: Added, wanted: int, longest: int, dropped: set[str]) -> None:
    """Add to `added` pieces of 2 to `longest` ideographs, none `dropped`, in BPE's order, until `wanted`."""
    encoder = base.tokenizer(enlarge(base, added)).model
    words, spelt_by = Counter[str](), dict[str, str]()  # what a letter, or letters merged, stand for
    for run, count in sample.runs.items():
        word = ""
        for token in encoder.tokenize(_letters(run)):
            is_whole = "\ufffd" not in _text(token.value)
            letter = chr(_FIRST + token.id) if is_whole else " "  # no piece reaches over a part of a character
            word += letter
            spelt_by[letter] = token.value
        words.update(dict.fromkeys(word.split(), count))
    spelt_by.pop(" ", None)
    from tokenizers import Tokenizer, models, trainers

    learner = Tokenizer(models.BPE())
    most = len(spelt_by) + 4 * wanted  # some are longer than allowed, or old pieces
    trainer = trainers.BpeTrainer(vocab_size=most, min_frequency=2, max_token_length=longest, show_progress=False)
    learner.train_from_iterator((word for word, count in words.items() for _ in range(count)), trainer)
    old = base.settings["model"]["vocab"]
    for left, right in json.loads(learner.to_str())["model"]["merges"]:
        if left not in spelt_by or right not in spelt_by:
            continue
        joined = spelt_by[left] + spelt_by[right]
        if joined in old or joined in dropped or len(_text(joined)) > longest:
            continue
        if joined not in added.known and len(added.pieces) == wanted:
            return
        added.join(spelt_by[left], spelt_by[right])
        spelt_by[left + right] = joined


def _find_dead(extended: tokenizers.Tokenizer, pieces: Sequence[str], old: int) -> set[str]:
    """Return the new pieces, whose ids begin at `old`, that do not encode to their own id; changes `extended`."""
    extended.model.ignore_merges = False  # which would take any piece that is a whole word
    dead = set()
    for number, piece in enumerate(pieces, start=old):
        text = _text(piece)
        is_part = "\ufffd" in text
        tokens = extended.model.tokenize(piece) if is_part else ()
        ids = [token.id for token in tokens] if is_part else extended.encode(text, add_special_tokens=False).ids
        if ids != [number]:
            dead.add(piece)
    return dead


def _is_chinese_only(begin: str) -> bool:
    """Return whether every character whose bytes begin with these byte-level letters is Chinese."""
    data = bytes(_BYTE_OF[letter] for letter in begin)
    length = 3 if data[0] < 0xF0 else 4
    rest = length - len(data)
    ends = (b"\x80" * rest, b"\xbf" * rest)
    return all(CHINESE.fullmatch((data + end).decode(errors="replace")) for end in ends)


def load(path: Path) -> tokenizers.Tokenizer:
    """Return a new tokenizer that reads control tokens as text and never cuts. UserError if unreadable."""
    import tokenizers  # of the extra `data`, which planning does without

    try:
        loaded = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing more particular
        raise UserError(
            f"{path} is not a tokenizer that the library tokenizers reads",
            evidence=str(error) if path.exists() else "there is no such file",
            fix="fetch the file again, or give another tokenizer in tokenizer.path",
        ) from None
    loaded.no_truncation()
    loaded.no_padding()
    loaded.encode_special_tokens = True
    return loaded


def fingerprint(path: Path) -> str:
    """Return one hex sha256 over the tokenizer's files beside `path`, itself included: those named in COPIED."""
    known = pretrained.fingerprint(path.parent)
    return files.sha256_json({name: known[name] for name in pretrained.COPIED if name in known})


def copy(path: Path, directory: Path) -> Described:
    """Copy the tokenizer's files to directory/tokenizer; return its description. UserError as describe()."""
    described = describe(path)
    pretrained.copy_files(path.parent, directory / "tokenizer")
    return described


def describe(path: Path) -> Described:
    """Return {vocab_size, bos_id, eos_id, begins, sha256} of a tokenizer.json; bos_id is -1 without one.

    `begins`: a text begins with it. Raises UserError when the file cannot be read or names no end of text.
    """
    load(path)
    opened = pretrained.open_tokenizer(path.parent, "tokenizers")
    return {
        "vocab_size": opened.vocab_size,
        "bos_id": opened.bos[1] if opened.bos else -1,
        "eos_id": opened.eos[1],
        "begins": opened.begins,
        "sha256": fingerprint(path),
    }


@functools.cache
def added_tokens(path: Path) -> tuple[str, ...]:
    """Return the texts of the added tokens, control ones and users'; cached by path. UserError if unreadable."""
    return tuple(token.content for token in load(path).get_added_tokens_decoder().values())


def gigatoken_settings(path: Path) -> Mapping[str, Any]:
    """Return the content without control tokens, whose names are then text. NotJson if it is not JSON."""
    settings: Mapping[str, Any] = files.read_json(path)
    tokens = [token for token in settings.get("added_tokens") or () if not token["special"]]
    return {**settings, "added_tokens": tokens}
