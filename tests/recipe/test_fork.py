"""`finlm new` and `finlm diff`: a fork is what its parent is until it is edited, and says what it was made from."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from finlm import cli, config
from finlm.base.errors import UserError
from finlm.recipe import fork, recipe

from helpers import ROOT

PRETRAIN, SFT = Path("recipes/quickstart/pretrain.yaml"), Path("recipes/quickstart/sft.yaml")


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory with configs/ds/ and a link to the recipes that come with finlm."""
    (tmp_path / "configs/ds").mkdir(parents=True)
    (tmp_path / "recipes").mkdir()
    for family in (ROOT / "recipes").iterdir():
        (tmp_path / "recipes" / family.name).mkdir()
        for file in family.iterdir():
            (tmp_path / "recipes" / family.name / file.name).write_bytes(file.read_bytes())
    monkeypatch.chdir(tmp_path)
    return tmp_path


def content(path: Path) -> dict[str, object]:
    return recipe.load(path).recipe.model_dump(exclude={"name", "forked_from", "expect"})


@pytest.mark.parametrize("copy", [False, True])
@pytest.mark.parametrize("parent", [PRETRAIN, SFT, Path("recipes/xuanyuan-70b/pretrain.yaml")])
def test_a_fork_is_its_parent_under_another_name(checkout: Path, parent: Path, copy: bool) -> None:
    path = fork.new("mine", parent, copy=copy)
    made = recipe.load(path).recipe
    assert content(path) == content(parent)
    assert made.name == ("mine-sft" if parent == SFT else "mine")
    assert made.forked_from is not None and made.forked_from.startswith(f"{parent}@")
    assert made.expect is None, "the parent's numbers are no promise of the fork"
    assert fork.parent_of(path) == parent
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
    rest = re.sub(r"^(name|expect):.*\n(([ ].*)?\n)*", "", text, flags=re.MULTILINE)
    parent = checkout / "recipes/quickstart/other.yaml"
    parent.write_text(head + rest, encoding="utf-8")
    path = fork.new("mine", parent, copy=True)
    made = path.read_text(encoding="utf-8")
    assert recipe.load(path).recipe.name == "mine-other" and content(path) == content(parent)
    assert fork.parent_of(path) == Path("recipes/quickstart/other.yaml")
    assert (recipe.load(path).recipe.forked_from or "").count(" ") == 0
    assert made.endswith(rest) and ("# a comment" in made) == ("# a comment" in head)


def test_a_copy_of_a_copy_finds_its_base_under_a_quoted_key(checkout: Path) -> None:
    parent = checkout / "recipes/quickstart/other.yaml"
    parent.write_text("\"base\": 'pretrain.yaml'  # it\nname: other\n", encoding="utf-8")
    path = fork.new("mine", parent)
    assert "base: ../quickstart/pretrain.yaml  # it\n" in path.read_text(encoding="utf-8")


def test_a_recipe_without_lines_of_its_keys_is_no_traceback(checkout: Path) -> None:
    parent = checkout / "recipes/quickstart/other.yaml"
    parent.write_text("{base: pretrain.yaml, name: other}\n", encoding="utf-8")
    with pytest.raises(UserError, match="cannot be copied as it is written"):
        fork.new("mine", parent, copy=True)
    assert not (checkout / "recipes/mine").exists()


def test_a_forks_page_and_settings_are_what_the_shipped_ones_must_be(
    checkout: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["new", "six", "--from", "recipes/xuanyuan-6b/pretrain.yaml"]) == 0
    out, err = capsys.readouterr()
    assert out == "recipes/six/pretrain.yaml\n" and "finlm diff recipes/six/pretrain.yaml" in err
    page = (checkout / "recipes/six/README.md").read_text(encoding="utf-8")
    assert "69.8 GiB of 80.0 GiB a GPU" in page and "101,725 steps" in page and "Chosen by us" in page
    assert cli.main(["new", "six", "--from", "recipes/xuanyuan-6b/sft.yaml"]) == 0
    page = (checkout / "recipes/six/README.md").read_text(encoding="utf-8")
    assert page.startswith("# six\n") and "\n## six-sft\n" in page
    written = {path.name for path in (checkout / "configs/ds").glob("six-*")}
    assert written == {"six-pretrain.json", "six-sft.json"}
    stale = [line for line in config.differences(Path()) if "six" in line]
    assert stale == []


def test_a_fork_of_a_fork_holds_the_parents_lines(checkout: Path) -> None:
    first = fork.new("first", PRETRAIN)
    first.write_text(first.read_text(encoding="utf-8") + "optim: {lr: 2.0e-3}\n", encoding="utf-8")
    second = fork.new("second", first)
    assert recipe.load(second).recipe.optim.lr == 2.0e-3
    assert fork.parent_of(second) == first
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
        fork.new(name, parent)
    assert sorted(checkout.rglob("*")) == before


def test_diff_tells_what_is_trained_from_how_and_what_follows(
    checkout: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = fork.new("wider", Path("recipes/xuanyuan-6b/pretrain.yaml"))
    assert cli.main(["diff", str(path)]) == 0
    assert "both say the same" in capsys.readouterr().err
    lines = "train: {tokens: 20B, recompute: full}\nbatch: {micro_batch: auto}\n"
    path.write_text(path.read_text(encoding="utf-8") + lines, encoding="utf-8")
    assert cli.main(["diff", str(path), "--json"]) == 0
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
    path = fork.new("huge", Path("recipes/xuanyuan-6b/pretrain.yaml"))
    path.write_text(path.read_text(encoding="utf-8") + "model: {layers: 300}\n", encoding="utf-8")
    assert cli.main(["diff", str(path)]) == 0
    err = capsys.readouterr().err
    assert "model.layers" in err and "no plan to compare" in err


def test_diff_of_one_recipe_needs_a_parent(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["diff", str(PRETRAIN)]) == 2
    assert "does not say what it was made from" in capsys.readouterr().err
