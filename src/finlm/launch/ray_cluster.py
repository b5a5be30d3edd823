"""Start a Ray cluster for `finlm prepare` on this machine and the hosts of a hostfile over ssh, and end it.

Each host runs hosts/remote/ray_node.py for as long as its connection is open, so no process stays there whatever
happens here. This machine is the head; it has workers only when the hostfile names it. Only processes that have this
cluster's token, which no command line shows, can submit work to it.
"""

from __future__ import annotations

import importlib.metadata
import inspect
import json
import os
import queue
import secrets
import shlex
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from finlm.base import processes, screen
from finlm.base.errors import UserError
from finlm.hosts import ssh
from finlm.hosts.remote import ray_node
from finlm.recipe.cluster import Cluster, Host
from finlm.recipe.schema import Recipe

_BOOT = "import sys; exec(sys.stdin.read(int(sys.stdin.readline())))"
_HELLO_SECONDS, _START_SECONDS, _END_SECONDS = 60.0, 300.0, 15.0
_QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "token"}
_TOKEN = secrets.token_hex(32)  # of all clusters of this process: Ray reads it once


@contextmanager
def start_ray(recipe: Recipe, hosts: Cluster, accept_new_keys: bool) -> Iterator[str]:
    """Start Ray on all hosts, yield the cluster's address "ip:port", and end all its processes after the block.

    Each host has at most data.num_proc workers, this machine none unless `hosts` has it. During the block os.environ
    has Ray's token and, as RAY_NODE_IP_ADDRESS, this machine's address. `accept_new_keys` stores unknown ssh host keys.
    Raises UserError, naming the host, when a host cannot be reached, has no Ray or another version, or Ray does not
    start there; FileNotFoundError without ssh.
    """
    here, remote = ssh.split_local(hosts.hosts)
    head = _Node(here[0] if here else Host("this machine", 1), is_local=True)
    others = [_Node(host) for host in remote]
    secret = _QUIET | {"RAY_AUTH_TOKEN": _TOKEN}
    try:
        for node in (head, *others):
            node.connect(recipe.env, accept_new_keys)
        hello = {node: node.greet() for node in (head, *others)}
        ip = head.host.access.address or next((hello[node]["from"] for node in others), "") or "127.0.0.1"
        port = processes.free_port(0)
        # The head of a cluster whose hostfile does not name it works for nobody.
        workers = min(recipe.data.num_proc, hello[head]["workers"]) if here else 0
        head.start(["--head", f"--port={port}", "--include-dashboard=false"], ip, workers, secret)
        head.wait_started()
        for node in others:
            address = node.host.access.address or hello[node]["at"]
            node.start([f"--address={ip}:{port}"], address, min(recipe.data.num_proc, hello[node]["workers"]), secret)
        for node in others:
            node.wait_started()
        with _environment(secret | {"RAY_NODE_IP_ADDRESS": ip}):
            yield f"{ip}:{port}"
    finally:
        for node in (*others, head):  # all at once, since each may take seconds to end Ray
            node.close()
        for node in (*others, head):
            node.wait_closed()


@contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables of this process during the block, and restore the former values after it."""
    former = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in former.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


class _Node:
    """A host that runs ray_node.py, as a child process or over ssh."""

    def __init__(self, host: Host, *, is_local: bool = False) -> None:
        """Keep the host; connect() starts the program."""
        self.host, self.is_local = host, is_local
        self._process: subprocess.Popen[bytes] | None = None
        self._said: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()  # None: the connection closed
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the node

    def connect(self, env: Mapping[str, str], accept_new_keys: bool) -> None:
        """Start ray_node.py on the host, and a thread that reads its messages.

        `env` is the recipe's environment, which the host's own env overrides. Raises UserError for an invalid host
        name, FileNotFoundError without ssh.
        """
        line = [ssh.python_on_host(self.host.access), "-u", "-c", _BOOT]
        if not self.is_local:
            line = ssh.command(self.host.destination, line, accept_new_keys=accept_new_keys)
        self._process = subprocess.Popen(
            line,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=os.environ if self.is_local else ssh.environment(),
            start_new_session=True,  # Ctrl-C is this process's to handle
        )
        threading.Thread(target=self._listen, daemon=True).start()
        source = f"{inspect.getsource(ray_node)}\n\nserve()\n"
        self._write(f"{len(source)}\n{source}{json.dumps({**env, **self.host.access.env})}\n")

    def _write(self, text: str) -> None:
        """Write text to the program's stdin; do nothing if it has ended, which the next message tells."""
        assert self._process is not None and self._process.stdin is not None
        with suppress(OSError, ValueError):  # it has ended
            self._process.stdin.write(text.encode())
            self._process.stdin.flush()

    def _listen(self) -> None:
        """Queue each message of the program, and None at its end."""
        assert self._process is not None and self._process.stdout is not None
        mark = ray_node.MARK.encode()
        with self._process.stdout as lines:
            for line in lines:
                if line.startswith(mark):
                    self._said.put(json.loads(line[len(mark) :]))
        self._said.put(None)

    def _wait_message(self, seconds: float, action: str) -> dict[str, Any]:
        """Return the program's next message. Raises UserError, that it did not `action`, when it ends or is silent."""
        try:
            said = self._said.get(timeout=seconds)
        except queue.Empty:
            raise UserError(
                f"{self.host.name} did not {action} within {seconds:.0f} s",
                fix=f"look at its load: ssh {self.host.name}",
            ) from None
        if said is None:
            assert self._process is not None
            self._errors.seek(0)
            errors = self._errors.read().decode(errors="replace")
            raise ssh.explain(self.host.destination, self._process.wait(), errors, ssh.python_on_host(self.host.access))
        return said

    def greet(self) -> dict[str, Any]:
        """Wait up to 60 s for the host's facts and return them: {ray, python, workers, from, at}.

        They are two versions, how many workers fit, and the addresses of the ssh connection's ends, "" without ssh.
        Raises UserError when the host does not answer, or its Ray is missing or another version than here.
        """
        hello = self._wait_message(_HELLO_SECONDS, "answer")
        wanted = importlib.metadata.version("ray")
        if hello["ray"] != wanted:
            python, theirs = ssh.python_on_host(self.host.access), f"Ray {hello['ray']}" if hello["ray"] else "no Ray"
            raise UserError(
                f"{self.host.name} has {theirs}, this machine Ray {wanted}",
                evidence=f"{python} on {self.host.name}, Python {hello['python']}",
                fix=f"there: {shlex.join([python, '-m', 'pip', 'install', '-r', 'requirements-ray.lock'])}\n"
                "the interpreter of a host is hosts.<name>.python of the recipe, else the same path as here",
            )
        return hello

    def start(self, arguments: Sequence[str], ip: str, workers: int, env: Mapping[str, str]) -> None:
        """Ask the host to start Ray with `workers` CPUs; does not wait.

        `arguments` are those of `ray start`. `ip` is the host's address, "" if Ray shall choose.
        """
        at = [f"--node-ip-address={ip}"] if ip else []
        request = {"arguments": [*arguments, *at, f"--num-cpus={workers}", "--num-gpus=0"], "env": dict(env)}
        self._write(f"{json.dumps(request)}\n")

    def wait_started(self) -> None:
        """Wait up to 300 s until Ray runs on the host. Raises UserError, with the end of Ray's log, if it does not."""
        said = self._wait_message(_START_SECONDS, "start Ray")
        if "ended" in said:
            raise UserError(
                f"Ray did not start on {self.host.name}",
                evidence=ssh.last_lines(said["ended"]),
                fix="the hosts have to reach each other at any port; hosts.<name>.address names a host's address",
            )

    def close(self) -> None:
        """Close the program's stdin, so that the host ends Ray; does not wait."""
        if self._process is not None and self._process.stdin is not None:
            with suppress(OSError):
                self._process.stdin.close()

    def wait_closed(self) -> None:
        """Wait until the host has ended its processes; after 15 s print a message and kill the connection."""
        if self._process is None:
            return
        try:
            self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            screen.say(f"{self.host.name} does not answer at the end; a host that is alive ends Ray by itself")
            self._process.kill()
            self._process.wait()
