"""Encode a dialogue, or a prompt with a chosen and a rejected answer, as tokens and a mask of those that are learnt.

The whole text is encoded at once, as a model will see it, and a token counts when it begins inside what the assistant
says. A dialogue longer than a row is split between turns, each part with the system prompt again; a single exchange
that does not fit is left out, because an answer without its end teaches not to end. Preferences come in FORMATS.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from finlm.base.errors import UserError
from finlm.dialogues import scoring, templates
from finlm.dialogues.templates import (
    ROLES,
    LeftOut,
    Message,
    Refused,
    Tools,
    check_messages,
    name_keys,
    question_turn,
    with_system,
)
from finlm.recipe.schema import Recipe
from finlm.recipe.schema_train import Chat, Sft
from finlm.tokens import pretrained

LEFT_OUT = "exchanges longer than a row"  # counted among what became of dialogues


class Encoded(NamedTuple):
    """The tokens of a dialogue, of a part of a dialogue, or of a document, with their mask."""

    ids: list[int]
    mask: bytes  # one a token: 1 = learnt from


@dataclass(frozen=True)
class Rules:
    """Everything that decides the tokens of a dialogue."""

    tokenizer: Path
    chat: Chat
    sft: Sft
    limit: int  # tokens of a dialogue at most
    ends: tuple[bool, int | None, int | None] = (True, None, None)  # of documents, as in the Tokenizer section; ids


class Encoder:
    """Encodes dialogues as tokens by one set of rules."""

    def __init__(self, rules: Rules) -> None:
        """Open tokenizer and template as the rules name them. Raises UserError when one cannot be used."""
        self.rules = rules
        self.tokenizer = pretrained.open_tokenizer(rules.tokenizer, rules.sft.tokenizer)
        source = templates.find_source(rules.chat.template, self.tokenizer.chat_template, rules.chat.system)
        bos, eos = self.tokenizer.bos, self.tokenizer.eos
        self.template = templates.Template(source, bos[0] if bos else "", eos[0])

    @cached_property
    def end_id(self) -> int:
        """The id of the control token with which the template ends an answer; the id of </s> if it writes none.

        Cached. Raises Refused if the template does not accept a question and its answer.
        """
        text, spans = self.template.render(templates.PROBE)
        answered = text[: spans[-1][1]].rstrip() if spans else ""
        if not answered.endswith(self.tokenizer.control):
            return self.tokenizer.eos[1]
        return self.tokenizer.encode(answered)[0][-1]

    def pieces(self, messages: list[Message], counts: Counter[str], tools: Tools = None) -> Iterator[Encoded]:
        """Yield the dialogue, or its parts if it is longer than a row; count in `counts` whether it was split or cut.

        `tools` are those that it may call. Raises LeftOut for a longer one if chat.overlong is drop, if what truncate
        keeps has no token to learn, or if no exchange fits. Raises Refused for messages that cannot be encoded.
        """
        encoded = self.encode(messages, tools)
        if len(encoded.ids) <= self.rules.limit:
            yield encoded
        elif self.rules.chat.overlong == "drop":
            raise LeftOut("longer than a row")
        elif self.rules.chat.overlong == "truncate":
            cut = Encoded(encoded.ids[: self.rules.limit], encoded.mask[: self.rules.limit])
            if not any(cut.mask):
                raise LeftOut("longer than a row before the answer begins")
            counts["truncated"] += 1
            yield cut
        else:
            yield from self._parts(messages, counts, tools)

    def encode(self, messages: list[Message], tools: Tools = None) -> Encoded:
        """Return the whole dialogue encoded, whatever its length, with the mask that sft's keys ask for.

        Raises Refused if the template does not accept it, and for several turns with sft.answer_apart.
        """
        text, spans = self.template.render(messages, tools=tools)
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
        """Return pretraining text encoded as <s> text </s>, with the ids of pretraining; all tokens are learnt.

        <s> is left out if the tokenizer begins no text with it. The recipe's section tokenizer may leave it out too, or
        name other tokens for both. With mask_eos </s> is not learnt. Raises LeftOut for a text with a control token.
        """
        if any(token in text for token in self.tokenizer.control):
            raise LeftOut("control token in the text")
        begins, begin, end = self.rules.ends
        if begin is None and self.tokenizer.bos and self.tokenizer.begins:
            begin = self.tokenizer.bos[1]
        end = self.tokenizer.eos[1] if end is None else end
        ids = [*([begin] if begins and begin is not None else []), *self.tokenizer.text_ids(text), end]
        mask = bytes(0 if self.rules.sft.mask_eos and token == end else 1 for token in ids)
        return Encoded(ids, mask)

    def round_trip(self, messages: list[Message], tools: Tools = None) -> dict[str, bool]:
        """Return {"text": whether decoding gives the text back, "prompt": whether the tokens begin with the prompt's}.

        "text" is True with answer_apart, where it is not checked. Raises Refused if the template does not accept the
        messages, and for several turns with sft.answer_apart.
        """
        text, _ = self.template.render(messages, tools=tools)
        prompt, _ = self.template.render(messages[:-1], generation=True, tools=tools)
        ids, asked = self.encode(messages, tools).ids, self.tokenizer.encode(prompt)[0]
        same = self.rules.sft.answer_apart or self.tokenizer.decode(ids).strip() == text.strip()
        return {"text": same, "prompt": ids[: len(asked)] == asked}

    def _parts(self, messages: list[Message], counts: Counter[str], tools: Tools) -> Iterator[Encoded]:
        """Yield parts of as many exchanges as fit, each with the system prompt; skip exchanges that are too long.

        At the end adds 1 split dialogue, if there are several parts, and the skipped exchanges to `counts`. Raises
        LeftOut when no exchange fits, Refused for messages that cannot be encoded.
        """
        system = messages[:1] if messages[0]["role"] == "system" else []
        turns = messages[len(system) :]
        begins = [place for place, message in enumerate(turns) if message["role"] == "user"]
        exchanges = [turns[a:b] for a, b in pairwise([*begins, len(turns)])]
        done = parts = lost = 0
        while done < len(exchanges):
            fitting: Encoded | None = None
            end = done
            while end < len(exchanges):
                tried = self.encode([*system, *chain(*exchanges[done : end + 1])], tools)
                if len(tried.ids) > self.rules.limit:
                    break
                fitting, end = tried, end + 1
            if fitting is None:
                lost, done = lost + 1, done + 1
            else:
                parts, done = parts + 1, end
                yield fitting
        if not parts:
            raise LeftOut("longer than a row")
        counts.update({name: count for name, count in (("split", int(parts > 1)), (LEFT_OUT, lost)) if count})

    def _apart(self, text: str, spans: templates.Spans) -> tuple[list[int], bytearray]:
        """Return (ids, mask) with prompt and answer each between <s> and </s>; the answer with its two is learnt.

        `spans` has the answer's place in `text`. Raises Refused for several turns.
        """
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
    """Return the Encoder of these rules; the last two are cached in the process.

    `rules` has chat, sft and perhaps Rules.ends as JSON, a line each; `limit` is the most tokens of a dialogue. Raises
    UserError when tokenizer or template cannot be used.
    """
    chat, sft, *ends = rules.split("\n")
    more = [tuple(json.loads(line)) for line in ends]
    return Encoder(Rules(tokenizer, Chat.model_validate_json(chat), Sft.model_validate_json(sft), limit, *more))


def check_template(name: str, encoder: Encoder) -> None:
    """Raise UserError for a template that cannot encode the dialogues of this encoder's tokenizer.

    It cannot if it needs tokens that the tokenizer lacks, writes today's date, or rejects a question and its answer.
    `name` is chat.template, for errors and the tokens that known templates need.
    """
    tokenizer = encoder.tokenizer
    missing = [token for token in templates.NEEDED.get(name, ()) if len(tokenizer.encode(token)[0]) != 1]
    if missing:
        raise UserError(
            f"chat.template {name} needs tokens that this tokenizer does not have: {', '.join(missing)}",
            evidence=f"its control tokens: {', '.join(tokenizer.control)}",
            fix="choose xuanyuan or llama2, which end a turn with </s>, or model, the tokenizer's own",
        )
    try:
        encoder.template.render(templates.PROBE)
    except Refused as error:
        if "strftime_now" in str(error):
            raise UserError(
                f"chat.template {name} writes today's date into every dialogue: tomorrow's data would be other data",
                evidence=str(error),
                fix="save the template as a file with a date in the place of strftime_now(...), and name it here",
            ) from None
        raise UserError(
            f"chat.template {name} does not take a question and its answer",
            evidence=str(error),
            fix="choose another template, or where it wants a system prompt set chat.system",
        ) from None


def check_start(chat: Chat, sft: Sft | None, directory: Path) -> None:
    """Raise UserError if the model has no tokenizer, or the template does not work with it; `sft` is stage sft's."""
    check_template(chat.template, Encoder(Rules(directory, chat, sft or Sft(), 0)))


FORMATS = (  # for people
    "{prompt, chosen, rejected}, each a text or messages",
    "{chosen, rejected}: two dialogues, [{role, content}, ...], that differ in the last answer",
    "{messages or conversations, chosen, rejected}: the turns so far and two answers",
    "for grpo {prompt, answer}; the answer is needed by the rewards option, number and terms",
)
_PROMPTS = ("prompt", "messages", "conversations", "question", "instruction", "input")
KNOWN = (*_PROMPTS, "chosen", "rejected", "answer", "context", "history", "system")


class Preference(NamedTuple):
    """A row: the dialogue up to the answer, both answers, the right answer; None for one that the row lacks."""

    prompt: list[Message]
    chosen: str | None
    rejected: str | None
    answer: str | None


def longest_piece(recipe: Recipe) -> int | None:
    """Return the most tokens of a prompt (grpo), or of both sequences of a pair (dpo, reward); None in other stages."""
    if recipe.grpo is not None:
        return recipe.batch.sequence_length - recipe.grpo.max_new_tokens
    return recipe.batch.sequence_length if recipe.stage in ("dpo", "reward") else None


def read_preference(row: Any, needs_both: bool = False) -> Preference:
    """Return the preference of a row, a parsed JSON value; with `needs_both` it must have both answers.

    Raises Refused with the reason for any other row, LeftOut if chosen and rejected are the same dialogue.
    """
    if not isinstance(row, dict):
        raise Refused("not an object")
    chosen, rejected = (_turns(row[name], "assistant") if name in row else [] for name in ("chosen", "rejected"))
    if len(chosen) > 1 or len(rejected) > 1:  # whole dialogues, which repeat the prompt where there is one
        shared = 0
        while shared < min(len(chosen), len(rejected)) and chosen[shared] == rejected[shared]:
            shared += 1
        prompt = chosen[:shared]
        chosen, rejected = chosen[shared:], rejected[shared:]
        if not chosen and not rejected:
            raise LeftOut("chosen and rejected are the same")
        if len(chosen) != 1 or len(rejected) != 1:
            raise Refused("chosen and rejected differ in more than the last answer")
    else:
        prompt = _prompt_messages(row)
    prompt = with_system(row, prompt)
    if not prompt:
        raise Refused(f"no prompt, only {name_keys(row)}")
    if prompt[-1]["role"] != "user":
        raise Refused("the prompt does not end with the user's turn")
    if needs_both and not (chosen and rejected):
        raise Refused(f"no {'rejected' if chosen else 'chosen'} answer, only {name_keys(row)}")
    answer = str(row["answer"]) if isinstance(row.get("answer"), (str, int, float)) else None
    return Preference(prompt, _answer_text(chosen), _answer_text(rejected), answer)


def checking_rules(recipe: Recipe) -> tuple[str, ...]:
    """Return the reward's rules that compare with a right answer, which every row then needs; () if there are none."""
    return recipe.grpo.checked if recipe.grpo is not None else ()


def encode_preference(
    encoder: Encoder, preference: Preference, stage: str, limit: int, checked: Sequence[str]
) -> list[Encoded]:
    """Return a row's preference encoded, with the mask on its answers. Raises Refused or LeftOut with the reason.

    Stage grpo gives one sequence: the prompt, at most `limit` tokens, followed by the right answer if the row has it.
    `checked` has the rules that need it (checking_rules). Other stages give the chosen and the rejected sequence, each
    at most limit // 2 tokens; the preference must have both. A longer prompt or sequence raises LeftOut.
    """
    if stage == "grpo":
        return [_prompt(encoder, preference, limit, checked)]
    assert preference.chosen is not None and preference.rejected is not None
    if preference.chosen == preference.rejected:
        raise LeftOut("chosen and rejected are the same")
    chosen, rejected = (_sequence(encoder, preference, text) for text in (preference.chosen, preference.rejected))
    if max(len(chosen.ids), len(rejected.ids)) > limit // 2:
        raise LeftOut("a sequence longer than half a row")
    # Where tokens merge over the answer's beginning, the prompts differ in their last tokens: those are answers too.
    prompt = min(chosen.mask.index(1), rejected.mask.index(1))
    while prompt and chosen.ids[:prompt] != rejected.ids[:prompt]:
        prompt -= 1
    return [
        Encoded(sequence.ids, bytes(prompt) + b"\1" * (len(sequence.ids) - prompt)) for sequence in (chosen, rejected)
    ]


def _prompt(encoder: Encoder, preference: Preference, limit: int, checked: Sequence[str]) -> Encoded:
    """Return the prompt encoded, ready for an answer, followed by the right answer, which alone is in the mask.

    Raises LeftOut when the prompt has more than `limit` tokens or a control token, Refused when a rule needs a right
    answer that is missing or the template does not accept the prompt.
    """
    check_messages([*preference.prompt, {"role": "assistant", "content": "-"}], encoder.tokenizer.control)
    ids = encoder.tokenizer.encode(encoder.template.render(preference.prompt, generation=True)[0])[0]
    if len(ids) > limit:
        raise LeftOut("a prompt that leaves no room for its answer")
    right = _right_answer(preference, checked)
    answer = encoder.tokenizer.encode(right)[0] if right else []
    return Encoded(ids + answer, bytes(len(ids)) + b"\1" * len(answer))


_SOUGHT = {"option": "letter", "words": "letter", "number": "number", "terms": "answer"}


def _right_answer(preference: Preference, checked: Sequence[str]) -> str | None:
    """Return the row's right answer, in the form that the rules `checked` compare with.

    It is the row's `answer`, else the letter that `chosen` names; None with neither and no rules. Raises Refused if
    there are rules and none of them can use either.
    """
    said = preference.answer or ""
    by_letter = "option" in checked or "words" in checked
    if by_letter and (letter := scoring.find_letter(said)):
        return letter
    if said and (not checked or any(scoring.is_right_answer(rule, said) for rule in checked)):
        return said
    if (letter := scoring.find_letter(preference.chosen or "")) and (not checked or by_letter):
        return letter
    if checked:
        raise Refused(f"no right {' or '.join(_SOUGHT[rule] for rule in checked)}")
    return None


def _sequence(encoder: Encoder, preference: Preference, answer: str) -> Encoded:
    """Return prompt and answer encoded, with this answer alone in the mask, without what the template adds after it.

    Raises LeftOut for a control token in a text, Refused for messages out of order, empty or not encodable.
    """
    messages = check_messages([*preference.prompt, {"role": "assistant", "content": answer}], encoder.tokenizer.control)
    ids, mask = encoder.encode(messages)
    end = mask.rindex(1) + 1
    begin = mask.rfind(0, 0, end) + 1
    return Encoded(ids[:end], bytes(begin) + b"\1" * (end - begin))


def _prompt_messages(row: Mapping[str, Any]) -> list[Message]:
    """Return the messages under the first key that has a prompt, [] if none has. Raises Refused for bad turns."""
    name = next((name for name in _PROMPTS if row.get(name)), None)
    if name is None:
        return []
    return question_turn(row, name) if isinstance(row[name], str) else _turns(row[name], "user")


def _turns(value: Any, role: str) -> list[Message]:
    """Return a text (of the role `role`), a turn, or a list of turns as messages. Raises Refused for anything else."""
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    if isinstance(value, dict):
        value = [value]
    if not isinstance(value, Sequence):
        raise Refused("neither text nor turns")
    messages = []
    for item in value:
        who = item.get("role", item.get("from")) if isinstance(item, dict) else None
        content = item.get("content", item.get("value")) if isinstance(item, dict) else None
        if not isinstance(who, str) or who not in ROLES or not isinstance(content, str):
            raise Refused(f"a turn without a known role or without text, it has {name_keys(item)}")
        messages.append({"role": ROLES[who], "content": content})
    return messages


def _answer_text(turns: list[Message]) -> str | None:
    """Return the text of an answer's only turn; None for no turns. Raises Refused if empty or not the assistant's."""
    if not turns:
        return None
    if turns[0]["role"] != "assistant" or not turns[0]["content"].strip():
        raise Refused("an answer is empty or not the assistant's")
    return str(turns[0]["content"])
