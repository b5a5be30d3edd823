"""Rows of a micro-step over unequal GPUs: each kind's micro-batch, so that all are done at about the same time.

Ranks wait for each other in every micro-step (ZeRO-2, 3) or step (ZeRO-1), so the slowest rank sets the speed, and all
take the same number of micro-steps. The loss is divided by the labels of all ranks, so who reads how many rows does not
change the gradient.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence

from finlm.plan import gpus
from finlm.plan.plan import PlanError
from finlm.recipe.cluster import Cluster, Host
from finlm.recipe.schema import Recipe


def given(recipe: Recipe, cluster: Cluster) -> tuple[int, ...] | None:
    """The micro-batch of each host where the recipe fixes it; None for auto. Raises PlanError."""
    wanted = recipe.batch.micro_batch
    if wanted == "auto":
        return None
    if isinstance(wanted, int):
        return (wanted,) * len(cluster.hosts)
    keys = [_key(wanted, host) for host in cluster.hosts]
    named = zip(cluster.hosts, keys, strict=True)
    without = [f"{host.name} ({host.gpu or 'CPU ranks'})" for host, key in named if key is None]
    unused = [key for key in wanted if key not in keys]
    if without or unused:
        raise PlanError(
            "batch.micro_batch does not match the hosts",
            evidence="\n".join(
                [f"nothing for {', '.join(without)}"] * bool(without)
                + [f"no host is called, or has GPUs called, {', '.join(unused)}"] * bool(unused)
            ),
            fix="give rows for every host name or GPU kind of the cluster, one number for all, or auto",
        )
    return tuple(wanted[key] for key in keys if key)


def _key(wanted: dict[str, int], host: Host) -> str | None:
    """The entry for a host: its name's, else its GPU kind's."""
    if host.name in wanted:
        return host.name
    kind = gpus.find(host.gpu).name if host.gpu else None
    return next((key for key in wanted if kind and key.casefold() == kind.casefold()), None)


def rows(micro_batches: Sequence[int], cluster: Cluster) -> int:
    """Rows of a micro-step over all ranks."""
    return sum(own * host.slots for own, host in zip(micro_batches, cluster.hosts, strict=True))


def balanced(ranks: Sequence[int], seconds: Sequence[Sequence[float]], wanted: int) -> tuple[int, ...] | None:
    """The micro-batch of each kind of GPU with which `wanted` rows over all ranks take the least time.

    ranks: of each kind. seconds[kind][m - 1]: of a micro-batch of m rows, rising; as many as fit its memory. None when
    no numbers of rows make the sum.
    """
    for limit in sorted(value for kind in seconds for value in kind):
        most = [bisect.bisect_right(kind, limit) for kind in seconds]
        total = sum(count * own for count, own in zip(ranks, most, strict=True))
        if total >= wanted and all(most) and (found := _lowered(most, ranks, total - wanted)):
            return found
    return None


def _lowered(most: Sequence[int], ranks: Sequence[int], excess: int) -> tuple[int, ...] | None:
    """`most`, lowered by `excess` rows over all ranks and to 1 at least; None where ranks do not divide it."""
    if not most:
        return None if excess else ()
    for fewer in range(min(most[0] - 1, excess // ranks[0]) + 1):
        rest = _lowered(most[1:], ranks[1:], excess - fewer * ranks[0])
        if rest is not None:
            return (most[0] - fewer, *rest)
    return None
