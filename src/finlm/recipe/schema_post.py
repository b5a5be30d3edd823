"""What a recipe may say about training on dialogues: how they become tokens, what counts, adapters. Part of schema."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, Strict

from finlm.recipe.section import Fraction, Positive, Section


class Chat(Section):
    """How a dialogue becomes text; training, evaluation and chat share it."""

    template: str = Field(
        "xuanyuan",
        description="xuanyuan, llm-code, zephyr, chatml, llama2, llama3, model (the tokenizer's own), or a Jinja file.",
    )
    system: str | None = Field(
        None, description="System prompt of the dialogues that bring none, in training and, by the template, in use."
    )
    overlong: Literal["split", "drop", "truncate"] = Field(
        "split",
        description="Dialogues longer than a row: split between turns, left out, or cut (the answer's end goes).",
    )


class Sft(Section):
    """Which tokens of a dialogue are learnt from, and how dialogues fill rows.

    The keys after `profile` repeat mistakes of the XuanYuan project's released llm-code, for faithful reproductions.
    """

    assistant_only_loss: bool = Field(True, description="Only the assistant's words and end of turn are learnt from.")
    packing: bool = Field(True, description="A row holds several dialogues, none of which sees another.")
    profile: Literal["corrected", "faithful"] = Field(
        "corrected", description="faithful: the label lint reports what the keys below break, but does not refuse it."
    )
    answer_apart: bool = Field(
        False, description="Prompt and answer tokenised apart: </s> and <s> before the answer, </s> after it."
    )
    pad_labels: bool = Field(False, description="A row's padding is </s>, and counts in the loss; needs no packing.")
    hide_eos: bool = Field(
        False, description="The attention mask hides every </s>, not only padding; needs no packing."
    )
    mask_eos: bool = Field(False, description="No label that is </s> counts, so that no end is learnt.")
    tokenizer: Literal["auto", "sentencepiece", "tokenizers"] = Field(
        "auto", description="Library that encodes: auto takes tokenizer.json where there is one, else tokenizer.model."
    )
    order: Literal["stateless", "sampler"] = Field(
        "stateless",
        description="sampler: torch's DistributedSampler; an epoch repeats rows until the ranks divide it.",
    )


Linear = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


class Lora(Section):
    """Low-rank adapters (arXiv 2106.09685) instead of training every weight."""

    rank: Positive = Field(16, description="Rank of the adapters.")
    alpha: Positive = Field(32, description="Scale of the adapters: alpha / rank.")
    dropout: Fraction = Field(0.0, description="Dropout before the adapters.")
    targets: Annotated[tuple[Linear, ...], Strict(False), Field(min_length=1)] = Field(
        ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
        description="Linear layers that get one.",
    )
    quantize: Literal["none", "nf4"] = Field(
        "none", description="nf4: the decoder's frozen matrices in 4 bits (QLoRA, arXiv 2305.14314)."
    )
