"""Compare the gradients of ranks that read the same rows: a GPU that computes wrongly raises no error.

Deterministic kernels (CPUs, train.deterministic) give the same bits on every rank. Others add in an order that changes
from one call to the next, as the backward pass of cuDNN's attention does; there norms of gradients are compared.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import distributed

from finlm.plan.plan import Plan
from finlm.train.batches import Batches
from finlm.train.incidents import Incident, rank_hosts

BITS = {2: torch.int16, 4: torch.int32}
# Where kernels vary, norms may differ by a share of the larger and one of the largest of all weights': gradients next
# to zero are rounding. Chosen, not measured: another order of addition changes the last bits of few numbers.
RELATIVE, ABSOLUTE = 0.05, 1e-3


class Twins:
    """Compares the gradients of ranks with equal GPUs; every rank calls the same methods in the same steps."""

    def __init__(
        self, every_steps: int | None, plan: Plan, rank: int, module: torch.nn.Module, batches: Batches
    ) -> None:
        """Form the rings; check() does nothing at ZeRO-3, without a ring, or when every_steps is None."""
        self._every, self._plan, self._rank = every_steps, plan, rank
        self._module, self._batches = module, batches
        named = [(name, weight) for name, weight in module.named_parameters() if weight.requires_grad]
        self._names, self._weights = [name for name, _ in named], [weight for _, weight in named]
        self._rings = rings(plan)
        self._is_exact = self._weights[0].device.type == "cpu" or torch.are_deterministic_algorithms_enabled()
        self._is_proven = not self._is_exact  # that these kernels give the same bits twice, where they promise it
        if plan.zero_stage == 3 or not self._rings:
            self._every = None

    def check(self, step: int, data_step: int) -> Incident | None:
        """Every every_steps steps, compare neighbours' gradients of the step's first micro-batches; collective.

        Returns an incident if they differ, else None. Where bits are compared the first check also computes each rank's
        gradients twice: if the bits differ, that is the incident, and checks end. `data_step` is the step whose data
        this step read.
        """
        if self._every is None or step % self._every:
            return None
        ring = next((ring for ring in self._rings if self._rank in ring), (self._rank,))
        before = ring[ring.index(self._rank) - 1]
        measured = self._measure(data_step, self._rank)
        again = measured if self._is_proven else self._measure(data_step, self._rank)
        seen = torch.stack((measured, again, self._measure(data_step, before)))
        every = [torch.empty_like(seen) for _ in range(self._plan.world_size)]
        distributed.all_gather(every, seen)
        return self._judge(torch.stack(every).cpu())

    def _judge(self, seen: torch.Tensor) -> Incident | None:
        """Return an incident that names the ranks whose gradients differ, or None.

        `seen` is [ranks, 3, weights]: what _measure() returned for each rank's micro-batch, for it once more, and for
        the previous rank's. Ends the checks where deterministic kernels vary.
        """
        where = rank_hosts(self._plan)
        if not self._is_proven:
            unlike = [rank for rank in range(len(seen)) if self._differ(seen[rank, 0], seen[rank, 1]).any()]
            if unlike:
                self._every = None
                detail = (
                    f"rank {unlike[0]} on {where[unlike[0]]} gives other bits for the same micro-batch, though its "
                    "kernels are deterministic: test it; ranks are not compared in this run"
                )
                return Incident("gradients differ from one computation to the next", detail)
            self._is_proven = True
        for ring in self._rings:
            differing = {rank: self._differ(seen[rank, 2], seen[ring[place - 1], 0]) for place, rank in enumerate(ring)}
            odd = odd_ranks(ring, [bool(mask.any()) for mask in differing.values()])
            if odd:
                mask = torch.stack(list(differing.values())).any(dim=0)
                first = self._names[int(mask.nonzero()[0])]
                names = " and ".join(f"rank {rank} on {where[rank]}" for rank in odd)
                detail = (
                    f"{int(mask.sum())} of {len(mask)} gradients of the same micro-batch differ on its neighbours, "
                    f"{first} first. Weights since the last good comparison may be spoilt: test the GPU "
                    "(`dcgmi diag -r 3`), leave the host out, and go on from a checkpoint before"
                )
                if len(odd) == 1:
                    return Incident(f"{names} computes wrongly", detail)
                return Incident(f"{names} compute different gradients", f"{detail}; no third rank tells which is wrong")
        return None

    def _measure(self, data_step: int, rank: int) -> torch.Tensor:
        """Return a number of each weight's gradient for the first micro-batch of `rank`, [weights].

        It is the sum of its bits, int64, or where kernels vary its norm, fp64.
        """
        summed = self._module(*self._batches.read_first(data_step, rank))
        # Not backward(): the engine's hooks, which would add to its gradients, do not run.
        gradients = torch.autograd.grad(summed, self._weights)
        if self._is_exact:
            return torch.stack([each.view(BITS[each.element_size()]).sum(dtype=torch.int64) for each in gradients])
        return torch.stack([each.norm(dtype=torch.float32).double() for each in gradients])

    def _differ(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """Return for each weight whether what two ranks measured differs by more than kernels may: bool [weights]."""
        if self._is_exact:
            return a != b
        larger = torch.maximum(a, b).nan_to_num(0.0, posinf=0.0)
        is_near = (a - b).abs() <= RELATIVE * larger + ABSOLUTE * larger.max()
        return ~is_near & (a.isfinite() | b.isfinite())  # an overflow of both is the same


def rings(plan: Plan) -> list[tuple[int, ...]]:
    """Return the rings of at least two ranks that have the same GPU kind (None = CPU) and equal micro-batches."""
    kinds: dict[tuple[str | None, int], list[int]] = {}
    gpus = [host.gpu for host in plan.hosts for _ in range(host.slots)]
    for rank, kind in enumerate(zip(gpus, plan.rank_micro_batches, strict=True)):
        kinds.setdefault(kind, []).append(rank)
    return [tuple(ranks) for ranks in kinds.values() if len(ranks) > 1]


def odd_ranks(ring: Sequence[int], disagrees: Sequence[bool]) -> list[int]:
    """Return the ranks that disagree with both neighbours, else all that disagree with either; [] if none do.

    disagrees[i] tells whether rank ring[i] got other gradients for the previous rank's micro-batch than that rank.
    """
    behind = [*disagrees[1:], disagrees[0]]
    both = [rank for rank, left, right in zip(ring, disagrees, behind, strict=True) if left and right]
    return both or [rank for rank, left, right in zip(ring, disagrees, behind, strict=True) if left or right]
