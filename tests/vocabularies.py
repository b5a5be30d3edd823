"""Text for the tokenizer tests: lines that look English, Chinese documents, a vocabulary trained as Llama's was."""

from __future__ import annotations

import json
import random
from pathlib import Path

import tokenizers
import tokenizers.decoders
import tokenizers.models
import tokenizers.normalizers
import tokenizers.pre_tokenizers
import tokenizers.processors
import tokenizers.trainers

from finlm.corpus import vocabulary
from finlm.tokens import vocab
from finlm.world import writer

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
    return [row["text"] for row in writer.documents("fin_news", size, seed, "train")]


def base(directory: Path, size: int = 600) -> Path:
    """A mostly English tokenizer.model with a little Chinese: 司 alone, and 有限 merged from two characters."""
    directory.mkdir(parents=True, exist_ok=True)
    vocab.train(vocabulary.lines([*english(1500), *["(有限)"] * 400, *["(司)"] * 100]), directory, size, 1.0)
    return directory / "tokenizer.model"


QWEN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}" + (
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_level(directory: Path, size: int = 700, begins: bool = False) -> Path:
    """A mostly English tokenizer.json in the way of Qwen, or, where texts begin with a token, of Llama 3."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(ignore_merges=begins))
    if not begins:
        tokenizer.normalizer = tokenizers.normalizers.NFC()
    split = tokenizers.pre_tokenizers.Split(tokenizers.Regex(QWEN), "isolated")
    level = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([split, level])
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([*english(600), *["有限公司"] * 100], trainer)
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokenizer.add_special_tokens([tokenizers.AddedToken(token, special=True) for token in special])
    tokenizer.add_tokens([tokenizers.AddedToken("<think>", normalized=False)])
    if begins:
        tokenizer.add_special_tokens(["<|begin_of_text|>"])
        begin = ("<|begin_of_text|>", tokenizer.token_to_id("<|begin_of_text|>"))
        tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
            single=f"{begin[0]} $A", special_tokens=[begin]
        )
    tokenizer.save(str(directory / "tokenizer.json"))
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>", "chat_template": CHATML}
    about |= {"bos_token": "<|begin_of_text|>"} if begins else {"pad_token": "<|endoftext|>", "errors": "replace"}
    (directory / "tokenizer_config.json").write_text(json.dumps(about), encoding="utf-8")
    return directory / "tokenizer.json"
