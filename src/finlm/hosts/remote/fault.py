"""Break something of a run on this host: `python3 - RUN FAULT < fault.py`, sent by `finlm drill`.

Same rules as probe.py: Python 3.8, standard library only. Only processes of this user whose command line or environment
names the run directory are touched, and only files below it. `disk-filled` also takes room that others may need. Prints
one JSON document: what was done, or why not.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Callable  # noqa: UP035 - Python 3.8

SLOW_SECONDS = FULL_SECONDS = 20.0
MOST_FILLED = 64 * 2**30  # bytes; some file systems write what is asked for
MARK = "finlm-fault:"
RANK, LAUNCHER, AGENT = "finlm.train", "finlm.launch.node", "finlm.launch.agent"


def main() -> None:
    """Cause the fault FAULT of the run RUN (arguments), and print MARK and {"done": what} or {"failed": why}."""
    run, fault = Path(sys.argv[1]), sys.argv[2]
    try:
        answer = {"done": FAULTS[fault](run)}
    except (OSError, LookupError) as error:
        answer = {"failed": f"{type(error).__name__}: {error}"}
    print(MARK + json.dumps(answer))


def find_processes(run: Path, word: str) -> list[int]:
    """Return the sorted pids of the run's processes on this host that run the module `word` (python -m).

    A process belongs to the run if its command line or environment names the run directory. Leaves out this process.
    """
    pids = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            words = (entry / "cmdline").read_bytes().decode("utf-8", "replace").split("\0")
            line = " ".join(words)
            of_run = str(run) in words or str(run).encode() + b"/" in (entry / "environ").read_bytes()
            of_kind = f"-m {word} " in f"{line} "
            if of_run and of_kind and int(entry.name) != os.getpid():
                pids.append(int(entry.name))
        except OSError:  # ended meanwhile, or somebody else's
            continue
    return sorted(pids)


def send_signal(run: Path, word: str, number: int, how_many: int = 1) -> str:
    """Send a signal to the first `how_many` processes of the run's module `word`, and return a text that says so.

    Raises LookupError when there is none.
    """
    pids = find_processes(run, word)[:how_many]
    if not pids:
        raise LookupError(f"no process of {word} runs here")
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):  # the end of another has ended it
            os.kill(pid, number)
    return f"signal {number} to {', '.join(map(str, pids))} ({word})"


def kill_all(run: Path) -> str:
    """Kill the run's ranks on this host and then its agent, by SIGKILL, and return a text that says so.

    Raises LookupError when there are no ranks, or no agent. Killing the agent first would end the ranks.
    """
    return "; ".join(send_signal(run, word, signal.SIGKILL, 99) for word in (RANK, AGENT))


def cut_connection(run: Path) -> str:
    """Kill the ssh server's process that carries the run's agent, and return a text that says so.

    Raises LookupError when no agent here came over ssh, OSError when a process ends meanwhile or cannot be killed.
    """
    for pid in find_processes(run, AGENT):
        parent = int((Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[1])
        while parent > 1:
            name = (Path("/proc") / str(parent) / "comm").read_text().strip()
            if name.startswith("sshd"):
                os.kill(parent, signal.SIGKILL)
                return f"killed {name} {parent}, which carried the agent"
            parent = int((Path("/proc") / str(parent) / "stat").read_text().rpartition(")")[2].split()[1])
    raise LookupError("no agent here that came over ssh")


def damage_checkpoint(run: Path) -> str:
    """Flip a bit of the largest .pt file of the newest checkpoint, kill a rank, and return a text that says so.

    Raises LookupError when there is no checkpoint, or no rank; without a rank the bit is flipped all the same.
    """
    named = [path for path in (run / "checkpoints").glob("step-*") if path.name[5:].isdigit() and path.exists()]
    steps = sorted(named, key=lambda path: path.stat().st_mtime)
    files = sorted((path for path in steps[-1].rglob("*.pt")), key=lambda path: path.stat().st_size) if steps else []
    if not files:
        raise LookupError("no checkpoint lies here yet")
    with files[-1].open("r+b") as file:
        file.seek(files[-1].stat().st_size // 2)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))
    return f"a byte of {files[-1].name} of {steps[-1].name}; {send_signal(run, RANK, signal.SIGKILL)}"


def slow_rank_down(run: Path) -> str:
    """Stop and continue a rank every 0.2 s for 20 s, and return a text that says so. Raises LookupError without a rank.

    SIGTERM ends this process; the rank is always left running.
    """
    pids = find_processes(run, RANK)[:1]
    if not pids:
        raise LookupError("no rank runs here")
    end = time.monotonic() + SLOW_SECONDS
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    try:
        while time.monotonic() < end:
            for number in (signal.SIGSTOP, signal.SIGCONT):
                os.kill(pids[0], number)
                time.sleep(0.2)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pids[0], signal.SIGCONT)  # whatever ends this program, the rank goes on
    return f"rank process {pids[0]} stopped half of {SLOW_SECONDS:g} s"


def fill_disk(run: Path) -> str:
    """Fill the disk of the run for 20 s with a file, remove it, and return a text that says so.

    SIGTERM ends this process; only SIGKILL leaves the file there. Raises LookupError when more than 64 GiB are free.
    """
    free = shutil.disk_usage(str(run)).free
    if free > MOST_FILLED:
        raise LookupError(f"{free / 2**30:.0f} GiB are free at {run}, more than the drill fills")
    filler, filled, size = run / ".drill-fills-the-disk", 0, free
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    try:
        with filler.open("wb") as file:
            while size >= 4096:
                try:
                    os.posix_fallocate(file.fileno(), filled, size)
                    filled += size
                except OSError as error:
                    if error.errno != errno.ENOSPC:
                        raise
                    size //= 2
            time.sleep(FULL_SECONDS)
    finally:
        with contextlib.suppress(FileNotFoundError):
            filler.unlink()
    return f"{filled / 2**20:,.0f} MiB filled for {FULL_SECONDS:g} s"


# Each raises LookupError or OSError when it cannot be caused.
FAULTS: dict[str, Callable[[Path], str]] = {
    "rank-killed": lambda run: send_signal(run, RANK, signal.SIGKILL),
    "rank-stopped": lambda run: send_signal(run, RANK, signal.SIGSTOP),
    "rank-slow": slow_rank_down,
    "launcher-killed": lambda run: send_signal(run, LAUNCHER, signal.SIGKILL),
    "agent-killed": lambda run: send_signal(run, AGENT, signal.SIGKILL),
    "connection-cut": cut_connection,
    "checkpoint-damaged": damage_checkpoint,
    "all-killed": kill_all,
    "disk-filled": fill_disk,
}
ON_REQUEST = {"disk-filled"}  # which others who write to that disk would notice


if __name__ == "__main__":
    main()
