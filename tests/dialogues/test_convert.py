"""Dialogues to shards: what is read, masked and refused, and which prepared ones a recipe may use."""

from __future__ import annotations

import gzip
import itertools
import json
import re
import shutil
import time
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from finlm import prepare
from finlm.base import files
from finlm.base.errors import UserError
from finlm.base.rundir import RunDir
from finlm.corpus.encode import SPLITS
from finlm.corpus.read import readers
from finlm.corpus.read.sources import Input
from finlm.dialogues import lint, shards
from finlm.recipe import cluster, recipe
from finlm.recipe.schema import Recipe
from finlm.rows import dialogues
from finlm.rows.shards import Shards
from finlm.tokens import pretrained

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
    tokenizer = pretrained.open_tokenizer(model)
    return "".join(tokenizer.decode(shard.ids[:].tolist()) for shard in shards.split("train"))


def sides(shards: Shards) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
    """(training, held-out) rows: the tokens of dialogues, and of preferences those of the prompt."""
    found = []
    for split in SPLITS:
        if shards.manifest["stage"] == "sft":
            ends = [(shard, shard.offsets.tolist()) for shard in shards.split(split)]
            found.append([tuple(s.ids[a:b].tolist()) for s, at in ends for a, b in itertools.pairwise(at)])
        else:
            read = dialogues.read_prompts if shards.manifest["stage"] == "grpo" else dialogues.read_pairs
            found.append([tuple(row["prompt_ids"].tolist()) for row in read(shards.split(split))])
    return found[0], found[1]


@pytest.mark.parametrize("dedup", ["none", "exact"])
@pytest.mark.parametrize("stage", ["sft", "dpo", "reward", "grpo"])
def test_no_training_row_is_a_held_out_one_or_has_its_prompt(
    make: Make, tmp_path: Path, stage: str, dedup: str
) -> None:
    def rows(count: int, more: str = "") -> list[dict[str, Any]]:
        if stage == "sft":
            return [*sample(count), *(turns(f"第{n}题？", f"答{more}{n}。") for n in range(count))]
        answers = ("A", "B") if stage == "grpo" else ("答一", "答二", "答三")
        return [pair(n) | {"chosen": f"{said}{more}", "answer": said} for said in answers for n in range(count)]

    write(tmp_path / "one.jsonl", rows(100) * 2)
    write(tmp_path / "two.jsonl", rows(150, "另"))
    wanted = make(
        *([], f"data.sources=[{tmp_path}/one.jsonl,{tmp_path}/two.jsonl]", f"data.dedup={dedup}"),
        *("data.held_out_fraction=0.2", "data.held_out_documents=10"),
        stage=stage,
    )
    shards = prepared(wanted)
    train, held_out = sides(shards)
    assert train and not set(train) & set(held_out)
    counts = shards.manifest["dialogues"]
    assert [row["held_out"] for row in counts.values()] == [10, 10], "the limit is kept, and rows are not lost"
    assert any({"equals_held_out", "reserved"} & row.keys() for row in counts.values()) or (stage, dedup) == (
        "sft",
        "exact",
    )
    made = files.read_json(shards.directory / "documents.json")["sources"]
    names = ("kept", "held_out", "reserved", "duplicate", "equals_held_out", "broken", "cleaned")
    assert all(row["rows"] == sum(row[name] for name in names) for row in made.values())


@pytest.mark.parametrize("stage", ["sft", "dpo"])
def test_blanks_at_the_ends_of_a_text_make_no_other_one(make: Make, stage: str) -> None:
    if stage == "sft":
        rows = [turns(f"{blank}第{n}题？{blank}", f"答{n}。") for blank in ("", "\n") for n in range(100)]
    else:
        rows = [pair(n) | {"prompt": f"{blank}第{n}题？{blank}"} for blank in ("", "\n") for n in range(100)]
    shards = prepared(make(rows, "data.held_out_fraction=0.2", stage=stage))
    texts = [
        {"".join(tokenizer.decode(list(ids)).split()) for ids in side}
        for tokenizer in [pretrained.open_tokenizer(shards.directory / "tokenizer", "auto")]
        for side in sides(shards)
    ]
    assert all(texts) and not texts[0] & texts[1]


def test_what_is_learnt_equals_nothing_held_out_where_rows_are_split_or_only_their_text_differs(make: Make) -> None:
    """Tokens decide: of dialogues that begin alike, of those with and without the recipe's own system prompt."""
    begins = ["甲？", "短。", "乙？", "很长的回答，" * 12]
    long = [turns(f"第{n}家", "好。" * 30, *begins, *more) for n in range(30) for more in ((), ("再问？", "再答。"))]
    said = [turns(f"{n}？", "好。") for n in range(30)]
    with_system = [{"messages": [{"role": "system", "content": "助手"}, *row["messages"]]} for row in said]
    shards = prepared(
        make([*long, *said, *with_system], "chat.system=助手", "data.held_out_fraction=0.3", "data.dedup=none")
    )
    train, held_out = sides(shards)
    assert shards.manifest["dialogues"]["sft"]["split"] > 0 and shards.manifest["dialogues"]["sft"]["equals_held_out"]
    assert train and held_out and not set(train) & set(held_out)


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


GOOD = {
    "alpaca": lambda n: {"instruction": f"第{n}题？", "output": f"{n}。"},
    "sharegpt": lambda n: {"conversations": [{"from": "human", "value": f"{n}？"}, {"from": "gpt", "value": "好。"}]},
    "messages": lambda n: turns(f"{n}？", "好。"),
    "qa": lambda n: {"question": f"第{n}题？", "answer": f"{n}。"},
    "dpo": lambda n: pair(n),
    "grpo": lambda n: {"prompt": f"第{n}题？", "answer": "A"},
}
BROKEN: dict[str, tuple[dict[str, Any], str]] = {
    "alpaca": ({"instruction": "问？", "ouput": "答。"}, "is ouput meant to be output?"),
    "sharegpt": ({"conversations": [{"from": "human", "text": "问？"}]}, "a turn without value: it has from, text"),
    "messages": (turns("问？", "答。", "再问？"), "the last turn is the user's"),
    "qa": ({"question": "问？", "anser": "答。"}, "no answer beside question, only anser, question; is anser meant"),
    "dpo": ({"prompt": "问？", "chosen": "答。", "rejcted": "否。"}, "no rejected answer, .*; is rejcted meant to be"),
    "grpo": ({"promt": "问？", "answer": "A"}, "no prompt, only answer, promt; is promt meant to be prompt?"),
}


@pytest.mark.parametrize("kind", GOOD)
def test_rows_that_cannot_be_used_stop_with_file_and_line_unless_the_recipe_accepts_them(
    make: Make, tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    stage = kind if kind in ("dpo", "grpo") else "sft"
    row, reason = BROKEN[kind]
    rows = [GOOD[kind](n) for n in range(16)]
    source = tmp_path / f"{stage}.jsonl"
    for broken in (1, 16):
        with pytest.raises(UserError, match=rf"source {stage}: {broken} of 16 rows cannot be used") as caught:
            prepared(make([*[row] * broken, *rows[broken:]], stage=stage))
        assert re.search(rf"{source}:1: .*{reason}", caught.value.evidence), caught.value.evidence
        kept = tmp_path / "cache" / f"broken-{stage}.jsonl"
        assert str(kept) in caught.value.fix and [entry["line"] for entry in files.read_json_lines(kept)][-1] == broken
        assert "a row is one of\n- {" in caught.value.fix
    wanted = make([*rows, row], "data.max_broken_fraction=0.1", stage=stage)
    shards = prepared(wanted)
    assert shards.manifest["dialogues"][stage]["broken"] == 1 and not kept.exists()
    assert "1 left out: " in capsys.readouterr().err
    (found,) = (finding for finding in lint.check(wanted, shards) if finding.check == "rows-broken")
    assert found.level == "warning" and f"1 of 17 rows of {stage} cannot be used: 1 x " in found.evidence
    assert re.search(reason, found.evidence)


def test_what_is_left_out_on_purpose_is_counted_and_said_but_refuses_nothing(
    make: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [*sample(10), turns("长？", "很长的回答，" * 60), turns("假？", "好</s>"), *sample(2), turns("inptu", "x")]
    rows[-1] = {"instruction": "译", "inptu": "甲", "output": "a"}
    wanted = make(rows, "data.held_out_fraction=0")
    shards = prepared(wanted)
    assert not shards.manifest["broken"] and not shards.manifest["dialogues"]["sft"]["broken"]
    lint.print_findings(found := lint.check(wanted, shards), shards)
    left_out = {"longer than a row": 1, "control token in the text": 1, "duplicate": 4}
    assert lint.rows_left_out(shards) == left_out
    said = {finding.check: finding.evidence for finding in found}
    assert said["rows-left-out"].startswith("2 of 27 rows of sft are left out: ")
    assert said["key-not-read"] == "1 rows of sft have a key that is not read: 1 x is inptu meant to be input?"
    pairs = [pair(n) | ({"rejected": f"{n}亿元。"} if n < 3 else {}) for n in range(20)]
    same = [{"role": "user", "content": "问"}, {"role": "assistant", "content": "答"}]
    shards = prepared(make([*pairs, {"chosen": same, "rejected": same}], stage="dpo"))
    assert (
        shards.manifest["refused"]["dpo"] == {"chosen and rejected are the same": 4} and not shards.manifest["broken"]
    )
    capsys.readouterr()
    clean = make([*sample(20), *sample(2)])
    lint.print_findings(lint.check(clean, prepared(clean)), prepared(clean))
    assert (
        "lint: nothing wrong; 5 of 44 rows left out (4 duplicate; 1 reserved with those held out)"
        in capsys.readouterr().out
    )


def test_empty_files_and_a_source_that_begins_with_other_rows_are_told_before_the_rest_is_read(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "empty.jsonl", [])
    write(tmp_path / "full.jsonl", sample(9))
    with pytest.raises(UserError, match="source empty has no row") as caught:
        prepared(make([], f"data.sources=[{tmp_path}/full.jsonl,{tmp_path}/empty.jsonl]"))
    assert caught.value.evidence == f"{tmp_path}/empty.jsonl: 0 bytes" and "data.sources[1]" in caught.value.fix
    assert prepared(make([], f"data.sources={tmp_path}/*.jsonl")), "one of an entry's files may be empty"
    monkeypatch.setattr(readers, "BLOCK_BYTES", 2000)
    monkeypatch.setattr(shards.Spool, "add", None)  # nothing is written
    with pytest.raises(UserError, match=r"source other: \d+ of its first \d+ rows cannot be used") as caught:
        prepared(make([], f"data.sources={write(tmp_path / 'other.jsonl', [{'question': '问'}] * 900)}"))
    assert f"{tmp_path}/other.jsonl:1: no answer beside question" in caught.value.evidence
    long = write(tmp_path / "long.jsonl", [turns(f"{n}？", "很长的回答，" * 60) for n in range(9)])
    monkeypatch.undo()
    with pytest.raises(UserError, match="source long has nothing to train on") as caught:
        prepared(make([], f"data.sources={long}"))
    assert caught.value.evidence == "9 rows: longer than a row"


@pytest.mark.parametrize("stage", ["sft", "dpo", "grpo"])
def test_rows_beyond_what_the_start_reads_at_once_are_counted_for_plan_lint_and_train(
    make: Make, model: Path, tmp_path: Path, stage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    short = shutil.copytree(model, tmp_path / "short")
    config = files.read_json(short / "config.json")
    (short / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 100}))
    texts = [f"第{n}家" + "很长的" * (20 if n < 5 else 1) for n in range(20)]
    rows = [turns(text, "好。") if stage == "sft" else pair(n, text) for n, text in enumerate(texts)]
    given = ("batch.sequence_length=512", "batch.tokens_per_step=4096", f"model.init_from={short}", "data.dedup=none")
    wanted = make(rows, *given, *(["grpo.max_new_tokens=32"] if stage == "grpo" else []), stage=stage)
    (before,) = prepare.warnings(wanted, None)
    assert "the start model reads 100 at once" in before
    shards = prepared(wanted)
    assert "5 longer than the start model's context of 100 tokens" in capsys.readouterr().err
    (after,) = prepare.warnings(wanted, shards)
    assert after.startswith("5 of 20 rows are longer than the 100 tokens that the start model reads at once")
    found = {finding.check: finding for finding in lint.check(wanted, shards)}
    assert found["beyond-context"].level == "warning" and found["beyond-context"].evidence == after


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
    ("stage", "changes"),
    [
        *(("sft", ()), ("sft", ("sft.packing=false",)), ("dpo", ()), ("reward", ())),
        ("grpo", ("grpo.generations=4", "grpo.iterations=2", "batch.micro_batch=4")),
    ],
)
def test_an_epoch_is_every_row_once_for_prepare_and_for_the_plan(
    make: Make, stage: str, changes: tuple[str, ...]
) -> None:
    rows = sample(20) if stage == "sft" else [pair(n) for n in range(40)]
    given = ("train.steps=null", "train.epochs=2", "data.held_out_fraction=0.1")
    wanted = make(rows, *given, *changes, stage=stage)
    shards = prepared(wanted)
    about = prepare.describe_reading(wanted, shards)
    is_filled = stage == "sft" and not changes
    assert about.rows < 40 and (about.rows > 30) == (not is_filled)
    each = 4 * 2 if stage == "grpo" else 1  # rows of the answers to a prompt, learnt from twice
    assert prepare.epoch_tokens(wanted, shards) == each * about.rows * wanted.batch.sequence_length
    plan = prepare.plan_with_data(wanted, cluster.local(2), shards)
    assert plan.steps * 8 <= 2 * each * about.rows < (plan.steps + 1) * 8, "rows of a step"
    assert [row.epochs for row in about.sources] == [plan.steps * 8 / (each * about.rows)]
    if stage == "sft":  # the same shards, filled or not
        assert prepared(make(rows, *given, f"sft.packing={not is_filled}")).directory == shards.directory


def test_prepared_dialogues_are_used_by_the_recipe_that_they_fit_only(
    make: Make, model: Path, finished: tuple[RunDir, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, pairs = sample(20), [pair(n) for n in range(20)]
    shards = prepared(make(rows))
    given = f"data.prepared={shards.directory}"
    located = prepare.locate(make(rows, given))
    assert located and prepared(make(rows, given)).directory == located.directory == shards.directory
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
    monkeypatch.setattr(prepare, "RUNS", tmp_path / "none")
    unknown = make(rows, given, f"model.init_from={ROOT}/recipes/quickstart/pretrain.yaml")
    assert prepared(unknown).directory == shards.directory, "a model that is not there yet says nothing"


def test_exchanges_longer_than_a_row_are_told_and_warned_of(make: Make, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [turns(f"{n}？", "短。", "长？", "很长的回答，" * 60, "再问？", "再答。") for n in range(20)]
    wanted = make([*rows, turns("很长？", "很长的回答，" * 60)], "data.held_out_fraction=0")
    shards = prepared(wanted)
    assert "20 exchanges longer than a row left out; 1 left out: longer than a row" in capsys.readouterr().err
    lint.print_summary(shards, lint.count_labels(wanted, shards))
    assert "20 longer than a row" in capsys.readouterr().out
    found = {finding.check: finding for finding in lint.check(wanted, shards)}
    assert found["exchanges-left-out"].level == "warning"
    assert "20 exchanges of 20 dialogues" in found["exchanges-left-out"].evidence


def test_grpo_is_prepared_anew_for_another_kind_of_reward(make: Make, tmp_path: Path) -> None:
    rows = [{"prompt": f"第{n}题？", "answer": "B. 甲" if n else "甲"} for n in range(20)]
    by_letter = make(rows, "data.max_broken_fraction=0.05", stage="grpo")
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


def test_many_sources_of_dialogues_are_sorted_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """20,000 files of two rows: comparing every name with every dialogue takes 6 s of a core."""
    count = 20_000
    tallies = [shards.Tally(Input(f"s{number}", (), "train")) for number in range(count)]
    spool = shards.Spool(tmp_path, np.dtype("<u2"))
    for number in range(count):
        hashes = bytearray(np.array([number, 0, number, 1, number, 2, number, 3], dtype="<u8").tobytes())
        made = shards.Encoded(
            number, array("I", [1, 2, 3]), bytearray(3), [(2, 4, 0, number), (1, 2, 1, -number % 2**63)], hashes
        )
        spool.add(made)
    written: list[tuple[str, str, int]] = []
    monkeypatch.setattr(shards.Spool, "_write", lambda self, *of: written.append((of[0], of[1], len(of[2]))))
    started = time.process_time()
    data = recipe.load(
        ROOT / "recipes/quickstart/pretrain.yaml", ("data.dedup=none", "data.held_out_fraction=0")
    ).recipe.data
    spool.split(tallies, data)
    assert time.process_time() - started < 2
    assert written == [("train", f"s{number}", 2) for number in range(count)]
    assert all(tally.counts == {"kept": 2} for tally in tallies)
