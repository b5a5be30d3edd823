"""Copy a rank's state between the engine and the disk, and reshard it for other numbers of ranks or ZeRO stages.

The state is copied once into pinned host memory (a 6 B model on one GPU: 90 GB at PCIe speed), and torch.save runs in a
thread; DeepSpeed's asynchronous engines need libaio, a second process or a package.

To reshard, shards are mapped into memory and a rank assembles the state that it would have saved itself, the same bits
in every layout. Shards of stages 1 and 2 hold, group by group, one contiguous piece of the concatenated parameters;
those of stage 3 a ceil(numel / ranks) piece of each. Not covered: stage 0 (no shards), optimizer states on NVMe.
"""

from __future__ import annotations

import copy
import errno
import os
import pickle
import re
import shutil
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointEngine
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils.tensor_fragment import fragment_address

from finlm.base import checkpoints
from finlm.base.checkpoints import Manifest, Part
from finlm.base.errors import UserError, reason
from finlm.base.rundir import host_name
from finlm.base.units import format_bytes
from finlm.train.zero.engine import lock_pages

SAFE = [fragment_address, LossScaler, DynamicLossScaler, ZeroStageEnum]
FULL_BYTES = 1 << 20  # free on a disk that is full
SMALL_BYTES = 1 << 20  # below it a buffer that stays is not worth its page-locking

State = dict[str, Any]


def load(path: Path, mmap: bool = False) -> State:
    """Return the state in a file of write_files(), on the CPU; with `mmap` tensors are mapped and read when used.

    Executes no pickle: raises UserError for a file that holds anything but tensors, plain values and the classes of
    SAFE; OSError or RuntimeError if it is missing or damaged.
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
    """Write a state to disk as a torch file and fsync it; turn off torch's CRC for good. RuntimeError or OSError."""
    torch.serialization.set_crc32_options(False)  # a slow checksum in the zip; the manifest has sha256
    torch.save(state, path)
    checkpoints.sync_path(path)


def write_files(directory: Path, states: dict[str, State], rank: int, threads: int) -> dict[str, Part]:
    """Write a rank's states, by file name, into `directory`, which it makes; return the Part of each file.

    `threads` hash the files. On OSError or RuntimeError removes the files and raises OSError with the host, the reason
    and the free space.
    """
    paths = [directory / name for name in states]
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for path, state in zip(paths, states.values(), strict=True):
            write(state, path)
        hashes = checkpoints.sha256(paths, threads)
        return {path.name: Part(path.stat().st_size, hashes[path], rank) for path in paths}
    except (OSError, RuntimeError) as error:  # torch's writer hides the number of the system's error
        free = shutil.disk_usage(directory.parent).free
        for path in paths:
            path.unlink(missing_ok=True)
        hidden = os.strerror(errno.ENOSPC) if free < FULL_BYTES else str(error).partition("\n")[0]
        why = reason(error) if isinstance(error, OSError) else hidden
        raise OSError(errno.EIO, f"{host_name()}: {why} ({format_bytes(free)} free)") from None


class Store(CheckpointEngine):  # type: ignore[misc]
    """DeepSpeed's checkpoint engine: save() collects copies of states by file name, load() reads files safely."""

    def __init__(self) -> None:
        """Begin with nothing collected or given; tensors are not copied until `place` is set."""
        super().__init__()
        self.name = "finlm"
        self.place: Callable[[torch.Tensor], torch.Tensor] = torch.Tensor.detach  # copies a tensor for save()
        self.collected: dict[str, State] = {}
        self.given: dict[str, State] = {}  # by file name: load() returns these instead of reading a file
        self.mmap = False  # whether load() maps tensors into memory

    def create(self, info: Any) -> None:
        """Do nothing: there is nothing to prepare."""

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Do nothing: the thread that writes makes directories."""

    def save(self, state_dict: State, path: str) -> None:
        """Keep a copy of state_dict in `collected` under the file name of path; write nothing."""
        self.collected[Path(path).name] = copy_tensors(state_dict, self.place)

    def load(self, path: str, map_location: Any = None) -> State:
        """Return the state in `given` for the path's file name, else load(path) with its errors; read nothing else."""
        given = self.given.get(Path(path).name)
        return load(Path(path), self.mmap) if given is None else given

    def commit(self, info: Any) -> bool:
        """Return True and do nothing: Checkpoints publishes."""
        return True


def copy_tensors(value: Any, place: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return a copy of nested containers with each tensor replaced by place(tensor), called once for the same tensor.

    An Enum becomes its value; all else is copied deeply. Containers are dicts, lists and tuples.
    """
    seen: dict[tuple[Any, ...], torch.Tensor] = {}

    def walk(part: Any) -> Any:
        """Return a copy of `part` and of all that is in it; add tensors met for the first time to `seen`."""
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
        if isinstance(part, Enum):  # Python 3.11.2 pickles it as a call of getattr, which load() refuses
            return part.value
        return copy.deepcopy(part)

    return walk(value)


class Buffers:
    """Host memory for a rank's state, pinned for a GPU, allocated once and reused by every save in the same order."""

    def __init__(self, device: torch.device) -> None:
        """Begin without memory, for tensors on `device`."""
        self.lock_cache = device.type == "cuda"
        self.device = torch.cuda.current_device() if self.lock_cache else None
        self.memory: list[torch.Tensor] = []
        self.next = 0
        self.thread: threading.Thread | None = None

    def reserve(self, sizes: Sequence[int]) -> None:
        """Start a thread that allocates a buffer of each size in bytes; return at once."""
        # While the first steps run: to touch and pin a page costs more than to copy it.
        self.thread = threading.Thread(target=self._allocate, args=(list(sizes),), name="buffers", daemon=True)
        self.thread.start()

    def _allocate(self, sizes: Sequence[int]) -> None:
        """Append a buffer of each size in bytes, filled with zeros, and pinned if there is a GPU."""
        if self.device is not None:  # a thread begins on GPU 0, where locking would open a context of this rank
            torch.cuda.set_device(self.device)
        for size in sizes:
            memory = torch.empty(size, dtype=torch.uint8)
            memory.zero_()  # touched, so that every page exists
            if self.lock_cache:
                memory = lock_pages(memory)
            self.memory.append(memory)

    def begin(self) -> None:
        """Wait for reserve() and start over with the first buffer; what buffers hold must have been written to disk."""
        if self.thread is not None:
            self.thread.join()
            self.thread = None
        self.next = 0

    def place(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy the tensor to the next buffer, allocating it if there is none, and return the copy.

        From a GPU it is complete after torch.cuda.synchronize(). Tensors below SMALL_BYTES get memory of their own.
        Raises RuntimeError when the next buffer has another size than the tensor.
        """
        if tensor.nbytes < SMALL_BYTES:
            return tensor.cpu() if tensor.device.type != "cpu" else tensor.clone()
        if self.next == len(self.memory):
            self._allocate([tensor.nbytes])
        memory = self.memory[self.next]
        if memory.nbytes != tensor.nbytes:
            raise RuntimeError(f"the state's tensors changed: {tensor.nbytes} bytes instead of {memory.nbytes}")
        self.next += 1
        return memory.view(tensor.dtype).view(tensor.shape).copy_(tensor, non_blocking=True)


def sizes_of(states: dict[str, State]) -> tuple[list[int], int]:
    """Return (bytes of each tensor of SMALL_BYTES or more, in the order of copying; bytes of all distinct tensors)."""
    sizes: list[int] = []

    def count(tensor: torch.Tensor) -> torch.Tensor:
        """Note the tensor's bytes, and return it."""
        sizes.append(tensor.nbytes)
        return tensor

    copy_tensors(states, count)
    return [size for size in sizes if size >= SMALL_BYTES], sum(sizes)


KEYS = ("fp32", "exp_avg", "exp_avg_sq")
_SHARD = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_00_optim_states\.pt")


@dataclass(frozen=True)
class Piece:
    """A run of consecutive elements of a flattened parameter in a shard's flat tensors."""

    shard: int
    group: int
    start: int
    numel: int


class Shards:
    """All shards of a checkpoint of ZeRO stages 1 to 3 as one set of whole parameters, read when asked for."""

    def __init__(self, directory: Path, manifest: Manifest) -> None:
        """Map a checkpoint's shards and model states into memory.

        Raises FileNotFoundError for a missing file, and UserError for one that holds code.
        """
        names = {int(match[1]): name for name in manifest.files if (match := _SHARD.fullmatch(name))}
        missing = sorted(set(range(manifest.world_size)) - set(names))
        if missing:
            raise FileNotFoundError(f"{directory} has no shard of rank {', '.join(map(str, missing))}")
        self.optimizer = [
            load(directory / names[rank], mmap=True)["optimizer_state_dict"] for rank in range(manifest.world_size)
        ]
        self.is_cut = three = manifest.zero_stage == 3  # every parameter in pieces
        heads = [f"zero_pp_rank_{rank}_" for rank in range(manifest.world_size)] if three else [""]
        self.models = [load(directory / f"{head}mp_rank_00_model_states.pt", mmap=True) for head in heads]
        self.model = self.models[0]
        self.shapes: dict[str, torch.Size] = {k: v for group in self.model["param_shapes"] for k, v in group.items()}
        self.same: dict[str, str] = dict(self.model["shared_params"])  # tied parameter -> the one that is stored
        self.pieces: dict[str, list[Piece]] = {}
        self.flat = [_flat_tensors(state) for state in self.optimizer]
        for shard, state in enumerate(self.optimizer):
            if three:
                self._index_stage_3(shard, manifest.world_size)
                continue
            for group, fragments in enumerate(state["param_slice_mappings"]):
                for name, fragment in fragments.items():
                    self.pieces.setdefault(name, []).append(Piece(shard, group, fragment.start, fragment.numel))

    def _index_stage_3(self, shard: int, ranks: int) -> None:
        """Add each parameter's piece in this shard of stage 3 to self.pieces."""
        for group, shapes in enumerate(self.model["param_shapes"]):
            start = 0
            for name, shape in shapes.items():
                share = -(-shape.numel() // ranks)
                numel = max(0, min(share, shape.numel() - shard * share))
                self.pieces.setdefault(name, []).append(Piece(shard, group, start, numel))
                start += share

    def read(self, name: str, key: str, start: int, numel: int) -> torch.Tensor:
        """Return elements [start, start + numel) of the flattened parameter `name`: fp32, CPU.

        `key` is of KEYS. Elements past the end are undefined. Raises KeyError for a name that is not trained.
        """
        out = torch.empty(numel, dtype=torch.float32)
        at = 0  # of the parameter
        for piece in self.pieces[name]:
            first, last = max(start, at), min(start + numel, at + piece.numel)
            if first < last:
                flat = self.flat[piece.shard][key][piece.group]
                out[first - start : last - start] = flat[piece.start + first - at : piece.start + last - at]
            at += piece.numel
        return out

    def weight(self, name: str) -> torch.Tensor:
        """Return a trained parameter's whole fp32 master weight in its shape. Raises KeyError for another name."""
        shape = self.shapes[name]
        return self.read(name, "fp32", 0, shape.numel()).view(shape)

    def weights(self) -> dict[str, torch.Tensor]:
        """Return all weights by name, tied ones under both: trained ones in fp32, frozen and buffers as saved."""
        weights = {name: self.weight(name) for name in self.shapes} | self._untrained_tensors()
        return weights | {name: weights[stored] for name, stored in self.same.items()}

    def _untrained_tensors(self) -> dict[str, torch.Tensor]:
        """Return parameters and buffers that are not trained, by name; at stage 3 joined from the ranks' pieces."""
        if not self.is_cut:
            return {name: tensor for name, tensor in self.model["module"].items() if name not in self.shapes}
        frozen = {}
        for name, shape in (self.model["frozen_param_shapes"] or {}).items():
            whole = torch.cat([model["frozen_param_fragments"][name].flatten() for model in self.models])
            frozen[name] = whole[: shape.numel()].view(shape)
        return frozen | {name: self.model["module"][name] for name in self.model["buffer_names"]}

    def step(self) -> float:
        """Return the optimizer's step count, that of group 0."""
        return float(_base_state(self.optimizer[0])["state"][0]["step"])


def _base_state(state: State) -> State:
    """Return the torch optimizer's part of a shard's state, of any stage."""
    base: State = state.get("base_optimizer_state") or state["optimizer_state_dict"]
    return base


def _flat_tensors(state: State) -> dict[str, list[torch.Tensor]]:
    """Return a shard's flat master weights and moments by KEYS, each a list with a tensor for each group."""
    masters = state["fp32_flat_groups" if "fp32_flat_groups" in state else "single_partition_of_fp32_groups"]
    moments = _base_state(state)["state"]
    return {"fp32": list(masters)} | {key: [moments[i][key] for i in range(len(masters))] for key in KEYS[1:]}


def reshard(engine: Any, shards: Shards, rank: int, world_size: int) -> tuple[State, State]:
    """Return (model states, shard) as this rank would have saved them in the engine's layout, with the saved values."""
    module = dict(engine.module.state_dict())  # under ZeRO-3 only place holders: the weights come from the shard
    for name, tensor in module.items() if engine.zero_optimization_stage() < 3 else ():
        if (stored := shards.same.get(name, name)) in shards.shapes:
            module[name] = shards.weight(stored).to(tensor.dtype)
    model = {**shards.model, "dp_world_size": world_size, "module": module}
    return model, _optimizer_state(engine, shards, rank, world_size)


def _optimizer_state(engine: Any, shards: Shards, rank: int, world_size: int) -> State:
    """Return this rank's shard in the engine's layout: the form of the engine's state with the saved values."""
    optimizer, old = engine.optimizer, shards.optimizer[0]
    state: State = optimizer.state_dict()
    state |= {key: old[key] for key in ("loss_scaler", "dynamic_loss_scale", "overflow")}
    if engine.zero_optimization_stage() == 3:
        flat = [_reshard_stage_3(group, shards, rank, world_size) for group in optimizer.fp16_groups]
        state["fp32_flat_groups"], base = [group["fp32"] for group in flat], "optimizer_state_dict"
    else:
        sizes = [partition.numel() for partition in optimizer.single_partition_of_fp32_groups]
        groups = zip(optimizer.bit16_groups, sizes, strict=True)
        flat = [_reshard_partition(optimizer, group, size, shards) for group, size in groups]
        state["single_partition_of_fp32_groups"], base = [group["fp32"] for group in flat], "base_optimizer_state"
    is_torch = type(optimizer.optimizer).__module__.startswith("torch.")  # DeepSpeed's CPU Adam counts in integers
    moments: list[State] = [{key: group[key] for key in KEYS[1:]} for group in flat]
    for each in moments:  # torch counts in place: a tensor that groups share would count each of them
        each["step"] = torch.tensor(shards.step(), dtype=torch.float32) if is_torch else int(shards.step())
    saved = _base_state(old)["param_groups"][0]
    state[base] = {
        "state": dict(enumerate(moments)),
        "param_groups": [
            {**group, **{key: saved[key] for key in ("lr", "step") if key in saved and key in group}}
            for group in state[base]["param_groups"]
        ],
    }
    return {"optimizer_state_dict": state}


def _reshard_partition(optimizer: Any, parameters: list[Any], size: int, shards: Shards) -> dict[str, torch.Tensor]:
    """Return this rank's partition of a group at stages 1 and 2 by KEYS, flat fp32 [size], padded by zeros."""
    flat = {key: torch.zeros(size, dtype=torch.float32) for key in KEYS}
    for parameter in parameters:
        if parameter._hp_mapping is None:  # none of it is on this rank
            continue
        name = optimizer.param_names[parameter]
        here, whole = parameter._hp_mapping.hp_fragment_address, parameter._hp_mapping.lp_fragment_address
        for key in KEYS:
            flat[key][here.start : here.start + here.numel] = shards.read(name, key, whole.start, whole.numel)
    return flat


def _reshard_stage_3(parameters: list[Any], shards: Shards, rank: int, world_size: int) -> dict[str, torch.Tensor]:
    """Return this rank's partition of a sub-group at stage 3: a flat fp32 tensor by KEYS; padding is zero."""
    cut: dict[str, list[torch.Tensor]] = {key: [] for key in KEYS}
    for parameter in parameters:
        name = parameter._z3_optimizer.param_names[parameter]
        share = -(-parameter.ds_numel // world_size)
        numel = max(0, min(share, parameter.ds_numel - rank * share))
        for key in KEYS:
            values = shards.read(name, key, rank * share, numel)
            cut[key].append(torch.nn.functional.pad(values, (0, share - numel)))
    return {key: torch.cat(parts) for key, parts in cut.items()}


def has_groups(engine: Any, model_states: Path) -> bool:
    """Return whether `model_states` has the engine's parameter groups, by name and order. Raises as load() does."""
    saved = load(model_states, mmap=True)["param_shapes"]
    return [list(group) for group in engine._get_zero_param_shapes()] == [list(group) for group in saved]


def free_moments(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Drop Adam's moments from the optimizer and the views of them that DeepSpeed put on the model's parameters.

    Call it before a load: after a rollback, torch would build the loaded ones beside them, 8 bytes a parameter of a
    rank's share, which no plan counts.
    """
    for parameter in model.parameters():
        if (mapping := getattr(parameter, "_hp_mapping", None)) is not None and mapping.optim_fragment:
            mapping.optim_fragment.clear()
    optimizer.state.clear()


def replay_powers(optimizer: Any) -> None:
    """Bring a CPU Adam of DeepSpeed to the powers of its betas that it had when the loaded checkpoint was written."""
    if not hasattr(optimizer, "ds_opt_adam"):
        return
    # It keeps the powers in C++ as products of one factor a step and, after a load, computes the next ones by pow():
    # other last bits in every weight (cpu_adam.h, IncrementStep). So as many steps of a single element as were taken go
    # through the same products: 1 us each.
    group = optimizer.param_groups[0]
    settings = group["lr"], *group["betas"], group["eps"], group["weight_decay"], group["bias_correction"]
    scratch = [torch.zeros(1) for _ in range(4)]  # weight, gradient, moments
    for step in range(1, max((int(state["step"]) for state in optimizer.state.values() if state), default=0) + 1):
        optimizer.ds_opt_adam.adam_update(optimizer.opt_id, step, *settings, *scratch)
