"""Facts as the probes print them on healthy GPU hosts, and the plans they are judged against."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from finlm.doctor import machine, preflight
from finlm.doctor.gather import HostFacts
from finlm.hosts.file_trees import CheckedTree
from finlm.plan import planner
from finlm.plan.plan import Plan
from finlm.recipe import cluster, recipe, shape
from finlm.recipe.cluster import Cluster, Host
from finlm.recipe.schema import Recipe

QUICKSTART = Path(__file__).resolve().parents[1] / "recipes/quickstart/pretrain.yaml"
GIB = 2**30
RECIPE = recipe.load(QUICKSTART).recipe
CPU_PLAN = planner.make(RECIPE, cluster.from_hardware(RECIPE.hardware), shape.of(RECIPE))
Facts = dict[str, Any]


def gpu_plan(*names: str, **changes: Any) -> Plan:
    """Two H200 a host, 100 GiB of each used; one host, h0, unless named."""
    like = dataclasses.replace(CPU_PLAN.hosts[0], slots=2, gpu="H200", gpu_bytes=100 * GIB)
    hosts = tuple(dataclasses.replace(like, name=name) for name in names or ("h0",))
    fields = {"device": "cuda", "hosts": hosts, "world_size": 2 * len(hosts), "precision": "bf16"}
    sizes = {"gpu_bytes": 100 * GIB, "host_bytes": 20 * GIB}
    return dataclasses.replace(CPU_PLAN, **(fields | sizes | changes))


def device(index: int, host: str = "h0") -> Facts:
    """As probed on an idle H200 with driver 580.159.04."""
    return {
        "index": index,
        "name": "NVIDIA H200",
        "uuid": f"GPU-{host}-{index}",
        "driver": "580.159.04",
        "compute_capability": "9.0",
        "memory_total": 150754820096,
        "memory_used": 0,
        "memory_free": 150109945856,
        "ecc_errors": 0,
        "remap_pending": False,
        "remap_failed": False,
        "processes": [],
    }


def healthy(host: str = "h0") -> Facts:
    """A GPU host with everything in order; the GPU part as the probe printed it on an H200 machine."""
    tool = {"path": "/usr/bin/x", "version": "13.3.0", "on_path": True}
    return {
        "probe": 1,
        "python": {"version": "3.12.3", "executable": "/opt/venv/bin/python3"},
        "memory": {"total": 128 * GIB, "available": 120 * GIB, "cgroup_limit": None},
        "disks": {
            "run": {
                **{"path": "runs", "is_directory": True, "writable": True},
                **{"checkpoint_bytes": 0, "total": 900 * GIB, "free": 700 * GIB},
            }
        },
        "shm": {"total": 64 * GIB, "free": 64 * GIB},
        "limits": {"nofile": [20000, 20000], "memlock": [None, None]},
        "tools": {"g++": tool, "ninja": tool, "nvcc": tool},
        "libaio": True,
        "gpu": {
            "nvidia_smi": "/usr/bin/x",
            "error": None,
            "devices": [device(0, host), device(1, host)],
            "visible": None,
            "pci": 2,
            "xids": [],
        },
        "torch": {
            "version": "2.11.0+cu130",
            "cuda": "13.0",
            "arch": ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "compute_120"],
            "nccl": "2.28.9",
            "nccl_files": ["/opt/venv/lib/python3.12/site-packages/nvidia/nccl/lib/libnccl.so.2"],
            "error": None,
        },
        "packages": {**machine.pins(), "nvidia-nccl-cu13": "2.28.9"},
        "extensions": {"network": False, "locks": [], "compilers": [], "prebuilt": []},
        "errors": {},
    }


def examine(facts: Facts, plan: Plan | None = None, wanted: Recipe = RECIPE) -> list[preflight.Finding]:
    plan = plan or gpu_plan()
    hosts = tuple(Host(host.name, host.slots, host.gpu) for host in plan.hosts)
    return judge(wanted, plan, Cluster(hosts), {hosts[0].name: facts})


def read(facts: Mapping[str, Facts]) -> dict[str, HostFacts]:
    """What gather() makes of such documents."""
    return {name: HostFacts.from_json(document) for name, document in facts.items()}


def judge(
    wanted: Recipe, plan: Plan, hosts: Cluster, facts: Mapping[str, Facts], trees: Sequence[CheckedTree] = ()
) -> list[preflight.Finding]:
    return preflight.judge(wanted, plan, hosts, read(facts), trees)


def changed(host: str = "h0", **sections: Any) -> Facts:
    """Healthy facts with some keys replaced: changed(gpu__error="...") reaches one level down."""
    facts = copy.deepcopy(healthy(host))
    for name, value in sections.items():
        outer, _, inner = name.partition("__")
        if inner:
            facts[outer][inner] = value
        else:
            facts[outer] = value
    return facts


def only(findings: list[preflight.Finding]) -> preflight.Finding:
    assert len(findings) == 1, findings
    assert findings[0].evidence and findings[0].fix
    return findings[0]
