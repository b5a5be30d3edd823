"""The GPUs that hosts have against those that a hostfile and a recipe suppose."""

from __future__ import annotations

from typing import Any

import pytest

from finlm.base.errors import UserError
from finlm.doctor import gpus
from finlm.plan import planner
from finlm.recipe import shape
from finlm.recipe.cluster import Cluster, Host
from finlm.recipe.schema import HostAccess

from doctor_facts import GIB, RECIPE, healthy, read


def facts(*names: str, error: str | None = None, pci: int | None = None) -> dict[str, Any]:
    """A host with these GPUs as nvidia-smi names them."""
    one = healthy()
    devices = [dict(one["gpu"]["devices"][0], index=index, name=name) for index, name in enumerate(names)]
    gpu = {"devices": devices, "error": error, "pci": len(names) if pci is None else pci}
    return one | {"gpu": one["gpu"] | gpu | ({} if names or error else {"nvidia_smi": None})}


def settled(*hosts: tuple[Host, dict[str, Any]]) -> tuple[list[str | None], list[str]]:
    found, said = gpus.settle_kinds(Cluster(tuple(host for host, _ in hosts)), read({h.name: f for h, f in hosts}))
    return [host.gpu for host in found.hosts], said


A100, V100 = "NVIDIA A100-PCIE-40GB", "Tesla V100-SXM2-32GB"


def test_each_host_has_the_kind_its_nvidia_smi_names() -> None:
    assert settled((Host("a", 2), facts(A100, A100)), (Host("b", 2), facts(V100, V100))) == (
        ["A100-40G", "V100-32G"],
        [],
    )
    assert settled((Host("a", 2, "a100-40g"), facts(A100, A100))) == (["A100-40G"], [])
    assert settled((Host("a", 2), facts())) == ([None], [])


def test_a_recipe_that_supposes_other_hardware_is_contradicted_aloud() -> None:
    kinds, said = settled((Host("a", 2, "H200"), facts(A100, A100)), (Host("b", 2, "H200"), facts()))
    assert kinds == ["A100-40G", None]
    assert said == [
        f"a has {A100}, the recipe's hardware says H200: planned for A100-40G",
        "b has no GPU, the recipe's hardware says H200: planned for CPU ranks",
    ]


def test_two_kinds_in_one_host_are_planned_as_the_smaller_and_only_those_used_count() -> None:
    host, mixed = Host("a", 2), facts(A100, V100)
    assert settled((host, mixed)) == (
        ["V100-32G"],
        [f"a has {A100} and {V100}: planned for V100-32G, the one with less memory"],
    )
    assert settled((Host("a", 1), mixed)) == (["A100-40G"], [])
    assert settled((Host("a", 1, devices=(1,)), mixed)) == (["V100-32G"], [])
    del mixed["gpu"]["devices"][0]  # its row could not be read
    assert settled((Host("a", 1, devices=(1,)), mixed)) == (["V100-32G"], [])


@pytest.mark.parametrize(
    "unknown", [{"failed": {}}, facts(error="driver not loaded", pci=2), facts(pci=2)], ids=("ssh", "driver", "smi")
)
def test_a_host_that_does_not_tell_is_left_to_doctor(unknown: dict[str, Any]) -> None:
    assert settled((Host("a", 2), facts(A100, A100)), (Host("b", 2), unknown)) == (["A100-40G", "A100-40G"], [])
    assert settled((Host("a", 2), facts(A100)), (Host("b", 2, "H200"), unknown))[0] == ["A100-40G", "H200"]
    assert settled((Host("b", 2), unknown)) == ([None], [])


def test_memory_is_taken_where_the_recipe_has_none() -> None:
    hosts = Cluster((Host("a", 2), Host("b", 2, None, 7 * GIB)))
    small = healthy() | {"memory": {"total": 128 * GIB, "available": GIB, "cgroup_limit": 64 * GIB}}
    found, _ = gpus.settle_kinds(hosts, read({"a": small, "b": small}))
    assert [host.memory_bytes for host in found.hosts] == [64 * GIB, 7 * GIB]


def test_a_gpu_nobody_knows_is_refused_unless_the_recipe_names_its_like() -> None:
    assert settled((Host("a", 2, "H200"), facts("NVIDIA Z9"))) == (["H200"], [])
    found, _ = gpus.settle_kinds(Cluster((Host("a", 2),)), read({"a": facts("NVIDIA Z9")}))
    with pytest.raises(UserError, match="no facts about the GPU kind 'NVIDIA Z9'"):
        planner.make(RECIPE, found, shape.of(RECIPE))


@pytest.mark.parametrize(("python", "problem"), [("/no/python", "does not answer"), ("/bin/true", "printed no facts")])
def test_a_machine_that_cannot_be_asked_names_a_command_to_try_before_a_way_out(python: str, problem: str) -> None:
    here = Cluster((Host("localhost", 1, access=HostAccess(python=python)),))
    with pytest.raises(UserError, match="1 of 1 hosts cannot be asked") as caught:
        gpus.ask_kinds(RECIPE, here, way_out=lambda names: f"or go on without: --exclude {names[0]}")
    assert problem in caught.value.evidence
    assert caught.value.fix == f"try `{python} -V`\nor go on without: --exclude localhost"
