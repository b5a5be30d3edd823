"""A checkpoint as a Hugging Face model: safetensors, tokenizer, model card; proved by loading it back.

Weights come from the fp32 master copy where ZeRO keeps one, and are saved in the run's precision. The proof is part of
the export: plain AutoModelForCausalLM gives the source model's logits, and AutoTokenizer gives sentencepiece's ids.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import sentencepiece
import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

from finlm.base import files
from finlm.base.errors import UserError
from finlm.base.rundir import RunDir
from finlm.plan.plan import Plan
from finlm.train.trained import load

transformers.utils.logging.disable_progress_bar()  # files of a second; a bar each would bury what the user reads
PROBES = (
    "2023年营业收入同比增长12.5%，净利润为3.6亿元。",
    "Revenue rose 5 % to $1.2bn.\n\n第二段：㎡ ①  空格",
    "</s><s>",
)


def export(checkpoint: Path, out: Path) -> Path:
    """Write checkpoint (a run's checkpoints/step-N) to out. Raises UserError when it is not complete."""
    if out.exists():
        raise UserError(f"{out} exists already", fix="give a new directory")
    trained = load(checkpoint)
    add_bos = trained.recipe.tokenizer.add_bos
    pieces = sentencepiece.SentencePieceProcessor(model_file=str(trained.shards.tokenizer))
    with files.new_directory(out) as directory:
        trained.model.save_pretrained(directory)
        tokenizer = _tokenizer(trained.shards.tokenizer, add_bos, trained.plan.sequence_length)
        tokenizer.save_pretrained(directory)
        files.write_text(directory / "README.md", _card(trained.run, trained.plan, checkpoint))
        _prove(directory, trained.model, pieces, add_bos)
    return out


def _tokenizer(model_file: Path, add_bos: bool, sequence_length: int) -> Any:
    """LlamaTokenizer with sentencepiece's ids; legacy=False keeps spaces after control tokens."""
    return transformers.LlamaTokenizer.from_pretrained(
        str(model_file.parent),
        legacy=False,
        add_bos_token=add_bos,
        add_eos_token=False,
        model_max_length=sequence_length,
        clean_up_tokenization_spaces=False,
    )


def _prove(directory: Path, model: torch.nn.Module, pieces: Any, add_bos: bool) -> None:
    """Raises RuntimeError when what was written is not what was trained."""
    reloaded = AutoModelForCausalLM.from_pretrained(directory, dtype=next(model.parameters()).dtype)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    for text in PROBES:
        expected = ([pieces.bos_id()] if add_bos else []) + pieces.encode(text)
        found = tokenizer(text, split_special_tokens=True)["input_ids"]
        if found != expected:
            raise RuntimeError(f"exported tokenizer differs on {text!r}: {found} instead of {expected}")
    ids = torch.tensor([[pieces.bos_id(), *pieces.encode(PROBES[0])]])
    with torch.no_grad():
        if not torch.equal(reloaded(ids).logits, model(ids).logits):
            raise RuntimeError("the reloaded model's logits differ from the exported model's")


def generate(directory: Path, prompt: str, tokens: int = 64, seed: int = 0) -> str:
    """A sampled continuation (temperature 0.8, top-p 0.9) of prompt by an exported model.

    The first quarter of the tokens cannot be the end of the text: a model of a few steps would often write nothing.
    """
    model = AutoModelForCausalLM.from_pretrained(directory)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    torch.manual_seed(seed)
    ids = tokenizer(prompt, return_tensors="pt").input_ids
    with torch.no_grad():
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=tokens,
            min_new_tokens=tokens // 4,
            do_sample=True,
            temperature=0.8,
            top_p=0.9,
            pad_token_id=tokenizer.eos_token_id,
        )
    return str(tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True))


def _card(run: RunDir, plan: Plan, checkpoint: Path) -> str:
    evals = list(run.read_events("eval"))
    lines = [
        "---",
        "library_name: transformers",
        "language: zh",
        "---",
        f"# {plan.recipe}",
        "",
        f"{plan.parameters:,} parameters, {plan.sequence_length} tokens of context, {plan.precision}.",
        f"Trained by finlm for {checkpoint.name.removeprefix('step-')} steps of {plan.tokens_per_step:,} tokens.",
        "",
    ]
    if evals:
        lines += ["| held-out source | loss | perplexity | bits per byte |", "| --- | --- | --- | --- |"]
        for name, source in evals[-1]["sources"].items():
            numbers = f"{source['loss']:.4f} | {source['perplexity']:.2f} | {source['bits_per_byte']:.4f}"
            lines.append(f"| {name} | {numbers} |")
    return "\n".join([*lines, "", "```yaml", run.recipe.read_text(encoding="utf-8").rstrip(), "```", ""])
