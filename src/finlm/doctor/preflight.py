"""Find what would make a run fail or crawl from the hosts' facts, before anything starts.

`judge` is pure: recipe, plan, cluster and facts (of the probes) in, findings out. An "error" stops `finlm train`, a
"warning" does not. Every finding carries the numbers it was made from and a way to mend it. A fact the probes could not
get is unknown, not wrong: a healthy cluster gives no finding. Hosts are also compared with each other: the reference
for versions is what most hosts have (of two, the first); for code and data it is this machine. A single host takes
about a second, three over ssh 3.

Does not look into the data, does not see faults that only show under load, and measures speed only when asked
(speed.py).
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from finlm.base import screen
from finlm.doctor import gpus, machine, network
from finlm.doctor.gather import AllFacts, HostFacts, gather
from finlm.doctor.machine import ALL_STAGES, NEEDED, Fault
from finlm.doctor.network import HostFault
from finlm.hosts import file_trees
from finlm.hosts.file_trees import CheckedTree
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
    """Something that is wrong on a host: which check, its level, evidence and fix."""

    check: str
    host: str
    level: machine.Level
    evidence: str
    fix: str

    def to_json(self) -> dict[str, str]:
        """Return the finding as the command line prints it."""
        return dataclasses.asdict(self)


def check(recipe: Recipe, plan: Plan, cluster: Cluster, runs: Path) -> list[Finding]:
    """Gather the facts of every host and return the findings, as `finlm train` does before it starts."""
    return judge(recipe, plan, cluster, gather(recipe, plan, cluster, runs))


def judge(
    recipe: Recipe, plan: Plan, cluster: Cluster, facts: AllFacts, trees: Sequence[CheckedTree] = ()
) -> list[Finding]:
    """Return everything wrong on the cluster's hosts, errors first. facts: by host name, from gather()."""
    known = {name: host for name, host in facts.items() if not host.failed}
    faults = list(_check_hosts(recipe, plan, cluster, facts, known))
    between = [
        *check_versions(recipe, plan, known),
        *check_devices(plan, cluster, known),
        *network.check_links(recipe, plan, cluster, known),
        *check_trees(trees, known),
    ]
    # A package that differs from the other hosts' also differs from the pin: one cause, one finding.
    odd = {host for host, fault in between if fault[0] == "versions"}
    faults = [(host, fault) for host, fault in faults if not (host in odd and fault[:2] == ("packages", "warning"))]
    findings = [Finding(name, host, level, evidence, fix) for host, (name, level, evidence, fix) in faults + between]
    return sorted(findings, key=lambda finding: finding.level)


def _check_hosts(recipe: Recipe, plan: Plan, cluster: Cluster, facts: AllFacts, known: AllFacts) -> Iterator[HostFault]:
    """Yield the faults of each host by itself, among them hosts and probes that gave no answer."""
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
    """Return the fault of a host that could not be asked."""
    if facts is None or facts.failed is None:
        return "ssh", "error", "no facts of this host were gathered", f"try `ssh {name} python3 -V`"
    failed = facts.failed
    check = "python" if "python3 is not installed" in failed.problem else "ssh"
    return check, "error", f"{failed.problem}\n{failed.evidence}".rstrip(), failed.fix


def this_machine(plan: Plan) -> Cluster:
    """Return a cluster of this machine alone, with the slots that the plan has for it, else those of its first host."""
    planned = next((host for host in plan.hosts if is_local(host.name)), plan.hosts[0])
    return Cluster((Host(planned.name if is_local(planned.name) else "localhost", planned.slots, planned.gpu),))


def show_table(plan: Plan, cluster: Cluster, facts: AllFacts, findings: Sequence[Finding]) -> None:
    """Print a table with a row per host and a column per group of checks that was examined on some host."""
    rows = [list(_cells(host.name, facts.get(host.name, HostFacts()), findings, plan)) for host in cluster.hosts]
    shown = [index for index in range(len(COLUMNS)) if any(row[index] != "-" for row in rows)]
    header = ["host", *(list(COLUMNS)[index] for index in shown)]
    named = zip((host.name for host in cluster.hosts), rows, strict=True)
    screen.table(header, [[name, *(row[index] for index in shown)] for name, row in named])


def show(findings: Sequence[Finding]) -> None:
    """Print the findings with their evidence and fixes, and their number."""
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
    """Yield ok, warn or FAIL for each column of a host's row; - where nothing was examined."""
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


def check_versions(recipe: Recipe, plan: Plan, facts: AllFacts) -> Iterator[HostFault]:
    """Yield hosts whose Python, packages, CUDA or NCCL differ from what most hosts have.

    Ranks exchange pickles and collectives, which must mean the same at both ends.
    """
    rows: dict[str, Callable[[HostFacts], str | None]] = {
        "Python": lambda host: ".".join(host.python.version.split(".")[:2]) if host.python else None,
        **{name: _version_reader(name) for name in NEEDED.get(recipe.stage, ALL_STAGES)},
    }
    if plan.device == "cuda":
        rows |= {
            "CUDA of torch": lambda host: host.torch.cuda if host.torch else None,
            "NCCL": lambda host: (host.torch.nccl if host.torch else None) or _nccl_wheel(host),
        }
    comparable = {name: host for name, host in facts.items() if host.has_python_of_ranks}
    different: dict[str, list[str]] = {}
    for row, read in rows.items():
        versions = {name: read(host) for name, host in comparable.items()}
        known = {name: version for name, version in versions.items() if version is not None}
        if not known:
            continue
        usual = Counter(known.values()).most_common(1)[0][0]
        like = next(name for name, version in known.items() if version == usual)
        for name, version in known.items():
            if version != usual:
                different.setdefault(name, []).append(f"{row} {version}, {like} has {usual}")
    for name, lines in different.items():
        fix = f"the same requirements.txt on every host: `bash scripts/setup.sh` on {name}"
        yield name, ("versions", "error", "\n".join(lines), fix)


def _version_reader(name: str) -> Callable[[HostFacts], str | None]:
    """Return a function that reads a package's version from facts, without a suffix such as torch's +cu130."""

    def version(host: HostFacts) -> str | None:
        installed = (host.packages or {}).get(name)
        return installed.partition("+")[0] if installed else None

    return version


def _nccl_wheel(host: HostFacts) -> str | None:
    """Return the NCCL wheels by their metadata, for hosts where torch was not asked; None without any."""
    installed = host.packages or {}
    wheels = sorted(f"{name} {installed[name]}" for name in installed if name.startswith("nvidia-nccl"))
    return ", ".join(wheels) or None


def check_devices(plan: Plan, cluster: Cluster, facts: AllFacts) -> Iterator[HostFault]:
    """Yield GPUs that two host names share: two ranks on a GPU are NCCL's `Duplicate GPU detected`."""
    if plan.device != "cuda":
        return
    first: dict[str, str] = {}
    for host in cluster.hosts:
        gpu = facts[host.name].gpu if host.name in facts else None
        twice: dict[str, list[str]] = {}
        for device in gpus.devices_of_ranks(host, gpu) if gpu else ():
            other = first.setdefault(device.uuid, host.name)
            if other != host.name:
                twice.setdefault(other, []).append(f"GPU {device.index} ({device.uuid})")
        for other, listed in twice.items():
            evidence = f"{', '.join(listed)} of {host.name} are also {other}'s: two names of one machine"
            yield host.name, ("gpus", "error", evidence, "one hostfile line a machine; NCCL refuses a duplicate GPU")


def check_trees(trees: Sequence[CheckedTree], facts: AllFacts) -> Iterator[HostFault]:
    """Yield files that are missing or other than here: a fault per host for each of code, data and model."""
    for name, host in facts.items():
        for tree in trees:
            there = (host.trees or {}).get(tree.role)
            if there is None:
                continue
            other = list(file_trees.differences(tree, there))
            if not other:
                continue
            if not any(there.values()):
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
