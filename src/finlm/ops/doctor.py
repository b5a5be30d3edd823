"""Preflight: what would make this run fail or crawl, told from the hosts' facts before anything starts.

`check` is pure: recipe, plan, cluster and facts (of probe.py) in, findings out. An "error" stops `finlm train`, a
"warning" does not. Every finding carries the numbers it was made from and a way to mend it. A fact the probe could not
get is unknown, not wrong: a healthy machine gives no finding. About half a second, all of it the probe.

Does not look into the data, does not measure speed, and does not see faults that only show under load.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finlm.base import screen
from finlm.ops import doctor_checks
from finlm.plan.plan import Plan
from finlm.recipe.cluster import Cluster, Host, is_local
from finlm.recipe.schema import Recipe


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


def check(recipe: Recipe, plan: Plan, cluster: Cluster, facts: Mapping[str, Mapping[str, Any]]) -> list[Finding]:
    """Everything wrong on the cluster's hosts, errors first. `facts` maps a host's name to the probe's document."""
    faults: list[tuple[str, doctor_checks.Fault]] = []
    for host in cluster.hosts:
        if host.name in facts:
            found = doctor_checks.of_host(recipe, plan, host, facts[host.name], alone=len(plan.hosts) == 1)
            faults += [(host.name, fault) for fault in found]
        else:
            missing = "no facts of this host were gathered"
            faults.append((host.name, ("probe", "error", missing, f"try `ssh {host.name} python3 -V`")))
    faults += doctor_checks.between_hosts(plan, cluster, facts)
    findings = [Finding(name, host, level, evidence, fix) for host, (name, level, evidence, fix) in faults]
    return sorted(findings, key=lambda finding: finding.level)


def check_local(recipe: Recipe, plan: Plan, runs: Path = Path("runs"), port: int | None = None) -> list[Finding]:
    """Findings of this machine, as the plan's host of its name, else as the plan's first one."""
    planned = next((host for host in plan.hosts if is_local(host.name)), plan.hosts[0])
    host = Host(planned.name if is_local(planned.name) else "localhost", planned.slots, planned.gpu)
    disks = {"run": runs} | ({"nvme": Path(recipe.zero.nvme_path)} if recipe.zero.nvme_path else {})
    return check(recipe, plan, Cluster((host,)), {host.name: local_facts(disks, port, recipe.env)})


def local_facts(
    disks: Mapping[str, Path] | None = None, port: int | None = None, env: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """The probe's document of this machine. `disks` maps a role (run, nvme) to a directory that may not exist yet.

    The environment is the one ranks get: the interpreter's directory is on PATH, where ninja lies.
    """
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    command = [sys.executable, str(Path(__file__).with_name("probe.py"))]
    command += [f"--disk={role}={directory}" for role, directory in (disks or {}).items()]
    command += [] if port is None else [f"--port={port}"]
    environment = {**os.environ, "PATH": path, **(env or {})}
    output = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=True).stdout
    facts: dict[str, Any] = json.loads(output)
    return facts


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
