"""`finlm doctor` between real ssh servers: silent on a healthy cluster, and each fault told on the host that has it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from .doctoring import PYTHON, bare, checkout, doctor, findings, install, set_clock
from .netcluster import Cluster

SMI = """#!/bin/sh
case "$1" in
  --query-gpu=index,name*) echo "0, NVIDIA H200, GPU-$(hostname)-0, 143771, 0, 143771, 580.159.04"
                           echo "1, NVIDIA H200, GPU-$(hostname)-1, 143771, 0, 143771, 580.159.04" ;;
  --query-gpu=index,compute_cap) echo "0, 9.0"; echo "1, 9.0" ;;
esac
"""


@pytest.fixture
def hosts(trio: Cluster) -> Cluster:
    """Three hosts with a checkout each."""
    for host in trio.hosts:
        checkout(host)
    return trio


def test_a_healthy_cluster_prints_no_warning(hosts: Cluster) -> None:
    done = doctor(hosts)
    assert findings(done) == {} and done.stderr.splitlines()[4:] == ["doctor: nothing wrong"]
    table = {line.split()[0]: line.split()[1:] for line in done.stderr.splitlines()[:4]}
    assert set(table) == {"host", "n0", "n1", "n2"}
    assert {"login", "network", "logins", "clock", "code"} < set(table["host"])
    assert all(set(cells) == {"ok"} for name, cells in table.items() if name != "host")


def test_other_versions_drifted_code_a_wrong_clock_and_too_many_slots_are_told_on_their_hosts(hosts: Cluster) -> None:
    install(hosts[1], "transformers", "5.0.0")
    drifted = hosts[1].work / "repo/src/finlm/train/pretrain.py"
    drifted.write_text(drifted.read_text(encoding="utf-8") + "# edited on n1\n", encoding="utf-8")
    (hosts[2].work / "repo/src/finlm/cli/main.py").unlink()
    set_clock(hosts[2], 600)
    found = findings(doctor(hosts, slots={2: 8}))
    assert set(found) == {
        ("versions", "n1", "error"),
        ("code", "n1", "error"),
        ("code", "n2", "error"),
        ("clock", "n2", "error"),
        ("cores", "n2", "error"),
    }
    assert "transformers 5.0.0, n0 has 5." in found["versions", "n1", "error"]
    assert "src/finlm/train/pretrain.py: sha256" in found["code", "n1", "error"]
    assert "src/finlm/cli/main.py: missing" in found["code", "n2", "error"]
    assert "minutes ahead of that of n" in found["clock", "n2", "error"]


def test_a_host_without_python_and_one_with_only_python_3_8_say_so(hosts: Cluster) -> None:
    old = next(Path.home().glob(".pyenv/versions/3.8*/bin/python3.8"), None)
    if old is None:
        pytest.skip("no Python 3.8 under ~/.pyenv/versions")
    for host in hosts.hosts[1:]:
        (host.work / "repo/.venv/bin/python").unlink()
    bare(hosts[1])
    bare(hosts[2], python3=str(old), ssh="/usr/bin/ssh")
    found = findings(doctor(hosts))
    assert set(found) == {("python", "n1", "error"), ("python", "n2", "error"), ("sync", "n2", "error")}
    assert "rsync is not installed" in found["sync", "n2", "error"]
    assert "python3 is not installed on n1" in found["python", "n1", "error"]
    assert f"{PYTHON} is not there; its python3 is 3.8" in found["python", "n2", "error"]


def test_a_refused_login_and_a_changed_host_key_are_told_and_the_third_host_is_examined(hosts: Cluster) -> None:
    hosts[1].kill("sshd")
    hosts[2].new_host_key()
    found = findings(doctor(hosts))
    assert {("ssh", "n1", "error"), ("ssh", "n2", "error"), ("logins", "n0", "warning")} == set(found)
    assert "n1 refuses ssh connections" in found["ssh", "n1", "error"]
    assert "host key of n2 has changed" in found["ssh", "n2", "error"]


def test_a_taken_port_a_wrong_card_and_a_dead_link_are_told_at_their_ends(hosts: Cluster) -> None:
    serve = "import socket, time; s = socket.create_server(('', 29511)); print('up', flush=True); time.sleep(60)"
    listener = hosts[0].popen("python3", "-c", serve)  # ends with its host
    assert listener.stdout is not None and listener.stdout.readline() == "up\n"
    hosts[1].run("ip", "route", "add", "unreachable", hosts[2].address)
    found = findings(doctor(hosts, "--set", "launch.master_port=29511", "--set", "env={GLOO_SOCKET_IFNAME: eno1}"))
    listener.stdout.close()
    assert "in use" in found.pop(("port", "n0", "error"))
    for host, own in (("n1", "ens5"), ("n2", "enp3s0")):
        assert f"{host} has no eno1 with an address: lo (127.0.0.1), {own}" in found.pop(("nic", host, "error"))
    assert "from n1 to port 29511 of n2: " in found.pop(("reach", "n1", "error"))
    assert "from n2 to port 29511 of n1: " in found.pop(("reach", "n2", "error"))
    assert set(found) == {("logins", "n1", "warning"), ("logins", "n2", "warning")}


def test_gpus_are_found_on_the_hosts_and_too_few_of_them_and_a_tiny_shm_are_told(hosts: Cluster) -> None:
    for host in hosts.hosts:
        smi = host.work / "repo/.venv/bin/nvidia-smi"
        smi.write_text(SMI)
        smi.chmod(0o755)
        install(host, "torch", "2.13.0")
    hosts[1].run("mount", "-o", "remount,size=32m", "/dev/shm")
    supposed = "hardware.hosts=[{name: n0, slots: 2, gpu: A100-40G}]"
    done = doctor(hosts, "--set", supposed, slots={0: 2, 1: 2, 2: 4})
    assert "n0 has NVIDIA H200, the recipe's hardware says A100-40G: planned for H200\n" in done.stderr
    found = findings(done)
    assert set(found) == {("gpus", "n2", "error"), ("shm", "n1", "error")}
    assert "2 visible GPU(s), the plan uses 4 (nvidia-smi lists 2)" in found["gpus", "n2", "error"]
    assert "/dev/shm has 32.0 MiB free of 32.0 MiB for 2 ranks" in found["shm", "n1", "error"]


def test_every_link_is_measured_and_a_slow_card_is_named(hosts: Cluster) -> None:
    shape = ("tc", "qdisc", "add", "dev", hosts[2].interface, "root", "tbf")
    hosts[2].run(*shape, "rate", "100mbit", "burst", "64kbit", "latency", "400ms")
    done = doctor(hosts, "--allreduce")
    document = json.loads(done.stdout)
    speed = {name: link["bus_bytes_per_second"] for name, link in document["links"].items()}
    assert set(speed) == {"n0-n1", "n0-n2", "n1-n2", "n0-n1-n2"}
    assert speed["n0-n2"] < 13e6 and speed["n1-n2"] < 13e6 < speed["n0-n1"]
    told = {(one["check"], one["host"], one["level"]) for one in document["findings"]}
    assert told == {("link", "n2", "warning")} and len(document["findings"]) == 2 and done.returncode == 0
