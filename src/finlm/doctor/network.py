"""Check what lies between the hosts: names, logins, TCP, network cards, InfiniBand, clocks; derive what to set for it.

Pure functions from the facts of hosts/remote/links.py. NCCL and gloo each guess which network card to use (gloo: the
card with the address of the host's own name, 127.0.1.1 on Debian), so on several hosts the card that leads to the
others is set.
"""

from __future__ import annotations

import ipaddress
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from finlm.base.units import format_duration
from finlm.doctor.gather import AllFacts, HostFacts
from finlm.doctor.machine import Fault
from finlm.hosts import ssh
from finlm.hosts.remote.links import Links
from finlm.plan.plan import Plan
from finlm.recipe.cluster import Cluster, Host
from finlm.recipe.schema import Recipe

# Steps take about a second, so that with more the events of two hosts cannot be put in order any more.
WARN_SKEW_SECONDS = 1.0
# The run's watchdog counts silence in minutes, and ninja on a shared cache builds by time stamps.
MAX_SKEW_SECONDS = 60.0
INTERFACE_KEYS = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")

HostFault = tuple[str, Fault]


def host_env(facts: AllFacts) -> dict[str, dict[str, str]]:
    """Return by host the variables that bind ranks to the card that leads to the others; InfiniBand for all or none."""
    env: dict[str, dict[str, str]] = {name: {} for name in facts}
    for name, host in facts.items():
        card = _find_card(host)
        if card:
            # NCCL takes a bare name as a prefix: eno1 would also mean eno10.
            env[name] = {"NCCL_SOCKET_IFNAME": f"={card}", "GLOO_SOCKET_IFNAME": card}
    with_infiniband = [name for name, host in facts.items() if _active_ports(host)]
    if with_infiniband and len(with_infiniband) < len(facts):
        for settings in env.values():
            settings["NCCL_IB_DISABLE"] = "1"  # all over the same kind of network, or the first collective fails
    return env


def find_addresses(facts: AllFacts) -> dict[str, str]:
    """Return by host the address at which most others reached it in doctor's meeting, without hosts nobody reached.

    SSH_CONNECTION, the other source, names the jump host where ssh goes over a jump host.
    """
    counts: dict[str, Counter[str]] = {}
    for host in facts.values():
        for name, call in (host.links.peers if host.links else {}).items():
            if call.answered == name and call.address:
                counts.setdefault(name, Counter())[call.address] += 1
    return {name: addresses.most_common(1)[0][0] for name, addresses in counts.items()}


def _find_card(facts: HostFacts) -> str | None:
    """Return the interface through which this host called most of the others, never loopback; None when unknown."""
    if facts.links is None:
        return None
    local = Counter(call.local for call in facts.links.peers.values() if call.local)
    for address, _ in local.most_common():
        for card in facts.links.network or []:
            if address in card.addresses and not any(map(_is_loopback, card.addresses)):
                return card.name
    return None


def _is_loopback(address: str) -> bool:
    """Return whether an IP address is a loopback address."""
    return ipaddress.ip_address(address).is_loopback


def _active_ports(facts: HostFacts) -> list[str]:
    """Return the host's active InfiniBand ports with their rates, as words."""
    return [f"{port.device}:{port.port} ({port.rate})" for port in facts.infiniband if port.active]


def check_links(recipe: Recipe, plan: Plan, cluster: Cluster, facts: AllFacts) -> Iterator[HostFault]:
    """Yield everything wrong between the hosts, each with the host's name."""
    links_of = {name: host.links for name, host in facts.items() if host.links}
    asked = [host for host in cluster.hosts if host.name in links_of]
    if same := list(_find_same_machines(asked, facts)):
        yield from same
        return  # what two names of one machine say of each other would only confuse
    shut = {host.name for host in asked if len(asked) > 2 and _is_shut(host.name, links_of)}
    for name in sorted(shut):
        evidence = f"no other host gets a TCP connection to {name}, which gets through to some of them"
        yield name, ("reach", "error", evidence, f"its firewall or VLAN: {_HIGH_PORTS}")
    for host in asked:
        links = links_of[host.name]
        faults = [*_check_port(recipe, host, cluster, links), *_check_interfaces(recipe, host, links)]
        if len(cluster.hosts) > 1:
            faults += [*_check_calls(host, links_of, shut), *_check_logins(host, links)]
        yield from ((host.name, fault) for fault in faults)
    yield from _check_infiniband(plan, {host.name: facts[host.name] for host in asked})
    yield from _check_clocks({host.name: facts[host.name] for host in cluster.hosts if host.name in facts})


def _check_port(recipe: Recipe, host: Host, cluster: Cluster, links: Links) -> Iterator[Fault]:
    """Yield when launch.master_port cannot be listened on, on the first host; an `auto` port is free anyway."""
    port = links.port
    if port and not port.free and host == cluster.hosts[0] and recipe.launch.master_port != "auto":
        number = port.port
        evidence = f"cannot listen on port {number}: {port.error}"
        fix = f"`ss -ltnp 'sport = :{number}'` names the process; end it, or set launch.master_port to auto"
        yield "port", "error", evidence, fix


_HIGH_PORTS = "ranks talk to each other on arbitrary high ports"


def _find_same_machines(hosts: Sequence[Host], facts: AllFacts) -> Iterator[HostFault]:
    """Yield two lines of the hostfile that lead to one machine, as an alias does."""
    first: dict[str, str] = {}
    for host in hosts:
        machine = facts[host.name].machine
        other = first.setdefault(machine, host.name) if machine else host.name
        if other != host.name:
            evidence = f"{other} and {host.name} are the same machine ({facts[host.name].hostname})"
            yield host.name, ("names", "error", evidence, f"one line a machine: take {host.name} out of the hostfile")


def _is_shut(name: str, links: Mapping[str, Links]) -> bool:
    """Return whether no other host reached this one, although it listened."""
    calls = [each.peers.get(name) for host, each in links.items() if host != name]
    return _listens(links[name]) and all(call is not None and call.answered is None for call in calls)


def _listens(links: Links | None) -> bool:
    """Return whether a host could listen on the rendezvous port."""
    return links is not None and links.port is not None and links.port.free


def _check_calls(host: Host, links: Mapping[str, Links], shut: set[str]) -> Iterator[Fault]:
    """Yield hosts that were not reached by name, or where another host answered. shut: hosts that nobody reached."""
    unresolved, dead = [], []
    for name, call in links[host.name].peers.items():
        if call.unresolved:
            unresolved.append(name)
        if call.answered is not None and call.answered != name:
            evidence = f"on {host.name} the name {name} leads to {call.answered} ({call.address})"
            fix = "correct /etc/hosts or DNS there; the ranks use the addresses of the ssh connections meanwhile"
            yield "names", "warning", evidence, fix
        elif call.answered is None and _listens(links.get(name)) and name not in shut:
            dead.append(f"{name}: {call.error or 'no answer'}")
    if dead and (port := links[host.name].port):
        evidence = f"no TCP connection from {host.name} to port {port.port} of " + "; ".join(dead)
        fix = f"check cable, VLAN and firewall between the two: {_HIGH_PORTS}"
        yield "reach", "error", evidence, fix
    if unresolved:
        evidence = f"{host.name} does not know the name {', '.join(unresolved)}"
        yield "names", "warning", evidence, f"add every host of the hostfile to /etc/hosts of {host.name}, or to DNS"


def _check_logins(host: Host, links: Links) -> Iterator[Fault]:
    """Yield when a host cannot log in to others. Only DeepSpeed's launcher needs it: finlm starts ranks from here."""
    failed = {name: done.error for name, done in links.ssh.items() if done.code != 0}
    if not failed:
        return
    lines = []
    for name, error in failed.items():
        known = ssh.reason(name, error)
        to = "itself" if name == host.name else name
        lines.append(f"{to}: {known.problem if known else error or 'ssh failed'}")
    evidence = f"{host.name} cannot log in without a password to " + "\n".join(lines)
    fix = f"only `deepspeed --hostfile` started on {host.name} needs it; there: ssh-copy-id and ssh once to each"
    yield "logins", "warning", evidence, fix


def _check_interfaces(recipe: Recipe, host: Host, links: Links) -> Iterator[Fault]:
    """Yield interfaces that `env:` or hosts.<name>.env names and that do not exist on the host with an address.

    NCCL takes a list of prefixes, or of exact names after "=", and wants one of them; gloo wants all of its names.
    """
    cards = {card.name: card.addresses for card in links.network or []}
    for key in INTERFACE_KEYS:
        of_host = host.access.env.get(key)
        value = of_host or recipe.env.get(key)
        if not value or not cards or value.startswith("^"):
            continue
        names = value.lstrip("=").split(",")
        exact = key.startswith("GLOO") or value.startswith("=")
        usable = [card for card, addresses in cards.items() if addresses]
        missing = [n for n in names if not any(card == n or (not exact and card.startswith(n)) for card in usable)]
        if missing and (key.startswith("GLOO") or len(missing) == len(names)):
            where = f"hosts.{host.name}.env" if of_host else "env"
            listed = ", ".join(f"{card} ({cards[card][0]})" for card in usable)
            evidence = (
                f"{where} sets {key}={value}, but {host.name} has no {', '.join(missing)} with an address: {listed}"
            )
            yield "nic", "error", evidence, f"remove it: the card is found; or set it in hosts.{host.name}.env"


def _check_infiniband(plan: Plan, facts: AllFacts) -> Iterator[HostFault]:
    """Yield hosts with fewer active InfiniBand ports than others: without any, all hosts have to use TCP."""
    active = {name: _active_ports(host) for name, host in facts.items()}
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


def _check_clocks(facts: AllFacts) -> Iterator[HostFault]:
    """Yield hosts whose clock surely differs from the reference's by more than 1 s, whatever the answer's delay was.

    The reference is the host nearest to the median, of two hosts the first.
    """
    bounds = {name: host.clock for name, host in facts.items() if host.clock}
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
