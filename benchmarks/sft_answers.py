"""What fine-tuned models do with held-out questions of the fictional world, asked as they are asked in use.

    python benchmarks/sft_answers.py runs/quickstart-sft-... runs/quickstart-sft-faithful-... [--questions 400]

For each run's export: the loss of the right answer behind the prompt of the model's own template (nats a token, the end
of turn included), that of the end of turn alone, the share of greedy answers that end by themselves, their mean length
in tokens, and the share that is the right answer to the letter. The questions are exam_chat's of held-out companies.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from finlm.base import screen
from finlm.evals.questions import find_world
from finlm.inference.open import Opened, open_model
from finlm.world import post

BATCH, MOST_TOKENS = 16, 48


@dataclass(frozen=True)
class Asked:
    """A question as token ids: the prompt in use, and what should follow."""

    prompt: list[int]
    answer: list[int]
    text: str


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--questions", type=int, default=400)
    options = parser.parse_args()
    rows = []
    for path in options.runs:
        opened = open_model(path)
        asked = questions(opened, options.questions)
        rows.append((opened.name, *losses(opened, asked), *answers(opened, asked)))
    head = ("model", "loss", "of the end", "ends", "tokens", "right")
    screen.heading(f"{options.questions} held-out questions")
    screen.table(
        head, [(r[0], f"{r[1]:.3f}", f"{r[2]:.3f}", f"{r[3]:.1%}", f"{r[4]:.1f}", f"{r[5]:.1%}") for r in rows]
    )


def questions(opened: Opened, count: int) -> list[Asked]:
    """The first questions of the held-out companies."""
    settings = find_world("exam", opened.run, None)
    rows = post.rows("exam_chat", settings.held_out_size, settings.seed, "held_out")
    turns = ([message["content"] for message in row["messages"]] for row in islice(rows, count))
    return [asked(opened.tokenizer, *texts) for texts in turns]


def asked(tokenizer: Any, question: str, answer: str) -> Asked:
    """A question in the model's template. Where that ends in a space, the answer is a text of its own."""
    messages = [{"role": "user", "content": question}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    messages.append({"role": "assistant", "content": answer})
    whole = tokenizer.apply_chat_template(messages, tokenize=False)
    prompt, ids = (tokenizer(part, add_special_tokens=False)["input_ids"] for part in (text, whole))
    if ids[: len(prompt)] == prompt:
        return Asked(prompt, ids[len(prompt) :], answer)
    apart = tokenizer(answer, add_special_tokens=False)["input_ids"]
    return Asked(prompt, [*apart, tokenizer.eos_token_id], answer)


def losses(opened: Opened, wanted: list[Asked]) -> tuple[float, float]:
    """(mean loss of the answers' tokens, of their last ones)."""
    total, count, ends = 0.0, 0, 0.0
    for one in wanted:
        ids = torch.tensor([one.prompt + one.answer], device=opened.device)
        with torch.inference_mode():
            logits = opened.model(ids).logits[0, len(one.prompt) - 1 : -1].float()
        nll = torch.nn.functional.cross_entropy(logits, ids[0, len(one.prompt) :], reduction="none")
        total, count, ends = total + float(nll.sum()), count + len(nll), ends + float(nll[-1])
    return total / count, ends / len(wanted)


def answers(opened: Opened, wanted: list[Asked]) -> tuple[float, float, float]:
    """(share that ends, mean length, share that is right) of greedy answers of at most MOST_TOKENS tokens."""
    ended = length = right = 0
    pad = opened.eos_ids[0]
    for start in range(0, len(wanted), BATCH):
        batch = wanted[start : start + BATCH]
        width = max(len(one.prompt) for one in batch)
        ids = torch.tensor([[pad] * (width - len(one.prompt)) + one.prompt for one in batch], device=opened.device)
        places = torch.arange(width, device=opened.device)
        mask = torch.stack([places >= width - len(one.prompt) for one in batch]).long()
        with torch.inference_mode():
            out = opened.model.generate(
                ids,
                attention_mask=mask,
                do_sample=False,
                max_new_tokens=MOST_TOKENS,
                eos_token_id=list(opened.eos_ids),
                pad_token_id=pad,
            )
        for one, row in zip(batch, out[:, width:].tolist(), strict=True):
            end = next((place for place, token in enumerate(row) if token in opened.eos_ids), None)
            ended += end is not None
            length += len(row) if end is None else end
            text = opened.tokenizer.decode(row[:end], skip_special_tokens=True)
            right += text.strip() == one.text
    return ended / len(wanted), length / len(wanted), right / len(wanted)


if __name__ == "__main__":
    main()
