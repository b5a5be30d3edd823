"""Held-out perplexity of a checkpoint outside a training run, on one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from finlm.base import screen
from finlm.base.errors import UserError
from finlm.base.rundir import complete_checkpoint, open_run
from finlm.data import dialogue_rows
from finlm.data.shards import Rows
from finlm.recipe import recipe as recipes
from finlm.train import heldout, kernels, trained

STAGES = ("pretrain", "sft")  # whose held-out rows are text that the model learnt to write


def evaluate(checkpoint: Path) -> dict[str, Any]:
    """Loss, perplexity and bits per byte of each held-out source.

    Raises UserError when checkpoint is not complete, and for a stage whose rows are pairs or prompts.
    """
    run = open_run(complete_checkpoint(checkpoint).resolve().parent.parent)
    stage = recipes.load(run.recipe).recipe.stage
    if stage not in STAGES:
        asked = "" if stage == "reward" else f"finlm eval {checkpoint} --suite exam; "
        raise UserError(
            f"{run.path.name} is of stage {stage}: its held-out rows have no perplexity",
            evidence="they are " + ("prompts to answer" if stage == "grpo" else "pairs of a better and a worse answer"),
            fix=f"{asked}its own evaluation is in {run.report}",
        )
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    loaded = trained.load(checkpoint)
    if not loaded.shards.split("held_out"):
        raise UserError(
            f"{loaded.shards.directory} has no held-out documents",
            evidence="data.held_out_fraction was 0",
            fix="set data.held_out_fraction, for example 0.01, and train again",
        )
    model = loaded.model.to(device)
    kernels.swap_loss(model, loaded.plan.vocab_size)
    return heldout.evaluate(
        model,
        loaded.shards,
        loaded.plan.sequence_length,
        (loaded.plan.micro_batch,),
        loaded.recipe.eval.max_tokens_per_source,
        device,
        loaded.recipe.data.document_masks,
        dialogue_rows.held_out(loaded.recipe) if dialogue_rows.is_dialogues(loaded.shards) else Rows,
    )


def show(result: dict[str, Any]) -> None:
    """One line a source on stderr."""
    for name, source in result["sources"].items():
        per_byte = f"bits/byte {source['bits_per_byte']:.4f}  " if "bits_per_byte" in source else ""
        screen.say(
            f"{name:<24} loss {source['loss']:.4f}  perplexity {source['perplexity']:,.2f}  "
            f"{per_byte}({source['tokens']:,} tokens)"
        )
    screen.say(f"{'all':<24} loss {result['loss']:.4f}  perplexity {result['perplexity']:,.2f}")
