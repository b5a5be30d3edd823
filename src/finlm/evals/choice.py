"""A model's answers to a suite, kept as they come: an evaluation that was killed goes on where it stopped.

Every answer is a line of a JSON-lines file under a key of the model (weights, tokenizer, precision), the prompt as the
model sees it, and the settings; what has a line is not asked again. A batch that a kill cut off is asked again.

Decoding is greedy. Nothing here knows the right answers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import StoppingCriteria, StoppingCriteriaList

from finlm.base import files, screen
from finlm.base.errors import UserError
from finlm.data.synthetic_exam import LETTERS
from finlm.evals import extraction, likelihood, prompts
from finlm.evals.prompts import Prompt
from finlm.evals.questions import Question, Suite
from finlm.evals.styles import Style
from finlm.train.opened import Opened

Mode = Literal["likelihood", "chat", "cloze"]
VERSION = 3  # of what decides an answer here
_CPU_ROWS, _GPU_ROWS = 16, 64  # conversations answered at once


@dataclass(frozen=True)
class Answer:
    """What a model chose, and how it came to that."""

    letter: str | None
    shots: int
    scores: tuple[float, ...] = ()  # log-likelihoods, sums over tokens
    text: str = ""  # what it wrote


def answers(
    opened: Opened, suite: Suite, questions: Sequence[Question], mode: Mode, shots: int, ledger: Path
) -> list[Answer]:
    """An answer to each question. Raises UserError when the model cannot be asked in this mode."""
    if mode == "chat" and not opened.tokenizer.chat_template:
        raise UserError(
            f"{opened.name} has no chat template: it continues text",
            fix="use --mode likelihood, or evaluate the model after SFT",
        )
    make = {"likelihood": prompts.continuations, "chat": prompts.conversations, "cloze": prompts.cloze}[mode]
    asked = make(opened, suite, questions, shots)
    style = prompts.chat_style(opened, suite)
    settings = [VERSION, mode, opened.fingerprint, repr(style) if mode == "chat" else ""]
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
    batches = _written(opened, left, style) if mode == "chat" else _likeliest(opened, left)
    with screen.progress(f"{suite.name}, {mode}", len(left), "answered") as advance:
        for batch in batches:
            rows = []
            for prompt, answer in batch:
                row: dict[str, Any] = {"key": keys[id(prompt)], "answer": answer.letter, "shots": answer.shots}
                row |= {"text": answer.text} if mode == "chat" else {"scores": answer.scores}
                rows.append(row | {"question": prompt.question.sha256, "subject": prompt.question.subject})
            for row in rows:
                files.append_json_line(ledger, row)
                known[row["key"]] = row
            advance(len(rows))
    of_question = {prompt.question.sha256: _read(known[keys[id(prompt)]], prompt) for prompt in asked}
    return [of_question[question.sha256] for question in questions]


def _read(row: dict[str, Any], prompt: Prompt) -> Answer:
    return Answer(row["answer"], prompt.shots, tuple(row.get("scores", ())), row.get("text", ""))


def _likeliest(opened: Opened, asked: list[Prompt]) -> Iterator[list[tuple[Prompt, Answer]]]:
    for batch in likelihood.scores(opened, asked):
        answered = []
        for place, scores in batch.items():
            # Of options in full the likeliest per character, as acc_norm of lm-evaluation-harness and OLMES.
            lengths = asked[place].characters or (1,) * len(scores)
            compared = [score / length for score, length in zip(scores, lengths, strict=True)]
            best = LETTERS[compared.index(max(compared))]
            rounded = tuple(round(score, 5) for score in scores)
            answered.append((asked[place], Answer(best, asked[place].shots, scores=rounded)))
        yield answered


def _written(opened: Opened, asked: list[Prompt], style: Style) -> Iterator[list[tuple[Prompt, Answer]]]:
    size = _GPU_ROWS if opened.device.type == "cuda" else _CPU_ROWS
    by_length = sorted(asked, key=lambda prompt: -len(prompt.ids[0]))
    for start in range(0, len(by_length), size):
        batch = by_length[start : start + size]
        texts = _generate(opened, [prompt.ids[0] for prompt in batch], style)
        yield [
            (prompt, Answer(extraction.letter(text, prompt.question.options), prompt.shots, text=text))
            for prompt, text in zip(batch, texts, strict=True)
        ]


class _Decided(StoppingCriteria):  # type: ignore[misc]
    """Ends a row as soon as no further token can change its letter; a long answer is looked at every eighth token."""

    def __init__(self, opened: Opened, begin: int, rows: int) -> None:
        self.tokenizer, self.ends, self.begin = opened.tokenizer, opened.eos_ids, begin
        self.ended = [False] * rows

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor, **_: Any) -> torch.Tensor:
        """ids: int64 [rows, tokens so far]."""
        count = ids.shape[1] - self.begin
        if count <= 16 or count % 8 == 0:
            for row, tokens in enumerate(ids[:, self.begin :].tolist()):
                if not self.ended[row]:
                    text = self.tokenizer.decode(tokens, skip_special_tokens=True)
                    self.ended[row] = tokens[-1] in self.ends or extraction.decided(text) is not None
        return torch.tensor(self.ended, device=ids.device)


def _generate(opened: Opened, rows: Sequence[tuple[int, ...]], style: Style) -> list[str]:
    """The greedy continuation of each row of ids; padding is masked, from the penalty on repetition too."""
    width, pad = max(map(len, rows)), opened.eos_ids[0]
    ids = torch.tensor([(pad,) * (width - len(row)) + row for row in rows], device=opened.device)
    mask = torch.tensor([(0,) * (width - len(row)) + (1,) * len(row) for row in rows], device=opened.device)
    with torch.inference_mode():
        out = opened.model.generate(
            ids,
            attention_mask=mask,
            do_sample=False,
            temperature=None,
            top_p=None,
            top_k=None,
            max_new_tokens=style.max_tokens,
            repetition_penalty=style.repetition_penalty,
            eos_token_id=list(opened.eos_ids),
            pad_token_id=pad,
            stopping_criteria=StoppingCriteriaList([_Decided(opened, width, len(rows))]),
        )
    return [text.strip() for text in opened.tokenizer.batch_decode(out[:, width:], skip_special_tokens=True)]
