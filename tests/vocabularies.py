"""Text for the tokenizer tests: lines that look English, Chinese documents, a vocabulary trained as Llama's was."""

from __future__ import annotations

import random
from pathlib import Path

from finlm.data import synthetic, vocab, vocab_sample

SYLLABLES = ("an", "con", "de", "en", "for", "ing", "ment", "net", "pro", "quar", "re", "ser", "ter", "tion", "year")


def english(count: int, seed: int = 0) -> list[str]:
    """Lines of made-up words, numbers and punctuation, the same for the same seed."""
    dice = random.Random(seed)
    words = ["".join(dice.choices(SYLLABLES, k=dice.randint(1, 4))) for _ in range(400)]

    def line() -> str:
        chosen = " ".join(dice.choice(words) for _ in range(12)).capitalize()
        return f"{chosen} {dice.random() * 100:.2f}%, (see “{dice.choice(words)}_{dice.randrange(99)}”)."

    return [line() for _ in range(count)]


def chinese(size: int, seed: int = 5) -> list[str]:
    """Documents of the embedded corpus."""
    return [row["text"] for row in synthetic.documents("fin_news", size, seed, "train")]


def base(directory: Path, size: int = 600) -> Path:
    """A mostly English tokenizer.model with a little Chinese: 司 alone, and 有限 merged from two characters."""
    directory.mkdir(parents=True, exist_ok=True)
    vocab.train(vocab_sample.lines([*english(1500), *["(有限)"] * 400, *["(司)"] * 100]), directory, size, 1.0)
    return directory / "tokenizer.model"
