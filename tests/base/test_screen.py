"""What is said to a terminal or pipe that is gone ends nothing."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from collections.abc import Callable

import pytest

CODE = """
import os
from finlm.base import screen
with screen.board("a run") as draw:
    os.write(1, f"opened {draw is not None}\\n".encode())  # print would go above the board
    input()  # and the reader of stderr goes away
    screen.say("a line")
    if draw:
        draw(0.5, [("step", "10 of 20")])
    screen.painted([("green", "words")])
    screen.table(["check"], [["ok"]])
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
