"""Rows with a preference as tokens: a prompt, the answer that was chosen and the one that was not.

In the shards a pair is two neighbouring documents, chosen and rejected, whose masks mark the answers.

The formats of the Hub's usual sets: prompt with chosen and rejected, each a text or messages; two whole dialogues that
share their beginning; a list of turns with two answers. For GRPO a prompt is enough, and a verifiable reward needs the
right answer beside it. A row is encoded as SFT encodes a dialogue, so the model meets the format that it knows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from finlm.data import answer_letter
from finlm.data.chat import Message, Refused
from finlm.data.chat_encode import Encoded, Encoder
from finlm.data.chat_read import ROLES, asked, checked, with_system
from finlm.recipe.schema import Recipe

_PROMPTS = ("prompt", "messages", "conversations", "question", "instruction", "input")
_LETTERS = "ABCDEFGH"  # of the questions of a file: some have more than four options


class Preference(NamedTuple):
    """A row: the dialogue up to the answer, both answers, and the right one where the row says it."""

    prompt: list[Message]
    chosen: str | None
    rejected: str | None
    answer: str | None


def longest(recipe: Recipe) -> int | None:
    """Tokens of what is stored of a row at most; None in stages that learn from no preferences."""
    if recipe.grpo is not None:
        return recipe.batch.sequence_length - recipe.grpo.max_new_tokens
    return recipe.batch.sequence_length if recipe.stage in ("dpo", "reward") else None


def preference_of(row: Any) -> Preference:
    """The row's preference. Raises Refused with the reason where there is none."""
    if not isinstance(row, dict):
        raise Refused("not an object")
    chosen, rejected = (_turns(row[name], "assistant") if name in row else [] for name in ("chosen", "rejected"))
    if len(chosen) > 1 or len(rejected) > 1:  # whole dialogues, which repeat the prompt where there is one
        shared = 0
        while shared < min(len(chosen), len(rejected)) and chosen[shared] == rejected[shared]:
            shared += 1
        prompt = chosen[:shared]
        chosen, rejected = chosen[shared:], rejected[shared:]
        if len(chosen) != 1 or len(rejected) != 1:
            raise Refused("chosen and rejected differ in more than the last answer")
    else:
        prompt = _asked(row)
    prompt = with_system(row, prompt)
    if not prompt or prompt[-1]["role"] != "user":
        raise Refused("no prompt that ends with the user's turn")
    answer = row.get("answer")
    return Preference(
        prompt,
        _answer(chosen),
        _answer(rejected),
        str(answer) if isinstance(answer, (str, int, float)) else None,
    )


def by_letter(recipe: Recipe) -> bool:
    """Whether an answer earns its reward by its letter: then a row without a right one teaches nothing."""
    return recipe.grpo is not None and recipe.grpo.reward == "choice"


def pieces(encoder: Encoder, preference: Preference, stage: str, limit: int, needs_letter: bool) -> list[Encoded]:
    """What is stored of a row, masks on the answers. Raises Refused with the reason.

    dpo, reward: the chosen and the rejected sequence, each at most limit // 2. grpo: the prompt at most `limit`,
    with the right answer behind it where the row says one, or its letter where the reward needs that.
    """
    if stage == "grpo":
        return [_prompt(encoder, preference, limit, needs_letter)]
    if preference.chosen is None or preference.rejected is None:
        raise Refused("no chosen or no rejected answer")
    if preference.chosen == preference.rejected:
        raise Refused("chosen and rejected are the same")
    chosen, rejected = (_sequence(encoder, preference, text) for text in (preference.chosen, preference.rejected))
    if max(len(chosen.ids), len(rejected.ids)) > limit // 2:
        raise Refused("a sequence longer than half a row")
    # Where tokens merge over the answer's beginning, the prompts differ in their last tokens: those are answers too.
    prompt = min(chosen.mask.index(1), rejected.mask.index(1))
    while prompt and chosen.ids[:prompt] != rejected.ids[:prompt]:
        prompt -= 1
    return [Encoded(one.ids, bytes(prompt) + b"\1" * (len(one.ids) - prompt)) for one in (chosen, rejected)]


def letter(text: str) -> str | None:
    """The option that an answer names, read as the evaluation reads it; None where it names none."""
    return answer_letter.named(text, _LETTERS)


def _prompt(encoder: Encoder, preference: Preference, limit: int, needs_letter: bool) -> Encoded:
    """The ids after which the model answers, and the right answer."""
    checked([*preference.prompt, {"role": "assistant", "content": "-"}], encoder.tokenizer.control)
    ids = encoder.tokenizer.encode(encoder.template.render(preference.prompt, generation=True)[0])[0]
    if len(ids) > limit:
        raise Refused("a prompt that leaves no room for its answer")
    right = preference.answer
    if needs_letter or not right:
        right = letter(right or "") or letter(preference.chosen or "")
    if needs_letter and right is None:
        raise Refused("no right letter")
    answer = encoder.tokenizer.encode(right)[0] if right else []
    return Encoded(ids + answer, bytes(len(ids)) + b"\1" * len(answer))


def _sequence(encoder: Encoder, preference: Preference, answer: str) -> Encoded:
    """Prompt and answer, the mask on this answer alone, without what a template writes after the end of the turn."""
    messages = checked([*preference.prompt, {"role": "assistant", "content": answer}], encoder.tokenizer.control)
    ids, mask = encoder.encode(messages)
    end = mask.rindex(1) + 1
    begin = mask.rfind(0, 0, end) + 1
    return Encoded(ids[:end], bytes(begin) + b"\1" * (end - begin))


def _asked(row: dict[str, Any]) -> list[Message]:
    name = next((name for name in _PROMPTS if row.get(name)), None)
    if name is None:
        return []
    return asked(row, name) if isinstance(row[name], str) else _turns(row[name], "user")


def _turns(value: Any, role: str) -> list[Message]:
    """Messages of a text, a turn or a list of turns; role is whose a bare text is."""
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    if isinstance(value, dict):
        value = [value]
    if not isinstance(value, Sequence):
        raise Refused("neither text nor turns")
    found = []
    for item in value:
        who = item.get("role", item.get("from")) if isinstance(item, dict) else None
        content = item.get("content", item.get("value")) if isinstance(item, dict) else None
        if not isinstance(who, str) or who not in ROLES or not isinstance(content, str):
            raise Refused("a turn has no known role or no text")
        found.append({"role": ROLES[who], "content": content})
    return found


def _answer(turns: list[Message]) -> str | None:
    if not turns:
        return None
    if turns[0]["role"] != "assistant" or not turns[0]["content"].strip():
        raise Refused("an answer is empty or not the assistant's")
    return turns[0]["content"]
