"""`finlm new` and `finlm diff`: a fork is what its parent is until it is edited, and says what it was made from."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from finlm import config
from finlm.base.errors import UserError
from finlm.cli import main
from finlm.recipe import derive, recipe

from helpers import ROOT

PRETRAIN, SFT = Path("recipes/quickstart/pretrain.yaml"), Path("recipes/quickstart/sft.yaml")


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory with configs/ds/ and a link to the recipes that come with finlm."""
    (tmp_path / "configs/ds").mkdir(parents=True)
    (tmp_path / "recipes").mkdir()
    for family in (ROOT / "recipes").glob("*/"):
        (tmp_path / "recipes" / family.name).mkdir()
        for file in family.iterdir():
            (tmp_path / "recipes" / family.name / file.name).write_bytes(file.read_bytes())
    monkeypatch.chdir(tmp_path)
    return tmp_path


def content(path: Path) -> dict[str, object]:
    return recipe.load(path).recipe.model_dump(exclude={"name", "description", "forked_from", "expect"})


@pytest.mark.parametrize("copy", [False, True])
@pytest.mark.parametrize("parent", [PRETRAIN, SFT, Path("recipes/xuanyuan-70b/pretrain.yaml")])
def test_a_fork_is_its_parent_under_another_name(checkout: Path, parent: Path, copy: bool) -> None:
    path = derive.fork("mine", parent, copy=copy)
    made = recipe.load(path).recipe
    assert content(path) == content(parent)
    assert made.name == ("mine-sft" if parent == SFT else "mine")
    assert made.forked_from is not None and made.forked_from.startswith(f"{parent}@")
    assert made.expect is None, "the parent's numbers are no promise of the fork"
    assert derive.parent_of(path) == parent
    assert "chosen by us" in path.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "head",
    [
        "name: >-\n  folded\n",
        "name: >-\n  folded\n\n\n",
        '"name": quoted\n\'forked_from\': a@b\n"expect":\n  loss: {20: 2.0}\n\n  tolerance: 0.1\n',
        "name : spaced  # a comment\nforked_from: >-\n  a@b\n",
    ],
)
def test_a_copy_replaces_keys_however_they_are_written(checkout: Path, head: str) -> None:
    text = PRETRAIN.read_text(encoding="utf-8")
    rest = re.sub(r"^(name|description|expect):.*\n(([ ].*)?\n)*", "", text, flags=re.MULTILINE)
    parent = checkout / "recipes/quickstart/other.yaml"
    parent.write_text(head + rest, encoding="utf-8")
    path = derive.fork("mine", parent, copy=True)
    made = path.read_text(encoding="utf-8")
    assert recipe.load(path).recipe.name == "mine-other" and content(path) == content(parent)
    assert derive.parent_of(path) == Path("recipes/quickstart/other.yaml")
    assert (recipe.load(path).recipe.forked_from or "").count(" ") == 0
    assert made.endswith(rest) and ("# a comment" in made) == ("# a comment" in head)


def test_a_copy_of_a_copy_finds_its_base_under_a_quoted_key(checkout: Path) -> None:
    parent = checkout / "recipes/quickstart/other.yaml"
    parent.write_text("\"base\": 'pretrain.yaml'  # it\nname: other\n", encoding="utf-8")
    path = derive.fork("mine", parent)
    assert "base: ../quickstart/pretrain.yaml  # it\n" in path.read_text(encoding="utf-8")


def test_a_recipe_without_lines_of_its_keys_is_no_traceback(checkout: Path) -> None:
    parent = checkout / "recipes/quickstart/other.yaml"
    parent.write_text("{base: pretrain.yaml, name: other}\n", encoding="utf-8")
    with pytest.raises(UserError, match="cannot be copied as it is written"):
        derive.fork("mine", parent, copy=True)
    assert not (checkout / "recipes/mine").exists()


def test_a_forks_page_and_settings_are_what_the_shipped_ones_must_be(
    checkout: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.main(["new", "six", "--from", "recipes/xuanyuan-6b/pretrain.yaml"]) == 0
    out, err = capsys.readouterr()
    assert out == "recipes/six/pretrain.yaml\n" and "finlm diff recipes/six/pretrain.yaml" in err
    page = (checkout / "recipes/six/README.md").read_text(encoding="utf-8")
    assert "69.9 GiB of 79.5 GiB a GPU" in page and "101,725 steps" in page and "Chosen by us" in page
    assert main.main(["new", "six", "--from", "recipes/xuanyuan-6b/sft.yaml"]) == 0
    page = (checkout / "recipes/six/README.md").read_text(encoding="utf-8")
    assert page.startswith("# six\n") and "\n## six-sft\n" in page
    written = {path.name for path in (checkout / "configs/ds").glob("six-*")}
    assert written == {"six-pretrain.json", "six-sft.json"}
    stale = [line for line in config.differences(Path(), config.settings_of_all_recipes(Path())) if "six" in line]
    assert stale == []


@pytest.mark.parametrize("copy", [False, True])
def test_a_fork_saves_values_inside_lists_and_keeps_formats_and_comments(checkout: Path, copy: bool) -> None:
    settings = ("data.sources[0].synthetic.seed=9", "optim.lr=5.0e-4", "env.A=x")
    path = derive.fork("mine", PRETRAIN, copy=copy, overrides=settings)
    made, text = recipe.load(path).recipe, path.read_text(encoding="utf-8")
    written = recipe.load(PRETRAIN, settings).recipe
    assert made.data.sources == written.data.sources and made.data.sources[0].synthetic is not None
    assert made.data.sources[0].synthetic.seed == 9 and made.env == {"A": "x"}
    assert "lr: 5.0e-4" in text and "chosen by us" in text and "[0]" not in text
    with pytest.raises(UserError, match="is not a place in the recipe"):
        derive.fork("other", PRETRAIN, copy=copy, overrides=("data.sources[7].synthetic.seed=9",))
    assert not (checkout / "recipes/other").exists()


def test_a_fork_of_a_fork_holds_the_parents_lines(checkout: Path) -> None:
    first = derive.fork("first", PRETRAIN)
    first.write_text(first.read_text(encoding="utf-8") + "optim: {lr: 2.0e-3}\n", encoding="utf-8")
    second = derive.fork("second", first)
    assert recipe.load(second).recipe.optim.lr == 2.0e-3
    assert derive.parent_of(second) == first
    assert second.read_text(encoding="utf-8").count("forked_from") == 1


@pytest.mark.parametrize(
    ("name", "parent", "says"),
    [
        ("Mine", PRETRAIN, "is no name of a recipe"),
        ("quickstart", PRETRAIN, "exists already"),
        ("mine", Path("recipes/none/pretrain.yaml"), "cannot read the recipe"),
    ],
)
def test_what_cannot_be_forked_leaves_nothing(checkout: Path, name: str, parent: Path, says: str) -> None:
    before = sorted(checkout.rglob("*"))
    with pytest.raises(UserError, match=says):
        derive.fork(name, parent)
    assert sorted(checkout.rglob("*")) == before


def test_diff_tells_what_is_trained_from_how_and_what_follows(
    checkout: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = derive.fork("wider", Path("recipes/xuanyuan-6b/pretrain.yaml"))
    assert main.main(["diff", str(path)]) == 0
    assert "both say the same" in capsys.readouterr().out
    lines = "train: {tokens: 20B, recompute: full}\nbatch: {micro_batch: auto}\n"
    path.write_text(path.read_text(encoding="utf-8") + lines, encoding="utf-8")
    assert main.main(["diff", str(path), "--json"]) == 0
    out, err = capsys.readouterr()
    found = json.loads(out)
    values = {row["key"]: (row["a"], row["b"], row["changes_loss"]) for row in found["values"]}
    assert values == {
        "batch.micro_batch": (6, "auto", True),
        "train.tokens": (10_000_000_000, 20_000_000_000, True),
        "train.recompute": ("auto", "full", False),
    }
    plan = {row["name"]: row for row in found["plan"]}
    assert plan["tokens"]["change"] == pytest.approx(1.0, rel=1e-3)
    assert plan["memory of a rank"]["change"] < 0 and plan["time"]["change"] > 1
    assert plan["recompute"]["b_text"] == "full" and plan["recompute"]["change"] is None
    assert err.index("what is trained") < err.index("how it is carried out") < err.index("what follows")


def test_diff_of_a_recipe_that_fits_nowhere_still_shows_the_values(
    checkout: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = derive.fork("huge", Path("recipes/xuanyuan-6b/pretrain.yaml"))
    path.write_text(path.read_text(encoding="utf-8") + "model: {layers: 300}\n", encoding="utf-8")
    assert main.main(["diff", str(path)]) == 0
    out = capsys.readouterr().out
    assert "model.layers" in out and "no plan to compare" in out


def test_diff_of_one_recipe_needs_a_parent(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["diff", str(PRETRAIN)]) == 2
    assert "does not say what it was made from" in capsys.readouterr().err


def test_a_forks_description_is_its_own(checkout: Path) -> None:
    for copy in (False, True):
        path = derive.fork(f"own-{copy}".casefold(), PRETRAIN, copy=copy)
        description = recipe.load(path).recipe.description
        assert (
            description.startswith("A fork of recipes/quickstart/pretrain.yaml") and "3 M parameter" not in description
        )
        assert path.read_text(encoding="utf-8").count("description:") == 1
