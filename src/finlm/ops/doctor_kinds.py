"""Which GPUs the hosts of a hostfile really have, asked before anything is planned.

A hostfile has names and slots only, and a recipe's `hardware:` says what its author used. What a host's nvidia-smi
answers counts more than that; where it disagrees with the recipe, it is said. Who is about to train hears at once of a
host that cannot be asked (check_reached); for doctor it is planned as the recipe says, or like the others.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from finlm.base import screen
from finlm.base.errors import UserError
from finlm.ops import doctor_gather, doctor_gpu
from finlm.plan import gpus
from finlm.plan.plan import PlanError
from finlm.recipe.cluster import Cluster, Host
from finlm.recipe.schema import Recipe


def ask(recipe: Recipe, cluster: Cluster, accept_new: bool = False, *, to_train: bool = False) -> Cluster:
    """The cluster with the GPUs its hosts have and the memory beside them; what contradicts the recipe is printed.

    to_train: raises UserError when a host cannot be asked.
    """
    facts = doctor_gather.hardware(recipe, cluster, accept_new)
    if to_train:
        check_reached(facts)
    found, said = settle(cluster, facts)
    for sentence in said:
        screen.say(sentence)
    return found


def check_reached(facts: Mapping[str, Mapping[str, Any]]) -> None:
    """Raises UserError that names every host that could not be asked: before hours go into preparing data."""
    failed = {name: one["failed"] for name, one in facts.items() if "failed" in one}
    if failed:
        fixes = dict.fromkeys(one["fix"] for one in failed.values() if one["fix"])
        raise UserError(
            f"{len(failed)} of {len(facts)} hosts cannot be asked: {', '.join(failed)}",
            evidence="\n".join(f"{one['problem']}\n{one['evidence']}".rstrip() for one in failed.values()),
            fix="\n".join([*fixes, f"or go on without: --exclude {'@'.join(failed)}"]),
        )


def settle(cluster: Cluster, facts: Mapping[str, Mapping[str, Any]]) -> tuple[Cluster, list[str]]:
    """The cluster as found, and a sentence for each contradiction. facts: `gpu` and `memory` of doctor_gather."""
    hosts, said, unknown = [], [], set()
    for host in cluster.hosts:
        one = facts[host.name]
        gpu = one.get("gpu")
        if gpu is None or gpu["error"] or (gpu["pci"] and not gpu["nvidia_smi"]):
            unknown.add(host.name)
            hosts.append(host)
            continue
        names = list(dict.fromkeys(device["name"] for device in doctor_gpu.used(host, gpu)))
        kind = _kind(names, host.gpu)
        has = f"{host.name} has {' and '.join(names) or 'no GPU'}"
        if host.gpu is not None and kind != _kind([host.gpu], None):
            said.append(f"{has}, the recipe's hardware says {host.gpu}: planned for {kind or 'CPU ranks'}")
        elif len(names) > 1:
            said.append(f"{has}: planned for {kind}, the one with less memory")
        # Of CPU ranks doctor compares the memory that is free; a plan for GPUs decides on offload by it.
        memory = host.memory_bytes or (_memory(one) if kind else None)
        hosts.append(dataclasses.replace(host, gpu=kind, memory_bytes=memory))
    usual = next((host.gpu for host in hosts if host.gpu), None)
    return dataclasses.replace(
        cluster, hosts=tuple(_like(host, usual) if host.name in unknown else host for host in hosts)
    ), said


def _kind(names: list[str], otherwise: str | None) -> str | None:
    """The known kind with the least memory among nvidia-smi's names; None for none. Unknown ones: `otherwise`."""
    try:
        kinds = [gpus.find(name) for name in names]
    except PlanError:
        return otherwise or names[0]  # which the planner refuses, with the names it knows
    return min(kinds, key=lambda kind: kind.memory_bytes).name if kinds else None


def _memory(facts: Mapping[str, Any]) -> int | None:
    """RAM of a host, or of the container that its ranks run in."""
    memory = facts.get("memory")
    return min(memory["total"], memory["cgroup_limit"] or memory["total"]) if memory else None


def _like(host: Host, gpu: str | None) -> Host:
    return dataclasses.replace(host, gpu=host.gpu or gpu)
