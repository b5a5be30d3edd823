"""Show a run as it goes: what `finlm train` prints while its ranks work, and `finlm watch RUN` from anywhere.

Reads events.jsonl and the plan, nothing else, so a view can be attached at any time and costs the training nothing. On
a terminal one block is redrawn in place; elsewhere a line appears at every tenth of the run, or once a minute.
"""

from __future__ import annotations

import os
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from finlm.base import files, screen
from finlm.base.rundir import RunDir
from finlm.base.runs import is_held, lock_holder
from finlm.base.units import format_bytes, format_duration
from finlm.plan.plan import Plan
from finlm.record import history
from finlm.record.history import Row

RECENT = 50  # steps that speed and remaining time are taken from, with the evaluations and checkpoints between them
LINE_SECONDS = 60.0
POLL_SECONDS = 0.5
QUIET_SECONDS = 20.0


@dataclass
class State:
    """The state of a run by its events so far. Events may lack any key but kind, time and step: stages differ."""

    plan: Plan
    losses: list[tuple[int, float]] = field(default_factory=list)
    recent: deque[Row] = field(default_factory=lambda: deque(maxlen=RECENT))
    step: int = 0
    evaluated: Row | None = None
    saved: Row | None = None
    incidents: list[Row] = field(default_factory=list)
    end: Row | None = None
    last_time: float | None = None
    is_up: bool = False  # the ranks have said that they begin

    def feed(self, row: Row) -> str:
        """Update the state by an event of events.jsonl; return a line to print about it, "" if it needs none.

        Rollbacks, evaluations, incidents, restarts and starts at step 0 have a line. A start or rollback removes the
        losses after its step.
        """
        kind, self.last_time = row["kind"], row["time"]
        step = int(row.get("step") or 0)
        if kind in ("start", "rollback"):
            self.end, self.step, self.is_up = None, step, True
            self.losses = [point for point in self.losses if point[0] <= step]
            self.recent.clear()
            if kind == "rollback":
                return f"step {row['origin']:,}: back to step {step:,}, without the data since"
            return f"the ranks are up: {self.phase}" if self.phase else ""
        if kind == "step":
            self.step = step
            self.recent.append(row)
            if row.get("loss") is not None:
                self.losses.append((step, row["loss"]))
        elif kind == "eval":
            self.evaluated = row
            return f"step {step:,}: held-out {_held_out(row)}"
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
    def phase(self) -> str:
        """What happens before the first step, in words; "" after it."""
        if self.step:
            return ""
        return "held-out text, then the first step" if self.is_up else "the ranks start: libraries, weights, optimizer"

    @property
    def seconds_a_step(self) -> float | None:
        """Mean seconds per recent step, with all that happens between steps; None with fewer than three steps."""
        if len(self.recent) < 3:
            return None
        first, last = self.recent[0], self.recent[-1]
        seconds: float = (last["time"] - first["time"]) / max(1, last["step"] - first["step"])
        return seconds

    @property
    def left(self) -> float | None:
        """Predicted seconds to the last step; None with fewer than three recent steps."""
        return None if self.seconds_a_step is None else self.seconds_a_step * (self.plan.steps - self.step)

    def median(self, key: str) -> float | None:
        """Return the median of a key over the recent steps that have it; None if none has it."""
        values = [row[key] for row in self.recent if row.get(key) is not None]
        return statistics.median(values) if values else None

    def line(self, now: float) -> str:
        """Return step, loss, speed and predicted end as one line of text; before the first step the phase instead.

        `now` is in Unix seconds.
        """
        values = [self.phase] if self.phase else [f"{name} {value}" for name, value in self._short(now)]
        return "  ".join([f"step {self.step:,}/{self.plan.steps:,}", *values])

    def _short(self, now: float) -> Iterator[tuple[str, str]]:
        """Yield (name, value as text) for line(): always loss and tokens/s, and lr, MFU, memory and end if known."""
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
        """Return (name, value as text) for the lines of the view on a terminal; only what is known has a line.

        `now` is in Unix seconds.
        """
        last = self.recent[-1] if self.recent else {}
        rows = [("step", f"{self.step:,} of {self.plan.steps:,}   {self.phase}".rstrip())]
        if self.losses:
            losses = [loss for _, loss in self.losses]
            blocks = history.sparkline(losses, min(losses), max(losses), 40)
            rows.append(("loss", f"{_number(last.get('loss'), '.4f')}  {blocks}"))
        if self.evaluated:
            rows.append(("held-out", f"{_held_out(self.evaluated)} at step {self.evaluated['step']:,}"))
        if last.get("lr") is not None:
            rows.append(("lr", f"{last['lr']:.3e}   gradient norm {_number(last.get('grad_norm'), '.3f')}"))
        speed, mfu = self.median("tokens_per_second"), self.median("mfu")
        read = self.median("tokens_read")
        planned = history.planned_speed(self.plan.tokens_per_second, self.plan.tokens_per_step, read)
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
        """Return as text each host's share of `speed`, by its rows per step, for at most eight hosts.

        These are no measurements of a host: a slow host slows down all.
        """
        rows = [host.slots * host.micro_batch for host in self.plan.hosts]
        shares = (
            f"{host.name} {speed * part / sum(rows):,.0f}" for host, part in zip(self.plan.hosts, rows, strict=True)
        )
        return ", ".join([*shares][:8]) + (", ..." if len(rows) > 8 else "")


def _held_out(row: Row) -> str:
    """Return an evaluation in words: the loss, or for prompts the mean reward of likeliest and of drawn answers."""
    if row.get("loss") is not None or row.get("reward") is None:
        return f"loss {_number(row.get('loss'), '.4f')}"
    words = f"reward {row['reward']:.4f}"
    return words + (f", of drawn answers {history.format_rise(row)}" if row.get("sampled") is not None else "")


class View:
    """Shows a State: draws it on a board, or prints lines with `say` if there is no terminal (`draw` is None)."""

    def __init__(self, plan: Plan, draw: screen.Board | None, say: Callable[[str], None]) -> None:
        """Begin before the first event; `draw` redraws a board on a terminal, None elsewhere; `say` prints a line."""
        self.state = State(plan)
        self._draw, self._say = draw, say
        self._tenths, self._said, self._drawn = 0, time.monotonic(), 0.0

    def feed(self, row: Row, quiet: bool = False) -> None:
        """Update the state by an event and print the line about it, if any.

        Without a board also prints a line at the first step, at each tenth of the run and after a minute without one.
        `quiet` means that the event is an old one: prints nothing.
        """
        sentence = self.state.feed(row)
        if quiet:
            self._tenths = self._tenth()
        elif sentence:
            self._say(sentence)
        if row["kind"] == "step" and not quiet and self._draw is None:
            now = time.monotonic()
            if self._tenth() > self._tenths or now - self._said > LINE_SECONDS or self.state.step == 1:
                self._tenths, self._said = self._tenth(), now
                self._say(self.state.line(time.time()))

    def refresh(self) -> None:
        """Redraw the board, at most five times a second; without one, print once a minute what step 1 waits for."""
        if self._draw is None and self.state.phase and time.monotonic() - self._said > LINE_SECONDS:
            self._said = time.monotonic()
            self._say(self.state.line(time.time()))
        if self._draw is not None and time.monotonic() - self._drawn > 0.2:
            self._drawn = time.monotonic()
            self._draw(self.state.step / self.state.plan.steps, self.state.board(time.time()))

    def _tenth(self) -> int:
        """Return how many tenths of the plan's steps are done."""
        return 10 * self.state.step // self.state.plan.steps


@contextmanager
def show_run(plan: Plan, *, is_result: bool = False) -> Iterator[View]:
    """Show a run of this plan during the block: yield the View to feed with events.

    On a terminal a board is drawn, elsewhere lines are printed; to stderr, or with `is_result` where results go.
    """
    with screen.board(f"{plan.recipe}: training", is_result=is_result) as draw:
        yield View(plan, draw, screen.show if is_result else screen.say)


def watch(run: RunDir) -> int:
    """Show a run on stdout until it ends, through its restarts; return 0 if it finished, else 1.

    Also returns 0 when nobody reads stdout any more. Ctrl-C raises KeyboardInterrupt; the run goes on. Raises UserError
    for a damaged plan.json, and OSError if there is none.
    """
    with show_run(Plan.read(run.plan), is_result=True) as view:
        for number, rows in enumerate(until_over(run, view.state)):
            for row in rows:
                view.feed(row, quiet=number == 0)
            if number == 0 and view.state.step:
                screen.show(view.state.line(time.time()))
            view.refresh()
            if not screen.is_stdout_open():
                return 0
    if view.state.end is None:
        screen.show(f"nothing runs it any more; the last word was at step {view.state.step:,}")
        return 1
    status = view.state.end["status"]
    screen.show(f"{status} at step {view.state.step:,}" + (f"; {run.report}" if run.report.exists() else ""))
    return int(status != "finished")


def until_over(run: RunDir, state: State) -> Iterator[list[Row]]:
    """Yield lists of the run's new events, every half second, until the run is over; the caller feeds them to `state`.

    The first list has all events so far. A finished run is over at once. Any other is over when two looks in a row see
    none of its processes: `finlm train` may be about to start it again.
    """
    looks, seen = follow(run, 0), 0
    yield next(looks)
    while seen < 2 and not (state.end and state.end["status"] == "finished"):
        time.sleep(POLL_SECONDS)
        yield next(looks)
        seen = seen + 1 if _is_over(run, state) else 0


def follow(run: RunDir, offset: int) -> Iterator[list[Row]]:
    """Yield, at each next(), the list of events added to events.jsonl since byte `offset` or the last next().

    Never ends and never waits: yields [] when there is no file or no new complete line. An unfinished last line is left
    for later, a line that is not JSON is skipped.
    """
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
    """Return whether no process of the run is left.

    With an end event that is so unless its lock is held here. Without one it is so if the last event is over 20 s old
    and the run was started on this machine, where its lock is free.
    """
    if state.end is not None:
        return not is_held(run)
    is_quiet = time.time() - (state.last_time or 0) > QUIET_SECONDS
    return is_quiet and lock_holder(run)[1] == os.uname().nodename and is_held(run) is False


def _number(value: float | None, form: str) -> str:
    """Return the value in this format specification; a dash for None."""
    return "–" if value is None else format(value, form)


def _clock(then: float, now: float) -> str:
    """Return the local time of day of `then`, with the date unless it is that of `now`; both are Unix seconds."""
    day = "" if time.localtime(then)[:3] == time.localtime(now)[:3] else "%a %Y-%m-%d "
    return time.strftime(f"{day}%H:%M", time.localtime(then))
