"""Open the tokenizer of a model that a recipe starts from, without transformers.

tokenizer.json goes through `tokenizers`, tokenizer.model through sentencepiece. Weights are not read here.

Both give the position of every token in the text, from which the labels are made. Control tokens (<s>, </s>,
<|im_end|>) are known in the text that a template wrote. sentencepiece knows none of them, so the text is cut at them,
and only what stands at its very beginning gets sentencepiece's leading space, as in transformers' LlamaTokenizer with
legacy=False.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal, Protocol

from finlm.base import files
from finlm.base.errors import UserError
from finlm.recipe.models import config_json

Library = Literal["auto", "sentencepiece", "tokenizers"]
COPIED = (
    *("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    "chat_template.jinja",
)
_SPACE = "\u2581"  # sentencepiece's
FILES = (*COPIED, "config.json", "generation_config.json")


class Tokenizer(Protocol):
    """The interface of a model's tokenizer, whichever library reads it."""

    library: str
    vocab_size: int
    bos: tuple[str, int] | None  # (text, id)
    eos: tuple[str, int]
    begins: bool  # a text begins with bos
    control: tuple[str, ...]  # texts of control tokens: no message may contain one
    chat_template: str | None

    def encode(self, text: str) -> tuple[list[int], list[int]]:
        """Return (ids, index of the character at which each begins); control tokens in the text become their ids."""

    def text_ids(self, text: str) -> list[int]:
        """Return the ids of a text without control tokens, as in pretraining: with sentencepiece's leading space."""

    def id_of(self, token: str) -> int | None:
        """Return the id of a token or piece by its text; None if there is none."""

    def decode(self, ids: list[int]) -> str:
        """Return the text of the ids, with control tokens by name."""


def open_tokenizer(directory: Path, library: Library = "auto") -> Tokenizer:
    """Open the tokenizer of a model directory; `auto` prefers tokenizer.json to tokenizer.model.

    The last four stay cached by path, so callers must not change them. Raises UserError if the directory has no
    tokenizer for the library, or if that cannot be read or names no end of text.
    """
    wanted = {"auto": ("tokenizer.json", "tokenizer.model"), "tokenizers": ("tokenizer.json",)}
    for name in wanted.get(library, ("tokenizer.model",)):
        if (directory / name).is_file():
            return _open_cached(directory, name)
    raise UserError(
        f"{directory} holds no tokenizer" + ("" if library == "auto" else f" for {library}"),
        evidence=f"looked for {' and '.join(wanted.get(library, ('tokenizer.model',)))}",
        fix="give a complete model directory in model.init_from",
    )


def copy_files(source: Path, directory: Path, names: Sequence[str] = COPIED) -> None:
    """Copy the named files that exist in `source` to `directory`, over older ones; create that directory if missing."""
    directory.mkdir(parents=True, exist_ok=True)
    for name in names:
        if (source / name).is_file():
            shutil.copyfile(source / name, directory / name)


def fingerprint(directory: Path) -> dict[str, str]:
    """Return {name: hex sha256} of those of FILES that the directory has: tokenizer, chat template and config files."""
    return {name: files.sha256_file(directory / name) for name in FILES if (directory / name).is_file()}


@lru_cache(maxsize=4)
def _open_cached(directory: Path, name: str) -> Tokenizer:
    """Return the tokenizer in file `name` of the directory, as open_tokenizer() does."""
    about = _About.read(directory)
    return _Json(directory / name, about) if name == "tokenizer.json" else _Pieces(directory / name, about)


@dataclass(frozen=True)
class _About:
    """Settings in the files beside a tokenizer."""

    bos_token: str | None
    eos_token: str | None
    add_bos_token: bool
    chat_template: str | None

    @classmethod
    def read(cls, directory: Path) -> _About:
        """Return the settings in tokenizer_config.json, and bos and eos of special_tokens_map.json where it lacks them.

        chat_template.jinja, or a template named `default`, comes first. Raises NotJson for a damaged JSON file.
        """
        path, template = directory / "tokenizer_config.json", directory / "chat_template.jinja"
        config = files.read_json(path) if path.is_file() else {}
        older = directory / "special_tokens_map.json"
        named = files.read_json(older) if older.is_file() else {}
        tokens = [config.get(key) or named.get(key) for key in ("bos_token", "eos_token")]
        bos, eos = (token["content"] if isinstance(token, dict) else token for token in tokens)
        chat = template.read_text(encoding="utf-8") if template.is_file() else config.get("chat_template")
        if isinstance(chat, list):  # several by name
            chat = {item["name"]: item["template"] for item in chat}.get("default")
        return cls(bos, eos, config.get("add_bos_token") is True, chat)


class _Json:
    """The tokenizer of a tokenizer.json, read by `tokenizers`.

    Raises UserError when the file cannot be read, or lacks about.eos_token (by default </s>).
    """

    library = "tokenizers"

    def __init__(self, path: Path, about: _About) -> None:
        from tokenizers import Tokenizer as Fast

        try:
            self._fast = Fast.from_file(str(path))
        except Exception as error:  # tokenizers raises no other
            raise _unreadable_error(path, error) from None
        self._fast.no_truncation()
        self._fast.no_padding()
        self.vocab_size = 1 + max(self._fast.get_vocab().values())  # ids may have holes
        special = [token.content for token in self._fast.get_added_tokens_decoder().values() if token.special]
        self.control = tuple(special)
        self.bos = self._token_of(about.bos_token)
        eos = self._token_of(about.eos_token or "</s>")
        if eos is None:
            raise UserError(
                f"{path.parent}: the tokenizer names no end-of-text token", fix="set eos_token in its config"
            )
        self.eos = eos
        self.begins = self.bos is not None and (about.add_bos_token or self._fast.encode("a").ids[:1] == [self.bos[1]])
        self.chat_template = about.chat_template

    def _token_of(self, text: str | None) -> tuple[str, int] | None:
        """Return (text, id) of a token; None for None or text that is no token."""
        number = self.id_of(text) if text else None
        return None if text is None or number is None else (text, number)

    def encode(self, text: str) -> tuple[list[int], list[int]]:
        """See Tokenizer.encode."""
        encoding = self._fast.encode(text, add_special_tokens=False)
        return encoding.ids, [start for start, _ in encoding.offsets]

    def text_ids(self, text: str) -> list[int]:
        """See Tokenizer.text_ids; with the leading space that sentencepiece would add."""
        if text.startswith((" ", _SPACE)) and self.encode(" a")[0] == self.encode("a")[0]:
            text = _SPACE + text  # Metaspace takes the text's space for the leading one, sentencepiece adds its own
        return self.encode(text)[0]

    def id_of(self, token: str) -> int | None:
        """See Tokenizer.id_of."""
        number: int | None = self._fast.token_to_id(token)
        return number

    def decode(self, ids: list[int]) -> str:
        """Return the text of the ids, with control tokens by name."""
        return str(self._fast.decode(ids, skip_special_tokens=False))


def _unreadable_error(path: Path, error: Exception) -> UserError:
    """Return the UserError for a tokenizer's file that its library cannot read."""
    fix = "put a whole copy in its place; a clone without Git LFS has only names of its large files"
    return UserError(f"{path} holds no tokenizer", evidence=str(error), fix=fix)


class _Pieces:
    """The tokenizer of a tokenizer.model, read by sentencepiece; of `about` only chat_template is used.

    Raises UserError when the file cannot be read or no piece is the end of text.
    """

    library = "sentencepiece"

    def __init__(self, path: Path, about: _About) -> None:
        import sentencepiece
        from sentencepiece import sentencepiece_model_pb2

        try:
            self._first = sentencepiece.SentencePieceProcessor(model_file=str(path))
        except (RuntimeError, OSError) as error:
            raise _unreadable_error(path, error) from None
        proto = sentencepiece_model_pb2.ModelProto()
        proto.ParseFromString(path.read_bytes())
        proto.normalizer_spec.add_dummy_prefix = False
        self._later = sentencepiece.SentencePieceProcessor(model_proto=proto.SerializeToString())
        self.vocab_size = len(self._first)
        bos, eos = self._first.bos_id(), self._first.eos_id()
        if eos < 0:
            raise UserError(f"{path} has no end-of-text piece", fix="give a model directory with tokenizer.json")
        self.bos = (self._first.id_to_piece(bos), bos) if bos >= 0 else None
        self.begins = self.bos is not None
        self.eos = (self._first.id_to_piece(eos), eos)
        self.control = tuple(text for text, _ in (self.bos, self.eos) if text) if self.bos else (self.eos[0],)
        self.chat_template = about.chat_template
        self._cut = re.compile("(" + "|".join(map(re.escape, self.control)) + ")")

    def encode(self, text: str) -> tuple[list[int], list[int]]:
        """See Tokenizer.encode; a text that begins with a space or a control token gets no leading space."""
        ids, starts, at = [], [], 0
        for part in self._cut.split(text):
            if part in self.control:
                ids.append(self._first.piece_to_id(part))
                starts.append(at)
            elif part:
                first = at == 0 and not part.startswith(" ")
                encoding = (self._first if first else self._later).encode(part, return_type="offset_mapping")
                ids += encoding["ids"]
                starts += [at + begin for begin, _ in encoding["offsets"]]
            at += len(part)
        return ids, starts

    def text_ids(self, text: str) -> list[int]:
        """Return sentencepiece's ids of a text without control tokens, with its leading space."""
        return list(self._first.encode(text))

    def id_of(self, token: str) -> int | None:
        """See Tokenizer.id_of."""
        number = int(self._first.piece_to_id(token))
        return number if self._first.id_to_piece(number) == token else None

    def decode(self, ids: list[int]) -> str:
        """Return the text of the ids, with control tokens by name."""
        text, run = "", list[int]()
        names = {number: name for name, number in filter(None, (self.bos, self.eos))}
        for number in ids:
            if number in names:
                text += (self._later if text else self._first).decode(run) + names[number]
                run = []
            else:
                run.append(number)
        return text + str((self._later if text else self._first).decode(run))  # _first drops the leading space


def snapshot(identity: str, revision: str | None) -> Path:
    """Return the local directory of a Hub model's tokenizer and config.json; download what the Hub's cache lacks.

    `identity` is its Hub id; without `revision` the newest is taken. Raises UserError when that fails.
    """
    from huggingface_hub import snapshot_download  # a quarter of a second that only Hub ids need

    problem = f"cannot fetch the tokenizer of {identity}"
    with config_json.hub_errors(problem, "give a directory in model.init_from, or check id and revision"):
        return Path(snapshot_download(identity, revision=revision, allow_patterns=list(FILES)))
