"""A run as it goes: what `finlm train` shows while its ranks work, and `finlm watch RUN` from anywhere.

Reads events.jsonl and the plan, nothing else, so a view can be attached at any time and costs the training nothing. On
a terminal one block is redrawn in place; elsewhere a line appears at every tenth of the run, or once a minute.
"""

from __future__ import annotations

import os
import statistics
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from finlm.base import files, screen
from finlm.base.rundir import RunDir, holder
from finlm.base.units import format_bytes, format_duration
from finlm.plan.plan import Plan
from finlm.record import curves

Row = dict[str, Any]
RECENT = 50  # steps that speed and remaining time are taken from, with the evaluations and checkpoints between them
LINE_SECONDS = 60.0
POLL_SECONDS = 0.5
QUIET_SECONDS = 20.0


@dataclass
class State:
    """What the rows so far say. Rows may lack any key but kind, time and step: other stages record other things."""

    plan: Plan
    losses: list[tuple[int, float]] = field(default_factory=list)
    recent: deque[Row] = field(default_factory=lambda: deque(maxlen=RECENT))
    step: int = 0
    evaluated: Row | None = None
    saved: Row | None = None
    incidents: list[Row] = field(default_factory=list)
    end: Row | None = None
    last_time: float | None = None

    def feed(self, row: Row) -> str:
        """Take in a row; the sentence about it that should stay on the screen, if it deserves one."""
        kind, self.last_time = row["kind"], row["time"]
        step = int(row.get("step") or 0)
        if kind in ("start", "rollback"):
            self.end, self.step = None, step
            self.losses = [point for point in self.losses if point[0] <= step]
            self.recent.clear()
            return (
                f"step {row['origin']:,}: back to step {step:,}, without the data since" if kind == "rollback" else ""
            )
        if kind == "step":
            self.step = step
            self.recent.append(row)
            if row.get("loss") is not None:
                self.losses.append((step, row["loss"]))
        elif kind == "eval":
            self.evaluated = row
            return f"step {step:,}: held-out loss {_number(row.get('loss'), '.4f')}"
        elif kind == "checkpoint":
            self.saved = row
        elif kind == "incident":
            self.incidents.append(row)
            return f"step {step:,}: {row['what']}: {row['detail']}"
        elif kind == "end":
            self.end = row
        elif kind == "restart":  # which may be ten minutes away
            self.end, self.last_time = None, row["time"] + (row.get("seconds") or 0)
            return f"starts again: {row.get('after')}"
        return ""

    @property
    def seconds_a_step(self) -> float | None:
        """From row to row, so with everything that happens between steps; None before there are three."""
        if len(self.recent) < 3:
            return None
        first, last = self.recent[0], self.recent[-1]
        seconds: float = (last["time"] - first["time"]) / max(1, last["step"] - first["step"])
        return seconds

    @property
    def left(self) -> float | None:
        """Seconds to the last step."""
        return None if self.seconds_a_step is None else self.seconds_a_step * (self.plan.steps - self.step)

    def median(self, key: str) -> float | None:
        """Of the recent steps that have a value."""
        values = [row[key] for row in self.recent if row.get(key) is not None]
        return statistics.median(values) if values else None

    def line(self, now: float) -> str:
        """Everything in one line."""
        shown = [f"step {self.step:,}/{self.plan.steps:,}", *(f"{name} {value}" for name, value in self._short(now))]
        return "  ".join(shown)

    def _short(self, now: float) -> Iterator[tuple[str, str]]:
        last = self.recent[-1] if self.recent else {}
        yield "loss", _number(last.get("loss"), ".4f")
        if last.get("lr") is not None:
            yield "lr", f"{last['lr']:.2e}"
        yield "tokens/s", _number(self.median("tokens_per_second"), ",.0f")
        if self.median("mfu") is not None:
            yield "MFU", f"{100 * (self.median('mfu') or 0):.1f} %"
        if last.get("memory_bytes"):
            yield "memory", format_bytes(last["memory_bytes"])
        if self.left:
            yield "ends", f"{_clock(now + self.left, now)} (in {format_duration(self.left)})"

    def board(self, now: float) -> list[tuple[str, str]]:
        """(name, value) of every line of the view on a terminal."""
        last = self.recent[-1] if self.recent else {}
        rows = [("step", f"{self.step:,} of {self.plan.steps:,}")]
        if self.losses:
            losses = [loss for _, loss in self.losses]
            blocks = curves.spark(losses, min(losses), max(losses), 40)
            rows.append(("loss", f"{_number(last.get('loss'), '.4f')}  {blocks}"))
        if self.evaluated:
            rows.append(
                ("held-out", f"{_number(self.evaluated.get('loss'), '.4f')} at step {self.evaluated['step']:,}")
            )
        if last.get("lr") is not None:
            rows.append(("lr", f"{last['lr']:.3e}   gradient norm {_number(last.get('grad_norm'), '.3f')}"))
        speed, mfu = self.median("tokens_per_second"), self.median("mfu")
        planned = self.plan.tokens_per_second
        if speed is not None:
            than = f"   {100 * speed / planned:.0f} % of the plan" if planned else ""
            rows.append(("speed", f"{speed:,.0f} tokens/s{'' if mfu is None else f'   MFU {100 * mfu:.1f} %'}{than}"))
            if len(self.plan.hosts) > 1:
                rows.append(("hosts", self._hosts(speed)))
        if last.get("memory_bytes"):
            of = f" of {format_bytes(self.plan.gpu_memory_bytes)}" if self.plan.gpu_memory_bytes else ""
            rows.append(
                ("memory", f"{format_bytes(last['memory_bytes'])}{of}   planned {format_bytes(self.plan.gpu_bytes)}")
            )
        if self.saved:
            rows.append(
                ("saved", f"step {self.saved['step']:,}, {format_duration(max(0.0, now - self.saved['time']))} ago")
            )
        if self.left:
            rows.append(("ends", f"{_clock(now + self.left, now)}, in {format_duration(self.left)}"))
        if self.last_time is not None and now - self.last_time > max(QUIET_SECONDS, 5 * (self.seconds_a_step or 0)):
            rows.append(("quiet", f"no word for {format_duration(now - self.last_time)}"))
        rows += [("incident", f"step {row.get('step') or 0:,}: {row['what']}") for row in self.incidents[-3:]]
        return rows

    def _hosts(self, speed: float) -> str:
        """Each host's part of the tokens a second: ranks step together, so a slow host shows as everybody's speed."""
        rows = [host.slots * host.micro_batch for host in self.plan.hosts]
        shares = (
            f"{host.name} {speed * part / sum(rows):,.0f}" for host, part in zip(self.plan.hosts, rows, strict=True)
        )
        return ", ".join([*shares][:8]) + (", ..." if len(rows) > 8 else "")


class View:
    """A State on the screen."""

    def __init__(self, plan: Plan, draw: screen.Board | None) -> None:
        self.state = State(plan)
        self._draw = draw
        self._tenths, self._said, self._drawn = 0, time.monotonic(), 0.0

    def feed(self, row: Row, quiet: bool = False) -> None:
        """Show a row. quiet: it is history, which only counts."""
        sentence = self.state.feed(row)
        if quiet:
            self._tenths = self._tenth()
        elif sentence:
            screen.say(sentence)
        if row["kind"] == "step" and not quiet and self._draw is None:
            self._say_sometimes()

    def refresh(self) -> None:
        """Redraw, five times a second at most."""
        if self._draw is not None and time.monotonic() - self._drawn > 0.2:
            self._drawn = time.monotonic()
            self._draw(self.state.step / self.state.plan.steps, self.state.board(time.time()))

    def _tenth(self) -> int:
        return 10 * self.state.step // self.state.plan.steps

    def _say_sometimes(self) -> None:
        now = time.monotonic()
        if self._tenth() > self._tenths or now - self._said > LINE_SECONDS or self.state.step == 1:
            self._tenths, self._said = self._tenth(), now
            screen.say(self.state.line(time.time()))


@contextmanager
def shown(plan: Plan) -> Iterator[View]:
    """A view of a run of this plan."""
    with screen.board(f"{plan.recipe}: training") as draw:
        yield View(plan, draw)


def watch(run: RunDir) -> int:
    """Show a run until it ends, restarts and all; 0, or 1 when it did not finish. Ctrl-C leaves it running."""
    with shown(Plan.read(run.plan)) as view:
        for number, rows in enumerate(until_over(run, view.state)):
            for row in rows:
                view.feed(row, quiet=number == 0)
            if number == 0 and view.state.step:
                screen.say(view.state.line(time.time()))
            view.refresh()
    if view.state.end is None:
        screen.say(f"nothing runs it any more; the last word was at step {view.state.step:,}")
        return 1
    status = view.state.end["status"]
    screen.say(f"{status} at step {view.state.step:,}" + (f"; {run.report}" if run.report.exists() else ""))
    return int(status != "finished")


def until_over(run: RunDir, state: State) -> Iterator[list[Row]]:
    """A run's rows, look by look, for the caller to feed to state, until nothing more is to come.

    A run that failed is over when nobody holds it, seen twice: `finlm train` may be about to start it again.
    """
    looks, seen = follow(run, 0), 0
    yield next(looks)
    while seen < 2 and not (state.end and state.end["status"] == "finished"):
        time.sleep(POLL_SECONDS)
        yield next(looks)
        seen = seen + 1 if _is_over(run, state) else 0


def follow(run: RunDir, offset: int) -> Iterator[list[Row]]:
    """The rows that were added to events.jsonl since the last look, again and again, from a byte offset on."""
    while True:
        block = b""
        if run.events.exists():
            with run.events.open("rb") as file:
                file.seek(offset)
                block = file.read()
        complete = block[: block.rfind(b"\n") + 1]
        offset += len(complete)
        yield list(files.parse_json_lines(complete.splitlines()))


def _is_over(run: RunDir, state: State) -> bool:
    """Whether it ended, or was started here and is quiet, and no process here holds it. Unknown: it has no end."""
    if state.end is not None:
        return not _is_held(run)
    is_quiet = time.time() - (state.last_time or 0) > QUIET_SECONDS
    return is_quiet and holder(run)[1] == os.uname().nodename and _is_held(run) is False


def _is_held(run: RunDir) -> bool | None:
    """Whether a process of this machine holds the run; None where that cannot be seen."""
    try:
        inode = (run.path / ".lock").stat().st_ino
        return f":{inode} " in Path("/proc/locks").read_text()
    except OSError:
        return None


def _number(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


def _clock(then: float, now: float) -> str:
    """The local time of day, with the date when it is not today's."""
    day = "" if time.localtime(then)[:3] == time.localtime(now)[:3] else "%a %Y-%m-%d "
    return time.strftime(f"{day}%H:%M", time.localtime(then))
