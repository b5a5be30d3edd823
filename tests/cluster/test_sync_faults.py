"""`finlm sync` when hosts, keys, programs or transfers fail: each is named, and the others go on."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from .netcluster import HOME, WORK, Cluster
from .syncing import on, refused, repository, start, sync, tree, until


def test_a_host_that_is_down_is_named_and_the_others_are_synced(trio: Cluster) -> None:
    here = repository(trio[0])
    mac = trio[1].run("cat", f"/sys/class/net/{trio[1].interface}/address").stdout.strip()
    trio[1].power_off()  # the address stays in the ARP table: packets vanish without "no route to host"
    neighbour = ("ip", "neigh", "replace", trio[1].address, "lladdr", mac, "dev", trio[0].interface)
    trio[0].run(*neighbour, "nud", "permanent")
    said = refused(trio[0], "n1", "n2")
    assert "1 of 2 hosts are not in sync: n1" in said and "n1 does not answer" in said
    assert tree(on(trio[2])) == tree(here)


def test_a_changed_host_key_is_refused_with_the_way_out(pair: Cluster) -> None:
    repository(pair[0])
    pair[1].new_host_key()
    for accept_new_keys in (False, True):
        said = refused(pair[0], "n1", accept_new_keys=accept_new_keys)
        assert "host key of n1 has changed" in said and "ssh-keygen -R n1" in said
    assert not on(pair[1]).exists()
    pair[0].run("ssh-keygen", "-R", "n1")
    assert sync(pair[0], "n1", accept_new_keys=True)[0]["status"] == "equal"


def test_an_unknown_host_key_is_refused_unless_new_ones_are_accepted(pair: Cluster) -> None:
    repository(pair[0])
    known = pair[0].home / ".ssh" / "known_hosts"
    known.write_text("")
    said = refused(pair[0], "n1")
    assert "host key of n1 is not known" in said and "--accept-new" in said
    assert known.read_text() == ""
    sync(pair[0], "n1", accept_new_keys=True)
    assert sync(pair[0], "n1")[0]["status"] == "equal"


def test_every_other_reason_of_ssh_is_named_with_its_fix(pair: Cluster) -> None:
    repository(pair[0])
    said = refused(pair[0], "n9")
    assert "the name n9 does not resolve" in said
    (pair[1].home / ".ssh" / "authorized_keys").write_text("")
    assert "ssh-copy-id n1" in refused(pair[0], "n1")
    pair[1].kill("sshd")
    assert "n1 refuses ssh connections" in refused(pair[0], "n1")


def test_what_a_host_lacks_is_named_with_its_fix(pair: Cluster) -> None:
    repository(pair[0])
    (pair[1].home / ".bashrc").write_text(f"PATH={HOME}/bin\n")
    (pair[1].home / "bin").mkdir()
    said = refused(pair[0], "n1")
    assert "python3 is not installed on n1" in said and "apt-get install python3" in said
    (pair[1].home / "bin" / "python3").symlink_to(Path(sys.executable).resolve())
    said = refused(pair[0], "n1")
    assert "rsync is not installed on n1" in said and "apt-get install rsync" in said


def test_a_login_script_that_prints_is_named(pair: Cluster) -> None:
    repository(pair[0])
    (pair[1].home / ".bashrc").write_text("echo welcome to n1; yes welcome | head -c 9000\n")
    said = refused(pair[0], "n1")
    assert "login scripts on n1 print text" in said and "ssh n1 true" in said


@pytest.mark.parametrize("side", ["sending", "receiving"])
def test_a_big_files_transfer_goes_on_after_kill_9_of_rsync(pair: Cluster, side: str) -> None:
    repository(pair[0])
    size = 48 << 20
    data = on(pair[0], f"{WORK}/shards")
    data.mkdir()
    (data / "0.bin").write_bytes(os.urandom(size))
    there = on(pair[1], f"{WORK}/shards")
    with subprocess.Popen(
        start(pair[0], "n1", data=[f"{WORK}/shards"]), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        until(lambda: any(path.stat().st_size > size // 4 for path in there.glob(".0.bin.*")))
        assert pair[0 if side == "sending" else 1].kill("rsync") > 0
        _, said = process.communicate(timeout=30)
    assert process.returncode == 2 and "n1" in said and "run the same command again" in said, said
    assert not (there / "0.bin").exists()  # whole or absent
    result = sync(pair[0], "n1", data=[f"{WORK}/shards"])[0]
    assert result["sent_bytes"] < 0.8 * size
    assert (there / "0.bin").read_bytes() == (data / "0.bin").read_bytes()
    assert [path.name for path in there.iterdir()] == ["0.bin"]
