"""What the measured links mean: dead, slow, or as good as the plan reckons."""

from __future__ import annotations

import json
from collections.abc import Mapping

from finlm.doctor import speed
from finlm.doctor.speed import Ranks, Speed, Speeds
from finlm.recipe.cluster import Cluster, Host
from finlm.train import measure_hardware

from doctor_facts import CPU_PLAN, gpu_plan

TRIO = Cluster(tuple(Host(name, 2, "H200") for name in ("n0", "n1", "n2")), network_gbit=100)
ONE = Cluster((Host("h0", 4, "H200"),))


def speeds(links: Mapping[Ranks, float], failed: Mapping[Ranks, str] | None = None) -> Speeds:
    """GB/s of each group."""
    return Speeds({ranks: Speed(3e-5, 2**20, 1e-3, rate * 1e9) for ranks, rate in links.items()}, failed or {})


def faults(cluster: Cluster, found: Speeds) -> list[tuple[str, str, str]]:
    """(host, level, evidence) of everything that is wrong."""
    plan = gpu_plan(*(host.name for host in cluster.hosts))
    return [(host, level, evidence) for host, (_, level, evidence, _) in speed.judge(plan, cluster, found)]


def test_equal_links_are_healthy_whatever_their_number() -> None:
    assert faults(TRIO, speeds({(0, 2): 11, (0, 4): 12, (2, 4): 10, (0, 1, 2, 3, 4, 5): 9})) == []
    assert faults(ONE, speeds({(0, 1): 300, (0, 1, 2, 3): 320})) == []


def test_one_bad_card_makes_most_links_slow_and_is_still_the_one_named() -> None:
    found = faults(TRIO, speeds({(0, 2): 11, (0, 4): 1.1, (2, 4): 1.2}))
    assert [(host, level) for host, level, _ in found] == [("n2", "warning"), ("n2", "warning")]
    assert "n0 and n2: 1.1 GB/s, a usual link here has 11 GB/s" in found[0][2]


def test_gpus_that_are_bridged_in_pairs_are_not_slow_and_a_single_bad_pair_is() -> None:
    pairs = dict.fromkeys([(0, 2), (0, 3), (1, 2), (1, 3)], 20.0) | {(0, 1): 200.0, (2, 3): 200.0}
    assert faults(ONE, speeds(pairs)) == []
    found = faults(ONE, speeds(dict.fromkeys([(0, 1), (0, 2), (0, 3), (1, 2), (1, 3)], 200.0) | {(2, 3): 20.0}))
    assert [(host, level) for host, level, _ in found] == [("h0", "warning")] and "GPU 2 and GPU 3" in found[0][2]


def test_a_dead_link_is_an_error_of_the_host_that_has_the_most_of_them() -> None:
    found = faults(TRIO, speeds({(2, 4): 11}, {(0, 2): "timed out", (0, 4): "timed out"}))
    assert [(host, level) for host, level, _ in found] == [("n0", "error"), ("n0", "error")]
    assert "n0 and n1 cannot talk: timed out" in found[0][2]


def test_links_between_gpu_hosts_are_held_against_the_plans_network() -> None:
    found = faults(TRIO, speeds({(0, 2): 1.1, (0, 4): 1.1, (2, 4): 1.1}))
    assert len(found) == 1 and "1.1 GB/s between hosts; the plan reckons with 12.5 GB/s (100 Gbit/s)" in found[0][2]
    slow = speeds({(0, 2): 1.1, (0, 4): 1.1, (2, 4): 1.1})
    assert speed.judge(CPU_PLAN, TRIO, slow) == []


def line(kind: str, rank: int, *ranks: int, **fields: object) -> str:
    return speed.MARK + json.dumps({"kind": kind, "rank": rank, "ranks": ranks, **fields})


def test_a_group_that_began_and_never_ended_has_failed() -> None:
    numbers = {"latency": 1e-5, "bytes": 8, "seconds": 1e-3, "bus_bytes_per_second": 1e9}
    output = [line("begun", 0, 0, 1), line("begun", 1, 0, 1), "NCCL version 2.28.9", line("begun", 2, 1, 2)]
    output += [line("measured", 0, 0, 1, **numbers), line("measured", 1, 0, 1, **numbers)]
    found = speed.parse_speeds("\n".join(output))
    assert found.measured == {(0, 1): Speed(**numbers)} and found.failed == {(1, 2): "it began and never ended"}


def test_an_interpreter_that_cannot_start_is_quoted() -> None:
    found = speed.parse_speeds("ModuleNotFoundError: No module named 'torch'\n")
    ((host, level, evidence),) = faults(ONE, found)
    assert (host, level) == ("h0", "error") and "No module named 'torch'" in evidence


def test_both_sides_agree_on_the_mark() -> None:
    assert speed.MARK == measure_hardware.MARK
