"""What a rank of every stage does alike: it joins the others, says what it runs on, and knows what is due."""

from __future__ import annotations

import os
from typing import Any

import deepspeed
import torch
import transformers
from torch import distributed

from finlm.plan.plan import Plan
from finlm.recipe.schema import Recipe
from finlm.train import cores, determinism


def join(recipe: Recipe, plan: Plan) -> int:
    """Device, process group and seeds of this rank; its number. RuntimeError when the plan has other ranks."""
    if plan.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        cores.bind(plan)
    else:
        # DeepSpeed compiles a shared-memory collective for CPU ranks at every first start (25-48 s, needs g++ and
        # ninja); gloo gives the same bits, and the hundred microseconds it would save do not matter here.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend="nccl" if plan.device == "cuda" else "gloo", verbose=False)
    world_size = distributed.get_world_size()
    if world_size != plan.world_size:
        raise RuntimeError(f"{world_size} ranks were started, the plan has {plan.world_size}")
    determinism.seed_all(recipe.train.seed)
    if recipe.train.deterministic:
        determinism.switch_on()
    return distributed.get_rank()


def versions(plan: Plan) -> dict[str, Any]:
    """Software and size facts of the start row."""
    return {
        "world_size": plan.world_size,
        "device": torch.cuda.get_device_name() if plan.device == "cuda" else "cpu",
        "torch": torch.__version__,
        "deepspeed": deepspeed.__version__,
        "transformers": transformers.__version__,
        "parameters": plan.parameters,
    }


def is_due(step: int, every: int | None) -> bool:
    """True at multiples of every; never when it is None."""
    return every is not None and step % every == 0
