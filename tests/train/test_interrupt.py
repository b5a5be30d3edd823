"""How often a signal must come before a rank ends without its checkpoint."""

from __future__ import annotations

import signal
import subprocess
import sys


def test_one_request_may_reach_a_rank_several_times_and_a_later_one_ends_it() -> None:
    code = """
import signal
from finlm.base import processes
from finlm.train import entry
processes.block_stop_signals()
signal.raise_signal(signal.SIGTERM)  # held back until the rank listens
entry.note_signals()
signal.raise_signal(signal.SIGTERM)
print(entry.received_signal(), flush=True)
entry.ONE_REQUEST_SECONDS = 0
signal.raise_signal(signal.SIGTERM)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    printed = done.stdout.splitlines()[-1:]  # DeepSpeed says there is no GPU
    assert (printed, done.returncode) == ([str(int(signal.SIGTERM))], -signal.SIGTERM), done.stderr
