"""Checks over several keys: each inconsistency is reported at the key that should change."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from finlm.base.errors import UserError
from finlm.recipe import recipe

QUICKSTART = Path(__file__).resolve().parents[2] / "recipes/quickstart/pretrain.yaml"
NVME = "zero.nvme_path=nvme"


@pytest.mark.parametrize(
    ("overrides", "key", "word"),
    [
        (["model.heads=5"], "model.heads", "do not divide"),
        (["model.heads=64"], "model.heads", "is odd"),
        (["model.kv_heads=4"], "model.kv_heads", "does not divide"),
        (["tokenizer.path=tokenizer.model"], "tokenizer", "either path"),
        (["tokenizer.extend_to=5000"], "tokenizer.extend_to", "needs path"),
        (["tokenizer.sample_weights={fin_news: 0}"], "tokenizer.sample_weights", "no source a weight above 0"),
        (
            ["tokenizer={path: a.model, sample_weights: {fin_news: 1}}", "model.vocab_size=9"],
            "tokenizer.sample_weights",
            "has no effect",
        ),
        (["tokenizer={path: a.model, extend_to: 50}", "model.vocab_size=49"], "model.vocab_size", "fewer than the"),
        (["model.vocab_size=4000"], "model.vocab_size", "fewer than the tokenizer's 4096"),
        (["tokenizer.vocab_size=260"], "tokenizer.vocab_size", "must be above 260"),
        (["optim.lr=1"], "optim.lr", "moves every weight"),
        (["data.sources=[{text_field: x}]"], "data.sources[0]", "either path or dataset or synthetic"),
        (["data.sources=[{path: '*.jsonl', sha256: ab}]"], "data.sources[0].sha256", "is a glob"),
        (["data.sources=[{path: '*.jsonl', revision: ab}]"], "data.sources[0]", "belong to a dataset"),
        (["data.mixture=[{share: 1.0}]"], "data.mixture[0]", "either weights or tokens"),
        (
            ["data.mixture=[{weights: {a: 1}, share: 0.7}, {weights: {a: 1}, share: 0.7}]"],
            "data.mixture",
            "more than 1",
        ),
        (["data.mixture={tokens: {a: 1M}, share: 0.5}"], "data.mixture[0]", "leave out to and share"),
        (["data.mixture={tokens: {a: 100B}}"], "data.mixture", "100,000,000,000, more than the run's"),
        (["data.mixture={weights: {a: 0}}"], "data.mixture[0]", "no source a weight above 0"),
        (["data.token_dtype=uint16", "tokenizer.vocab_size=70000"], "data.token_dtype", "65,535"),
        (["train.tokens=1M", "train.epochs=1"], "train", "exactly one"),
        (["train.steps=null"], "train", "found none"),
        (["batch.tokens_per_step=100"], "batch.tokens_per_step", "less than one row"),
        (["optim.warmup_steps=250"], "optim.warmup_steps", "not less than the 250 steps"),
        (["optim.min_lr=1"], "optim.min_lr", "above lr"),
        (["optim.warmup_steps=1"], "optim.warmup_steps", "at least 2 steps"),
        (["optim.schedule=constant"], "optim.min_lr", "has no effect"),
        (["checkpoint={every_steps: 300, keep_every_steps: 1000}"], "checkpoint.keep_every_steps", "no multiple of"),
        (["checkpoint={copies: 1, keep_last: 1}"], "checkpoint.keep_last", "copies: 1 needs 2 or more"),
        (["optim.lr=.inf"], "optim.lr", "a finite number"),
        (["zero.offload_param=cpu"], "zero.offload_param", "needs stage 3"),
        (["zero.stage=0", "zero.offload_optimizer=cpu"], "zero.offload_optimizer", "needs stage 1"),
        (["zero.stage=2", "zero.offload_optimizer=nvme", NVME], "zero.offload_optimizer", "nvme needs stage 3"),
        (["zero.stage=3", "zero.offload_optimizer=nvme"], "zero.nvme_path", "is required"),
        (["zero.hpz_partition_size=2"], "zero.hpz_partition_size", "needs stage 3"),
        (["zero.stage=2", "zero.quantized_weights=true"], "zero.quantized_weights", "needs stage 3"),
        (["zero.stage=0", "zero.quantized_gradients=true"], "zero.quantized_gradients", "needs stage 3"),
    ],
)
def test_an_inconsistency_is_one_mistake_at_its_key(overrides: list[str], key: str, word: str) -> None:
    with pytest.raises(UserError) as caught:
        recipe.load(QUICKSTART, overrides)
    (line,) = caught.value.evidence.splitlines()
    assert f": {key}: " in line
    assert word in line


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("data.clean.max_digits=0.5", "data.clean.max_digits"),
        ("data.min_characters=100", "data.min_characters"),
        ("data.packing=best_fit", "data.packing"),
        ("data.dedup=near", "data.dedup"),
        ("data.token_dtype=uint32", "data.token_dtype"),
        ("data.sources[0].meta={site: site}", "data.sources[0].meta"),
    ],
)
def test_what_only_documents_know_is_refused_for_dialogues(override: str, key: str) -> None:
    path = QUICKSTART.with_name("sft.yaml")
    with pytest.raises(UserError, match=f": {re.escape(key)}: .*works on documents only"):
        recipe.load(path, [override])
    recipe.load(path, ["data.clean=none", "data.dedup=none"])


@pytest.mark.parametrize("stage", ["dpo", "reward", "grpo"])
def test_masks_between_documents_are_refused_where_a_row_is_one_sequence(stage: str) -> None:
    with pytest.raises(UserError) as caught:
        recipe.load(QUICKSTART.parent / f"{stage}.yaml", ("data.document_masks=true",))
    assert "data.document_masks" in caught.value.evidence and f"stage {stage}" in caught.value.evidence


@pytest.mark.parametrize("target", ["v_porj", "embed_tokens", "lm_head"])
def test_adapters_go_on_the_decoders_linear_layers_only(target: str) -> None:
    with pytest.raises(UserError) as caught:
        recipe.load(QUICKSTART.parent / "sft.yaml", (f"lora={{targets: [q_proj, {target}]}}",))
    assert "lora.targets" in caught.value.evidence and target in caught.value.evidence


def test_what_the_planner_decides_is_not_judged_at_load() -> None:
    loaded = recipe.load(QUICKSTART, ["zero.stage=auto", "zero.offload_param=cpu", "zero.quantized_weights=true"])
    assert loaded.recipe.zero.stage == "auto"


def test_a_weight_of_ones_own_source_stays_when_the_embedded_corpus_goes(tmp_path: Path) -> None:
    (tmp_path / "mixed.yaml").write_text(
        f"base: {QUICKSTART}\nname: mixed\ndata: {{mixture: {{weights: {{fin_news: 2, announcement: 1}}}}}}\n"
    )
    sources = f"data.sources=[{{path: {tmp_path}/a.jsonl, name: mine}}]"
    loaded = recipe.load(tmp_path / "mixed.yaml", [sources, "data.mixture.weights.mine=2"])
    assert [stage.weights for stage in loaded.recipe.data.mixture] == [{"mine": 2.0}]
    assert any("only what --set gives is kept" in said for said in loaded.said)
    assert not recipe.load(tmp_path / "mixed.yaml", [sources]).recipe.data.mixture
