"""What the ranks of a host find in their environment."""

from __future__ import annotations

from finlm.launch.adapters import host_env
from finlm.plan import planner
from finlm.recipe import cluster, recipe, shape

from helpers import ROOT


def environment(*overrides: str, hosts: str = "{name: a, slots: 2, gpu: H200, memory: 400GiB}") -> dict[str, str]:
    """Of the first host of XuanYuan-6B on these hosts, which a recipe may change in every way."""
    auto = ("zero.offload_optimizer=auto", "zero.offload_param=auto", "batch.micro_batch=auto")
    found = recipe.load(
        ROOT / "recipes/xuanyuan-6b/pretrain.yaml", (*auto, f"hardware.hosts=[{hosts}]", *overrides)
    ).recipe
    machines = cluster.from_hardware(found.hardware)
    return host_env(found, planner.make(found, machines, shape.of(found)), machines.hosts[0])


def test_threads_follow_where_the_optimizer_steps() -> None:
    assert environment("zero.stage=1")["OMP_NUM_THREADS"] == "4"
    assert environment("zero.stage=1", "zero.offload_optimizer=stream")["OMP_NUM_THREADS"] == "4"
    assert environment("zero.stage=2", "zero.offload_optimizer=cpu")["OMP_NUM_THREADS"] == "16"


def test_nccl_takes_few_sms_from_zero3s_long_products_and_the_recipe_has_the_last_word() -> None:
    large = ("zero.stage=3", "batch.micro_batch=8")
    assert environment(*large)["NCCL_MAX_CTAS"] == "4"
    assert environment(*large, "env={NCCL_MAX_CTAS: '16'}")["NCCL_MAX_CTAS"] == "16"
    two = "{name: a, slots: 1, gpu: H200, memory: 400GiB}, {name: b, slots: 1, gpu: H200, memory: 400GiB}"
    for others in (environment("zero.stage=1"), environment("zero.stage=3", "batch.micro_batch=1")):
        assert "NCCL_MAX_CTAS" not in others
    assert "NCCL_MAX_CTAS" not in environment(*large, hosts=two), "a network needs them all"
