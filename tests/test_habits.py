"""What keeps a checkout in order does what it says: CI, hooks, issue forms, licence, scripts."""

from __future__ import annotations

import re
import subprocess
from typing import Any

import pytest
from ruamel.yaml import YAML

from helpers import ROOT

VENV = ROOT / ".venv/bin"
CI = [line.strip() for line in (ROOT / ".ci/run").read_text(encoding="utf-8").splitlines() if line and line[0] != "#"]


def read(path: str) -> Any:
    return YAML(typ="safe").load((ROOT / path).read_text(encoding="utf-8"))


def test_the_workflow_is_ci_run_and_nothing_else() -> None:
    (job,) = read(".github/workflows/ci.yml")["jobs"].values()
    runs = [step["run"] for step in job["steps"] if "run" in step]
    assert len(runs) == 1 and runs[0].endswith("bash .ci/run")


def test_every_hook_is_a_pinned_program_and_a_check_of_ci() -> None:
    pinned = (ROOT / "requirements.txt").read_text(encoding="utf-8")
    (repo,) = read(".pre-commit-config.yaml")["repos"]
    assert repo["repo"] == "local"
    for hook in repo["hooks"]:
        if hook["id"] == "generated":
            commands = re.findall(r"\.venv/bin/(python .*? --check)", " ".join(hook["entry"].split()))
            assert commands == [line for line in CI if line.startswith("python") and "--check" in line]
            continue
        program = hook["entry"].split()[0].removeprefix(".venv/bin/")
        assert (VENV / program).exists() and f"{program}" in pinned
        assert any(line.startswith(program) for line in CI), f"{program} is not in .ci/run"


@pytest.mark.parametrize("form", ["bug", "recipe"])
def test_issue_forms_ask_for_doctor_and_manifest(form: str) -> None:
    labels = " ".join(
        part["attributes"].get("label", "") for part in read(f".github/ISSUE_TEMPLATE/{form}.yml")["body"]
    )
    assert "finlm doctor" in labels and "--json" in labels and "manifest.json" in labels


def test_the_licence_is_the_one_the_package_names() -> None:
    assert "Apache License\n                           Version 2.0" in (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert 'license = "Apache-2.0"' in (ROOT / "pyproject.toml").read_text(encoding="utf-8")


def test_shellcheck_finds_nothing_in_the_scripts() -> None:
    scripts = [*sorted((ROOT / "scripts").glob("*.sh")), ROOT / ".ci/run"]
    result = subprocess.run([VENV / "shellcheck", *scripts], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout
    for script in scripts:
        assert len(script.read_text(encoding="utf-8").splitlines()) <= 25, f"{script} is no short script"


REPLACES = re.compile(  # a method of an object that a library made, a name in its module, a class in place of its own
    r"\.__class__ = |\.forward = |^\s+(?:deepspeed|torch\._\w+|distributed)[\w.]*\.\w+ = "
    r"|setattr\(module|AttentionInterface\.register|^\s+(?:optimizer|engine)\.\w+ = (?:lambda|partial)",
    re.MULTILINE,
)


def test_every_replaced_internal_of_a_library_is_on_its_page_with_a_test_that_exists() -> None:
    page = (ROOT / "docs/internals.md").read_text(encoding="utf-8")
    sources = {path: path.read_text(encoding="utf-8") for path in (ROOT / "src/finlm/train").rglob("*.py")}
    places = [path.relative_to(ROOT).as_posix() for path, text in sources.items() if REPLACES.search(text)]
    assert len(places) > 5 and [place for place in places if f"`{place}`" not in page] == []
    tests = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py"))
    assert [name for name in re.findall(r"`(test_\w+)`", page) if f"def {name}(" not in tests] == []
