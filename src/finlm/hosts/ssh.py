"""Run a command on a host over OpenSSH, and say in plain words why it did not run.

Every call opens its own connection: that costs 0.2 s on a local network, and no stale master connection is ever left to
clean up. Nothing is ever asked at a prompt. A dead host is given up after 8 s, a host that dies during a command after
15 to 20 s.

A host is written [user@]name[:port]. Paths on it are those of this machine, or below the host's work_dir. This module
does not switch off host key checking, choose keys (~/.ssh/config does), or retry.
"""

from __future__ import annotations

import getpass
import os
import re
import shlex
import socket
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from finlm.base.errors import UserError
from finlm.recipe.cluster import Host
from finlm.recipe.schema import HostAccess

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
    """The exit code and the output of a command that ran on a host."""

    code: int
    stdout: str
    stderr: str


def check_host(host: str) -> str:
    """Return the host unchanged. Raises UserError unless it is [user@]name[:port] of A-Z a-z 0-9 '.', '_' and '-'."""
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
    """Return the host without its port, [user@]name. Raises UserError if it is not a host name."""
    return check_host(host).partition(":")[0]


def port_option(host: str) -> list[str]:
    """Return ssh's option for the host's port, such as ["-p", "2222"]; [] without. UserError if it is no host name."""
    port = check_host(host).partition(":")[2]
    return ["-p", port] if port else []


def ssh_name(host: str) -> str:
    """Return the host as a user types it after `ssh `, such as `-p 2222 name`. UserError if it is no host name."""
    return shlex.join([*port_option(host), login(host)])


def options(accept_new_keys: bool = False, *, alive_count: int = ALIVE_COUNT) -> list[str]:
    """Return OpenSSH's options for a connection that needs no terminal and never prompts.

    `accept_new_keys` stores unknown host keys, but never accepts changed ones. A host that is silent for
    alive_count * 5 s is given up.
    """
    settings = {
        "BatchMode": "yes",
        "ConnectTimeout": CONNECT_SECONDS,
        "ServerAliveInterval": ALIVE_SECONDS,
        "ServerAliveCountMax": alive_count,
        "StrictHostKeyChecking": "accept-new" if accept_new_keys else "yes",
        "ClearAllForwardings": "yes",  # a LocalForward in ~/.ssh/config would collide with itself
        "LogLevel": "INFO",  # below it, "Timeout, server not responding" is not said
    }
    return [part for name, value in settings.items() for part in ("-o", f"{name}={value}")]


def command(
    host: str, argv: Sequence[str], *, accept_new_keys: bool = False, alive_count: int = ALIVE_COUNT
) -> list[str]:
    """Return the local ssh command line that runs argv on the host, every argument quoted.

    `accept_new_keys` and `alive_count` as for options(). Raises UserError if `host` is not a host name.
    """
    settings = options(accept_new_keys, alive_count=alive_count)
    return ["ssh", *settings, *port_option(host), "--", login(host), shlex.join(argv)]


def environment() -> dict[str, str]:
    """Return this process's environment with LC_ALL=C, so that ssh's messages are in the English explain() reads."""
    return os.environ | {"LC_ALL": "C"}


def run(
    host: str,
    argv: Sequence[str],
    *,
    stdin: bytes = b"",
    timeout_seconds: float = 60,
    accept_new_keys: bool = False,
    check: bool = True,
) -> Result:
    """Run argv on the host with `stdin` as its input, wait, and return its exit code and output.

    `accept_new_keys` stores an unknown host key. Raises UserError when ssh is not installed or fails (exit code 255),
    when the program is missing on the host (127), and after `timeout_seconds`. If `check`, any other exit code but 0
    raises it too.
    """
    line = command(host, argv, accept_new_keys=accept_new_keys)
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
            fix=f"look at the load and the disks of {host}: ssh {ssh_name(host)} uptime",
        ) from None
    result = Result(done.returncode, done.stdout.decode(errors="replace"), done.stderr.decode(errors="replace"))
    # Both codes may also be the command's own; nothing that finlm runs on a host uses them.
    if result.code in (FAILED, NOT_FOUND) or (check and result.code):
        raise explain(host, result.code, result.stderr, argv[0])
    return result


def answers(host: str) -> bool:
    """Return whether the host runs a command over ssh within 10 s; True, without ssh, for this machine.

    A host whose key is not known here does not answer. Raises UserError if `host` is not a host name.
    """
    if is_this_machine(host):
        return True
    try:
        run(host, ["true"], timeout_seconds=10)
    except UserError:
        return False
    return True


def explain(host: str, code: int, stderr: str, program: str) -> UserError:
    """Return, without raising it, the UserError for `program`, which failed on the host with ssh's exit code `code`.

    `stderr` is what ssh and the program wrote.
    """
    evidence = last_lines(stderr) or f"exit code {code}, no message"
    if code == FAILED and not last_lines(stderr):
        return UserError(
            f"{host} fell silent after the login",
            evidence=evidence,
            fix=f"does it answer, and do large packets pass? ping -M do -s 1472 {login(host).rpartition('@')[2]}",
        )
    if code == NOT_FOUND:
        return UserError(
            f"{program} is not installed on {host}",
            evidence=evidence,
            fix=f"ssh {ssh_name(host)} sudo apt-get install {program}   (dnf, yum or zypper on other systems)",
        )
    known = reason(host, stderr) if code == FAILED else None
    return known or UserError(
        f"{program} failed on {host} with exit code {code}", evidence=evidence, fix=f"try by hand: ssh {ssh_name(host)}"
    )


def reason(host: str, stderr: str) -> UserError | None:
    """Return, without raising it, a UserError that says why ssh could not connect; None if `stderr` does not tell."""
    for pattern, problem, fix in _REASONS:
        if re.search(pattern, stderr):
            name = login(host).rpartition("@")[2]
            fix = fix.format(host=ssh_name(host), name=name)
            return UserError(problem.format(host=host), evidence=last_lines(stderr), fix=fix)
    return None


def last_lines(text: str, count: int = 12) -> str:
    """Return the last `count` lines of a text with content, stripped, without ssh's frames of @."""
    lines = [line.strip() for line in text.splitlines()]
    return "\n".join([line for line in lines if line.strip("@ ")][-count:])


def is_this_machine(host: str) -> bool:
    """Return whether host names this machine: localhost, its node name, or a name of an address of this machine.

    Another port of this machine, in `host` or in ~/.ssh/config, is another host: a container or a tunnel. So is another
    user's account, whose processes this user cannot start without ssh. A name that does not resolve is False. May run
    `ssh -G` (up to 10 s) and ask DNS. Raises UserError if `host` is not a host name.
    """
    user, _, name = login(host).rpartition("@")
    if port_option(host) not in ([], ["-p", "22"]) or (user and user != getpass.getuser()):
        return False
    node = os.uname().nodename
    if name in {"localhost", node, node.partition(".")[0]}:
        return True
    settings = _read_settings(host)
    if settings.get("port", "22") != "22":
        return False
    try:
        entries = socket.getaddrinfo(settings.get("hostname", name), 22, type=socket.SOCK_DGRAM)
    except OSError:
        return False
    return any(_is_own_address(family, address) for family, _, _, _, address in entries)


def split_local(hosts: Sequence[Host]) -> tuple[list[Host], list[Host]]:
    """Return (hosts that are this machine, other hosts), as is_this_machine() says, each in the given order."""
    with ThreadPoolExecutor(16) as pool:
        is_here = list(pool.map(lambda host: is_this_machine(host.destination), hosts))
    pairs = list(zip(hosts, is_here, strict=True))
    return [host for host, here in pairs if here], [host for host, here in pairs if not here]


def address(host: str) -> str:
    """Return the name or address that ssh connects to: HostName of ~/.ssh/config, else the host's own name.

    Raises UserError if `host` is not a host name.
    """
    return _read_settings(host).get("hostname", login(host).rpartition("@")[2])


def _read_settings(host: str) -> dict[str, str]:
    """Return ssh's settings for a host, {lower-case name: value}, by `ssh -G`; {} when it fails or takes over 10 s.

    Raises UserError if `host` is not a host name.
    """
    try:
        line = ["ssh", "-G", *port_option(host), "--", login(host)]
        done = subprocess.run(line, capture_output=True, text=True, timeout=10, env=environment())
    except (OSError, subprocess.TimeoutExpired):
        return {}
    pairs = (line.partition(" ") for line in done.stdout.splitlines())
    return {key: value for key, _, value in pairs}


def _is_own_address(family: int, address: tuple[str | int, ...] | tuple[int, bytes]) -> bool:
    """Return whether an address is this machine's: only such an address can be bound."""
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((address[0], 0, *address[2:]))
        except OSError:
            return False
    return True


def path_on_host(path: Path, access: HostAccess) -> Path:
    """Return where a path of this machine lies on a host, as an absolute path; it need not exist.

    If hosts.<name>.work_dir is set, it replaces the current directory in paths below that; other paths stay the same.
    """
    path, here = path.absolute(), Path.cwd()
    if access.work_dir is None or not path.is_relative_to(here):
        return path
    return Path(access.work_dir) / path.relative_to(here)


def python_on_host(access: HostAccess) -> str:
    """Return the path of the interpreter of a host's ranks: hosts.<name>.python, else this interpreter's path there."""
    return access.python or str(path_on_host(Path(sys.executable), access))
