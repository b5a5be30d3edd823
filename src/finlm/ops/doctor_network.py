"""Checks of what lies between the hosts: names, logins, TCP, network cards, InfiniBand, clocks; and what to set for it.

Pure functions from the facts of probe_links.py. NCCL and gloo each guess which network card to use (gloo: the one with
the address of the host's own name, 127.0.1.1 on Debian), so on several hosts the card that leads to the others is set.
"""

from __future__ import annotations

import ipaddress
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from finlm.base.units import format_duration
from finlm.ops import ssh
from finlm.ops.doctor_checks import Fault
from finlm.plan.plan import Plan
from finlm.recipe.cluster import Cluster, Host
from finlm.recipe.schema import Recipe

# Steps take about a second, so that with more the events of two hosts cannot be put in order any more.
WARN_SKEW_SECONDS = 1.0
# The run's watchdog counts silence in minutes, and ninja on a shared cache builds by time stamps.
MAX_SKEW_SECONDS = 60.0
INTERFACE_KEYS = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")

AllFacts = Mapping[str, Mapping[str, Any]]
HostFault = tuple[str, Fault]


def host_env(facts: AllFacts) -> dict[str, dict[str, str]]:
    """What to set on each host so that its ranks talk through the card that leads to the other hosts."""
    env: dict[str, dict[str, str]] = {name: {} for name in facts}
    for name, one in facts.items():
        card = _card(one)
        if card:
            # NCCL takes a bare name as a prefix: eno1 would also mean eno10.
            env[name] = {"NCCL_SOCKET_IFNAME": f"={card}", "GLOO_SOCKET_IFNAME": card}
    with_infiniband = [name for name, one in facts.items() if _active_ports(one)]
    if with_infiniband and len(with_infiniband) < len(facts):
        for settings in env.values():
            settings["NCCL_IB_DISABLE"] = "1"  # all over the same kind of network, or the first collective fails
    return env


def _card(facts: Mapping[str, Any]) -> str | None:
    """The interface through which this host called the most of the others; never loopback."""
    links = facts.get("links") or {}
    local = Counter(peer["local"] for peer in (links.get("peers") or {}).values() if peer["local"])
    for address, _ in local.most_common():
        for card in links.get("network") or []:
            if address in card["addresses"] and not any(map(_is_loopback, card["addresses"])):
                return str(card["name"])
    return None


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address).is_loopback


def _active_ports(facts: Mapping[str, Any]) -> list[str]:
    ports = (facts.get("links") or {}).get("infiniband") or []
    return [f"{one['device']}:{one['port']} ({one['rate']})" for one in ports if one["active"]]


def of_links(recipe: Recipe, plan: Plan, cluster: Cluster, facts: AllFacts) -> Iterator[HostFault]:
    """Everything wrong between the hosts."""
    asked = [host for host in cluster.hosts if (facts.get(host.name) or {}).get("links")]
    for host in asked:
        links = facts[host.name]["links"]
        faults = [*_port(recipe, host, cluster, links), *_cards_set(recipe, host, links)]
        if len(cluster.hosts) > 1:
            faults += [*_calls(host, links, facts), *_logins(host, links)]
        yield from ((host.name, fault) for fault in faults)
    yield from _infiniband(plan, {host.name: facts[host.name] for host in asked})
    yield from _clocks({host.name: facts[host.name] for host in cluster.hosts if host.name in facts})


def _port(recipe: Recipe, host: Host, cluster: Cluster, links: Mapping[str, Any]) -> Iterator[Fault]:
    """The rendezvous port must be free on the first host; one chosen by the launcher is free anyway."""
    port = links["port"]
    if port and not port["free"] and host == cluster.hosts[0] and recipe.launch.master_port != "auto":
        number = port["port"]
        evidence = f"cannot listen on port {number}: {port['error']}"
        fix = f"`ss -ltnp 'sport = :{number}'` names the process; end it, or set launch.master_port to auto"
        yield "port", "error", evidence, fix


def _calls(host: Host, links: Mapping[str, Any], facts: AllFacts) -> Iterator[Fault]:
    """Whether every other host was reached, by its name, and was the right one."""
    unresolved, dead = [], []
    for name, peer in links["peers"].items():
        listening = (facts.get(name) or {}).get("links")
        if peer["unresolved"]:
            unresolved.append(name)
        if peer["answered"] is not None and peer["answered"] != name:
            evidence = f"on {host.name} the name {name} leads to {peer['answered']} ({peer['address']})"
            fix = "correct /etc/hosts or DNS there; a host must not be `localhost` in a hostfile of several"
            yield "names", "error", evidence, fix
        elif peer["answered"] is None and listening and listening["port"]["free"]:
            dead.append(f"{name}: {peer['error'] or 'no answer'}")
    if dead:
        evidence = f"no TCP connection from {host.name} to port {links['port']['port']} of " + "; ".join(dead)
        fix = "check cable, VLAN and firewall between the two: ranks talk to each other on arbitrary high ports"
        yield "reach", "error", evidence, fix
    if unresolved:
        evidence = f"{host.name} does not know the name {', '.join(unresolved)}"
        yield "names", "warning", evidence, f"add every host of the hostfile to /etc/hosts of {host.name}, or to DNS"


def _logins(host: Host, links: Mapping[str, Any]) -> Iterator[Fault]:
    """Logins from host to host. Ranks do not need them, and finlm starts them from here; DeepSpeed's launcher does."""
    failed = {name: done["error"] for name, done in links["ssh"].items() if done["code"] != 0}
    if not failed:
        return
    lines = []
    for name, said in failed.items():
        known = ssh.reason(name, said)
        to = "itself" if name == host.name else name
        lines.append(f"{to}: {known.problem if known else said or 'ssh failed'}")
    evidence = f"{host.name} cannot log in without a password to " + "\n".join(lines)
    fix = f"only `deepspeed --hostfile` started on {host.name} needs it; there: ssh-copy-id and ssh once to each"
    yield "logins", "warning", evidence, fix


def _cards_set(recipe: Recipe, host: Host, links: Mapping[str, Any]) -> Iterator[Fault]:
    """An interface that recipe or hosts: names must exist on the host and have an address.

    NCCL takes a list of prefixes, or of exact names after "=", and wants one of them; gloo wants all of its names.
    """
    cards = {card["name"]: card["addresses"] for card in links["network"] or []}
    for key in INTERFACE_KEYS:
        own = host.access.env.get(key)
        value = own or recipe.env.get(key)
        if not value or not cards or value.startswith("^"):
            continue
        names = value.lstrip("=").split(",")
        exact = key.startswith("GLOO") or value.startswith("=")
        usable = [card for card, addresses in cards.items() if addresses]
        missing = [n for n in names if not any(card == n or (not exact and card.startswith(n)) for card in usable)]
        if missing and (key.startswith("GLOO") or len(missing) == len(names)):
            where = f"hosts.{host.name}.env" if own else "env"
            listed = ", ".join(f"{card} ({cards[card][0]})" for card in usable)
            evidence = (
                f"{where} sets {key}={value}, but {host.name} has no {', '.join(missing)} with an address: {listed}"
            )
            yield "nic", "error", evidence, f"remove it: the card is found; or set it in hosts.{host.name}.env"


def _infiniband(plan: Plan, facts: AllFacts) -> Iterator[HostFault]:
    """NCCL takes InfiniBand where it finds it, so a host without it, or with a dead port, makes all use TCP."""
    active = {name: _active_ports(one) for name, one in facts.items()}
    most = max(map(len, active.values()), default=0)
    for name, ports in active.items():
        if plan.device == "cuda" and len(ports) < most:
            other = next(host for host, listed in active.items() if len(listed) == most)
            evidence = (
                f"{len(ports)} active InfiniBand port(s) on {name}, {most} on {other} ({', '.join(active[other])})"
            )
            slow = "all hosts use TCP (NCCL_IB_DISABLE=1 is set)" if not ports else f"{name} is slower than the others"
            fix = f"`ibstat` on {name} shows port and cable; until then {slow}"
            yield name, ("infiniband", "warning", evidence, fix)


def _clocks(facts: AllFacts) -> Iterator[HostFault]:
    """Clocks against each other: the smallest error that the times of asking and answering allow for."""
    bounds = {name: one["clock"] for name, one in facts.items() if one.get("clock")}
    if len(bounds) < 2:
        return
    middle = {name: (low + high) / 2 for name, (low, high) in bounds.items()}
    common = statistics.median(middle.values()) if len(middle) > 2 else next(iter(middle.values()))
    reference = min(middle, key=lambda name: abs(middle[name] - common))
    least, most = bounds[reference]
    for name, (low, high) in bounds.items():
        ahead, behind = low - most, least - high
        skew = max(ahead, behind)
        if name != reference and skew > WARN_SKEW_SECONDS:
            side = "ahead of" if ahead > behind else "behind"
            evidence = f"the clock of {name} is at least {format_duration(skew)} {side} that of {reference}"
            fix = "`timedatectl set-ntp true` there, or start chronyd; `timedatectl` shows whether it is synchronized"
            yield name, ("clock", "error" if skew > MAX_SKEW_SECONDS else "warning", evidence, fix)
