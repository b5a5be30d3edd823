"""QLoRA: matrices in 4 bits multiply as they are rounded; runs learn, resume and export what they trained."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from finlm.base.rundir import RunDir
from finlm.evals import suite
from finlm.inference.open import load_trained
from finlm.plan.plan import Plan
from finlm.train.post import start

from dialogues import run, sample, sft, write
from ranks import Ranks

ADAPTERS = "lora={rank: 8, alpha: 64, quantize: nf4}"
QLORA = (ADAPTERS, "optim.lr=1e-2", "data.held_out_fraction=0.1", "eval.every_steps=4", "checkpoint.every_steps=4")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("rows") / "rows.jsonl", sample(120))


@pytest.fixture(scope="module")
def whole(finished: tuple[RunDir, str], source: Path, ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """Eight steps on two ranks, a checkpoint after four."""
    path = tmp_path_factory.mktemp("whole")
    made = run(path, sft(path, Path(finished[0].export), source, *QLORA))
    ranks.train(made)
    return made


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_matrix_in_four_bits_multiplies_as_it_is_rounded(dtype: torch.dtype) -> None:
    matrix, x = torch.randn(192, 320).to(dtype), torch.randn(7, 320).to(dtype).requires_grad_()
    layer = start.Nf4Linear(matrix)
    kept = layer.weight.quantized_data.nbytes + layer.weight.quantized_scalers.nbytes
    assert kept < 0.52 * matrix.numel() and not list(layer.parameters()) and not layer.state_dict()
    rounded = layer.weight.get_original_weight()
    assert 0.05 < ((rounded - matrix).float().norm() / matrix.float().norm()).item() < 0.12
    out = layer(x)
    torch.testing.assert_close(out, torch.nn.functional.linear(x, rounded))
    out.sum().backward()
    torch.testing.assert_close(x.grad, (torch.ones_like(out) @ rounded))
    assert layer.to(torch.float16).weight.dtype == dtype, "casting a model leaves it alone"


def test_only_adapters_are_trained_and_saved(whole: RunDir) -> None:
    steps, evals = list(whole.read_events("step")), list(whole.read_events("eval"))
    assert steps[-1]["loss"] < steps[0]["loss"] - 0.03 and evals[-1]["loss"] < evals[0]["loss"] - 0.02
    checkpoint = whole.complete_checkpoints()[-1][1]
    saved = torch.load(checkpoint / "mp_rank_00_model_states.pt", weights_only=False)["module"]
    layers = {name for name in saved if ".layers." in name and "norm" not in name}
    assert layers and all(".lora_" in name for name in layers)
    assert Plan.read(whole.plan).zero_stage == 1


def test_the_export_is_the_model_that_was_trained(whole: RunDir, finished: tuple[RunDir, str]) -> None:
    step, checkpoint = whole.complete_checkpoints()[-1]
    last = list(whole.read_events("eval"))[-1]
    assert step == last["step"] == 8
    assert suite.measure_perplexity(checkpoint)["loss"] == pytest.approx(last["loss"], rel=1e-5)
    base = AutoModelForCausalLM.from_pretrained(finished[0].export).state_dict()
    merged = load_trained(checkpoint).model.state_dict()
    assert merged.keys() == base.keys()
    same = {name for name in base if torch.equal(base[name], merged[name])}
    assert same == {name for name in base if "proj" not in name}


def test_resuming_gives_the_same_bits(whole: RunDir, ranks: Ranks, tmp_path: Path) -> None:
    expected = [row["loss"] for row in whole.read_events("step")]
    again = RunDir(tmp_path / "again")
    shutil.copytree(whole.path, again.path)
    shutil.rmtree(again.checkpoint(8))
    assert [row["loss"] for row in ranks.train(again)][8:] == expected[4:]
