"""Checks of hosts against each other: the same software, code and data everywhere, and every GPU only once.

Pure functions from facts to faults. The reference for versions is what most hosts have (of two, the first one); for
code and data it is this machine.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from finlm.ops import doctor_gpu, doctor_trees
from finlm.ops.doctor_checks import ALL_STAGES, NEEDED, is_ranks_own
from finlm.ops.doctor_network import AllFacts, HostFault
from finlm.ops.doctor_trees import Tree
from finlm.plan.plan import Plan
from finlm.recipe.cluster import Cluster
from finlm.recipe.schema import Recipe

SHOWN_FILES = 5


def of_versions(recipe: Recipe, plan: Plan, facts: AllFacts) -> Iterator[HostFault]:
    """Ranks exchange pickles and collectives, and both must mean the same at both ends."""
    rows: dict[str, Callable[[Mapping[str, Any]], str | None]] = {
        "Python": lambda one: ".".join(one["python"]["version"].split(".")[:2]) if one.get("python") else None,
        **{name: _package(name) for name in NEEDED.get(recipe.stage, ALL_STAGES)},
    }
    if plan.device == "cuda":
        rows |= {
            "CUDA of torch": lambda one: (one.get("torch") or {}).get("cuda"),
            "NCCL": lambda one: (one.get("torch") or {}).get("nccl") or _nccl_wheel(one),
        }
    own = {name: one for name, one in facts.items() if "failed" not in one and is_ranks_own(one)}
    different: dict[str, list[str]] = {}
    for row, read in rows.items():
        found = {name: read(one) for name, one in own.items()}
        known = {name: version for name, version in found.items() if version is not None}
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


def _package(name: str) -> Callable[[Mapping[str, Any]], str | None]:
    """The version without torch's +cu130, which its own word on CUDA covers."""

    def version(one: Mapping[str, Any]) -> str | None:
        installed = (one.get("packages") or {}).get(name)
        return installed.partition("+")[0] if installed else None

    return version


def _nccl_wheel(one: Mapping[str, Any]) -> str | None:
    """NCCL by its wheels' metadata, where torch was not asked."""
    installed = one.get("packages") or {}
    wheels = sorted(f"{name} {installed[name]}" for name in installed if name.startswith("nvidia-nccl"))
    return ", ".join(wheels) or None


def of_devices(plan: Plan, cluster: Cluster, facts: AllFacts) -> Iterator[HostFault]:
    """Two names of one machine would put two ranks on one GPU: NCCL's `Duplicate GPU detected`."""
    if plan.device != "cuda":
        return
    first: dict[str, str] = {}
    for host in cluster.hosts:
        gpu = (facts.get(host.name) or {}).get("gpu")
        twice: dict[str, list[str]] = {}
        for one in doctor_gpu.used(host, gpu) if gpu else ():
            other = first.setdefault(one["uuid"], host.name)
            if other != host.name:
                twice.setdefault(other, []).append(f"GPU {one['index']} ({one['uuid']})")
        for other, listed in twice.items():
            evidence = f"{', '.join(listed)} of {host.name} are also {other}'s: two names of one machine"
            yield host.name, ("gpus", "error", evidence, "one hostfile line a machine; NCCL refuses a duplicate GPU")


def of_trees(trees: Sequence[Tree], facts: AllFacts) -> Iterator[HostFault]:
    """Files that are missing or other than here, one finding for each of code, data and model."""
    for name, one in facts.items():
        for tree in trees:
            found = (one.get("trees") or {}).get(tree.role)
            if found is None:
                continue
            other = list(doctor_trees.differences(tree, found))
            if not other:
                continue
            if not any(found.values()):
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
