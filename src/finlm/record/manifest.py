"""What a run was made of, written before launch: code, data, packages, machine, command, environment.

Takes about 0.3 s, nearly all of it for listing the installed packages and asking git. The hashes let `reproduce` say
whether two runs had the same recipe, plan, code, tokenizer and shards.

Does not copy the whole environment: only variables that change a training run are kept, and values that look like
credentials are cut out (secrets.py). Files git does not track count as dirty and are covered by the code hash.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import finlm
from finlm.base import files, nvidia
from finlm.base.secrets import redact_command, redact_environment, redact_text
from finlm.plan.plan import Plan
from finlm.recipe import recipe as recipes
from finlm.recipe.schema import Recipe

PACKAGE = Path(finlm.__file__).resolve().parent
MOST_DIFF_BYTES = 1 << 20


def make(
    recipe: Recipe,
    plan: Plan,
    shards: Path | None,
    *,
    facts: Mapping[str, Mapping[str, Any]] | None = None,
    code_sha256: str | None = None,
    command: Sequence[str] | None = None,
    environment: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """The manifest of a run that is about to start.

    `shards` is the directory of prepared data; `facts` what doctor saw of each host, by name; `command` and
    `environment` are this process's unless given. The recipe's hash is that of the bytes of recipe.yaml, the plan's is
    files.sha256_json of the object in plan.json.
    """
    return {
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "finlm": {"version": version(), "code_sha256": code_sha256 or code_hash(), "git": git_state(PACKAGE)},
        "recipe": {"name": recipe.name, "sha256": hashlib.sha256(recipes.dump(recipe).encode()).hexdigest()},
        "plan": {"sha256": files.sha256_json(plan.to_json())},
        "shards": _shards(shards),
        "seeds": _seeds(recipe),
        "hosts": [
            {"name": host.name, "slots": host.slots, "gpu": host.gpu, **_seen((facts or {}).get(host.name, {}))}
            for host in plan.hosts
        ],
        "command": redact_command(sys.orig_argv if command is None else command),
        "directory": str(Path.cwd()),
        "environment": redact_environment(os.environ if environment is None else environment),
        "machine": _machine(),
        "packages": packages(),
    }


def _seen(facts: Mapping[str, Any]) -> dict[str, Any]:
    """What doctor saw of a host that a run may depend on; only what it was told."""
    torch, gpus = facts.get("torch") or {}, (facts.get("gpu") or {}).get("devices") or ()
    found = {
        "python": (facts.get("python") or {}).get("version"),
        "torch": torch.get("version"),
        "cuda": torch.get("cuda"),
        "nccl": torch.get("nccl"),
        "gpus": [gpu.get("name") for gpu in gpus],
        "drivers": sorted({str(gpu.get("driver")) for gpu in gpus}),
        "platform": facts.get("platform"),
        "packages": facts.get("packages"),
    }
    return {name: value for name, value in found.items() if value}


def changes() -> str:
    """The uncommitted changes of the running package's checkout as a diff, credentials cut out; empty without any."""
    found = _git(PACKAGE, "diff", "HEAD", "--no-color", "--no-ext-diff") or b""
    text = redact_text(found[:MOST_DIFF_BYTES].decode("utf-8", errors="replace"))
    return text if len(found) <= MOST_DIFF_BYTES else f"{text}\n[cut: {len(found):,} bytes in all]\n"


def version() -> str:
    """finlm's version: a checkout's pyproject.toml, else what pip installed."""
    project = PACKAGE.parents[1] / "pyproject.toml"
    if project.exists():
        return str(tomllib.loads(project.read_text(encoding="utf-8"))["project"]["version"])
    try:
        return importlib.metadata.version("finlm")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def copy_code(destination: Path) -> str:
    """Copy the package to destination/finlm (so that destination goes on PYTHONPATH); its tree hash."""
    for path in _source_files():
        target = destination / "finlm" / path.relative_to(PACKAGE)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)
    copied = [path for path in (destination / "finlm").rglob("*") if path.is_file()]
    return files.tree_hash(destination / "finlm", copied)


def code_hash() -> str:
    """Tree hash of the running package, equal to what copy_code returns."""
    return files.tree_hash(PACKAGE, _source_files())


def _source_files() -> list[Path]:
    """Everything in the package but caches, hidden files and editors' leftovers."""
    found = []
    for path in PACKAGE.rglob("*"):
        parts = path.relative_to(PACKAGE).parts
        hidden = any(part.startswith(".") or part == "__pycache__" for part in parts)
        if path.is_file() and not hidden and path.suffix not in (".pyc", ".so") and not path.name.endswith("~"):
            found.append(path)
    return sorted(found)


def git_state(directory: Path) -> dict[str, Any] | None:
    """Commit, dirty flag and hash of the uncommitted changes; None outside a checkout that tracks the package."""
    tracked = _git(directory, "ls-files", "--error-unmatch", "__init__.py")
    commit = _git(directory, "rev-parse", "HEAD")
    if tracked is None or commit is None:  # a venv inside somebody else's checkout is not our history
        return None
    changes = _git(directory, "status", "--porcelain") or b""
    diff = _git(directory, "diff", "HEAD", "--binary") or b""
    remote = _git(directory, "remote", "get-url", "origin")
    return {
        "commit": commit.decode().strip(),
        "remote": redact_text(remote.decode().strip()) if remote else None,
        "dirty": bool(changes.strip()),
        "diff_sha256": hashlib.sha256(diff).hexdigest() if diff else None,
    }


def _git(directory: Path, *arguments: str) -> bytes | None:
    try:
        return subprocess.run(
            ["git", "-C", str(directory), *arguments], capture_output=True, timeout=30, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return None


def _shards(directory: Path | None) -> dict[str, Any] | None:
    """Path and hash of the prepared shards, with the tokenizer's hash as their own manifest tells it."""
    if directory is None:
        return None
    file = directory / "manifest.json"
    if not file.exists():
        return {"path": str(directory), "sha256": None, "tokenizer_sha256": None}
    content = files.read_json(file)
    return {
        "path": str(directory),
        "sha256": files.sha256_file(file),
        "tokenizer_sha256": content.get("tokenizer_sha256"),
    }


def _seeds(recipe: Recipe) -> dict[str, int]:
    seeds = {"train.seed": recipe.train.seed}
    for index, source in enumerate(recipe.data.sources):
        if source.synthetic is not None:
            seeds[f"data.sources[{index}].synthetic.seed"] = source.synthetic.seed
    return seeds


def packages() -> dict[str, str]:
    """Every installed distribution and its version, by name."""
    found = {}
    for distribution in importlib.metadata.distributions():
        name = distribution.metadata["Name"]
        if name and name not in found:  # the first one on sys.path is the one that is imported
            found[name] = distribution.version
    return dict(sorted(found.items(), key=lambda item: item[0].lower()))


def _machine() -> dict[str, Any]:
    uname = platform.uname()
    return {
        "hostname": uname.node,
        "platform": platform.platform(),
        "python": platform.python_version(),
        "executable": sys.executable,
        "cpus": os.cpu_count(),
        "cpus_usable": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None,
        "gpus": nvidia.gpus("name", "driver_version", "memory.total", "uuid"),
    }
