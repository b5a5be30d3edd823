"""Run the agent that finlm keeps on every host of a run: it starts the host's ranks, sends their logs home, ends them.

Started as `python -m finlm.launch.agent`, over ssh or, on this machine, as a child process. It talks to the head
(head.py) by the messages of messages.py. It lives only as long as its stdin: when that closes, or nothing is heard for
the agreed time, the head or the network is gone, and it ends the ranks. When the agent itself is killed, the kernel
ends them (PR_SET_PDEATHSIG from agent to launcher to rank), so that no case leaves a process behind.

Runs on a host that has the run directory and its Python packages. Uses the standard library and finlm.base only.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from finlm.base import processes, rundir, runs
from finlm.launch import messages

BEAT_SECONDS = 2.0
TICK_SECONDS = 0.1
END_SECONDS = 4.0  # between SIGTERM and SIGKILL
LOCK_SECONDS = 12.0  # a former run's agent needs so long to notice that it is alone
FINISH_SECONDS = 5.0  # for the last logs; a head that is gone takes none
CHUNK_BYTES = 1 << 18
MISSED = -1000  # reaped before it was seen: the launcher's own exit code says more
QUEUED = 8  # lines; what a line that is stuck holds back


class Line:
    """The connection to the head over stdin and stdout, with a thread for each direction.

    `heard` is time.monotonic() of the head's last message. `open` is False once either direction is closed.
    """

    def __init__(self) -> None:
        """Start the thread that writes and the thread that reads."""
        self.heard = time.monotonic()
        self.open = True
        self._requests: queue.SimpleQueue[messages.Request | None] = queue.SimpleQueue()
        self._out = os.dup(1)  # whatever the launcher prints must not mix with it
        self._lines: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        # A write without a network waits for as long as TCP tries, and the ranks have to end before that.
        self._writer = threading.Thread(target=self._write, daemon=True)
        self._writer.start()
        threading.Thread(target=self._listen, daemon=True).start()

    def send(self, message: messages.Reply) -> None:
        """Queue a message for the head and return at once. If writing it fails later, `open` becomes False."""
        self._lines.put(f"{messages.MARK}{messages.write_message(message)}\n".encode())

    @property
    def is_stuck(self) -> bool:
        """True while 8 or more lines wait to be written, so that heartbeats are better left out."""
        return self._lines.qsize() >= QUEUED

    def wait_for_room(self) -> None:
        """Wait until under 4 lines are queued (the rest is for short messages), or the connection is closed."""
        while self._lines.qsize() >= QUEUED // 2 and self.open:
            time.sleep(0.02)

    def finish(self) -> None:
        """Wait until all queued lines are written, at most 5 s; later ones are not written."""
        self._lines.put(None)
        self._writer.join(FINISH_SECONDS)

    def _write(self) -> None:
        """Write queued lines to stdout until a None; set `open` to False when the head is gone."""
        try:
            while line := self._lines.get():
                while line:
                    line = line[os.write(self._out, line) :]
        except OSError:
            self.open = False

    def next_request(self, seconds: float) -> messages.Request | None:
        """Return the head's oldest unread request; None after `seconds`, or when the connection has closed."""
        try:
            return self._requests.get(timeout=seconds)
        except queue.Empty:
            return None

    def _listen(self) -> None:
        """Read requests from stdin until it closes, and queue all but pings; then set `open` to False.

        A line that is no request, such as one cut by a broken connection, counts as the end of the connection.
        """
        with contextlib.suppress(ValueError, KeyError, TypeError):
            for text in sys.stdin:
                self.heard = time.monotonic()
                request = messages.read_request(text)
                if request is not None and request is not messages.Command.PING:
                    self._requests.put(request)
        self.open = False
        self._requests.put(None)


def main() -> None:
    """Greet the head, start the ranks that it asks for, and follow them to their end.

    Exits the process with 0 once no rank is left; with 1 when the head asks for something else or nothing in time,
    former ranks still hold the run's lock, or the launcher cannot be started. Blocks stop signals in this process.
    """
    processes.block_stop_signals()  # the ranks need their agent and launcher alive until their checkpoint is written
    line = Line()
    request = line.next_request(30)
    if not isinstance(request, messages.Greet):
        os._exit(1)
    processes.adopt_orphans()
    run = rundir.RunDir(Path(request.run))
    lock = _lock(run, request.host)
    if request.events and lock is not None and _take_events(run):
        request.sent.pop(run.events.name, None)  # what the head has sent along need not come back
    names = [run.logs / f"{request.host}.*.log", *([run.events] if request.events else [])]
    sender = Sender(line, run.path, names if request.stream else [], request.sent)
    if lock is not None:
        sender.send()  # what was written while the line was down comes home before anything new
    line.send(_hello(lock is not None, request.port))
    start = line.next_request(request.patience)
    if lock is None or not isinstance(start, messages.Start):
        os._exit(1)
    sender.start()
    try:
        launcher = _launch(run, request.host, start, lock)
    except OSError as error:
        line.send(messages.Refused(f"{type(error).__name__}: {error}"))
        line.finish()
        os._exit(1)
    _follow(request, line, launcher, sender)
    line.finish()
    os._exit(0)


def _lock(run: rundir.RunDir, host: str) -> int | None:
    """Lock this host's .lock-<host>; return its open descriptor, or None if another process holds it for 12 s.

    The lock returned is shared: the new ranks take it too (runs.hold_lock).
    """
    lock = os.open(run.host_lock(host), os.O_RDWR | os.O_CREAT, 0o644)
    deadline = time.monotonic() + LOCK_SECONDS
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # also ranks of an earlier launch have ended
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return lock
        except BlockingIOError:
            if time.monotonic() > deadline:
                return None
            time.sleep(0.1)


def _take_events(run: rundir.RunDir) -> bool:
    """Copy the events that the head has sent along (run.lent_events) to events.jsonl, where rank 0 reads of rollbacks.

    Does nothing if events.jsonl exists or no events were sent along; returns whether it copied.
    """
    if run.events.exists() or not run.lent_events.exists():
        return False
    whole = run.events.with_suffix(".copied")
    shutil.copyfile(run.lent_events, whole)
    os.replace(whole, run.events)
    return True


def _hello(locked: bool, port: int | None) -> messages.Hello:
    """Return the greeting for the head; `port` is the rendezvous port to try, 0 for any, None if on another host."""
    connection = os.environ.get("SSH_CONNECTION", "").split()
    is_remote = len(connection) == 4
    return messages.Hello(
        locked=locked,
        port=None if port is None else processes.free_port(port),
        cores=len(os.sched_getaffinity(0)),
        came_from=connection[0] if is_remote else None,
        arrived_at=connection[2] if is_remote else None,
        hostname=os.uname().nodename,
    )


def _launch(run: rundir.RunDir, host: str, start: messages.Start, lock: int) -> subprocess.Popen[bytes]:
    """Start the launcher of this host's ranks (node.py) in a new session and return its process.

    Links the prepared data into the run directory if start.shards is set, and writes the host's environment there. The
    launcher inherits the descriptor `lock` and logs to <host>.launcher.log. Raises OSError.
    """
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"  # ninja lies beside python
    named = {rundir.HOST_VARIABLE: host, rundir.STEP_VARIABLE: str(start.step), "PATH": path}
    env = os.environ | named | start.env
    env.pop("RANK", None)  # of a job that finlm runs in: a rank is known by the one that the launcher gives it
    env["PYTHONPATH"] = processes.python_path(run.code, env)
    if start.shards:
        link = run.path / "shards"
        link.unlink(missing_ok=True)
        link.symlink_to(start.shards)
    runs.write_host_env(run, host, start.env)
    devices: dict[str, list[int] | list[str]] = {**start.world}
    visible = [name.strip() for name in env.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    if not start.chosen and len(visible) >= len(start.world[host]):
        # The hostfile has only a number, and the launcher sets the variable anew, which would hide the user's choice.
        devices[host] = visible[: len(start.world[host])]
    launch = {"world": devices, "node": start.node, "address": start.address, "port": start.port}
    command = [sys.executable, "-u", "-m", "finlm.launch.node", json.dumps(launch), str(run.path)]
    run.logs.mkdir(parents=True, exist_ok=True)
    with (run.logs / f"{host}.launcher.log").open("ab") as log:
        return subprocess.Popen(
            command,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            pass_fds=(lock,),
            preexec_fn=functools.partial(processes.die_with_parent, os.getpid()),
        )


def _follow(greet: messages.Greet, line: Line, launcher: subprocess.Popen[bytes], sender: Sender) -> None:
    """Send heartbeats and obey the head until the launcher ends, the head is gone or silent, or it asks for the end.

    Reports each rank that ends. At the end kills all ranks that are left, finishes the Sender, and tells the head the
    launcher's exit code, -N for signal N.
    """
    ranks = Ranks(launcher.pid, greet.slots)
    next_beat, kills_before = 0.0, count_oom_kills()

    def beat() -> None:
        """Send the head a Beat with the states of the ranks, the free disk space and the OOM kills since the start."""
        kills = count_oom_kills()
        killed = None if kills is None or kills_before is None else kills - kills_before
        free = shutil.disk_usage(greet.run).free
        line.send(messages.Beat({str(rank): state for rank, state in ranks.states().items()}, free, killed))

    while launcher.poll() is None and line.open and time.monotonic() - line.heard < greet.patience:
        request = line.next_request(TICK_SECONDS)
        if request is messages.Command.STACKS:
            ranks.signal(signal.SIGUSR1)
        elif isinstance(request, messages.Stop):
            ranks.signal(signal.Signals(request.signal))
        elif request is messages.Command.END:
            break
        for rank, status in ranks.find_ended():
            line.send(messages.RankEnded(rank, status))
        if time.monotonic() > next_beat and not line.is_stuck:
            beat()
            next_beat = time.monotonic() + BEAT_SECONDS
    code = launcher.poll()
    beat()
    for rank, status in ranks.find_ended():
        line.send(messages.RankEnded(rank, status))
    end_all(launcher)
    sender.finish()
    ended = launcher.returncode if code is None else code
    # 256 - N says that a rank died of signal N; subprocess says -N.
    line.send(messages.Exited(ended - 256 if ended > 128 + 64 else ended, asked=code is None))


def end_all(launcher: subprocess.Popen[bytes]) -> None:
    """Kill the launcher, which ends its ranks too (PR_SET_PDEATHSIG), and end every process below this process.

    Sends SIGTERM every 0.05 s for 4 s, then SIGKILL for 4 s; returns as soon as no process is left.
    """
    launcher.kill()
    for how, patience in ((signal.SIGTERM, END_SECONDS), (signal.SIGKILL, END_SECONDS)):
        deadline = time.monotonic() + patience
        while time.monotonic() < deadline:
            launcher.poll()
            left = [pid for pid in processes.descendants(os.getpid()) if processes.is_alive(pid)]  # orphans too
            if not left:
                launcher.poll()  # it may have ended since
                return
            for pid in left:
                processes.send_signal(pid, how)
            reap(launcher.pid)
            time.sleep(0.05)


class Sender(threading.Thread):
    """A thread that sends the head what is appended to the files that match some patterns.

    `patterns` are paths with a wildcard in the name; names are sent relative to `root`. The head has each file up to
    the byte in `sent`. Files that exist now and are not in `sent` are sent from their end, later ones from the start.
    """

    def __init__(self, line: Line, root: Path, patterns: list[Path], sent: dict[str, int]) -> None:
        """Note up to which byte each file has been sent; the thread begins at start()."""
        super().__init__(daemon=True)
        self.line, self.root, self.patterns = line, root, patterns
        sizes = {path: path.stat().st_size for path in self._files()}
        self.offsets = {path: min(size, sent.get(self._relative(path), size)) for path, size in sizes.items()}
        self.ending = threading.Event()

    def run(self) -> None:
        """Send new text every 0.2 s until `finish` is called, then once more."""
        while not self.ending.wait(0.2):
            self.send()
        self.send()

    def finish(self) -> None:
        """Ask the thread to send what is left and wait for it, at most 5 s."""
        self.ending.set()
        self.join(FINISH_SECONDS)

    def _files(self) -> list[Path]:
        """Return the files that match the patterns now."""
        return [path for pattern in self.patterns for path in sorted(pattern.parent.glob(pattern.name))]

    def _relative(self, path: Path) -> str:
        """Return the path relative to the run directory, with slashes, as `sent` and messages name it."""
        return path.relative_to(self.root).as_posix()

    def send(self) -> None:
        """Send what was appended to the files since the last call, in blocks of at most 256 KiB.

        Waits while 4 or more lines are queued. Raises OSError when a file cannot be read.
        """
        for path in self._files():
            with path.open("rb") as file:
                file.seek(self.offsets.get(path, 0))
                while block := file.read(CHUNK_BYTES):
                    text = block.decode("utf-8", "surrogateescape")
                    self.offsets[path] = file.tell()
                    self.line.wait_for_room()
                    self.line.send(messages.Log(self._relative(path), text, self.offsets[path]))


class Ranks:
    """The ranks of a launcher as the kernel shows them in /proc: their pids, states and exit codes.

    `launcher` is its pid, `count` its number of ranks. A rank is a child of the launcher with RANK in its environment.
    """

    def __init__(self, launcher: int, count: int) -> None:
        """Begin with no rank known; find_ended() looks for them."""
        self.launcher, self.count = launcher, count
        self.pids: dict[int, int] = {}
        self.born: dict[int, str] = {}  # when each pid's process started: the kernel gives pids away again
        self.ended: dict[int, int] = {}

    def find_ended(self) -> list[tuple[int, int]]:
        """Return (rank, exit code) of the ranks that ended since the last call, and look for new ranks.

        The code is -N for a rank that died of signal N, and MISSED when it was reaped before it was seen.
        """
        ended = []
        for rank in [rank for rank in self.pids if rank not in self.ended]:
            # The launcher reaps a dead rank within a moment and does not say which died first: /proc does before that.
            status = self._read(rank)
            if status is None or status.state in "ZX":
                self.ended[rank] = MISSED if status is None else status.code
                ended.append((rank, self.ended[rank]))
        known = set(self.pids.values())
        for pid in processes.children(self.launcher) if len(known) < self.count else ():
            status = None if pid in known else processes.read_status(pid)
            number = None if status is None else _read_rank(pid)
            if status is not None and number is not None:
                self.pids[number], self.born[number] = pid, status.born
        return ended

    def _read(self, rank: int) -> processes.Status | None:
        """Return the status of a rank's process; None when it has ended, even if another process has its pid now."""
        status = processes.read_status(self.pids[rank])
        return status if status is not None and status.born == self.born[rank] else None

    def states(self) -> dict[int, str]:
        """Return {rank: the kernel's state letter} of living ranks: R, S, D (waits for a device), T (stopped)."""
        statuses = {rank: self._read(rank) for rank in self.pids if rank not in self.ended}
        return {rank: status.state for rank, status in statuses.items() if status and status.state not in "ZX"}

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to every living rank."""
        for rank in self.states():
            processes.send_signal(self.pids[rank], number)


def reap(launcher: int) -> None:
    """Collect the zombies among this process's children, but not the pid `launcher`, which its Popen collects."""
    for pid in processes.children(os.getpid()):
        status = processes.read_status(pid)
        if pid != launcher and status and status.state == "Z":
            os.waitpid(pid, os.WNOHANG)


def count_oom_kills() -> int | None:
    """Return how many processes the kernel has killed for memory since boot, also in cgroups; None if unknown."""
    try:
        lines = Path("/proc/vmstat").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), None)


def _read_rank(pid: int) -> int | None:
    """Return RANK in the environment of a process; None before it is set, or for another user's process."""
    try:
        entries = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return None
    values = [entry.partition(b"=")[2] for entry in entries if entry.startswith(b"RANK=")]
    return int(values[0]) if values and values[0].isdigit() else None


if __name__ == "__main__":
    main()
