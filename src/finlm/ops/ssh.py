"""Run one command on one host over OpenSSH, and say in plain words why it did not run.

Every call stands alone: 0.2 s on a local network for never having a stale master connection to clean up. Nothing is
ever asked at a prompt, a dead host is given up after 8 s, a host that dies during a command after 15 to 20 s.

A host is written [user@]name[:port]. It does not switch host key checking off, choose keys (~/.ssh/config does), or
retry.
"""

from __future__ import annotations

import getpass
import os
import re
import shlex
import socket
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

from finlm.base.errors import UserError

CONNECT_SECONDS = 8
ALIVE_SECONDS = 5
ALIVE_COUNT = 3
FAILED = 255  # ssh's own exit code for everything that is not the remote command's
NOT_FOUND = 127  # the remote shell's

# ssh's words in the C locale -> (problem, fix); the first match wins. {host} is filled in.
_REASONS: tuple[tuple[str, str, str], ...] = (
    (
        r"Could not resolve hostname",
        "the name {host} does not resolve",
        "correct the name in the hostfile, or add it to DNS, /etc/hosts or ~/.ssh/config on this machine",
    ),
    (
        r"IDENTIFICATION HAS CHANGED|host key .* has changed|REVOKED HOST KEY",
        "the host key of {host} has changed: another machine answers under this name, or it was installed anew",
        "on the console of {host}, compare: ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub\n"
        "if the fingerprint is the one in the evidence: ssh-keygen -R {name}, then connect once: ssh {host}",
    ),
    (
        r"Host key verification failed|No \S+ host key is known",
        "the host key of {host} is not known here",
        "connect once and compare the fingerprint: ssh {host}\n"
        "or, on a network you trust, store the keys of new hosts unseen: --accept-new",
    ),
    (
        r"Permission denied|Too many authentication failures",
        "{host} does not let this user in without a password",
        "ssh-copy-id {host}   (no key yet? ssh-keygen -t ed25519 first), then check: ssh {host} true",
    ),
    (
        r"Connection refused",
        "{host} refuses ssh connections",
        "start its ssh server (sudo systemctl enable --now ssh), or give its port in ~/.ssh/config",
    ),
    (
        r"timed out|No route to host|Network is unreachable|not responding|Host is down",
        "{host} does not answer",
        "check that it is switched on and on this network, and that no firewall drops port 22: ping {name}",
    ),
    (
        r"Connection (reset|closed)|closed by remote host|send disconnect|kex_exchange_identification",
        "{host} closed the connection",
        "read its ssh server's log: journalctl -u ssh   (MaxStartups, AllowUsers, a reboot)",
    ),
)


@dataclass(frozen=True)
class Result:
    """What a remote command left: its exit code and its output."""

    host: str
    code: int
    stdout: str
    stderr: str


def check_host(host: str) -> str:
    """The host as given: [user@]name[:port], of letters, digits, '.', '_' and '-'. Raises UserError otherwise."""
    word = r"[A-Za-z0-9_][A-Za-z0-9._-]*"
    if re.fullmatch(rf"({word}@)?{word}(:\d{{1,5}})?", host) is None:
        raise UserError(
            f"{host!r} is not a host name",
            evidence="a name is made of letters, digits, '.', '_' and '-', starts with none of the last two, "
            "and may have user@ before it",
            fix="correct it in the hostfile; an IPv6 address gets a name in ~/.ssh/config",
        )
    return host


def login(host: str) -> str:
    """[user@]name without the port."""
    return check_host(host).partition(":")[0]


def port_option(host: str) -> list[str]:
    """ssh's option for the host's port, when it has one."""
    port = check_host(host).partition(":")[2]
    return ["-p", port] if port else []


def typed(host: str) -> str:
    """The host as one types it after `ssh `."""
    return shlex.join([*port_option(host), login(host)])


def options(accept_new: bool = False, *, alive_count: int = ALIVE_COUNT) -> list[str]:
    """OpenSSH's options for a connection nobody watches; accept_new stores unknown host keys, never changed ones.

    A host that is silent for alive_count * ALIVE_SECONDS is given up.
    """
    settings = {
        "BatchMode": "yes",
        "ConnectTimeout": CONNECT_SECONDS,
        "ServerAliveInterval": ALIVE_SECONDS,
        "ServerAliveCountMax": alive_count,
        "StrictHostKeyChecking": "accept-new" if accept_new else "yes",
        "ClearAllForwardings": "yes",  # a LocalForward in ~/.ssh/config would collide with itself
        "LogLevel": "ERROR",  # login banners are not errors
    }
    return [part for name, value in settings.items() for part in ("-o", f"{name}={value}")]


def command(host: str, argv: Sequence[str], *, accept_new: bool = False, alive_count: int = ALIVE_COUNT) -> list[str]:
    """The local command line that runs argv on host, every argument quoted for the remote shell."""
    settings = options(accept_new, alive_count=alive_count)
    return ["ssh", *settings, *port_option(host), "--", login(host), shlex.join(argv)]


def environment() -> dict[str, str]:
    """This process's environment with ssh's and the resolver's messages in English, as explain() reads them."""
    return os.environ | {"LC_ALL": "C"}


def run(
    host: str,
    argv: Sequence[str],
    *,
    stdin: bytes = b"",
    timeout_seconds: float = 60,
    accept_new: bool = False,
    check: bool = True,
) -> Result:
    """Run argv on host and return its output.

    Raises UserError when ssh fails, when the program is not there, on the timeout and, with `check`, on exit codes
    other than 0.
    """
    line = command(host, argv, accept_new=accept_new)
    try:
        done = subprocess.run(line, input=stdin, capture_output=True, timeout=timeout_seconds, env=environment())
    except FileNotFoundError:
        raise UserError(
            "ssh is not installed on this machine", evidence="no `ssh` on PATH", fix="apt-get install openssh-client"
        ) from None
    except subprocess.TimeoutExpired:
        raise UserError(
            f"{host} did not finish `{argv[0]}` within {timeout_seconds:.0f} seconds",
            evidence=shlex.join(line),
            fix=f"look at the load and the disks of {host}: ssh {typed(host)} uptime",
        ) from None
    result = Result(host, done.returncode, done.stdout.decode(errors="replace"), done.stderr.decode(errors="replace"))
    if result.code in (FAILED, NOT_FOUND) or (check and result.code):
        raise explain(host, result.code, result.stderr, argv[0])
    return result


def explain(host: str, code: int, stderr: str, program: str) -> UserError:
    """The failure of `program` on host as problem / evidence / fix, from ssh's exit code and messages."""
    evidence = last_lines(stderr) or f"exit code {code}, no message"
    if code == NOT_FOUND:
        return UserError(
            f"{program} is not installed on {host}",
            evidence=evidence,
            fix=f"ssh {typed(host)} sudo apt-get install {program}   (dnf, yum or zypper on other systems)",
        )
    known = reason(host, stderr) if code == FAILED else None
    return known or UserError(
        f"{program} failed on {host} with exit code {code}", evidence=evidence, fix=f"try by hand: ssh {typed(host)}"
    )


def reason(host: str, stderr: str) -> UserError | None:
    """Why ssh did not get through, from its messages; None when they are not ssh's own."""
    for pattern, problem, fix in _REASONS:
        if re.search(pattern, stderr):
            name = login(host).rpartition("@")[2]
            fix = fix.format(host=typed(host), name=name)
            return UserError(problem.format(host=host), evidence=last_lines(stderr), fix=fix)
    return None


def last_lines(text: str, count: int = 12) -> str:
    """The last lines that say something; ssh frames its warnings with lines of @."""
    lines = [line.strip() for line in text.splitlines()]
    return "\n".join([line for line in lines if line.strip("@ ")][-count:])


def is_this_machine(host: str) -> bool:
    """True when host names the machine this runs on: localhost, its own name, or a name of one of its addresses.

    Another port of this machine, given or by ~/.ssh/config, is another host: a container or a tunnel. So is another
    user's account, whose processes this user cannot start without ssh.
    """
    user, _, name = login(host).rpartition("@")
    if port_option(host) not in ([], ["-p", "22"]) or (user and user != getpass.getuser()):
        return False
    own = os.uname().nodename
    if name in {"localhost", own, own.partition(".")[0]}:
        return True
    settings = _settings(host)
    if settings.get("port", "22") != "22":
        return False
    try:
        found = socket.getaddrinfo(settings.get("hostname", name), 22, type=socket.SOCK_DGRAM)
    except OSError:
        return False
    return any(_is_own_address(family, address) for family, _, _, _, address in found)


def address(host: str) -> str:
    """What ssh connects to: HostName of ~/.ssh/config, else the host's own name."""
    return _settings(host).get("hostname", login(host).rpartition("@")[2])


def _settings(host: str) -> dict[str, str]:
    """What ~/.ssh/config makes of the name; nothing is contacted."""
    try:
        line = ["ssh", "-G", *port_option(host), "--", login(host)]
        done = subprocess.run(line, capture_output=True, text=True, timeout=10, env=environment())
    except (OSError, subprocess.TimeoutExpired):
        return {}
    pairs = (line.partition(" ") for line in done.stdout.splitlines())
    return {key: value for key, _, value in pairs}


def _is_own_address(family: int, address: tuple[str | int, ...] | tuple[int, bytes]) -> bool:
    """Only an address of this machine can be bound; asked this way, no list of interfaces needs parsing."""
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((address[0], 0, *address[2:]))
        except OSError:
            return False
    return True
