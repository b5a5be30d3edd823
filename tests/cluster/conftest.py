"""Clusters of hosts in network namespaces for the tests of this directory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from finlm.base.rundir import RunDir

from .netcluster import Cluster, why_not
from .training import LONG, ONE_THREAD, losses
from ranks import Ranks

HERE = Path(__file__).parent
Unbroken = Callable[[int], dict[int, float]]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Every test here is a cluster test, skipped with the reason where clusters cannot be made."""
    mine = [item for item in items if HERE in item.path.parents]
    reason = why_not() if mine else ""
    for item in mine:
        item.add_marker(pytest.mark.cluster)
        if reason:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Cluster]:
    """Two hosts, n0 and n1; tests act on n0."""
    with Cluster(2, tmp_path / "cluster") as cluster:
        yield cluster


@pytest.fixture
def trio(tmp_path: Path) -> Iterator[Cluster]:
    """Three hosts, n0 to n2; tests act on n0."""
    with Cluster(3, tmp_path / "cluster") as cluster:
        yield cluster


@pytest.fixture
def unbroken(make_run: Callable[..., RunDir], ranks: Ranks) -> Unbroken:
    """Losses by step of a run of LONG that lost no host, trained on this machine for so many steps."""

    def train(steps: int) -> dict[int, float]:
        run = make_run(*LONG, ONE_THREAD)
        ranks.codes(run, "stopped", steps)
        return losses(run)

    return train
