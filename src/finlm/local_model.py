"""A model on this machine in the place of an endpoint: whom `finlm self-qa` asks when the recipe names no endpoint.

One request at a time, no batching: for small models and small sets. A server (vLLM, llama.cpp) is the way to many.
"""

from __future__ import annotations

from pathlib import Path

from finlm.base.errors import UserError
from finlm.data.chat_api import Messages, Refused, Reply
from finlm.train.generate import Talker
from finlm.train.opened import open_model


class Local:
    """A checkpoint, run, export or Hugging Face directory that answers; fingerprint is of its weights."""

    def __init__(self, path: Path, seed: int) -> None:
        """Raises UserError when there is no model, or one without a chat template."""
        if not path.exists():
            raise UserError(
                f"self_qa.model: there is no {path}",
                evidence="without self_qa.endpoint it names a directory on this machine",
                fix="give runs/<run> or a model directory, or set self_qa.endpoint to an OpenAI-compatible address",
            )
        opened = open_model(path)
        self.fingerprint = opened.fingerprint
        self._talker = Talker(opened, seed)

    def ask(self, messages: Messages, temperature: float, max_tokens: int) -> Reply:
        """The model's reply. Raises Refused when the messages are longer than its context."""
        try:
            said = self._talker.ask(messages, temperature, max_tokens)
        except UserError as error:
            raise Refused(error.problem) from None
        return Reply(said.text, said.finish_reason, said.prompt_tokens, said.completion_tokens)
