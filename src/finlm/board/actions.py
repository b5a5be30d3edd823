"""What the board does beside reading, with --allow-actions only: save a fork of a recipe, talk to a run's model."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from finlm.base.errors import UserError
from finlm.board import pages
from finlm.recipe import derive

if TYPE_CHECKING:
    from finlm.inference.chat import Talker

_TEMPERATURE, _TOKENS = 0.7, 256


def fork(board: pages.Board, form: Mapping[str, str]) -> str:
    """Write recipes/NAME/<file> with the values of the form and return its path. Raises UserError and Missing."""
    wanted = pages.Wanted.read(board, form.get("recipe", ""), form)
    pages.find_recipe(wanted.name)
    return str(derive.fork(form.get("name", ""), Path(wanted.name), overrides=wanted.overrides))


class Talk:
    """Answers chat requests; keeps the model that was loaded last."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._path: Path | None = None
        self._talker: Talker | None = None

    def answer(self, board: pages.Board, name: str, body: bytes) -> str:
        """Return the model's answer to a conversation, or its continuation of a text. Raises UserError and Missing."""
        run, messages = pages.find_run(board, name), _messages(body)
        with self._lock:
            if (run.export / "chat_template.jinja").is_file():
                return self._open(Path(run.export)).ask(messages, _TEMPERATURE, _TOKENS).text
            from finlm.inference import export  # loads torch

            return export.generate(run.export, messages[-1]["content"], tokens=64)

    def _open(self, path: Path) -> Talker:
        from finlm.inference.chat import Talker  # loads torch
        from finlm.inference.open import open_model

        if self._talker is None or self._path != path:
            self._path, self._talker = path, Talker(open_model(path))
        return self._talker


def _messages(body: bytes) -> list[dict[str, str]]:
    """Return the messages of a request body. Raises UserError when it holds no conversation."""
    try:
        sent: Any = orjson.loads(body)
        found = [{"role": str(row["role"]), "content": str(row["content"])} for row in sent["messages"]]
    except (ValueError, KeyError, TypeError):
        found = []
    if not found or any(row["role"] not in ("user", "assistant") for row in found) or not found[-1]["content"].strip():
        raise UserError("no conversation was sent", fix="write something")
    return found
