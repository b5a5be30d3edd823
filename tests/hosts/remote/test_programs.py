"""What every program that doctor sends to a host must be, and how they travel."""

from __future__ import annotations

import ast
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from finlm.hosts.remote import carrier, gpu, links, probe, ray_node, receiver

PROGRAMS = [Path(str(module.__file__)) for module in (probe, carrier, receiver, gpu, links)]
ALONE = json.dumps({"me": "n0", "port": 0, "token": "t", "seconds": 1, "peers": []})


def old_python() -> str | None:
    """Python 3.8 of the PATH or of pyenv; a pyenv shim without a version selected does not count."""
    installed = sorted(Path.home().glob(".pyenv/versions/3.8*/bin/python3.8"))
    for candidate in (*map(str, installed), shutil.which("python3.8")):
        if candidate and subprocess.run([candidate, "-V"], capture_output=True, check=False).returncode == 0:
            return candidate
    return None


def carried(interpreter: str, programs: dict[str, Any], **fields: Any) -> subprocess.CompletedProcess[str]:
    """What the carrier prints for these programs, sent as doctor sends them."""
    request = {"env": {}, "seconds": 20, "programs": programs} | fields
    script = f"{PROGRAMS[1].read_text()}\n\ncarry(**json.loads({json.dumps(request)!a}))\n"
    return subprocess.run([interpreter, "-"], input=script, capture_output=True, text=True, timeout=60, check=True)


def answers(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(done.stdout.partition(carrier.MARK)[2])["answers"]
    return found


@pytest.mark.parametrize("path", [*PROGRAMS, Path(str(ray_node.__file__))], ids=lambda path: path.name)
def test_the_source_is_python_3_8_syntax_and_standard_library(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"), feature_version=(3, 8))
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(str(node.module).partition(".")[0])
    assert names <= set(sys.stdlib_module_names)


def test_python_3_8_runs_all_of_them_from_standard_input(tmp_path: Path) -> None:
    interpreter = old_python()
    if interpreter is None:
        pytest.skip("no Python 3.8 on PATH or under ~/.pyenv/versions")
    (tmp_path / "a.py").write_text("x = 1\n")
    trees = json.dumps({"code": {"path": str(tmp_path), "names": ["a.py", "b.py"], "follow": False}})
    programs = {
        "host": (PROGRAMS[0].read_text(), ["--disk=run=/"]),
        "gpu": (PROGRAMS[3].read_text(), []),
        "links": (PROGRAMS[4].read_text(), [ALONE]),
        "trees": (f"{PROGRAMS[2].read_text()}\n\nanswer_fingerprints({trees!a})\n", []),
    }
    done = carried(interpreter, programs)
    found = answers(done)
    assert done.stderr == ""
    assert found["host"]["python"]["version"].startswith("3.8")
    assert [found[name]["errors"] for name in ("host", "gpu", "links")] == [{}, {}, {}]
    assert found["trees"] == {"code": {"a.py": "sha256 " + sha256("x = 1\n"), "b.py": None}}


def sha256(text: str) -> str:
    import hashlib

    return hashlib.sha256(text.encode()).hexdigest()


def test_a_program_that_dies_or_hangs_is_said_and_the_others_answer() -> None:
    programs = {
        "good": ("print('[1, 2]')", []),
        "dead": ("raise ValueError('no such thing')", []),
        "silent": ("import os; os._exit(3)", []),
        "slow": ("import time; time.sleep(60)", []),
    }
    found = answers(carried(sys.executable, programs, seconds=1))
    assert found["good"] == [1, 2]
    assert found["dead"] == {"failed": "ValueError: no such thing"}
    assert "failed" in found["silent"] and found["slow"] == {"failed": "no answer within 1 s"}


def test_the_environment_of_the_ranks_reaches_the_programs_and_no_command_line() -> None:
    source = "import json, os; print(json.dumps([os.environ['KEY'], open('/proc/self/cmdline').read()]))"
    value, line = answers(carried(sys.executable, {"one": (source, [])}, env={"KEY": "a secret"}))["one"]
    assert value == "a secret" and "secret" not in line
