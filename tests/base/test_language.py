"""Messages in Chinese: which language is asked for, how a sentence is found, and what the catalogue covers."""

from __future__ import annotations

import ast
import json
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from finlm.base import language
from finlm.cli import main, options

from helpers import ROOT

CATALOGUE = tomllib.loads(language.CATALOGUE.read_text(encoding="utf-8"))
MESSAGES: dict[str, str] = CATALOGUE["messages"]
# Sentences of pydantic, ruamel.yaml, argparse, sentencepiece and the system, which stand in no file of ours.
OF_OTHERS = re.compile(
    r"^(Parquet|INTERNAL|\[Errno|No such|Permission|Is a dir|Not a dir|File exists|No space|Read-only|File name|"
    r"Operation|Disk quota|found |but found|expected a single|while |mapping|\{codec\}|not JSON: Expecting|options|"
    r"positional|show this|the following arg|unrecognized|argument \{|"
    r"one of the arg|should be |greater than|less than|at least \{least\} and|above \{least\} and|selection: nothing)"
)


@pytest.fixture
def chinese() -> Iterator[None]:
    """Messages in Chinese during the test."""
    language.use("zh")
    language.missed.clear()
    yield
    language.use("en")


@pytest.mark.parametrize(
    ("arguments", "environment", "expected"),
    [
        (["plan", "x"], {}, "en"),
        (["plan", "x", "--lang", "zh"], {}, "zh"),
        (["--lang=zh", "plan"], {}, "zh"),
        (["plan", "--lang", "en"], {"LANG": "zh_CN.UTF-8"}, "en"),
        (["plan"], {"LANG": "zh_CN.UTF-8"}, "zh"),
        (["plan"], {"LC_ALL": "C.UTF-8", "LANG": "zh_CN.UTF-8"}, "en"),
        (["plan"], {"LC_ALL": "", "LC_MESSAGES": "zh_TW", "LANG": "C"}, "zh"),
        (["plan"], {"FINLM_LANG": "en", "LC_ALL": "zh_CN"}, "en"),
        (["plan"], {"FINLM_LANG": "zh", "LC_ALL": "C"}, "zh"),
        (["plan"], {"FINLM_LANG": "cn"}, "zh"),
    ],
)
def test_the_option_comes_before_the_environment(
    arguments: list[str], environment: dict[str, str], expected: str
) -> None:
    assert language.choose(arguments, environment) == expected


@pytest.mark.usefixtures("chinese")
def test_a_sentence_is_found_whole_by_clauses_by_its_key_and_by_its_list() -> None:
    says = language.translate
    assert says("there is no run best") == "没有运行 best"
    assert says("`finlm runs` lists them; `latest` is the newest") == "`finlm runs` 列出它们；`latest` 是最新的"
    assert says("a.yaml:3: optim.warmup_steps: 9 is not less than the 5 steps of the run") == (
        "a.yaml:3：optim.warmup_steps：9 不小于运行的 5 步"
    )
    assert says("  weights 2.3 MiB, Adam states 4.6 MiB") == "  权重 2.3 MiB，Adam 状态 4.6 MiB"
    assert says("  recompute  none") == "  重计算     无", "a column keeps its width: a Chinese character takes two"
    assert says("does not fit: 31.9 GiB of 31.8 GiB a GPU") == "放不下：每块 GPU 31.9 GiB，可用 31.8 GiB"


@pytest.mark.usefixtures("chinese")
def test_what_is_not_known_stays_english_and_is_noted() -> None:
    assert language.translate("nobody has ever said this") == "nobody has ever said this"
    assert language.missed == {"nobody has ever said this"}
    assert language.translate("corpus/some file.jsonl") == "corpus/some file.jsonl"


def test_without_a_choice_messages_are_english() -> None:
    assert language.current() == "en" and language.translate("there is no run best") == "there is no run best"


def test_json_is_the_same_in_every_language(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    printed = []
    for chosen in ("en", "zh"):
        monkeypatch.setenv("FINLM_LANG", chosen)
        codes = [main.main(["plan", "quickstart", "--json"]), main.main(["runs", "--json"])]
        log = ROOT / "tests/diagnose/logs/nccl_ifname_missing.log"
        codes.append(main.main(["diagnose", str(log), "--json"]))
        out, err = capsys.readouterr()
        assert ("理由" in err) == (chosen == "zh") and codes == [0, 0, 1]
        printed.append([json.loads(line) for line in out.splitlines()])
    assert printed[0] == printed[1]
    assert language.current() == "en", "the next command of the process begins anew"


def test_plan_doctor_and_the_steps_of_the_quickstart_are_in_chinese(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    language.missed.clear()
    large = str(ROOT / "recipes/llama2-7b-fincorpus/pretrain.yaml")
    stages = [["plan", f"quickstart/{name}"] for name in ("pretrain", "sft", "dpo", "grpo")]
    doctor, steps, runs = ["doctor", "quickstart"], ["train", "quickstart", "--dry-run"], ["runs"]
    short = ["plan", "xuanyuan-70b", "--gpu", "A100-40G"]  # nothing fits
    fp8 = ["plan", "xuanyuan-6b", "--set", "train.precision=fp8"]
    rare = ["plan", "xuanyuan-6b", "--failures", "0.1", "--set", "checkpoint.memory_minutes=auto"]
    for command in (
        *stages,
        ["plan", large],
        short,
        fp8,
        rare,
        ["diff", "quickstart/sft", "quickstart/dpo"],
        doctor,
        steps,
        runs,
    ):
        main.main([*command, "--lang", "zh"])
    said = capsys.readouterr().out
    assert "理由" in said and "怎样能更快" in said and "待做" in said and "runs/ 中没有运行" in said
    written = "values written"  # the values themselves are the recipe's author's
    assert [text for text in language.missed if text != written and " = " not in text and "yaml" not in text] == []


@pytest.mark.usefixtures("chinese")
def test_the_help_of_every_command_is_in_chinese() -> None:
    root = options.parser()
    for parser in (root, *options.subcommands(root)):
        parser.format_help()
    assert language.missed == set()


def test_every_entry_stands_in_the_code_and_keeps_its_holes() -> None:
    said = "\n".join(_constants())
    stale, broken = [], []
    for english, chinese in MESSAGES.items():
        words = max(language.HOLE.sub("\n", english).split("\n"), key=len).split()
        half = (len(words) + 1) // 2  # a sentence may be put together from two strings
        stretches = (" ".join(words[i : i + half]).strip(",;:().") for i in range(len(words) - half + 1))
        if not OF_OTHERS.match(english) and not any(stretch in said for stretch in stretches):
            stale.append(english)
        if not set(language.HOLE.findall(chinese)) <= set(language.HOLE.findall(english)):
            broken.append(english)
    assert stale == [] and broken == []


def _constants() -> Iterator[str]:
    """Yield every string of the package, and the text of its YAML files."""
    for path in (ROOT / "src/finlm").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value
    yield (ROOT / "src/finlm/recipe/other_names.yaml").read_text(encoding="utf-8")
