"""The set-up's refusals: one message each, exit 2, nothing created."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from helpers import ROOT


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """The files that the set-up reads, in a directory of their own."""
    (tmp_path / "scripts").mkdir()
    for name in ("scripts/setup.sh", "scripts/setup.py", "requirements.txt", "requirements.lock", "pyproject.toml"):
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
    assert setup.installs("requirements-v100.txt")[1] == ("torch", ["-r", "requirements-v100.txt"])
    assert setup.fingerprint("requirements-v100.txt") != setup.fingerprint("requirements.txt")
    assert f"torch=={setup.pin('torch')}+cu126" in (ROOT / "requirements-v100.txt").read_text(encoding="utf-8")
    assert not setup.is_profile("requirements-gguf.txt")


def pinned(path: Path) -> dict[str, str]:
    """{package: version} of the pins in a requirements file, names as the index spells them."""
    pins = re.findall(r"^([A-Za-z0-9._-]+)==([^ \\\n]+)", path.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[._]", "-", name.lower()): version for name, version in pins}


@pytest.mark.parametrize(
    "profile",
    [
        "requirements",
        *(f"requirements-{extra}" for extra in ("tracking", "gguf", "serve", "ray", "s3", "cflue", "linear")),
    ],
)
def test_the_lock_holds_every_pin_with_hashes_and_nothing_of_torch(profile: str) -> None:
    locked, wanted = pinned(ROOT / f"{profile}.lock"), pinned(ROOT / f"{profile}.txt")
    assert {name: version for name, version in wanted.items() if name != "torch"}.items() <= locked.items()
    text = (ROOT / f"{profile}.lock").read_text(encoding="utf-8")
    entries = re.findall(r"^\S+==.*\n.*", text, re.MULTILINE)
    assert not [entry for entry in entries if "\n    --hash=sha256:" not in entry], "a package without a hash"
    assert not [name for name in locked if name == "torch" or name.startswith(("nvidia-", "cuda-", "triton"))]
    assert not re.search(r"https?://|--index", text)


def test_what_is_installed_is_what_the_lock_says() -> None:
    lines = re.findall(r"^(\S+==[^\\\n]+)", (ROOT / "requirements.lock").read_text(encoding="utf-8"), re.MULTILINE)
    wanted = [line for line in map(Requirement, lines) if line.marker is None or line.marker.evaluate()]
    assert len(wanted) > 80
    assert not [str(line) for line in wanted if importlib.metadata.version(line.name) not in line.specifier]


def test_every_range_of_the_package_admits_the_pinned_version() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    pins = {name: version for path in ROOT.glob("requirements*.txt") for name, version in pinned(path).items()}
    pins["torch"] = pins["torch"].partition("+")[0]
    ranges = [Requirement(line) for group in (project["dependencies"], *extras.values()) for line in group]
    named = {re.sub(r"[._]", "-", wanted.name.lower()): wanted.specifier for wanted in ranges if wanted.name != "finlm"}
    assert set(named) == set(pins)
    assert not [name for name, specifier in named.items() if pins[name] not in specifier]


def test_pip_install_brings_no_test_tool() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    tools = {Requirement(line).name for line in extras.pop("dev")} - {"finlm"}
    assert {"pytest", "ruff", "mypy"} <= tools
    assert not tools & {Requirement(line).name for group in extras.values() for line in group}


def test_the_image_is_made_of_files_that_exist_and_of_all_that_setup_reads() -> None:
    lines = (ROOT / "Dockerfile").read_text(encoding="utf-8").splitlines()
    copied = {name for line in lines if line.startswith("COPY ") for name in line.split()[1:-1]}
    assert [name for name in copied if not (ROOT / name).exists()] == []
    read = {"requirements.txt", "requirements.lock", "pyproject.toml", "README.md", "LICENSE"}
    assert read | {"scripts/setup.sh", "scripts/setup.py", "src"} <= copied
    (base,) = (line.split()[1] for line in lines if line.startswith("FROM "))
    assert re.fullmatch(r"python:3\.(11|12|13)-slim-[a-z]+", base)
    assert any("g++" in line.split() for line in lines), "DeepSpeed builds its CPU optimizer"
