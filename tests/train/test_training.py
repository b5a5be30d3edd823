"""The losses of two CPU ranks at every ZeRO stage, and after a rank was killed in a real launch."""

from __future__ import annotations

import dataclasses
import fcntl
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import GptOssConfig, GptOssForCausalLM

from finlm.base import files
from finlm.base.errors import UserError
from finlm.base.rundir import RunDir
from finlm.launch import start
from finlm.plan.plan import Plan
from finlm.recipe import recipe
from finlm.train.model import products
from finlm.train.zero import engine

from helpers import logs
from ranks import Ranks

# The first optimizer on the CPU waits for DeepSpeed's compiler: 50 s alone, minutes beside other tests.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


@pytest.fixture
def expected(finished: tuple[RunDir, str]) -> list[float]:
    """The losses of the tiny recipe at ZeRO-1, from `finlm train`."""
    return [row["loss"] for row in finished[0].read_events("step")]


@pytest.mark.parametrize(
    "overrides",
    [
        ("zero.stage=0",),
        ("zero.stage=2",),
        ("zero.stage=3",),
        ("zero.stage=1", "zero.offload_optimizer=stream"),
        ("zero.stage=2", "zero.offload_optimizer=stream"),
        ("zero.stage=2", "zero.offload_optimizer=cpu"),
        ("zero.stage=3", "zero.offload_optimizer=cpu", "zero.offload_param=cpu"),
        ("train.recompute=full",),
    ],
    ids=lambda value: " ".join(value).replace("zero.", ""),
)
def test_every_zero_stage_offload_and_recompute_gives_the_same_loss(
    make_run: Any, ranks: Ranks, expected: list[float], overrides: tuple[str, ...]
) -> None:
    """In ten of the twenty steps, the last six at full rate; an evaluation and a checkpoint are among them."""
    assert expected[9] < expected[0] - 0.2
    run = make_run(*overrides, "checkpoint.every_steps=5", "eval.every_steps=5")
    assert ranks.codes(run, "stopped", 10) == [-9, -9], logs(run)
    assert [row["loss"] for row in run.read_events("step")] == pytest.approx(expected[:10], abs=1e-3)
    assert [step for step, _ in run.complete_checkpoints()] == [5]


@pytest.mark.parametrize(("compiled", "count"), [("false", 2), ("true", 1)])  # a compiled rank takes 4 CPU s
def test_a_streamed_optimizer_has_the_bits_of_one_that_stays(
    make_run: Any, ranks: Ranks, tmp_path: Path, compiled: str, count: int
) -> None:
    found = []
    for where in ("none", "stream"):
        step = ("train.steps=8", f"train.compile={compiled}")
        run = make_run(*step, "zero.stage=1", f"zero.offload_optimizer={where}", ranks=count)
        assert not any(ranks.codes(run, "small_groups_and_fingerprints", 300_000, str(tmp_path / where)))
        hashes = [files.read_json(Path(f"{tmp_path / where}.{rank}")) for rank in range(count)]
        found.append((hashes, [(row["loss"], row["grad_norm"]) for row in run.read_events("step")]))
    assert found[0] == found[1]
    assert len(set(found[0][0][0].values())) == 8, "every step changed the state"


@pytest.mark.parametrize(("count", "optimizer"), [(1, "adamw"), (2, "adam")])
def test_compiled_layers_sums_and_optimizer_train_as_the_plain_ones(
    make_run: Any, ranks: Ranks, tmp_path: Path, count: int, optimizer: str
) -> None:
    step = ("train.steps=6", "zero.stage=1", "batch.micro_batch=2", f"optim.optimizer={optimizer}")
    curves = []
    for compiled in ("false", "true"):
        run = make_run(*step, f"train.compile={compiled}", ranks=count)
        assert not any(ranks.codes(run, "waits_and_sums", str(tmp_path / compiled)))
        curves.append([(row["loss"], row["grad_norm"]) for row in run.read_events("step")])
        waits, sums = zip(*files.read_json(Path(f"{tmp_path / compiled}.0")).values(), strict=True)
        micro_steps = Plan.read(run.plan).gradient_accumulation_steps
        layers = recipe.load(run.recipe).recipe.model.layers if compiled == "true" else 0
        # The loss's, twice a micro-step, on CPUs only; four a step, and DeepSpeed's own clipping, once a group. Before
        # step 3 there are the evaluation and the checkpoint's measure.
        assert set(waits[2:]) == {2 * micro_steps + (4 if compiled == "true" else 5)}
        # A layer's seven matrices; of five products that make two gradients of its inputs, three.
        assert micro_steps > 2 and set(sums) == {(micro_steps - 2) * 7 * layers + micro_steps * 3 * layers}
    for plain, compiled_row in zip(*curves, strict=True):
        assert compiled_row == pytest.approx(plain, rel=1e-5)


def test_a_linear_layer_with_a_bias_stays_plain(make_run: Any) -> None:
    plan = dataclasses.replace(Plan.read(make_run().plan), compiled=True, zero_stage=1, gradient_accumulation_steps=3)
    layers = torch.nn.Sequential(torch.nn.Linear(2, 2, bias=False), torch.nn.Linear(2, 2))
    products.swap_summing(layers, layers, plan, lambda: False)
    assert [type(one) for one in layers] == [products.SummingLinear, torch.nn.Linear]


def test_gradients_added_up_in_fp32_depend_less_on_how_a_step_is_cut(make_run: Any, ranks: Ranks) -> None:
    step = ("train.steps=3", "optim.warmup_steps=2", "batch.tokens_per_step=2048", "batch.micro_batch=1")
    step += ("eval.every_steps=null", "eval.max_tokens_per_source=500", "checkpoint.every_steps=null")
    apart = {}
    for dtype, stage in (("auto", 1), ("fp32", 2)):
        norms = []
        for zero, count in ((stage, 1), (3, 2)):
            sums = ("train.precision=bf16", f"zero.stage={zero}", f"train.grad_accum_dtype={dtype}")
            norms.append([row["grad_norm"] for row in ranks.train(make_run(*step, *sums, ranks=count))])
        apart[dtype] = sum(abs(one - other) for one, other in zip(*norms, strict=True))
    assert apart["fp32"] < 0.3 * apart["auto"]


def test_two_runs_give_bit_identical_losses(make_run: Any, ranks: Ranks, expected: list[float]) -> None:
    run = make_run()
    assert [row["loss"] for row in ranks.train(run)] == expected
    assert run.host_lock("localhost").exists()  # every rank holds it


def test_a_rank_that_does_not_compile_does_not_import_inductor(make_run: Any, ranks: Ranks) -> None:
    run = make_run("train.steps=4", "optim.warmup_steps=2", ranks=1)
    assert ranks.codes(run, "without_inductor") == [0], logs(run)


def test_micro_batch_accumulation_and_world_size_do_not_change_loss_or_gradient(make_run: Any, ranks: Ranks) -> None:
    base = ranks.train(make_run("train.steps=6", "batch.micro_batch=8"))
    other = ranks.train(make_run("train.steps=6", "batch.micro_batch=4", ranks=1))
    assert [row["tokens"] for row in other] == [row["tokens"] for row in base]
    for row in base:  # without padding, as in the stages after pretraining
        assert row["tokens"] == row["tokens_read"] == pytest.approx(row["tokens_per_second"] * row["seconds"], rel=0.01)
    assert [row["loss"] for row in other] == pytest.approx([row["loss"] for row in base], abs=1e-4)
    assert [row["grad_norm"] for row in other] == pytest.approx([row["grad_norm"] for row in base], rel=1e-3)


@pytest.mark.parametrize("stage", [1, 3])
def test_ranks_with_unequal_micro_batches_train_as_equal_ones(
    make_run: Any, ranks: Ranks, finished: tuple[RunDir, str], stage: int
) -> None:
    run = make_run("batch.micro_batch={a: 3, b: 1}", f"zero.stage={stage}", names=("a", "b"))
    plan = Plan.read(run.plan)
    assert (plan.rank_micro_batches, plan.gradient_accumulation_steps) == ((3, 1), 4)  # 8 + 8 at once in the other
    unequal, equal = ranks.train(run), list(finished[0].read_events("step"))
    assert [row["tokens"] for row in unequal] == [row["tokens"] for row in equal]
    assert [row["loss"] for row in unequal] == pytest.approx([row["loss"] for row in equal], abs=3e-6)
    assert [row["grad_norm"] for row in unequal] == pytest.approx([row["grad_norm"] for row in equal], rel=3e-5)
    held_out = [[row["loss"] for row in one.read_events("eval")] for one in (run, finished[0])]
    assert held_out[0] == pytest.approx(held_out[1], abs=3e-6)


def test_a_run_whose_rank_is_killed_says_so_and_resumes_to_the_same_curve(
    make_run: Any, ranks: Ranks, expected: list[float]
) -> None:
    run = make_run()
    killer = threading.Thread(target=_kill_a_rank_after_the_checkpoint, args=(run,))
    killer.start()
    with pytest.raises(UserError, match="on localhost was killed by SIGKILL"):
        start.launch_ranks(run, Plan.read(run.plan))
    killer.join()
    assert not _ranks_of(run), "no rank is left behind"
    assert [step for step, _ in run.complete_checkpoints()] == [10]
    rows = ranks.train(run)
    assert [row["loss"] for row in rows if row["step"] > 10][-10:] == expected[10:]


def test_a_run_cannot_be_started_twice_at_once(make_run: Any) -> None:
    run = make_run()
    with (run.path / ".lock").open("w") as other:
        other.write("4321 elsewhere\n")
        other.flush()
        fcntl.flock(other, fcntl.LOCK_EX)  # by another open file, as another process does
        with pytest.raises(UserError, match="is running now") as caught:
            start.launch_ranks(run, Plan.read(run.plan))
    assert "`kill 4321` on elsewhere" in caught.value.fix


def _ranks_of(run: RunDir) -> list[int]:
    """Process ids of the ranks of a run, by their command line."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with Path(f"/proc/{pid}/cmdline").open("rb") as file:
                command = file.read().decode(errors="replace").split("\0")
        except OSError:
            continue
        if str(run.path) in command and "finlm.train" in command:
            found.append(int(pid))
    return found


def _kill_a_rank_after_the_checkpoint(run: RunDir) -> None:
    deadline = time.monotonic() + 120
    while not run.complete_checkpoints() and time.monotonic() < deadline:
        time.sleep(0.01)
    os.kill(_ranks_of(run)[-1], signal.SIGKILL)


def test_weights_of_experts_begin_at_16_bytes_in_the_optimizers_buffer(make_run: Any) -> None:
    """Six sinks a layer and a router's four biases stood before them, and grouped products refused the address."""
    plan = dataclasses.replace(Plan.read(make_run().plan), device="cuda", zero_stage=1)
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 128, "head_dim": 32}
    config = GptOssConfig(**sizes, num_attention_heads=6, num_key_value_heads=2, num_local_experts=4)
    model = GptOssForCausalLM(config).bfloat16()
    (group,) = engine.parameter_groups(model, plan)
    starts = np.cumsum([0, *(parameter.numel() for parameter in group["params"])])[:-1]
    experts = [start for start, each in zip(starts, group["params"], strict=True) if each.dim() == 3]
    assert len(experts) == 4 and not any(start % 8 for start in experts)
    assert {id(each) for each in group["params"]} == {id(each) for each in model.parameters()}
