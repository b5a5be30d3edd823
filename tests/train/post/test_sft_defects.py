"""The ten defects of the released XuanYuan llm-code: what each changes, beside what we do."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sentencepiece
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from finlm import config
from finlm.base import files
from finlm.base.rundir import RunDir
from finlm.dialogues import lint
from finlm.plan import planner
from finlm.plan.plan import Plan
from finlm.recipe import cluster, recipe, shape
from finlm.recipe.schema import Recipe
from finlm.rows import dialogues
from finlm.rows.shards import IGNORED, Order, Rows, Shards
from finlm.tokens import pretrained
from finlm.train import batches
from finlm.train.batches import Batches
from finlm.train.model import kernels
from finlm.train.post import sft as sft_stage

from dialogues import prepared, sample, sft, turns, write
from helpers import ROOT

FAITHFUL = ROOT / "recipes/xuanyuan-6b/sft-faithful.yaml"
CORRECTED = ROOT / "recipes/xuanyuan-6b/sft.yaml"
UNPACKED = "sft.packing=false"
LIBRARIES: tuple[pretrained.Library, ...] = ("tokenizers", "sentencepiece")


@pytest.fixture(scope="module")
def model(finished: tuple[RunDir, str]) -> Path:
    return Path(finished[0].export)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write(tmp_path / "rows.jsonl", [row for row in sample(60) if len(row["messages"]) == 2])


def errors(wanted: Recipe, shards: Shards) -> set[str]:
    return {finding.check for finding in lint.check(wanted, shards) if finding.level == "error"}


def both(tmp_path: Path, model: Path, source: Path, *defect: str) -> tuple[Recipe, Shards, Recipe, Shards]:
    """The recipe with the defect and without, and their data."""
    wrong, right = (sft(tmp_path, model, source, UNPACKED, *more) for more in (defect, ()))
    return wrong, prepared(wrong), right, prepared(right)


def counted_eos(wanted: Recipe, shards: Shards) -> int:
    rows = dialogues.train_rows(shards, wanted)
    return int((rows.read(np.arange(len(rows)))[1] == shards.eos_id).sum())


def test_d1_a_masked_eos_is_never_learnt(tmp_path: Path, model: Path, source: Path) -> None:
    wrong, wrong_data, right, right_data = both(tmp_path, model, source, "sft.mask_eos=true")
    dialogues = right_data.manifest["totals"]["train"]["rows"]["documents"]
    assert (counted_eos(wrong, wrong_data), counted_eos(right, right_data)) == (0, dialogues)
    assert errors(wrong, wrong_data) == {"eos-not-learnt"} and errors(right, right_data) == set()


def test_d2_labels_of_padding_are_most_of_the_loss(tmp_path: Path, model: Path, source: Path) -> None:
    wrong, wrong_data, right, right_data = both(tmp_path, model, source, "sft.pad_labels=true")
    rows = [dialogues.train_rows(data, wanted) for wanted, data in ((wrong, wrong_data), (right, right_data))]
    learnt = [row.supervised(np.arange(len(row))) for row in rows]
    assert learnt[1] == right_data.manifest["totals"]["train"]["rows"]["learnt"]
    assert learnt[0] > 4 * learnt[1], "of rows of 128 tokens four fifths of the labels are padding"
    assert errors(wrong, wrong_data) == {"padding-learnt"}


def test_d3_an_answer_tokenised_apart_follows_a_prompt_that_is_never_seen(
    tmp_path: Path, model: Path, source: Path
) -> None:
    wrong, wrong_data, _, right_data = both(tmp_path, model, source, "sft.answer_apart=true")

    def first(data: Shards) -> list[int]:
        (shard,) = data.split("train")
        return [int(token) for token in shard.ids[: int(shard.offsets[1])]]

    bos, eos = right_data.bos_id, right_data.eos_id
    assert (first(right_data).count(bos), first(right_data).count(eos)) == (1, 1)
    assert (first(wrong_data).count(bos), first(wrong_data).count(eos)) == (2, 2)
    assert errors(wrong, wrong_data) == {"answer-apart", "prompt-differs"}


def test_d3_repeats_the_released_ids(tmp_path: Path, model: Path, source: Path) -> None:
    """tokenizer(prompt) + [</s>] + tokenizer(response) + [</s>], by the tokenizer of transformers."""
    theirs = AutoTokenizer.from_pretrained(model)
    wanted = sft(tmp_path, model, source, UNPACKED, "sft.answer_apart=true", "chat.template=llm-code")
    (shard,) = prepared(wanted).split("train")
    ids = [int(token) for token in shard.ids[: int(shard.offsets[1])]]
    for question, answer in ((row["messages"][0]["content"], row["messages"][1]["content"]) for row in sample(60)):
        released = theirs(f"Human: {question}\nAssistant: ")["input_ids"], theirs(answer)["input_ids"]
        if ids == [*released[0], theirs.eos_token_id, *released[1], theirs.eos_token_id]:
            break
    else:
        pytest.fail(f"no dialogue has these ids by the released code: {ids}")


def test_d4_a_hidden_eos_changes_the_answer_and_its_loss(tmp_path: Path, model: Path, source: Path) -> None:
    """The attention mask of fine-tuning, ids != </s>, has a hole where the prompt ends."""
    wanted = sft(tmp_path, model, source, UNPACKED, "sft.answer_apart=true", "sft.hide_eos=true")
    data = prepared(wanted)
    rows = dialogues.train_rows(data, wanted)
    inputs, labels = (torch.from_numpy(part) for part in rows.read(np.arange(4)))
    llama = AutoModelForCausalLM.from_pretrained(model)
    with torch.no_grad():
        plain = llama(inputs, attention_mask=inputs.ne(data.eos_id)).logits[:, :, : llama.config.vocab_size]
        theirs = torch.nn.functional.cross_entropy(plain.flatten(0, 1).float(), labels.flatten(), reduction="sum")
        kernels.swap_loss(llama, llama.config.vocab_size)
        seen = llama(inputs, labels).item()
        sft_stage.hide_end_tokens(llama, data.eos_id)
        hidden = llama(inputs, labels).item()
    assert hidden == pytest.approx(theirs.item(), rel=1e-5) and hidden != pytest.approx(seen, rel=1e-6)
    assert "eos-hidden" in errors(wanted, data)


def test_d4_documents_of_a_pretraining_row_see_each_other_without_masks(finished: tuple[RunDir, str]) -> None:
    """The released pretraining has no mask at all; data.document_masks is ours."""
    rows = Shards(files.read_json(finished[0].manifest)["shards"]["path"])
    packed = Rows(rows.split("train"), 64)
    number = next(row for row in range(len(packed)) if packed.documents(np.array([row])).max() == 1)
    inputs, labels = (torch.from_numpy(part) for part in packed.read(np.array([number])))
    numbers = packed.documents(np.array([number]))
    later = torch.from_numpy(np.where(numbers == 1, labels.numpy(), IGNORED))
    other = inputs.clone()
    other[torch.from_numpy(numbers == 0)] = 300  # another first document
    llama = AutoModelForCausalLM.from_pretrained(finished[0].export)
    kernels.swap_loss(llama, llama.config.vocab_size)
    bounds = torch.from_numpy(batches.document_bounds(numbers))
    with torch.no_grad():
        leaking = [llama(ids, later).item() for ids in (inputs, other)]
        masked = [llama(ids, later, bounds).item() for ids in (inputs, other)]
    assert leaking[0] != pytest.approx(leaking[1], rel=1e-5) and masked[0] == pytest.approx(masked[1], rel=1e-6)


def test_d5_a_schedule_of_100000_steps_stays_at_the_peak() -> None:
    released, ours = recipe.load(FAITHFUL).recipe, recipe.load(CORRECTED).recipe
    assert config.lr_at(released.optim, 50, 49) > 0.999 * released.optim.lr
    assert config.lr_at(ours.optim, 50, 49) < 0.05 * ours.optim.lr
    plan = planner.make(released, cluster.from_hardware(released.hardware), shape.of(released))
    assert config.deepspeed_settings(released, plan)["scheduler"]["params"]["total_num_steps"] == 100_000


def test_d6_the_name_of_a_directory_chooses_the_released_tokenizer_and_not_ours(
    tmp_path: Path, model: Path, finished: tuple[RunDir, str], source: Path
) -> None:
    """The slow class differs behind control tokens only, so the released fine-tuning's ids are the fast one's."""
    llama = tmp_path / "Llama-2-7b-hf"
    llama.mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (llama / name).write_bytes((model / name).read_bytes())
    (llama / "tokenizer.model").write_bytes((finished[0].shards / "tokenizer.model").read_bytes())
    by_path = {path: "llama" in str(path).lower() for path in (Path("Llama-2-7b-hf"), Path("epoch0_step-120-hf"))}
    assert set(by_path.values()) == {True, False}, "two names of one tokenizer, two classes (model_hook.py)"
    by_name = prepared(sft(tmp_path, llama, source)).manifest
    by_library = prepared(sft(tmp_path, llama, source, "sft.tokenizer=sentencepiece")).manifest
    here = prepared(sft(tmp_path, model, source)).manifest
    assert (here["encoder"], by_name["encoder"], by_library["encoder"]) == ("tokenizers", "tokenizers", "sentencepiece")
    hashes = {manifest["shards"][0]["sha256"] for manifest in (here, by_name, by_library)}
    assert hashes == {here["shards"][0]["sha256"]}
    slow = sentencepiece.SentencePieceProcessor(model_file=str(llama / "tokenizer.model"))
    # transformers 4.36's LlamaTokenizer (legacy): each stretch between control tokens is encoded as a text of its own.
    released = [slow.bos_id(), *slow.encode("公告"), slow.eos_id(), *slow.encode("公告")]
    ours = [pretrained.open_tokenizer(llama, library).encode("<s>公告</s>公告")[0] for library in LIBRARIES]
    assert ours[0] == ours[1] != released


def test_d8_precision_and_offload_are_what_the_recipe_says() -> None:
    released, ours = recipe.load(FAITHFUL).recipe, recipe.load(CORRECTED, ["zero.offload_optimizer=cpu"]).recipe
    plans = [planner.make(one, cluster.from_hardware(one.hardware), shape.of(one)) for one in (released, ours)]
    assert [plan.precision for plan in plans] == ["fp16", "bf16"]
    settings = config.deepspeed_settings(ours, plans[1])
    assert settings["zero_optimization"]["offload_optimizer"]["device"] == "cpu" and "fp16" not in settings


def test_d9_the_released_order_repeats_rows_by_the_number_of_ranks(tmp_path: Path, model: Path, source: Path) -> None:
    """Two shuffles in pretraining, one in fine-tuning; a step's rows are the same at any number of ranks even so."""
    wanted = sft(tmp_path, model, source, UNPACKED, "batch.tokens_per_step=1024")
    rows = dialogues.train_rows(prepared(wanted), wanted)
    count, each = 53, 8  # rows: six steps of eight, and a rest

    def steps(released: bool, ranks: int) -> list[list[int]]:
        hosts = cluster.Cluster((cluster.Host("localhost", ranks, None, 8 * 2**30),))
        plan: Plan = planner.make(wanted, hosts, shape.of(wanted, 4096))
        order: Any = sft_stage.Sampler(count, 1234, plan) if released else Order(count, 1234)
        return [Batches(rows, order, plan, 0).row_ids(step).ravel().tolist() for step in range(7)]

    for ranks in (1, 2, 4):
        ours = [row for step in steps(False, ranks) for row in step]
        assert sorted(ours[:count]) == list(range(count)) and steps(False, ranks) == steps(False, 1)
        sampler = torch.utils.data.DistributedSampler(range(count), num_replicas=ranks, rank=0, seed=1234)  # type: ignore[arg-type]
        assert steps(True, ranks)[0][: each // ranks] == list(sampler)[: each // ranks], "what torch deals rank 0"
        assert [set(step) for step in steps(True, ranks)[:6]] == [set(step) for step in steps(True, 1)[:6]]
    theirs = [row for step in steps(True, 4) for row in step]
    assert len(theirs) == 56 and len(set(theirs)) == 53, "three rows twice in an epoch, so that four ranks divide it"
    twice = np.random.default_rng(42).permutation(count)[np.array([row for step in steps(True, 1)[:6] for row in step])]
    assert len(set(twice.tolist())) == 48, "a shuffle of a shuffle is a shuffle, which needs both seeds to be had again"


def test_d10_compressed_files_are_found(tmp_path: Path, model: Path, source: Path) -> None:
    with gzip.open(tmp_path / "published.jsonl.gz", "wb") as file:
        file.write(source.read_bytes())
    released = [path.name for pattern in ("*.json", "*.jsonl") for path in tmp_path.glob(pattern)]
    assert released == ["rows.jsonl"]
    data = prepared(sft(tmp_path, model, tmp_path / "published.jsonl.gz"))
    assert data.manifest["dialogues"]["published"]["rows"] == 60


def test_the_faithful_recipe_is_told_and_not_refused(tmp_path: Path, model: Path, source: Path) -> None:
    defects = ["answer_apart", "pad_labels", "hide_eos"]
    wanted = sft(tmp_path, model, source, UNPACKED, *(f"sft.{name}=true" for name in defects), "sft.profile=faithful")
    found = lint.check(wanted, prepared(wanted))
    assert {finding.check for finding in found} == {"answer-apart", "prompt-differs", "padding-learnt", "eos-hidden"}
    assert {finding.level for finding in found} == {"warning"}
    released = recipe.load(FAITHFUL).recipe.sft
    assert released is not None and released.profile == "faithful" and all(getattr(released, name) for name in defects)


def test_a_dialogue_without_its_end_or_with_its_question_learnt_is_an_error(tmp_path: Path, model: Path) -> None:
    source = write(tmp_path / "rows.jsonl", [turns(f"{n}？", "很长的回答，" * 60) for n in range(50)])
    cut = sft(tmp_path, model, source, "chat.overlong=truncate")
    assert {"answers-cut", "eos-not-learnt"} <= errors(cut, prepared(cut))
    (tmp_path / "bare.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    short = write(tmp_path / "short.jsonl", sample(20))
    endless = sft(tmp_path, model, short, f"chat.template={tmp_path / 'bare.jinja'}")
    assert "eos-not-learnt" in errors(endless, prepared(endless))
