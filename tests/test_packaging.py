"""`pip install .`: the wheel holds all of src, and its `finlm` works in any directory; completion completes."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from finlm.cli import main

from helpers import ROOT, finlm

VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, as setuptools leaves build/ beside what it reads."""
    copy = tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "requirements.txt", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy / name)
    for name in ("src", "recipes"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    build = "import sys; from setuptools import build_meta; print(build_meta.build_wheel(sys.argv[1]))"
    result = subprocess.run(
        [sys.executable, "-c", build, copy], cwd=copy, capture_output=True, text=True, check=False, timeout=120
    )
    assert result.returncode == 0, result.stderr
    return copy / result.stdout.splitlines()[-1]


def test_the_wheel_holds_the_package_its_data_and_the_recipes(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    package = {path.relative_to(ROOT / "src").as_posix() for path in (ROOT / "src/finlm").rglob("*") if path.is_file()}
    package = {name for name in package if "__pycache__" not in name}
    recipes = {path.relative_to(ROOT).as_posix() for path in (ROOT / "recipes").glob("*/*.yaml")}
    assert package == {name for name in names if name.startswith("finlm/")}
    assert recipes | {"requirements.txt"} == {
        name.partition("/share/finlm/")[2] for name in names if "/share/finlm/" in name
    }
    assert f"finlm-{VERSION}.dist-info/licenses/LICENSE" in names


def test_the_installed_command_works_in_any_directory(wheel: Path, tmp_path: Path) -> None:
    venv, elsewhere = tmp_path / "venv", tmp_path / "elsewhere"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True, timeout=60)
    (site,) = venv.glob("lib/python*/site-packages")
    # The pinned packages are those of this environment: installing them again takes minutes.
    (site / "packages.pth").write_text(next(path for path in sys.path if path.endswith("site-packages")))
    pip = [sys.executable, "-m", "pip", "--python", venv / "bin/python", "install", "-q", "--no-deps", "--no-index"]
    subprocess.run([*pip, wheel], check=True, timeout=60)
    elsewhere.mkdir()
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    def run(*arguments: str) -> str:
        command = [venv / "bin/finlm", *arguments]
        result = subprocess.run(
            command, cwd=elsewhere, env=env, capture_output=True, text=True, check=False, timeout=60
        )
        assert result.returncode == 0, result.stderr
        return result.stdout + result.stderr

    assert run("--version") == f"finlm {VERSION}\n"
    assert "ZeRO" in run("plan", "recipes/quickstart/sft.yaml")  # whose init_from is recipes/quickstart/pretrain.yaml
    run("new", "mine", "--from", "recipes/quickstart/pretrain.yaml")
    assert str(venv) not in (elsewhere / "recipes/mine/pretrain.yaml").read_text(encoding="utf-8")
    assert "mine" in run("plan", "recipes/mine/pretrain.yaml")


def completed(script: Path, *words: str) -> set[str]:
    """What bash offers for the last word."""
    program = """source "$0"; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); declare -a COMPREPLY
        _shtab_finlm finlm "${!#}" "${COMP_WORDS[COMP_CWORD - 1]}"; printf '%s\\n' "${COMPREPLY[@]}" """
    command = ["bash", "-c", program, script, "finlm", *words]
    return set(subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split())


def test_bash_completes_commands_options_choices_and_files(tmp_path: Path) -> None:
    script = tmp_path / "finlm.bash"
    script.write_text(finlm("--print-completion", "bash").stdout)
    assert "complete -o bashdefault -F _shtab_finlm finlm" in script.read_text()
    assert completed(script, "pl") == {"plan"}
    assert completed(script, "plan", "--pri") == {"--price"}
    assert completed(script, "train", "recipes/quickstart/pretrain.yaml", "--print", "") >= {"slurm", "torchrun"}
    assert completed(script, "plan", "recipes/quickstart/pre") == {"recipes/quickstart/pretrain.yaml"}
    assert finlm("--print-completion", "zsh").stdout.startswith("#compdef finlm")


def test_every_import_is_of_a_declared_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    core = {Requirement(line).name.partition(".")[0] for line in project["dependencies"]}
    optional = {
        "wandb",
        "trackio",
        "gguf",
        "jieba",
        "nltk",
        "rouge",
        "sacrebleu",
        "modelscope_hub",
        "ray",
        "fla",
        "ahocorasick",  # of pyahocorasick
        "triton",  # comes with torch for GPUs
        "yaml",
        "google",
    }  # asked for by name, with a message where they are missing, or named otherwise than their package
    imported = set()
    for path in (ROOT / "src/finlm").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
            imported |= {name.partition(".")[0] for name in names}
    third = imported - set(sys.stdlib_module_names) - core - optional - {"finlm"}
    assert {name for name in third if main.extra_of(name) is None} == set()


def test_planning_needs_the_core_alone_and_other_commands_name_their_extra(tmp_path: Path) -> None:
    blocked = sorted(name for modules in main.EXTRAS.values() for name in modules.split())
    (tmp_path / "sitecustomize.py").write_text(f"import sys\nsys.modules.update(dict.fromkeys({blocked}))\n")
    env = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT / 'src'}"}
    recipe = "recipes/quickstart/pretrain.yaml"
    checkpoint = tmp_path / "checkpoints/step-1"  # of a model directory the files are looked at first
    checkpoint.mkdir(parents=True)
    commands = {
        f"plan {recipe}": 0,
        f"diff {recipe} recipes/quickstart/sft.yaml": 0,
        f"sample {checkpoint} x": "finlm[train]",
    }
    for words, expected in commands.items():
        command = [sys.executable, "-m", "finlm", *words.split()]
        result = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False, timeout=60)
        assert result.returncode == (expected if expected == 0 else 2), result.stderr
        assert expected == 0 or expected in result.stderr
