"""Talk to each host's agent, and pass on to the ranks the signals that `finlm train` gets.

A thread per host reads the agent's messages, writes the ranks' logs under the same names here, and keeps the facts that
the watchdog (watch.py) asks for; it decides nothing.

SIGTERM, SIGINT, and SIGHUP of a closed terminal (ignored under `nohup`) reach the ranks as SIGTERM or SIGINT: they
finish their step, write a checkpoint and exit. The first signal is only noted. A second signal ends everything at once.
launch.grace_seconds must be less than the time a scheduler leaves.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from finlm.base import files, processes, screen
from finlm.base.errors import UserError
from finlm.base.rundir import RunDir
from finlm.hosts import ssh
from finlm.launch import messages
from finlm.recipe.cluster import Host

HELLO_SECONDS = 30.0
WAITING_BYTES = 1 << 26  # of one file, for room on this machine's disk; the next launch sends what is more


class Session:
    """The connection to the agent of a host, and what the agent has reported. Times are time.monotonic() here.

    `node` is the host's index, `ranks` its ranks. `local`: the host is this machine. `stream`: the agent sends its log
    files. `patience` is the seconds of silence (launch.outage_seconds) after which each end gives up the other.
    """

    def __init__(self, host: Host, node: int, ranks: range, *, local: bool, stream: bool, patience: float) -> None:
        """Keep the arguments; start() starts the agent."""
        self.host, self.node, self.ranks, self.patience = host, node, ranks, patience
        self.local, self.stream = local, stream
        self.hello: messages.Hello | None = None
        self.refused = ""
        self.error = ""  # of this end, which hears the host no more
        self.heard = self._began = time.monotonic()
        self.free_bytes: int | None = None  # on the disk of the run directory
        self.oom_kills: int | None = None  # processes the host's kernel has killed for memory since the ranks started
        self.states: dict[str, str] = {}
        self.exits: list[tuple[float, int, int]] = []  # when, rank, exit code (signals negative)
        self.sent: dict[str, int] = {}  # up to which byte of the host's files what they say is here
        self._waiting: dict[str, bytes] = {}  # the end of a file's part that is not written here
        self._taken: dict[str, int] = {}  # up to which byte of the host's files what they say is here or waits
        self._has_reported = False
        self.code: int | None = None  # the launcher's, once it has ended
        self.closed: float | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the session

    @property
    def name(self) -> str:
        """The host's name in the hostfile."""
        return self.host.name

    def start(self, run: RunDir, path_there: Path, python: str, port: int | None, accept_new_keys: bool) -> None:
        """Start the agent, over ssh or as a child process, and a thread that reads its messages; send it the greeting.

        The host sends its files from the byte on that a former launch received. `path_there` is the run directory's
        path on the host, `python` the interpreter there. `port` is the rendezvous port to try (0: any), None unless
        this is the first host. Raises OSError when ssh, or the interpreter here, cannot be started.
        """
        with contextlib.suppress(FileNotFoundError, files.NotJson):  # without fsync it may be empty after a power cut
            self.sent = files.read_json(self._sent_file(run))
        code = path_there / "code"
        agent = ["-u", "-m", "finlm.launch.agent"]
        if self.local:
            line = [python, *agent]
            env = os.environ | {"PYTHONPATH": processes.python_path(code, os.environ)}
            env.pop("SSH_CONNECTION", None)  # the user's own login: no host of the run came from there
        else:
            # TCP resends at doubling intervals: after 60 s without a network the ranks went on 107 s after its loss,
            # and ssh a little later, so that ssh has to be as patient as both ends.
            count = math.ceil(self.patience / ssh.ALIVE_SECONDS)
            argv = ["env", f"PYTHONPATH={code}", python, *agent]
            line = ssh.command(self.host.destination, argv, accept_new_keys=accept_new_keys, alive_count=count)
            env = ssh.environment()
        self._process = subprocess.Popen(
            line,
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            start_new_session=True,  # SIGTERM and Ctrl-C are this process's to handle
            preexec_fn=None if self.local else processes.block_stop_signals,  # ssh; an agent does it itself
        )
        self.heard = self._began = time.monotonic()
        threading.Thread(target=self._listen, args=(run,), daemon=True).start()
        events, slots = self.node == 0, self.host.slots
        self.send(
            messages.Greet(str(path_there), self.name, slots, port, self.stream, events, self.patience, self.sent)
        )

    def send(self, request: messages.Request) -> None:
        """Send a request to the agent. Does nothing when the agent is gone, which `closed` shows."""
        assert self._process is not None and self._process.stdin is not None
        with contextlib.suppress(OSError, ValueError):
            self._process.stdin.write(messages.write_message(request).encode() + b"\n")
            self._process.stdin.flush()

    def wait_hello(self) -> messages.Hello:
        """Return the agent's first message; waits for it up to 30 s after the start.

        Raises UserError when none comes, or when ranks of a former launch still hold the run's lock on the host.
        """
        while not self.hello and self.closed is None and time.monotonic() < self._began + HELLO_SECONDS:
            time.sleep(0.02)
        if not self.hello:
            errors = self.errors()
            if not self.local and (known := ssh.reason(self.host.destination, errors)):
                raise known
            evidence = self.error or ssh.last_lines(errors) or "it said nothing"
            raise UserError(f"the agent on {self.name} did not start", evidence=evidence)
        if not self.hello.locked:
            raise UserError(
                f"ranks of a former launch of this run are still there on {self.name}",
                evidence=f"they hold .lock-{self.name} in the run directory",
                fix=f"end them on {self.name}, or wait; `--new` starts another run",
            )
        return self.hello

    def errors(self) -> str:
        """Return what ssh and the agent wrote to stderr."""
        self._errors.seek(0)
        return self._errors.read().decode(errors="replace")

    def end(self) -> None:
        """Ask the agent to end the host's ranks and itself; does not wait."""
        if self._process is not None and self.closed is None:
            self.send(messages.Command.END)

    def release(self, deadline: float) -> bool:
        """Wait until the connection closes; kill ssh or the local agent at `deadline` and return False if it has not.

        A living agent then ends its ranks. `deadline` is in time.monotonic() seconds.
        """
        if self._process is None:
            return True
        while self.closed is None and time.monotonic() < deadline:
            time.sleep(0.02)
        if not (clean := self.closed is not None):
            self._process.kill()
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        self._process.wait()
        return clean

    def _sent_file(self, run: RunDir) -> Path:
        """Return the path here of the JSON file that says up to which byte the host's files have been received."""
        return run.path / f".sent-{self.name}.json"

    def _listen(self, run: RunDir) -> None:
        """Handle the agent's messages until the connection closes; keep an exception as `error`, then set `closed`."""
        assert self._process is not None and self._process.stdout is not None
        mark = messages.MARK.encode()
        try:
            with self._process.stdout as lines:  # closed then: ssh waits for a reader before it ends
                for line in lines:
                    self.heard = time.monotonic()
                    if line.startswith(mark) and line.endswith(b"\n"):  # else cut short with the connection
                        self._store_message(run, messages.read_reply(line[len(mark) :]))
        except Exception as error:  # nobody else would tell of it
            self.error = f"{type(error).__name__}: {error}"
        finally:
            self.closed = time.monotonic()

    def _store_message(self, run: RunDir, message: messages.Reply | None) -> None:
        """Store the fields of a message in this session's attributes, and append a log's text to its file here.

        Raises ValueError for a file outside the run directory.
        """
        match message:
            case messages.Hello():
                self.hello = message
            case messages.Log(file, text, end):
                self._append_block(run, file, text.encode("utf-8", "surrogateescape"), end)
            case messages.Beat(states, free_bytes, oom_kills):
                self.states, self.free_bytes, self.oom_kills = states, free_bytes, oom_kills
            case messages.RankEnded(rank, code):
                self.exits.append((self.heard, rank, code))
            case messages.Refused(reason):
                self.refused = reason
            case messages.Exited(code):
                self.code = code

    def _append_block(self, run: RunDir, name: str, block: bytes, end: int | None) -> None:
        """Append a block to the file `name` of the run directory here, and store how much of the host's file is here.

        `end` is the byte behind the block in the host's file, None if unknown. What cannot be written waits in memory
        for the next call, and the first time the reason is printed. Once 64 MiB of a file wait, drops further blocks,
        which the next launch gets. Raises ValueError for a name outside the run directory.
        """
        path = files.within(run.path, name)
        waiting = self._waiting.pop(name, b"")
        if end is None:  # the code of an older run directory does not say
            end = self._taken.get(name, 0) + len(block)
        start = end - len(block)
        if len(waiting) < WAITING_BYTES and start == self._taken.get(name, start):  # nothing is left out before it
            waiting, self._taken[name] = waiting + block, end
        try:
            path.parent.mkdir(exist_ok=True)
            with path.open("ab", buffering=0) as file:
                while waiting:
                    waiting = waiting[file.write(waiting) :]
        except OSError as error:
            self._waiting[name] = waiting
            self._report_write_error(error)
        self.sent[name] = self._taken[name] - len(waiting)
        new = self._sent_file(run).with_suffix(".new")
        try:
            new.write_text(json.dumps(self.sent), encoding="utf-8")  # several times a second: no fsync
            os.replace(new, self._sent_file(run))
        except OSError as error:
            self._report_write_error(error)

    def _report_write_error(self, error: OSError) -> None:
        """Print, only the first time, that the host's output cannot be written here."""
        if not self._has_reported:
            self._has_reported = True
            screen.say(f"what {self.name} sends waits for room here, or for the next launch: {error}; the run goes on")


@contextmanager
def watch_away_hosts(hosts: Sequence[Host], seconds: float) -> Iterator[Callable[[], list[str]]]:
    """Ask in a thread, every `seconds` (at least 1) during the block, whether the absent `hosts` answer over ssh.

    Yields a function that returns the names of all of them that have answered so far, [] at first.
    """
    back: list[str] = []
    over = threading.Event()

    def probe() -> None:
        """Add the hosts that answer to `back`, until `over` is set."""
        while not over.wait(max(1.0, seconds)):
            back.extend(host.name for host in hosts if host.name not in back and ssh.answers(host.destination))

    if hosts:
        threading.Thread(target=probe, name="look out", daemon=True).start()
    try:
        yield lambda: list(back)
    finally:
        over.set()


SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
ONE_REQUEST_SECONDS = 1.0  # `timeout` signals the process and then its group: twice, for a single request
RESUMES = "the same command resumes from the last complete checkpoint"


class HostsBack(Exception):
    """Raised when the ranks have stopped with a checkpoint because the hosts `names`, which were away, answer again."""

    def __init__(self, names: Sequence[str]) -> None:
        """Make the exception; its text is the names, joined by commas."""
        super().__init__(", ".join(names))
        self.names = names


@dataclass
class StopRequest:
    """A request to stop the ranks: by a signal to this process, or because absent hosts answer again.

    `number` is the signal, 0 for none. It came at `since` and was sent to the ranks at `passed_on`, in time.monotonic()
    seconds. `back` names the hosts for which the ranks stop.
    """

    number: int = 0
    since: float = 0.0
    passed_on: float | None = None
    back: tuple[str, ...] = ()

    def stop_for_hosts(self, names: Sequence[str], now: float) -> None:
        """Request a stop so that the hosts `names` can rejoin, and print that; not without names or after a signal."""
        if names and not self.number:
            screen.say(f"{' and '.join(names)} answers again: the ranks stop to take it in")
            self.number, self.since, self.back = int(signal.SIGTERM), now, tuple(names)

    def pass_on(self, sessions: Sequence[Session], has_stepped: bool, grace_seconds: float, now: float) -> None:
        """Send a noted signal to the ranks of all hosts, once, and print that; do nothing if there is none.

        SIGHUP is sent as SIGTERM. Raises SystemExit when no step is finished yet, or when the ranks took longer than
        grace_seconds since it was sent. A stop for hosts that are back is sent after the first step and has no limit.
        `now` is in time.monotonic() seconds.
        """
        if not self.number or (self.back and not has_stepped):
            return
        name = signal.Signals(self.number).name
        if not has_stepped:
            screen.say(f"{name}: ended before the first step; the same command goes on")
            sys.exit(128 + self.number)
        if self.passed_on is None:
            self.passed_on = now
            for session in sessions:  # first: words on a screen are not needed for a checkpoint
                session.send(messages.Stop(signal.SIGTERM if self.number == signal.SIGHUP else self.number))
            if not self.back:
                screen.say(f"{name}: the ranks finish their step and write a checkpoint (again: end at once)")
        elif now - self.passed_on > grace_seconds and not self.back:
            screen.say(f"{name}: no checkpoint within {grace_seconds:g} s (launch.grace_seconds); {RESUMES}")
            sys.exit(128 + self.number)

    def finish(self, step: int | None) -> None:
        """Print that the ranks stopped after `step`, the last finished one, and raise SystemExit(128 + signal).

        Raises HostsBack instead when the ranks stopped so that hosts can rejoin.
        """
        if self.back:
            raise HostsBack(self.back)
        screen.say(f"stopped after step {step or 0:,} with a checkpoint; the same command resumes from it")
        sys.exit(128 + (self.number or signal.SIGTERM))  # without a signal here, the ranks themselves got one


@contextmanager
def exit_on_signals(words: str = RESUMES) -> Iterator[None]:
    """On SIGTERM and SIGHUP in the block print `words` and raise SystemExit(128 + number); restores the old handlers.

    SIGHUP stays ignored where it is ignored (nohup).
    """

    def leave(number: int, _: FrameType | None) -> None:
        """Print the signal's name and `words`, and raise SystemExit."""
        screen.say(f"{signal.Signals(number).name}: {words}")
        sys.exit(128 + number)

    # By default they end the process with no report and no launch.notify, for example between two launches.
    with _handle((signal.SIGTERM, signal.SIGHUP), leave):
        yield


@contextmanager
def _handle(numbers: Sequence[signal.Signals], handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Handle these signals by `handler` in the block, but not SIGHUP where it is ignored; restore the old handlers."""
    heeded = [n for n in numbers if n != signal.SIGHUP or signal.getsignal(n) != signal.SIG_IGN]
    previous = {number: signal.signal(number, handler) for number in heeded}
    try:
        yield
    finally:
        for number, former in previous.items():
            signal.signal(number, former)


@contextmanager
def note_signals() -> Iterator[StopRequest]:
    """Yield a StopRequest that notes SIGTERM, SIGINT and SIGHUP in the block; restores the old handlers afterwards.

    A second signal, more than 1 s after the first, raises SystemExit. Leaves SIGHUP alone where it is ignored.
    """
    stop = StopRequest()

    def note(number: int, _: FrameType | None) -> None:
        """Note the first signal, also in place of a stop for hosts; raise SystemExit at a second signal."""
        if not stop.number or stop.back:
            stop.number, stop.since, stop.back = number, time.monotonic(), ()
        elif time.monotonic() - stop.since > ONE_REQUEST_SECONDS:
            screen.say(f"ended at once; {RESUMES}")
            sys.exit(128 + number)

    with _handle(SIGNALS, note):
        yield stop
