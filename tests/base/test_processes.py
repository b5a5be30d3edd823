"""A process whose parent ended before it could ask for the news of that, and ports for a rendezvous."""

from __future__ import annotations

import random
import socket
import subprocess
import sys

import pytest

from finlm.base import processes

CODE = """
import os, time
from finlm.base import processes
parent = os.getpid()
if os.fork():
    os._exit(0)
while os.getppid() == parent:
    time.sleep(0.01)
processes.die_with_parent(parent)
print("lives")
"""


def test_a_process_ends_with_a_parent_that_was_gone_already() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, timeout=20)
    assert (done.stdout, done.stderr) == ("", "")


def test_a_port_is_chosen_below_those_that_the_kernel_gives_to_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = [processes.free_port(0) for _ in range(50)]
    assert all(isinstance(port, int) and 20_000 <= port < 32_000 for port in chosen)
    with socket.create_server(("", 0)) as taken:
        port, free = taken.getsockname()[1], chosen[0]
        monkeypatch.setattr(random.SystemRandom, "sample", lambda *_: [port, free])
        assert processes.free_port(0) == free
        assert processes.free_port(port) == "Address already in use"
