"""`doctor --allreduce`: starts train/allreduce.py on every host and names the link that is slow or dead.

One ssh a host, none for this machine; the ranks find each other at the address and through the network cards that the
probes found. A link is slow against the others or, between GPU hosts, against the speed that the plan reckons with.
About 10 s for two or three hosts.
"""

from __future__ import annotations

import json
import socket
import statistics
import subprocess
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finlm.base import screen
from finlm.base.errors import UserError
from finlm.base.units import format_bytes
from finlm.ops import doctor_network, places, ssh
from finlm.ops.doctor import Finding
from finlm.ops.doctor_network import AllFacts, HostFault
from finlm.plan.plan import Plan
from finlm.recipe.cluster import Cluster, Host
from finlm.recipe.schema import Recipe

PROGRAM = Path(__file__).parents[1] / "train" / "allreduce.py"  # sent as text, never imported: ops has no torch
MARK = "finlm-link:"
GROUP_SECONDS = {"cuda": 20, "cpu": 8}
SLOW = {"cuda": 0.5, "cpu": 0.3}
"""Of a usual link: the next lower PCIe or Ethernet rate is half or less; what gloo reaches also depends on busy cores.
"""
PROMISED = 0.5
NEEDED = ("ssh", "python", "reach", "names", "driver", "gpus", "torch", "nic")
"""With an error in one of these a collective cannot work, so it is not tried."""

Ranks = tuple[int, ...]


@dataclass(frozen=True)
class Speeds:
    """What the ranks said, by group: numbers of those that were measured, the reason of those that failed."""

    measured: Mapping[Ranks, Mapping[str, Any]]
    failed: Mapping[Ranks, str]


def measure(
    recipe: Recipe, plan: Plan, cluster: Cluster, facts: AllFacts, findings: Sequence[Finding]
) -> tuple[list[Finding], dict[str, Any]]:
    """Measure, print and judge; the findings and the numbers. Nothing is started where an error forbids it."""
    hindered = sorted({finding.check for finding in findings if finding.level == "error" and finding.check in NEEDED})
    if hindered:
        screen.say(f"all-reduce: not tried while there are errors of {', '.join(hindered)}")
        return [], {}
    if len(cluster.hosts) > 1 and not all(facts[host.name].get("links") for host in cluster.hosts):
        screen.say("all-reduce: not tried, since it is not known how the hosts reach each other")
        return [], {}
    if cluster.world_size == 1:
        screen.say("all-reduce: one rank has nobody to talk to")
        return [], {}
    speeds = _run(recipe, plan, cluster, facts)
    names = _names(plan, cluster)
    _show(plan, cluster, names, speeds)
    faults = judge(plan, cluster, speeds)
    numbers = {"-".join(names[rank] for rank in ranks): dict(row) for ranks, row in speeds.measured.items()}
    return [Finding(name, host, level, evidence, fix) for host, (name, level, evidence, fix) in faults], numbers


def _run(recipe: Recipe, plan: Plan, cluster: Cluster, facts: AllFacts) -> Speeds:
    """All hosts at once; a host that does not answer leaves the groups it was in without a result."""
    requests = _requests(recipe, plan, cluster, facts)
    program = PROGRAM.read_text(encoding="utf-8")

    def start(host: Host) -> str:
        request = requests[host.name]
        # On standard input, since env may hold secrets and every user of a host sees command lines.
        script = f"{program}\n\nos._exit(main(json.loads({json.dumps(request)!a})))\n".encode()
        argv, patience = [places.python(host.access), "-"], request["seconds"] + 20
        try:
            if ssh.is_this_machine(host.destination):
                done = subprocess.run(argv, input=script, capture_output=True, timeout=patience, cwd="/")
                return done.stdout.decode(errors="replace") + done.stderr.decode(errors="replace")
            found = ssh.run(host.destination, argv, stdin=script, timeout_seconds=patience, check=False)
        except (UserError, OSError, subprocess.TimeoutExpired) as error:
            return str(error)
        return found.stdout + found.stderr

    with ThreadPoolExecutor(len(cluster.hosts)) as pool:
        return parse("\n".join(pool.map(start, cluster.hosts)))


def _requests(recipe: Recipe, plan: Plan, cluster: Cluster, facts: AllFacts) -> dict[str, dict[str, Any]]:
    """What each host's part of the program is told."""
    several = len(cluster.hosts) > 1
    cards = doctor_network.host_env(facts) if several else {}
    ranks = _first_ranks(cluster)
    points = list(ranks.values()) if several else list(range(cluster.world_size))
    same = {
        "backend": "nccl" if plan.device == "cuda" else "gloo",
        "address": _address(cluster, facts),
        "port": facts[cluster.hosts[0].name]["links"]["port"]["port"] if several else _free_port(),
        "world_size": cluster.world_size,
        "points": points,
        "group_seconds": GROUP_SECONDS[plan.device],
        "seconds": 60 + 6 * GROUP_SECONDS[plan.device] + 3 * len(points),
    }
    requests = {}
    for host in cluster.hosts:
        devices = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, host.devices))} if host.devices else {}
        env = {"OMP_NUM_THREADS": "1"} | cards.get(host.name, {}) | devices | recipe.env | host.access.env
        requests[host.name] = same | {"first_rank": ranks[host.name], "slots": host.slots, "env": env}
    return requests


def _first_ranks(cluster: Cluster) -> dict[str, int]:
    """Name of each host -> its first rank."""
    ranks, count = {}, 0
    for host in cluster.hosts:
        ranks[host.name] = count
        count += host.slots
    return ranks


def _address(cluster: Cluster, facts: AllFacts) -> str:
    """Where the first host is, as the others reached it."""
    first = cluster.hosts[0].name
    seen = [one["links"]["peers"][first]["address"] for name, one in facts.items() if name != first]
    return next((address for address in seen if address), "127.0.0.1")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def parse(output: str) -> Speeds:
    """The ranks' lines; a group that began and did not end has failed without a word."""
    measured: dict[Ranks, dict[str, Any]] = {}
    failed: dict[Ranks, str] = {}
    begun: set[Ranks] = set()
    for line in output.splitlines():
        _, mark, text = line.partition(MARK)
        if not mark:
            continue
        row = json.loads(text)
        ranks = tuple(row.pop("ranks"))
        kind = row.pop("kind")
        if kind == "begun":
            begun.add(ranks)
        elif kind == "failed":
            failed.setdefault(ranks, row["error"])
        elif row["rank"] == ranks[0]:
            measured[ranks] = {key: value for key, value in row.items() if key != "rank"}
    for ranks in begun - set(measured) - set(failed):
        failed[ranks] = "it began and never ended"
    if not begun and not failed:
        failed[()] = "\n".join(output.strip().splitlines()[-5:]) or "no rank said anything"
    return Speeds(measured, {ranks: why for ranks, why in failed.items() if ranks not in measured})


def judge(plan: Plan, cluster: Cluster, speeds: Speeds) -> list[HostFault]:
    """Links that are dead or slow. Each is told once, on the host that has the most of them."""
    pairs: dict[Ranks, float] = {
        ranks: row["bus_bytes_per_second"] for ranks, row in speeds.measured.items() if len(ranks) == 2
    }
    dead = [ranks for ranks in speeds.failed if len(ranks) == 2]
    usual = _usual(cluster, pairs)
    between = plan.device == "cuda" or len(cluster.hosts) > 1  # CPU ranks of one host share nothing but its cores
    slow = [ranks for ranks, speed in pairs.items() if between and speed < SLOW[plan.device] * usual]
    faults = [*_dead(plan, cluster, speeds, dead), *_slow(plan, cluster, pairs, slow, usual)]
    if not dead:
        for ranks, why in speeds.failed.items():
            fix = "NCCL_DEBUG=INFO in env: shows where; the links between each two work" * bool(pairs)
            evidence = f"the all-reduce of {len(ranks) or cluster.world_size} ranks failed: {why}"
            faults.append((cluster.hosts[0].name, ("link", "error", evidence, fix or "run it again by hand")))
    promised = cluster.network_gbit * 1e9 / 8
    if plan.device == "cuda" and len(cluster.hosts) > 1 and pairs and usual < PROMISED * promised:
        evidence = (
            f"{_rate(usual)} between hosts; the plan reckons with {_rate(promised)} ({cluster.network_gbit:g} Gbit/s)"
        )
        fix = "set hardware.network_gbit to what there is, or find out why: `ethtool` and `ibstat` on the hosts"
        faults.append((cluster.hosts[0].name, ("link", "warning", evidence, fix)))
    return faults


def _usual(cluster: Cluster, pairs: Mapping[Ranks, float]) -> float:
    """What a good link carries: the median of the best that each host reaches, since one bad card makes most links of
    three hosts slow; inside a host the median link, since GPUs may be bridged in pairs by design.
    """
    if len(cluster.hosts) == 1:
        return statistics.median(pairs.values()) if pairs else 0.0
    ends = {rank for ranks in pairs for rank in ranks}
    best = [max(speed for ranks, speed in pairs.items() if rank in ranks) for rank in ends]
    return statistics.median(best) if best else 0.0


def _dead(plan: Plan, cluster: Cluster, speeds: Speeds, dead: Sequence[Ranks]) -> Iterator[HostFault]:
    names = _names(plan, cluster)
    for ranks in dead:
        host = _host(cluster, _most_common(ranks, dead))
        evidence = f"{names[ranks[0]]} and {names[ranks[1]]} cannot talk: {speeds.failed[ranks]}"
        yield host, ("link", "error", evidence, _where_to_look(cluster))


def _slow(
    plan: Plan, cluster: Cluster, pairs: Mapping[Ranks, float], slow: Sequence[Ranks], usual: float
) -> Iterator[HostFault]:
    names = _names(plan, cluster)
    for ranks in slow:
        host = _host(cluster, _most_common(ranks, slow))
        evidence = (
            f"{names[ranks[0]]} and {names[ranks[1]]}: {_rate(pairs[ranks])}, a usual link here has {_rate(usual)}"
        )
        yield host, ("link", "warning", evidence, _where_to_look(cluster))


def _where_to_look(cluster: Cluster) -> str:
    if len(cluster.hosts) == 1:
        return "`nvidia-smi topo -m` and `nvidia-smi nvlink --status` show how the GPUs are linked"
    return "`ethtool CARD` shows the speed of a card and `ip -s link` its errors; check cable, port and firewall"


def _most_common(ranks: Ranks, groups: Sequence[Ranks]) -> int:
    """The rank of the pair that is in the most of these groups; the second one when both are."""
    count = Counter(rank for group in groups for rank in group)
    return max(reversed(ranks), key=lambda rank: count[rank])


def _host(cluster: Cluster, rank: int) -> str:
    first = _first_ranks(cluster)
    return [name for name in first if first[name] <= rank][-1]


def _names(plan: Plan, cluster: Cluster) -> dict[int, str]:
    """What a person calls a rank: its host, or its GPU when there is one host."""
    if len(cluster.hosts) > 1:
        return {rank: _host(cluster, rank) for rank in range(cluster.world_size)}
    kind = "GPU" if plan.device == "cuda" else "rank"
    return {rank: f"{kind} {rank}" for rank in range(cluster.world_size)}


def _rate(bytes_per_second: float) -> str:
    return f"{bytes_per_second / 1e9:.3g} GB/s"


def _show(plan: Plan, cluster: Cluster, names: Mapping[int, str], speeds: Speeds) -> None:
    backend = "NCCL" if plan.device == "cuda" else "gloo"
    for ranks, row in sorted(speeds.measured.items(), key=lambda item: (len(item[0]), item[0])):
        pair = len(ranks) == 2 and cluster.world_size > 2
        who = f"{names[ranks[0]]} - {names[ranks[1]]}" if pair else f"all {len(ranks)} ranks"
        size, seconds = format_bytes(row["bytes"]), f"{row['seconds'] * 1e3:.3g} ms"
        rate = _rate(row["bus_bytes_per_second"])
        latency = f"{row['latency'] * 1e6:.0f} us"
        screen.say(f"{backend} all-reduce, {who:<16} {rate:>10} bus bandwidth ({size} in {seconds}), latency {latency}")
