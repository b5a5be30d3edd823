"""The pages of docs/ in both languages: alike, and true where a machine can tell. test_docs.py runs their commands."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from finlm.cli import options
from finlm.recipe import recipe, reference

from helpers import ROOT

DOCS = sorted(path for path in (ROOT / "docs").glob("*.md") if not path.name.endswith(".zh-CN.md"))
PAGES = sorted(
    [
        *(ROOT / "docs").glob("*.md"),
        *ROOT.glob("README*.md"),
        *ROOT.glob("recipes/README*.md"),
        *ROOT.glob("recipes/*/README*.md"),
        ROOT / "CONTRIBUTING.md",
    ]
)
every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: f"{page.parent.name}-{page.name}")


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def prose(page: Path) -> str:
    """Without code blocks."""
    return re.sub(r"```.*?```", "", text_of(page), flags=re.DOTALL)


def links(page: Path) -> list[str]:
    return re.findall(r"\]\(([^)\s]+)\)", prose(page))


def anchors(page: Path) -> set[str]:
    """What a link may name in a page, as GitHub makes them of headings."""
    headings = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    made = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
    return made | set(re.findall(r'<a id="([^"]+)">', prose(page)))


OF_RECIPES = sorted(ROOT.glob("recipes/*/README.md"))


@pytest.mark.parametrize("page", OF_RECIPES, ids=lambda page: page.parent.name)
def test_the_tables_of_a_recipes_page_have_the_same_numbers_in_both_languages(page: Path) -> None:
    numbers = []
    for shown in (page, page.with_name("README.zh-CN.md")):
        rows = re.findall(r"^\|.*$", prose(shown), re.MULTILINE)
        # 10 B is 100 亿; with the size and the unit apart other figures remain as they are.
        rows = [re.sub(r"[\d.]+ (B|M|billion|million|亿|万)\b|[\d.]+ 亿", "", row) for row in rows]
        numbers.append([sorted(re.findall(r"\d[\d,.]*\d|\d", row)) for row in rows])
    assert numbers[0] == numbers[1]


@pytest.mark.parametrize(
    "page",
    [*DOCS, ROOT / "README.md", ROOT / "recipes/README.md", *OF_RECIPES],
    ids=lambda page: f"{page.parent.name}-{page.name}",
)
def test_both_languages_have_the_same_headings_commands_tables_and_links(page: Path) -> None:
    twin = page.with_name(f"{page.stem}.zh-CN.md")
    assert twin.exists(), f"{page.name} has no Chinese page"
    levels, blocks, rows, targets = [], [], [], []
    for one in (page, twin):
        levels.append([len(marks) for marks in re.findall(r"^(#+) ", prose(one), re.MULTILINE)])
        blocks.append(re.findall(r"```(?:bash|yaml|console|text|python)\n(.*?)```", text_of(one), re.DOTALL))
        rows.append([len(re.findall(r"(?<!\\)\|", row)) for row in re.findall(r"^\|.*$", prose(one), re.MULTILINE)])
        targets.append(sorted(link.replace(".zh-CN.md", ".md").partition("#")[0] for link in links(one)))
    assert levels[0] == levels[1]
    assert blocks[0] == blocks[1]
    assert rows[0] == rows[1], "columns of the tables' rows"
    assert targets[0] == targets[1]


@every_page
def test_every_link_leads_somewhere(page: Path) -> None:
    for link in links(page):
        if link.startswith("http"):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{page.name}: {link}"
        assert not anchor or anchor in anchors(target), f"{page.name}: {link}"


@every_page
def test_no_page_has_words_that_are_taken_for_html(page: Path) -> None:
    text = re.sub(r"`[^`\n]*`|\\<", "", prose(page))
    assert re.findall(r"<(?!a id=|/a>|https?:)[A-Za-z/][^\n]{,40}", text) == []


@every_page
def test_files_keys_and_commands_that_a_page_names_exist(page: Path) -> None:
    words = re.findall(r"`([^`\n]+)`", prose(page))
    sections = {key.partition(".")[0] for key in DOTTED if "." in key}
    known = {key.replace(".NAME", "").replace("[i]", "") for key in DOTTED}
    for word in words:
        if re.fullmatch(r"(src|tests|benchmarks|recipes|scripts|configs|docs)/[\w./-]+", word):
            assert (ROOT / word).exists(), f"{page.name}: `{word}`"
        elif re.fullmatch(r"test_\w+\.py", word):
            assert list((ROOT / "tests").rglob(word)), f"{page.name}: `{word}`"
        elif word.endswith(FILES):
            continue
        elif re.fullmatch(r"[a-z_]+(\.[a-z_]+)+", word) and word.partition(".")[0] in sections - {"data"}:
            assert word in known, f"{page.name}: `{word}` is no key of a recipe"
        elif used := re.match(r"finlm ([a-z-]+)(.*)", word):
            options = re.findall(r"--[a-z-]+", used[2])
            assert used[1] in COMMANDS, f"{page.name}: `{word}`"
            assert not [option for option in options if option not in COMMANDS[used[1]]], f"{page.name}: `{word}`"


@pytest.mark.parametrize("name", ["post-training.md", "post-training.zh-CN.md"])
def test_every_finding_of_the_label_lint_is_explained(name: str) -> None:
    found = set(tomllib.loads(text_of(ROOT / "src/finlm/dialogues/lint.toml")))
    assert found == set(re.findall(r"^\| ([a-z]+(?:-[a-z]+)+) \|", text_of(ROOT / "docs" / name), re.MULTILINE))


def _commands() -> dict[str, str]:
    """The help of every command."""
    (chosen,) = (action for action in options.parser()._actions if isinstance(action.choices, dict))
    assert isinstance(chosen.choices, dict)
    return {name: command.format_help() for name, command in chosen.choices.items()}


COMMANDS = _commands()
DOTTED = reference.keys()
FILES = (".model", ".json", ".jsonl", ".yaml", ".py", ".md", ".html", ".txt", ".sh")


@pytest.mark.parametrize("name", ["README.md", "README.zh-CN.md"])
def test_exam_scores_of_the_readme_are_those_of_the_quickstarts_page_and_promised_by_its_recipe(name: str) -> None:
    page = text_of(ROOT / "recipes/quickstart/README.md")
    scores = [re.search(rf"\| {stage}.*?\| ([\d.]+) %", page) for stage in ("pretraining", "SFT", "DPO")]
    for number, stage in zip(scores, ("pretrain", "sft", "dpo"), strict=True):
        assert number and f"{number[1]} %" in text_of(ROOT / name), stage
        expect = recipe.load(ROOT / f"recipes/quickstart/{stage}.yaml").recipe.expect
        assert expect is not None
        for low, high in (value for value in expect.suites.values() if isinstance(value, tuple)):
            assert low <= float(number[1]) / 100 <= high, stage
