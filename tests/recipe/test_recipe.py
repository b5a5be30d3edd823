"""The loader: every mistake at once, each at its line, with what was probably meant."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from finlm.base.errors import UserError
from finlm.recipe import recipe, reference, rules
from finlm.recipe.recipe import Loaded
from finlm.recipe.schema import Recipe

from helpers import ROOT

OTHER_NAMES = Path(rules.__file__).with_name("other_names.yaml")

MINIMAL = """\
name: tiny
hardware: {hosts: [{name: localhost, slots: 2}]}
model: {hidden_size: 64, layers: 2, heads: 2, ffn_size: 128}
tokenizer: {vocab_size: 512}
data: {sources: corpus/*.jsonl}
batch: {sequence_length: 64, tokens_per_step: 1024}
optim:
  lr: 3e-4
  warmup_steps: 10
train: {steps: 100}
"""


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory to write recipes in, which is also the current one."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.yaml").write_text(MINIMAL)
    return tmp_path


def load(text: str, *overrides: str) -> Loaded:
    Path("recipe.yaml").write_text(text)
    return recipe.load("recipe.yaml", overrides)


def mistakes_of(text: str, *overrides: str) -> list[str]:
    with pytest.raises(UserError) as caught:
        load(text, *overrides)
    return [caught.value.problem, *caught.value.evidence.splitlines()]


def test_numbers_are_read_as_their_author_means_them(write: Path) -> None:
    read = load(MINIMAL.replace("tokens_per_step: 1024", "tokens_per_step: 1e6")).recipe
    assert (read.optim.lr, read.batch.tokens_per_step) == (3e-4, 1_000_000)
    assert load(MINIMAL, "train.steps=null", "train.tokens=3.9M").recipe.train.tokens == 3_900_000
    assert load(MINIMAL, "hardware.hosts=[{name: a, slots: 1, memory: 1.5GiB}]").recipe.hardware.hosts[0].memory == (
        1536 * 2**20
    )


def test_an_unknown_key_is_refused_at_its_line_with_the_nearest_one(write: Path) -> None:
    found = mistakes_of(MINIMAL.replace("warmup_steps", "warmup_step"))
    assert found[1] == "recipe.yaml:9: optim.warmup_step: unknown key; did you mean optim.warmup_steps?"


def test_a_key_in_the_wrong_section_is_recognised(write: Path) -> None:
    assert mistakes_of(MINIMAL, "lr=1e-4")[1] == "--set: lr: unknown key; did you mean optim.lr?"
    assert mistakes_of(MINIMAL, "batch.lr=1e-4")[1].endswith("did you mean optim.lr?")


def test_a_key_of_another_program_gets_its_name_here_and_the_fix_says_what_to_write(write: Path) -> None:
    with pytest.raises(UserError) as caught:
        load(MINIMAL.replace("warmup_steps", "warmup_ratio"), "lora.r=8", "bf16=true", "model.layer=1")
    assert "recipe.yaml:9: optim.warmup_ratio: unknown key; here it is optim.warmup_steps (" in caught.value.evidence
    assert "--set: lora.r: unknown key; here it is lora.rank (Rank of the adapters)" in caught.value.evidence
    assert "lora.rank instead of lora.r, " in caught.value.fix and "train.precision instead of bf16" in caught.value.fix
    assert caught.value.fix.endswith("finlm plan recipe.yaml` checks again")


def names_in(cell: str) -> list[str]:
    """The plain names in a cell of a table."""
    return [name.lstrip("-") for name in re.findall(r"`(-{0,2}[a-z_]+)`", cell)]


def test_every_name_of_the_page_for_newcomers_leads_to_its_key() -> None:
    page = (ROOT / "docs/from-llm-code.md").read_text(encoding="utf-8")
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in page.splitlines() if line[:1] == "|"]
    keys_of: dict[str, set[str]] = {}
    for *theirs, ours, _ in [row if len(row) == 3 else [*row, ""] for row in rows]:
        keys = re.findall(r"`([a-z_]+(?:\.[a-z_]+)*)`", ours) or re.findall(r"`([a-z_.]+):", ours)
        for name in {name for cell in theirs for name in names_in(cell)}:
            keys_of.setdefault(name, set()).update(keys)
    known = {name: key for name, key in reference.other_names().items() if keys_of.get(name)}
    assert {name: key for name, key in known.items() if key not in keys_of[name]} == {} and len(known) > 45


def test_names_of_other_programs_lead_to_keys_that_exist() -> None:
    for key in reference.other_names().values():
        section: Any = Recipe
        for part in key.split("."):
            section = reference._section(section.model_fields[part].annotation)
    read = YAML(typ="safe").load(OTHER_NAMES)
    counts = Counter([name for names in read["keys"].values() for name in names] + [*read["needless"]])
    assert counts.most_common(1)[0][1] == 1, "a name leads to one answer"


def test_an_unrecognisable_key_gets_the_list_of_known_ones(write: Path) -> None:
    assert "known here: sequence_length, tokens_per_step, micro_batch" in mistakes_of(MINIMAL, "batch.zzz=1")[1]


def test_a_wrong_type_says_what_is_expected_and_what_it_is_for(write: Path) -> None:
    found = mistakes_of(MINIMAL.replace("layers: 2", "layers: two"))
    assert found[1] == "recipe.yaml:3: model.layers: should be a whole number, got 'two' (Number of decoder layers)"
    assert "should be true or false, got 'no'" in mistakes_of(MINIMAL, "model.tie_embeddings=no")[1]


@pytest.mark.parametrize("value", ["foo", "1.5", "true"])
def test_a_union_names_all_it_accepts(write: Path, value: str) -> None:
    sentence = mistakes_of(MINIMAL, f"batch.micro_batch={value}")[1]
    assert "batch.micro_batch: should be a whole number or 'auto'" in sentence
    assert "(Rows per GPU and micro-step" in sentence


def test_a_misspelt_choice_gets_a_suggestion(write: Path) -> None:
    assert "got 'cosin'; did you mean 'cosine'?" in mistakes_of(MINIMAL, "optim.schedule=cosin")[1]
    assert "got 'atuo'; did you mean 'auto'?" in mistakes_of(MINIMAL, "batch.micro_batch=atuo")[1]


def test_only_allowed_values_are_suggested(write: Path) -> None:
    assert "did you mean" not in mistakes_of(MINIMAL, "batch.micro_batch=four")[1]
    assert "got 'ture'; did you mean 'true'?" in mistakes_of(MINIMAL, "model.tie_embeddings=ture")[1]


def test_an_unknown_section_is_blamed_on_the_set_that_has_it(write: Path) -> None:
    assert mistakes_of(MINIMAL, "foo.bar=1")[1].startswith("--set: foo: unknown key")
    assert mistakes_of(MINIMAL, "optim.foo.bar=1")[1].startswith("--set: optim.foo: unknown key")


def test_a_quoted_number_is_not_a_number(write: Path) -> None:
    found = mistakes_of(MINIMAL.replace("lr: 3e-4", 'lr: "3e-4"'))
    assert found[1] == "recipe.yaml:8: optim.lr: expected a number, got the string '3e-4'; write it without quotes"


def test_a_duplicate_key_is_an_error(write: Path) -> None:
    found = mistakes_of(MINIMAL + "name: other\n")
    assert found[0].startswith("recipe.yaml:11: not valid YAML")
    assert "duplicate key" in found[0]


def test_several_mistakes_come_at_once(write: Path) -> None:
    text = MINIMAL.replace("lr: 3e-4", 'lr: "3e-4"').replace("layers: 2", "layer: 2").replace("steps: 100", "steps: -1")
    found = mistakes_of(text)
    assert found[0] == "4 mistakes in the recipe recipe.yaml"
    assert sorted(line.split(":")[2].strip() for line in found[1:]) == [
        "model.layer",
        "model.layers",
        "optim.lr",
        "train.steps",
    ]


def test_one_bad_item_is_one_mistake(write: Path) -> None:
    found = mistakes_of(MINIMAL, "hardware.hosts=[{name: a, slots: 1, gpus: H200}]")
    assert found[1:] == ["--set: hardware.hosts[0].gpus: unknown key; did you mean hardware.hosts[0].gpu?"]


def test_lists_of_the_wrong_length_are_named(write: Path) -> None:
    assert "a list of at least 1" in mistakes_of(MINIMAL, "data.sources=[]")[1]
    assert "a list of at most 2" in mistakes_of(MINIMAL, "optim.betas=[0.9, 0.95, 0.99]")[1]
    assert "should be a list, got 0.9" in mistakes_of(MINIMAL, "optim.betas=0.9")[1]


def test_a_mistake_inside_env_is_at_its_key(write: Path) -> None:
    found = mistakes_of(MINIMAL + "env:\n  NCCL_DEBUG: [1]\n")
    assert found[1].startswith("recipe.yaml:12: env.NCCL_DEBUG: should be text, got [1]")


def test_sections_left_out_or_flattened_are_named(write: Path) -> None:
    assert "optim: is required" in mistakes_of(MINIMAL.replace("optim:\n  lr: 3e-4\n  warmup_steps: 10\n", ""))[1]
    assert "should be a section of keys, got 3" in mistakes_of(MINIMAL, "train=3")[1]


def test_base_is_inherited_and_overridden_with_origins(write: Path) -> None:
    text = "base: tiny.yaml\nname: child\noptim:\n  lr: 1.0e-3\n"
    loaded = load(text, "train.seed=5")
    assert (loaded.recipe.name, loaded.recipe.optim.lr, loaded.recipe.optim.warmup_steps) == ("child", 1e-3, 10)
    assert loaded.origins["optim.lr"] == "recipe.yaml:4"
    assert loaded.origins["optim.warmup_steps"] == "tiny.yaml:9"
    assert loaded.origins["train.seed"] == "--set"
    assert "optim" not in loaded.origins


def test_the_nearest_length_of_the_run_replaces_the_others(write: Path) -> None:
    child = "base: tiny.yaml\ntrain: {tokens: 1M}\n"
    for loaded in (load(MINIMAL, "train.tokens=1M"), load(child), load(MINIMAL, "train.epochs=2")):
        given = loaded.recipe.train
        assert given.steps is None and (given.tokens == 1_000_000 or given.epochs == 2)
        assert "train.steps" not in loaded.origins
    assert load(child, "train.steps=70").recipe.train.tokens is None
    assert load("base: tiny.yaml\ntrain: {seed: 1}\n").recipe.train.steps == 100
    both = mistakes_of("base: tiny.yaml\ntrain: {tokens: 1M, epochs: 1}\n")[1]
    assert "train: give exactly one of steps, tokens, epochs; found" in both


def test_a_list_replaces_the_bases_list_with_its_origins(write: Path) -> None:
    two = MINIMAL.replace("sources: corpus/*.jsonl", "sources: [{path: a.jsonl}, {path: b.jsonl}]")
    (write / "two.yaml").write_text(two)
    loaded = load("base: two.yaml\ndata:\n  sources: [{path: c.jsonl}]\n")
    assert [source.path for source in loaded.recipe.data.sources] == ["c.jsonl"]
    assert [key for key in loaded.origins if key.startswith("data.")] == ["data.sources[0].path"]
    assert loaded.origins["data.sources[0].path"] == "recipe.yaml:3"


def test_a_mistake_in_the_base_is_shown_in_the_base(write: Path) -> None:
    (write / "tiny.yaml").write_text(MINIMAL.replace("lr: 3e-4", "lr: fast"))
    assert mistakes_of("base: tiny.yaml\nname: child\n")[1].startswith("tiny.yaml:8: optim.lr: should be a number")


def test_merged_keys_have_the_line_of_their_section(write: Path) -> None:
    text = MINIMAL + "checkpoint: &common\n  every_steps: 5\neval: {<<: *common}\n"
    loaded = load(text)
    assert loaded.recipe.eval.every_steps == 5 and loaded.origins["eval.every_steps"] == "recipe.yaml:13"


def test_a_base_of_a_base_is_refused(write: Path) -> None:
    (write / "middle.yaml").write_text("base: tiny.yaml\nname: middle\n")
    found = mistakes_of("base: middle.yaml\nname: child\n")
    assert found[0] == "recipe.yaml:1: base: middle.yaml itself has a base"
    assert found[1] == "middle.yaml:1"


def test_a_missing_base_names_the_line_that_asks_for_it(write: Path) -> None:
    assert mistakes_of("base: gone.yaml\n")[0].startswith("recipe.yaml:1: base: cannot read gone.yaml")


def test_set_reads_yaml_and_reaches_into_lists(write: Path) -> None:
    loaded = load(MINIMAL, "optim.betas=[0.8, 0.9]", "data.sources=*.jsonl.gz", "model.vocab_size=600")
    assert loaded.recipe.optim.betas == (0.8, 0.9)
    assert loaded.recipe.data.sources[0].path == "*.jsonl.gz"
    assert loaded.origins["data.sources"] == "--set"
    nested = load(MINIMAL.replace("sources: corpus/*.jsonl", "sources: [{path: a}]"), "data.sources[0].path=b")
    assert nested.recipe.data.sources[0].path == "b"


@pytest.mark.parametrize(
    "text",
    [
        *("optim.lr", "=3", "data.sources[3].path=a", "train.steps.x=1"),
        *("data.sources[²].path=1", "name=\x01", "name=&a [*a]"),
    ],
)
def test_an_impossible_set_is_a_user_mistake(write: Path, text: str) -> None:
    assert mistakes_of(MINIMAL.replace("sources: corpus/*.jsonl", "sources: [{path: a}]"), text)[0].startswith("--set ")


@pytest.mark.parametrize(
    ("text", "evidence", "fix"),
    [
        ("data.sources[0].path=x.jsonl", "the path 'corpus/*.jsonl'", "--set 'data.sources=x.jsonl'"),
        ("data.sources[0]=x.jsonl", "the path 'corpus/*.jsonl'", "--set 'data.sources=x.jsonl'"),
        ("train.steps.x=1", "train.steps is 100", "--set train.steps=VALUE"),
        ("hardware.hosts[1].slots=1", "hardware.hosts is a list of 1", "the first is hardware.hosts[0]"),
        (
            "data.sources[0].text_field=body",
            "the path 'corpus/*.jsonl'",
            "--set 'data.sources={path: corpus/*.jsonl, text_field: body}'",
        ),
    ],
)
def test_a_set_past_the_end_says_what_is_there(write: Path, text: str, evidence: str, fix: str) -> None:
    with pytest.raises(UserError, match="is not a place in the recipe") as caught:
        load(MINIMAL, text)
    assert evidence in caught.value.evidence and fix in caught.value.fix


def test_files_that_are_no_recipes_are_user_mistakes(write: Path) -> None:
    assert "not valid YAML" in mistakes_of("name: [")[0]
    assert mistakes_of(MINIMAL + "description: a\x00\n")[0] == "recipe.yaml:11: not valid YAML: a control character"
    for text in ("name: 2026-13-45\n", "name: !!int abc\n", "name: " + 3000 * "["):
        assert "not valid YAML" in mistakes_of(text)[0]
    assert "a recipe is a mapping" in mistakes_of("- 1\n")[0]
    with pytest.raises(UserError, match=r"cannot read the recipe gone\.yaml"):
        recipe.load("gone.yaml")


def test_a_dumped_recipe_loads_as_the_same_recipe(write: Path) -> None:
    first: Recipe = load(MINIMAL).recipe
    Path("dumped.yaml").write_text(recipe.dump(first))
    assert recipe.load("dumped.yaml").recipe == first


def test_the_home_directory_is_expanded_once_in_what_names_a_directory(
    write: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = write / "home"
    monkeypatch.setenv("HOME", str(home))
    named = ["model.init_from=~/model", "data.cache_dir=~/cache", "data.prepared=~/shards", "zero.nvme_path=~/nvme"]
    read = load(MINIMAL, *named).recipe
    found = (read.model.init_from, read.data.cache_dir, read.data.prepared, read.zero.nvme_path)
    assert found == tuple(str(home / name) for name in ("model", "cache", "shards", "nvme"))
    assert "~" not in recipe.dump(read), "the ranks read recipe.yaml"
    assert load(MINIMAL, "model.init_from=owner/name").recipe.model.init_from == "owner/name"
    (home / "shape").mkdir(parents=True)
    (home / "shape/pretrain.yaml").write_text(MINIMAL)
    after = MINIMAL.replace("name: tiny", "name: tiny-sft\nstage: sft\nchat: {template: xuanyuan}")
    assert load(after, "model.init_from=~/shape/pretrain.yaml").recipe.model.init_from == f"{home}/shape/pretrain.yaml"


def test_a_run_that_is_asked_to_be_shorter_than_its_warmup_gets_a_shorter_one_and_says_so(write: Path) -> None:
    for asked in ("train.steps=8", "train.tokens=8k"):
        loaded = load(MINIMAL, asked)
        assert loaded.recipe.optim.warmup_steps == 2 and loaded.said[0].startswith(
            "optim.warmup_steps: 2 instead of 10"
        )
        assert loaded.origins["optim.warmup_steps"] == "a tenth of the run, instead of 10"
    assert load(MINIMAL, "train.steps=60").said == () and load(MINIMAL).recipe.optim.warmup_steps == 10
    unwritten = load(MINIMAL.replace("  warmup_steps: 10\n", ""), "train.steps=20")
    assert unwritten.recipe.optim.warmup_steps == 2 and len(unwritten.said) == 1
    for overrides in (("train.steps=8", "optim.warmup_steps=9"), ("train.steps=2",)):
        assert "optim.warmup_steps" in mistakes_of(MINIMAL, *overrides)[1]
    assert "10 is not less than the 8 steps" in mistakes_of(MINIMAL.replace("100", "8"))[1], (
        "what a recipe says is its own"
    )


def test_a_warmup_fits_a_length_in_tokens_or_epochs_too(write: Path, capsys: pytest.CaptureFixture[str]) -> None:
    of_tokens = MINIMAL.replace("steps: 100", "tokens: 100k")
    loaded = load(of_tokens, "batch.tokens_per_step=12288")
    assert loaded.recipe.optim.warmup_steps == 2 and len(loaded.said) == 1
    loaded = load(MINIMAL, "train.epochs=0.5")
    assert loaded.said == () and loaded.recipe.optim.warmup_steps == 10, "the steps of an epoch are not known yet"
    a_step = loaded.recipe.batch.tokens_per_step
    shorter = recipe.fit_warmup(loaded, 16 * a_step)
    assert shorter.recipe.optim.warmup_steps == 2
    assert shorter.origins["optim.warmup_steps"] == "a tenth of the run, instead of 10"
    assert recipe.fit_warmup(shorter, 16 * a_step) == shorter
    said = "optim.warmup_steps: 2 instead of 10, since the run has 8 steps"
    assert capsys.readouterr().err.splitlines() == [said], "once"
    assert recipe.fit_warmup(loaded, 400 * a_step) == loaded
    for other in (
        load(MINIMAL.replace("steps: 100", "epochs: 1")),
        load(MINIMAL, "train.epochs=1", "optim.warmup_steps=9"),
    ):
        assert recipe.fit_warmup(other, 4 * a_step) == other, "what a recipe or --set says is its own"
