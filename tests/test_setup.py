"""The set-up's refusals: one message each, exit 2, nothing created."""

from __future__ import annotations

import importlib.util
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


def run(checkout: Path, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    """The set-up in this environment."""
    command = [shutil.which("bash") or "bash", "scripts/setup.sh", *arguments]
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


def test_the_interpreter_of_a_venv_stays_chosen(checkout: Path, tmp_path: Path) -> None:
    for name in ("chosen/python3.12", "bin/python3.11"):
        script = tmp_path / name
        script.parent.mkdir()
        script.write_text(f"#!/bin/sh\necho {script.parent.name}\n")
        script.chmod(0o755)
    path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
    assert run(checkout, PATH=path).stdout.split() == ["bin", "bin"], "asked for its version, then run"
    (checkout / ".venv/bin").mkdir(parents=True)
    (checkout / ".venv/bin/python").symlink_to(tmp_path / "chosen/python3.12")
    assert run(checkout, PATH=path).stdout.split() == ["chosen", "chosen"]
    assert run(checkout, PATH=path, PYTHON="python3.11").stdout.split() == ["bin", "bin"]


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


def test_a_profile_that_is_none_is_refused_with_those_there_are(checkout: Path) -> None:
    shutil.copy(ROOT / "requirements-v100.txt", checkout)
    result = run(checkout, "requirements-v200.txt", PATH=os.environ["PATH"], PYTHON=os.path.realpath(sys.executable))
    assert result.returncode == 2
    assert "requirements-v100.txt, requirements.txt" in result.stderr
    assert not (checkout / ".venv").exists()


def test_a_profile_stays_chosen_and_names_the_same_torch() -> None:
    spec = importlib.util.spec_from_file_location("setup", ROOT / "scripts/setup.py")
    assert spec is not None and spec.loader is not None
    setup = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(setup)
    assert setup.chosen([], "") == setup.chosen([], "(3, 11) abc") == "requirements.txt"
    assert setup.chosen(["requirements-v100.txt"], "(3, 11) requirements.txt abc") == "requirements-v100.txt"
    assert setup.chosen([], "(3, 11) requirements-v100.txt abc") == "requirements-v100.txt"
    assert setup.installs("requirements-v100.txt")[0] == ("torch", ["-r", "requirements-v100.txt"])
    assert setup.fingerprint("requirements-v100.txt") != setup.fingerprint("requirements.txt")
    assert f"torch=={setup.pin('torch')}+cu126" in (ROOT / "requirements-v100.txt").read_text(encoding="utf-8")
    assert not setup.is_profile("requirements-gguf.txt")
