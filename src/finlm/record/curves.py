"""Curves small enough to mail: what report.js draws, from a run's history.

100,000 steps become at most 3,000 points a curve: the lowest and the highest value of every bucket, so that no spike
disappears. The moving average is taken before, over all steps. In a terminal a curve is a line of blocks.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from finlm.record.history import History, Points, is_number

BLOCKS = "▁▂▃▄▅▆▇█"


def spark(values: Sequence[float], low: float, high: float, width: int = 48) -> str:
    """A curve as blocks of eight heights between low and high: the mean of each of at most `width` parts."""
    count = min(width, len(values))
    ends = [round(number * len(values) / count) for number in range(count + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in itertools.pairwise(ends)]
    scale = (len(BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(BLOCKS[round((mean - low) * scale)] for mean in means)


def charts(history: History) -> Iterator[dict[str, Any]]:
    """What report.js draws; a chart without points is left out."""
    loss = history.points("loss")
    if loss:
        yield {"title": "Training loss", "series": _noisy("loss", loss), "zero": False}
    if len(history.trained) > 1:
        series = [_series(name, smooth(points), "other") for name, points in history.trained.items()]
        yield {"title": "Training loss by source, smoothed", "series": series, "zero": False}
    by_source = history.held_out()
    if by_source:
        series = [_series(name, points, "other") for name, points in by_source.items()]
        total = [(row["step"], row["loss"]) for row in history.evals if is_number(row.get("loss"))]
        if len(by_source) > 1:
            series.append(_series("all sources", total, "main"))
        else:
            series[0]["style"] = "main"
        yield {"title": "Held-out loss", "series": series, "zero": False, "marks": True}
    for key, title, is_noisy in (
        ("accuracy", "Pairs in the right order", True),
        ("margin", "Margin between chosen and rejected", True),
        ("reward", "Reward of own answers", True),
        ("lr", "Learning rate", False),
        ("grad_norm", "Gradient norm", True),
        ("tokens_per_second", "Tokens a second", True),
        ("loss_scale", "Loss scale", False),
    ):
        points = history.points(key)
        if points:
            yield {
                "title": title,
                "series": _noisy(key, points) if is_noisy else [_series(title, points, "main")],
                "zero": True,
            }


def _noisy(name: str, points: Points) -> list[dict[str, Any]]:
    """The values, faint, and their moving average."""
    return [_series(name, points, "faint"), _series("smoothed", smooth(points), "main")]


def _series(name: str, points: Points, style: str) -> dict[str, Any]:
    return {"name": name, "style": style, "points": columns(reduce(points))}


def smooth(points: Points) -> Points:
    """Exponential moving average over about a fiftieth of the points (5 to 200), without the bias of its start."""
    span = min(200, max(5, len(points) // 50))
    keep = 1 - 2 / (span + 1)
    average, weight, result = 0.0, 0.0, []
    for step, value in points:
        average = keep * average + (1 - keep) * value
        weight = keep * weight + (1 - keep)
        result.append((step, average / weight))
    return result


def reduce(points: Points, buckets: int = 1500) -> Points:
    """At most 2 * buckets points: of each bucket the lowest and the highest, in order; the first and last stay."""
    if len(points) <= 2 * buckets:
        return points
    values = [value for _, value in points]
    kept = [points[0]]
    size = (len(points) - 2) / (buckets - 1)
    for index in range(buckets - 1):
        begin, end = 1 + int(index * size), 1 + int((index + 1) * size)
        part = values[begin:end]
        kept += [points[begin + at] for at in sorted({part.index(min(part)), part.index(max(part))})]
    return [*kept, points[-1]]


def columns(points: Points) -> list[list[float]]:
    """[steps, values] with six digits, as the page's script takes them."""
    return [[step for step, _ in points], [float(f"{value:.6g}") for _, value in points]]
