"""What a person sees in the terminal: progress bars, tables, messages. The only place that imports rich.

Everything goes to stderr, so that stdout carries results only (one JSON document under --json). What cannot be written
is lost and ends nothing: the terminal was closed, or the `tee` behind a pipe has ended.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import IO, TYPE_CHECKING, Protocol, cast

if TYPE_CHECKING:
    from rich.console import Console

    from finlm.base.errors import UserError


class Advance(Protocol):
    """The step of a progress bar."""

    def __call__(self, amount: float, description: str | None = None) -> None:
        """Move on by amount; `description` renames the bar."""


class Board(Protocol):
    """Redraws a block of the terminal."""

    def __call__(self, done: float, rows: Sequence[tuple[str, str]]) -> None:
        """done: share of the work, 0 to 1; rows: (name, value)."""


@contextmanager
def _never_fails() -> Iterator[None]:
    """Write to stderr in the block."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.EPIPE, errno.EIO):  # for good; a disk may have room again
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, 2)  # what is buffered goes there too, else the interpreter's own last flush fails
            os.close(null)


class _Stderr:
    """Standard error for rich, below the display that may be on it."""

    def __init__(self) -> None:
        self._file = getattr(sys.stderr, "rich_proxied_file", sys.stderr)
        self.encoding, self.isatty, self.fileno = self._file.encoding, self._file.isatty, self._file.fileno

    def write(self, text: str) -> int:
        with _never_fails():
            self._file.write(text)
        return len(text)

    def flush(self) -> None:
        with _never_fails():
            self._file.flush()


def console() -> Console:
    """A console on stderr; 100 columns where it is not a terminal, so that logs wrap alike everywhere."""
    from rich.console import Console

    width = None if sys.stderr.isatty() else 100
    return Console(file=cast(IO[str], _Stderr()), highlight=False, soft_wrap=True, width=width)


def say(text: str = "") -> None:
    """One plain line on stderr; no markup, so that paths with brackets print as they are."""
    with _never_fails():
        print(text, file=sys.stderr, flush=True)


def heading(text: str) -> None:
    """A bold line on a terminal, a plain one elsewhere."""
    from rich.text import Text

    console().print(Text(text, style="bold"))


def painted(parts: Sequence[tuple[str, str]]) -> None:
    """Stretches of text with their styles ("" = plain) as one paragraph."""
    from rich.text import Text

    console().print(Text.assemble(*parts))


@contextmanager
def progress(description: str, total: float | None, unit: str = "") -> Iterator[Advance]:
    """A progress bar with elapsed and remaining time; a line at each tenth when not a terminal."""
    if not sys.stderr.isatty():
        yield _plain_progress(description, total, unit)
        return
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f}%"))
    with Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console()) as bar:
        task = bar.add_task(description, total=total)

        def advance(amount: float, description: str | None = None) -> None:
            bar.update(task, advance=amount, description=description)

        yield advance


@contextmanager
def board(title: str) -> Iterator[Board | None]:
    """A block of named values under a bar, redrawn in place with what is said above it; None when not a terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.live import Live
    from rich.panel import Panel
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    with Live(console=console(), auto_refresh=False, transient=True) as live:

        def draw(done: float, rows: Sequence[tuple[str, str]]) -> None:
            grid = Table.grid(padding=(0, 2))
            grid.add_column(style="bold")
            grid.add_row(f"{100 * done:.0f} %", ProgressBar(total=1.0, completed=done, width=40))
            for name, value in rows:
                style = "red" if name in ("incident", "quiet") else ""
                grid.add_row(Text(name), Text(value, style, no_wrap=True, overflow="ellipsis"))
            live.update(Panel(grid, title=Text(title), title_align="left", expand=False), refresh=True)

        yield draw


def _plain_progress(description: str, total: float | None, unit: str) -> Advance:
    """Ten lines in all for a pipe or a log file instead of a redrawn bar."""
    done, shown = 0.0, 0

    name = description

    def advance(amount: float, description: str | None = None) -> None:
        nonlocal done, shown
        done += amount
        tenths = int(10 * done / total) if total else 0
        if tenths > shown:
            shown = tenths
            say(f"{description or name}: {min(100, 10 * tenths)} % {unit}".rstrip())

    return advance


def fail(error: UserError) -> None:
    """Print a user mistake as problem / evidence / fix."""
    say(f"error: {error.problem}")
    if error.evidence:
        say("  evidence: " + error.evidence.replace("\n", "\n            "))
    if error.fix:
        say("  fix:      " + error.fix.replace("\n", "\n            "))


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Rows of words under a header, coloured on a terminal: green ok, yellow warn, red FAIL."""
    from rich.table import Table
    from rich.text import Text

    styles = {"ok": "green", "warn": "yellow", "FAIL": "bold red"}
    grid = Table(*header, box=None, header_style="bold", pad_edge=False)
    for row in rows:
        grid.add_row(*(Text(word, styles.get(word, "")) for word in row))  # Text: brackets in it are no markup
    console().print(grid)
