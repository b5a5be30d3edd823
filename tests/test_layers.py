"""The direction of imports, and which modules stay light."""

from __future__ import annotations

import ast
import subprocess
import sys
import time
from pathlib import Path

import pytest

from helpers import ROOT, finlm

PACKAGE = ROOT / "src" / "finlm"
LIGHT = ("base", "recipe", "plan", "config", "record", "ops", "data")
HEAVY = {"torch", "transformers", "deepspeed", "trl", "datasets", "accelerate"}
ALLOWED = {
    "base": set(),
    "recipe": {"base"},
    "plan": {"recipe", "base"},
    "config": {"plan", "recipe", "base"},
    "record": {"plan", "recipe", "base"},
    "ops": {"record", "config", "plan", "recipe", "base"},
    "data": {"recipe", "base"},
    "train": {
        "config",
        "plan",
        "recipe",
        "base",
        "data.shards",
        "data.packed",
        "data.mixture",
        "data.naming",
        "data.pair_rows",
        "data.pairs",
        "data.chat",
        "data.dialogue_rows",
    },
    "evals": {"train", "data", "recipe", "base"},
    "export": {"train", "plan", "recipe", "base", "export_card", "data.chat_tokens"},
    "export_card": {"train", "recipe", "base"},
    "chat": {"train", "base"},
    "local_model": {"train", "data", "base"},
    "import_gguf": {"base"},
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


def modules() -> list[tuple[str, Path]]:
    """(layer, file) of every module below a layer with rules."""
    files = sorted(PACKAGE.rglob("*.py"))
    return [(path.relative_to(PACKAGE).parts[0].removesuffix(".py"), path) for path in files]


@pytest.mark.parametrize("layer", sorted(ALLOWED))
def test_imports_point_down_only(layer: str) -> None:
    allowed = ALLOWED[layer] | {layer}
    wrong = []
    for own, path in modules():
        for name in imports(path) if own == layer else ():
            inner = name.removeprefix("finlm.")
            if name.startswith("finlm.") and not any(f"{inner}.".startswith(f"{prefix}.") for prefix in allowed):
                wrong.append(f"{path.relative_to(ROOT)} imports {name}")
    assert not wrong


def test_the_light_half_imports_no_deep_learning_library() -> None:
    wrong = [
        f"{path.relative_to(ROOT)} imports {name}"
        for layer, path in modules()
        if layer in LIGHT
        for name in imports(path)
        if name.split(".")[0] in HEAVY
    ]
    assert not wrong


@pytest.mark.parametrize("module", ["finlm.cli", "finlm.data.prepare", "finlm.plan.planner", "finlm.config"])
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
    code = f"import sys; from finlm import cli_options as o; o.parser(); sys.exit(bool({heavy} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT / "src", check=False).returncode == 0


def test_every_package_init_is_empty() -> None:
    assert [path for path in PACKAGE.rglob("__init__.py") if path.read_text()] == []


def test_files_stay_small() -> None:
    long = [str(p.relative_to(ROOT)) for p in PACKAGE.rglob("*.py") if len(p.read_text().splitlines()) > 300]
    assert not long


def test_scripts_are_short_and_explain_themselves() -> None:
    for path in sorted((ROOT / "scripts").glob("*.sh")):
        text = path.read_text().splitlines()
        assert len(text) <= 25, path
        result = subprocess.run(["bash", path, "--help"], capture_output=True, text=True, check=False)
        assert result.returncode == 0 and f"bash scripts/{path.name}" in result.stdout, path
