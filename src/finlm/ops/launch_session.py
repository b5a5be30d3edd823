"""The head's end of the line to one host's agent: start it, hear it, tell it, and know when it is gone.

A thread of its own reads what the agent says, writes the ranks' logs under the same names here, and keeps the facts
that the watchdog asks for; it decides nothing.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import subprocess
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from finlm.base import files, processes, screen
from finlm.base.errors import UserError
from finlm.base.rundir import RunDir
from finlm.ops import launch_agent, ssh
from finlm.recipe.cluster import Host

HELLO_SECONDS = 30.0
WAITING_BYTES = 1 << 26  # of one file, for room on this machine's disk; the next launch sends what is more


class Session:
    """One host of a run. Times are time.monotonic() of this machine.

    patience: seconds of silence (launch.outage_seconds) after which either end gives the other up. TCP sends again at
    doubling intervals: after 60 s without a network the ranks went on 107 s after its loss, and ssh a little later.
    """

    def __init__(self, host: Host, node: int, ranks: range, *, local: bool, stream: bool, patience: float) -> None:
        self.host, self.node, self.ranks, self.patience = host, node, ranks, patience
        self.local, self.stream = local, stream
        self.hello: dict[str, Any] = {}
        self.refused = ""
        self.error = ""  # of this end, which hears the host no more
        self.heard = time.monotonic()
        self.free_bytes: int | None = None  # on the disk of the run directory
        self.oom_kills: int | None = None  # processes the host's kernel has killed for memory since the ranks started
        self.states: dict[str, str] = {}
        self.exits: list[tuple[float, int, int]] = []  # when, rank, exit code (signals negative)
        self.sent: dict[str, int] = {}  # up to which byte of the host's files what they say is here
        self._waiting: dict[str, bytes] = {}  # the end of a file's part that is not written here
        self._taken: dict[str, int] = {}  # up to which byte of the host's files what they say is here or waits
        self._has_said = False
        self.code: int | None = None  # the launcher's, once it has ended
        self.closed: float | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the session

    @property
    def name(self) -> str:
        """The hostfile's name."""
        return self.host.name

    def start(self, run: RunDir, there: Path, python: str, port: int | None, accept_new: bool) -> None:
        """Start the agent for the run directory that lies at `there` on the host."""
        with contextlib.suppress(FileNotFoundError, files.NotJson):  # without fsync it may be empty after a power cut
            self.sent = files.read_json(self._sent_file(run))
        code = there / "code"
        agent = ["-u", "-m", "finlm.ops.launch_agent"]
        if self.local:
            path = os.pathsep.join(filter(None, (str(code), os.environ.get("PYTHONPATH"))))
            line, env = [python, *agent], os.environ | {"PYTHONPATH": path}
            env.pop("SSH_CONNECTION", None)  # the user's own login: no host of the run came from there
        else:
            count = math.ceil(self.patience / ssh.ALIVE_SECONDS)
            argv = ["env", f"PYTHONPATH={code}", python, *agent]
            line = ssh.command(self.host.destination, argv, accept_new=accept_new, alive_count=count)
            env = ssh.environment()
        self._process = subprocess.Popen(
            line,
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            start_new_session=True,  # SIGTERM and Ctrl-C are this process's to handle
            preexec_fn=None if self.local else processes.shield,  # ssh; an agent does it itself
        )
        self.heard = time.monotonic()
        threading.Thread(target=self._listen, args=(run,), daemon=True).start()
        self.say(
            run=str(there),
            host=self.name,
            slots=self.host.slots,
            port=port,
            stream=self.stream,
            events=self.node == 0,
            patience=self.patience,
            sent=self.sent,
            do="hello",
        )

    def say(self, **wish: Any) -> None:
        """Tell the agent something; one that is gone is noticed elsewhere."""
        assert self._process is not None and self._process.stdin is not None
        with contextlib.suppress(OSError, ValueError):
            self._process.stdin.write(json.dumps(wish).encode() + b"\n")
            self._process.stdin.flush()

    def wait_hello(self) -> dict[str, Any]:
        """What the agent greets with. Raises UserError when it does not, or when former ranks are still there."""
        deadline = time.monotonic() + HELLO_SECONDS
        while not self.hello and self.closed is None and time.monotonic() < deadline:
            time.sleep(0.02)
        if not self.hello:
            raise self.why_gone(f"the agent on {self.name} did not start")
        if not self.hello["locked"]:
            raise UserError(
                f"ranks of a former launch of this run are still there on {self.name}",
                evidence=f"they hold .lock-{self.name} in the run directory",
                fix=f"end them on {self.name}, or wait; `--new` starts another run",
            )
        return self.hello

    def why_gone(self, otherwise: str) -> UserError:
        """Why the line closed, from ssh's words where it has some."""
        said = self.errors()
        known = None if self.local else ssh.reason(self.host.destination, said)
        return known or UserError(otherwise, evidence=self.error or ssh.last_lines(said) or "it said nothing")

    def errors(self) -> str:
        """What ssh and the agent wrote to stderr."""
        self._errors.seek(0)
        return self._errors.read().decode(errors="replace")

    def end(self) -> None:
        """Ask the agent to end the host's ranks and itself."""
        if self._process is not None and self.closed is None:
            self.say(do="end")

    def release(self, deadline: float) -> bool:
        """Wait for the line to close, then cut it: an agent that lives ends its ranks then. False if it was cut."""
        if self._process is None:
            return True
        while self.closed is None and time.monotonic() < deadline:
            time.sleep(0.02)
        clean = self.closed is not None
        if not clean:
            self._process.kill()
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        self._process.wait()
        return clean

    def _sent_file(self, run: RunDir) -> Path:
        return run.path / f".sent-{self.name}.json"

    def _listen(self, run: RunDir) -> None:
        assert self._process is not None and self._process.stdout is not None
        mark = launch_agent.MARK.encode()
        try:
            with self._process.stdout as lines:  # closed then: ssh waits for a reader before it ends
                for line in lines:
                    self.heard = time.monotonic()
                    if line.startswith(mark) and line.endswith(b"\n"):  # else cut short with the connection
                        self._take(run, json.loads(line[len(mark) :]))
        except Exception as error:  # nobody else would tell of it
            self.error = f"{type(error).__name__}: {error}"
        finally:
            self.closed = time.monotonic()

    def _take(self, run: RunDir, message: dict[str, Any]) -> None:
        kind = message.pop("kind")
        if kind == "hello":
            self.hello = message
        elif kind == "log":
            self._keep(run, message["file"], message["text"].encode("utf-8", "surrogateescape"), message.get("end"))
        elif kind == "beat":
            self.states, self.free_bytes = message["ranks"], message["free_bytes"]
            self.oom_kills = message["oom_kills"]
        elif kind == "rank":
            self.exits.append((self.heard, message["rank"], message["code"]))
        elif kind == "refused":
            self.refused = message["reason"]
        elif kind == "exit":
            self.code = message["code"]

    def _keep(self, run: RunDir, name: str, block: bytes, end: int | None) -> None:
        """Append a block to the file of that name here; while there is no room for it, it waits for the next one."""
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
            self._cannot_write(error)
        self.sent[name] = self._taken[name] - len(waiting)
        new = self._sent_file(run).with_suffix(".new")
        try:
            new.write_text(json.dumps(self.sent), encoding="utf-8")  # several times a second: no fsync
            os.replace(new, self._sent_file(run))
        except OSError as error:
            self._cannot_write(error)

    def _cannot_write(self, error: OSError) -> None:
        """Say so, once."""
        if not self._has_said:
            self._has_said = True
            screen.say(f"what {self.name} sends waits for room here, or for the next launch: {error}; the run goes on")
