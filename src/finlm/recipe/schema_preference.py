"""What a recipe may say about learning from preferences: DPO, a reward model, GRPO. Part of schema.

In stages dpo and reward a row is a pair: its two sequences have half of batch.sequence_length each, and the micro-batch
counts pairs. In stage grpo a row is one prompt with one answer.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from finlm.recipe.section import Fraction, Int, Positive, Section

Coefficient = Annotated[float, Field(ge=0)]


class Dpo(Section):
    """Direct preference optimization (arXiv 2305.18290)."""

    beta: Annotated[float, Field(gt=0)] = Field(0.1, description="How strongly the policy is held to its start.")
    loss: Literal["sigmoid", "hinge", "ipo", "robust", "apo_zero", "sigmoid_norm"] = Field(
        "sigmoid", description="Loss of a pair, by trl's names; sigmoid is the paper's."
    )
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = Field(
        0.0, description="Share of pairs labelled the wrong way round; robust only."
    )


class Reward(Section):
    """A reward model: the start's body with a linear head on the last token, by the Bradley-Terry loss."""

    margin: Coefficient = Field(0.0, description="By how much the chosen answer must be ahead; XuanYuan-6B: 0.5.")
    center: Coefficient = Field(
        0.0, description="Weight of the squared sum of a pair's rewards, which keeps them around 0."
    )


class Grpo(Section):
    """Group relative policy optimization (arXiv 2402.03300): answers of one prompt are judged against each other."""

    reward: str = Field(
        "choice",
        description="What an answer is worth: choice (1 when its letter is the right one), or the directory of an "
        "exported reward model.",
    )
    generations: Annotated[Int, Field(ge=2)] = Field(8, description="Answers a prompt.")
    max_new_tokens: Positive = Field(64, description="Tokens an answer has at most.")
    temperature: Annotated[float, Field(gt=0)] = Field(1.0, description="Sampling temperature.")
    top_p: Annotated[float, Field(gt=0, le=1)] = Field(1.0, description="Nucleus of the sampling.")
    beta: Coefficient = Field(
        0.0, description="Weight of the divergence from the start; above 0 a second copy of the model is held."
    )
    epsilon: Annotated[Fraction, Field(gt=0)] = Field(0.2, description="Clip of the probability ratio.")
    iterations: Positive = Field(1, description="Updates from the same answers.")
