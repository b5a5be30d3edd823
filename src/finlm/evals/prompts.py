"""Questions as a model sees them: text to continue with a letter, or messages of a chat.

Examples that do not fit the model's context are left out, the last first, and a prompt says how many it shows; a
question that does not fit alone loses its beginning, as in lm-eval.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

from finlm.data.synthetic_exam import LETTERS
from finlm.evals.questions import Question, Suite
from finlm.evals.styles import STYLES, Style
from finlm.train.opened import Opened


@dataclass(frozen=True)
class Prompt:
    """A question ready to be asked."""

    question: Question
    text: str  # for the ledger's key: up to the letter; chats: the conversation; cloze: all four texts
    shots: int  # examples shown
    ids: tuple[tuple[int, ...], ...]  # tokens: with each of the four letters behind, or those of the conversation
    begin: int | None = None  # the first token whose likelihood counts; None = the first that differs
    characters: tuple[int, ...] = ()  # of each of the four answers, where likelihoods are compared per character


def continuations(opened: Opened, suite: Suite, questions: Sequence[Question], shots: int) -> list[Prompt]:
    """Texts for base models. Raises nothing: what is too long is shortened."""
    style, prompts = STYLES[suite.name], list[Prompt]()
    for start in range(0, len(questions), 256):  # the tokenizer works on many texts at once
        waiting = [(question, len(_examples(suite, question, shots))) for question in questions[start : start + 256]]
        while waiting:
            texts = [_continuation(style, suite, question, count) for question, count in waiting]
            four_each = [text + letter for text in texts for letter in LETTERS]
            ids = opened.tokenizer(four_each, verbose=False)["input_ids"]  # it warns of length, which is dealt with
            again = []
            for number, (question, count) in enumerate(waiting):
                four = ids[4 * number : 4 * number + 4]
                longest = max(map(len, four))
                # Whole examples go first; how many is a guess by length, tried again until it fits.
                if count and longest > opened.context:
                    again.append((question, min(count - 1, int(count * opened.context / longest))))
                    continue
                cut = max(0, longest - opened.context)
                prompts.append(Prompt(question, texts[number], count, tuple(tuple(own[cut:]) for own in four)))
            waiting = again
    return prompts


def _examples(suite: Suite, question: Question, shots: int) -> tuple[Question, ...]:
    """At most `shots` solved questions of the same subject: a set may have fewer, or none."""
    return suite.examples.get(question.subject, ())[:shots]


def _continuation(style: Style, suite: Suite, question: Question, shots: int) -> str:
    parts = [style.begin(question.subject)]
    for example in _examples(suite, question, shots):
        parts.append(style.ask(example.text, example.options) + style.cue + example.answer + "\n\n")
    return "".join(parts) + style.ask(question.text, question.options) + style.cue


def cloze(opened: Opened, suite: Suite, questions: Sequence[Question], shots: int) -> list[Prompt]:
    """Texts that end with each of the four options in full instead of with its letter; no examples.

    A small model knows an answer before it can name its letter: the cloze formulation of OLMES (arXiv 2406.08446), and
    as there the likelihood counts per character, or short options would win. An assistant sees the options in the
    user's turn and opens its own with one of them; a base model sees no option.
    """
    style, prompts = STYLES[suite.name], list[Prompt]()
    is_chat = bool(opened.tokenizer.chat_template)
    for question in questions:
        answers = [f"{option}。" for option in question.options]
        if is_chat:
            texts = [_answered(opened, _turn(style, question), answer) for answer in answers]
        else:
            stem = style.begin(question.subject) + style.lead + question.text + style.cue
            texts = [stem + answer for answer in answers]
        stem = texts[0].removesuffix(answers[0])
        stem_ids, *ids = opened.tokenizer([stem, *texts], add_special_tokens=not is_chat, verbose=False)["input_ids"]
        cut = max(0, max(map(len, ids)) - opened.context)
        prompts.append(
            Prompt(
                question,
                "\n".join(texts),
                0,
                tuple(tuple(own[cut:]) for own in ids),
                # The last token of the stem may be another one before each answer.
                begin=max(1, len(common([tuple(stem_ids), *map(tuple, ids)])) - cut),
                characters=tuple(map(len, answers)),
            )
        )
    return prompts


def common(sequences: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """The longest beginning that all have."""
    pairs = zip(min(sequences), max(sequences), strict=False)
    return tuple(first for first, _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def _answered(opened: Opened, asked: str, answer: str) -> str:
    """The conversation up to the end of the answer, with whatever the template puts before it."""
    messages = [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]
    text = str(opened.tokenizer.apply_chat_template(messages, tokenize=False))
    return text[: text.rindex(answer) + len(answer)]


def conversations(opened: Opened, suite: Suite, questions: Sequence[Question], shots: int) -> list[Prompt]:
    """Chats for assistants, in the model's own template, that leave room for the answer."""
    style, prompts = chat_style(opened, suite), list[Prompt]()
    room = opened.context - style.max_tokens
    for question in questions:
        for count in range(len(_examples(suite, question, shots)), -1, -1):
            text = _conversation(opened, style, suite, question, count)
            ids = opened.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
            if len(ids) <= room:
                break
        prompts.append(Prompt(question, text, count, (tuple(ids[-room:]),)))
    return prompts


def chat_style(opened: Opened, suite: Suite) -> Style:
    """The suite's, with answers of at most a quarter of the context: as long whoever shares the batch."""
    style = STYLES[suite.name]
    return replace(style, max_tokens=max(1, min(style.max_tokens, opened.context // 4)))


def _conversation(opened: Opened, style: Style, suite: Suite, question: Question, shots: int) -> str:
    messages = []
    for example in _examples(suite, question, shots):
        messages.append({"role": "user", "content": _turn(style, example)})
        messages.append({"role": "assistant", "content": style.shown_cue + example.answer})
    messages.append({"role": "user", "content": _turn(style, question)})
    return str(opened.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))


def _turn(style: Style, question: Question) -> str:
    asked = style.begin(question.subject) + style.ask(question.text, question.options)
    return asked + style.cue if style.chat_cue else asked
