"""Run a sync on a cluster's host as a process of its own, and look at what lies where."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import finlm

from .netcluster import WORK, Host

SOURCE = Path(finlm.__file__).parents[1]
LOGIN = {"SSH_CONNECTION": "203.0.113.7 51022 10.83.7.1 22"}  # commands are typed on n0 over ssh from elsewhere
ENV = {"PYTHONPATH": str(SOURCE), **LOGIN}
REPO = f"{WORK}/repo"
DRIVER = """
import dataclasses, json, pathlib, sys
from finlm.base import screen
from finlm.base.errors import UserError
from finlm.hosts import sync
request = json.loads(sys.argv[1])
hosts, root = dict.fromkeys(request.pop("hosts"), pathlib.Path), pathlib.Path(request.pop("root"))
try:
    results = sync.sync(root, hosts, **request | {"data": [pathlib.Path(p) for p in request.get("data", [])]})
except UserError as error:
    screen.print_error(error)
    sys.exit(2)
print(json.dumps([dataclasses.asdict(result) for result in results]))
"""
MAIN = """
import sys
from finlm.cli import main
sys.exit(main.main(["sync", "--hostfile", sys.argv[1]]))
"""


def repository(host: Host, path: str = REPO) -> Path:
    """A small git checkout on a host; where it lies on the real machine."""
    here = host.srv / Path(path).relative_to("/srv")
    (here / "src").mkdir(parents=True)
    (here / "requirements.txt").write_text("rich\n")
    (here / "src" / "model.py").write_text("hidden_size = 64\n")
    (here / "src" / "资产负债表.py").write_text("# 中文文件名\n", encoding="utf-8")
    (here / "src" / "latest").symlink_to("model.py")
    (here / "run.sh").write_text("#!/bin/sh\n")
    (here / "run.sh").chmod(0o755)
    (here / ".gitignore").write_text("/cache/\n*.log\n")
    host.run("git", "init", "-q", path)
    return here


def start(host: Host, *hosts: str, root: str = REPO, **request: Any) -> list[str]:
    """The command line of a sync from host."""
    line = json.dumps({"root": root, "hosts": hosts, **request})
    return host.argv([sys.executable, "-c", DRIVER, line], env=ENV)


def sync(host: Host, *hosts: str, **request: Any) -> list[dict[str, Any]]:
    """Sync from host to hosts; the results."""
    done = subprocess.run(start(host, *hosts, **request), capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    results: list[dict[str, Any]] = json.loads(done.stdout)
    return results


def refused(host: Host, *hosts: str, **request: Any) -> str:
    """Sync from host to hosts, which fails as a user's mistake; what it said."""
    done = subprocess.run(start(host, *hosts, **request), capture_output=True, text=True, timeout=60)
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    return done.stderr


def tree(path: Path) -> dict[str, str]:
    """What lies below path, without git's and sync's own files, by a way of its own."""
    found = {}
    for file in sorted(path.rglob("*")):
        name = file.relative_to(path).as_posix()
        if name.startswith((".git/", ".finlm-")) or (file.is_dir() and not file.is_symlink()):
            continue
        content = os.fsencode(file.readlink()) if file.is_symlink() else file.read_bytes()
        found[name] = f"{hashlib.sha256(content).hexdigest()} {file.lstat().st_mode:o}"
    return found


def on(host: Host, path: str = REPO) -> Path:
    """Where a path of a host lies on the real machine."""
    return host.srv / Path(path).relative_to("/srv")


def until(condition: Callable[[], bool], seconds: float = 60, why: Callable[[], str] = str) -> None:
    """Wait for a condition; after so many seconds AssertionError with `why`."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, why() or "waited in vain"
        time.sleep(0.03)  # the hosts share this machine's cores with what looks at them
