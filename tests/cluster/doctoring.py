"""`finlm doctor` on hosts that each have a checkout and an interpreter of their own, at the same paths."""

from __future__ import annotations

import json
import shutil
import site
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import finlm

from .netcluster import WORK, Cluster, Host

ROOT = Path(finlm.__file__).parents[2]
REPO = f"{WORK}/repo"
PYTHON = f"{REPO}/.venv/bin/python"
BASE = Path(sys.executable).resolve()


def checkout(host: Host) -> Path:
    """A copy of the repository with a virtual environment that borrows this one's packages; where it really lies."""
    repo = host.work / "repo"
    for name in ("recipes", "src"):
        shutil.copytree(ROOT / name, repo / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    shutil.copy(ROOT / "requirements.txt", repo)
    packages = site_packages(host)
    packages.mkdir(parents=True)
    (repo / ".venv/bin").mkdir()
    (repo / ".venv/bin/python").symlink_to(BASE)
    (repo / ".venv/pyvenv.cfg").write_text(f"home = {BASE.parent}\n")
    (packages / "borrowed.pth").write_text("".join(f"{path}\n" for path in site.getsitepackages()))
    return repo


def site_packages(host: Host) -> Path:
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    return host.work / "repo/.venv/lib" / version / "site-packages"


def install(host: Host, name: str, version: str) -> None:
    """Another version of a package on one host, as far as its metadata goes."""
    folder = site_packages(host) / f"{name}-{version}.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


def set_clock(host: Host, seconds: float) -> None:
    """The host's Python believes that it is so much later: no namespace has a wall clock of its own."""
    (site_packages(host) / "late.py").write_text(
        f"import time\n_true = time.time\ntime.time = lambda: _true() + {seconds}\n"
    )
    (site_packages(host) / "late.pth").write_text("import late\n")


def bare(host: Host, **programs: str) -> None:
    """From now on ssh commands find only these programs on the host; sh always."""
    folder = host.work / "bin"
    folder.mkdir()
    for name, path in {"sh": "/bin/sh", **programs}.items():
        (folder / name).symlink_to(path)
    (host.home / ".bashrc").write_text(f"PATH={WORK}/bin\n")


def doctor(cluster: Cluster, *options: str, slots: dict[int, int] | None = None) -> subprocess.CompletedProcess[str]:
    """`finlm doctor --json` on n0 for all hosts of the cluster."""
    lines = [f"{host.name} slots={(slots or {}).get(host.index, 1)}\n" for host in cluster.hosts]
    (cluster[0].work / "repo/hostfile.txt").write_text("".join(lines))
    env = {"PYTHONPATH": f"{REPO}/src", "PYTHONDONTWRITEBYTECODE": "1"}
    command = [PYTHON, "-m", "finlm", "doctor", "--hostfile", "hostfile.txt", "--json", *options]
    began = time.monotonic()
    done = cluster[0].run(*command, cwd=REPO, env=env, timeout=120, check=False)
    print(f"{time.monotonic() - began:.1f} s\n{done.stderr}")  # the numbers of the logbook's fault table: pytest -rP
    assert "Traceback" not in done.stderr, done.stderr
    assert done.returncode in (0, 1), done.stderr
    return done


def findings(done: subprocess.CompletedProcess[str]) -> dict[tuple[str, str, str], str]:
    """(check, host, level) -> evidence of every finding; each has one, and a fix."""
    listed: list[dict[str, Any]] = json.loads(done.stdout)["findings"]
    assert all(one["evidence"] and one["fix"] for one in listed)
    assert done.returncode == int(any(one["level"] == "error" for one in listed))
    return {(one["check"], one["host"], one["level"]): one["evidence"] for one in listed}
