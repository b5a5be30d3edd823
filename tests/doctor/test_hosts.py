"""Doctor's checks of hosts against each other, on facts of clusters that are not here."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from finlm.doctor import preflight
from finlm.hosts import file_trees, ssh
from finlm.recipe import recipe
from finlm.recipe.cluster import Cluster, Host
from finlm.recipe.schema import HostAccess, Recipe

from doctor_facts import CPU_PLAN, QUICKSTART, RECIPE, Facts, changed, gpu_plan, healthy, judge, only, read

CARDS = {"h0": "bond0", "h1": "eno1", "h2": "ens5"}
FIXED_PORT = recipe.load(QUICKSTART, ["launch.master_port=29500"]).recipe


def links(host: str, hosts: Sequence[str] = tuple(CARDS), **fields: Any) -> Facts:
    """What a host of a healthy cluster sees: 10.0.0.N on its own card, docker0 beside it."""
    addresses = {name: f"10.0.0.{number}" for number, name in enumerate(CARDS, 1)}
    peer = {"answered": None, "local": addresses[host], "error": None, "unresolved": None}
    network = [
        {"name": "lo", "addresses": ["127.0.0.1", "::1"], "state": "unknown", "mbit": None},
        {"name": "docker0", "addresses": ["172.17.0.1"], "state": "down", "mbit": None},
        {"name": CARDS[host], "addresses": [addresses[host], "fe80::1"], "state": "up", "mbit": 25000},
    ]
    seen = {
        "port": {"port": 29500, "free": True, "error": None},
        "peers": {name: peer | {"answered": name, "address": addresses[name]} for name in hosts if name != host},
        "ssh": {name: {"code": 0, "error": ""} for name in hosts},
        "network": network,
        "infiniband": [],
    }
    return seen | fields


def trio(**of_h1: Any) -> dict[str, Facts]:
    """Three healthy GPU hosts; keywords change h1."""
    facts = {name: healthy(name) | {"links": links(name), "clock": [-0.2, 0.3]} for name in CARDS}
    facts["h1"] = changed("h1", links=links("h1"), clock=[-0.2, 0.3])
    for name, value in of_h1.items():
        outer, _, inner = name.partition("__")
        if inner:
            facts["h1"][outer][inner] = value
        else:
            facts["h1"][outer] = value
    return facts


def judged(facts: dict[str, Facts], wanted: Recipe = RECIPE, **of_h1: Any) -> list[preflight.Finding]:
    hosts = tuple(Host(name, 2, "H200", **(of_h1 if name == "h1" else {})) for name in CARDS)
    return judge(wanted, gpu_plan(*CARDS), Cluster(hosts), facts)


def told(facts: dict[str, Facts], check: str, level: str, host: str = "h1", wanted: Recipe = RECIPE) -> str:
    """The evidence of the only finding, which is this one."""
    found = only(judged(facts, wanted))
    assert (found.check, found.level, found.host) == (check, level, host)
    return found.evidence


def test_three_healthy_hosts_give_no_finding() -> None:
    assert judged(trio()) == []


@pytest.mark.parametrize(
    ("of_h1", "words"),
    [
        ({"packages__transformers": "5.20.0"}, ["transformers 5.20.0, h0 has"]),
        ({"packages__deepspeed": "0.18.0", "packages__torch": "2.12.0"}, ["deepspeed 0.18.0", "torch 2.12.0"]),
        ({"python": {"version": "3.13.1", "executable": "/p"}}, ["Python 3.13, h0 has 3.12"]),
        ({"torch__cuda": "12.8"}, ["CUDA of torch 12.8, h0 has 13.0"]),
        ({"torch__nccl": "2.27.3"}, ["NCCL 2.27.3, h0 has 2.28.9"]),
        ({"torch": None, "packages__nvidia-nccl-cu13": "2.27.3"}, ["NCCL nvidia-nccl-cu13 2.27.3"]),
    ],
)
def test_a_host_with_another_version_is_told_once(of_h1: Facts, words: list[str]) -> None:
    evidence = told(trio(**of_h1), "versions", "error")
    assert all(word in evidence for word in words), evidence


def test_versions_of_a_host_without_the_ranks_interpreter_are_not_compared() -> None:
    python = {"version": "3.8.18", "executable": "/usr/bin/python3", "wanted": "/job/.venv/bin/python"}
    evidence = told(trio(python=python, packages={}), "python", "error")
    assert "/job/.venv/bin/python is not there" in evidence and "3.8.18" in evidence


def test_a_host_that_could_not_be_asked_is_told_and_the_others_are_judged() -> None:
    facts = trio()
    facts["h1"] = {"failed": {"problem": "h1 refuses ssh connections", "evidence": "port 22", "fix": "start sshd"}}
    for name in ("h0", "h2"):  # what they saw of it
        facts[name]["links"]["peers"]["h1"] |= {"answered": None, "error": "Connection refused"}
        facts[name]["links"]["ssh"]["h1"] = {"code": 0, "error": ""}
    assert told(facts, "ssh", "error") == "h1 refuses ssh connections\nport 22"
    del facts["h1"]
    assert "no facts" in told(facts, "ssh", "error")


def test_a_link_that_is_dead_in_one_direction_is_told_where_it_fails() -> None:
    facts = trio()
    facts["h1"]["links"]["peers"]["h2"] |= {"answered": None, "error": "timed out"}
    assert "from h1 to port 29500 of h2: timed out" in told(facts, "reach", "error")


def test_a_host_behind_a_firewall_is_blamed_and_not_those_that_call_it() -> None:
    facts = trio()
    for name in ("h0", "h2"):
        facts[name]["links"]["peers"]["h1"] |= {"answered": None, "error": "timed out"}
    assert "no other host gets a TCP connection to h1" in told(facts, "reach", "error")


def test_two_lines_for_one_machine_are_told_and_nothing_else() -> None:
    facts = trio(machine="boot net:[1]")
    facts["h0"]["machine"] = "boot net:[1]"
    facts["h1"]["links"]["port"] = {"port": 29500, "free": False, "error": "Address already in use"}
    facts["h2"]["links"]["peers"]["h1"] |= {"answered": "h0"}
    assert "h0 and h1 are the same machine" in told(facts, "names", "error")


def test_where_the_others_reached_a_host_is_its_address() -> None:
    facts = trio()
    facts["h2"]["links"]["peers"]["h0"] |= {"answered": None, "address": "10.9.9.9"}
    assert preflight.find_addresses(read(facts)) == {"h0": "10.0.0.1", "h1": "10.0.0.2", "h2": "10.0.0.3"}


def test_a_host_without_rsync_or_with_a_shell_that_prints_cannot_get_the_run() -> None:
    assert "rsync is not installed" in told(trio(rsync=None), "sync", "error")
    assert "prints 'welcome'" in told(trio(rsync="/usr/bin/rsync", printed="welcome"), "sync", "error")
    assert judged(trio(rsync=None, is_here=True)) == []


def test_a_disk_without_room_for_files_is_an_error() -> None:
    facts = trio()
    facts["h1"]["disks"]["run"]["files_free"] = 12
    assert "holds 12 more files (inodes)" in told(facts, "disk", "error")


def test_names_that_mean_nothing_or_mislead_are_warnings() -> None:
    facts = trio()
    facts["h1"]["links"]["peers"]["h2"]["unresolved"] = "Name or service not known"
    assert "h1 does not know the name h2" in told(facts, "names", "warning")
    facts = trio()
    facts["h1"]["links"]["peers"]["h2"] |= {"answered": "h0", "address": "10.0.0.1"}
    assert "the name h2 leads to h0 (10.0.0.1)" in told(facts, "names", "warning")


def test_logins_between_hosts_are_one_warning_a_host() -> None:
    facts = trio()
    facts["h1"]["links"]["ssh"]["h1"] = {"code": 255, "error": "root@h1: Permission denied (publickey)."}
    facts["h1"]["links"]["ssh"]["h2"] = {"code": 255, "error": "Host key verification failed."}
    evidence = told(facts, "logins", "warning")
    assert "itself: h1 does not let this user in" in evidence and "h2: the host key of h2 is not known" in evidence


def test_the_rendezvous_port_matters_on_the_first_host_and_only_when_it_was_chosen() -> None:
    taken = {"port": 29500, "free": False, "error": "[Errno 98] Address already in use"}
    facts = trio(links__port=taken)
    assert judged(facts, FIXED_PORT) == []
    facts = trio()
    facts["h0"]["links"]["port"] = taken
    assert "29500" in told(facts, "port", "error", "h0", FIXED_PORT)
    assert judged(facts) == []


def test_every_host_gets_the_card_that_leads_to_the_others() -> None:
    env = preflight.host_env(read(trio()))
    assert env["h0"] == {"NCCL_SOCKET_IFNAME": "=bond0", "GLOO_SOCKET_IFNAME": "bond0"}
    assert env["h1"] == {"NCCL_SOCKET_IFNAME": "=eno1", "GLOO_SOCKET_IFNAME": "eno1"}
    assert preflight.host_env(read({"h0": healthy()})) == {"h0": {}}


def test_a_card_that_the_recipe_names_must_be_on_every_host_unless_the_host_says_otherwise() -> None:
    one = RECIPE.model_copy(update={"env": {"GLOO_SOCKET_IFNAME": "bond0"}})
    found = judged(trio(), one)
    assert {(item.check, item.host, item.level) for item in found} == {("nic", "h1", "error"), ("nic", "h2", "error")}
    assert "h1 has no bond0 with an address: lo (127.0.0.1)" in found[0].evidence and "eno1" in found[0].evidence
    access = HostAccess(env={"GLOO_SOCKET_IFNAME": "eno1"})
    assert {item.host for item in judged(trio(), one, access=access)} == {"h2"}
    several = RECIPE.model_copy(update={"env": {"NCCL_SOCKET_IFNAME": "bond,en"}})
    assert judged(trio(), several) == []  # NCCL takes prefixes
    access = HostAccess(env={"NCCL_SOCKET_IFNAME": "=eno"})
    assert "h1 has no eno with" in only(judged(trio(), access=access)).evidence


def test_a_host_without_infiniband_makes_all_use_tcp_and_is_named() -> None:
    port = {"device": "mlx5_0", "port": "1", "link": "InfiniBand", "active": True, "rate": "400 Gb/sec (4X NDR)"}
    facts = trio()
    for name in ("h0", "h2"):
        facts[name]["links"]["infiniband"] = [port]
    facts["h1"]["links"]["infiniband"] = [port | {"active": False}]
    assert "0 active InfiniBand port(s) on h1, 1 on h0 (mlx5_0:1 (400 Gb/sec" in told(facts, "infiniband", "warning")
    assert all(env["NCCL_IB_DISABLE"] == "1" for env in preflight.host_env(read(facts)).values())
    facts["h1"]["links"]["infiniband"] = [port]
    assert judged(facts) == [] and "NCCL_IB_DISABLE" not in preflight.host_env(read(facts))["h0"]


@pytest.mark.parametrize(
    ("offset", "level"), [(0.9, None), (1.8, "warning"), (-45.0, "warning"), (600.0, "error"), (-600.0, "error")]
)
def test_clocks_are_compared_within_the_time_of_the_answer(offset: float, level: str | None) -> None:
    facts = trio(clock=[offset - 0.2, offset + 0.3])
    if level is None:
        assert judged(facts) == []
    else:
        evidence = told(facts, "clock", level)
        assert ("ahead of" if offset > 0 else "behind") in evidence


def test_a_wrong_clock_of_this_machine_is_not_blamed_on_the_hosts() -> None:
    facts = trio()
    for one in facts.values():
        one["clock"] = [599.8, 600.3]
    assert judged(facts) == []


def test_drifted_missing_and_absent_files_are_told_by_name() -> None:
    files = {"src/a.py": "sha256 aa", "src/b.py": "sha256 bb", "run.sh": "sha256 cc"}
    tree = file_trees.CheckedTree("code", Path("/job"), files, follow=False)
    hosts = Cluster((Host("h0", 1), Host("h1", 1)))

    def found(**changes: str | None) -> preflight.Finding:
        there = files | {name.replace("__", "/"): value for name, value in changes.items()}
        facts = {"h0": changed("h0", trees={"code": files}), "h1": changed("h1", trees={"code": there})}
        return only(judge(RECIPE, CPU_PLAN, hosts, facts, [tree]))

    one = found(**{"src__a.py": "sha256 ee", "run.sh": None})
    assert (one.check, one.host, one.level) == ("code", "h1", "error")
    assert "2 of 3 files of /job differ" in one.evidence and "run.sh: missing" in one.evidence
    assert "src/a.py: sha256 ee, here sha256 aa" in one.evidence and "finlm sync" in one.fix
    none = found(**{"src__a.py": None, "src__b.py": None, "run.sh": None})
    assert none.evidence == "/job is not there"


def test_a_model_that_only_the_hosts_have_must_be_on_all_of_them() -> None:
    wanted = recipe.load(QUICKSTART, ["model.init_from=/models/llama"]).recipe
    (tree,) = file_trees.trees_to_check(wanted, None, None)
    one, two = ({"model": {"config.json": found}} for found in ("sha256 aa", None))
    hosts = Cluster((Host("h0", 1), Host("h1", 1)))
    facts = {"h0": changed("h0", trees=one), "h1": changed("h1", trees=two)}
    found = only(judge(wanted, CPU_PLAN, hosts, facts, [tree]))
    assert (found.check, found.host) == ("model", "h1") and found.evidence == "/models/llama is not there"
    assert "`finlm train` copies" in found.fix


def test_a_path_below_the_working_directory_lies_below_the_hosts_work_dir(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir("/tmp")
    moved = HostAccess(work_dir="/data/job")
    assert ssh.path_on_host(Path("runs"), moved) == Path("/data/job/runs")
    assert ssh.path_on_host(Path("/nvme/x"), moved) == Path("/nvme/x")
    assert ssh.path_on_host(Path("runs"), HostAccess()) == Path("/tmp/runs")


def test_the_table_has_a_row_for_each_host_and_dashes_where_nothing_was_examined(
    capsys: pytest.CaptureFixture[str],
) -> None:
    facts = trio(packages__transformers="5.20.0")
    facts["h2"] = {"failed": {"problem": "h2 refuses ssh connections", "evidence": "", "fix": ""}}
    for name in ("h0", "h1"):
        del facts[name]["links"]["peers"]["h2"]
    hosts = Cluster(tuple(Host(name, 2, "H200") for name in CARDS))
    findings = judged(facts)
    preflight.show_table(gpu_plan(*CARDS), hosts, read(facts), findings)
    header, *rows = (line.split() for line in capsys.readouterr().out.splitlines())
    table = {row[0]: dict(zip(header[1:], row[1:], strict=True)) for row in rows}
    assert table["h1"]["packages"] == "FAIL" and table["h1"]["GPU"] == "ok" and table["h0"]["packages"] == "ok"
    assert table["h2"]["login"] == "FAIL" and set(table["h2"].values()) == {"FAIL", "-"}
    assert "code" not in header


def test_every_check_has_a_column() -> None:
    listed = {check for checks, _ in preflight.COLUMNS.values() for check in checks}
    sources = [path.read_text() for path in Path(str(preflight.__file__)).parent.glob("*.py")]
    said = {
        name
        for text in sources
        for name in re.findall(r'yield (?:[\w.]+, \()?"([a-z-]+)", (?:"error|"warn|level)', text)
    }
    assert said - {"ok"} <= listed and len(said) > 20
