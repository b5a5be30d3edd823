"""Print a JSON document with what this host sees of the network and of the other hosts: `python links.py REQUEST`.

Sent by doctor beside probe.py under the same rules: Python 3.8 syntax, standard library only, never raises. All hosts
run it at the same time: each listens on the rendezvous port and calls every other host there, by the address that the
run will use, until all have met or the request's seconds are over. Who answers tells whether a name leads to the host
it should; the local end of the call tells which network card leads there. Meanwhile each host tries ssh to every host.

REQUEST is the JSON of a Request; Links is what is printed.
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
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Callable, Iterator  # noqa: UP035 - Python 3.8

SSH_AT_ONCE = 2  # an ssh server drops connections at random from the tenth on that has not logged in (MaxStartups)


@dataclass
class Peer:
    """A host to call: its addresses, in the order in which to try them, and the command line of an ssh login."""

    name: str
    addresses: list[str]
    ssh: list[str]


@dataclass
class Request:
    """What a host is to do, within `seconds`: its name `me`, the rendezvous port, and the hosts to call and log in to.

    `token` is a random text that all hosts of this examination share.
    """

    me: str
    port: int  # 0: nobody listens
    token: str
    seconds: float
    peers: list[Peer]


@dataclass
class Port:
    """Whether this host could listen on the rendezvous port; `error` says why not."""

    port: int
    free: bool = True
    error: str | None = None


@dataclass
class Call:
    """The result of calling another host: the name that answered, its address and this host's, or the last error."""

    answered: str | None = None
    address: str | None = None
    local: str | None = None
    error: str | None = None
    unresolved: str | None = None  # why its name means nothing here


@dataclass
class Login:
    """The exit code and the stderr of an ssh login that ran `true`."""

    code: int
    error: str


@dataclass
class Card:
    """A network interface; mbit is None where the driver does not tell."""

    name: str
    addresses: list[str]
    state: str
    mbit: int | None


@dataclass
class Infiniband:
    """A port of an InfiniBand or RoCE adapter; link: InfiniBand or Ethernet."""

    device: str
    port: str
    link: str
    active: bool
    rate: str


@dataclass
class Links:
    """The document that is printed: calls and logins by host name, this host's interfaces and InfiniBand ports."""

    port: Port | None
    peers: dict[str, Call]
    ssh: dict[str, Login]
    network: list[Card] | None = None
    infiniband: list[Infiniband] | None = None
    errors: dict[str, str] = field(default_factory=dict)


def main() -> None:
    """Print the Links that the JSON request on the command line asks for, as JSON; {"errors": ...} on an exception."""
    try:
        fields = json.loads(sys.argv[1])
        print(
            json.dumps(asdict(gather_facts(Request(**{**fields, "peers": [Peer(**peer) for peer in fields["peers"]]}))))
        )
    except Exception as error:
        print(json.dumps({"errors": {"links": f"{type(error).__name__}: {error}"}}))


def gather_facts(request: Request) -> Links:
    """Call and log in to the other hosts, list this host's interfaces and InfiniBand ports, and return all results.

    Listens for the others' calls if request.port is set. Calls go on for up to request.seconds, a login for 15 s. A
    list that fails stays None, with its reason in `errors`.
    """
    others = [peer for peer in request.peers if peer.name != request.me]
    deadline = time.monotonic() + request.seconds
    port = Listener(request, {peer.name for peer in others}) if request.port else None
    with ThreadPoolExecutor(len(others) + SSH_AT_ONCE + 1) as pool:
        calls = {peer.name: pool.submit(call, request, peer.addresses, deadline) for peer in others}
        gate = threading.Semaphore(SSH_AT_ONCE)
        logins = {peer.name: pool.submit(try_login, peer.ssh, gate) for peer in rotate_peers(request.me, request.peers)}
        peers = {name: made.result() for name, made in calls.items()}
        ssh = {name: made.result() for name, made in logins.items()}
    result = Links(port.close(deadline) if port else None, peers, ssh)
    sections: dict[str, Callable[[], Any]] = {"network": list_cards, "infiniband": list_infiniband}
    for name, gather in sections.items():
        try:
            setattr(result, name, gather())
        except Exception as error:
            result.errors[name] = f"{type(error).__name__}: {error}"
    return result


def rotate_peers(me: str, peers: list[Peer]) -> list[Peer]:
    """Return the peers with an ssh command, from `me` on, so that not all log in to the same host first."""
    names = [peer.name for peer in peers]
    start = names.index(me) if me in names else 0
    return [peer for peer in peers[start:] + peers[:start] if peer.ssh]


class Listener:
    """A thread that tells callers with the token this host's name, from the start until close().

    `expected` are the names of those who have yet to call; each is removed from it. If the port cannot be used, there
    is no thread, and `state.error` says why.
    """

    def __init__(self, request: Request, expected: set[str]) -> None:
        """Listen on request.port and start the thread; if that fails, only set `state`."""
        self.request, self.expected, self.ended = request, expected, threading.Event()
        self.state = Port(request.port)
        try:
            self.server = open_listener(request.port)
        except OSError as error:
            self.state = Port(request.port, False, str(error))
            return
        self.server.settimeout(0.1)
        self.thread = threading.Thread(target=self.serve, daemon=True)
        self.thread.start()

    def serve(self) -> None:
        """Answer callers until `ended` is set. A caller sends "token name" first; a wrong token gets no answer."""
        while not self.ended.is_set():
            with contextlib.suppress(OSError):
                connection, _ = self.server.accept()
                with connection:
                    connection.settimeout(2)
                    token, _, caller = connection.makefile().readline().strip().partition(" ")
                    if token == self.request.token:
                        connection.sendall(f"{token} {self.request.me}\n".encode())
                        self.expected.discard(caller)

    def close(self, deadline: float) -> Port:
        """Stop listening once all expected hosts have called, or at the monotonic `deadline`; return the state."""
        while self.state.free and self.expected and time.monotonic() < deadline:
            time.sleep(0.02)
        self.ended.set()
        if self.state.free:
            self.thread.join(5)
            self.server.close()
        return self.state


def open_listener(port: int) -> socket.socket:
    """Return a socket that listens on all addresses as torch's rendezvous does (IPv6 and IPv4). Raises OSError."""
    if socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):
            return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", port))


def call(request: Request, addresses: list[str], deadline: float) -> Call:
    """Call a host until it answers or until `deadline` (time.monotonic()), and return who answered or the last error.

    The next of its `addresses` (at least one) is tried only when a name does not resolve; if the last does not, gives
    up.
    """
    result = Call()
    address, *others = addresses
    while result.answered is None:
        left = deadline - time.monotonic()
        if left <= 0:
            break
        try:
            with socket.create_connection((address, request.port), timeout=min(2, left)) as connection:
                result.address, result.local = connection.getpeername()[0], connection.getsockname()[0]
                connection.sendall(f"{request.token} {request.me}\n".encode())
                token, _, name = connection.makefile().readline().strip().partition(" ")
                if token != request.token:
                    raise OSError(f"another program answers on port {request.port}")
                result.answered, result.error = name, None
        except socket.gaierror as error:
            result.unresolved = str(error.strerror)
            if not others:
                result.error = f"the name {address} does not resolve"
                return result
            address, *others = others
        except OSError as error:
            result.error = str(error)
            time.sleep(0.1)
    return result


def try_login(argv: list[str], gate: threading.Semaphore) -> Login:
    """Run `argv`, a remote `true` over ssh, and return its exit code and stderr.

    The code is 255 after 15 s or when ssh cannot start. Tries once more when the connection was dropped, as a busy ssh
    server does at random. `gate` limits how many logins run at a time.
    """
    for _ in range(2):
        with gate:
            try:
                pipe, nothing = subprocess.PIPE, subprocess.DEVNULL
                done = subprocess.run(argv, stdin=nothing, stdout=pipe, stderr=pipe, timeout=15)
            except (OSError, subprocess.TimeoutExpired) as error:
                return Login(255, str(error))
        errors = done.stderr.decode("utf-8", "replace").strip()
        if done.returncode == 0 or not re.search("reset|closed by remote|kex_exchange", errors):
            break
    return Login(done.returncode, errors)


def list_cards() -> list[Card]:
    """Return this host's network interfaces with their addresses, state and speed in Mbit/s. Raises OSError."""
    cards = {}
    for _, name in socket.if_nameindex():
        speed = read(f"/sys/class/net/{name}/speed")
        mbit = int(speed) if speed.isdigit() and int(speed) > 0 else None
        cards[name] = Card(name, [], read(f"/sys/class/net/{name}/operstate"), mbit)
    for name, address in list_addresses():
        if name in cards:
            cards[name].addresses.append(address)
    return list(cards.values())


def list_addresses() -> Iterator[tuple[str, str]]:
    """Yield (interface, address) for IPv4 addresses of interfaces that are up, also secondary, and all IPv6 addresses.

    Raises OSError when the kernel does not tell.
    """
    space = array.array("B", bytes(64 * 1024))
    entry = struct.calcsize("16s4x4s16x")  # struct ifreq: name, family and port, address
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        request = struct.pack("iL", len(space), space.buffer_info()[0])
        used = struct.unpack("iL", fcntl.ioctl(sock.fileno(), 0x8912, request))[0]  # SIOCGIFCONF
    for name, address in struct.iter_unpack("16s4x4s16x", space.tobytes()[: used // entry * entry]):
        yield name.partition(b"\0")[0].decode().partition(":")[0], socket.inet_ntoa(address)
    for line in read("/proc/net/if_inet6").splitlines():
        yield line.split()[5], socket.inet_ntop(socket.AF_INET6, bytes.fromhex(line.split()[0]))


def list_infiniband() -> list[Infiniband]:
    """Return the ports of this host's InfiniBand and RoCE adapters, [] without any."""
    ports = []
    for port in sorted(Path("/sys/class/infiniband").glob("*/ports/*")):
        active, link = read(port / "state").startswith("4:"), read(port / "link_layer")
        ports.append(Infiniband(port.parent.parent.name, port.name, link, active, read(port / "rate")))
    return ports


def read(path: str | Path) -> str:
    """Return a small file's text without surrounding blanks; "" when it is unreadable."""
    with contextlib.suppress(OSError):
        return Path(path).read_text(encoding="utf-8", errors="replace").strip()
    return ""


if __name__ == "__main__":
    main()
