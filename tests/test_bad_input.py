"""Mistakes of a user, at the command line: one screen, exit 2, nothing half-written."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from finlm import prepare
from finlm.base import files
from finlm.base.errors import UserError
from finlm.base.rundir import RunDir
from finlm.cli import main, options
from finlm.doctor import gather
from finlm.recipe import recipe

from helpers import QUICKSTART, TINY, finlm_here, sets

GOOD = "".join(
    json.dumps({"text": f"第{n}家公司营业收入为{n * 37}万元，净利润为{n * 5}万元。"}) + "\n" for n in range(400)
)
SMALL = "tokenizer.vocab_size=300"


def corpus(directory: Path, text: str) -> str:
    """A source of these lines."""
    (directory / "own.jsonl").write_text(text, encoding="utf-8")
    return f"data.sources={directory / 'own.jsonl'}"


def with_recipe(directory: Path, old: str, new: str) -> Path:
    """The quickstart recipe with one change, as a file."""
    text = QUICKSTART.read_text(encoding="utf-8")
    assert old in text
    path = directory / "changed.yaml"
    path.write_text(text.replace(old, new), encoding="utf-8")
    return path


Case = Callable[[Path], tuple[Path, list[str]]]
CASES: dict[str, tuple[Case, str]] = {
    "unknown key": (
        lambda d: (with_recipe(d, "hidden_size", "hiden_size"), []),
        "changed.yaml:7: model.hiden_size: unknown key; did you mean model.hidden_size?",
    ),
    "wrong type": (
        lambda d: (with_recipe(d, "num_proc: 2", "num_proc: many"), []),
        "changed.yaml:14: data.num_proc",
    ),
    "3e-4 as a string": (
        lambda d: (with_recipe(d, "lr: 2.0e-3", 'lr: "3e-4"'), []),
        "optim.lr: expected a number, got the string '3e-4'; write it without quotes",
    ),
    "duplicate key": (lambda d: (with_recipe(d, "zero:", "batch:"), []), "changed.yaml:20"),
    "missing recipe": (lambda d: (d / "none.yaml", []), "cannot read the recipe"),
    "missing source": (lambda d: (QUICKSTART, [f"data.sources={d / 'absent' / '*.jsonl.gz'}"]), "absent"),
    "empty source": (lambda d: (QUICKSTART, [corpus(d, ""), SMALL]), "own"),
    "not JSON lines": (lambda d: (QUICKSTART, [corpus(d, "净利润\n" * 50), SMALL]), "own.jsonl:1"),
    "vocabulary too large for uint16": (
        lambda d: (QUICKSTART, ["tokenizer.vocab_size=70000", "data.token_dtype=uint16"]),
        "uint16 holds ids up to 65,535",
    ),
    "vocabulary too large for the text": (
        lambda d: (QUICKSTART, [corpus(d, GOOD), "tokenizer.vocab_size=30000"]),
        "tokenizer.vocab_size",
    ),
    "fp16 on CPU": (lambda d: (QUICKSTART, ["train.precision=fp16"]), "fp16 does not run on CPU ranks"),
    "a hostfile line that is none": (lambda d: (QUICKSTART, ["--hostfile"]), "hosts:1"),
}


@pytest.mark.parametrize("name", CASES)
def test_a_mistake_gives_one_clear_screen_and_leaves_nothing(name: str, tmp_path: Path) -> None:
    case, words = CASES[name]
    cache, runs = tmp_path / "cache", tmp_path / "runs"
    path, overrides = case(tmp_path)
    options = sets([*TINY, f"data.cache_dir={cache}", *(o for o in overrides if o != "--hostfile")])
    if "--hostfile" in overrides:
        (tmp_path / "hosts").write_text("worker-a slots\n", encoding="utf-8")
        options += ["--hostfile", str(tmp_path / "hosts")]
    result = finlm_here("train", path, *options, "--runs", runs)
    assert result.returncode == 2, result.stderr
    assert words in result.stderr, result.stderr
    assert "Traceback" not in result.stderr
    assert len(result.stderr.splitlines()) <= 25, "one screen"
    assert not runs.exists()
    assert not list(cache.glob("**/*.tmp*")) and not list(cache.glob("shards-*"))


@pytest.mark.parametrize("option", ["--include", "--exclude", "--gpu"])
def test_a_choice_of_hosts_without_a_hostfile_is_refused(
    option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main.main(["train", str(QUICKSTART), option, "a100"]) == 2
    assert "are about a hostfile's hosts, and there is none" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("kind", [[], ["--gpu", "A100-40G"]])
def test_a_host_that_does_not_answer_is_told_before_anything_is_prepared(
    kind: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    down = gather.Failed("b does not answer", "ssh: connect to host b: timed out", "try `ssh b`")
    facts = {"a": gather.HostFacts(), "b": gather.HostFacts(failed=down)}
    monkeypatch.setattr(gather, "gather_hardware", lambda *_: facts)
    monkeypatch.setattr(prepare, "run", lambda _: pytest.fail("prepared"))
    (tmp_path / "hosts").write_text("a slots=1\nb slots=1\n")
    command = ["train", str(QUICKSTART), "--hostfile", str(tmp_path / "hosts"), "--runs", str(tmp_path / "runs")]
    assert main.main([*command, *kind]) == 2
    said = capsys.readouterr().err
    assert "error: 1 of 2 hosts cannot be asked: b" in said and "connect to host b: timed out" in said
    assert "try `ssh b`" in said and "--exclude b" in said


def test_broken_rows_are_kept_aside_and_their_limit_can_be_raised(tmp_path: Path) -> None:
    source = corpus(tmp_path, GOOD + "not json\n" * 4)
    options = sets([*TINY, f"data.cache_dir={tmp_path / 'cache'}", SMALL, source])
    refused = finlm_here("prepare", QUICKSTART, *options)
    assert refused.returncode == 2
    assert "own.jsonl:401" in refused.stderr and "max_broken_fraction" in refused.stderr
    (aside,) = (tmp_path / "cache").glob("broken-*.jsonl")
    assert [json.loads(line)["line"] for line in aside.read_text(encoding="utf-8").splitlines()] == [401, 402, 403, 404]
    accepted = finlm_here("prepare", QUICKSTART, *options, "--set", "data.max_broken_fraction=0.02")
    assert accepted.returncode == 0 and "4 broken" in accepted.stderr


def test_a_tokenizer_that_does_not_match_the_shards_is_refused_with_both_hashes(tmp_path: Path) -> None:
    made = []
    for name, vocabulary in (("one", 300), ("two", 290)):
        options = [
            *TINY,
            f"data.cache_dir={tmp_path / name}",
            corpus(tmp_path, GOOD),
            f"tokenizer.vocab_size={vocabulary}",
        ]
        made.append(finlm_here("prepare", QUICKSTART, *sets(options)).stdout.strip())
    other = ["tokenizer.vocab_size=null", f"tokenizer.path={made[1]}/tokenizer.model", f"data.prepared={made[0]}"]
    result = finlm_here("train", QUICKSTART, *sets([*TINY, *other]), "--runs", tmp_path / "runs")
    assert result.returncode == 2
    assert "the tokenizer does not match the shards" in result.stderr and result.stderr.count("sha256") >= 1
    assert not (tmp_path / "runs").exists()


def test_a_model_with_fewer_rows_than_the_tokenizer_has_pieces_is_refused(tmp_path: Path) -> None:
    options = [*TINY, f"data.cache_dir={tmp_path / 'cache'}", corpus(tmp_path, GOOD), SMALL]
    shards = finlm_here("prepare", QUICKSTART, *sets(options)).stdout.strip()
    small = ["tokenizer.vocab_size=290", "model.vocab_size=290", f"data.prepared={shards}"]
    result = finlm_here("train", QUICKSTART, *sets([*TINY, *small]), "--runs", tmp_path / "runs")
    assert result.returncode == 2 and "the tokenizer has 300 pieces, the model 290 rows" in result.stderr


def cut_short(directory: Path, name: str) -> Path:
    """A run directory whose file of this name is empty, as after a power cut."""
    run = RunDir(directory / "cut")
    files.write_text(run.recipe, recipe.dump(recipe.load(QUICKSTART, TINY).recipe))
    for path in (run.plan, run.ds_config, run.origins):
        files.write_json(path, {})
    (run.path / name).write_text("")
    return run.path


REFUSED: dict[str, tuple[Callable[[Path], list[str | Path]], str]] = {
    "recipes in a file": (
        lambda d: ["new", "mine", "--from", QUICKSTART, "--recipes", d / "file"],
        "new: {d}/file/mine: Not a directory",
    ),
    "runs in a file": (
        lambda d: ["verify-resume", QUICKSTART, "--runs", d / "file"],
        "verify-resume: {d}/file: Not a directory",
    ),
    "a page in the place of a directory": (
        lambda d: ["report", cut_short(d, "origins.json"), "--out", d / "directory"],
        "Is a directory",
    ),
    "an empty plan, watched": (lambda d: ["watch", cut_short(d, "plan.json")], "{d}/cut/plan.json is not JSON"),
    "empty origins": (lambda d: ["diff", QUICKSTART, cut_short(d, "origins.json")], "{d}/cut/origins.json is not JSON"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_file_that_is_no_such_thing_or_is_cut_short_ends_the_command_without_a_traceback(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "directory").mkdir()
    arguments, words = REFUSED[name]
    assert main.main(list(map(str, arguments(tmp_path)))) == 2
    said = capsys.readouterr().err
    assert words.format(d=tmp_path) in said and "fix:" in said


def test_text_that_fills_no_row_is_refused_and_fills_one_with_another_packing(tmp_path: Path) -> None:
    source = corpus(tmp_path, GOOD[: GOOD.index("\n") + 1])
    few = (*TINY, source, "tokenizer.vocab_size=280", f"data.cache_dir={tmp_path / 'cache'}")
    with pytest.raises(UserError, match="give no row of 64 tokens"):
        prepare.run(recipe.load(QUICKSTART, (*few, "data.packing=blocks")).recipe)
    wanted = recipe.load(QUICKSTART, few).recipe
    assert prepare.describe_reading(wanted, prepare.run(wanted)).rows == 1


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["plan", "r.yaml", "--price", "-3"], "--price: expected a number at least 0, got '-3'"),
        (["sample", "m", "x", "--tokens", "-4"], "--tokens: expected a whole number of at least 1, got '-4'"),
        (["sample", "m", "x", "--tokens", "4.5"], "--tokens: expected a whole number of at least 1, got '4.5'"),
        (["compare", "a", "b", "--tolerance", "nan"], "--tolerance: expected a number at least 0, got 'nan'"),
        (["reproduce", "a", "--tolerance", "inf"], "--tolerance: expected a number at least 0, got 'inf'"),
        (["chat", "m", "--temperature", "nan"], "--temperature: expected a number at least 0, got 'nan'"),
        (["chat", "m", "--temperature", "-1"], "--temperature: expected a number at least 0, got '-1'"),
        (["eval", "m", "--shots", "-1"], "--shots: expected a whole number of at least 0, got '-1'"),
        (["chat", "m", "--top-p", "1.5"], "--top-p: expected a number above 0 and at most 1, got '1.5'"),
        (["plan", "r.yaml", "--gpu-flops", "0"], "--gpu-flops: expected a number above 0, got '0'"),
    ],
)
def test_a_number_out_of_its_bounds_is_refused(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main.main(arguments)
    assert ended.value.code == 2 and says in capsys.readouterr().err


def test_numbers_within_their_bounds_are_read() -> None:
    read = options.parser().parse_args(["plan", "r.yaml", "--gpu-flops", "165e12", "--price", "0"])
    assert (read.gpu_flops, read.price) == (165e12, 0.0)
    assert options.parser().parse_args(["chat", "m", "--tokens", "1", "--top-p", "1"]).tokens == 1


def test_an_error_of_the_system_without_a_file_is_a_bug_and_keeps_its_traceback(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refused(_: object) -> int:
        raise ConnectionRefusedError(errno.ECONNREFUSED, "refused")

    monkeypatch.setitem(main.COMMANDS, "watch", refused)
    with pytest.raises(ConnectionRefusedError):
        main.main(["watch", "."])
