"""Do what a rank of every stage does: join the others, seed generators, exchange values, record events.

A signal is noted as a number, which the training loop gathers with the loss after each step, so all ranks stop after
the same step. What is deterministic, and the price, is in docs/determinism.md.
"""

from __future__ import annotations

import errno
import os
import random
import resource
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, Generic, TypeVar

import deepspeed
import numpy as np
import torch
import transformers
from torch import distributed

from finlm.base.rundir import RunDir, open_run
from finlm.plan.plan import Plan
from finlm.recipe.settings import Settings
from finlm.rows.shards import Shard, Shards


def join_ranks(recipe: Settings, plan: Plan) -> int:
    """Select this rank's GPU (LOCAL_RANK), join the process group, seed all generators, and return this rank's index.

    Uses nccl on GPUs; on CPUs gloo, with DeepSpeed's compiled operators switched off. Makes torch deterministic if
    train.deterministic asks for it. Raises RuntimeError when the plan has another number of ranks.
    """
    if plan.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    else:
        # DeepSpeed compiles a shared-memory collective for CPU ranks at every first start (25-48 s, needs g++ and
        # ninja); gloo gives the same bits, and the hundred microseconds it would save do not matter here. Nor does it
        # try then for half a second which other operators this machine could compile.
        deepspeed.ops.__compatible_ops__ = {}
    deepspeed.init_distributed(dist_backend="nccl" if plan.device == "cuda" else "gloo", verbose=False)
    world_size = distributed.get_world_size()
    if world_size != plan.world_size:
        raise RuntimeError(f"{world_size} ranks were started, the plan has {plan.world_size}")
    random.seed(recipe.train.seed)
    np.random.seed(recipe.train.seed % 2**32)
    torch.manual_seed(recipe.train.seed)  # all CUDA devices too; new weights and the data order have their own
    if recipe.train.deterministic:
        make_deterministic()
    return distributed.get_rank()


def versions(plan: Plan) -> dict[str, str | int]:
    """Return the fields of the `start` event on world size, device, software versions and parameters.

    On CPU there are two more: cpu_capability and threads.
    """
    # On CPU, rounding depends on them.
    kernels = {"cpu_capability": torch.backends.cpu.get_cpu_capability(), "threads": torch.get_num_threads()}
    return {
        "world_size": plan.world_size,
        "device": torch.cuda.get_device_name() if plan.device == "cuda" else "cpu",
        "torch": torch.__version__,
        "deepspeed": deepspeed.__version__,
        "transformers": transformers.__version__,
        "parameters": plan.parameters,
        **(kernels if plan.device == "cpu" else {}),
    }


@dataclass(frozen=True)
class Measured:
    """Measurements of a step over all ranks."""

    losses: list[float]  # of each rank
    work_seconds: list[float]  # of each rank, where that is known
    memory_bytes: int  # the largest rank's peak
    signal: int  # that one of them got; 0 = none
    rows_crc: int  # sum over the ranks
    seconds: float


def measure_step(plan: Plan, loss: float, crc: int, begun: float, work_seconds: float = 0.0) -> Measured:
    """Gather a step's measurements from all ranks and return them; every rank must call it when its device is done.

    `begun` is time.monotonic() at the start of the step; `loss`, `crc` and `work_seconds` are this rank's. Memory is
    the peak since the process began: torch's on the GPU, or the resident set on CPU.
    """
    if plan.device == "cuda":
        memory = torch.cuda.max_memory_allocated()
    else:
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    values = [loss, memory, received_signal(), crc, work_seconds]
    # A single collective; fp64 holds integers up to 2**53, so bytes and checksums arrive whole.
    mine = torch.tensor(values, dtype=torch.float64, device=plan.device)
    gathered = [torch.empty_like(mine) for _ in range(plan.world_size)]
    distributed.all_gather(gathered, mine)
    losses, memories, signals, crcs, work = torch.stack(gathered).T.tolist()
    seconds = time.monotonic() - begun
    return Measured(losses, work, int(max(memories)), int(max(signals)), int(sum(crcs)), seconds)


@dataclass(frozen=True)
class Step:
    """A finished optimizer step, with values over all ranks."""

    number: int  # from 1
    loss: float
    lr: float
    tokens: int  # labels that count
    tokens_read: int  # by the model in its rows, without padding: what tokens/s and MFU count in every stage
    measured: Measured

    def row(self, plan: Plan, engine: Any) -> dict[str, float | None]:
        """Return the fields of the `step` event, the same keys in every stage; None where there is no such number."""
        norm, speed = engine.get_global_grad_norm(), self.tokens_read / self.measured.seconds
        flops = plan.flops_per_token * speed / plan.world_size
        return {
            "step": self.number,
            "loss": self.loss,
            "lr": self.lr,
            "grad_norm": None if norm is None else float(norm),
            "loss_scale": float(engine.optimizer.cur_scale) if plan.precision == "fp16" else None,
            "tokens": self.tokens,
            "tokens_read": self.tokens_read,
            "rows_crc": self.measured.rows_crc,
            "seconds": round(self.measured.seconds, 4),
            "tokens_per_second": round(speed, 1),
            "mfu": None if plan.peak_flops is None else round(flops / plan.peak_flops, 4),
            "memory_bytes": self.measured.memory_bytes,
        }


def is_due(step: int, every: int | None) -> bool:
    """Return whether `step` is a multiple of `every`; False when `every` is None."""
    return every is not None and step % every == 0


def make_deterministic() -> None:
    """Set torch's global options for deterministic operations; those without such a form then raise RuntimeError."""
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # costs, shows bugs only
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False
    from torch._inductor import config

    if hasattr(config, "deterministic"):  # torch 2.10: no choice of kernels by stopwatch
        config.deterministic = True


def generator_state() -> dict[str, Any]:
    """Return the states of the generators of Python, NumPy, torch's CPU and the current GPU (None without CUDA)."""
    name, keys, position, has_gauss, cached = np.random.get_state()
    return {
        "python": random.getstate(),
        # NumPy's keys as a tensor: torch.load(weights_only=True), which reads this again, refuses arrays.
        "numpy": (str(name), torch.from_numpy(np.asarray(keys).copy()), int(position), int(has_gauss), float(cached)),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
    }


def restore_generators(saved: dict[str, Any]) -> None:
    """Set the generators to `saved`, of generator_state(); the GPU's only if it was saved and there is one."""
    random.setstate(saved["python"])
    name, keys, position, has_gauss, cached = saved["numpy"]
    np.random.set_state((name, keys.numpy(), position, has_gauss, cached))
    torch.set_rng_state(saved["torch"])
    if saved["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(saved["cuda"])


def gather_values(value: Any) -> list[Any]:
    """Pickle this rank's value and return the values of all ranks in rank order. Collective."""
    every: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(every, value)
    return every


def ranks_sharing(directory: Path) -> list[int]:
    """Return the sorted ranks, this one included, that see this rank's `directory`: hosts may share a disk. Collective.

    Creates the directory, and in it for a moment a marker file of each rank. Raises OSError if it cannot.
    """
    directory.mkdir(parents=True, exist_ok=True)
    moment = gather_values(os.urandom(8).hex())[0]  # new names: a network disk answers for known ones from its cache
    marks = [directory / f".rank-{rank}.{moment}" for rank in range(distributed.get_world_size())]
    mark_here = marks[distributed.get_rank()]
    mark_here.touch()
    distributed.barrier()
    seen = [rank for rank, mark in enumerate(marks) if mark.exists()]
    distributed.barrier()
    mark_here.unlink(missing_ok=True)  # the first of them may be cleaning up already
    return seen


SIGNALS = (signal.SIGTERM, signal.SIGINT)
ONE_REQUEST_SECONDS = 5.0  # a scheduler signals the ranks and their launcher, which passes it on: that is one request
_received = 0
_since = 0.0


def note_signals() -> None:
    """Unblock SIGTERM and SIGINT and note the first for received_signal(), instead of ending the process.

    Another one more than ONE_REQUEST_SECONDS later ends the process.
    """
    for number in SIGNALS:
        signal.signal(number, _note)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)  # launch/agent.py blocked them: one that came is noted now


def received_signal() -> int:
    """Return the number of the first SIGTERM or SIGINT since note_signals(); 0 when there was none."""
    return _received


def _note(number: int, _: FrameType | None) -> None:
    """Note the first signal and its time in this module; end the process at one ONE_REQUEST_SECONDS later or more."""
    global _received, _since
    if not _received:
        _received, _since = number, time.monotonic()
    elif time.monotonic() - _since > ONE_REQUEST_SECONDS:
        signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)


FULL = (errno.ENOSPC, errno.EDQUOT)


@dataclass
class Events:
    """Appends rank 0's events to events.jsonl, nothing on others; `waiting` has those that a full disk kept back."""

    run: RunDir
    rank: int
    waiting: list[tuple[str, dict[str, Any]]] = field(default_factory=list)

    def record(self, kind: str, **fields: Any) -> None:
        """Append an event on rank 0; do nothing on others.

        On a full disk or quota keeps it, with its time, for the next call, and prints so once. Raises other OSErrors.
        """
        if self.rank != 0:
            return
        self.waiting.append((kind, fields))
        try:
            while self.waiting:
                waits, values = self.waiting[0]
                self.run.append_event(waits, **values)
                del self.waiting[0]
        except OSError as error:
            if error.errno not in FULL:
                raise
            if len(self.waiting) == 1:
                print("the disk is full: rows of events.jsonl wait until there is room", flush=True)
            self.waiting[-1][1].setdefault("time", round(time.time(), 3))  # when it happened, not when it is written


T = TypeVar("T")
R = TypeVar("R", bound=Settings)


@dataclass
class Rank(Generic[R]):
    """The objects of a rank of a run, whose process group exists; `started` is time.monotonic() at its start."""

    run: RunDir
    recipe: R
    plan: Plan
    shards: Shards
    device: torch.device
    rank: int
    events: Events
    started: float

    def held_out(self, read: Callable[[list[Shard]], list[T]]) -> dict[str, list[T]]:
        """Return {source: first items of read(its held-out shards)}, by sorted name; empty if nothing is held out.

        Keeps at most eval.max_tokens_per_source // plan.sequence_length items of a source, but at least 1.
        """
        most = max(1, self.recipe.eval.max_tokens_per_source // self.plan.sequence_length)
        return {name: read(parts)[:most] for name, parts in sorted(self.shards.by_source("held_out").items())}

    def end(self, step: int, status: str, exit_code: int) -> int:
        """Record the event `end` after `step` steps, wait for all ranks, and return `exit_code`. Collective."""
        seconds = round(time.monotonic() - self.started, 1)
        self.events.record("end", step=step, status=status, seconds=seconds, exit_code=exit_code)
        distributed.barrier()
        return exit_code


def open_rank(run_path: Path, recipe: R) -> Rank[R]:
    """Call note_signals(), open the run directory, whose recipe is `recipe`, call join_ranks(), and return a Rank.

    join_ranks() selects the GPU and seeds all generators. Raises UserError when run_path is no run directory or its
    plan or shards cannot be read, and RuntimeError when the plan has another number of ranks.
    """
    started = time.monotonic()
    note_signals()
    run = open_run(run_path)
    plan = Plan.read(run.plan)
    rank = join_ranks(recipe, plan)
    device = torch.device(plan.device)
    return Rank(run, recipe, plan, Shards(run.shards), device, rank, Events(run, rank), started)
