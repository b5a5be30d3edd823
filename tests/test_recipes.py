"""Every shipped recipe loads, plans on its own hardware, and its documents say what the plan says."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import pytest

from finlm import config
from finlm.base.units import format_bytes, format_duration
from finlm.plan import planner, show
from finlm.plan.plan import Plan
from finlm.recipe import cluster, recipe, shape
from finlm.recipe.schema import Recipe

ROOT = Path(__file__).resolve().parent.parent
PATHS = sorted((ROOT / "recipes").glob("*/*.yaml"))
every_recipe = pytest.mark.parametrize("path", PATHS, ids=lambda path: f"{path.parent.name}-{path.stem}")


@cache
def planned(path: Path, overrides: tuple[str, ...] = ()) -> tuple[Recipe, Plan]:
    wanted = recipe.load(path, overrides).recipe
    return wanted, planner.make(wanted, cluster.from_hardware(wanted.hardware), shape.of(wanted))


def test_there_are_recipes() -> None:
    names = {path.parent.name for path in PATHS}
    assert {"quickstart", "xuanyuan-6b", "xuanyuan-13b", "xuanyuan-70b", "llama2-7b-fincorpus"} <= names


@every_recipe
def test_it_fits_its_own_hardware(path: Path) -> None:
    _, plan = planned(path)
    assert plan.fits
    assert plan.gpu_bytes <= plan.gpu_memory_bytes


@every_recipe
def test_its_deepspeed_file_is_current(path: Path) -> None:
    file = ROOT / "configs/ds" / f"{path.parent.name}-{path.stem}.json"
    assert json.loads(file.read_text(encoding="utf-8")) == config.deepspeed_settings(*planned(path)), (
        "stale: run `python -m finlm.config`"
    )


@every_recipe
def test_its_name_and_folder_agree(path: Path) -> None:
    own = path.parent.name if path.stem == "pretrain" else f"{path.parent.name}-{path.stem}"
    assert planned(path)[0].name == own


@every_recipe
def test_its_page_repeats_the_plans_numbers_and_commands(path: Path) -> None:
    page = (path.parent / "README.md").read_text(encoding="utf-8")
    _, plan = planned(path)
    relative = path.relative_to(ROOT).as_posix()
    wanted = [f"finlm plan {relative}"]
    script = {"pretrain": "pretrain_run.sh", "sft": "sft_run.sh"}.get(planned(path)[0].stage)
    wanted += [f"bash scripts/{script} {relative}" if script else f"finlm train {relative}"]
    wanted += [format_bytes(plan.gpu_bytes), f"configs/ds/{path.parent.name}-{path.stem}.json"]
    if plan.days is not None and plan.tokens_per_second is not None:
        wanted += [f"{format_duration(plan.days * 86400)} at {plan.tokens_per_second:,.0f} tokens/s"]
        wanted += [f"{plan.steps:,} steps"]
    assert [text for text in wanted if text not in page] == []


@every_recipe
@pytest.mark.parametrize("overrides", [(), ("train.seed=99",)], ids=["as written", "changed"])
def test_plan_shows_every_value_with_its_line(
    path: Path, overrides: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    loaded = recipe.load(path, overrides)
    show.print_origins(loaded)
    shown = capsys.readouterr().out
    assert all(f"  {key} = " in shown and f"({where})" in shown for key, where in loaded.origins.items())


@every_recipe
def test_what_is_not_public_is_marked(path: Path) -> None:
    if path.parent.name != "quickstart":
        assert "chosen by us" in path.read_text(encoding="utf-8")
    assert "chosen by us" in (path.parent / "README.md").read_text(encoding="utf-8").casefold()


def test_the_other_numbers_of_the_llama2_page_come_from_the_planner() -> None:
    path = ROOT / "recipes/llama2-7b-fincorpus/pretrain.yaml"
    page = (path.parent / "README.md").read_text(encoding="utf-8")
    auto = ("zero.stage=auto", "zero.offload_optimizer=auto", "zero.offload_param=auto")
    alone = "hardware.hosts=[{name: a100, slots: 2, gpu: A100-40G, memory: 256GiB}]"
    for overrides in (
        auto,
        (*auto, alone, "batch.micro_batch=auto", "train.recompute=auto"),
        (*auto, "hardware.network_gbit=200"),
    ):
        plan = planned(path, overrides)[1]
        assert plan.days is not None
        assert f"{plan.tokens_per_second:,.0f} tokens/s, {format_duration(plan.days * 86400)}" in page
        assert (
            f"{format_bytes(plan.gpu_bytes)} of {format_bytes(plan.gpu_memory_bytes)}" in page or alone not in overrides
        )
    plan = planned(path, auto)[1]
    assert any("38.0 GiB of 31.8 GiB" in reason for reason in plan.reasons)
    theirs = planned(path)[1]
    assert theirs.tokens_per_second is not None
    night = 700 * theirs.tokens_per_step / theirs.tokens_per_second / 3600
    assert f"{night:.1f} hours here" in page
