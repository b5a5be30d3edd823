"""Two runs side by side: the first thing that differs, and where the curves part.

In the order in which a difference explains another loss: recipe, data, code, plan, packages, hardware. What differs
between any two runs and changes no number (paths, times, names of machines, how hosts are reached) is left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from finlm.base import files
from finlm.base.rundir import RunDir
from finlm.base.secrets import redact_key
from finlm.recipe.recipe import SAME_NUMBERS, is_within
from finlm.record import curves, history, report_details
from finlm.record.history import History, Points

_PLAN = (
    *("device", "world_size", "precision", "zero_stage", "offload_optimizer", "offload_param", "recompute", "compiled"),
    *("attention", "micro_batch", "gradient_accumulation_steps", "tokens_per_step", "steps", "vocab_size"),
    *("padded_vocab_size", "parameters"),
)
_ENVIRONMENT = ("NCCL_", "CUDA_", "CUBLAS_", "TORCH", "OMP_", "MKL_", "DS_")


@dataclass(frozen=True)
class Difference:
    """A field that is not the same in both."""

    section: str
    field: str
    a: Any
    b: Any

    def __str__(self) -> str:
        return f"{self.section}: {self.field}: {_short(self.a)} | {_short(self.b)}"


@dataclass(frozen=True)
class Comparison:
    """Every field that differs, most telling first; the first steps whose rows and whose losses differ, if some do."""

    fields: tuple[Difference, ...]
    curve: Difference | None
    losses: tuple[Points, Points]
    rows: Difference | None = None

    @property
    def equal(self) -> bool:
        """True when nothing differs."""
        return self.first is None

    @property
    def first(self) -> Difference | None:
        """The first field that differs, else the first step."""
        return self.fields[0] if self.fields else self.rows or self.curve

    def to_json(self) -> dict[str, Any]:
        """The document of `compare --json`."""
        return {
            "equal": self.equal,
            "first_difference": asdict(self.first) if self.first else None,
            "differences": [asdict(field) for field in self.fields],
            "rows": asdict(self.rows) if self.rows else None,
            "curve": asdict(self.curve) if self.curve else None,
            "steps": [len(points) for points in self.losses],
        }


def runs(a: RunDir, b: RunDir, tolerance: float = 0.0) -> Comparison:
    """Compare two run directories. tolerance: of the loss, in nats."""
    both = history.read(a), history.read(b)
    losses = both[0].points("loss"), both[1].points("loss")
    return Comparison(tuple(fields(a, b)), curve(*losses, tolerance), losses, rows(*both))


def fields(a: RunDir, b: RunDir) -> Iterator[Difference]:
    """What the two were made of, where it differs."""
    for found in _mapping("recipe", _recipe(a), _recipe(b)):
        values = (redact_key(found.field, value) for value in (found.a, found.b))
        yield Difference(found.section, found.field, *values)
    yield from data(report_details.read(a.data), report_details.read(b.data))
    one, other = report_details.read(a.manifest), report_details.read(b.manifest)
    yield from _code(a, b, one.get("finlm") or {}, other.get("finlm") or {})
    yield from plans(a, b)
    yield from _mapping("packages", one.get("packages") or {}, other.get("packages") or {})
    yield from _mapping("hardware", _hardware(one), _hardware(other))
    yield from _mapping("environment", _environment(one), _environment(other))


def plans(a: RunDir, b: RunDir) -> Iterator[Difference]:
    """Where two plans differ in what may move a number."""
    both = report_details.read(a.plan), report_details.read(b.plan)
    yield from _mapping("plan", *({key: plan.get(key) for key in _PLAN} for plan in both))


def data(a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[Difference]:
    """Where two data.json differ: the source files first, then what was made of them."""
    yield from _mapping("data", *({_file(item): item.get("sha256") for item in d.get("files") or ()} for d in (a, b)))
    made = ("tokenizer_sha256", "vocab_size", "dtype", "add_bos", "pinned", "documents", "shards", "reading", "key")
    yield from _mapping("data", *({key: each.get(key) for key in made} for each in (a, b)))


def curve(a: Points, b: Points, tolerance: float) -> Difference | None:
    """The first step whose losses are further apart than the tolerance, or that only one run has."""
    one, other = dict(a), dict(b)
    for step in sorted(one.keys() | other.keys()):
        here, there = one.get(step), other.get(step)
        if here is None or there is None or abs(here - there) > tolerance:
            return Difference("curve", f"loss at step {step:g}", here, there)
    return None


def rows(a: History, b: History) -> Difference | None:
    """The first step of both that read other rows, by the checksum of what was read."""
    other = dict(b.points("rows_crc"))
    for step, crc in a.points("rows_crc"):
        if crc != other.get(step, crc):
            return Difference("rows", f"checksum of the rows of step {step:g}", crc, other[step])
    return None


def show(comparison: Comparison, names: tuple[str, str]) -> list[str]:
    """Lines for a person."""
    lines = []
    if comparison.fields:
        lines.append(f"first difference   {comparison.fields[0]}")
        lines += [f"  also             {field}" for field in comparison.fields[1:8]]
        if len(comparison.fields) > 8:
            lines.append(f"  and              {len(comparison.fields) - 8} more (--json lists all)")
    else:
        lines.append("recipe, data, code, plan, packages and hardware are the same")
    steps = min(map(len, comparison.losses))
    if comparison.rows is not None:
        lines.append(f"rows part          {comparison.rows.field}: {comparison.rows.a} | {comparison.rows.b}")
    if not any(comparison.losses):
        lines.append("curves             nothing was trained")
    elif comparison.curve is None:
        lines.append(f"curves             equal in all {steps:,} steps")
    else:
        lines.append(f"curves part        {comparison.curve.field}: {comparison.curve.a} | {comparison.curve.b}")
    values = [value for points in comparison.losses for _, value in points]
    for name, points in zip(names, comparison.losses, strict=True):
        if points:
            ends = f"{points[0][1]:.4f} → {points[-1][1]:.4f}"
            lines.append(f"  {curves.spark([loss for _, loss in points], min(values), max(values))}  {ends}  {name}")
    return lines


def _recipe(run: RunDir) -> dict[str, Any]:
    values = report_details.values(run) or report_details.unchecked_values(run)
    return {key: value for key, value in values.items() if not is_within(key, SAME_NUMBERS)}


def _file(item: Mapping[str, Any]) -> str:
    kind = "held-out file" if item.get("split") == "held_out" else "file"
    return f"{kind} {item.get('file')} of {item.get('source')}"


def _code(a: RunDir, b: RunDir, one: Mapping[str, Any], other: Mapping[str, Any]) -> Iterator[Difference]:
    if one.get("code_sha256") == other.get("code_sha256"):
        return
    hashes = [{path.relative_to(run.code).as_posix(): path for path in Path(run.code).rglob("*.py")} for run in (a, b)]
    found = [{name: files.sha256_file(path)[:12] for name, path in each.items()} for each in hashes]
    yield from _mapping("code", *found)
    commits = [(each.get("git") or {}).get("commit") for each in (one, other)]
    if commits[0] != commits[1]:
        yield Difference("code", "git commit", *commits)


def _hardware(manifest: Mapping[str, Any]) -> dict[str, Any]:
    machine = manifest.get("machine") or {}
    gpus = [(gpu.get("name"), gpu.get("driver_version")) for gpu in machine.get("gpus") or ()]
    hosts = manifest.get("hosts") or ()
    return {
        "hosts": [f"{host.get('slots')} x {host.get('gpu') or 'cpu'}" for host in hosts],
        "gpus": [name for name, _ in gpus],
        "drivers": sorted({driver for _, driver in gpus}),
        "seen by doctor": [{k: host[k] for k in ("torch", "cuda", "nccl", "drivers") if k in host} for host in hosts],
        "cpus": machine.get("cpus_usable"),
        "python": machine.get("python"),
    }


def _environment(manifest: Mapping[str, Any]) -> dict[str, Any]:
    found = manifest.get("environment") or {}
    return {name: value for name, value in found.items() if name.startswith(_ENVIRONMENT)}


def _mapping(section: str, a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[Difference]:
    """Values that differ, nested mappings leaf by leaf, in the order of a, then those only b has."""
    for key in [*a, *(key for key in b if key not in a)]:
        one, other = a.get(key), b.get(key)
        if isinstance(one, dict) and isinstance(other, dict):
            for inner in _mapping(section, one, other):
                yield Difference(section, f"{key}.{inner.field}", inner.a, inner.b)
        elif one != other:
            yield Difference(section, str(key), one, other)


def _short(value: Any) -> str:
    text = "absent" if value is None else str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
