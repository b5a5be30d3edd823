"""One limit for every wait in a collective, on DeepSpeed's own process groups too; small exchanges between ranks.

`deepspeed.init_distributed` gives its limit (DEEPSPEED_TIMEOUT, minutes) to the world group only; ZeRO's groups come
from `torch.distributed.new_group(ranks)` with torch's 30 minutes for gloo and 10 for NCCL. Measured with the network
cable cut under ZeRO-1: 930 s until an error with the defaults.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

from deepspeed.constants import default_pg_timeout
from torch import distributed


def limit_waiting() -> None:
    """Give process groups made from now on DeepSpeed's limit, unless their maker names another."""
    distributed.new_group = functools.partial(distributed.new_group, timeout=default_pg_timeout)


def gathered(value: Any) -> list[Any]:
    """Every rank's value, in order, on every rank."""
    every: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(every, value)
    return every


def sharing(directory: Path) -> list[int]:
    """The ranks that see this rank's `directory` (hosts may share a disk or have their own), in order.

    Every rank leaves a mark with a name of this moment, which also keeps a network disk from answering from its cache.
    """
    directory.mkdir(parents=True, exist_ok=True)
    moment = gathered(os.urandom(8).hex())[0]
    marks = [directory / f".rank-{rank}.{moment}" for rank in range(distributed.get_world_size())]
    own = marks[distributed.get_rank()]
    own.touch()
    distributed.barrier()
    seen = [rank for rank, mark in enumerate(marks) if mark.exists()]
    distributed.barrier()
    own.unlink(missing_ok=True)  # the first of them may be cleaning up already
    return seen
