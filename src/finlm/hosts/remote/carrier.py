"""Run the programs that doctor sends to a host, all at once: `ssh host python3 -`, this file and a call on its stdin.

One connection per host carries everything. Same rules as probe.py: Python 3.8, standard library only, never raises, and
nothing outlives it by more than the time it was given. The answer is a line of JSON after MARK, whatever a login script
printed before; it says when it began and ended by this host's clock.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

MARK = "finlm-facts:"


def carry(env: dict[str, str], seconds: float, programs: dict[str, tuple[str, list[str]]]) -> None:
    """Run all programs at once, and print MARK and the JSON of {"began", "ended", "answers": {name: answer}}.

    Times are unix seconds. An answer is the JSON that the program prints, or {"failed": why}. Puts the interpreter's
    directory first on PATH in os.environ, then sets `env` there. `seconds` is the limit for each program. `programs`
    maps a name to (source, arguments) and is not empty.
    """
    began = time.time()
    # Ranks find ninja beside their interpreter, and so must the probe.
    os.environ["PATH"] = os.path.dirname(sys.executable) + os.pathsep + os.environ.get("PATH", "")  # noqa: PTH120
    os.environ.update(env)
    with ThreadPoolExecutor(len(programs)) as pool:
        given = pool.map(lambda program: run_program(program[0], program[1], seconds), programs.values())
        answers = dict(zip(programs, given))  # noqa: B905 - no `strict` in Python 3.8
    print(MARK + json.dumps({"began": began, "ended": time.time(), "answers": answers}), flush=True)


def run_program(source: str, arguments: list[str], seconds: float) -> Any:
    """Run a Python program for at most `seconds`; return the JSON value that it prints, or {"failed": why}."""
    pipe, errors = subprocess.PIPE, b""
    try:
        with subprocess.Popen([sys.executable, "-", *arguments], stdin=pipe, stdout=pipe, stderr=pipe) as process:
            try:
                output, errors = process.communicate(source.encode(), seconds)
            except subprocess.TimeoutExpired:
                process.kill()
                return {"failed": f"no answer within {seconds:.0f} s"}
        return json.loads(output)
    except (OSError, ValueError) as error:
        last = errors.decode("utf-8", "replace").strip().splitlines()[-1:]
        return {"failed": last[0] if last else f"{type(error).__name__}: {error}"}
