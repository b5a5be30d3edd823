"""The step `shards`: chosen documents to token shards (encode.py), with all that training, export and report need."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from finlm.base import files, screen
from finlm.base.errors import UserError
from finlm.data import dedup, documents, encode, encoders, stats
from finlm.data.context import Context
from finlm.data.steps import Step


def run(context: Context, read: Step, chosen: Step, tokenizer: Step) -> Step:
    """The shards directory. Raises UserError for a tokenizer that the settings do not fit."""
    dtype = _dtype(context, tokenizer.manifest["vocab_size"])
    add_bos = context.recipe.tokenizer.add_bos
    if add_bos and tokenizer.manifest["bos_id"] < 0:
        raise UserError("the tokenizer has no <s>", fix="set tokenizer.add_bos to false")
    model = tokenizer.path / "tokenizer.model"
    special_ids = (tokenizer.manifest["bos_id"] if add_bos else None, tokenizer.manifest["eos_id"])
    total = chosen.manifest["total"]
    text_bytes = total["bytes"] + total["held_out_bytes"]

    def make(directory: Path) -> dict[str, Any]:
        decision = dedup.read(chosen.path)
        tasks = [
            encode.Task(chunk.source, chunk.path, decision[chunk.rows], model, special_ids, dtype, "")
            for chunk in documents.chunks(read.path, read.manifest)
        ]
        encoder, entries = _encoded(context, directory, tasks, model, text_bytes)
        shutil.copyfile(model, directory / "tokenizer.model")
        about = stats.of(directory, entries, read.manifest["inputs"], chosen.manifest)
        files.write_json(directory / "documents.json", about)
        special = {name: tokenizer.manifest[name] for name in ("vocab_size", "bos_id", "eos_id")}
        return {
            "version": encode.VERSION,
            "dtype": dtype,
            **special,
            "add_bos": add_bos,
            "encoder": encoder,
            "tokenizer_sha256": tokenizer.manifest["sha256"],
            "totals": encode.totals(entries),
            "shards": entries,
        }

    depends_on = {
        "version": encode.VERSION,
        "selection": chosen.key,
        "tokenizer": tokenizer.manifest["sha256"],
        "add_bos": add_bos,
        "dtype": dtype,
        "shard_tokens": context.data.shard_tokens,
    }
    step = context.cache.step("shards", depends_on, make, needed_bytes(tokenizer.manifest, total, dtype))
    tokens = {split: sum(row["tokens"] for row in step.manifest["totals"][split].values()) for split in encode.SPLITS}
    context.say(
        step,
        f"{tokens['train']:,} training tokens, {tokens['held_out']:,} held out, {dtype}, "
        f"{text_bytes / sum(tokens.values()):.2f} bytes a token",
    )
    return step


def needed_bytes(tokenizer: Mapping[str, Any], total: Mapping[str, int], dtype: str) -> int:
    """Disk space for the shards: a fifth more than the tokenizer's own measurement says.

    An unmeasured one, as a base model's, is taken to have 2 bytes of text a token, as LLaMA's has of Chinese.
    """
    measured = tokenizer.get("compression", {}).values()
    tokens = 1.2 * sum(list(row["tokens"].values())[-1] for row in measured)
    bytes_a_token = sum(row["bytes"] for row in measured) / tokens if tokens else 2
    documents = total["kept"] + total["held_out"]
    width = np.dtype(dtype).itemsize
    return int((total["bytes"] + total["held_out_bytes"]) / bytes_a_token * width) + documents * (2 * width + 8)


def _encoded(
    context: Context, directory: Path, tasks: Sequence[encode.Task], model: Path, text_bytes: int
) -> tuple[str, list[dict[str, Any]]]:
    """(the encoder that wrote the shards, their entries): sentencepiece from the beginning where another differs."""

    def write(encoder: str) -> list[dict[str, Any]]:
        chosen = [replace(task, encoder=encoder) for task in tasks]
        return encode.write(directory, chosen, context.processes, context.data.shard_tokens, text_bytes)

    encoder = _encoder(context, model)
    try:
        return encoder, write(encoder)
    except encode.Disagreement as error:
        _refuse_or_say(context, str(error))
    for split in encode.SPLITS:
        shutil.rmtree(directory / split)
    return "sentencepiece", write("sentencepiece")


def _encoder(context: Context, model: Path) -> str:
    """The encoder to begin with. Raises UserError when the recipe insists on one that gives other ids."""
    if context.data.encoder == "sentencepiece":
        return "sentencepiece"
    different = encoders.agrees(model)
    if not different:
        return "gigatoken"
    _refuse_or_say(context, different)
    return "sentencepiece"


def _refuse_or_say(context: Context, different: str) -> None:
    if context.data.encoder == "gigatoken":
        raise UserError(
            "gigatoken does not give sentencepiece's ids with this tokenizer",
            evidence=different,
            fix="set data.encoder to auto or sentencepiece",
        )
    screen.say(f"shards: encoding with sentencepiece, at half the speed: gigatoken differs ({different})")


def _dtype(context: Context, vocab_size: int) -> str:
    """The shards' integer type. Raises UserError when it is too small for the tokenizer."""
    wanted = context.data.token_dtype
    if wanted == "uint16" and vocab_size > 65536:
        raise UserError(
            f"data.token_dtype uint16 holds ids up to 65,535, the tokenizer has {vocab_size:,} pieces",
            fix="set data.token_dtype to auto or uint32",
        )
    return wanted if wanted != "auto" else "uint16" if vocab_size <= 65536 else "uint32"
