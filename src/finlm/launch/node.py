"""Start the ranks of this host and wait for them: `python -m finlm.launch.node JSON RUN`, run by agent.py.

Sets for them the variables that `deepspeed.launcher.launch` sets, without importing torch: that would take three
seconds of a core, up to nine on a busy host, at every launch. JSON: {"world": devices by host, "node": index of this
host, "address", "port": the rendezvous}.

Exits with the code of the first rank that failed, 256 - N for signal N. The other ranks get a second to log their
errors, then SIGTERM, and SIGKILL after 30 s. Uses the standard library only.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

POLL_SECONDS = 0.1
WORDS_SECONDS, END_SECONDS = 1.0, 30.0


def main() -> None:
    """Run this host's ranks until all have ended or one fails, and then end the others.

    Prints which rank process failed. Exits with its code, 256 - N for signal N, or 0. Takes start_ranks()'s arguments
    from sys.argv, the first as JSON.
    """
    ranks = start_ranks(json.loads(sys.argv[1]), sys.argv[2])
    while (codes := [rank.poll() for rank in ranks]) and None in codes and not any(codes):
        time.sleep(POLL_SECONDS)
    # Of ranks that ended within one poll, a rank killed by a signal comes first: the others ended because it was gone.
    failed = min(filter(None, codes), default=0)
    if failed:
        print(f"rank process {ranks[codes.index(failed)].pid} ended with {failed}", flush=True)
        end(ranks)
    sys.exit(failed % 256)  # -N for signal N becomes 256 - N, which agent.py turns back


def start_ranks(launch: Mapping[str, Any], run: str) -> list[subprocess.Popen[bytes]]:
    """Start a rank process for each device of this host, and return the processes in rank order.

    `launch` is the JSON of the module's first argument, `run` the run directory.
    """
    devices = list(launch["world"].values())
    mine, first = devices[launch["node"]], sum(map(len, devices[: launch["node"]]))
    shared = {
        "CUDA_VISIBLE_DEVICES": ",".join(map(str, mine)),
        "MASTER_ADDR": launch["address"],
        "MASTER_PORT": str(launch["port"]),
        "WORLD_SIZE": str(sum(map(len, devices))),
        "LOCAL_SIZE": str(len(mine)),
        "CROSS_RANK": str(launch["node"]),
        "CROSS_SIZE": str(len(devices)),
    }
    command = [sys.executable, "-u", "-m", "finlm.train", run]
    return [
        subprocess.Popen(command, env=os.environ | shared | {"RANK": str(first + local), "LOCAL_RANK": str(local)})
        for local in range(len(mine))
    ]


def end(ranks: Sequence[subprocess.Popen[bytes]]) -> None:
    """Wait a second for the ranks to end, then send SIGTERM, and 30 s later SIGKILL; return when all have ended."""
    for patience, stop in ((WORDS_SECONDS, subprocess.Popen.terminate), (END_SECONDS, subprocess.Popen.kill)):
        deadline = time.monotonic() + patience
        while any(rank.poll() is None for rank in ranks) and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
        for rank in ranks:
            stop(rank)  # nothing for a rank that has ended
    for rank in ranks:
        rank.wait()


if __name__ == "__main__":
    main()
