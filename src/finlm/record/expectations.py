"""Compare what a run measured with what its recipe promised (`expect:`) and what its plan predicted.

The comparison with the plan is one event `prediction` in events.jsonl, from which the planner's constants improve. The
first steps, which compile and warm up, do not count for the speed.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from finlm.base import files, runs, screen
from finlm.base.language import translate
from finlm.base.rundir import RunDir
from finlm.base.units import format_bytes
from finlm.plan import gpus
from finlm.plan.plan import Plan
from finlm.recipe.schema import Recipe
from finlm.recipe.schema_train import Expect
from finlm.record import history
from finlm.record.history import History, Row


@dataclass(frozen=True)
class Checked:
    """A number that the recipe promised, with the run's value and whether it is within bounds.

    `expected` is the promised number or the middle of its interval, `found` the run's value, None if it has none, `low`
    and `high` the bounds, which events of earlier versions lack.
    """

    what: str
    expected: float
    found: float | None
    ok: bool
    low: float | None = None
    high: float | None = None

    @property
    def promised(self) -> str:
        """The promised interval as text, or the promised number where the bounds are not known."""
        return f"{self.expected:.4f}" if self.low is None else f"{self.low:.4f} to {self.high:.4f}"


@dataclass(frozen=True)
class Outcome:
    """All checked numbers. `elsewhere` says why none was checked, `origin` where the promises were measured."""

    checked: tuple[Checked, ...]
    elsewhere: str = ""
    origin: str = ""

    @property
    def ok(self) -> bool:
        """Whether all checked numbers are within bounds; True when none was checked."""
        return all(number.ok for number in self.checked)

    @staticmethod
    def from_json(row: Mapping[str, Any]) -> Outcome:
        """Return the Outcome of an `expect` event that to_json made. Raises KeyError or TypeError for a damaged one."""
        checked = tuple(Checked(**number) for number in row["checked"])
        return Outcome(checked, row["elsewhere"], row.get("origin", ""))

    def to_json(self) -> dict[str, object]:
        """Return the fields of the event `expect`."""
        return asdict(self) | {"ok": self.ok}

    def lines(self) -> list[str]:
        """Return lines for a person: why nothing was checked; or a summary, each number that is off, and its origin."""
        if self.elsewhere:
            return [f"expected        not checked: {self.elsewhere}"]
        if self.ok:
            return [f"expected        all {len(self.checked)} numbers of the recipe's expect: are met"]
        wrong = [number for number in self.checked if not number.ok]
        lines = [f"expected        {len(wrong)} of {len(self.checked)} numbers of the recipe's expect: are off"]
        for number in wrong:
            value = "nothing" if number.found is None else f"{number.found:.4f}"
            lines.append(f"  {number.what}: {value}, expected {number.promised}")
        return [*lines, f"  measured: {self.origin}"] if self.origin else lines


def check_expectations(run: RunDir, expect: Expect) -> Outcome:
    """Return the Outcome of comparing the run's events with the recipe's expect:; does not record it.

    Checks no number on hardware other than expect.hardware, or when expect: has numbers for `--toy` only;
    Outcome.elsewhere then says so. A promised number that the run did not record is off.
    """
    read = history.read_history(run)
    device = str((read.starts[-1] if read.starts else {}).get("device"))
    held_out = expect.before, expect.held_out, expect.accuracy, expect.reward, expect.rise
    if not any((expect.loss, *held_out, expect.suites)):
        return Outcome((), "the recipe's expect: has numbers of `--toy` only")
    if expect.hardware and expect.hardware.lower() not in device.lower():
        return Outcome((), f"measured on {expect.hardware}, this is {device}")
    return Outcome(tuple(_check_values(read, expect)), origin=expect.origin)


def _check_values(read: History, expect: Expect) -> Iterator[Checked]:
    """Yield a Checked for every number that expect: promises, with the run's value from its history.

    `before` is compared with the evaluation at step 0, the other held-out values with the last one, suites with their
    results at the run's last step.
    """
    losses = dict(read.points("loss"))
    for step, loss in expect.loss.items():
        yield _check_number(f"training loss at step {step:,}", loss, losses.get(step), expect.tolerance)
    first = next((row for row in read.evals if row["step"] == 0), {})
    last = read.evals[-1] if read.evals else {}
    for what, row, key, promised, tolerance in (
        ("held-out loss before training", first, "loss", expect.before, expect.tolerance),
        ("held-out loss", last, "loss", expect.held_out, expect.tolerance),
        ("right order of held-out pairs", last, "accuracy", expect.accuracy, expect.suite_tolerance),
        ("held-out reward", last, "reward", expect.reward, expect.tolerance),
        ("rise of the held-out reward", last, "rise", expect.rise, expect.tolerance),
    ):
        for name, value in promised.items():
            source = row if name == "all" else (row.get("sources") or {}).get(name, {})
            yield _check_number(f"{what} of {name}", value, source.get(key), tolerance)
    end = (read.end or {}).get("step")
    for name, share in expect.suites.items():
        rows = [row for row in read.suites if row["suite"] == name and row["step"] == end]
        yield _check_number(
            f"right answers in {name}", share, rows[-1]["micro"] if rows else None, expect.suite_tolerance
        )


def _check_number(what: str, promised: float | tuple[float, float], value: float | None, tolerance: float) -> Checked:
    """Return the Checked of a promised number, plus or minus `tolerance`, or of a promised (low, high).

    `value` is the run's; None is off.
    """
    low, high = promised if isinstance(promised, tuple) else (promised - tolerance, promised + tolerance)
    middle = (low + high) / 2 if isinstance(promised, tuple) else promised
    return Checked(what, middle, value, value is not None and low <= value <= high, low, high)


WARMUP = 2


@dataclass(frozen=True)
class Prediction:
    """Planned and measured memory in bytes and speed in tokens/s, and their errors, planned / measured - 1.

    A value that is not known is None. These are the fields of the event `prediction`.
    """

    planned_bytes: float | None
    measured_bytes: float | None
    bytes_error: float | None
    planned_tokens_per_second: float | None
    measured_tokens_per_second: float | None
    speed_error: float | None

    def __str__(self) -> str:
        """Return planned and measured values and their errors in percent as text; "nothing to compare" without."""
        parts = []
        if self.bytes_error is not None:
            planned, measured = format_bytes(self.planned_bytes or 0), format_bytes(self.measured_bytes or 0)
            parts.append(f"memory {planned} planned, {measured} measured ({100 * self.bytes_error:+.1f} %)")
        if self.speed_error is not None:
            speeds = f"{self.planned_tokens_per_second:,.0f} planned, {self.measured_tokens_per_second:,.0f} measured"
            parts.append(f"tokens/s {speeds} ({100 * self.speed_error:+.1f} %)")
        return "; ".join(parts) or "nothing to compare"


def compare_with_plan(plan: Mapping[str, Any], steps: Sequence[Row]) -> Prediction | None:
    """Return the Prediction that compares `step` events with plan.json; None without steps or a plan.

    The speed is the median without the first two steps (of all if there are no more), the memory the highest. The
    planned speed is scaled to the tokens that the steps read.
    """
    if not steps or not plan:
        return None
    on_gpu = plan.get("device") == "cuda"
    planned = plan.get("gpu_allocated_bytes" if on_gpu else "gpu_bytes") or None
    measured = max((step.get("memory_bytes") or 0 for step in steps), default=0) or None
    speeds = [step["tokens_per_second"] for step in steps[WARMUP:] or steps if step.get("tokens_per_second")]
    read = [step["tokens_read"] for step in steps[WARMUP:] or steps if step.get("tokens_read")]
    speed, median_read = (statistics.median(values) if values else None for values in (speeds, read))
    planned_speed = history.planned_speed(plan.get("tokens_per_second"), plan.get("tokens_per_step", 1), median_read)
    errors = _error(planned, measured), _error(planned_speed, speed)
    return Prediction(planned, measured, errors[0], planned_speed, speed, errors[1])


def record_prediction(run: RunDir) -> None:
    """Append a `prediction` event that compares plan and measured steps; save the GPU's speed for later plans.

    Uses only the steps after the last out-of-memory restart; does nothing if there are none. If the speed cannot be
    saved, prints a warning to stderr. Raises FileNotFoundError if plan.json is missing. Raises UserError if plan or
    recipe are damaged, of another version, or name an unknown GPU kind.
    """
    steps: list[Row] = []
    for row in run.read_events():
        if "former" in row:  # out of memory: what comes is trained by another plan
            steps.clear()
        elif row["kind"] == "step":
            steps.append(row)
    prediction = compare_with_plan(files.read_json(run.plan), steps)
    if prediction is None:
        return
    run.append_event("prediction", **asdict(prediction))
    plan, stage = Plan.read(run.plan), Recipe.read(run.recipe).stage
    speeds = prediction.planned_tokens_per_second, prediction.measured_tokens_per_second
    try:
        gpus.remember_run(run.path.name, plan, stage, *speeds)
    except (OSError, ValueError, TypeError) as error:  # the run is complete without it
        screen.say(f"{gpus.runs_file()} was not written, from which later plans learn: {error}")


def _error(planned: float | None, measured: float | None) -> float | None:
    """Return planned / measured - 1, rounded to 4 digits; None where one of them is missing or 0."""
    return round(planned / measured - 1, 4) if planned and measured else None


def next_commands(run: RunDir, stage: str) -> list[str]:
    """Return the commands to try next with the model of a finished run of this stage, as texts without `finlm`."""
    path = screen.relative(run.path)
    if stage == "reward":  # it says how good a text is, and writes none
        return [f"report {path}", f"train RECIPE --set grpo.reward={path}   {translate('# a recipe of stage grpo')}"]
    if stage == "pretrain":
        sft = f"train RECIPE --set model.init_from={path}   {translate('# a recipe of stage sft')}"
        return [f"sample {path} 净利润同比", f"eval {path}", sft]
    commands = [f"chat {path}", f"serve {path}"]
    return [*commands, f"eval {path}"] if stage == "sft" else commands  # pairs and prompts have no perplexity


def _format_number(value: float | None) -> str:
    """Return a measured number as text; "not finite" for None, which events.jsonl has for NaN and infinity."""
    return "not finite" if value is None else f"{value:,.4f}"


HELD_OUT = ("loss", "perplexity", "accuracy", "margin", "reward")  # of a source, as far as its stage has them


def print_outcome(run: RunDir, stage: str) -> None:
    """Print losses, speed, paths and promises of a finished run, and commands to try next, to stderr.

    Leaves out training loss and speed of a run that took no step itself: it began where another had done all steps.
    """
    steps, evals = list(run.read_events("step")), list(run.read_events("eval"))
    speeds = sorted(step["tokens_per_second"] for step in steps if step["tokens_per_second"] is not None)
    screen.say(f"\nrun directory   {screen.relative(run.path)}")
    for step in steps[-1:]:
        screen.say(f"training loss   {_format_number(step['loss'])} after {step['step']:,} steps")
    if evals:
        first, last = evals[0], evals[-1]
        if "loss" in last:
            fall = history.relative_fall(first["loss"], last["loss"])
            change = "" if fall is None else f" ({100 * abs(fall):.1f} % {'lower' if fall > 0 else 'higher'})"
            screen.say(f"held-out loss   {_format_number(first['loss'])} -> {_format_number(last['loss'])}{change}")
        if "sampled" in last:
            before = f"{_format_number(first['sampled'])} -> " if "sampled" in first and last is not first else ""
            screen.say(f"drawn answers   earn {before}{history.format_rise(last)}")
        for name, source in last["sources"].items():
            shown = [f"{key} {_format_number(source[key])}" for key in HELD_OUT if key in source]
            screen.say(f"  {name:<24} {'  '.join(shown)}")
    suites = {(row["suite"], row["mode"], row["model"]): row for row in run.read_events("suite")}
    for row in suites.values():
        low, high = (100 * bound for bound in row["micro_interval"])
        right = f"{100 * row['micro']:.1f} % right [{low:.1f}, {high:.1f}]"
        screen.say(f"{row['suite']:<15} {right} of {row['questions']:,}, {row['mode']}: {row['model']}")
    if speeds:
        screen.say(f"speed           {speeds[len(speeds) // 2]:,.0f} tokens/s (median step)")
    for row in list(run.read_events("prediction"))[-1:]:
        screen.say(f"plan            {Prediction(*(row.get(each.name) for each in fields(Prediction)))}")
    for sample in list(run.read_events("sample"))[-1:]:
        screen.say(f"sample          {sample['prompt']}{sample['text']}")
    screen.say(f"report          {screen.relative(run.report)}")
    for row in list(run.read_events("expect"))[-1:]:
        for line in Outcome.from_json(row).lines():
            screen.say(line)
    screen.say("\ntry next:")
    for command in next_commands(run, stage):
        screen.say_command(f"{screen.program()} {command}")
    size = format_bytes(runs.tree_bytes(run.export))
    screen.say(f"the model is in {screen.relative(run.export)} ({size}, Hugging Face format)")
