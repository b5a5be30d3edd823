"""What a recipe says about trouble during a run: steps that are not finite, loss spikes, slow ranks."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from finlm.recipe.section import Int, Positive, Section


class Spike(Section):
    """A loss far above the recent ones."""

    z_score: Annotated[float, Field(gt=0)] = Field(
        8.0, description="Deviations (1.4826 MAD, at least 1 % of the median) above the median that make a spike."
    )
    window: Annotated[Int, Field(ge=10)] = Field(100, description="Recent steps that median and MAD are taken of.")
    then: Literal["record", "stop", "skip", "roll_back"] = Field(
        "record",
        description="record: only name it. skip: leave the weights as they were. roll_back: go back to a checkpoint "
        "roll_back_steps before it and leave out the data since. stop: end the run.",
    )
    roll_back_steps: Annotated[Int, Field(ge=0)] = Field(
        0, description="Steps before the spike that the checkpoint must be at least, for then: roll_back."
    )


class Straggler(Section):
    """A rank that is slower than the others for long."""

    ratio: Annotated[float, Field(gt=1)] = Field(1.3, description="Own time over the ranks' median that is slow.")
    steps: Positive = Field(50, description="Steps whose median counts.")


class Incidents(Section):
    """What is done about trouble in a step. A step whose loss or gradient is not finite never changes the weights."""

    stop_after: Positive = Field(
        5, description="The run ends at the first incident after so many: skipped steps of the last 100, or roll backs."
    )
    spike: Spike = Field(default_factory=Spike, description="Loss spikes.")
    straggler: Straggler = Field(default_factory=Straggler, description="Slow ranks.")
