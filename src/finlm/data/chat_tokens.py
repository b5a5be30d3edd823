"""A model directory's tokenizer, without transformers: tokenizer.json through `tokenizers`, tokenizer.model through
sentencepiece.

Both give the place of every token in the text, from which the labels are made. Control tokens (<s>, </s>, <|im_end|>)
are known in the text that a template wrote; sentencepiece knows none itself, so the text is cut at them, and only what
stands at its very beginning gets sentencepiece's leading space, as in transformers' LlamaTokenizer with legacy=False.
"""

from __future__ import annotations

import re
import shutil
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, Protocol

from finlm.base import files
from finlm.base.errors import UserError

Library = Literal["auto", "sentencepiece", "tokenizers"]
COPIED = (
    *("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    "chat_template.jinja",
)
FILES = (*COPIED, "config.json", "generation_config.json")


class Tokenizer(Protocol):
    """What the two libraries have in common here."""

    library: str
    vocab_size: int
    bos: tuple[str, int] | None  # (text, id)
    eos: tuple[str, int]
    control: tuple[str, ...]  # texts of control tokens: no message may contain one
    chat_template: str | None

    def encode(self, text: str) -> tuple[list[int], list[int]]:
        """(ids, place in the text where each begins); control tokens in the text become themselves."""

    def decode(self, ids: list[int]) -> str:
        """The text of the ids, control tokens by name."""


def open_tokenizer(directory: Path, library: Library = "auto") -> Tokenizer:
    """The tokenizer of a model directory. Raises UserError where there is none for the library."""
    wanted = {"auto": ("tokenizer.json", "tokenizer.model"), "tokenizers": ("tokenizer.json",)}
    for name in wanted.get(library, ("tokenizer.model",)):
        if (directory / name).is_file():
            return _opened(directory, name)
    raise UserError(
        f"{directory} holds no tokenizer" + ("" if library == "auto" else f" for {library}"),
        evidence=f"looked for {' and '.join(wanted.get(library, ('tokenizer.model',)))}",
        fix="give a complete model directory in model.init_from",
    )


def copy_files(source: Path, directory: Path) -> None:
    """The tokenizer's files as they are, for export."""
    directory.mkdir(parents=True)
    for name in COPIED:
        if (source / name).is_file():
            shutil.copyfile(source / name, directory / name)


def fingerprint(directory: Path) -> dict[str, str]:
    """sha256 of everything that decides the ids and the template."""
    return {name: files.sha256_file(directory / name) for name in FILES if (directory / name).is_file()}


@lru_cache(maxsize=4)
def _opened(directory: Path, name: str) -> Tokenizer:
    about = _about(directory)
    return _Json(directory / name, about) if name == "tokenizer.json" else _Pieces(directory / name, about)


def _about(directory: Path) -> dict[str, Any]:
    """tokenizer_config.json with the template file that newer versions write beside it."""
    path, template = directory / "tokenizer_config.json", directory / "chat_template.jinja"
    about: dict[str, Any] = files.read_json(path) if path.is_file() else {}
    for key in ("bos_token", "eos_token"):
        if isinstance(about.get(key), dict):
            about[key] = about[key]["content"]
    if template.is_file():
        about["chat_template"] = template.read_text(encoding="utf-8")
    if isinstance(about.get("chat_template"), list):  # several by name
        named = {item["name"]: item["template"] for item in about["chat_template"]}
        about["chat_template"] = named.get("default")
    return about


class _Json:
    """tokenizer.json."""

    library = "tokenizers"

    def __init__(self, path: Path, about: dict[str, Any]) -> None:
        from tokenizers import Tokenizer as Fast

        self._fast = Fast.from_file(str(path))
        self._fast.no_truncation()
        self._fast.no_padding()
        self.vocab_size = self._fast.get_vocab_size()
        special = [token.content for token in self._fast.get_added_tokens_decoder().values() if token.special]
        self.control = tuple(special)
        self.bos = self._named(about.get("bos_token"))
        eos = self._named(about.get("eos_token") or "</s>")
        if eos is None:
            raise UserError(
                f"{path.parent}: the tokenizer names no end-of-text token", fix="set eos_token in its config"
            )
        self.eos = eos
        self.chat_template: str | None = about.get("chat_template")

    def _named(self, text: str | None) -> tuple[str, int] | None:
        number = self._fast.token_to_id(text) if text else None
        return None if text is None or number is None else (text, number)

    def encode(self, text: str) -> tuple[list[int], list[int]]:
        found = self._fast.encode(text, add_special_tokens=False)
        return found.ids, [start for start, _ in found.offsets]

    def decode(self, ids: list[int]) -> str:
        return str(self._fast.decode(ids, skip_special_tokens=False))


class _Pieces:
    """tokenizer.model."""

    library = "sentencepiece"

    def __init__(self, path: Path, about: dict[str, Any]) -> None:
        import sentencepiece
        from sentencepiece import sentencepiece_model_pb2

        proto = sentencepiece_model_pb2.ModelProto()
        proto.ParseFromString(path.read_bytes())
        self._first = sentencepiece.SentencePieceProcessor(model_file=str(path))
        proto.normalizer_spec.add_dummy_prefix = False
        self._later = sentencepiece.SentencePieceProcessor(model_proto=proto.SerializeToString())
        self.vocab_size = len(self._first)
        bos, eos = self._first.bos_id(), self._first.eos_id()
        if eos < 0:
            raise UserError(f"{path} has no end-of-text piece", fix="give a model directory with tokenizer.json")
        self.bos = (self._first.id_to_piece(bos), bos) if bos >= 0 else None
        self.eos = (self._first.id_to_piece(eos), eos)
        self.control = tuple(text for text, _ in (self.bos, self.eos) if text) if self.bos else (self.eos[0],)
        self.chat_template: str | None = about.get("chat_template")
        self._cut = re.compile("(" + "|".join(map(re.escape, self.control)) + ")")

    def encode(self, text: str) -> tuple[list[int], list[int]]:
        ids, starts, at = [], [], 0
        for part in self._cut.split(text):
            if part in self.control:
                ids.append(self._first.piece_to_id(part))
                starts.append(at)
            elif part:
                first = at == 0 and not part.startswith(" ")
                found = (self._first if first else self._later).encode(part, return_type="offset_mapping")
                ids += found["ids"]
                starts += [at + begin for begin, _ in found["offsets"]]
            at += len(part)
        return ids, starts

    def decode(self, ids: list[int]) -> str:
        text, run = "", list[int]()
        names = {number: name for name, number in filter(None, (self.bos, self.eos))}
        for number in ids:
            if number in names:
                text += self._decoded(run, text) + names[number]
                run = []
            else:
                run.append(number)
        return text + self._decoded(run, text)

    def _decoded(self, run: list[int], before: str) -> str:
        """Text of pieces; the leading space of what stands at the very beginning is sentencepiece's own."""
        return str((self._later if before else self._first).decode(run))
