"""The environment of the ranks of a host: what finlm sets, and the recipe's own on top."""

from __future__ import annotations

import math
from collections.abc import Mapping

from finlm.plan.buckets import ON_HOST
from finlm.plan.plan import Plan
from finlm.recipe.cluster import Host
from finlm.recipe.schema import Recipe

# Read when CUDA and NCCL start. A ring adds in the order of the ranks; trees and the switches of NVLink may not.
DETERMINISTIC = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NCCL_ALGO": "Ring", "NCCL_NVLS_ENABLE": "0"}

# ZeRO-3 moves weights and gradients while matrix products run. NCCL takes SMs from these, and a product laid out for
# all SMs then takes a second turn: with few, two H200s train 27,806 tokens/s instead of 27,144 (LOGBOOK.md). Few are
# slower too, so only where a layer's arithmetic is long.
FEW_SMS = {"NCCL_MAX_CTAS": "4"}
FEW_SMS_FROM_TOKENS = 16_384  # of a micro-batch


def host_env(
    recipe: Recipe, plan: Plan, host: Host, cores: int | None = None, network: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Time limits, threads, network, then the recipe's and the host's own. cores: the host's, where known."""
    longest = max(recipe.launch.start_minutes, recipe.launch.stall_minutes)
    env = {
        "DS_SKIP_CUDA_CHECK": "1",  # nvcc may be newer than torch's CUDA within a major version
        "TOKENIZERS_PARALLELISM": "false",
        "DEEPSPEED_TIMEOUT": str(math.ceil(longest) + 1),  # minutes; the watchdog comes first and says more
    }
    if plan.device == "cpu":
        env["OMP_NUM_THREADS"] = str(max(1, (cores or 1) // host.slots))
    else:
        env["OMP_NUM_THREADS"] = "16" if plan.offload_optimizer in ON_HOST else "4"
        env["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
        tokens = plan.micro_batch * plan.sequence_length
        if plan.zero_stage == 3 and len(plan.hosts) == 1 and tokens >= FEW_SMS_FROM_TOKENS:
            env |= FEW_SMS
        if recipe.train.deterministic:
            env |= DETERMINISTIC
    return env | dict(network or {}) | recipe.env | host.access.env
