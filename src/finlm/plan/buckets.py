"""Element counts of DeepSpeed's buffers and of the groups its optimizer steps: what memory and config.py agree on."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from typing import Literal, TypeVar

from finlm.recipe.shape import ModelShape

Offload = Literal["none", "stream", "cpu", "nvme"]
OffloadParam = Literal["none", "cpu", "nvme"]

Member = TypeVar("Member")

ON_HOST = ("cpu", "nvme")  # offload whose optimizer steps on the host's cores; with "stream" the GPU steps
OPTIMIZER_GROUP = 500_000_000  # parameters that a rank steps at once at DeepSpeed's stages 1 and 2
STREAM_GROUP = 70_000_000  # that pass through its GPU together: a matrix or four of a 7B model
STREAM_SETS = 3  # groups on the GPU at once: one comes, one is stepped, one goes


@dataclass(frozen=True)
class Buckets:
    """Element counts of DeepSpeed's buffers; config.py writes the same numbers into the JSON."""

    reduce: int
    allgather: int
    prefetch: int
    persistence: int
    live: int
    sub_group: int


def buckets(stage: int, offload_optimizer: Offload, shape: ModelShape) -> Buckets:
    """Large buckets where memory is not the point (stages 1, 2), DeepSpeed's defaults where it is; <= the model."""
    cap = max(shape.parameters, 1)
    reduce = 200_000_000 if stage == 3 or offload_optimizer != "none" else 500_000_000
    return Buckets(
        reduce=min(reduce, cap),
        allgather=min(500_000_000, cap),
        # A layer is gathered as a whole and the next must fit: DeepSpeed's 50 million are a quarter of XuanYuan-6B's.
        prefetch=min(max(50_000_000, int(1.1 * shape.layer_parameters)), cap),
        persistence=min(10 * shape.hidden, cap),  # norms stay whole, matrices are partitioned; the rule of transformers
        live=min(1_000_000_000, cap),
        sub_group=100_000_000 if offload_optimizer == "nvme" else 1_000_000_000,
    )


def optimizer_group(offload_optimizer: Offload, world_size: int) -> int:
    """Most parameters of a group, of which each rank steps its part, unless a single matrix has more."""
    return world_size * (STREAM_GROUP if offload_optimizer == "stream" else OPTIMIZER_GROUP)


@cache
def most_reduced(shape: ModelShape, group: int, world_size: int) -> int:
    """Elements of the gradients that the fullest rank keeps after their reduction at stages 1 and 2.

    Each group is cut into equal parts wherever that falls, and DeepSpeed keeps whole every matrix it has a part of.
    """
    kept = [0] * world_size
    for members in grouped(shape.sizes, group, lambda size: size):
        part, start = -(-sum(members) // world_size), 0
        for size in members:
            for rank in range(start // part, (start + size - 1) // part + 1):
                kept[rank] += size
            start += size
    return max(kept)


def grouped(members: Iterable[Member], most: int, size: Callable[[Member], int]) -> list[list[Member]]:
    """The members in order, in groups of at most so many elements, or of one member."""
    groups: list[list[Member]] = []
    total = 0
    for member in members:
        if not groups or total + size(member) > most:
            groups.append([])
            total = 0
        groups[-1].append(member)
        total += size(member)
    return groups


def is_contiguous(stage: int, world_size: int, offload_optimizer: Offload) -> bool:
    """Whether DeepSpeed copies gradients into buckets while the backward pass runs (contiguous_gradients).

    On one GPU at stage 1 there is nothing to reduce, and the copy of all gradients would be made while activations
    still live: 12 GiB of XuanYuan-6B.
    """
    return stage > 1 or (stage == 1 and (world_size > 1 or offload_optimizer in ON_HOST))
