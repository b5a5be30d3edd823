"""What a recipe promises: numbers that were measured once and are checked at the end of every run of it."""

from __future__ import annotations

from typing import Annotated

from pydantic import BeforeValidator, Field

from finlm.recipe.section import Fraction, Section


def _steps(value: object) -> object:
    """Keys of a YAML mapping arrive as words."""
    if not isinstance(value, dict):
        return value
    return {
        int(key) if isinstance(key, str) and key.isascii() and key.isdecimal() else key: loss
        for key, loss in value.items()
    }


Curve = Annotated[dict[int, float], BeforeValidator(_steps)]


class Expect(Section):
    """Holds for the recipe as it is written: a run whose --set changes the training is not checked."""

    hardware: str | None = Field(
        None, description="Where it was measured: cpu, or a part of the GPU's name; elsewhere nothing is checked."
    )
    loss: Curve = Field(default_factory=dict, description="Training loss by optimizer step.")
    held_out: dict[str, float] = Field(
        default_factory=dict, description="Held-out loss of the last evaluation by source; `all` is the total."
    )
    suites: dict[str, Fraction] = Field(
        default_factory=dict, description="Share of right answers after training, over all questions, by suite."
    )
    suite_tolerance: Annotated[float, Field(ge=0)] = Field(0.03, description="Difference allowed in that share.")
    tolerance: Annotated[float, Field(ge=0)] = Field(0.02, description="Difference allowed, in nats.")
    toy: Curve = Field(
        default_factory=dict, description="Training loss of `train --toy` by step, on a CPU, to 0.001 nats."
    )
