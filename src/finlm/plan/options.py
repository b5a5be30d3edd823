"""The best candidates side by side: what each needs, how fast it is, and why it was not taken.

Of the candidates that differ only in their micro-batch the fastest that fits stands for all, or the smallest when none
fits.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from finlm.base.units import format_bytes
from finlm.plan import search
from finlm.plan.search import Candidate

MOST = 5


@dataclass(frozen=True)
class Option:
    """One candidate in numbers and its verdict in words."""

    zero_stage: int
    offload_optimizer: str
    offload_param: str
    recompute: str
    micro_batch: int
    gradient_accumulation_steps: int
    gpu_bytes: int
    host_bytes: int
    tokens_per_second: float | None
    fits: bool
    verdict: str

    def to_json(self) -> dict[str, Any]:
        """A JSON-able dict."""
        return dataclasses.asdict(self)


def best(found: Iterable[Candidate], chosen: Candidate) -> list[Option]:
    """The chosen one, then the others: those that fit by speed, then the fastest that do not fit."""
    groups: dict[tuple[object, ...], list[Candidate]] = {}
    for one in found:
        layout = one.layout
        key = (layout.zero_stage, layout.offload_optimizer, layout.offload_param, layout.recompute)
        groups.setdefault(key, []).append(one)
    mine = chosen.layout
    groups.pop((mine.zero_stage, mine.offload_optimizer, mine.offload_param, mine.recompute), None)
    stand = [_stands(group) for group in groups.values()]
    fitting = sorted((one for one in stand if one.fits), key=lambda one: (not one.is_roomy, *_slowness(one)))
    faster = [one for one in stand if not one.fits and _slowness(one) < _slowness(chosen)]
    faster.sort(key=lambda one: one.over)
    kept = fitting[: MOST - 1 - min(1, len(faster))]
    kept += faster[: MOST - 1 - len(kept)]
    return [_option(one, chosen) for one in (chosen, *kept)]


def _stands(group: list[Candidate]) -> Candidate:
    fitting = [one for one in group if one.fits]
    return search.best(fitting) if fitting else min(group, key=lambda one: one.over)


def _slowness(one: Candidate) -> tuple[float, tuple[int, ...]]:
    return -(one.tokens_per_second or 0.0), one.complexity


def _option(one: Candidate, chosen: Candidate) -> Option:
    layout = one.layout
    return Option(
        zero_stage=layout.zero_stage,
        offload_optimizer=layout.offload_optimizer,
        offload_param=layout.offload_param,
        recompute=layout.recompute,
        micro_batch=layout.micro_batch,
        gradient_accumulation_steps=one.accumulation,
        gpu_bytes=one.gpu_bytes,
        host_bytes=one.host_bytes,
        tokens_per_second=one.tokens_per_second,
        fits=one.fits,
        verdict=_verdict(one, chosen),
    )


def _verdict(one: Candidate, chosen: Candidate) -> str:
    if one is chosen:
        return "taken"
    if not one.fits:
        need = [f"{format_bytes(one.gpu_bytes)} of {format_bytes(one.gpu_limit)} a GPU"] if one.gpu_limit else []
        if one.host_limit and one.host_bytes > one.host_limit:
            need = [f"{format_bytes(one.host_bytes)} of {format_bytes(one.host_limit)} usable host memory"]
        return f"does not fit: {need[0]}" if need else "does not fit"
    if not one.tokens_per_second or not chosen.tokens_per_second:
        return "fits too; has more moving parts"
    times = one.tokens_per_second / chosen.tokens_per_second
    if not one.is_roomy and times > 1 - search.NEARLY_EQUAL:
        return "fits without a margin"
    if abs(times - 1) < search.NEARLY_EQUAL:
        return "as fast, with more moving parts" if one.complexity > chosen.complexity else "as fast"
    if times < 1:
        return f"{1 - times:.0%} slower"
    is_doubted = one.layout.offload_optimizer != "none" and chosen.layout.offload_optimizer == "none"
    return f"{times - 1:.0%} faster{', if the host keeps up' if is_doubted else ': the recipe says otherwise'}"
