"""The direction of imports, and which modules stay light."""

from __future__ import annotations

import ast
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers import ROOT, finlm

PACKAGE = ROOT / "src" / "finlm"
HEAVY = {"torch", "transformers", "deepspeed", "trl", "datasets", "accelerate"}
FOLDERS = {
    row["name"]: row for row in tomllib.loads((ROOT / "docs/modules.toml").read_text(encoding="utf-8"))["folder"]
}


def imports(path: Path) -> set[str]:
    """Modules a file imports anywhere, also inside functions; `from a import b` counts as a.b."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def modules(folder: str) -> list[Path]:
    """The files of a folder, without those of the folders below it."""
    return sorted((PACKAGE / folder).glob("*.py"))


def test_every_folder_has_a_row_and_few_files() -> None:
    folders = {path.parent.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py")}
    assert folders == set(FOLDERS)
    counts = {folder: len([path for path in modules(folder) if path.stat().st_size]) for folder in folders}
    assert max(counts.values()) <= 14, counts


@pytest.mark.parametrize("folder", FOLDERS)
def test_imports_point_down_only(folder: str) -> None:
    allowed = [folder, *FOLDERS[folder]["imports"]]
    wrong = []
    for path in modules(folder) if "*" not in allowed else ():
        for name in imports(path):
            inner = name.removeprefix("finlm.").replace(".", "/")
            if name.startswith("finlm.") and not any(f"{inner}/".startswith(f"{prefix}/") for prefix in allowed):
                wrong.append(f"{path.relative_to(ROOT)} imports {name}")
    assert not wrong


def test_the_folders_do_not_go_round_in_circles() -> None:
    below = {
        name: {other.split("/")[0] for other in row["imports"]} for name, row in FOLDERS.items() if "/" not in name
    }
    rooms = {name for name, others in below.items() if "*" not in others}
    while rooms:
        lowest = {name for name in rooms if not below[name] & rooms - {name}}
        assert lowest, rooms
        rooms -= lowest


def test_the_light_half_imports_no_deep_learning_library() -> None:
    wrong = [
        f"{path.relative_to(ROOT)} imports {name}"
        for folder, row in FOLDERS.items()
        if row["light"]
        for path in modules(folder)
        for name in imports(path)
        if name.split(".")[0] in HEAVY
    ]
    assert not wrong


def test_the_pages_show_the_table() -> None:
    assert subprocess.run([sys.executable, ROOT / "scripts/modules.py", "--check"], check=False).returncode == 0


@pytest.mark.parametrize("module", ["finlm.cli.main", "finlm.prepare", "finlm.plan.planner", "finlm.config"])
def test_importing_a_light_module_loads_no_torch(module: str) -> None:
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT / "src", check=False).returncode == 0


def test_help_names_every_command_and_loads_almost_nothing() -> None:
    started = time.monotonic()
    result = finlm("--help")
    print(f"--help took {time.monotonic() - started:.2f} s")  # seen with pytest -rP; the clock of CI proves nothing
    assert result.returncode == 0
    for command in ("prepare", "plan", "doctor", "train", "eval", "export", "sample", "report", "sync"):
        assert f"\n    {command} " in result.stdout
    heavy = "{'pydantic', 'rich', 'numpy'}"
    code = f"import sys; from finlm.cli import options; options.parser(); sys.exit(bool({heavy} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT / "src", check=False).returncode == 0


def test_every_package_init_is_empty_but_the_one_that_offers_the_names_for_python() -> None:
    assert [path for path in PACKAGE.rglob("__init__.py") if path.read_text()] == [PACKAGE / "__init__.py"]
    code = "import sys, finlm; print(sorted(name for name in sys.modules if name.startswith('finlm.')))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert found == "[]\n", "importing finlm loads nothing"


def test_files_stay_small() -> None:
    long = [str(p.relative_to(ROOT)) for p in PACKAGE.rglob("*.py") if len(p.read_text().splitlines()) > 450]
    assert not long


def functions(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def test_functions_stay_small() -> None:
    long = [
        f"{path.relative_to(ROOT)}: {node.name} has {lines} lines"
        for path in PACKAGE.rglob("*.py")
        for node in functions(path)
        if (lines := (node.end_lineno or 0) - node.lineno + 1) > 60
    ]
    assert not long


def test_scripts_are_short_and_explain_themselves() -> None:
    for path in sorted((ROOT / "scripts").glob("*.sh")):
        text = path.read_text().splitlines()
        assert len(text) <= 25, path
        result = subprocess.run(["bash", path, "--help"], capture_output=True, text=True, check=False)
        assert result.returncode == 0 and f"bash scripts/{path.name}" in result.stdout, path
