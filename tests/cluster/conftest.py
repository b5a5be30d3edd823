"""Clusters of hosts in network namespaces for the tests of this directory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from .netcluster import Cluster, why_not

HERE = Path(__file__).parent


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
