"""Start `finlm train` on a host of a cluster, wait for a step, and see what is left of it on every host."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from finlm.base.rundir import RunDir

from .netcluster import WORK, Cluster, Host, signal_all
from .syncing import ENV, until
from helpers import QUICKSTART, sets, with_fault

LONG = (
    *("train.steps=20000", "zero.stage=1", "checkpoint.every_steps=10", "eval.every_steps=20000"),
    "eval.max_tokens_per_source=500",
)
PATIENCE_SECONDS = 250  # a guard: a fault ends a run in 3 to 40 s, and the machine may be busy
ONE_THREAD = "env={OMP_NUM_THREADS: '1'}"  # all hosts share this machine's cores
PACE_SECONDS = 0.25  # a step of LONG at least; at full speed, a test that waits for a time-out trains hundreds


def command(overrides: Sequence[str], *more: str) -> list[str]:
    """A `finlm train` of the tiny quickstart on the hosts of WORK/hostfile.txt."""
    line = [sys.executable, "-m", "finlm", "train", str(QUICKSTART), *sets((ONE_THREAD, *overrides))]
    return [*line, "--hostfile", f"{WORK}/hostfile.txt", *more]


def long_command(cluster: Cluster, tiny: Sequence[str], *overrides: str) -> list[str]:
    """command() of a run that is still training when a host is lost, at no more than a step in PACE_SECONDS."""
    site = with_fault(cluster.base / "site", f"paced({PACE_SECONDS})")
    return command([*tiny, *LONG, f"env={{OMP_NUM_THREADS: '1', PYTHONPATH: '{site}'}}", *overrides])


def losses(run: RunDir) -> dict[int, float]:
    return {row["step"]: row["loss"] for row in run.read_events("step")}


def write_hostfile(host: Host, *lines: str) -> None:
    (host.work / "hostfile.txt").write_text("".join(f"{line}\n" for line in lines))


def the_run(host: Host) -> RunDir:
    """The run below the host's working directory that trained last, as the real machine sees it."""
    events = (host.work / "runs").glob("quickstart-*/events.jsonl")
    return RunDir(max(events, key=lambda path: path.stat().st_mtime).parent)


def processes(host: Host, word: str = "finlm") -> dict[int, str]:
    """Command lines with a word in them of a host's processes, by their PIDs on the real machine."""
    found: dict[int, str] = {}
    try:
        mine = Path(f"/proc/{host.pid}/ns/pid").readlink()
    except OSError:  # switched off
        return found
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and (entry / "ns/pid").readlink() == mine:
                line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                if word in line:
                    found[int(entry.name)] = line
        except OSError:  # ended meanwhile
            continue
    return found


def pids(host: Host, what: str) -> list[int]:
    """PIDs of the host's command ("-m finlm train"), ranks ("finlm.train ") or agent ("finlm.launch.agent")."""
    found = processes(host, what)
    return [pid for pid, line in found.items() if _is_python(line)]


def _is_python(line: str) -> bool:
    return Path(line.split()[0]).name.startswith("python")


class Training:
    """A running command; `said` is its output once it is over, `seconds` the time from the fault to its end."""

    def __init__(self, cluster: Cluster, line: Sequence[str]) -> None:
        self.cluster = cluster
        self.process = cluster[0].popen(*line, env=ENV)
        self.said = ""
        self.seconds = 0.0
        self._fault = time.monotonic()

    def reach(self, step: int) -> Training:
        """Wait until so many steps are recorded since the start of this command."""
        began = time.time()

        until(lambda: sum(row["time"] > began for row in self._rows("step")) >= step, PATIENCE_SECONDS)
        self._fault = time.monotonic()
        return self

    def row(self, kind: str, step: int = 0, **values: Any) -> dict[str, Any]:
        """The first row of a kind with these values, of this step or a later one; waits for it."""

        def rows() -> list[dict[str, Any]]:
            return [row for row in self._rows(kind) if row["step"] >= step and values.items() <= row.items()]

        until(lambda: bool(rows()), PATIENCE_SECONDS, lambda: f"no {kind} row with {values} from step {step}")
        return rows()[0]

    def _rows(self, kind: str) -> list[dict[str, Any]]:
        """The run's rows of a kind; AssertionError with what the command said when it has ended."""
        if self.process.poll() is not None:
            raise AssertionError(self.process.stdout.read() if self.process.stdout else "")
        if not list(self.cluster[0].work.glob("runs/quickstart-*/events.jsonl")):
            return []
        return list(the_run(self.cluster[0]).read_events(kind))

    def kill(self, host: Host, what: str, how: signal.Signals = signal.SIGKILL) -> None:
        """Send a signal to the host's ranks or agent."""
        found = pids(host, what)
        assert found, processes(host)
        signal_all(found, how)

    def kill_all(self, how: signal.Signals) -> None:
        """Send a signal to the command and everything it has started, ssh too, on every host."""
        for host in self.cluster.hosts:
            signal_all(processes(host, "-m finlm train") | processes(host, "finlm."), how)

    def left(self) -> dict[str, dict[int, str]]:
        """Processes of the run, by host."""
        return {host.name: found for host in self.cluster.hosts if (found := processes(host, "finlm."))}

    def over(self) -> Training:
        """Wait for the end of the command, and then of every process of the run on every host."""
        try:
            self.said, _ = self.process.communicate(timeout=PATIENCE_SECONDS)
        except subprocess.TimeoutExpired:
            for host in self.cluster.hosts:  # the other tests need them
                signal_all(processes(host, "finlm."), signal.SIGKILL)
            raise
        self.seconds = time.monotonic() - self._fault
        until(lambda: not self.left(), 60, lambda: f"still there: {self.left()}")
        print(f"{self.seconds:.1f} s\n{self.said}")  # the numbers of the logbook's fault table: pytest -rP
        return self
