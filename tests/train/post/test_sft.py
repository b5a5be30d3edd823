"""Fine-tuning: packed rows are worth what their dialogues are worth alone, and a run is the same however it is cut."""

from __future__ import annotations

import shutil
import statistics
from pathlib import Path

import numpy as np
import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer

from finlm.base import files
from finlm.base.rundir import RunDir
from finlm.dialogues import lint
from finlm.inference.open import load_trained
from finlm.plan.plan import Plan
from finlm.recipe import recipe
from finlm.record import expectations, history
from finlm.record.history import charts
from finlm.rows import dialogues, packing
from finlm.rows.shards import IGNORED
from finlm.runs import proofs
from finlm.train import batches
from finlm.train.model import kernels
from finlm.train.post import start

from dialogues import prepared, run, sample, sft, write
from ranks import Ranks

FAST = "optim.lr=1e-2"


@pytest.fixture(scope="module")
def model(finished: tuple[RunDir, str]) -> Path:
    return Path(finished[0].export)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("rows") / "rows.jsonl", sample(120))


@pytest.fixture(scope="module")
def whole(model: Path, source: Path, ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """Eight steps on two ranks at ZeRO-1, a checkpoint after four."""
    path = tmp_path_factory.mktemp("whole")
    made = run(path, sft(path, model, source, "checkpoint.every_steps=4", "eval.every_steps=4", FAST))
    ranks.train(made)
    return made


def losses(made: RunDir) -> list[float]:
    return [row["loss"] for row in made.read_events("step")]


def test_bounds_come_in_few_sizes_since_a_size_is_compiled_for() -> None:
    sizes = {len(batches.document_bounds(np.arange(n, dtype=np.int32)[None])) for n in range(1, 1024)}
    assert sizes == {64, 128, 256, 512, 1024}
    assert batches.document_bounds(np.array([[0, 0, 1], [0, 0, 0]], dtype=np.int32))[:4].tolist() == [0, 2, 3, 6]


def test_a_packed_row_gives_every_dialogue_the_loss_it_has_alone(model: Path, source: Path, tmp_path: Path) -> None:
    wanted = sft(tmp_path, model, source)
    rows = dialogues.train_rows(prepared(wanted), wanted)
    ids = np.arange(4)
    inputs, labels, numbers = *rows.read(ids), rows.documents(ids)
    assert rows.supervised(ids) == np.count_nonzero(labels != IGNORED)
    ours = AutoModelForCausalLM.from_pretrained(model, attn_implementation="sdpa")
    plain = AutoModelForCausalLM.from_pretrained(model, attn_implementation="eager")
    kernels.swap_loss(ours, plain.config.vocab_size)
    bounds = torch.from_numpy(batches.document_bounds(numbers))
    checked = 0
    for row, number in [(place, n) for place in range(4) for n in range(numbers[place].max() + 1)]:
        here = numbers[row] == number
        only = np.full_like(labels, IGNORED)
        only[row, here] = labels[row, here]
        tokens = torch.from_numpy(np.append(inputs[row, here], labels[row, here][-1].clip(min=0)))[None]
        alone_labels = torch.from_numpy(np.append(IGNORED, labels[row, here]))[None]
        with torch.no_grad():
            packed = ours(torch.from_numpy(inputs), torch.from_numpy(only), bounds)
            leaking = ours(torch.from_numpy(inputs), torch.from_numpy(only))
            logits = plain(tokens).logits[:, :-1]
        alone = torch.nn.functional.cross_entropy(logits[0], alone_labels[0, 1:], reduction="sum")
        assert packed.item() == pytest.approx(alone.item(), rel=1e-5)
        if number:
            checked += 1
            assert abs(leaking.item() - alone.item()) > 1e-3, "without the mask a dialogue sees the one before it"
    assert checked >= 4


def test_a_run_learns_evaluates_and_counts_what_is_supervised(whole: RunDir) -> None:
    steps, evals = list(whole.read_events("step")), list(whole.read_events("eval"))
    assert [row["step"] for row in steps] == list(range(1, 9)) and losses(whole)[-1] < 0.8 * losses(whole)[0]
    assert [row["step"] for row in evals] == [0, 4, 8] and evals[-1]["loss"] < evals[0]["loss"]
    assert all(0 < row["tokens"] < 1024 for row in steps)
    for row in steps:
        (source,) = row["sources"].values()
        assert source["tokens"] == row["tokens"] and source["loss"] == pytest.approx(row["loss"], rel=1e-5)
    assert [row["step"] for row in whole.read_events("checkpoint")] == [4, 8]
    assert list(whole.read_events("end"))[-1]["status"] == "finished"


def test_tokens_a_second_count_no_padding(model: Path, source: Path, ranks: Ranks, tmp_path: Path) -> None:
    wanted = sft(tmp_path, model, source, "sft.packing=false", "train.steps=3")
    made = run(tmp_path, wanted)
    steps, rows = ranks.train(made), dialogues.train_rows(prepared(wanted), wanted)
    order = packing.order(rows.source_ranges(), (), 24, 128, wanted.train.seed)
    for number, row in enumerate(steps):
        ids = order[np.arange(8 * number, 8 * number + 8)]
        assert row["tokens_read"] == np.count_nonzero(rows.documents(ids) >= 0) < 0.6 * 1024, "rows are half empty"
        assert row["tokens_per_second"] == pytest.approx(row["tokens_read"] / row["seconds"], rel=0.01)
    found = expectations.compare_with_plan({"tokens_per_second": 1024.0, "tokens_per_step": 1024}, steps)
    assert found is not None  # a plan of a second a full step
    read = statistics.median(row["tokens_read"] for row in steps[expectations.WARMUP :])
    assert found.planned_tokens_per_second == pytest.approx(read)


def test_one_rank_and_another_micro_batch_give_the_same_loss_and_gradient(
    whole: RunDir, model: Path, source: Path, ranks: Ranks, tmp_path: Path
) -> None:
    rows = ranks.train(run(tmp_path, sft(tmp_path, model, source, "batch.micro_batch=4", FAST), ranks=1))
    first = list(whole.read_events("step"))
    for key in ("tokens", "rows_crc"):
        assert [row[key] for row in rows] == [row[key] for row in first]
    assert [row["loss"] for row in rows] == pytest.approx([row["loss"] for row in first], abs=1e-4)
    assert [row["grad_norm"] for row in rows] == pytest.approx([row["grad_norm"] for row in first], rel=1e-3)


def test_a_streamed_optimizer_gives_the_same_bits_under_trl(
    whole: RunDir, model: Path, source: Path, ranks: Ranks, tmp_path: Path
) -> None:
    made = run(tmp_path, sft(tmp_path, model, source, "zero.stage=1", "zero.offload_optimizer=stream", FAST))
    assert [row["loss"] for row in ranks.train(made)] == losses(whole)
    assert '"offload_optimizer": "stream"' in made.plan.read_text()


def test_compiled_it_adds_up_gradients_within_products(
    whole: RunDir, model: Path, source: Path, ranks: Ranks, tmp_path: Path
) -> None:
    more = ("zero.stage=1", "train.compile=true", "batch.micro_batch=1", FAST)
    made = run(tmp_path, sft(tmp_path, model, source, *more))
    assert ranks.codes(made, "waits_and_sums", str(tmp_path / "counts")) == [0, 0]
    assert losses(made) == pytest.approx(losses(whole), rel=1e-4)
    micro_steps = Plan.read(made.plan).gradient_accumulation_steps
    layers = recipe.load(made.recipe).recipe.model.layers
    assert micro_steps > 2
    wanted = (micro_steps - 2) * 7 * layers + micro_steps * 3 * layers  # weights, and a layer's two inputs
    assert {sums for _, sums in files.read_json(tmp_path / "counts.0").values()} == {wanted}


def test_the_loss_falls_as_in_stock_trl(model: Path, source: Path, ranks: Ranks, tmp_path: Path) -> None:
    """The same dialogues in the same order, one a row: trl by itself, with torch's AdamW and without DeepSpeed."""
    flat = ("optim.schedule=constant", "optim.warmup_steps=0", "optim.min_lr=0", "optim.lr=3e-3")
    wanted = sft(tmp_path, model, source, "sft.packing=false", *flat)
    ours = ranks.train(run(tmp_path, wanted))
    rows = dialogues.train_rows(prepared(wanted), wanted)
    length, optim = wanted.batch.sequence_length, wanted.optim
    per_step = wanted.batch.tokens_per_step // length
    order = packing.order(rows.source_ranges(), (), 8 * per_step, length, wanted.train.seed)
    examples = []
    for inputs, labels in zip(*rows.read(order[np.arange(8 * per_step)]), strict=True):
        end = np.flatnonzero(labels != IGNORED)[-1] + 1  # after the last token that is learnt
        ids, learnt = np.append(inputs[:end], labels[end - 1]), np.append(IGNORED, labels[:end])
        examples.append({"input_ids": ids.tolist(), "labels": learnt.tolist()})
    settings = SFTConfig(
        output_dir=str(tmp_path / "trl"),
        use_cpu=True,
        bf16=False,
        per_device_train_batch_size=per_step,
        train_sampling_strategy="sequential",
        max_steps=8,
        learning_rate=optim.lr,
        lr_scheduler_type="constant",
        adam_beta1=optim.betas[0],
        adam_beta2=optim.betas[1],
        adam_epsilon=optim.eps,
        weight_decay=optim.weight_decay,
        max_grad_norm=optim.clip,
        gradient_checkpointing=False,
        max_length=None,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    stock = SFTTrainer(
        model=AutoModelForCausalLM.from_pretrained(model),
        args=settings,
        train_dataset=Dataset.from_list(examples),
        processing_class=AutoTokenizer.from_pretrained(model),
    )
    stock.train()
    theirs = [row for row in stock.state.log_history if "loss" in row]
    assert [row["loss"] for row in ours] == pytest.approx([float(row["loss"]) for row in theirs], abs=2e-3)
    assert ours[-1]["loss"] < 0.8 * ours[0]["loss"]


def test_resuming_gives_the_same_bits(whole: RunDir, ranks: Ranks, tmp_path: Path) -> None:
    expected = losses(whole)
    again = RunDir(tmp_path / "again")
    shutil.copytree(whole.path, again.path)
    shutil.rmtree(again.checkpoint(8))
    rows = ranks.train(again)
    assert [row["step"] for row in rows][8:] == [5, 6, 7, 8], "it goes on after the checkpoint"
    assert [row["loss"] for row in rows][8:] == expected[4:]
    verdict = proofs.compare_finished(whole, again)
    assert verdict.is_equal and verdict.steps == 8
    (again.checkpoint(8) / "manifest.json").write_text((again.checkpoint(4) / "manifest.json").read_text())
    assert not proofs.compare_finished(whole, again).is_equal


def test_d7_zero_3_and_full_recompute_give_the_same_losses_and_a_whole_model(
    whole: RunDir, model: Path, source: Path, ranks: Ranks, tmp_path: Path
) -> None:
    """Reentrant checkpointing fails under ZeRO-3; and the released code saves what rank 0's modules hold: nothing."""
    made = run(tmp_path, sft(tmp_path, model, source, "zero.stage=3", "train.recompute=full", FAST))
    assert [row["loss"] for row in ranks.train(made)] == pytest.approx(losses(whole), abs=1e-3)
    step, checkpoint = made.complete_checkpoints()[-1]
    (theirs,) = checkpoint.glob("zero_pp_rank_0_*model_states.pt")
    state = torch.load(theirs, map_location="cpu", weights_only=False)["module"]
    assert step == 8 and all(weight.numel() == 0 for weight in state.values() if weight is not None)
    ours = load_trained(checkpoint).model
    at_zero_1 = load_trained(whole.complete_checkpoints()[-1][1]).model
    for mine, other in zip(ours.parameters(), at_zero_1.parameters(), strict=True):
        torch.testing.assert_close(mine, other, atol=1e-3, rtol=1e-2)


def test_adapters_train_alone_and_are_merged_into_a_plain_model(
    model: Path, source: Path, ranks: Ranks, tmp_path: Path
) -> None:
    made = run(
        tmp_path, sft(tmp_path, model, source, "lora={rank: 4, alpha: 64, targets: [q_proj, up_proj]}", FAST), ranks=1
    )
    rows = ranks.train(made)
    assert rows[-1]["loss"] < rows[0]["loss"]
    merged = load_trained(made.complete_checkpoints()[-1][1]).model
    base = AutoModelForCausalLM.from_pretrained(model)
    changed = {name for name, weight in base.state_dict().items() if not torch.equal(weight, merged.state_dict()[name])}
    assert changed == {name for name in base.state_dict() if "q_proj" in name or "up_proj" in name}


def test_adapters_learn_alike_in_compiled_layers_whose_weights_zero_3_gathers(
    model: Path, source: Path, ranks: Ranks, tmp_path: Path
) -> None:
    """The hook that frees a layer's weights ran before the first layer's backward pass: its input had no gradient."""
    few = ("lora={rank: 4, alpha: 64, dropout: 0.1, targets: [q_proj, up_proj]}", "train.steps=3", FAST)
    plain, gathered = (
        run(tmp_path, sft(tmp_path, model, source, *few, *more), ranks=1)
        for more in (("zero.stage=1",), ("zero.stage=3", "train.compile=true"))
    )
    assert [row["loss"] for row in ranks.train(gathered)] == pytest.approx(
        [row["loss"] for row in ranks.train(plain)], abs=1e-4
    )


def test_merging_adds_the_scaled_product() -> None:
    wanted = type("R", (), {"lora": type("L", (), {"alpha": 8, "rank": 2})()})()
    weight, down, up = torch.randn(6, 4), torch.randn(2, 4), torch.randn(6, 2)
    layer = "base_model.model.model.layers.0.self_attn.q_proj"
    state = {f"{layer}.base_layer.weight": weight, f"{layer}.lora_A.default.weight": down}
    state |= {f"{layer}.lora_B.default.weight": up, "base_model.model.lm_head.weight": weight}
    found = start.merge_adapters(state, wanted)
    assert set(found) == {"model.layers.0.self_attn.q_proj.weight", "lm_head.weight"}
    torch.testing.assert_close(found["model.layers.0.self_attn.q_proj.weight"], weight + 4 * up @ down)
    with pytest.raises(RuntimeError, match="2 trained adapters belong to no weight"):
        stem = "base_model.model.model.embed_tokens.lora_embedding_"
        start.merge_adapters(state | {f"{stem}A.default": down, f"{stem}B.default": up}, wanted)


def test_dialogues_and_documents_mix_by_weight_and_each_has_its_loss(
    model: Path, source: Path, ranks: Ranks, tmp_path: Path
) -> None:
    """Hybrid tuning; at ZeRO-3, where the head returns two tensors through DeepSpeed's hooks."""
    news = write(
        tmp_path / "news.jsonl", [{"text": f"第{n}条：公司发布公告，净利润增长{n}%。" * 8} for n in range(200)]
    )
    sources = f"data.sources=[{{path: {source}, name: ask}}, {{path: {news}, name: text}}]"
    mixed = ("data.mixture={weights: {ask: 1, text: 3}}", "data.held_out_fraction=0.1", "zero.stage=3")
    wanted = sft(tmp_path, model, source, sources, *mixed, FAST)
    made = run(tmp_path, wanted)
    rows = ranks.train(made)
    shards = prepared(wanted)
    ranges = dialogues.train_rows(shards, wanted).source_ranges()
    order = packing.order(ranges, wanted.data.mixture, 64, 128, wanted.train.seed)
    read = [[int(row) in part for part in ranges.values()] for row in order[np.arange(64)]]
    assert np.sum(read, axis=0).tolist() == [16, 48]
    for row in rows:
        total = sum(part["loss"] * part["tokens"] for part in row["sources"].values())
        assert sum(part["tokens"] for part in row["sources"].values()) == row["tokens"]
        assert total / row["tokens"] == pytest.approx(row["loss"], rel=1e-5)
    text = [row["sources"]["text"]["loss"] for row in rows]
    assert text[-1] < text[0] and {"ask", "text"} == set(list(made.read_events("eval"))[-1]["sources"])
    curves = {chart.title: chart.series for chart in charts(history.read_history(made))}
    assert [series.name for series in curves["Training loss by source, smoothed"]] == ["ask", "text"]


def test_the_quickstarts_own_dialogues_pass_the_lint(model: Path, tmp_path: Path) -> None:
    small = "[{synthetic: {size: 300KB, held_out_size: 100KB, seed: 7, dialogues: true}}]"
    wanted = sft(tmp_path, model, Path(small), "batch.sequence_length=256", "batch.tokens_per_step=2048")
    shards = prepared(wanted)
    findings = [finding.evidence for finding in lint.check(wanted, shards)]
    assert [text for text in findings if "start model" not in text] == [], "the tiny model reads 64 tokens at once"
    assert files.read_json(shards.directory / "manifest.json")["totals"]["held_out"]["exam_chat"]["documents"] > 50
