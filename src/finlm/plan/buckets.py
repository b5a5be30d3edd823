"""Sizes of DeepSpeed's buffers, and what its ranks keep of the gradients that pass through them; without torch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from finlm.plan.plan import Offload, group_members
from finlm.recipe.shape import ModelShape


@dataclass(frozen=True)
class Buckets:
    """Element counts of DeepSpeed's buffers; config.py writes the same numbers into the JSON."""

    reduce: int
    allgather: int
    prefetch: int
    persistence: int
    live: int
    sub_group: int


def sizes(stage: int, offload_optimizer: Offload, shape: ModelShape) -> Buckets:
    """Return DeepSpeed's buffer sizes in elements: large at stages 1 and 2, its defaults at stage 3; <= the model."""
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


@cache
def most_reduced(shape: ModelShape, group: int, world_size: int) -> int:
    """Return the elements of gradients that the fullest rank keeps after reduction at stages 1 and 2.

    Each group is cut into equal parts wherever that falls, and DeepSpeed keeps whole every matrix it has a part of.
    """
    kept = [0] * world_size
    for members in group_members(shape.sizes, group, lambda size: size):
        part, start = -(-sum(members) // world_size), 0
        for size in members:
            for rank in range(start // part, (start + size - 1) // part + 1):
                kept[rank] += size
            start += size
    return max(kept)
