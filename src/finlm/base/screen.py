"""Print results, messages, progress bars and tables on the terminal. The only place that imports rich.

A command's result goes to stdout (`show`, `heading`, `table`, `print_json`), what it says on the way to stderr (`say`,
`progress`). Beside a JSON document the result for people goes to stderr too. On a terminal lines break between words.
What cannot be written is lost and ends nothing: the terminal was closed, or the `tee` behind a pipe has ended. Only a
full disk behind stdout is an error, since the result is lost with it.
"""

from __future__ import annotations

import errno
import io
import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TextIO, cast

from finlm.base import files
from finlm.base.errors import UserError
from finlm.base.language import WIDE, translate, width

if TYPE_CHECKING:
    from rich.console import Console

_STDOUT, _STDERR = 1, 2
_results = _STDOUT
_is_stdout_open = True

# Between characters of two columns a line may break; never before a closing mark.
_WORD = re.compile(rf"\s*(?:[{WIDE}][，。、；：）」]*|[^\s{WIDE}]+)")
_HANGING = re.compile(r" *(?:- |\w+: +|\S+(?: \S+)?  +)?")  # a list's item, or a name before its value


Advance = Callable[[float], None]  # moves a progress bar on by an amount, in the units of the bar's total
Board = Callable[[float, Sequence[tuple[str, str]]], None]  # redraws a bar (0 to 1) above (name, value) rows


def send_results(*, to_stderr: bool) -> None:
    """Send results (`show`, `heading`, `write`, `table`) to stderr from now on, or to stdout; stdout may carry JSON."""
    global _results
    _results = _STDERR if to_stderr else _STDOUT


def is_stdout_open() -> bool:
    """Return whether stdout can still be written to; False once a write to it has failed."""
    return _is_stdout_open


def flush() -> None:
    """Flush stdout, ignoring all OSErrors: the interpreter's last flush at exit would complain of a closed pipe."""
    with suppress(UserError), _ignore_closed(_STDOUT):
        _stream(_STDOUT).flush()


@contextmanager
def _ignore_closed(number: int) -> Iterator[None]:
    """Suppress OSError while the block writes to file descriptor `number`.

    A closed stream is redirected to /dev/null. So is stdout after any OSError; is_stdout_open() is False from then on.
    Raises UserError if writing to stdout fails for another reason, such as a full disk.
    """
    global _is_stdout_open
    try:
        yield
    except OSError as error:
        is_gone = error.errno in (errno.EPIPE, errno.EIO)  # for good; a disk may have room again
        if is_gone or number == _STDOUT:
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, number)  # what is buffered goes there too, else the interpreter's own last flush fails
            os.close(null)
        if number == _STDOUT:
            _is_stdout_open = False
            if not is_gone:
                fix = "free space there, or write to another disk"
                raise UserError(f"the result cannot be written to stdout: {error.strerror}", fix=fix) from None


class _Stream:
    """Stdout (number 1) or stderr (2) as a file for rich, below any live display; a closed stream is ignored."""

    def __init__(self, number: int) -> None:
        """Take sys.stdout or sys.stderr as it is now, or the stream below rich's own if a live display replaced it."""
        stream = _stream(number)
        self._number = number
        self._file: TextIO = getattr(stream, "rich_proxied_file", stream)
        self.encoding, self.isatty, self.fileno = self._file.encoding, self._file.isatty, self._file.fileno

    def write(self, text: str) -> int:
        """Write the text and return its length; nothing is written to a closed stream."""
        with _ignore_closed(self._number):
            self._file.write(text)
        return len(text)

    def flush(self) -> None:
        """Flush the stream; do nothing if it is closed."""
        with _ignore_closed(self._number):
            self._file.flush()


def _stream(number: int) -> TextIO:
    """Return sys.stdout for number 1, else sys.stderr; an empty buffer if the shell closed that stream."""
    stream = sys.stdout if number == _STDOUT else sys.stderr
    return stream or io.StringIO()  # None: closed by the shell


def console(number: int = _STDERR) -> Console:
    """Return a rich console on stderr, or on stdout if number is 1; with 100 columns when not on a terminal."""
    from rich.console import Console

    stream = _Stream(number)
    columns = None if stream.isatty() else 100
    return Console(file=cast(IO[str], stream), highlight=False, soft_wrap=True, width=columns)


def say(text: str = "") -> None:
    """Print text to stderr, translated; no markup, so that paths with brackets print as they are."""
    _print(_STDERR, translate(text))


def program() -> str:
    """Return the command that starts finlm here: `finlm` if it is on the PATH, else PYTHON -m finlm."""
    return "finlm" if shutil.which("finlm") else f"{relative(Path(sys.executable))} -m finlm"


def say_command(command: str) -> None:
    """Print a command to type to stderr, indented and never folded, so that it can be copied."""
    with _ignore_closed(_STDERR):
        print(f"  {command}", file=_stream(_STDERR), flush=True)


def show(text: str = "") -> None:
    """Print text, translated, as part of a command's result (to stdout, unless send_results says stderr).

    Raises UserError when stdout cannot be written, as on a full disk.
    """
    _print(_results, translate(text))


def heading(text: str) -> None:
    """Print a line of the result, translated, bold on a terminal, to where send_results() says.

    Raises UserError if stdout cannot be written, as on a full disk; a closed pipe is ignored.
    """
    text = translate(text)
    _print(_results, text, text)


def write(text: str) -> None:
    """Print a piece of the result as it is: untranslated, not folded, without end of line. UserError on a full disk."""
    with _ignore_closed(_results):
        print(text, end="", file=_stream(_results), flush=True)


def print_json(document: Any) -> None:
    """Print the document as one line of JSON to stdout. Raises UserError if it cannot, as on a full disk."""
    with _ignore_closed(_STDOUT):
        print(json.dumps(document, ensure_ascii=False), flush=True)


def print_styled(parts: Sequence[tuple[str, str]]) -> None:
    """Print (text, rich style; "" = plain) pairs as one paragraph of the result, each text translated.

    Raises UserError when stdout cannot be written, as on a full disk.
    """
    from rich.text import Text

    console(_results).print(Text.assemble(*((translate(text), style) for text, style in parts)))


def _print(number: int, text: str, start: str = "", style: str = "bold") -> None:
    """Print lines to descriptor `number`; on a terminal, fold them to its width and set `start` in the rich style.

    `start` is the beginning of text; if text does not begin with it, all of text is styled. "" means no style. Raises
    UserError when stdout cannot be written, as on a full disk.
    """
    stream = _stream(number)
    if stream.isatty():
        text = "\n".join(fold(line, _columns(stream)) for line in text.split("\n"))
        if start:
            from rich.text import Text

            shown = Text(text)
            shown.stylize(style, 0, len(start) if text.startswith(start) else len(text))
            console(number).print(shown)
            return
    with _ignore_closed(number):
        print(text, file=stream, flush=True)


def _columns(stream: IO[str]) -> int:
    """Return the width of the stream's terminal in columns; 80 when it is not known."""
    try:
        return os.get_terminal_size(stream.fileno()).columns or 80
    except OSError:
        return 80


def fold(line: str, columns: int) -> str:
    """Return the line broken between words to fit the columns; words that are longer stay whole.

    Later lines are indented to where the text of a list item, or the value after a name, begins.
    """
    if width(line) <= columns:
        return line
    begins = _HANGING.match(line)
    hang = " " * min(begins.end() if begins else 0, columns // 3)
    lines, words = [""], _WORD.findall(line)
    for word in words:
        if lines[-1].strip() and width(lines[-1] + word) > columns:
            lines.append(hang + word.lstrip())
        else:
            lines[-1] += word
    return "\n".join(lines)


@contextmanager
def progress(description: str, total: float | None, unit: str = "") -> Iterator[Advance]:
    """Show a progress bar with elapsed and remaining time on stderr during the block; yield the function that moves it.

    If stderr is not a terminal, this function prints a line at each tenth of `total`, ending with `unit`; nothing if
    `total` is None.
    """
    if not sys.stderr.isatty():
        yield _plain_progress(description, total, unit)
        return
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f}%"))
    with Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console()) as bar:
        yield partial(bar.advance, bar.add_task(translate(description), total=total))


@contextmanager
def board(title: str, *, is_result: bool = False) -> Iterator[Board | None]:
    """Show a bar above named values during the block; yield the function that redraws it, or None if not on a terminal.

    Draws on stderr, or with `is_result` where results go. Vanishes at the end of the block.
    """
    number = _results if is_result else _STDERR
    if not _stream(number).isatty():
        yield None
        return
    from rich.live import Live
    from rich.panel import Panel
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    with Live(console=console(number), auto_refresh=False, transient=True) as live:

        def draw(done: float, rows: Sequence[tuple[str, str]]) -> None:
            """Redraw the bar and the rows; the rows `incident` and `quiet` are red."""
            grid = Table.grid(padding=(0, 2))
            grid.add_column(style="bold")
            grid.add_row(f"{100 * done:.0f} %", ProgressBar(total=1.0, completed=done, width=40))
            for name, value in rows:
                style = "red" if name in ("incident", "quiet") else ""
                grid.add_row(Text(translate(name)), Text(translate(value), style, no_wrap=True, overflow="ellipsis"))
            live.update(Panel(grid, title=Text(title), title_align="left", expand=False), refresh=True)

        yield draw


def _plain_progress(description: str, total: float | None, unit: str) -> Advance:
    """Return an Advance that prints a line to stderr at each tenth of `total`, and nothing if `total` is None."""
    done, shown = 0.0, 0

    def advance(amount: float) -> None:
        """Add `amount`; print a line when another tenth of the total is done."""
        nonlocal done, shown
        done += amount
        tenths = int(10 * done / total) if total else 0
        if tenths > shown:
            shown = tenths
            _print(_STDERR, f"{translate(description)}: {min(100, 10 * tenths)} % {unit}".rstrip())

    return advance


def print_error(error: UserError) -> None:
    """Print an error as problem / evidence / fix to stderr, translated; on a terminal these labels are coloured.

    Neither raises nor ends the process.
    """
    for label, text, style in (
        ("error:", error.problem, "bold red"),
        ("  evidence:", error.evidence, "bold"),
        ("  fix:     ", error.fix, "bold green"),
    ):
        if text:
            name, indent = translate(label), "\n" + " " * 12
            gap = " " * (1 + width(label) - width(name))
            _print(_STDERR, f"{name}{gap}{translate(text).replace(chr(10), indent)}", name, style)


_STYLES = {"ok": "green", "warn": "yellow", "FAIL": "bold red"}


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print rows below a header as part of the result, translated; on a terminal ok is green, warn yellow, FAIL red.

    On a terminal that is too narrow for the longest words of the columns, each row becomes a block of lines. In a file
    or a pipe each row is one line. Raises UserError when stdout cannot be written, as on a full disk.
    """
    lines = [[translate(" ".join(cell.split())) for cell in row] for row in (header, *rows)]
    stream = _stream(_results)
    if not stream.isatty():
        widths = [max(map(width, column)) for column in zip(*lines, strict=True)]
        for row in lines:
            padded = (cell + " " * (columns - width(cell)) for cell, columns in zip(row, widths, strict=True))
            _print(_results, "  ".join(padded).rstrip())
        return
    needed = [
        max(width(word) for cell in column for word in cell.split() or [""]) for column in zip(*lines, strict=True)
    ]
    if sum(needed) + 2 * len(needed) > _columns(stream):
        for row in lines[1:]:
            _print(_results, row[0], row[0])
            for name, cell in zip(lines[0][1:], row[1:], strict=True):
                _print(_results, f"  {name}  {cell}")
        return
    from rich.table import Table
    from rich.text import Text

    grid = Table(box=None, header_style="bold", pad_edge=False)
    for name, columns in zip(lines[0], needed, strict=True):
        grid.add_column(name, min_width=columns)
    for row in lines[1:]:
        grid.add_row(*(Text(word, _STYLES.get(word, "")) for word in row))  # Text: brackets in it are no markup
    console(_results).print(grid)


def relative(path: Path) -> Path:
    """Return the path relative to the current directory if it lies below it, else the path as given."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def write_pages(pages: Mapping[Path, str], argv: Sequence[str] | None, command: str) -> int:
    """Write those of the generated `pages`, {path: text}, whose file differs, and return 0.

    With --check in `argv` (None: sys.argv), writes nothing: prints to stderr which pages are stale, with the `command`
    that writes them, and returns 1 if any is.
    """
    check = "--check" in (sys.argv[1:] if argv is None else argv)
    stale = [path for path, text in pages.items() if not path.is_file() or path.read_text(encoding="utf-8") != text]
    for path in stale:
        if check:
            say(f"{path.name} is stale: run {command}")
        else:
            files.write_text(path, pages[path])
    return int(check and bool(stale))
