"""Preflight: what would make a run fail or crawl, told from the hosts' facts before anything starts.

`judge` is pure: recipe, plan, cluster and facts (of the probes) in, findings out. An "error" stops `finlm train`, a
"warning" does not. Every finding carries the numbers it was made from and a way to mend it. A fact the probes could not
get is unknown, not wrong: a healthy cluster gives no finding. One host takes about a second, three over ssh 3.

Does not look into the data, does not see faults that only show under load, and measures speed only when asked
(doctor_speed).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finlm.base import screen
from finlm.ops import doctor_checks, doctor_gpu, doctor_hosts, doctor_network
from finlm.ops.doctor_checks import Fault
from finlm.ops.doctor_gather import gather
from finlm.ops.doctor_network import AllFacts, HostFault
from finlm.ops.doctor_trees import Tree
from finlm.plan.plan import Plan
from finlm.recipe.cluster import Cluster, Host, is_local
from finlm.recipe.schema import Recipe

# Columns of the table: the checks they stand for, and the facts without which nothing was examined.
COLUMNS: dict[str, tuple[tuple[str, ...], str]] = {
    "login": (("ssh", "probe"), ""),
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
SECTIONS = ("python", "packages", "memory", "disks", "shm", "limits", "tools", "libaio", "gpu", "extensions", "cores")


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong on one host."""

    check: str
    host: str
    level: doctor_checks.Level
    evidence: str
    fix: str

    def to_json(self) -> dict[str, str]:
        """The finding as the command line prints it."""
        return dataclasses.asdict(self)


def check(recipe: Recipe, plan: Plan, cluster: Cluster, runs: Path) -> list[Finding]:
    """Ask every host and judge: what `finlm train` does before it starts."""
    return judge(recipe, plan, cluster, gather(recipe, plan, cluster, runs))


def judge(recipe: Recipe, plan: Plan, cluster: Cluster, facts: AllFacts, trees: Sequence[Tree] = ()) -> list[Finding]:
    """Everything wrong on the cluster's hosts, errors first. `facts` maps a host's name to what gather() got."""
    known = {name: dict.fromkeys(SECTIONS) | dict(one) for name, one in facts.items() if "failed" not in one}
    faults = list(_of_each_host(recipe, plan, cluster, facts, known))
    between = [
        *doctor_hosts.of_versions(recipe, plan, known),
        *doctor_hosts.of_devices(plan, cluster, known),
        *doctor_network.of_links(recipe, plan, cluster, known),
        *doctor_hosts.of_trees(trees, known),
    ]
    # A package that differs from the other hosts' also differs from the pin: one cause, one finding.
    odd = {host for host, fault in between if fault[0] == "versions"}
    faults = [(host, fault) for host, fault in faults if not (host in odd and fault[:2] == ("packages", "warning"))]
    findings = [Finding(name, host, level, evidence, fix) for host, (name, level, evidence, fix) in faults + between]
    return sorted(findings, key=lambda finding: finding.level)


def _of_each_host(
    recipe: Recipe, plan: Plan, cluster: Cluster, facts: AllFacts, known: Mapping[str, Mapping[str, Any]]
) -> Iterator[HostFault]:
    alone = len(plan.hosts) == 1
    for host in cluster.hosts:
        if host.name not in known:
            yield host.name, _unreached(host.name, facts.get(host.name, {}).get("failed"))
            continue
        one = known[host.name]
        for program in ("host", "gpu", "links", "trees"):
            if program in (one.get("errors") or {}):
                evidence = f"the probe of {program} failed: {one['errors'][program]}"
                yield host.name, ("probe", "warning", evidence, f"what it would tell is unknown; see ssh {host.name}")
        yield from ((host.name, fault) for fault in doctor_checks.of_host(recipe, plan, host, one, alone))
        yield from ((host.name, fault) for fault in doctor_gpu.of_gpus(plan, host, one))


def _unreached(name: str, failed: Mapping[str, str] | None) -> Fault:
    if failed is None:
        return "ssh", "error", "no facts of this host were gathered", f"try `ssh {name} python3 -V`"
    python = "python3 is not installed" in failed["problem"]
    evidence = f"{failed['problem']}\n{failed['evidence']}".rstrip()
    return "python" if python else "ssh", "error", evidence, failed["fix"]


def this_machine(plan: Plan) -> Cluster:
    """This machine as the plan's host of its name, else as the plan's first one."""
    planned = next((host for host in plan.hosts if is_local(host.name)), plan.hosts[0])
    return Cluster((Host(planned.name if is_local(planned.name) else "localhost", planned.slots, planned.gpu),))


def show_table(plan: Plan, cluster: Cluster, facts: AllFacts, findings: Sequence[Finding]) -> None:
    """One row a host, one column for each group of checks; on stderr. Columns that no host was examined for are out."""
    rows = [list(_cells(host.name, facts.get(host.name, {}), findings, plan)) for host in cluster.hosts]
    shown = [index for index in range(len(COLUMNS)) if any(row[index] != "-" for row in rows)]
    header = ["host", *(list(COLUMNS)[index] for index in shown)]
    named = zip((host.name for host in cluster.hosts), rows, strict=True)
    screen.table(header, [[name, *(row[index] for index in shown)] for name, row in named])


def show(findings: Sequence[Finding]) -> None:
    """Findings for a person, on stderr."""
    for finding in findings:
        screen.say(f"{finding.level}: {finding.check} on {finding.host}")
        screen.say("  evidence: " + finding.evidence.replace("\n", "\n            "))
        screen.say("  fix:      " + finding.fix.replace("\n", "\n            "))
    errors = sum(finding.level == "error" for finding in findings)
    if findings:
        screen.say(f"doctor: {errors} error(s), {len(findings) - errors} warning(s)")
    else:
        screen.say("doctor: nothing wrong")


def _cells(name: str, facts: Mapping[str, Any], findings: Sequence[Finding], plan: Plan) -> Iterator[str]:
    """ok, warn or FAIL for each column; - where nothing was examined."""
    unneeded = ("GPU",) * (plan.device == "cpu") + ("logins", "clock") * (len(plan.hosts) == 1)
    for column, (checks, needs) in COLUMNS.items():
        levels = {finding.level for finding in findings if finding.host == name and finding.check in checks}
        if needs == "trees":
            examined = any(role in (facts.get("trees") or {}) for role in checks)
        else:
            examined = bool(facts.get(needs)) if needs else "failed" not in facts
        if needs in ("packages", "extensions"):
            examined = examined and doctor_checks.is_ranks_own(facts)
        if levels:
            yield "FAIL" if "error" in levels else "warn"
        else:
            yield "ok" if examined and column not in unneeded else "-"
