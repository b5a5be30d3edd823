"""Dialogues for tests: files in the usual formats and a recipe that fine-tunes the finished tiny run on them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from finlm import prepare
from finlm.base.rundir import RunDir
from finlm.recipe import cluster, recipe
from finlm.recipe.schema import Recipe
from finlm.rows.shards import Shards

from helpers import ROOT, new_run

Rows = list[dict[str, Any]]


def turns(*texts: str) -> dict[str, Any]:
    """Messages of the user and the assistant in turn."""
    roles = ("user", "assistant") * len(texts)
    return {"messages": [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]}


def sample(count: int, words: int = 6) -> Rows:
    """Different dialogues of one turn and of two."""
    rows = [turns(f"第{n}家公司的营业收入是多少？", f"{n}亿元。" * (1 + n % words)) for n in range(count)]
    return rows + [turns(f"第{n}家公司的净利润？", f"{n}万元。", "同比呢？", f"增长{n}%。") for n in range(count)]


def write(path: Path, rows: Rows) -> Path:
    """A JSON-lines file."""
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


def sft(tmp_path: Path, start: Path, source: Path, *overrides: str) -> Recipe:
    """The quickstart's fine-tuning recipe, tiny, on these dialogues, from the model in `start`."""
    wanted = (
        f"model.init_from={start}",
        f"data.sources={source}",
        f"data.cache_dir={tmp_path / 'cache'}",
        "batch.sequence_length=128",
        "batch.tokens_per_step=1024",
        "train.steps=8",
        "optim.warmup_steps=2",
        "eval.max_tokens_per_source=2000",
        "eval.suites=[]",  # they and the mixture are about the recipe's own dialogues
        "data.mixture=[]",
    )
    return recipe.load(ROOT / "recipes/quickstart/sft.yaml", (*wanted, *overrides)).recipe


def prepared(wanted: Recipe) -> Shards:
    """Its shards."""
    return prepare.run(wanted)


def run(tmp_path: Path, wanted: Recipe, ranks: int = 2) -> RunDir:
    """A run directory of the recipe on CPU ranks, not started."""
    hosts = cluster.Cluster((cluster.Host("localhost", ranks, None, 8 * 2**30),))
    return new_run(recipe.Loaded(wanted, {}, "sft.yaml"), hosts, tmp_path / "runs")
