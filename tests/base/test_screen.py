"""What is said to a terminal or pipe that is gone ends nothing."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from collections.abc import Callable
from pathlib import Path

import pytest

from finlm.base import screen

from helpers import QUICKSTART, ROOT

CODE = """
import os
from finlm.base import screen
with screen.board("a run") as draw:
    os.write(1, f"opened {draw is not None}\\n".encode())  # print would go above the board
    input()  # and the reader of stderr goes away
    screen.say("a line")
    if draw:
        draw(0.5, [("step", "10 of 20")])
    screen.print_error(screen.UserError("a mistake", fix="mend it"))
screen.say("another line")
os.write(1, b"went on\\n")
"""


@pytest.mark.parametrize(("ends", "is_terminal"), [(os.pipe, False), (pty.openpty, True)])
def test_a_reader_that_is_gone_ends_nothing(ends: Callable[[], tuple[int, int]], is_terminal: bool) -> None:
    reader, stderr = ends()
    process = subprocess.Popen(
        [sys.executable, "-c", CODE],
        env=os.environ | {"TERM": "xterm"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
    )
    os.close(stderr)
    assert process.stdout and process.stdout.readline() == f"opened {is_terminal}\n"
    os.close(reader)
    said, _ = process.communicate("\n", timeout=30)
    assert (said, process.returncode) == ("went on\n", 0)


PLAN = [sys.executable, "-m", "finlm", "plan"]
ENV = os.environ | {"PYTHONPATH": str(ROOT / "src"), "TERM": "xterm"}
LONG = re.compile(r"\S{60,}")


@pytest.mark.parametrize(
    "arguments",
    [
        ["plan", str(QUICKSTART)],
        ["plan", str(QUICKSTART), "--json"],
        ["diagnose", str(ROOT / "README.md"), "--json"],
        ["--help"],
        ["--version"],
        ["--print-completion", "bash"],
    ],
)
def test_a_result_whose_reader_is_gone_leaves_no_traceback(arguments: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "finlm", *arguments]
    done = subprocess.run(command, env=ENV, stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writer)
    assert done.returncode == 0 and "rror" not in done.stderr and "Exception" not in done.stderr


@pytest.mark.parametrize("arguments", [["plan", str(QUICKSTART)], ["--version"]])
def test_a_full_disk_behind_stdout_is_an_error(arguments: list[str]) -> None:
    command = [sys.executable, "-m", "finlm", *arguments]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(command, env=ENV, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("error: the result cannot be written to stdout: No space left on device\n  fix: ")
    assert "Exception" not in done.stderr


def on_terminal(command: list[str], columns: int) -> tuple[str, str]:
    """What a command prints on terminals of so many columns: its stdout and its stderr."""
    said = []
    ends = [pty.openpty(), pty.openpty()]
    for _, terminal in ends:
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    env = {name: value for name, value in ENV.items() if name not in ("NO_COLOR", "COLUMNS")}
    process = subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, stdout=ends[0][1], stderr=ends[1][1])
    for reader, terminal in ends:
        os.close(terminal)
        text = b""
        try:
            while block := os.read(reader, 65536):
                text += block
        except OSError:  # the last process that had the terminal is gone
            pass
        os.close(reader)
        said.append(text.decode().replace("\r\n", "\n"))
    process.wait(30)
    return said[0], said[1]


def words_of(text: str) -> list[str]:
    """The words without times, which go on from one command to the next."""
    return re.sub(r"\x1b\[[0-9;]*m|\b\d\d:\d\d\b", "", text).split()


@pytest.mark.parametrize(
    "recipes", [["plan", "llama2-7b-fincorpus/pretrain"], ["diff", "xuanyuan-6b/pretrain", "xuanyuan-6b/sft"]]
)
def test_at_80_columns_no_word_of_a_result_is_broken(recipes: list[str]) -> None:
    command = [sys.executable, "-m", "finlm", recipes[0], *(str(ROOT / f"recipes/{name}.yaml") for name in recipes[1:])]
    narrow, said = on_terminal(command, 80)
    wide = subprocess.run(command, env=ENV, capture_output=True, text=True, check=True).stdout
    assert said == "" and set(words_of(wide)) - set(words_of(narrow)) <= {"key", "plan", "end"}
    lines = re.sub(r"\x1b\[[0-9;]*m", "", narrow).splitlines()
    assert [line for line in lines if len(line) > 80 and not LONG.search(line)] == []
    assert "\x1b[1m" in narrow and "\x1b" not in wide


def test_an_error_is_coloured_on_a_terminal_and_its_words_are_whole() -> None:
    result, said = on_terminal([*PLAN, str(QUICKSTART), "--set", "model.hiden=1", "--set", "zero.stage=7"], 60)
    assert result == "" and "\x1b[1;31merror:\x1b[0m 2 mistakes" in said and "\x1b[1;32m  fix:" in said
    lines = re.sub(r"\x1b\[[0-9;]*m", "", said).splitlines()
    # A path is one word, and longer than the screen where the repository lies deep.
    assert "model.hiden:" in words_of(said) and all(len(line) <= 60 or len(line.split()) == 1 for line in lines)


@pytest.mark.parametrize(
    ("line", "folded"),
    [
        ("  - one two three four", "  - one two\n    three four"),
        ("  name   words of a value", "  name   words\n    of a value"),
        ("营业收入增长，净利润下降。", "营业收入增\n长，净利润\n下降。"),
        ("/a/path/that/is/too/long", "/a/path/that/is/too/long"),
    ],
)
def test_a_line_is_folded_between_its_words(line: str, folded: str) -> None:
    assert screen.fold(line, 14 if line.startswith(" ") else 11) == folded
