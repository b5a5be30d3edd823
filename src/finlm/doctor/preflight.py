"""Find in the hosts' facts what would make a run fail or crawl, before anything starts.

`judge` is pure: it gets recipe, plan, cluster and facts (of the probes), and returns findings. An "error" stops `finlm
train`, a "warning" does not. Every finding has the numbers it was made from and a fix. A fact that the probes could not
get is unknown, not wrong: a healthy cluster gives no finding. Hosts are also compared with each other: the reference
for versions is what most hosts have (of two, the first); for code and data it is this machine. A single host takes
about a second, three over ssh 3.

Between the hosts, names, logins, TCP, network cards, InfiniBand and clocks are checked. NCCL and gloo each guess which
network card to use (gloo: the card with the address of the host's name, 127.0.1.1 on Debian), so on several hosts the
card that leads to the others is set (host_env).

Does not read the data, cannot see faults that only show under load, and measures speed only when asked (speed.py).
"""

from __future__ import annotations

import ipaddress
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from finlm.base import screen
from finlm.base.units import format_duration
from finlm.doctor import gpus, machine
from finlm.doctor.gather import AllFacts, HostFacts
from finlm.doctor.machine import Fault, HostFault
from finlm.hosts import file_trees, ssh
from finlm.hosts.file_trees import CheckedTree
from finlm.hosts.remote.links import Links
from finlm.plan.plan import Plan
from finlm.recipe.cluster import Cluster, Host, is_local
from finlm.recipe.schema import Recipe

# Columns of the table: the checks they stand for, and the facts without which nothing was examined.
COLUMNS: dict[str, tuple[tuple[str, ...], str]] = {
    "login": (("ssh", "probe"), ""),
    "sync": (("sync",), "rsync"),
    "python": (("python",), "python"),
    "packages": (("packages", "versions", "torch", "nccl"), "packages"),
    "GPU": (("driver", "gpus", "gpu-memory", "gpu-processes", "gpu-health", "precision"), "gpu"),
    "memory": (("memory", "shm", "cores"), "memory"),
    "disk": (("disk", "nvme"), "disks"),
    "limits": (("open-files", "memlock"), "limits"),
    "build": (("compiler", "libaio", "build-lock"), "extensions"),
    "network": (("names", "reach", "nic", "port", "infiniband", "link"), "links"),
    "logins": (("logins",), "links"),
    "clock": (("clock",), "clock"),
    "code": (("code",), "trees"),
    "data": (("data", "model"), "trees"),
}


@dataclass(frozen=True)
class Finding:
    """A fault of a host: the check that it failed, the level, the evidence and the fix."""

    check: str
    host: str
    level: machine.Level
    evidence: str
    fix: str


def judge(
    recipe: Recipe, plan: Plan, cluster: Cluster, facts: AllFacts, trees: Sequence[CheckedTree] = ()
) -> list[Finding]:
    """Return all findings on the cluster's hosts, errors first.

    `facts` maps host names to facts, from gather(). `trees` are the files of this machine to compare with the hosts'.
    Raises UserError for an unknown model type.
    """
    known = {name: host for name, host in facts.items() if not host.failed}
    faults = list(_check_hosts(recipe, plan, cluster, facts, known))
    between = [
        *machine.check_versions(recipe, plan, known),
        *gpus.check_devices(plan, cluster, known),
        *check_links(recipe, plan, cluster, known),
        *check_trees(trees, known),
    ]
    # A package that differs from the other hosts' also differs from the pin: one cause, one finding.
    odd = {host for host, fault in between if fault[0] == "versions"}
    faults = [(host, fault) for host, fault in faults if not (host in odd and fault[:2] == ("packages", "warning"))]
    findings = [Finding(name, host, level, evidence, fix) for host, (name, level, evidence, fix) in faults + between]
    return sorted(findings, key=lambda finding: finding.level)


def _check_hosts(recipe: Recipe, plan: Plan, cluster: Cluster, facts: AllFacts, known: AllFacts) -> Iterator[HostFault]:
    """Yield the faults of each host by itself, of hosts that did not answer, and of probes that failed.

    `known` has the facts of the hosts that answered. Raises UserError for an unknown model type.
    """
    alone = len(plan.hosts) == 1
    for host in cluster.hosts:
        if host.name not in known:
            yield host.name, _explain_unreached(host.name, facts.get(host.name))
            continue
        gathered = known[host.name]
        for program in ("host", "gpu", "links", "trees"):
            if program in gathered.errors:
                evidence = f"the probe of {program} failed: {gathered.errors[program]}"
                yield host.name, ("probe", "warning", evidence, f"what it would tell is unknown; see ssh {host.name}")
        yield from ((host.name, fault) for fault in machine.check_host(recipe, plan, host, gathered, alone))
        yield from ((host.name, fault) for fault in gpus.check_gpus(plan, host, gathered))


def _explain_unreached(name: str, facts: HostFacts | None) -> Fault:
    """Return the fault of a host that could not be asked; `facts` has the reason, if known."""
    if facts is None or facts.failed is None:
        return "ssh", "error", "no facts of this host were gathered", f"try `ssh {name} python3 -V`"
    failed = facts.failed
    check = "python" if "python3 is not installed" in failed.problem else "ssh"
    return check, "error", f"{failed.problem}\n{failed.evidence}".rstrip(), failed.fix


def this_machine(plan: Plan) -> Cluster:
    """Return a cluster of this machine alone, with the slots and GPU kind that the plan gives it.

    If the plan does not name this machine, it is localhost with those of the plan's first host.
    """
    planned = next((host for host in plan.hosts if is_local(host.name)), plan.hosts[0])
    return Cluster((Host(planned.name if is_local(planned.name) else "localhost", planned.slots, planned.gpu),))


def show_table(plan: Plan, cluster: Cluster, facts: AllFacts, findings: Sequence[Finding]) -> None:
    """Print a table with a row per host and a column per group of checks that was examined on at least one host."""
    rows = [list(_cells(host.name, facts.get(host.name, HostFacts()), findings, plan)) for host in cluster.hosts]
    shown = [index for index in range(len(COLUMNS)) if any(row[index] != "-" for row in rows)]
    header = ["host", *(list(COLUMNS)[index] for index in shown)]
    named = zip((host.name for host in cluster.hosts), rows, strict=True)
    screen.table(header, [[name, *(row[index] for index in shown)] for name, row in named])


def show(findings: Sequence[Finding]) -> None:
    """Print the findings with their evidence and fixes, and how many there are."""
    for finding in findings:
        screen.show(f"{finding.level}: {finding.check} on {finding.host}")
        screen.show("  evidence: " + finding.evidence.replace("\n", "\n            "))
        screen.show("  fix:      " + finding.fix.replace("\n", "\n            "))
    errors = sum(finding.level == "error" for finding in findings)
    if findings:
        screen.show(f"doctor: {errors} error(s), {len(findings) - errors} warning(s)")
    else:
        screen.show("doctor: nothing wrong")


def _cells(name: str, facts: HostFacts, findings: Sequence[Finding], plan: Plan) -> Iterator[str]:
    """Yield, for each column of a host's row, "ok", "warn" or "FAIL"; "-" where nothing was examined."""
    unneeded = ("GPU",) * (plan.device == "cpu") + ("logins", "clock") * (len(plan.hosts) == 1)
    for column, (checks, needs) in COLUMNS.items():
        levels = {finding.level for finding in findings if finding.host == name and finding.check in checks}
        if needs == "trees":
            examined = any(role in (facts.trees or {}) for role in checks)
        else:
            examined = bool(getattr(facts, needs)) if needs else not facts.failed
        if needs in ("packages", "extensions"):
            examined = examined and facts.has_python_of_ranks
        if levels:
            yield "FAIL" if "error" in levels else "warn"
        else:
            yield "ok" if examined and column not in unneeded else "-"


SHOWN_FILES = 5


def check_trees(trees: Sequence[CheckedTree], facts: AllFacts) -> Iterator[HostFault]:
    """Yield an error per host and tree (code, data, model) whose files are missing or differ from this machine's.

    Skips trees that a host was not asked about.
    """
    for name, host in facts.items():
        for tree in trees:
            hashes = (host.trees or {}).get(tree.role)
            if hashes is None:
                continue
            other = list(file_trees.differences(tree, hashes))
            if not other:
                continue
            if not any(hashes.values()):
                lines = [f"{tree.path} is not there"]
            else:
                lines = [f"{len(other)} of {len(tree.files)} files of {tree.path} differ", *other[:SHOWN_FILES]]
                lines += ["..."] * (len(other) > SHOWN_FILES)
            fix = {
                "code": "`finlm sync` copies the code and proves it equal; `finlm train` does so for its own copy",
                "data": "`finlm train` copies the shards; a directory given as data.prepared must be there",
                "model": "`finlm train` copies the directory of model.init_from, which must be on this machine",
            }[tree.role]
            yield name, (tree.role, "error", "\n".join(lines), fix)


# Steps take about a second, so that with more the events of two hosts cannot be put in order any more.
WARN_SKEW_SECONDS = 1.0
# The run's watchdog counts silence in minutes, and ninja on a shared cache builds by time stamps.
MAX_SKEW_SECONDS = 60.0
INTERFACE_KEYS = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")


def host_env(facts: AllFacts) -> dict[str, dict[str, str]]:
    """Return {host: variables} that make NCCL and gloo use the network card that leads to the other hosts.

    A host whose card is not known gets none. If only some hosts have active InfiniBand, it is disabled on all.
    """
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
    """Return {host: address at which most other hosts reached it in doctor's probe}.

    Leaves out hosts that nobody reached.
    """
    counts: dict[str, Counter[str]] = {}  # SSH_CONNECTION, the other source, may name a jump host
    for host in facts.values():
        for name, call in (host.links.peers if host.links else {}).items():
            if call.answered == name and call.address:
                counts.setdefault(name, Counter())[call.address] += 1
    return {name: addresses.most_common(1)[0][0] for name, addresses in counts.items()}


def _find_card(facts: HostFacts) -> str | None:
    """Return the interface, not loopback, through which this host reached most of the others; None when unknown."""
    if facts.links is None:
        return None
    local = Counter(call.local for call in facts.links.peers.values() if call.local)
    for address, _ in local.most_common():
        for card in facts.links.network or []:
            if address in card.addresses and not any(ipaddress.ip_address(each).is_loopback for each in card.addresses):
                return card.name
    return None


def _active_ports(facts: HostFacts) -> list[str]:
    """Return a text for each active InfiniBand port of the host, with its rate."""
    return [f"{port.device}:{port.port} ({port.rate})" for port in facts.infiniband if port.active]


def check_links(recipe: Recipe, plan: Plan, cluster: Cluster, facts: AllFacts) -> Iterator[HostFault]:
    """Yield the faults between the hosts; where two names mean the same machine, only that."""
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
    """Yield an error if `host` is the first host and cannot listen on a launch.master_port that is not `auto`."""
    port = links.port
    if port and not port.free and host == cluster.hosts[0] and recipe.launch.master_port != "auto":
        fix = f"`ss -ltnp 'sport = :{port.port}'` names the process; end it, or set launch.master_port to auto"
        yield "port", "error", f"cannot listen on port {port.port}: {port.error}", fix


_HIGH_PORTS = "ranks talk to each other on arbitrary high ports"


def _find_same_machines(hosts: Sequence[Host], facts: AllFacts) -> Iterator[HostFault]:
    """Yield an error for each host that is the same machine as an earlier host, for example by an alias."""
    first: dict[str, str] = {}
    for host in hosts:
        machine = facts[host.name].machine
        other = first.setdefault(machine, host.name) if machine else host.name
        if other != host.name:
            evidence = f"{other} and {host.name} are the same machine ({facts[host.name].hostname})"
            yield host.name, ("names", "error", evidence, f"one line a machine: take {host.name} out of the hostfile")


def _is_shut(name: str, links: Mapping[str, Links]) -> bool:
    """Return whether no other host could connect to the host `name`, although it listened; False when unknown."""
    calls = [each.peers.get(name) for host, each in links.items() if host != name]
    return _listens(links[name]) and all(call is not None and call.answered is None for call in calls)


def _listens(links: Links | None) -> bool:
    """Return whether a host could listen on the rendezvous port; False when unknown."""
    return links is not None and links.port is not None and links.port.free


def _check_calls(host: Host, links: Mapping[str, Links], shut: set[str]) -> Iterator[Fault]:
    """Yield an error for hosts, but those in `shut`, that listened and did not answer this host's call.

    Yields warnings for names that it cannot resolve or that lead to another host.
    """
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
    """Yield a warning when a host cannot log in to others over ssh, which only DeepSpeed's own launcher needs."""
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
    """Yield an error for interfaces named in `env:` or hosts.<name>.env that do not exist on the host with an address.

    A list of exceptions ("^") is not checked, nor is any while the host's interfaces are unknown.
    """
    cards = {card.name: card.addresses for card in links.network or []}
    for key in INTERFACE_KEYS:
        of_host = host.access.env.get(key)
        value = of_host or recipe.env.get(key)
        if not value or not cards or value.startswith("^"):
            continue
        # NCCL takes prefixes, or exact names after "=", and needs one of them; gloo needs all of its names.
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
    """Yield a warning for each GPU host with fewer active InfiniBand ports than the host that has most."""
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
    """Yield a fault for each host whose clock is certainly off by more than 1 s (warning) or 60 s (error).

    The reference is the host nearest to the median; of two hosts, the first.
    """
    bounds = {name: host.clock for name, host in facts.items() if host.clock}
    if len(bounds) < 2:
        return
    middle = {name: (low + high) / 2 for name, (low, high) in bounds.items()}
    common = statistics.median(middle.values()) if len(middle) > 2 else next(iter(middle.values()))
    reference = min(middle, key=lambda name: abs(middle[name] - common))
    least, most = bounds[reference]
    for name, (low, high) in bounds.items():
        ahead, behind = low - most, least - high  # at least, whatever the delay of the answers
        skew = max(ahead, behind)
        if name != reference and skew > WARN_SKEW_SECONDS:
            side = "ahead of" if ahead > behind else "behind"
            evidence = f"the clock of {name} is at least {format_duration(skew)} {side} that of {reference}"
            fix = "`timedatectl set-ntp true` there, or start chronyd; `timedatectl` shows whether it is synchronized"
            yield name, ("clock", "error" if skew > MAX_SKEW_SECONDS else "warning", evidence, fix)
