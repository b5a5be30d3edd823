"""Start train/measure_hardware.py on every host (`doctor --allreduce`) and name the link that is slow or dead.

One ssh connection per host, none for this machine. The ranks meet at the address, and use the network cards, that the
probes found. A link is slow compared with the others or, between GPU hosts, with the speed that the plan assumes. Takes
about 10 s for two or three hosts.
"""

from __future__ import annotations

import itertools
import json
import statistics
import subprocess
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from finlm.base import processes, screen
from finlm.base.errors import UserError
from finlm.base.units import format_bytes
from finlm.doctor import preflight
from finlm.doctor.gather import AllFacts
from finlm.doctor.machine import HostFault, Level
from finlm.doctor.preflight import Finding
from finlm.hosts import ssh
from finlm.plan.plan import Plan
from finlm.recipe.cluster import Cluster, Host
from finlm.recipe.schema import Recipe

PROGRAM = Path(__file__).parents[1] / "train" / "measure_hardware.py"  # sent as text, never imported: ops has no torch
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
class Speed:
    """The measured all-reduce of a group of ranks: latency and duration in seconds, bytes, and bus bandwidth."""

    latency: float
    bytes: int
    seconds: float
    bus_bytes_per_second: float


@dataclass(frozen=True)
class Speeds:
    """The results that the ranks reported, by group of ranks: speeds of measured groups, reasons of failed groups."""

    measured: Mapping[Ranks, Speed]
    failed: Mapping[Ranks, str]


def measure(
    recipe: Recipe, plan: Plan, cluster: Cluster, facts: AllFacts, findings: Sequence[Finding]
) -> tuple[list[Finding], dict[str, dict[str, float]]]:
    """Run the all-reduce on all hosts, print the speeds, and return (findings, {group: measured numbers}).

    A group is its ranks' names joined by "-"; its numbers are the fields of Speed. Starts nothing, prints why, and
    returns ([], {}) when `findings` has an error that forbids it, when it is unknown how the hosts reach each other, or
    for a single rank.
    """
    hindered = sorted({finding.check for finding in findings if finding.level == "error" and finding.check in NEEDED})
    if hindered:
        screen.show(f"all-reduce: not tried while there are errors of {', '.join(hindered)}")
        return [], {}
    if len(cluster.hosts) > 1 and not all(facts[host.name].links for host in cluster.hosts):
        screen.show("all-reduce: not tried, since it is not known how the hosts reach each other")
        return [], {}
    if cluster.world_size == 1:
        screen.show("all-reduce: one rank has nobody to talk to")
        return [], {}
    speeds = _run_allreduce(recipe, plan, cluster, facts)
    names = _name_ranks(plan, cluster)
    _print_speeds(plan, cluster, names, speeds)
    faults = judge(plan, cluster, speeds)
    numbers = {"-".join(names[rank] for rank in ranks): asdict(row) for ranks, row in speeds.measured.items()}
    return [Finding(name, host, level, evidence, fix) for host, (name, level, evidence, fix) in faults], numbers


def _run_allreduce(recipe: Recipe, plan: Plan, cluster: Cluster, facts: AllFacts) -> Speeds:
    """Run train/measure_hardware.py on all hosts at once, and return what the ranks reported, also where it fails."""
    requests = _make_requests(recipe, plan, cluster, facts)
    program = PROGRAM.read_text(encoding="utf-8")

    def start(host: Host) -> str:
        """Run the program on a host and return its output, or the reason why it did not run."""
        request = requests[host.name]
        # On standard input, since env may hold secrets and every user of a host sees command lines.
        script = f"{program}\n\nos._exit(time_links(json.loads({json.dumps(request)!a})))\n".encode()
        argv, patience = [ssh.python_on_host(host.access), "-"], request["seconds"] + 20
        try:
            if ssh.is_this_machine(host.destination):
                done = subprocess.run(argv, input=script, capture_output=True, timeout=patience, cwd="/")
                return done.stdout.decode(errors="replace") + done.stderr.decode(errors="replace")
            result = ssh.run(host.destination, argv, stdin=script, timeout_seconds=patience, check=False)
        except (UserError, OSError, subprocess.TimeoutExpired) as error:
            return str(error)
        return result.stdout + result.stderr

    with ThreadPoolExecutor(len(cluster.hosts)) as pool:
        return parse_speeds("\n".join(pool.map(start, cluster.hosts)))


def _make_requests(recipe: Recipe, plan: Plan, cluster: Cluster, facts: AllFacts) -> dict[str, dict[str, Any]]:
    """Return {host: JSON request for measure_hardware.py}: backend, rendezvous, ranks, time limits and environment.

    On a single host the port is one that is free now.
    """
    several = len(cluster.hosts) > 1
    cards = preflight.host_env(facts) if several else {}
    firsts = itertools.accumulate((host.slots for host in cluster.hosts), initial=0)
    ranks = {host.name: first for host, first in zip(cluster.hosts, firsts, strict=False)}
    points = list(ranks.values()) if several else list(range(cluster.world_size))
    links = facts[cluster.hosts[0].name].links
    same = {
        "backend": "nccl" if plan.device == "cuda" else "gloo",
        "address": _rendezvous_address(cluster, facts),
        "port": links.port.port if several and links and links.port else processes.free_port(0),
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


def _rendezvous_address(cluster: Cluster, facts: AllFacts) -> str:
    """Return the first host's address as another host reached it; 127.0.0.1 when no other host did."""
    first = cluster.hosts[0].name
    seen = [host.links.peers[first].address for name, host in facts.items() if name != first and host.links]
    return next(filter(None, seen), "127.0.0.1")


def parse_speeds(output: str) -> Speeds:
    """Return the speeds in the ranks' output. A group that began and did not end has failed.

    If no rank reported anything, the group () has failed, with the last lines of the output.
    """
    measured: dict[Ranks, Speed] = {}
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
            measured[ranks] = Speed(**{key: value for key, value in row.items() if key != "rank"})
    for ranks in begun - set(measured) - set(failed):
        failed[ranks] = "it began and never ended"
    if not begun and not failed:
        failed[()] = "\n".join(output.strip().splitlines()[-5:]) or "no rank said anything"
    return Speeds(measured, {ranks: why for ranks, why in failed.items() if ranks not in measured})


def judge(plan: Plan, cluster: Cluster, speeds: Speeds) -> list[HostFault]:
    """Return a fault for each dead (error) or slow (warning) link, on whichever of its two hosts has more such links.

    Slow is below 0.5 of a usual link (CPU ranks: 0.3; on a single host never). A failed group of more than two ranks
    counts only when no pair is dead, as a fault of the first host. Between GPU hosts, a usual link slower than
    half of hardware.network_gbit is a warning.
    """
    pairs: dict[Ranks, float] = {
        ranks: row.bus_bytes_per_second for ranks, row in speeds.measured.items() if len(ranks) == 2
    }
    dead = [ranks for ranks in speeds.failed if len(ranks) == 2]
    usual = _usual_speed(cluster, pairs)
    between = plan.device == "cuda" or len(cluster.hosts) > 1  # CPU ranks of one host share nothing but its cores
    slow = [ranks for ranks, speed in pairs.items() if between and speed < SLOW[plan.device] * usual]
    names, hosts, faults = _name_ranks(plan, cluster), _rank_hosts(cluster), list[HostFault]()
    look = "`ethtool CARD` shows the speed of a card and `ip -s link` its errors; check cable, port and firewall"
    if len(cluster.hosts) == 1:
        look = "`nvidia-smi topo -m` and `nvidia-smi nvlink --status` show how the GPUs are linked"
    for bad in (dead, slow):
        level: Level = "error" if bad is dead else "warning"
        count = Counter(rank for ranks in bad for rank in ranks)
        for ranks in bad:
            if bad is dead:
                said = f" cannot talk: {speeds.failed[ranks]}"
            else:
                said = f": {_format_rate(pairs[ranks])}, a usual link here has {_format_rate(usual)}"
            evidence = f"{names[ranks[0]]} and {names[ranks[1]]}{said}"
            host = hosts[max(reversed(ranks), key=count.__getitem__)]
            faults.append((host, ("link", level, evidence, look)))
    if not dead:
        for ranks, why in speeds.failed.items():
            shows = "NCCL_DEBUG=INFO in env: shows where; the links between each two work"
            evidence = f"the all-reduce of {len(ranks) or cluster.world_size} ranks failed: {why}"
            fix = shows if pairs else "run it again by hand"
            faults.append((cluster.hosts[0].name, ("link", "error", evidence, fix)))
    promised = cluster.network_gbit * 1e9 / 8
    if plan.device == "cuda" and len(cluster.hosts) > 1 and pairs and usual < PROMISED * promised:
        plan_rate = f"{_format_rate(promised)} ({cluster.network_gbit:g} Gbit/s)"
        evidence = f"{_format_rate(usual)} between hosts; the plan reckons with {plan_rate}"
        fix = "set hardware.network_gbit to what there is, or find out why: `ethtool` and `ibstat` on the hosts"
        faults.append((cluster.hosts[0].name, ("link", "warning", evidence, fix)))
    return faults


def _usual_speed(cluster: Cluster, pairs: Mapping[Ranks, float]) -> float:
    """Return the bus bandwidth of a good link in bytes/s; 0.0 when no pair was measured.

    Inside a host it is the median link, between hosts the median of the best that each reaches.
    """
    if not pairs:
        return 0.0
    if len(cluster.hosts) == 1:  # where GPUs may be bridged in pairs by design
        return statistics.median(pairs.values())
    # Not the median link: a bad card makes most links of three hosts slow.
    ends = {rank for ranks in pairs for rank in ranks}
    return statistics.median(max(speed for ranks, speed in pairs.items() if rank in ranks) for rank in ends)


def _rank_hosts(cluster: Cluster) -> list[str]:
    """Return the name of each rank's host, in the order of the ranks."""
    return [host.name for host in cluster.hosts for _ in range(host.slots)]


def _name_ranks(plan: Plan, cluster: Cluster) -> list[str]:
    """Return each rank's name for people: its host, or "GPU n" (CPU: "rank n") when there is a single host."""
    if len(cluster.hosts) > 1:
        return _rank_hosts(cluster)
    kind = "GPU" if plan.device == "cuda" else "rank"
    return [f"{kind} {rank}" for rank in range(cluster.world_size)]


def _format_rate(bytes_per_second: float) -> str:
    """Return bytes/s as text in GB/s."""
    return f"{bytes_per_second / 1e9:.3g} GB/s"


def _print_speeds(plan: Plan, cluster: Cluster, names: Sequence[str], speeds: Speeds) -> None:
    """Print each group's bandwidth and latency, pairs first. `names` has a text for each rank."""
    backend = "NCCL" if plan.device == "cuda" else "gloo"
    for ranks, row in sorted(speeds.measured.items(), key=lambda item: (len(item[0]), item[0])):
        pair = len(ranks) == 2 and cluster.world_size > 2
        who = f"{names[ranks[0]]} - {names[ranks[1]]}" if pair else f"all {len(ranks)} ranks"
        size, seconds = format_bytes(row.bytes), f"{row.seconds * 1e3:.3g} ms"
        rate = _format_rate(row.bus_bytes_per_second)
        latency = f"{row.latency * 1e6:.0f} us"
        screen.show(
            f"{backend} all-reduce, {who:<16} {rate:>10} bus bandwidth ({size} in {seconds}), latency {latency}"
        )
