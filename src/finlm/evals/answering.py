"""Build the prompts of questions (text to continue with a letter, or messages of a chat) and get the model's answers.

Every answer is a line of a JSON-lines file under a key of the model (weights, tokenizer, precision), the prompt as the
model sees it, and the settings. What has a line is not asked again, so that a killed evaluation goes on where it
stopped. Decoding is greedy. A written answer that gives no letter counts as wrong.

Likelihoods of letters: the examples that all questions of a subject begin with are computed once, and so is what the
letters' token sequences have in common: one forward pass a question instead of four. Of options in full every token
counts. Nothing here knows the right answers.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice, takewhile
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import StoppingCriteria, StoppingCriteriaList

from finlm.base import files, processes, screen
from finlm.base.errors import UserError
from finlm.evals import questions as sets
from finlm.evals.questions import STYLES, Question, Style, Suite
from finlm.inference.open import Opened, generate
from finlm.world.exam import LETTERS

PUBLISHED_TOKENS = 2048  # of a prompt of FinanceIQ's code


@dataclass(frozen=True)
class Prompt:
    """A question as the model gets it; `ids` has a row for each answer, or one row where the answer is written."""

    question: Question
    text: str  # for the ledger's key: up to the letter; chats: the conversation; cloze: all four texts
    shots: int  # examples shown
    ids: tuple[tuple[int, ...], ...]  # tokens: with each of the four letters behind, or those of the conversation
    begin: int | None = None  # the first token whose likelihood counts; None = the first that differs
    characters: tuple[int, ...] = ()  # of each of the four answers, where likelihoods are compared per character


def continuations(opened: Opened, suite: Suite, questions: Sequence[Question], shots: int) -> list[Prompt]:
    """Return a prompt for each question, in any order: text to continue with a letter, after at most `shots` examples.

    A prompt longer than the context loses examples, the last first, then its beginning, as in lm-eval.
    """
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
                prompts.append(Prompt(question, texts[number], count, tuple(tuple(row[cut:]) for row in four)))
            waiting = again
    return prompts


def _examples(suite: Suite, question: Question, shots: int) -> tuple[Question, ...]:
    """Return at most `shots` solved questions of the same subject; a suite may have fewer, or none."""
    return suite.examples.get(question.subject, ())[:shots]


def _continuation(style: Style, suite: Suite, question: Question, shots: int) -> str:
    """Return the header, at most `shots` examples and the question as one text that ends just before its letter."""
    solved = [_format_solved(style, example) for example in _examples(suite, question, shots)]
    return style.header_for(question) + "".join(solved) + _format_asked(style, question)


def _format_asked(style: Style, question: Question) -> str:
    """Return a question with its options as text that ends just before its letter."""
    return style.format_question(question.text, question.options) + style.cue


def _format_solved(style: Style, example: Question) -> str:
    """Return a question as text with its right letter, as it is shown before other questions."""
    return _format_asked(style, example) + example.answer + "\n\n"


def published_prompts(opened: Opened, suite: Suite, questions: Sequence[Question], shots: int) -> list[Prompt]:
    """Return a prompt for each question, in order, as FinanceIQ's code makes it, with at most `shots` examples.

    A question longer than 2,048 tokens loses the header too; it loses its beginning only where the model's context has
    no room for it and its answer.
    """
    style, prompts = chat_style(opened, suite), list[Prompt]()
    room = min(PUBLISHED_TOKENS, opened.context - style.max_tokens)

    def size(text: str) -> int:
        """Return how many tokens a text has, its <s> included."""
        return len(opened.tokenizer(text, verbose=False)["input_ids"])  # each with its <s>, as there

    for question in questions:
        header, asked = style.header_for(question), _format_asked(style, question)
        left = room - size(header) - size(asked)
        shown = [_format_solved(style, example) for example in _examples(suite, question, shots)] if left >= 0 else []
        sizes = [size(text) for text in shown]
        # The longest examples go first, all of equal length together.
        while sizes and sum(sizes) >= left:
            longest = max(sizes)
            shown = [text for text, tokens in zip(shown, sizes, strict=True) if tokens < longest]
            sizes = [tokens for tokens in sizes if tokens < longest]
        text = (header if left >= 0 else "") + "".join(shown) + asked
        ids = opened.tokenizer(text, verbose=False)["input_ids"]
        prompts.append(Prompt(question, text, len(shown), (tuple(ids[-(opened.context - style.max_tokens) :]),)))
    return prompts


def cloze_prompts(opened: Opened, suite: Suite, questions: Sequence[Question], shots: int) -> list[Prompt]:
    """Return a prompt for each question with four texts that each end with an option and "。"; ignore `shots`.

    With a chat template the user's turn shows the options and the assistant's turn is one of them; without one, no list
    of options is shown. A text longer than the context loses its beginning. Raises ValueError if the template alters an
    answer.
    """
    # A small model knows an answer before it can name its letter: the cloze formulation of OLMES (arXiv 2406.08446).
    style, prompts = STYLES[suite.name], list[Prompt]()
    is_chat = bool(opened.tokenizer.chat_template)
    for question in questions:
        answers = [f"{option}。" for option in question.options]
        if is_chat:
            texts = []
            for answer in answers:
                turns = [("user", _user_turn(style, question)), ("assistant", answer)]
                messages = [{"role": role, "content": content} for role, content in turns]
                text = str(opened.tokenizer.apply_chat_template(messages, tokenize=False))
                texts.append(text[: text.rindex(answer) + len(answer)])  # without what ends the turn
        else:
            stem = style.header_for(question) + style.lead + question.text + style.cue
            texts = [stem + answer for answer in answers]
        stem = texts[0].removesuffix(answers[0])
        stem_ids, *ids = opened.tokenizer([stem, *texts], add_special_tokens=not is_chat, verbose=False)["input_ids"]
        cut = max(0, max(map(len, ids)) - opened.context)
        # The last token of the stem may be another one before each answer.
        begin = max(1, len(common_prefix([tuple(stem_ids), *map(tuple, ids)])) - cut)
        four = tuple(tuple(row[cut:]) for row in ids)
        prompts.append(Prompt(question, "\n".join(texts), 0, four, begin, characters=tuple(map(len, answers))))
    return prompts


def common_prefix(sequences: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """Return the longest beginning that all sequences share; raises ValueError without sequences."""
    pairs = zip(min(sequences), max(sequences), strict=False)
    return tuple(first for first, _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def conversations(opened: Opened, suite: Suite, questions: Sequence[Question], shots: int) -> list[Prompt]:
    """Return a chat for each question, in order, in the model's own template, after at most `shots` examples.

    It shows as many examples as leave room for the answer; a question too long without any loses its beginning.
    """
    style, prompts = chat_style(opened, suite), list[Prompt]()
    room = opened.context - style.max_tokens
    for question in questions:
        for count in range(len(_examples(suite, question, shots)), -1, -1):
            messages = []
            for example in _examples(suite, question, count):
                messages.append({"role": "user", "content": _user_turn(style, example)})
                messages.append({"role": "assistant", "content": style.shown_cue + example.answer})
            messages.append({"role": "user", "content": _user_turn(style, question)})
            text = opened.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
            ids = opened.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
            if len(ids) <= room:
                break
        prompts.append(Prompt(question, text, count, (tuple(ids[-room:]),)))
    return prompts


def chat_style(opened: Opened, suite: Suite) -> Style:
    """Return the suite's style, with max_tokens limited to a quarter of the model's context (at least 1)."""
    style = STYLES[suite.name]
    return replace(style, max_tokens=max(1, min(style.max_tokens, opened.context // 4)))


def _user_turn(style: Style, question: Question) -> str:
    """Return the user's turn that asks a question: header, text and options, and the cue if the style wants it."""
    asked = style.header_for(question) + style.format_question(question.text, question.options)
    return asked + style.cue if style.chat_cue else asked


_WORTH_SHARING = 16  # tokens; below it a second forward pass costs more
_SHARE_OF_FREE_MEMORY = 0.1  # for the keys and values of a batch, held three times while it grows
_CPU_TOKENS, _GPU_TOKENS = 2_048, 16_384  # computed at once


@dataclass(frozen=True)
class Row:
    """Tokens of one row of a batch, and which log-probabilities to read: (position, token, index of the letter)."""

    ids: tuple[int, ...]
    targets: tuple[tuple[int, int, int], ...]


def score_letters(
    opened: Opened, prompts: Sequence[Prompt], tokens: int | None = None
) -> Iterator[dict[int, list[float]]]:
    """Run the model; yield {index of the prompt: log-likelihood (nats) of each of its four answers} by batches.

    Batches come in any order, of about `tokens` tokens at most; None: 2,048 on a CPU, 16,384 on a GPU.
    """
    budget = tokens or (_GPU_TOKENS if opened.device.type == "cuda" else _CPU_TOKENS)
    alike: dict[tuple[str, int], list[int]] = {}
    for place, prompt in enumerate(prompts):
        alike.setdefault((prompt.question.subject, prompt.shots), []).append(place)
    for places in alike.values():
        begins = {place: _first_counted(prompts[place]) for place in places}
        shared = common_prefix([ids for place in places for ids in prompts[place].ids])[: min(begins.values()) - 1]
        if len(shared) < _WORTH_SHARING or len(places) == 1:
            shared = ()
        work = {place: _rows(prompts[place].ids, begins[place], len(shared)) for place in places}
        with torch.inference_mode():
            prefix = None
            if shared:
                ids = torch.tensor([shared], device=opened.device)
                prefix = opened.model(ids, use_cache=True, logits_to_keep=1).past_key_values
            for batch in _batches(opened, work, prefix, budget):
                rows = [row for place in batch for row in work[place]]
                sums = iter(_forward(opened, rows, prefix))
                yield {place: [sum(n) for n in zip(*islice(sums, len(work[place])), strict=True)] for place in batch}


def _first_counted(prompt: Prompt) -> int:
    """Return the index of the first token whose likelihood counts; at least the last token of each answer counts."""
    begin = len(common_prefix(prompt.ids)) if prompt.begin is None else prompt.begin
    return min(begin, *(len(ids) - 1 for ids in prompt.ids))


def _rows(answer_ids: tuple[tuple[int, ...], ...], first_counted: int, shared: int) -> list[Row]:
    """Return a question's rows less the first `shared` tokens: one if one token per answer counts, else one each."""
    if all(len(ids) == first_counted + 1 for ids in answer_ids):
        last = first_counted - shared - 1
        return [Row(answer_ids[0][shared:-1], tuple((last, ids[-1], letter) for letter, ids in enumerate(answer_ids)))]
    return [
        Row(ids[shared:-1], tuple((at - shared - 1, ids[at], letter) for at in range(first_counted, len(ids))))
        for letter, ids in enumerate(answer_ids)
    ]


def _batches(opened: Opened, work: dict[int, list[Row]], prefix: Any, budget: int) -> Iterator[list[int]]:
    """Yield batches of prompts as lists of keys of `work`, longest prompts first, so out of memory shows at once.

    A batch has at most `budget` tokens (rows times its longest row) and _most_rows() rows, unless it is a single
    prompt. Yields one empty batch if `work` is empty.
    """
    most = _most_rows(opened, prefix)
    batch, width, count = list[int](), 0, 0
    for place in sorted(work, key=lambda place: -max(len(row.ids) for row in work[place])):
        rows = len(work[place])
        if batch and ((count + rows) * width > budget or count + rows > most):
            yield batch
            batch, width, count = [], 0, 0
        width = width or max(len(row.ids) for row in work[place])
        batch.append(place)
        count += rows
    yield batch


def _most_rows(opened: Opened, prefix: Any) -> int:
    """Return how many copies of the prefix fit in a tenth of the free memory, 1 to 1,000; without prefix 1,000."""
    if prefix is None:
        return 1_000
    held = sum(layer.keys.nbytes + layer.values.nbytes for layer in prefix.layers)
    free = torch.cuda.mem_get_info(opened.device)[0] if opened.device.type == "cuda" else processes.available_bytes()
    return max(1, min(1_000, int(_SHARE_OF_FREE_MEMORY * free / held)))


def _forward(opened: Opened, rows: list[Row], prefix: Any) -> list[list[float]]:
    """Run the rows behind a copy of `prefix`; return the nats each adds to its four sums. Needs inference_mode()."""
    width = max(len(row.ids) for row in rows)
    ids = torch.tensor([row.ids + (0,) * (width - len(row.ids)) for row in rows], device=opened.device)
    places = sorted({at for row in rows for at, _, _ in row.targets})
    cache = None
    if prefix is not None:
        cache = copy.deepcopy(prefix)
        cache.batch_repeat_interleave(len(rows))
    # Logits of the few places that are read, not of all: a vocabulary is wider than the model.
    keep = torch.tensor(places, device=opened.device)
    logits = opened.model(ids, past_key_values=cache, use_cache=cache is not None, logits_to_keep=keep).logits
    # Only the places that a row reads leave the model's precision: rows x places of a wide vocabulary are gigabytes.
    column = {at: number for number, at in enumerate(places)}
    targets = [(n, column[at], token, letter) for n, row in enumerate(rows) for at, token, letter in row.targets]
    read = {pair: number for number, pair in enumerate(dict.fromkeys((row, at) for row, at, _, _ in targets))}
    picked = torch.log_softmax(logits[tuple(zip(*read, strict=True))].float(), dim=-1)  # [read, vocabulary]
    values = picked[[read[row, at] for row, at, _, _ in targets], [token for _, _, token, _ in targets]].tolist()
    added = [[0.0] * 4 for _ in rows]
    for (row, _, _, letter), value in zip(targets, values, strict=True):
        added[row][letter] += value
    return added


Mode = Literal["likelihood", "chat", "cloze", "published"]
VERSION = 3  # of what decides an answer here
_PROMPTS = {"likelihood": continuations, "chat": conversations, "cloze": cloze_prompts, "published": published_prompts}
_CPU_ROWS, _GPU_ROWS = 16, 64  # conversations answered at once


@dataclass(frozen=True)
class Answer:
    """A model's answer to a question: its letter, None if it named none, and where that letter comes from."""

    letter: str | None
    shots: int
    scores: tuple[float, ...] = ()  # log-likelihoods, sums over tokens
    text: str = ""  # what it wrote
    drawn: bool = False  # published: the text names no letter, so this one was drawn

    @classmethod
    def from_json(cls, row: Mapping[str, Any], shots: int) -> Answer:
        """Return the answer in a line of the ledger, as one to a prompt with `shots` examples."""
        return cls(row["answer"], shots, tuple(row.get("scores", ())), row.get("text", ""), "drawn" in row)

    def to_json(self, *, is_written: bool) -> Mapping[str, Any]:
        """Return the answer as fields of a ledger line: its text if is_written, else the letters' scores."""
        said = {"text": self.text} if is_written else {"scores": self.scores}
        return {"answer": self.letter, "shots": self.shots} | said | ({"drawn": True} if self.drawn else {})


def answer_questions(
    opened: Opened, suite: Suite, questions: Sequence[Question], mode: Mode, shots: int, ledger: Path
) -> list[Answer]:
    """Return the model's answer to each question, in order; ask only those without a line in `ledger`.

    Appends new answers to `ledger`, shows the progress. Raises UserError for mode chat without a chat template, and
    when the ledger cannot be made; OSError when it cannot be read or the disk is full; ValueError in mode cloze if the
    template alters an answer.
    """
    if mode == "chat" and not opened.tokenizer.chat_template:
        raise UserError(
            f"{opened.name} has no chat template: it continues text",
            fix="use --mode likelihood, or evaluate the model after SFT",
        )
    asked = _PROMPTS[mode](opened, suite, questions, shots)
    style = chat_style(opened, suite)
    writes = mode in ("chat", "published")
    settings = [VERSION, mode, opened.fingerprint, repr(style) if writes else ""]
    keys = {id(prompt): files.sha256_json([*settings, prompt.text]) for prompt in asked}
    known = {row["key"]: row for row in files.read_json_lines(ledger) if isinstance(row, dict) and "key" in row}
    left = [prompt for prompt in asked if keys[id(prompt)] not in known]
    try:
        ledger.parent.mkdir(parents=True, exist_ok=True)
        ledger.touch()
    except OSError as error:
        raise UserError(
            f"answers cannot be kept in {ledger.parent}",
            evidence=str(error),
            fix="name another folder with --answers DIR",
        ) from None
    if len(left) < len(asked):
        screen.say(f"{len(asked) - len(left):,} of {len(asked):,} answers are in {ledger}")
    way = mode if mode == "published" else suite.name if suite.name in sets.WAYS else "chat"
    batches = _generate_answers(opened, left, style, way) if writes else _choose_likeliest(opened, left)
    with screen.progress(f"{suite.name}, {mode}", len(left), "answered") as advance:
        for batch in batches:
            for prompt, answer in batch:
                asked_about = {"question": prompt.question.sha256, "subject": prompt.question.subject}
                row = {"key": keys[id(prompt)], **answer.to_json(is_written=writes), **asked_about}
                files.append_json_line(ledger, row)
                known[row["key"]] = row
            advance(len(batch))
    of_question = {prompt.question.sha256: Answer.from_json(known[keys[id(prompt)]], prompt.shots) for prompt in asked}
    return [of_question[question.sha256] for question in questions]


def _choose_likeliest(opened: Opened, asked: list[Prompt]) -> Iterator[list[tuple[Prompt, Answer]]]:
    """Yield batches of (prompt, answer): the letter of highest likelihood, per character for options in full."""
    for batch in score_letters(opened, asked):
        answered = []
        for place, scores in batch.items():
            # Of options in full the likeliest per character, as acc_norm of lm-evaluation-harness and OLMES.
            lengths = asked[place].characters or (1,) * len(scores)
            compared = [score / length for score, length in zip(scores, lengths, strict=True)]
            best = LETTERS[compared.index(max(compared))]
            rounded = tuple(round(score, 5) for score in scores)
            answered.append((asked[place], Answer(best, asked[place].shots, scores=rounded)))
        yield answered


def _generate_answers(
    opened: Opened, asked: list[Prompt], style: Style, way: str
) -> Iterator[list[tuple[Prompt, Answer]]]:
    """Yield batches of (prompt, answer), longest first; WAYS[way] reads the letter from what the model writes."""
    size = _GPU_ROWS if opened.device.type == "cuda" else _CPU_ROWS
    by_length = sorted(asked, key=lambda prompt: -len(prompt.ids[0]))
    for start in range(0, len(by_length), size):
        batch = by_length[start : start + size]
        texts = _generate(opened, [prompt.ids[0] for prompt in batch], style, sets.WAYS[way].decided)
        yield [(prompt, _read_answer(prompt, text, way)) for prompt, text in zip(batch, texts, strict=True)]


def _read_answer(prompt: Prompt, text: str, way: str) -> Answer:
    """Return the answer that a text gives; if it names no letter, way "published" draws one by the question."""
    text = text.strip() if way == "chat" else text
    letter = sets.WAYS[way].read(text, prompt.question.options)
    if letter is None and way == "published":
        drawn = LETTERS[int(prompt.question.sha256, 16) % len(LETTERS)]
        return Answer(drawn, prompt.shots, text=text, drawn=True)
    return Answer(letter, prompt.shots, text=text)


class _StopWhenDecided(StoppingCriteria):  # type: ignore[misc]
    """Ends a row at an end token, or once its letter is decided; looks at the first 16 tokens, then every eighth."""

    def __init__(self, opened: Opened, begin: int, rows: int, decided: Callable[[str], str | None]) -> None:
        """Watch `rows` rows behind prompts of `begin` tokens; `decided` returns a text's final letter or None."""
        self.tokenizer, self.ends, self.begin = opened.tokenizer, opened.eos_ids, begin
        self.ended, self.decided = [False] * rows, decided

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor, **_: Any) -> torch.Tensor:
        """Return which rows have ended, bool [rows]; `ids` is int64 [rows, tokens so far], `scores` is not used."""
        count = ids.shape[1] - self.begin
        if count <= 16 or count % 8 == 0:
            for row, tokens in enumerate(ids[:, self.begin :].tolist()):
                if not self.ended[row]:
                    text = self.tokenizer.decode(tokens, skip_special_tokens=True)
                    self.ended[row] = tokens[-1] in self.ends or self.decided(text) is not None
        return torch.tensor(self.ended, device=ids.device)


def _generate(
    opened: Opened, rows: Sequence[tuple[int, ...]], style: Style, decided: Callable[[str], str | None]
) -> list[str]:
    """Return the greedy continuation of each row of ids as text; a row ends once decided(text) gives a letter."""
    stop = StoppingCriteriaList([_StopWhenDecided(opened, max(map(len, rows)), len(rows), decided)])
    out = generate(opened, rows, style.max_tokens, repetition_penalty=style.repetition_penalty, stopping_criteria=stop)
    texts: list[str] = opened.tokenizer.batch_decode(out, skip_special_tokens=True)
    return texts
