"""The set-up's refusals: one message each, exit 2, nothing created."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from helpers import ROOT


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """The files that the set-up reads, in a directory of their own."""
    (tmp_path / "scripts").mkdir()
    for name in ("scripts/setup.sh", "scripts/setup.py", "requirements.txt", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


def run(checkout: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """The set-up in this environment."""
    command = [shutil.which("bash") or "bash", "scripts/setup.sh"]
    return subprocess.run(command, cwd=checkout, env=env, capture_output=True, text=True, timeout=60, check=False)


def path_of(directory: Path, *programs: str) -> str:
    """A PATH with these programs only."""
    directory.mkdir()
    for program in programs:
        found = shutil.which(program)
        assert found is not None
        (directory / program).symlink_to(found)
    return str(directory)


def test_no_python_is_said_with_the_ways_to_get_one(checkout: Path) -> None:
    result = run(checkout, PATH=os.environ["PATH"], PYTHON="/none/python")
    assert result.returncode == 2
    assert "no Python 3.11" in result.stderr and "apt-get install python3.11" in result.stderr


def test_no_compiler_is_said_before_anything_is_installed(checkout: Path, tmp_path: Path) -> None:
    path = path_of(tmp_path / "bin", "bash", "dirname", "sed", "cat")
    result = run(checkout, PATH=path, PYTHON=os.path.realpath(sys.executable))
    assert result.returncode == 2, result.stderr
    assert "no C++ compiler" in result.stderr and "apt-get install g++" in result.stderr
    assert not (checkout / ".venv").exists()


def test_a_full_disk_is_said_before_anything_is_installed(checkout: Path) -> None:
    text = (checkout / "scripts/setup.py").read_text(encoding="utf-8")
    # No test can fill the disk of its machine, but it can ask for more than any has.
    (checkout / "scripts/setup.py").write_text(text.replace("NEEDED_BYTES = 3 * 10**9", "NEEDED_BYTES = 10**18"))
    result = run(checkout, PATH=os.environ["PATH"], PYTHON=os.path.realpath(sys.executable))
    assert result.returncode == 2, result.stderr
    assert "not enough disk space" in result.stderr and "GB free" in result.stderr
    assert not (checkout / ".venv").exists()
