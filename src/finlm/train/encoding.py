"""transformers' tokenizer of prepared data, with the ids that the data was encoded with.

AutoTokenizer builds a LlamaTokenizer from the vocabulary and flags beside it and leaves out tokenizer.json's own
normalizer (transformers 5): with Llama-2's files, whose `legacy` is false, every message begins with another token.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import transformers

from finlm.data.shards import Shards


def of_run(shards: Shards, add_bos: bool, sequence_length: int) -> Any:
    """The tokenizer of a run's data: dialogues bring their model's own and a template, documents tokenizer.model."""
    template = shards.directory / "chat_template.jinja"
    if not (shards.directory / "tokenizer").is_dir():
        return of_pieces(shards.tokenizer, add_bos, sequence_length)
    tokenizer = of_dialogues(shards)
    if template.is_file():
        tokenizer.chat_template = template.read_text(encoding="utf-8")
    tokenizer.model_max_length = sequence_length
    return tokenizer


def of_dialogues(shards: Shards) -> Any:
    """The tokenizer of the model that dialogues were encoded for: tokenizer.json word for word, or tokenizer.model."""
    own = shards.directory / "tokenizer"
    if shards.manifest["encoder"] == "sentencepiece":
        tokenizer = transformers.LlamaTokenizer.from_pretrained(own, legacy=False)
    else:
        tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(own)
    for name, number in (("bos_token", shards.bos_id), ("eos_token", shards.eos_id)):  # what templates wrote
        text = tokenizer.convert_ids_to_tokens(number) if number >= 0 else None
        if getattr(tokenizer, name) != text:
            setattr(tokenizer, name, text)
    return tokenizer


def of_pieces(model_file: Path, add_bos: bool, sequence_length: int) -> Any:
    """transformers' tokenizer with the ids of a tokenizer.model; legacy=False keeps spaces after control tokens."""
    return transformers.LlamaTokenizer.from_pretrained(
        str(model_file.parent),
        legacy=False,
        add_bos_token=add_bos,
        add_eos_token=False,
        model_max_length=sequence_length,
        clean_up_tokenization_spaces=False,
    )
