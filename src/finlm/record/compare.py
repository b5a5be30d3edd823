"""Compare runs: the first field that differs and the first step whose losses differ; or one page of several runs.

Fields come in the order in which a difference explains another loss: recipe, data, code, plan, packages, hardware. What
differs between any two runs and changes no number (paths, times, names of machines, how hosts are reached) is left out.

The page shows curves in the same charts, outcomes, and recipe keys that differ. It is made from the run directories
alone, like report.html, and as self-contained. It names runs by the parts of their directory names that differ.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from finlm.base import files
from finlm.base.errors import UserError
from finlm.base.rundir import RunDir
from finlm.base.secrets import redact_key
from finlm.plan.plan import decided_keys
from finlm.recipe.rules import SAME_NUMBERS, WORDS, is_within
from finlm.record import history as histories
from finlm.record import manifest as manifests
from finlm.record.history import Chart, History, Points
from finlm.record.manifest import Code, Manifest
from finlm.record.report import run_page

_PLAN = (
    *("device", "world_size", "precision", "zero_stage", "offload_optimizer", "offload_param", "recompute", "compiled"),
    *("attention", "micro_batch", "gradient_accumulation_steps", "tokens_per_step", "steps", "vocab_size"),
    *("padded_vocab_size", "parameters"),
)
_KERNELS = ("cpu_capability", "threads")
_ENVIRONMENT = ("NCCL_", "CUDA_", "CUBLAS_", "TORCH", "OMP_", "MKL_", "DS_", "ATEN_", "ONEDNN_", "DNNL_")
# Packages whose arithmetic is part of a loss.
_NUMERIC = re.compile(
    "torch|torchao|triton|nvidia-.*|deepspeed|transformers|accelerate|trl|peft|numpy|sentencepiece|tokenizers|gigatoken"
)


@dataclass(frozen=True)
class Difference:
    """A field with different values in two runs: `a` in the first, `b` in the second; None if the run lacks it."""

    section: str
    field: str
    a: Any
    b: Any

    def __str__(self) -> str:
        """Return "SECTION: FIELD: A | B", with each value cut at 60 characters."""
        return f"{self.section}: {self.field}: {_short(self.a)} | {_short(self.b)}"


@dataclass(frozen=True)
class Comparison:
    """Every field that differs, most telling first, and the first steps whose rows and losses differ, if any.

    `rows` and `curve` are those steps, `losses` the (step, loss) points of both runs. `ends` has of each run the newest
    `held_out` loss over all sources, in nats per token, and the median `tokens_per_second`; None if unknown.
    """

    fields: tuple[Difference, ...]
    curve: Difference | None
    losses: tuple[Points, Points]
    ends: tuple[Mapping[str, Any], ...] = ()
    rows: Difference | None = None
    other_bits: str = ""  # why the same losses to the last bit are not promised

    @property
    def equal(self) -> bool:
        """Whether no field, row or loss differs."""
        return self.first is None

    @property
    def first(self) -> Difference | None:
        """The first field that differs, else the first step whose rows, else whose losses differ; None if equal."""
        return self.fields[0] if self.fields else self.rows or self.curve

    def to_json(self) -> dict[str, object]:
        """Return the document of `compare --json`; "steps" are the numbers of steps with a loss in both runs."""
        return {
            "equal": self.equal,
            "first_difference": asdict(self.first) if self.first else None,
            "differences": [asdict(field) for field in self.fields],
            "rows": asdict(self.rows) if self.rows else None,
            "curve": asdict(self.curve) if self.curve else None,
            "same_bits_promised": not self.other_bits,
            "other_bits": self.other_bits,
            "steps": [len(points) for points in self.losses],
            "ends": list(self.ends),
        }


def compare(a: RunDir, b: RunDir, tolerance: float = 0.0) -> Comparison:
    """Return the Comparison of two run directories. Losses that differ by at most `tolerance`, in nats, count as equal.

    Missing or damaged files count as empty.
    """
    both = histories.read_history(a), histories.read_history(b)
    losses = both[0].points("loss"), both[1].points("loss")
    starts = [read.starts[-1] if read.starts else {} for read in both]
    differences = tuple(list_differences(a, b, *starts))
    ends = [((read.evals or [{}])[-1].get("loss"), read.median("tokens_per_second")) for read in both]
    return Comparison(
        fields=differences,
        curve=first_other_loss(*losses, tolerance),
        losses=losses,
        ends=tuple({"held_out": loss, "tokens_per_second": speed} for loss, speed in ends),
        rows=first_other_rows(*both),
        other_bits=other_bits(a, differences, *starts),
    )


def other_bits(a: RunDir, differences: Iterable[Difference], *starts: Mapping[str, Any]) -> str:
    """Return why two runs need not have the same losses to the last bit; "" if their records promise it.

    Any of `differences`, those of the runs' fields, is a reason; one of packages only if the package computes losses.
    So are GPUs without train.deterministic in the plan and recipe of `a`, the first run, and CPU kernels that are not
    recorded. `starts` has the last `start` event of each run, {} for a run without any.
    """
    for difference in differences:
        if difference.section != "packages" or _NUMERIC.fullmatch(difference.field):
            return str(difference)
    if histories.read_object(a.plan).get("device") == "cuda" and not _recipe(a).get("train.deterministic"):
        return "GPUs without train.deterministic add in another order every time"
    if any(row.get("device") == "cpu" and "cpu_capability" not in row for row in starts):
        return "a run has no record of the CPU kernels that it used"
    return ""


def list_differences(a: RunDir, b: RunDir, *starts: Mapping[str, Any]) -> Iterator[Difference]:
    """Yield the differences of recipe, data, code, plan, packages, hardware and environment, in this order.

    Secrets among the recipe's values are redacted; those of the environment were when it was recorded. `starts` has the
    last `start` event of run `a` and of run `b`, whose CPU kernels are compared as hardware. Missing or damaged files
    count as empty.
    """
    for each in _differing("recipe", _recipe(a), _recipe(b)):
        yield Difference("recipe", each.field, redact_key(each.field, each.a), redact_key(each.field, each.b))
    yield from data_differences(histories.read_object(a.data), histories.read_object(b.data))
    manifest_a, manifest_b = Manifest.read(a) or Manifest(), Manifest.read(b) or Manifest()
    yield from _code(a, b, manifest_a.finlm, manifest_b.finlm)
    yield from plan_differences(a, b)
    yield from _differing("packages", manifest_a.packages, manifest_b.packages)
    yield from _differing("hardware", _hardware(manifest_a), _hardware(manifest_b))
    yield from _differing(
        "hardware", *({key: row[key] for key in _KERNELS if key in row} for row in starts or ({}, {}))
    )
    yield from _differing("environment", _environment(manifest_a), _environment(manifest_b))


def plan_differences(a: RunDir, b: RunDir) -> Iterator[Difference]:
    """Yield the differences of two runs' plans in the keys that can change a loss or speed."""
    both = histories.read_object(a.plan), histories.read_object(b.plan)
    yield from _differing("plan", *({key: plan.get(key) for key in _PLAN} for plan in both))


def data_differences(a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[Difference]:
    """Yield the differences of two data.json objects: sha256 of source files first, then what was made of them."""
    yield from _differing("data", *({_file(item): item.get("sha256") for item in d.get("files") or ()} for d in (a, b)))
    made = ("tokenizer_sha256", "vocab_size", "dtype", "add_bos", "pinned", "documents", "shards", "reading", "key")
    yield from _differing("data", *({key: each.get(key) for key in made} for each in (a, b)))


def first_other_loss(a: Points, b: Points, tolerance: float) -> Difference | None:
    """Return the first step whose losses differ by more than `tolerance`, or which one run lacks.

    None if there is none. `a` and `b` are (step, loss) points.
    """
    losses_a, losses_b = dict(a), dict(b)
    for step in sorted(losses_a.keys() | losses_b.keys()):
        loss_a, loss_b = losses_a.get(step), losses_b.get(step)
        if loss_a is None or loss_b is None or abs(loss_a - loss_b) > tolerance:
            return Difference("curve", f"loss at step {step:g}", loss_a, loss_b)
    return None


def first_other_rows(a: History, b: History) -> Difference | None:
    """Return the first step, of those in both runs, whose data rows have another checksum; None if there is none."""
    other = dict(b.points("rows_crc"))
    for step, crc in a.points("rows_crc"):
        if crc != other.get(step, crc):
            return Difference("rows", f"checksum of the rows of step {step:g}", crc, other[step])
    return None


def format_comparison(comparison: Comparison, names: tuple[str, str]) -> list[str]:
    """Return the comparison as lines for a person: at most 8 fields, last results, sparklines under the runs' names."""
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
        lines.append(f"curves part        {comparison.curve.field}: {format_losses(comparison.curve)}")
    if comparison.other_bits and comparison.other_bits not in map(str, comparison.fields[:1]):
        lines.append(f"same bits          not promised: {comparison.other_bits}")
    for name, key, form in (("held-out loss", "held_out", ".4f"), ("tokens/s", "tokens_per_second", ",.0f")):
        pair = [each[key] for each in comparison.ends]
        if any(value is not None for value in pair):
            shown = " | ".join("–" if value is None else format(value, form) for value in pair)
            change = f"   {100 * (pair[1] / pair[0] - 1):+.2f} %" if all(pair) else ""
            lines.append(f"{name:<18} {shown}{change}")
    values = [value for points in comparison.losses for _, value in points]
    for name, points in zip(names, comparison.losses, strict=True):
        if points:
            ends = f"{points[0][1]:.4f} → {points[-1][1]:.4f}"
            lines.append(
                f"  {histories.sparkline([loss for _, loss in points], min(values), max(values))}  {ends}  {name}"
            )
    return lines


def format_losses(curve: Difference) -> str:
    """Return the two losses of a difference as "A | B", with four digits or as many as tell them apart."""
    pair = (curve.a, curve.b)
    for digits in (4, 6, 9, 17):
        shown = ["absent" if value is None else f"{value:.{digits}f}" for value in pair]
        if shown[0] != shown[1]:
            break
    return " | ".join(shown)


def _recipe(run: RunDir) -> Mapping[str, Any]:
    """Return {key: value} of the recipe values that may change a loss, with the plan's decisions in place of auto.

    An invalid recipe gives the values that are written in it, a missing one none.
    """
    values = manifests.recipe_values(run) or manifests.unchecked_recipe_values(run)
    decided = {
        key: value for key, value in decided_keys(histories.read_object(run.plan)).items() if values.get(key) == "auto"
    }
    return {key: value for key, value in {**values, **decided}.items() if not is_within(key, SAME_NUMBERS)}


def _file(item: Mapping[str, Any]) -> str:
    """Return "file NAME of SOURCE" for an input of a manifest, "held-out file ..." for one that is held out."""
    kind = "held-out file" if item.get("split") == "held_out" else "file"
    return f"{kind} {item.get('file')} of {item.get('source')}"


def _code(a: RunDir, b: RunDir, code_a: Code, code_b: Code) -> Iterator[Difference]:
    """Yield a Difference for each file of code/ that differs, then for the commits; none if the code hashes agree.

    Reads the files of both runs; the values are the first 12 hex digits of their sha256. `code_a` and `code_b` are the
    records of the code of `a` and `b`.
    """
    if code_a.code_sha256 == code_b.code_sha256:
        return
    hashes = (
        {path.relative_to(run.code).as_posix(): files.sha256_file(path)[:12] for path in Path(run.code).rglob("*.py")}
        for run in (a, b)
    )
    yield from _differing("code", *hashes)
    commits = [each.git.commit if each.git else None for each in (code_a, code_b)]
    if commits[0] != commits[1]:
        yield Difference("code", "git commit", *commits)


def _hardware(manifest: Manifest) -> dict[str, Any]:
    """Return {hosts, gpus, drivers, seen by doctor, cpu, cpus, python} by a manifest."""
    machine = manifest.machine
    seen = [{"torch": h.torch, "cuda": h.cuda, "nccl": h.nccl, "drivers": h.drivers} for h in manifest.hosts]
    return {
        "hosts": [f"{host.slots} x {host.gpu or 'cpu'}" for host in manifest.hosts],
        "gpus": [gpu.get("name") for gpu in machine.gpus],
        "drivers": sorted({gpu.get("driver_version") for gpu in machine.gpus}),
        "seen by doctor": [{key: value for key, value in host.items() if value} for host in seen],
        "cpu": [host.cpu for host in manifest.hosts],
        "cpus": machine.cpus_usable,
        "python": machine.python,
    }


def _environment(manifest: Manifest) -> dict[str, str]:
    """Return the manifest's environment variables that can change a result (_ENVIRONMENT)."""
    return {name: value for name, value in manifest.environment.items() if name.startswith(_ENVIRONMENT)}


def _differing(section: str, a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[Difference]:
    """Yield a Difference for each key whose values differ, leaf by leaf in nested dicts, in the order of a, then b."""
    for key in [*a, *(key for key in b if key not in a)]:
        value_a, value_b = a.get(key), b.get(key)
        if isinstance(value_a, dict) and isinstance(value_b, dict):
            for inner in _differing(section, value_a, value_b):
                yield Difference(section, f"{key}.{inner.field}", inner.a, inner.b)
        elif value_a != value_b:
            yield Difference(section, str(key), value_a, value_b)


def _short(value: Any) -> str:
    """Return a value as text of at most 60 characters; "absent" for None."""
    text = "absent" if value is None else str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


COLOURS = 6  # .run0 to .run5 in report.css, distinguishable with red-green blindness


@dataclass(frozen=True)
class Run:
    """A run with its name on the page, its directory, its history and its recipe's values."""

    name: str
    directory: RunDir
    history: History
    recipe: Mapping[str, Any]


def write_page(runs: Sequence[RunDir], out: Path) -> Path:
    """Write the page of several runs side by side to the file `out` and return its path.

    Raises UserError for more than COLOURS runs, or the same run twice; OSError when it cannot be written.
    """
    loaded = load_runs(runs)
    return run_page.write(
        out, "side_by_side.html", f"{len(loaded)} runs side by side · finlm", charts(loaded), **page_values(loaded)
    )


def load_runs(runs: Sequence[RunDir]) -> list[Run]:
    """Read the runs for the page; return them with short names.

    UserError for over COLOURS runs, or the same run twice.
    """
    paths = [run.path.resolve() for run in runs]
    if len(runs) > COLOURS or len(set(paths)) < len(paths):
        raise UserError(
            f"cannot show {len(runs)} runs on one page" if len(runs) > COLOURS else "the same run is named twice",
            evidence=", ".join(path.name for path in paths),
            fix=f"name two to {COLOURS} different run directories",
        )
    return [
        Run(name, run, histories.read_history(run), manifests.recipe_values(run))
        for name, run in zip(_names([path.name for path in paths]), runs, strict=True)
    ]


def page_values(runs: Sequence[Run]) -> dict[str, object]:
    """Return {name: value} for the template side_by_side.html, of two runs or more."""
    return {
        "paths": [run.directory.path.resolve().name for run in runs],
        "names": [run.name for run in runs],
        "outcomes": _outcomes(runs),
        "differences": _differences(runs),
    }


def _names(names: Sequence[str]) -> list[str]:
    """Return names without first parts (up to a dash) that all share, and last parts not needed to tell them apart.

    a-1121-0858, a-1121-1212 -> 0858, 1212; a-1121, b-1122 -> a, b.
    """
    parts = [name.split("-") for name in names]
    while all(len(part) > 1 for part in parts) and len({part[0] for part in parts}) == 1:
        parts = [part[1:] for part in parts]
    while all(len(part) > 1 for part in parts) and len({tuple(part[:-1]) for part in parts}) == len(parts):
        parts = [part[:-1] for part in parts]
    return ["-".join(part) for part in parts]


def _outcomes(runs: Sequence[Run]) -> list[tuple[str | None, ...]]:
    """Return rows of (measure, each run's value as text or None); leaves out rows without any value."""
    held_out = [{name: points[-1][1] for name, points in run.history.held_out().items()} for run in runs]
    sources = list(dict.fromkeys(name for losses in held_out for name in losses))
    columns: list[dict[str, str | None]] = []
    for run, losses in zip(runs, held_out, strict=True):
        first, last = histories.first_and_last(run.history.evals)
        columns.append(
            {
                "Steps": run_page.count(run.history.last("step")),
                "Tokens": run_page.short(sum(run.history.values("tokens")) or None),
                "Training loss, last": run_page.digits(run.history.last("loss")),
                "Held-out loss at start": run_page.digits(first.get("loss")),
                "Held-out loss at end": run_page.digits(last.get("loss")),
                **{f"… {name}": run_page.digits(losses.get(name)) for name in sources},
                "Tokens a second, median": run_page.short(run.history.median("tokens_per_second")),
                "MFU, median": run_page.percent(run.history.median("mfu")),
                "Peak memory of a rank": run_page.size(max(run.history.values("memory_bytes"), default=None)),
                "Wall time": run_page.duration(run.history.wall_seconds),
                "Incidents": run_page.count(len(run.history.incidents)),
            }
        )
    rows = [(label, *(column[label] for column in columns)) for label in columns[0]]
    return [row for row in rows if any(row[1:])]


def charts(runs: Sequence[Run]) -> Iterator[Chart]:
    """Yield a chart for each measure, with a curve for each run that has it; no chart for a measure that none has."""
    measures: list[tuple[str, Callable[[History], Points], bool]] = [
        ("Training loss, smoothed", lambda history: histories.smooth(history.points("loss")), False),
        ("Held-out loss", History.held_out_total, False),
        ("Learning rate", lambda history: history.points("lr"), True),
        ("Gradient norm, smoothed", lambda history: histories.smooth(history.points("grad_norm")), True),
        ("Tokens a second, smoothed", lambda history: histories.smooth(history.points("tokens_per_second")), True),
    ]
    for title, points_of, zero in measures:
        series = [
            histories.as_series(run.name, points, f"run{number}")
            for number, run in enumerate(runs)
            if (points := points_of(run.history))
        ]
        if series:
            yield Chart(title, series, zero, marks=title == "Held-out loss")


def _differences(runs: Sequence[Run]) -> list[tuple[str | None, ...]]:
    """Return rows of (key, each run's value as redacted text or None) for the recipe keys whose values differ."""
    keys = list(dict.fromkeys(key for run in runs for key in run.recipe if not is_within(key, WORDS)))
    rows: list[tuple[str | None, ...]] = []
    for key in keys:
        values = [run.recipe.get(key) for run in runs]
        if any(value != values[0] for value in values[1:]):
            rows.append((key, *(None if value is None else str(redact_key(key, value)) for value in values)))
    return rows
