"""The learning rate of every step equals what DeepSpeed's own schedulers give the optimizer."""

from __future__ import annotations

from pathlib import Path

import pytest

from finlm import config
from finlm.plan import planner
from finlm.recipe import cluster, recipe, shape
from finlm.recipe.schema import Optim, Recipe

QUICKSTART = Path(__file__).resolve().parents[1] / "recipes/quickstart/pretrain.yaml"
STEPS = 60


def load(schedule_name: str, warmup: int, min_lr: float, kind: str = "linear") -> Recipe:
    overrides = [
        f"optim.warmup={kind}",
        f"optim.schedule={schedule_name}",
        f"optim.warmup_steps={warmup}",
        f"optim.min_lr={min_lr}",
    ]
    return recipe.load(QUICKSTART, [*overrides, f"train.steps={STEPS}"]).recipe


def deepspeed_lrs(settings: dict[str, object] | None, lr: float) -> list[float]:
    """What the optimizer sees: it steps before the scheduler, as in DeepSpeedEngine._take_model_step."""
    import torch
    from deepspeed.runtime import lr_schedules

    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=lr)
    scheduler = None
    if settings is not None:
        scheduler = getattr(lr_schedules, str(settings["type"]))(optimizer, **settings["params"])  # type: ignore[arg-type]
    seen = []
    for _ in range(STEPS):
        seen.append(float(optimizer.param_groups[0]["lr"]))
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
    return seen


@pytest.mark.parametrize(
    ("name", "warmup", "min_lr"),
    [
        ("cosine", 20, 2e-4),
        ("cosine", 2, 0.0),
        ("cosine", STEPS - 1, 1e-5),
        ("linear", 20, 2e-4),
        ("linear", 2, 0.0),
        ("linear", STEPS - 1, 1e-5),
        ("constant", 20, 0.0),
        ("constant", 1, 0.0),
        ("constant", 0, 0.0),
        ("cosine log", 20, 2e-4),
        ("linear log", 2, 1e-5),
        ("linear log", 20, 0.0),
        ("constant log", 20, 0.0),
    ],
)
def test_every_step_has_deepspeeds_rate(name: str, warmup: int, min_lr: float) -> None:
    wanted = load(*name.split()[:1], warmup, min_lr, *name.split()[1:])
    plan = planner.make(wanted, cluster.from_hardware(wanted.hardware), shape.of(wanted))
    theirs = deepspeed_lrs(config.deepspeed_settings(wanted, plan).get("scheduler"), wanted.optim.lr)
    ours = [config.lr_at(wanted.optim, STEPS, step) for step in range(STEPS)]
    assert ours == pytest.approx(theirs, rel=1e-12, abs=1e-18)


def test_the_first_two_steps_stand_at_the_start_of_the_ramp() -> None:
    cosine = Optim(lr=1.0, min_lr=0.1, schedule="cosine", warmup_steps=10)
    linear = Optim(lr=1.0, min_lr=0.1, schedule="linear", warmup_steps=10)
    assert [config.lr_at(cosine, 100, step) for step in range(3)] == [0.0, 0.0, pytest.approx(0.1)]
    assert [config.lr_at(linear, 100, step) for step in range(3)] == [0.1, 0.1, pytest.approx(0.19)]


def test_the_last_step_is_near_the_floor_and_the_peak_is_reached() -> None:
    for name in ("cosine", "linear"):
        optim = Optim(lr=1e-3, min_lr=1e-4, schedule=name, warmup_steps=10)
        rates = [config.lr_at(optim, 1000, step) for step in range(1000)]
        assert max(rates) == pytest.approx(1e-3, rel=1e-4)
        assert rates[-1] == pytest.approx(1e-4, rel=0.03)
