"""One limit for every wait in a collective, on DeepSpeed's own process groups too.

`deepspeed.init_distributed` gives its limit (DEEPSPEED_TIMEOUT, minutes) to the world group only; ZeRO's groups come
from `torch.distributed.new_group(ranks)` with torch's 30 minutes for gloo and 10 for NCCL. Measured with the network
cable cut under ZeRO-1: 930 s until an error with the defaults.
"""

from __future__ import annotations

import functools

from deepspeed.constants import default_pg_timeout
from torch import distributed


def limit_waiting() -> None:
    """Give process groups made from now on DeepSpeed's limit, unless their maker names another."""
    distributed.new_group = functools.partial(distributed.new_group, timeout=default_pg_timeout)
