"""A checkpoint as a Hugging Face model: safetensors, tokenizer, chat template, model card; proved by loading it back.

Weights come from the fp32 master copy where ZeRO keeps one, with adapters merged, and are saved in the run's precision
without the rows that padded the vocabulary. The proof is part of the export: the plain transformers classes give the
source model's logits, and AutoTokenizer gives the ids the model was trained on.

The layout is what vLLM and llama.cpp's convert_hf_to_gguf.py read too: tokenizer.model beside tokenizer.json, and
rope_theta both where transformers 5 writes it and where readers of the older form look.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import sentencepiece
import torch
import transformers
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from finlm import export_card
from finlm.base import files
from finlm.base.errors import UserError
from finlm.base.units import parse_bytes
from finlm.data import chat_tokens
from finlm.train import encoding
from finlm.train.opened import open_model
from finlm.train.trained import Trained, load

transformers.utils.logging.disable_progress_bar()  # files of a second; a bar each would bury what the user reads
SHARD_SIZE = "5GB"
_MARKS = re.compile(r"{% (end)?generation %}(?!\n)")
PROBES = (
    "2023年营业收入同比增长12.5%，净利润为3.6亿元。",
    "Revenue rose 5 % to $1.2bn.\n\n第二段：㎡ ①  空格",
    "</s><s>",
)
_CONVERSATION = [
    {"role": "user", "content": "净利润是什么？"},
    {"role": "assistant", "content": "收入减去成本、费用和税。"},
    {"role": "user", "content": "Thanks!"},
]


def export(checkpoint: Path, out: Path, shard_size: str = SHARD_SIZE) -> Path:
    """Write a checkpoint (runs/<run>/checkpoints/step-N, or the newest of runs/<run>) to the new directory out.

    Weight files have at most shard_size bytes. Raises UserError when the checkpoint is not complete.
    """
    if out.exists():
        raise UserError(f"{out} exists already", fix="give a new directory")
    try:
        most = parse_bytes(shard_size)
    except ValueError as error:
        raise UserError(f"--shard-size: {error}") from None
    trained = load(checkpoint)
    tokenizer = encoding.of_run(
        trained.shards, trained.recipe.tokenizer.add_bos, trained.model.config.max_position_embeddings
    )
    with files.new_directory(out) as directory:
        trained.model.save_pretrained(directory, max_shard_size=most)
        tokenizer.save_pretrained(directory)
        _complete(directory, trained)
        files.write_text(directory / "README.md", export_card.text(trained, directory))
        _prove(directory, trained, tokenizer)
    return out


def _complete(directory: Path, trained: Trained) -> None:
    """What transformers 5 does not write and others read."""
    config = files.read_json(directory / "config.json")
    config["rope_theta"] = trained.recipe.model.rope_theta
    files.write_json(directory / "config.json", config)
    about = files.read_json(directory / "tokenizer_config.json")
    if about["tokenizer_class"] == "TokenizersBackend":  # the former name of tokenizer.json word for word, known to all
        files.write_json(directory / "tokenizer_config.json", about | {"tokenizer_class": "PreTrainedTokenizerFast"})
    template = directory / "chat_template.jinja"
    if template.is_file():  # the marks around what the assistant says are for training; plain Jinja refuses them
        files.write_text(template, _MARKS.sub("", template.read_text(encoding="utf-8")))
    model_file = _sentencepiece(trained)
    if model_file is not None:
        shutil.copyfile(model_file, directory / "tokenizer.model")


def _sentencepiece(trained: Trained) -> Path | None:
    """The tokenizer.model that the tokenizer was made from; None for tokenizers of another library."""
    own = trained.shards.directory / "tokenizer"
    found = own / "tokenizer.model" if own.is_dir() else trained.shards.tokenizer
    return found if found.is_file() else None


def _prove(directory: Path, trained: Trained, tokenizer: Any) -> None:
    """Raises RuntimeError when what was written is not what was trained."""
    kind = AutoModelForSequenceClassification if trained.recipe.stage == "reward" else AutoModelForCausalLM
    model = trained.model
    reloaded, again = kind.from_pretrained(directory, dtype=model.dtype), AutoTokenizer.from_pretrained(directory)
    _prove_tokenizer(again, trained, tokenizer)
    own = model.state_dict()
    changed = [name for name, tensor in reloaded.state_dict().items() if not torch.equal(tensor, own[name])]
    if changed:
        raise RuntimeError(f"reloaded weights differ from the exported model's: {', '.join(changed[:3])}")
    ids = torch.tensor([again(PROBES[0])["input_ids"]])
    with torch.no_grad():
        if not _alike(reloaded(ids).logits, model(ids).logits):
            raise RuntimeError("the reloaded model's logits differ from the exported model's")
    if getattr(reloaded.config, "vocab_size", 0) != trained.plan.vocab_size:
        raise RuntimeError(f"the exported vocabulary has {reloaded.config.vocab_size} rows")


def _prove_tokenizer(again: Any, trained: Trained, tokenizer: Any) -> None:
    """Raises RuntimeError when the exported template or ids are not those of the training data."""
    texts = list(PROBES)
    if tokenizer.chat_template:
        rendered = [one.apply_chat_template(_CONVERSATION, tokenize=False) for one in (tokenizer, again)]
        if rendered[0] != rendered[1]:
            raise RuntimeError(f"exported chat template differs: {rendered[1]!r} instead of {rendered[0]!r}")
        texts.append(rendered[0])
    encode, of_documents = _library(trained)
    for text in texts:
        found = again(text, add_special_tokens=of_documents, split_special_tokens=of_documents)["input_ids"]
        if found != (expected := encode(text)):
            raise RuntimeError(f"exported tokenizer differs on {text!r}: {found} instead of {expected}")


def _library(trained: Trained) -> tuple[Callable[[str], list[int]], bool]:
    """(what encoded the training data, whether that was documents, which know no control tokens in their text)."""
    own = trained.shards.directory / "tokenizer"
    if own.is_dir():
        dialogues = chat_tokens.open_tokenizer(own, trained.shards.manifest["encoder"])
        return lambda text: dialogues.encode(text)[0], False
    pieces = sentencepiece.SentencePieceProcessor(model_file=str(trained.shards.tokenizer))
    begin = [pieces.bos_id()] * trained.recipe.tokenizer.add_bos
    return lambda text: begin + pieces.encode(text), True


def _alike(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Equal weights may add up in another order where they lie otherwise in memory: a few roundings of the largest."""
    largest = float(expected.abs().max())
    share = 1e-4 if expected.dtype == torch.float32 else 2e-2
    return torch.allclose(found.float(), expected.float(), rtol=0.0, atol=share * largest)


def generate(checkpoint: Path, prompt: str, tokens: int = 64, seed: int = 0) -> str:
    """A sampled continuation (temperature 0.8, top-p 0.9) of prompt by a run's model, checkpoint or model directory.

    The first quarter of the tokens cannot be the end of the text: a model of a few steps would often write nothing.
    Raises UserError when there is no model, or when the prompt fills its context.
    """
    opened = open_model(checkpoint)
    inputs = opened.tokenizer(prompt, return_tensors="pt", verbose=False).to(opened.device)
    length = inputs.input_ids.shape[1]
    if not 0 < length < opened.context:
        raise UserError(
            f"the prompt has {length:,} tokens, the model's context {opened.context:,}",
            fix="give a shorter one" if length else "give a word to begin with",
        )
    tokens = max(1, min(tokens, opened.context - length))
    torch.manual_seed(seed)
    with torch.inference_mode():
        out = opened.model.generate(
            inputs.input_ids,
            attention_mask=inputs.attention_mask,
            max_new_tokens=tokens,
            min_new_tokens=tokens // 4,
            do_sample=True,
            temperature=0.8,
            top_p=0.9,
            eos_token_id=list(opened.eos_ids) or None,
            pad_token_id=next(iter(opened.eos_ids), None),  # one row is never padded; unset, transformers warns
        )
    text = str(opened.tokenizer.decode(out[0, length:], skip_special_tokens=True))
    return text.rstrip("\ufffd")  # the last character's bytes may be cut off
