"""A rank's state between the engine and the disk: DeepSpeed's hook for both, copies in host memory, files.

DeepSpeed's own asynchronous engines were read and left: `fast` needs libaio and its own file format, `decoupled` a
second process that shares CUDA tensors and waits at the next step, `datastates` a package of its own. Here the state
is copied once into host memory that stays allocated and page-locked (a 6 B model on one GPU: 90 GB at PCIe speed),
and torch.save, which writes tensors without the interpreter lock, runs in a thread.

Reading never executes a pickle: `weights_only` with the five classes that DeepSpeed's states hold.
"""

from __future__ import annotations

import copy
import os
import pickle
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointEngine
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils.tensor_fragment import fragment_address

from finlm.base.errors import UserError
from finlm.train.streamed import page_locked

SAFE = [fragment_address, LossScaler, DynamicLossScaler, ZeroStageEnum]
SMALL_BYTES = 1 << 20  # below it a buffer that stays is not worth its page-locking

State = dict[str, Any]


def load(path: Path, mmap: bool = False) -> State:
    """The state in a file written by write(), on the CPU. mmap: pages are read when they are used.

    Raises UserError for a file that holds anything but tensors, plain values and the classes of SAFE.
    """
    try:
        with torch.serialization.safe_globals(SAFE):
            state: State = torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
    except pickle.UnpicklingError as error:
        raise UserError(
            f"refused to load {path}: it holds code, not only tensors",
            evidence=str(error).strip().splitlines()[0],
            fix="finlm writes no such file: find out where this checkpoint comes from before you use it",
        ) from None
    return state


def write(state: State, path: Path) -> None:
    """The state as a torch file that has reached the disk."""
    torch.serialization.set_crc32_options(False)  # a slow checksum in the zip; the manifest has sha256
    torch.save(state, path)
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class Store(CheckpointEngine):  # type: ignore[misc]
    """What DeepSpeed saves to and loads from: save() collects copies by file name, load() reads safely.

    `place` makes the copy of a tensor. `given`: states by file name that load() returns instead of reading a file.
    """

    def __init__(self) -> None:
        super().__init__()
        self.name = "finlm"
        self.place: Callable[[torch.Tensor], torch.Tensor] = torch.Tensor.detach
        self.collected: dict[str, State] = {}
        self.given: dict[str, State] = {}
        self.mmap = False

    def create(self, info: Any) -> None:
        """Nothing to prepare."""

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Directories are made by the thread that writes."""

    def save(self, state_dict: State, path: str) -> None:
        """Collect a copy of what would go to path."""
        self.collected[Path(path).name] = copied(state_dict, self.place)

    def load(self, path: str, map_location: Any = None) -> State:
        """The state in path."""
        given = self.given.get(Path(path).name)
        return load(Path(path), self.mmap) if given is None else given

    def commit(self, info: Any) -> bool:
        """Publishing is Checkpoints' business."""
        return True

    def taken(self) -> dict[str, State]:
        """What was collected, by file name; the store is empty after it."""
        collected, self.collected = self.collected, {}
        return collected


def copied(value: Any, place: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Containers with every tensor replaced by place(tensor), once for each distinct one, and all else copied."""
    seen: dict[tuple[Any, ...], torch.Tensor] = {}

    def walk(part: Any) -> Any:
        if isinstance(part, torch.Tensor):
            key = (part.device, part.data_ptr(), part.dtype, part.shape, part.stride())
            if part.numel() == 0 or key not in seen:
                seen[key] = place(part.detach())
            return seen[key]
        if isinstance(part, dict):
            kind = OrderedDict if isinstance(part, OrderedDict) else dict
            return kind((key, walk(item)) for key, item in part.items())
        if type(part) in (list, tuple):
            return type(part)(walk(item) for item in part)
        return copy.deepcopy(part)

    return walk(value)


class Buffers:
    """Host memory for a rank's state, allocated once and reused by every save in the same order.

    On a GPU it is page-locked, which makes the copy several times faster but takes a while itself (touching and locking
    a page costs more than copying it), so reserve() does it in a thread while the first steps run.
    """

    def __init__(self, device: torch.device) -> None:
        self.locked = device.type == "cuda"
        self.device = torch.cuda.current_device() if self.locked else None
        self.memory: list[torch.Tensor] = []
        self.next = 0
        self.thread: threading.Thread | None = None

    def reserve(self, sizes: Sequence[int]) -> None:
        """Allocate for tensors of these bytes; returns at once."""
        self.thread = threading.Thread(target=self._allocate, args=(list(sizes),), name="buffers", daemon=True)
        self.thread.start()

    def _allocate(self, sizes: Sequence[int]) -> None:
        if self.device is not None:  # a thread begins on GPU 0, where locking would open a context of this rank
            torch.cuda.set_device(self.device)
        for size in sizes:
            memory = torch.empty(size, dtype=torch.uint8)
            memory.zero_()  # touched, so that every page exists
            if self.locked:
                memory = page_locked(memory)
            self.memory.append(memory)

    def begin(self) -> None:
        """Start over with the first buffer; what was copied before must have been written."""
        if self.thread is not None:
            self.thread.join()
            self.thread = None
        self.next = 0

    def place(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy of tensor in host memory; complete after torch.cuda.synchronize() when it comes from a GPU."""
        size = tensor.numel() * tensor.element_size()
        if size < SMALL_BYTES:
            return tensor.cpu() if tensor.device.type != "cpu" else tensor.clone()
        if self.next == len(self.memory):
            self._allocate([size])
        elif self.memory[self.next].numel() != size:
            raise RuntimeError(f"the state's tensors changed: {size} bytes instead of {self.memory[self.next].numel()}")
        memory = self.memory[self.next]
        self.next += 1
        target = memory.view(tensor.dtype).view(tensor.shape)
        return target.copy_(tensor, non_blocking=True)


def sizes_of(states: dict[str, State]) -> tuple[list[int], int]:
    """(bytes of every tensor that gets a buffer, in the order of copying; bytes of all tensors)."""
    large, total = [], 0

    def count(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal total
        size = tensor.numel() * tensor.element_size()
        total += size
        if size >= SMALL_BYTES:
            large.append(size)
        return tensor

    copied(states, count)
    return large, total
