"""A model that answers: token by token, with the keys and values of the conversation so far kept between turns.

A new turn computes only what differs from what was computed last: the longest common start of the token ids decides,
so an edited or shortened history is as safe as a continued one. Sampling is temperature and nucleus (Holtzman et al.
2020); temperature 0 takes the likeliest token. One conversation at a time, no batching: evals/choice.py batches.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import torch
from jinja2 import TemplateError

from finlm.base.errors import UserError
from finlm.train.opened import Opened

Messages = Sequence[Mapping[str, str]]


@dataclass(frozen=True)
class Reply:
    """What the model said; finish_reason is "stop" when it ended by itself, "length" when it was cut off."""

    text: str
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int


class Talker:
    """A conversation partner. Raises UserError for a model without a chat template."""

    def __init__(self, opened: Opened, seed: int = 0) -> None:
        if not opened.tokenizer.chat_template:
            raise UserError(
                f"{opened.name} has no chat template: it continues text and has not learnt to answer",
                fix="use `finlm sample` with it, or train it further with a recipe of stage sft",
            )
        self.opened = opened
        self.reply: Reply | None = None  # the last one
        self.reused_tokens = 0  # of the last prompt, not computed again
        self._random = torch.Generator(opened.device).manual_seed(seed)
        self._forget()

    def _forget(self) -> None:
        self._cache: Any = None
        self._seen: list[int] = []  # whose keys and values are in the cache

    def ask(self, messages: Messages, temperature: float, max_tokens: int) -> Reply:
        """The whole answer to the last message."""
        for _ in self.stream(messages, temperature, 1.0, max_tokens):
            pass
        assert self.reply is not None
        return self.reply

    def stream(self, messages: Messages, temperature: float, top_p: float, max_tokens: int) -> Iterator[str]:
        """The answer to the last message in pieces of whole characters; self.reply holds it at the end.

        Raises UserError when the conversation leaves no room in the model's context, or is none for its template.
        """
        tokenizer = self.opened.tokenizer
        try:
            text = tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
        except TemplateError as error:
            raise UserError(
                f"the chat template of {self.opened.name} does not take this conversation",
                evidence=str(error),
                fix="leave out the system prompt, and let user and assistant take turns",
            ) from None
        prompt: list[int] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        room = min(max_tokens, self.opened.context - len(prompt))
        if room < 1:
            raise UserError(
                f"the conversation has {len(prompt):,} tokens, the model's context {self.opened.context:,}",
                fix="start a new one (/reset in the chat)",
            )
        written, shown, reason = list[int](), "", "length"
        self.reply = None
        for token in self._tokens(prompt, temperature, top_p):
            if token in self.opened.eos_ids:
                reason = "stop"
                break
            written.append(token)
            text = tokenizer.decode(written, skip_special_tokens=True)
            # An unfinished character of several byte tokens shows as U+FFFD until its last byte is there.
            if not text.endswith("\ufffd") and len(text) > len(shown):
                yield text[len(shown) :]
                shown = text
            if len(written) == room:
                break
        text = tokenizer.decode(written, skip_special_tokens=True)
        if len(text) > len(shown):
            yield text[len(shown) :]
        self.reply = Reply(text, reason, len(prompt), len(written))

    def _tokens(self, prompt: list[int], temperature: float, top_p: float) -> Iterator[int]:
        """Sampled ids without end. What has been computed is always what _seen says, wherever this is left."""
        common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(prompt[:-1], self._seen, strict=False)))
        self._shorten(common)
        self.reused_tokens = len(self._seen)
        ids = prompt[len(self._seen) :]
        while True:
            logits = self._logits(ids)
            token = self._choose(logits, temperature, top_p)
            yield token
            ids = [token]

    def _shorten(self, length: int) -> None:
        """Keep the keys and values of the first tokens only."""
        if self._cache is None or length == len(self._seen):
            return
        layers = getattr(self._cache, "layers", ())
        if not length or any(getattr(layer, "keys", None) is None for layer in layers) or self._slides():
            self._forget()
            return
        for layer in layers:
            layer.keys, layer.values = layer.keys[:, :, :length], layer.values[:, :, :length]
        del self._seen[length:]

    def _slides(self) -> bool:
        """Whether the model forgets its beginning: then a cache cannot be shortened."""
        return bool(getattr(self.opened.model.config, "sliding_window", None))

    def _logits(self, ids: list[int]) -> torch.Tensor:
        """fp32 [vocabulary] after ids, which follow what was seen."""
        inputs = torch.tensor([ids], device=self.opened.device)
        cache, self._cache = self._cache, None  # an interrupt while it grows leaves it unusable
        seen, self._seen = self._seen, []
        with torch.inference_mode():
            out = self.opened.model(inputs, past_key_values=cache, use_cache=True, logits_to_keep=1)
        self._cache, self._seen = out.past_key_values, seen + ids
        return out.logits[0, -1].float()  # type: ignore[no-any-return]

    def _choose(self, logits: torch.Tensor, temperature: float, top_p: float) -> int:
        if temperature <= 0:
            return int(logits.argmax())
        warm = (logits - logits.max()) / temperature  # at most 0: a small temperature would reach infinity
        ordered, places = torch.sort(torch.softmax(warm, dim=-1), descending=True)
        before = ordered.cumsum(0) - ordered
        ordered[before >= top_p] = 0  # the first always stays
        return int(places[torch.multinomial(ordered, 1, generator=self._random)])
