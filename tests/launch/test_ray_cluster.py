"""A Ray cluster is there for the block and no longer. Ray itself is played by a script that starts a process."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from finlm.base import processes
from finlm.base.errors import UserError
from finlm.launch import ray_cluster
from finlm.recipe import recipe
from finlm.recipe.cluster import Cluster, Host

from helpers import QUICKSTART

SCRIPT = """
import json, os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"], start_new_session=True)
with open(os.environ["SEEN"], "w") as file:
    json.dump([sys.argv[1:], os.getpid(), child.pid], file)
if os.environ.get("SLOW") and not os.path.exists(os.environ["SLOW"]):
    open(os.environ["SLOW"], "w").close()
    sys.exit("The current node timed out during startup.")
if os.environ.get("BROKEN"):
    sys.exit("port 6379 is taken")
print("Ray runtime started.", flush=True)
time.sleep(300)
"""


@pytest.fixture
def seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Install the played Ray; the file in which it writes its arguments and processes."""
    package = tmp_path / "site/ray/scripts"
    package.mkdir(parents=True)
    for path in (package.parent / "__init__.py", package / "__init__.py"):
        path.touch()
    (package / "scripts.py").write_text(SCRIPT)
    about = tmp_path / "site/ray-2.60.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: ray\nVersion: 2.60.0\n")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"), prepend=os.pathsep)
    monkeypatch.setenv("SEEN", str(tmp_path / "seen.json"))
    return tmp_path / "seen.json"


def test_ray_runs_during_the_block_and_all_its_processes_end_with_it(seen: Path) -> None:
    wanted = recipe.load(QUICKSTART, ("data.num_proc=1",)).recipe
    with ray_cluster.start_ray(wanted, Cluster((Host("localhost", 1),)), False) as address:
        arguments, *pids = json.loads(seen.read_text())
        assert all(map(processes.is_alive, pids))
        assert "--head" in arguments and "--num-cpus=1" in arguments and address.startswith("127.0.0.1:")
        token = os.environ["RAY_AUTH_TOKEN"]
        assert not [word for word in arguments if token in word], "a command line is for everyone to read"
    assert not [pid for pid in pids if processes.is_alive(pid)]
    assert "RAY_AUTH_TOKEN" not in os.environ


def test_ray_that_comes_up_too_slowly_is_started_again(
    seen: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLOW", str(tmp_path / "tried"))
    with ray_cluster.start_ray(recipe.load(QUICKSTART).recipe, Cluster((Host("localhost", 1),)), False):
        assert (tmp_path / "tried").exists()


def test_ray_that_does_not_start_says_why(seen: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BROKEN", "1")
    with (
        pytest.raises(UserError, match="Ray did not start on localhost") as caught,
        ray_cluster.start_ray(recipe.load(QUICKSTART).recipe, Cluster((Host("localhost", 1),)), False),
    ):
        pass
    assert "port 6379 is taken" in caught.value.evidence


def test_a_host_without_this_ray_is_named(seen: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_cluster.importlib.metadata, "version", lambda name: "2.61.0")
    with (
        pytest.raises(UserError, match=r"localhost has Ray 2\.60\.0, this machine Ray 2\.61\.0") as caught,
        ray_cluster.start_ray(recipe.load(QUICKSTART).recipe, Cluster((Host("localhost", 1),)), False),
    ):
        pass
    assert "requirements-ray.lock" in caught.value.fix and sys.executable in caught.value.fix


@pytest.mark.parametrize("ended", ["the line", "the starter", "the starter, by SIGTERM", "its keeper"])
def test_a_host_whose_line_or_starter_is_gone_ends_ray(seen: Path, ended: str) -> None:
    node = ray_cluster._Node(Host("localhost", 1), is_local=True)
    node.connect({}, False)
    node.greet()
    node.start(["--head"], "127.0.0.1", 1, {})
    node.wait_started()
    _, *pids = json.loads(seen.read_text())
    assert node._process is not None
    keeper = node._process.pid
    (starter,) = processes.children(keeper)
    if ended == "the line":
        node.close()
    elif ended == "its keeper":
        os.kill(keeper, signal.SIGKILL)
    else:
        os.kill(starter, signal.SIGTERM if "SIGTERM" in ended else signal.SIGKILL)
    deadline = time.monotonic() + 20
    while [pid for pid in (*pids, starter) if processes.is_alive(pid)]:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    node.close()
    node.wait_closed()
