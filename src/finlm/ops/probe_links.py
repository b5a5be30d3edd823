"""One JSON document with what this host sees of the network and of the other hosts: `python probe_links.py REQUEST`.

Sent by doctor beside probe.py under the same rules: Python 3.8 syntax, standard library only, never raises. All hosts
run it at the same time: each listens on the rendezvous port and calls every other one there, by the address that the
run will use, until all have met or the request's seconds are over. Who answers tells whether a name leads to the host
it should; the local end of the call tells which network card leads there. Meanwhile each host tries ssh to every one.

REQUEST is JSON: `me`, `port`, `token` (of this examination), `seconds`, `peers`: [{`name`, `addresses`, `ssh`: argv}].
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import json
import re
import socket
import struct
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Callable, Iterator  # noqa: UP035 - Python 3.8

SSH_AT_ONCE = 2  # an ssh server drops connections at random from the tenth on that has not logged in (MaxStartups)


def main() -> None:
    """Print the document."""
    try:
        print(json.dumps(facts(json.loads(sys.argv[1]))))
    except Exception as error:
        print(json.dumps({"errors": {"links": f"{type(error).__name__}: {error}"}}))


def facts(request: dict[str, Any]) -> dict[str, Any]:
    """network, infiniband, port (null without one), peers and ssh by host name, errors."""
    others = [peer for peer in request["peers"] if peer["name"] != request["me"]]
    deadline = time.monotonic() + request["seconds"]
    port = Listener(request, {peer["name"] for peer in others}) if request["port"] else None
    with ThreadPoolExecutor(len(others) + SSH_AT_ONCE + 1) as pool:
        calls = {peer["name"]: pool.submit(call, request, peer["addresses"], deadline) for peer in others}
        gate = threading.Semaphore(SSH_AT_ONCE)
        logins = {peer["name"]: pool.submit(login, peer["ssh"], gate) for peer in rotated(request)}
        peers = {name: made.result() for name, made in calls.items()}
        ssh = {name: made.result() for name, made in logins.items()}
    state = port.close(deadline) if port else None
    result: dict[str, Any] = {"port": state, "peers": peers, "ssh": ssh, "errors": {}}
    sections: dict[str, Callable[[], Any]] = {"network": network, "infiniband": infiniband}
    for name, gather in sections.items():
        try:
            result[name] = gather()
        except Exception as error:
            result[name] = None
            result["errors"][name] = f"{type(error).__name__}: {error}"
    return result


def rotated(request: dict[str, Any]) -> list[dict[str, Any]]:
    """The peers in order, beginning with this host itself, so that not all hosts call one at the same time."""
    peers: list[dict[str, Any]] = request["peers"]
    names = [peer["name"] for peer in peers]
    start = names.index(request["me"]) if request["me"] in names else 0
    return [peer for peer in peers[start:] + peers[:start] if peer["ssh"]]


class Listener:
    """Tells everyone who calls the port this host's name."""

    def __init__(self, request: dict[str, Any], expected: set[str]) -> None:
        self.request, self.expected, self.ended = request, expected, threading.Event()
        self.state: dict[str, Any] = {"port": request["port"], "free": True, "error": None}
        try:
            self.server = listen(request["port"])
        except OSError as error:
            self.state.update(free=False, error=str(error))
            return
        self.server.settimeout(0.1)
        self.thread = threading.Thread(target=self.serve, daemon=True)
        self.thread.start()

    def serve(self) -> None:
        """Answer until closed; a caller says its name first."""
        while not self.ended.is_set():
            with contextlib.suppress(OSError):
                connection, _ = self.server.accept()
                with connection:
                    connection.settimeout(2)
                    token, _, caller = connection.makefile().readline().strip().partition(" ")
                    if token == self.request["token"]:
                        connection.sendall(f"{token} {self.request['me']}\n".encode())
                        self.expected.discard(caller)

    def close(self, deadline: float) -> dict[str, Any]:
        """The port's state, after everyone expected has called or the time is over."""
        while self.state["free"] and self.expected and time.monotonic() < deadline:
            time.sleep(0.02)
        self.ended.set()
        if self.state["free"]:
            self.thread.join(5)
            self.server.close()
        return self.state


def listen(port: int) -> socket.socket:
    """A listener on all addresses, as torch's rendezvous opens it (SO_REUSEADDR, IPv6 and IPv4)."""
    if socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):
            return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", port))


def call(request: dict[str, Any], ways: list[str], deadline: float) -> dict[str, Any]:
    """One other host: who `answered`, its `address` there and ours (`local`), or the `error` of the last attempt.

    `ways` are its name and further addresses; the next one is used, and `unresolved` said, when a name means nothing.
    """
    result: dict[str, Any] = {"answered": None, "address": None, "local": None, "error": None, "unresolved": None}
    address, *others = ways
    while result["answered"] is None:
        left = deadline - time.monotonic()
        if left <= 0:
            break
        try:
            with socket.create_connection((address, request["port"]), timeout=min(2, left)) as connection:
                result["address"], result["local"] = connection.getpeername()[0], connection.getsockname()[0]
                connection.sendall(f"{request['token']} {request['me']}\n".encode())
                token, _, name = connection.makefile().readline().strip().partition(" ")
                if token != request["token"]:
                    raise OSError(f"another program answers on port {request['port']}")
                result.update(answered=name, error=None)
        except socket.gaierror as error:
            result["unresolved"] = str(error.strerror)
            if not others:
                return {**result, "error": f"the name {address} does not resolve"}
            address, *others = others
        except OSError as error:
            result["error"] = str(error)
            time.sleep(0.1)
    return result


def login(argv: list[str], gate: threading.Semaphore) -> dict[str, Any]:
    """Exit code and messages of a remote `true`; tried twice, since a busy ssh server drops connections at random."""
    for _ in range(2):
        with gate:
            try:
                pipe, nothing = subprocess.PIPE, subprocess.DEVNULL
                done = subprocess.run(argv, stdin=nothing, stdout=pipe, stderr=pipe, timeout=15)
            except (OSError, subprocess.TimeoutExpired) as error:
                return {"code": 255, "error": str(error)}
        said = done.stderr.decode("utf-8", "replace").strip()
        if done.returncode == 0 or not re.search("reset|closed by remote|kex_exchange", said):
            break
    return {"code": done.returncode, "error": said}


def network() -> list[dict[str, Any]]:
    """Interfaces with their `addresses`, `state` and `mbit` (null where the driver does not tell)."""
    found: dict[str, dict[str, Any]] = {}
    for _, name in socket.if_nameindex():
        speed = read(f"/sys/class/net/{name}/speed")
        mbit = int(speed) if speed.isdigit() and int(speed) > 0 else None
        found[name] = {"name": name, "addresses": [], "state": read(f"/sys/class/net/{name}/operstate"), "mbit": mbit}
    for name, address in addresses():
        if name in found:
            found[name]["addresses"].append(address)
    return list(found.values())


def addresses() -> Iterator[tuple[str, str]]:
    """(interface, address) of every IPv4 address of interfaces that are up, also secondary ones, and every IPv6 one."""
    space = array.array("B", bytes(64 * 1024))
    entry = struct.calcsize("16s4x4s16x")  # struct ifreq: name, family and port, address
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        request = struct.pack("iL", len(space), space.buffer_info()[0])
        used = struct.unpack("iL", fcntl.ioctl(sock.fileno(), 0x8912, request))[0]  # SIOCGIFCONF
    for name, address in struct.iter_unpack("16s4x4s16x", space.tobytes()[: used // entry * entry]):
        yield name.partition(b"\0")[0].decode().partition(":")[0], socket.inet_ntoa(address)
    for line in read("/proc/net/if_inet6").splitlines():
        yield line.split()[5], socket.inet_ntop(socket.AF_INET6, bytes.fromhex(line.split()[0]))


def infiniband() -> list[dict[str, Any]]:
    """Ports of InfiniBand and RoCE adapters: `device`, `port`, `link` (InfiniBand or Ethernet), `active`, `rate`."""
    ports = []
    for port in sorted(Path("/sys/class/infiniband").glob("*/ports/*")):
        active = read(port / "state").startswith("4:")
        name, link = port.parent.parent.name, read(port / "link_layer")
        ports.append({"device": name, "port": port.name, "link": link, "active": active, "rate": read(port / "rate")})
    return ports


def read(path: str | Path) -> str:
    """A small file's text; empty when unreadable."""
    with contextlib.suppress(OSError):
        return Path(path).read_text(encoding="utf-8", errors="replace").strip()
    return ""


if __name__ == "__main__":
    main()
