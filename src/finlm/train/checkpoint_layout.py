"""A ZeRO checkpoint read as whole parameters, and cut again for another number of ranks or another ZeRO stage.

DeepSpeed's universal checkpoint does the same through a converted copy on disk: three times the bytes, a file for every
parameter and moment, each unpickled without weights_only. Here the shards are mapped into memory, a rank assembles the
state that it would have saved itself, and DeepSpeed loads that; nothing is written. The order of elements is the
parameter's own, so the numbers are the same bits in every layout.

Shards of stages 1 and 2 hold, group by group, one contiguous piece of the concatenated parameters a rank; those of
stage 3 hold a ceil(numel / ranks) piece of every parameter. Not covered: stage 0 (no shards), optimizer states on NVMe.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from finlm.base.checkpoints import Manifest
from finlm.train.checkpoint_store import State, load

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
    """All shards of a checkpoint of ZeRO stages 1 to 3 as one set of whole parameters."""

    def __init__(self, directory: Path, manifest: Manifest) -> None:
        names = {int(found[1]): name for name in manifest.files if (found := _SHARD.fullmatch(name))}
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
        self.flat = [_flat(state) for state in self.optimizer]
        for shard, state in enumerate(self.optimizer):
            if three:
                self._index_three(shard, manifest.world_size)
            else:
                self._index_one(shard, state["param_slice_mappings"])

    def _index_one(self, shard: int, mappings: list[dict[str, Any]]) -> None:
        for group, fragments in enumerate(mappings):
            for name, fragment in fragments.items():
                self.pieces.setdefault(name, []).append(Piece(shard, group, fragment.start, fragment.numel))

    def _index_three(self, shard: int, ranks: int) -> None:
        for group, shapes in enumerate(self.model["param_shapes"]):
            start = 0
            for name, shape in shapes.items():
                share = -(-shape.numel() // ranks)
                numel = max(0, min(share, shape.numel() - shard * share))
                self.pieces.setdefault(name, []).append(Piece(shard, group, start, numel))
                start += share

    def read(self, name: str, key: str, start: int, numel: int) -> torch.Tensor:
        """Elements [start, start + numel) of a flattened parameter's master weight or moment: fp32, on the CPU."""
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
        """A parameter's whole fp32 master weight in its shape."""
        shape = self.shapes[name]
        return self.read(name, "fp32", 0, shape.numel()).view(shape)

    def weights(self) -> dict[str, torch.Tensor]:
        """All by name, tied ones under both of their names; what was frozen in the precision it had."""
        found = {name: self.weight(name) for name in self.shapes} | self._frozen()
        return found | {name: found[stored] for name, stored in self.same.items()}

    def _frozen(self) -> dict[str, torch.Tensor]:
        """Parameters and buffers that no optimizer has: whole beside the shards, or cut like them at stage 3."""
        if not self.is_cut:
            return {name: tensor for name, tensor in self.model["module"].items() if name not in self.shapes}
        found = {}
        for name, shape in (self.model["frozen_param_shapes"] or {}).items():
            whole = torch.cat([model["frozen_param_fragments"][name].flatten() for model in self.models])
            found[name] = whole[: shape.numel()].view(shape)
        return found | {name: self.model["module"][name] for name in self.model["buffer_names"]}

    def step(self) -> float:
        """The optimizer's own step count."""
        return float(_base(self.optimizer[0])["state"][0]["step"])


def _base(state: State) -> State:
    """The torch optimizer's part of a shard."""
    found: State = state.get("base_optimizer_state") or state["optimizer_state_dict"]
    return found


def _flat(state: State) -> dict[str, list[torch.Tensor]]:
    """A shard's flat tensors, one a group."""
    masters = state["fp32_flat_groups" if "fp32_flat_groups" in state else "single_partition_of_fp32_groups"]
    moments = _base(state)["state"]
    return {"fp32": list(masters)} | {key: [moments[i][key] for i in range(len(masters))] for key in KEYS[1:]}


def model_state(engine: Any, shards: Shards, world_size: int) -> State:
    """What this rank would read as model states, in the engine's layout."""
    state = {**shards.model, "dp_world_size": world_size}
    if engine.zero_optimization_stage() == 3:  # the weights come from the shards; here are only place holders
        return state | {"module": engine.module.state_dict()}
    module = engine.module.state_dict()
    return state | {"module": {name: _weight_like(shards, name, tensor) for name, tensor in module.items()}}


def _weight_like(shards: Shards, name: str, tensor: torch.Tensor) -> torch.Tensor:
    stored = shards.same.get(name, name)
    return shards.weight(stored).to(tensor.dtype) if stored in shards.shapes else tensor


def optimizer_state(engine: Any, shards: Shards, rank: int, world_size: int) -> State:
    """What this rank would have saved as its shard in the engine's layout: the live one's form, the old values."""
    optimizer, old = engine.optimizer, shards.optimizer[0]
    state: State = optimizer.state_dict()
    state |= {key: old[key] for key in ("loss_scaler", "dynamic_loss_scale", "overflow")}
    if engine.zero_optimization_stage() == 3:
        flat = [_cut_three(group, shards, rank, world_size) for group in optimizer.fp16_groups]
        state["fp32_flat_groups"], base = [group["fp32"] for group in flat], "optimizer_state_dict"
    else:
        sizes = [partition.numel() for partition in optimizer.single_partition_of_fp32_groups]
        groups = zip(optimizer.bit16_groups, sizes, strict=True)
        flat = [_cut_one(optimizer, group, size, shards) for group, size in groups]
        state["single_partition_of_fp32_groups"], base = [group["fp32"] for group in flat], "base_optimizer_state"
    is_torch = type(optimizer.optimizer).__module__.startswith("torch.")  # DeepSpeed's CPU Adam counts in integers
    moments: list[dict[str, Any]] = [{key: group[key] for key in KEYS[1:]} for group in flat]
    for each in moments:  # torch counts in place: a tensor that groups share would count each of them
        each["step"] = torch.tensor(shards.step(), dtype=torch.float32) if is_torch else int(shards.step())
    former = _base(old)["param_groups"][0]
    state[base] = {
        "state": dict(enumerate(moments)),
        "param_groups": [
            {**group, **{key: former[key] for key in ("lr", "step") if key in former and key in group}}
            for group in state[base]["param_groups"]
        ],
    }
    return {"optimizer_state_dict": state}


def _cut_one(optimizer: Any, parameters: list[Any], size: int, shards: Shards) -> dict[str, torch.Tensor]:
    """This rank's partition of a group at stages 1 and 2; padding is zero."""
    flat = {key: torch.zeros(size, dtype=torch.float32) for key in KEYS}
    for parameter in parameters:
        if parameter._hp_mapping is None:  # none of it is on this rank
            continue
        name = optimizer.param_names[parameter]
        own, whole = parameter._hp_mapping.hp_fragment_address, parameter._hp_mapping.lp_fragment_address
        for key in KEYS:
            flat[key][own.start : own.start + own.numel] = shards.read(name, key, whole.start, whole.numel)
    return flat


def _cut_three(parameters: list[Any], shards: Shards, rank: int, world_size: int) -> dict[str, torch.Tensor]:
    """This rank's partition of a sub-group at stage 3; padding is zero."""
    cut: dict[str, list[torch.Tensor]] = {key: [] for key in KEYS}
    for parameter in parameters:
        name = parameter._z3_optimizer.param_names[parameter]
        share = -(-parameter.ds_numel // world_size)
        numel = max(0, min(share, parameter.ds_numel - rank * share))
        for key in KEYS:
            values = shards.read(name, key, rank * share, numel)
            cut[key].append(torch.nn.functional.pad(values, (0, share - numel)))
    return {key: torch.cat(parts) for key, parts in cut.items()}
