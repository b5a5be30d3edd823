"""The process that finlm keeps on every host of a run: starts the host's ranks, sends their logs home, ends them.

`python -m finlm.ops.launch_agent`, over ssh or, on this machine, as a child; one JSON object a line each way. Its life
hangs on its stdin: when that closes, or nothing is heard for the agreed time, the head or the network is gone and the
ranks are ended. The kernel ends them when the agent itself is killed (PR_SET_PDEATHSIG from agent to launcher to rank),
so that no case leaves a process behind.

Runs on a host that has the run directory and its Python packages; standard library and finlm.base only.
"""

from __future__ import annotations

import base64
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
from typing import Any

from finlm.base import processes, rundir
from finlm.ops import launch_ranks, launch_reach

MARK = "finlm-agent:"  # login scripts may print too
BEAT_SECONDS = 2.0
TICK_SECONDS = 0.1
END_SECONDS = 4.0  # between SIGTERM and SIGKILL
LOCK_SECONDS = 12.0  # a former run's agent needs so long to notice that it is alone
CHUNK_BYTES = 1 << 18
QUEUED = 8  # lines; what a line that is stuck holds back


class Line:
    """Both directions of the connection. `heard` is when the head last said anything; `open` whether it still can.

    A thread of its own writes: without a network that waits for as long as TCP tries, and the ranks are to end before.
    """

    def __init__(self) -> None:
        self.heard = time.monotonic()
        self.open = True
        self._wishes: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._out = os.dup(1)  # whatever the launcher prints must not mix with it
        self._lines: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._writer = threading.Thread(target=self._write, daemon=True)
        self._writer.start()
        threading.Thread(target=self._listen, daemon=True).start()

    def say(self, kind: str, **fields: Any) -> None:
        """Send one line, without waiting for it; an unreachable head is noticed by the listener."""
        self._lines.put(f"{MARK}{json.dumps({'kind': kind, **fields})}\n".encode())

    @property
    def is_stuck(self) -> bool:
        """True while what is said often is better left unsaid."""
        return self._lines.qsize() >= QUEUED

    def wait_for_room(self) -> None:
        """Wait until there is room for a piece of a log; half of the queue is left to short lines."""
        while self._lines.qsize() >= QUEUED // 2 and self.open:
            time.sleep(0.02)

    def finish(self, seconds: float = 5.0) -> None:
        """Wait until all is sent, but not for a line that is stuck."""
        self._lines.put(None)
        self._writer.join(seconds)

    def _write(self) -> None:
        try:
            while line := self._lines.get():
                while line:
                    line = line[os.write(self._out, line) :]
        except OSError:
            self.open = False

    def next(self, seconds: float) -> dict[str, Any] | None:
        """The head's first wish; None after so many seconds, or when the line has closed."""
        try:
            return self._wishes.get(timeout=seconds)
        except queue.Empty:
            return None

    def _listen(self) -> None:
        for text in sys.stdin:
            self.heard = time.monotonic()
            wish = json.loads(text)
            if wish["do"] != "ping":
                self._wishes.put(wish)
        self.open = False
        self._wishes.put(None)


def main() -> None:
    """Greet, start what the head asks for, follow it to its end; the launcher's exit code."""
    processes.shield()  # the ranks need their agent and launcher alive until their checkpoint is written
    line = Line()
    request = line.next(30)
    if request is None:
        os._exit(1)
    processes.adopt_orphans()
    run = rundir.RunDir(Path(request["run"]))
    lock = _lock(run, request["host"])
    if request["events"] and lock is not None and _take_events(run):
        request["sent"].pop(run.events.name, None)
    names = [run.logs / f"{request['host']}.*.log", *([run.events] if request["events"] else [])]
    sender = Sender(line, run.path, names if request["stream"] else [], request["sent"])
    if lock is not None:
        sender.send()  # what was written while the line was down comes home before anything new
    line.say("hello", locked=lock is not None, **launch_reach.facts(request["port"]))
    start = line.next(request["patience"])
    if lock is None or start is None or start["do"] != "start":
        os._exit(1)
    sender.start()
    try:
        launcher = _launch(run, request["host"], start, lock)
    except OSError as error:
        line.say("refused", reason=f"{type(error).__name__}: {error}")
        line.finish()
        os._exit(1)
    _follow(request, line, launcher, sender)
    line.finish()
    os._exit(0)


def _lock(run: rundir.RunDir, host: str) -> int | None:
    """Hold this host's part of the run, together with the ranks to come. None when former ranks hold it still."""
    lock = os.open(run.host_lock(host), os.O_RDWR | os.O_CREAT, 0o644)
    deadline = time.monotonic() + LOCK_SECONDS
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # nobody else holds it
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)  # each rank takes it too: rundir.hold
            return lock
        except BlockingIOError:
            if time.monotonic() > deadline:
                return None
            time.sleep(0.1)


def _take_events(run: rundir.RunDir) -> bool:
    """The head's copy of events.jsonl becomes this host's where it has none: rank 0 takes up roll-backs from it."""
    if run.events.exists() or not run.lent_events.exists():
        return False
    whole = run.events.with_suffix(".copied")
    shutil.copyfile(run.lent_events, whole)
    os.replace(whole, run.events)
    return True


def _launch(run: rundir.RunDir, host: str, start: dict[str, Any], lock: int) -> subprocess.Popen[bytes]:
    """Start DeepSpeed's launcher of one node, in a session of its own. Raises OSError, for example on a full disk."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"  # ninja lies beside python
    env = os.environ | {rundir.HOST_VARIABLE: host, "PATH": path} | start["env"]
    env["PYTHONPATH"] = os.pathsep.join(filter(None, (str(run.code), env.get("PYTHONPATH"))))
    if start["shards"]:
        link = run.path / "shards"
        link.unlink(missing_ok=True)
        link.symlink_to(start["shards"])
    rundir.write_host_env(run, host, start["env"])
    devices = start["world"]
    if not start["chosen"]:
        devices[host] = _visible(devices[host], env.get("CUDA_VISIBLE_DEVICES"))
    world = base64.urlsafe_b64encode(json.dumps(devices).encode()).decode()
    command = [
        *(sys.executable, "-u", "-m", "deepspeed.launcher.launch", f"--world_info={world}"),
        *(f"--node_rank={start['node']}", f"--master_addr={start['address']}", f"--master_port={start['port']}"),
        *("--no_local_rank", "--module", "finlm.train", str(run.path)),
    ]
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


def _visible(slots: list[int], visible: str | None) -> list[int] | list[str]:
    """The devices of a host whose hostfile line says how many, but not which: the launcher sets the variable anew."""
    named = [name.strip() for name in (visible or "").split(",")][: len(slots)]
    return named if visible and len(named) == len(slots) else slots


def _follow(request: dict[str, Any], line: Line, launcher: subprocess.Popen[bytes], sender: Sender) -> None:
    """Beat, and watch ranks and head until the launcher has ended or has to; then end what is left and say so."""
    ranks = launch_ranks.Ranks(launcher.pid, request["slots"])
    next_beat, kills_before = 0.0, launch_ranks.oom_kills()

    def beat() -> None:
        kills = launch_ranks.oom_kills()
        killed = None if kills is None or kills_before is None else kills - kills_before
        free = shutil.disk_usage(request["run"]).free
        line.say("beat", ranks=ranks.states(), free_bytes=free, oom_kills=killed)

    while launcher.poll() is None and line.open and time.monotonic() - line.heard < request["patience"]:
        wish = line.next(TICK_SECONDS)
        if wish and wish["do"] == "stacks":
            ranks.signal(signal.SIGUSR1)
        elif wish and wish["do"] == "stop":
            ranks.signal(signal.Signals(wish["signal"]))
        elif wish and wish["do"] == "end":
            break
        for rank, status in ranks.look():
            line.say("rank", rank=rank, code=status)
        if time.monotonic() > next_beat and not line.is_stuck:
            beat()
            next_beat = time.monotonic() + BEAT_SECONDS
    code = launcher.poll()
    beat()
    for rank, status in ranks.look():
        line.say("rank", rank=rank, code=status)
    end_all(launcher, ranks)
    sender.finish()
    line.say("exit", code=launch_ranks.as_signal(launcher.returncode if code is None else code), asked=code is None)


def end_all(launcher: subprocess.Popen[bytes], ranks: launch_ranks.Ranks) -> None:
    """End the launcher, its ranks with it (PR_SET_PDEATHSIG), and whatever they left to this subreaper."""
    launcher.kill()
    for how, patience in ((signal.SIGTERM, END_SECONDS), (signal.SIGKILL, END_SECONDS)):
        deadline = time.monotonic() + patience
        while time.monotonic() < deadline:
            launcher.poll()
            left = ranks.family()
            if not left:
                launcher.poll()  # it may have ended since
                return
            for pid in left:
                try:
                    os.kill(pid, how)
                except ProcessLookupError:
                    continue
            launch_ranks.reap(launcher.pid)
            time.sleep(0.05)


class Sender(threading.Thread):
    """Sends home what is appended to the files of some patterns; a slow line holds up nothing but itself.

    sent: up to which byte the head has a file, where it knows; it has the others as they are now.
    """

    def __init__(self, line: Line, root: Path, patterns: list[Path], sent: dict[str, int]) -> None:
        super().__init__(daemon=True)
        self.line, self.root, self.patterns = line, root, patterns
        sizes = {path: path.stat().st_size for path in self._files()}
        self.offsets = {path: min(size, sent.get(self._relative(path), size)) for path, size in sizes.items()}
        self.ending = threading.Event()

    def run(self) -> None:
        """Look for more until told to finish, then once again."""
        while not self.ending.wait(0.2):
            self.send()
        self.send()

    def finish(self, seconds: float = 5.0) -> None:
        """Wait until all is sent, but not for a line that is stuck."""
        self.ending.set()
        self.join(seconds)

    def _files(self) -> list[Path]:
        return [path for pattern in self.patterns for path in sorted(pattern.parent.glob(pattern.name))]

    def _relative(self, path: Path) -> str:
        return path.relative_to(self.root).as_posix()

    def send(self) -> None:
        """Send what is new."""
        for path in self._files():
            with path.open("rb") as file:
                file.seek(self.offsets.get(path, 0))
                while block := file.read(CHUNK_BYTES):
                    text = block.decode("utf-8", "surrogateescape")
                    self.offsets[path] = file.tell()
                    self.line.wait_for_room()
                    self.line.say("log", file=self._relative(path), text=text, end=self.offsets[path])


if __name__ == "__main__":
    main()
