"""What goes wrong in a rank, for tests: called before the rank begins, they patch one place each."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator

from finlm.base import rundir
from finlm.train import entry, pretrain
from finlm.train.model import kernels
from finlm.train.zero import checkpoint, engine, in_memory, storage


def nan_loss(rank: int, micro_steps: list[int]) -> None:
    """The loss of these forward passes of one rank, counted from 0, becomes NaN."""
    plain, count = kernels._summed_loss, -1

    def faulty(model: torch.nn.Module, *batch: torch.Tensor) -> torch.Tensor:
        nonlocal count
        count += model.training
        loss = plain(model, *batch)
        is_due = model.training and count in micro_steps and int(os.environ["RANK"]) == rank
        return loss * math.nan if is_due else loss

    kernels._summed_loss = faulty


def without_inductor() -> None:
    """Importing torch's code generator fails."""
    sys.modules["torch._inductor.compile_fx"] = None  # type: ignore[assignment]
    vars(sys.modules.get("torch._inductor", sys)).pop("compile_fx", None)


def flipped_bit(rank: int, first: int, path: str) -> None:
    """From a forward pass in training on, one rank's gradient of one matrix has another bit; and the hashes."""
    plain, count = kernels._summed_loss, 0

    def flip(gradient: torch.Tensor) -> torch.Tensor:
        wrong = gradient.clone()
        wrong.view(torch.int32).view(-1)[7] ^= 1
        return wrong

    def faulty(model: torch.nn.Module, *batch: torch.Tensor) -> torch.Tensor:
        nonlocal count
        count += model.training
        if count == first + 1 and model.training and int(os.environ["RANK"]) == rank:
            model.model.layers[0].mlp.up_proj.weight.register_hook(flip)  # type: ignore[attr-defined,union-attr]
        return plain(model, *batch)

    kernels._summed_loss = faulty
    fingerprints(path)


def out_of_memory(rows: int, first: int) -> None:
    """From a forward pass on, counted from 0 in each launch, a micro-batch of more than so many rows is too large."""
    plain, count = kernels._summed_loss, -1

    def faulty(model: torch.nn.Module, *batch: torch.Tensor) -> torch.Tensor:
        nonlocal count
        count += model.training
        if model.training and count >= first and len(batch[0]) > rows:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.50 GiB. GPU 0 has a total capacity")
        return plain(model, *batch)

    kernels._summed_loss = faulty


def fingerprints(path: str) -> None:
    """Write a hash of this rank's weights and optimizer states after every step, by step, to path.RANK."""
    plain = pretrain.Guard.judge
    found: dict[int, str] = {}

    def judged(self: pretrain.Guard, step: int, *arguments: Any) -> Any:
        found[step] = state_hash(self.s.engine)
        Path(f"{path}.{os.environ['RANK']}").write_text(json.dumps(found))
        return plain(self, step, *arguments)

    pretrain.Guard.judge = judged  # type: ignore[method-assign]


def small_groups_and_fingerprints(elements: int, path: str) -> None:
    """Groups of at most so many parameters, streamed in parts, as a large model has by itself; and the hashes."""
    engine.optimizer_group, engine.STREAM_GROUP = lambda *_: elements, elements // 3
    fingerprints(path)


def waits_and_sums(path: str) -> None:
    """Write by step how often the host waited for the device's answer, and how often a product added to a gradient."""
    found: dict[int, list[int]] = {}
    now = [0, 0]

    def counted(which: int, owner: Any, name: str) -> None:
        plain = getattr(owner, name)

        def called(*arguments: Any, **named: Any) -> Any:
            now[which] += 1
            return plain(*arguments, **named)

        setattr(owner, name, called)

    record = entry.Events.record

    def recorded(self: entry.Events, kind: str, **fields: Any) -> None:
        if kind == "step":
            found[fields["step"]] = list(now)
            Path(f"{path}.{os.environ['RANK']}").write_text(json.dumps(found))
            now[:] = 0, 0
        record(self, kind, **fields)

    entry.Events.record = recorded  # type: ignore[method-assign]
    for name in ("item", "tolist", "__bool__", "__int__", "__float__"):
        counted(0, torch.Tensor, name)
    counted(0, get_accelerator(), "synchronize")
    counted(1, torch.Tensor, "addmm_")


def nan_loss_and_fingerprints(rank: int, micro_steps: list[int], path: str) -> None:
    """Both, in several groups."""
    nan_loss(rank, micro_steps)
    small_groups_and_fingerprints(300_000, path)


def sigterm(rank: int, step: int) -> None:
    """One rank gets SIGTERM while it is judging a step: a scheduler's, and soon after it the one finlm passes on."""
    plain = pretrain.Guard.judge

    def judged(self: pretrain.Guard, at: int, *arguments: Any) -> Any:
        if at == step and int(os.environ["RANK"]) == rank:
            for _ in range(2):
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(0.05)
        return plain(self, at, *arguments)

    pretrain.Guard.judge = judged  # type: ignore[method-assign]


def fp16_overflow(name: str, from_step: int) -> None:
    """fp16, and a gradient is infinite from a step on."""
    fp16()
    plain = pretrain.Guard.data_step

    def at(self: pretrain.Guard, step: int) -> int:
        if step + 1 == from_step:
            self.s.engine.module.get_parameter(name).register_hook(lambda gradient: gradient * math.inf)
        return plain(self, step)

    pretrain.Guard.data_step = at  # type: ignore[method-assign]


def state_hash(engine: Any) -> str:
    """Of everything a step may change on this rank: parameters or their shards, and the optimizer's tensors."""
    digest = hashlib.sha256()
    for parameter in engine.module.parameters():
        digest.update(getattr(parameter, "ds_tensor", parameter).detach().float().numpy().tobytes())
    inner = engine.basic_optimizer
    for group in inner.param_groups:
        for parameter in group["params"]:
            digest.update(parameter.detach().float().numpy().tobytes())
            for name, value in sorted(inner.state.get(parameter, {}).items()):
                digest.update(name.encode() + torch.as_tensor(value).detach().float().numpy().tobytes())
    return digest.hexdigest()


def killed(rank: int, save: int, seconds: float) -> None:
    """SIGKILL for a rank, or all of them (-1), so long after the start (save 0) or after the n-th save of this launch.

    A rank that ends before lives on.
    """
    if rank not in (-1, int(os.environ["RANK"])):
        return
    timer = threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGKILL))
    timer.daemon = True
    if save == 0:
        timer.start()
        return
    plain, count = storage.write_files, 0

    def written(*arguments: Any, **named: Any) -> Any:
        nonlocal count
        count += 1
        if count == save:
            timer.start()
        return plain(*arguments, **named)

    storage.write_files = written


def stopped(step: int) -> None:
    """All ranks end after this step without another word, as if the machine was switched off.

    The checkpoints of earlier steps are on disk by then, however slow the disk is.
    """
    plain, poll, checkpoints = pretrain.Guard.judge, checkpoint.Checkpoints.poll, []

    def polled(self: checkpoint.Checkpoints) -> None:
        checkpoints[:] = [self]
        poll(self)

    def judged(self: pretrain.Guard, at: int, *arguments: Any) -> Any:
        if at == step:
            for each in checkpoints:
                each.finish()
            os.kill(os.getpid(), signal.SIGKILL)
        return plain(self, at, *arguments)

    checkpoint.Checkpoints.poll = polled  # type: ignore[method-assign]
    pretrain.Guard.judge = judged  # type: ignore[method-assign]


def held(step: int) -> None:
    """All ranks wait in this step until they have got a signal, at most two minutes."""
    plain = pretrain.Guard.judge

    def judged(self: pretrain.Guard, at: int, *arguments: Any) -> Any:
        deadline = time.monotonic() + 120
        while at == step and not entry.received_signal() and time.monotonic() < deadline:
            time.sleep(0.02)
        return plain(self, at, *arguments)

    pretrain.Guard.judge = judged  # type: ignore[method-assign]


def paced(seconds: float) -> None:
    """Steps take so much longer, asleep: a run that is to last leaves the cores to others."""
    plain = pretrain.log_step

    def log_step(*arguments: Any) -> entry.Step:
        done = plain(*arguments)
        time.sleep(seconds)
        return done

    pretrain.log_step = log_step


def disks_of_their_own(announced: int | None) -> None:
    """Each rank is a host whose checkpoints lie in disk-RANK; the launcher announced this step."""
    folder = f"disk-{os.environ['RANK']}"
    rundir.RunDir.checkpoints = property(lambda self: self.path / folder)  # type: ignore[assignment]
    os.environ["FINLM_HOST"] = f"n{os.environ['RANK']}"
    if announced is not None:
        os.environ[rundir.STEP_VARIABLE] = str(announced)


def memory_of_their_own(stop: int) -> None:
    """As disks_of_their_own, each with a memory too; the ranks end after the step `stop` as if the power was cut."""
    plain, folder = rundir.RunDir.memory, f"memory-{os.environ['RANK']}"

    def memory(self: rundir.RunDir, directory: str) -> Path:
        place = Path(directory) / folder
        place.mkdir(exist_ok=True)
        return plain(self, str(place))

    disks_of_their_own(None)
    rundir.RunDir.memory = memory  # type: ignore[method-assign]
    in_memory.FIRST_STEPS = 1
    stopped(stop)


def fp16() -> None:
    """fp16 on a CPU, where torch computes it though DeepSpeed refuses it."""
    type(get_accelerator()).is_fp16_supported = lambda self: True


def disk_is_full(path: str, first: int, last: int) -> None:
    """From one checkpoint to another (their steps) another program fills the disk at path, at times only meanwhile.

    The first save of the run is so slow that the second has to wait for it.
    """
    plain, room, write = checkpoint.Checkpoints.save, checkpoint.Checkpoints._make_room, storage.write_files
    ballast, saves, waited_for = Path(path) / "ballast", 0, threading.Event()
    checkpoint.WAIT_SECONDS = 0.2

    def saved(self: checkpoint.Checkpoints, step: int) -> None:
        nonlocal saves
        saves += 1
        if saves == 2:
            threading.Timer(0.5, waited_for.set).start()
        if int(os.environ["RANK"]) == 0:
            if step == last + 3:
                ballast.unlink()
            elif step == first:
                with ballast.open("wb") as file, contextlib.suppress(OSError):
                    file.write(bytes(1 << 26))
        if first < step <= last:  # it looked as if there were room
            checkpoint.Checkpoints._make_room = lambda *_: ""  # type: ignore[method-assign]
        plain(self, step)
        checkpoint.Checkpoints._make_room = room  # type: ignore[method-assign]

    def written(*arguments: Any, **named: Any) -> Any:
        waited_for.wait()
        return write(*arguments, **named)

    checkpoint.Checkpoints.save = saved  # type: ignore[method-assign]
    storage.write_files = written
