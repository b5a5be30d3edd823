"""A process whose parent ended before it could ask for the news of that."""

from __future__ import annotations

import subprocess
import sys

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
