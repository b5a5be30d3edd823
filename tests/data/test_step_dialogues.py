"""Dialogues to shards: what is read, masked and refused, and which prepared ones a recipe may use."""

from __future__ import annotations

import gzip
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from finlm.base.errors import UserError
from finlm.base.rundir import RunDir
from finlm.data import chain, chat_tokens, lint, lint_show, prepare, show
from finlm.data.shards import Shards
from finlm.recipe import recipe
from finlm.recipe.schema import Recipe

from dialogues import prepared, sample, sft, turns, write
from helpers import ROOT

Make = Callable[..., Recipe]
LLAMA_3 = (  # how Llama-3.2's template comes by its date
    "{% if strftime_now is defined %}{% set today = strftime_now('%d %b %Y') %}"
    "{% else %}{% set today = '26 Jul 2024' %}{% endif %}Today: {{ today }}\n"
)
TURNS = "{% for m in messages %}{{ m.role }}: {{ m.content }}</s>{% endfor %}"


@pytest.fixture(scope="module")
def model(finished: tuple[RunDir, str]) -> Path:
    return Path(finished[0].export)


@pytest.fixture
def make(model: Path, tmp_path: Path) -> Make:
    """make(rows, "a.b=c", ..., stage="sft") -> a tiny recipe of that stage on these rows."""

    def made(rows: list[dict[str, Any]], *overrides: str, stage: str = "sft") -> Recipe:
        source = write(tmp_path / f"{stage}.jsonl", rows)
        if stage == "sft":
            return sft(tmp_path, model, source, *overrides)
        settings = (
            *(f"model.init_from={model}", f"data.sources={source}", f"data.cache_dir={tmp_path / 'cache'}"),
            *("eval.suites=[]", "batch.sequence_length=128", "batch.tokens_per_step=1024", "optim.warmup_steps=2"),
        )
        return recipe.load(ROOT / f"recipes/quickstart/{stage}.yaml", (*settings, *overrides)).recipe

    return made


def pair(number: int, said: str = "") -> dict[str, Any]:
    texts = {"prompt": f"第{number}家公司{said}？", "chosen": f"{number}亿元。{said}", "rejected": f"{number}万元。"}
    return texts | {"answer": "A"}


def written(model: Path, shards: Shards) -> str:
    """The text of all training tokens."""
    tokenizer = chat_tokens.open_tokenizer(model)
    return "".join(tokenizer.decode(shard.ids[:].tolist()) for shard in shards.split("train"))


def test_a_cut_archive_is_refused_unless_the_recipe_accepts_the_loss(
    make: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = "".join(json.dumps(row) + "\n" for row in sample(1500)).encode()
    (tmp_path / "half.jsonl.gz").write_bytes((whole := gzip.compress(lines))[: len(whole) // 2])
    given = (f"data.sources={tmp_path}/half.jsonl.gz",)
    with pytest.raises(UserError, match=r"source half: half\.jsonl\.gz ends early") as caught:
        prepared(make([], *given))
    assert "the archive is cut short" in caught.value.evidence and "fetch it again" in caught.value.fix
    counts = prepared(make([], *given, "data.max_broken_fraction=0.02")).manifest["dialogues"]["half"]
    assert "1 left out: the archive is cut short, the rest not read" in capsys.readouterr().err
    assert counts["broken"] == 1 and counts["kept"] > 1000
    as_list = gzip.compress(json.dumps(sample(1500)).encode())
    (tmp_path / "half.json.gz").write_bytes(as_list[: len(as_list) // 2])
    with pytest.raises(UserError, match=r"half\.json\.gz is not one JSON list") as caught:
        prepared(make([], f"data.sources={tmp_path}/half.json.gz"))
    assert "the archive is cut short" in caught.value.evidence


@pytest.mark.parametrize("as_list", [False, True], ids=["lines", "a list"])
def test_numbers_and_strings_that_json_does_not_know_break_a_row_only_where_they_are_said(
    make: Make, tmp_path: Path, as_list: bool
) -> None:
    one, two, *more = sample(10)
    rows = [one | {"score": float("nan")}, two | {"note": "\ud83d"}, turns("问", "\ud83d"), *more]
    path = tmp_path / "odd.json"
    path.write_text(json.dumps(rows) if as_list else "\n".join(map(json.dumps, rows)))
    wanted = make([], f"data.sources={path}", "data.max_broken_fraction=0.1", "data.dedup=none")
    manifest = prepared(wanted).manifest
    assert manifest["refused"]["odd"] == {"half of a surrogate pair in the text": 1}
    assert manifest["dialogues"]["odd"]["broken"] == 1 and manifest["dialogues"]["odd"]["dialogues"] == 20


@pytest.mark.parametrize("stage", ["sft", "dpo"])
def test_personal_numbers_are_masked_as_in_documents(make: Make, model: Path, stage: str) -> None:
    said = "客服电话13812345678"
    rows = [turns(f"{number}？{said}", f"{number}。{said}") for number in range(9)]
    rows = rows if stage == "sft" else [pair(number, said) for number in range(9)]
    for override, found, missing in (("data.num_proc=2", "[手机号]", "138"), ("data.clean=none", "13812345678", "[手")):
        text = written(model, prepared(make(rows, override, "data.held_out_fraction=0", stage=stage)))
        assert text.count(found) == 9 * (3 if stage == "dpo" else 2) and missing not in text


@pytest.mark.parametrize(
    ("stage", "changes"), [("sft", ()), ("sft", ("sft.packing=false",)), ("dpo", ()), ("reward", ()), ("grpo", ())]
)
def test_an_epoch_is_every_row_once_for_prepare_and_for_the_plan(
    make: Make, stage: str, changes: tuple[str, ...]
) -> None:
    rows = sample(20) if stage == "sft" else [pair(n) for n in range(40)]
    given = ("train.steps=null", "train.epochs=2", "data.held_out_fraction=0.1")
    wanted = make(rows, *given, *changes, stage=stage)
    shards = prepared(wanted)
    about = show.reading(wanted, shards)
    assert [row["epochs"] for row in about["sources"]] == [2]
    is_filled = stage == "sft" and not changes
    assert about["rows"] < 40 and (about["rows"] > 30) == (not is_filled)
    assert prepare.sizes(shards.directory, wanted)[1] == about["rows"] * wanted.batch.sequence_length
    if stage == "sft":  # the same shards, filled or not
        assert prepared(make(rows, *given, f"sft.packing={not is_filled}")).directory == shards.directory


def test_prepared_dialogues_are_used_by_the_recipe_that_they_fit_only(
    make: Make, model: Path, finished: tuple[RunDir, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, pairs = sample(20), [pair(n) for n in range(20)]
    shards = prepared(make(rows))
    given = f"data.prepared={shards.directory}"
    assert prepare.run(make(rows, given)) == prepare.locate(make(rows, given)) == shards.directory
    other = shutil.copytree(model, tmp_path / "other")
    (other / "special_tokens_map.json").write_text("{}")
    refused = {
        "made for stage sft, this is stage dpo": make(pairs, given, stage="dpo"),
        "made for stage pretrain, this is stage sft": make(rows, f"data.prepared={finished[0].shards}"),
        "other settings": make(rows, given, "batch.sequence_length=256"),
        "written by other settings": make(rows, given, "sft.assistant_only_loss=false"),
        "another tokenizer": make(rows, given, f"model.init_from={other}"),
        "another chat template than llama2": make(rows, given, "chat.template=llama2"),
    }
    for words, wanted in refused.items():
        for ask in (prepare.run, prepare.locate):
            with pytest.raises(UserError, match=words) as caught:
                ask(wanted)
            assert caught.value.evidence and caught.value.fix
    monkeypatch.setattr(chain, "RUNS", tmp_path / "none")
    unknown = make(rows, given, f"model.init_from={ROOT}/recipes/quickstart/pretrain.yaml")
    assert prepare.run(unknown) == shards.directory, "a model that is not there yet says nothing"


def test_exchanges_longer_than_a_row_are_told_and_warned_of(make: Make, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [turns(f"{n}？", "短。", "长？", "很长的回答，" * 60, "再问？", "再答。") for n in range(20)]
    wanted = make([*rows, turns("很长？", "很长的回答，" * 60)], "data.held_out_fraction=0")
    shards = prepared(wanted)
    assert "20 exchanges longer than a row left out; 1 left out: longer than a row" in capsys.readouterr().err
    lint_show.summary(wanted, shards, lint.look(wanted, shards))
    assert "20 longer than a row" in capsys.readouterr().err
    found = {finding.check: finding for finding in lint.check(wanted, shards)}
    assert found["exchanges-left-out"].level == "warning"
    assert "20 exchanges of 20 dialogues" in found["exchanges-left-out"].evidence


def test_grpo_is_prepared_anew_for_another_kind_of_reward(make: Make, tmp_path: Path) -> None:
    rows = [{"prompt": f"第{n}题？", "answer": "B. 甲" if n else "甲"} for n in range(20)]
    by_letter = make(rows, stage="grpo")
    judged = make(rows, f"grpo.reward={tmp_path}", stage="grpo")
    first, second = prepared(by_letter), prepared(judged)
    assert first.directory != second.directory
    assert first.manifest["refused"] == {"grpo": {"no right letter": 1}} and not second.manifest["refused"]
    with pytest.raises(UserError, match="other settings"):
        prepare.locate(make(rows, f"data.prepared={second.directory}", stage="grpo"))


def test_a_template_that_takes_no_dialogue_is_refused_before_the_rows(make: Make, tmp_path: Path) -> None:
    wants_system = "{% if messages[0].role != 'system' %}{{ raise_exception('no system') }}{% endif %}"
    (template := tmp_path / "template.jinja").write_text(wants_system + TURNS)
    with pytest.raises(UserError, match="does not take a question and its answer") as caught:
        prepared(make(sample(9), f"chat.template={template}"))
    assert "no system" in caught.value.evidence and "chat.system" in caught.value.fix
    assert prepared(make(sample(9), f"chat.template={template}", "chat.system=有"))


def test_a_template_writes_the_same_on_any_day_or_is_refused(make: Make, model: Path, tmp_path: Path) -> None:
    template = tmp_path / "template.jinja"
    template.write_text(LLAMA_3 + TURNS)
    wanted = make(sample(9), f"chat.template={template}")
    assert "Today: 26 Jul 2024\n" in written(model, prepared(wanted))
    (dated := tmp_path / "dated.jinja").write_text("{{ strftime_now('%Y-%m-%d') }}" + TURNS)
    with pytest.raises(UserError, match="today's date"):
        prepared(make(sample(9), f"chat.template={dated}"))
