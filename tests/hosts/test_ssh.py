"""Names, command lines and explanations of ssh, without a network."""

from __future__ import annotations

import getpass
import shlex
import socket
from pathlib import Path

import pytest

from finlm.base.errors import UserError
from finlm.hosts import file_trees, ssh


@pytest.mark.parametrize("host", ["n1", "gpu-01.cluster.example", "10.0.0.7", "root@n1", "Node_3"])
def test_a_host_name_passes_unchanged(host: str) -> None:
    assert ssh.check_host(host) == host


@pytest.mark.parametrize(
    "host",
    ["-oProxyCommand=x", "n1;reboot", "$(id)", "n 1", "", "a@-b", "-a@b", "n1\n", "a@b@c", "::1", "n1:/etc", "../n1"],
)
def test_a_host_name_that_is_an_option_or_shell_code_is_refused(host: str) -> None:
    with pytest.raises(UserError, match="is not a host name"):
        ssh.command(host, ["true"])
    with pytest.raises(UserError, match="is not a host name"):
        ssh.is_this_machine(host)
    with pytest.raises(UserError, match="is not a host name"):
        file_trees.rsync_command(host, Path("/srv"), follow_links=False, whole=False, accept_new_keys=False)


def test_every_argument_reaches_the_remote_shell_as_one_word() -> None:
    words = ["ls", "a b", "it's", "$HOME", "*", "", "-x", ";reboot", "中文"]
    line = ssh.command("n1", words)
    assert line[-3:-1] == ["--", "n1"]
    assert shlex.split(line[-1]) == words


@pytest.mark.parametrize(("accept_new_keys", "setting"), [(False, "yes"), (True, "accept-new")])
def test_host_keys_are_always_checked_and_nothing_is_asked(accept_new_keys: bool, setting: str) -> None:
    line = ssh.command("n1", ["true"], accept_new_keys=accept_new_keys)
    copy = file_trees.rsync_command(
        "n1", Path("/srv"), follow_links=False, whole=False, accept_new_keys=accept_new_keys
    )
    for options in (line, shlex.split(copy[copy.index("-e") + 1])):
        assert f"StrictHostKeyChecking={setting}" in options
        assert {"BatchMode=yes", "ConnectTimeout=8", "ServerAliveInterval=5"} <= set(options)


# What OpenSSH 9.2 printed, shortened.
MESSAGES = [
    (
        "ssh: Could not resolve hostname n9: Temporary failure in name resolution",
        "the name n9 does not resolve",
        "/etc/hosts",
    ),
    ("ssh: connect to host n9 port 22: Connection refused", "n9 refuses ssh connections", "systemctl"),
    ("ssh: connect to host n9 port 22: No route to host", "n9 does not answer", "ping n9"),
    ("ssh: connect to host n9 port 22: Connection timed out", "n9 does not answer", "ping n9"),
    ("Connection timed out during banner exchange", "n9 does not answer", "ping n9"),
    ("Timeout, server n9 not responding.", "n9 does not answer", "ping n9"),
    ("root@n9: Permission denied (publickey,password).", "without a password", "ssh-copy-id root@n9"),
    (
        "No ED25519 host key is known for n9 and you have requested strict checking.\nHost key verification failed.",
        "host key of root@n9 is not known here",
        "--accept-new",
    ),
    (
        "@@@@@@@@@@@@@@@\n@    WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED!     @\nHost key verification failed.",
        "host key of root@n9 has changed",
        "ssh-keygen -R n9,",
    ),
    ("kex_exchange_identification: Connection closed by remote host", "closed the connection", "journalctl"),
]


@pytest.mark.parametrize(("message", "problem", "fix"), MESSAGES)
def test_each_failure_of_ssh_has_its_own_problem_and_fix(message: str, problem: str, fix: str) -> None:
    error = ssh.explain("root@n9", 255, message, "python3")
    assert problem in error.problem.replace("root@n9 does", "n9 does").replace("root@n9 refuses", "n9 refuses")
    assert fix in error.fix.replace("the name root@n9", "the name n9")
    assert error.evidence.splitlines()[-1] == message.splitlines()[-1]


def test_a_failing_program_is_not_taken_for_a_failing_connection() -> None:
    error = ssh.explain("n1", 1, "cp: /data: Permission denied", "cp")
    assert error.problem == "cp failed on n1 with exit code 1" and "Permission denied" in error.evidence
    assert ssh.explain("n1", 127, "bash: line 1: rsync: command not found", "rsync").problem.startswith("rsync is not")


def test_this_machine_is_known_by_name_and_by_address() -> None:
    me = getpass.getuser()
    own = ("localhost", "localhost:22", "127.0.0.1", f"{me}@localhost", socket.gethostname())
    assert all(map(ssh.is_this_machine, own))
    assert not ssh.is_this_machine("192.0.2.1")  # an address for documentation: nobody's


@pytest.mark.parametrize("host", ["localhost:2222", "127.0.0.1:2222", "not-me@localhost"])
def test_a_container_or_another_account_on_this_machine_is_another_host(host: str) -> None:
    assert not ssh.is_this_machine(host)
