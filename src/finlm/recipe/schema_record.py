"""What a recipe may say about where its metrics go besides the run directory. Part of schema."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, Strict

from finlm.recipe.section import Section

Tracker = Literal["tensorboard", "wandb", "trackio"]


class Record(Section):
    """Trackers that get the metrics of events.jsonl as well, each from a process of its own beside the run."""

    tracking: Annotated[tuple[Tracker, ...], Strict(False)] = Field(
        (), description="tensorboard, wandb, trackio: any of them; the last two are optional packages."
    )
    project: str = Field("finlm", pattern=r"^[A-Za-z0-9._-]+$", description="Project in W&B and trackio.")
    online: bool = Field(
        False, description="W&B sends while the run goes on; otherwise it writes into the run, for `wandb sync`."
    )
