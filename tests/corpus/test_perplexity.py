"""What the perplexity filter learns from."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from finlm.base import files
from finlm.base.step_cache import Cache
from finlm.corpus import perplexity
from finlm.corpus.workers import Context
from finlm.recipe import recipe

from helpers import QUICKSTART


def model_of(directory: Path, clean_set: list[str], clean_bytes: int) -> Path:
    settings = f"data.clean.perplexity={{clean_set: [{', '.join(clean_set)}], clean_bytes: {clean_bytes}}}"
    context = Context(recipe.load(QUICKSTART, (settings,)).recipe, Cache(directory, build=True))
    assert context.data.clean.perplexity is not None
    return perplexity._make_model(context, context.data.clean.perplexity).path


def test_every_file_of_the_clean_set_gives_its_share_in_whatever_order_they_stand(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, count in (("laws", 3000), ("news", 1000)):
        rows = [json.dumps({"text": f"{name}{number:05}" + "净利润同比增长" * 7}) for number in range(count)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join([*rows, rows[0]]), encoding="utf-8")
    paths = [f"{tmp_path}/laws.jsonl", f"{tmp_path}/news.jsonl"]
    model = model_of(tmp_path / "a", paths, 100_000)
    assert "laws " in capsys.readouterr().err
    about = files.read_json(model / "manifest.json")
    assert about["used"] == {"laws": pytest.approx(75_000, rel=0.1), "news": pytest.approx(25_000, rel=0.1)}
    assert 100_000 <= sum(about["used"].values()) < 100_200
    other = model_of(tmp_path / "b", paths[::-1], 100_000)
    assert other.name == model.name, "the cache finds it in any order"
    assert (other / "model.npz").read_bytes() == (model / "model.npz").read_bytes()
    everything = files.read_json(model_of(tmp_path / "a", paths, 10_000_000) / "manifest.json")
    assert everything["used"] == {"laws": 3000 * 156, "news": 1000 * 156}, "a text that stands twice counts once"
