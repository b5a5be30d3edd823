"""A dialogue to tokens and to which of them are learnt from.

The whole text is encoded at once, as a model will see it, and a token counts when it begins inside what the assistant
says. A dialogue longer than a row is split between turns, each part with the system prompt again; a single exchange
that does not fit is left out, because an answer without its end teaches not to end.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np

from finlm.data import chat, chat_tokens
from finlm.data.chat import Message, Refused
from finlm.recipe.schema_post import Chat, Sft

LEFT_OUT = "exchanges longer than a row"  # counted among what became of dialogues


class Encoded(NamedTuple):
    """One piece of a dialogue, or a document."""

    ids: list[int]
    mask: bytes  # one a token: 1 = learnt from


@dataclass(frozen=True)
class Rules:
    """Everything that decides the tokens of a dialogue."""

    tokenizer: Path
    chat: Chat
    sft: Sft
    limit: int  # tokens of a dialogue at most


class Encoder:
    """Dialogues to tokens by one set of rules."""

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self.tokenizer = chat_tokens.open_tokenizer(rules.tokenizer, rules.sft.tokenizer)
        source = chat.source_of(rules.chat.template, self.tokenizer.chat_template, rules.chat.system)
        bos, eos = self.tokenizer.bos, self.tokenizer.eos
        self.template = chat.Template(source, bos[0] if bos else "", eos[0])

    @cached_property
    def end_id(self) -> int:
        """The control token with which the template ends an answer; the end of a text where it writes none."""
        text, spans = self.template.render(chat.PROBE)
        answered = text[: spans[-1][1]].rstrip() if spans else ""
        if not answered.endswith(self.tokenizer.control):
            return self.tokenizer.eos[1]
        return self.tokenizer.encode(answered)[0][-1]

    def pieces(self, messages: list[Message], counts: Counter[str]) -> Iterator[Encoded]:
        """The dialogue, or its parts. Raises Refused with the reason; counts what was split or cut."""
        encoded = self.encode(messages)
        if len(encoded.ids) <= self.rules.limit:
            yield encoded
        elif self.rules.chat.overlong == "drop":
            raise Refused("longer than a row")
        elif self.rules.chat.overlong == "truncate":
            counts["truncated"] += 1
            cut = Encoded(encoded.ids[: self.rules.limit], encoded.mask[: self.rules.limit])
            if not any(cut.mask):
                raise Refused("longer than a row before the answer begins")
            yield cut
        else:
            yield from self._parts(messages, counts)

    def encode(self, messages: list[Message]) -> Encoded:
        """All of the dialogue in one piece."""
        text, spans = self.template.render(messages)
        if self.rules.sft.answer_apart:
            ids, mask = self._apart(text, spans)
        else:
            ids, starts = self.tokenizer.encode(text)
            places, learnt = np.array(starts), np.zeros(len(ids), dtype=np.uint8)
            for first, last in spans:
                learnt[(first <= places) & (places < last)] = 1
            mask = bytearray(learnt)
        if not self.rules.sft.assistant_only_loss:
            mask = bytearray(b"\1" * len(ids))
        if self.rules.sft.mask_eos:
            for number, token in enumerate(ids):
                mask[number] &= token != self.tokenizer.eos[1]
        return Encoded(ids, bytes(mask))

    def document(self, text: str) -> Encoded:
        """Pretraining text: <s> text </s>, every token learnt from."""
        bos, eos = self.tokenizer.bos, self.tokenizer.eos
        if any(token in text for token in self.tokenizer.control):
            raise Refused("control token in the text")
        ids = self.tokenizer.encode((bos[0] if bos else "") + text + eos[0])[0]
        mask = bytes(0 if self.rules.sft.mask_eos and token == eos[1] else 1 for token in ids)
        return Encoded(ids, mask)

    def round_trip(self, messages: list[Message]) -> dict[str, bool]:
        """What holds for this dialogue: its text comes back, and its tokens begin with those of the prompt alone."""
        text, _ = self.template.render(messages)
        prompt, _ = self.template.render(messages[:-1], generation=True)
        ids, asked = self.encode(messages).ids, self.tokenizer.encode(prompt)[0]
        same = self.rules.sft.answer_apart or self.tokenizer.decode(ids).strip() == text.strip()
        return {"text": same, "prompt": ids[: len(asked)] == asked}

    def _parts(self, messages: list[Message], counts: Counter[str]) -> Iterator[Encoded]:
        """As many exchanges a part as fit, in order."""
        system = messages[:1] if messages[0]["role"] == "system" else []
        turns = messages[len(system) :]
        done = parts = lost = 0
        while done < len(turns):
            fitting: Encoded | None = None
            end = done
            while end < len(turns):
                tried = self.encode([*system, *turns[done : end + 2]])
                if len(tried.ids) > self.rules.limit:
                    break
                fitting, end = tried, end + 2
            if fitting is None:
                lost += 1
                done += 2
                continue
            parts += 1
            yield fitting
            done = end
        if not parts:
            raise Refused("longer than a row")
        counts.update({"split": 1, LEFT_OUT: lost} if lost else {"split": 1})

    def _apart(self, text: str, spans: chat.Spans) -> tuple[list[int], bytearray]:
        """The released code's way: prompt and answer each a text of its own behind a <s>, and a </s> after each."""
        if len(spans) != 1:
            raise Refused("several turns, which the released code does not know")
        bos, eos = self.tokenizer.bos, self.tokenizer.eos
        first, last = spans[0]
        # <s> is set before the ids, not written into the text: what follows is the beginning of a text.
        prompt, answer = (
            ([bos[1]] if bos else [])
            + self.tokenizer.encode(part.removeprefix(bos[0] if bos else "").removesuffix(eos[0]))[0]
            + [eos[1]]
            for part in (text[:first], text[first:last])
        )
        return prompt + answer, bytearray(len(prompt)) + bytearray(b"\1" * len(answer))


@lru_cache(maxsize=2)
def encoder(tokenizer: Path, rules: str, limit: int) -> Encoder:
    """The encoder of a worker, opened once; rules is the JSON of (chat, sft)."""
    parts = rules.split("\n")
    return Encoder(Rules(tokenizer, Chat.model_validate_json(parts[0]), Sft.model_validate_json(parts[1]), limit))
