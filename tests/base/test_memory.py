"""How much memory is left, in the words of both versions of cgroups."""

from __future__ import annotations

from pathlib import Path

import pytest

from finlm.base import processes

MIB = 2**20


@pytest.mark.parametrize(
    ("line", "directory", "numbers", "cache", "expected"),
    [
        ("0::/box/inner", "box", {"memory.max": 400, "memory.current": 300}, "inactive_file", 150),
        ("4:cpu:/x\n9:memory:/box/inner", "memory/box", {"memory.limit_in_bytes": 400, "memory.usage_in_bytes": 300},
         "inactive_file 0\ntotal_inactive_file", 150),
        ("0::/box/inner", "box", {"memory.current": 300}, "inactive_file", 1000),  # without a limit
        (None, "box", {}, "inactive_file", 1000),
    ],
)  # fmt: skip
def test_a_limit_of_an_ancestor_binds_and_page_cache_is_free(
    tmp_path: Path, line: str | None, directory: str, numbers: dict[str, int], cache: str, expected: int
) -> None:
    proc, cgroup = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text(f"MemTotal: 9 kB\nMemAvailable: {1000 * 1024} kB\n")
    if line is not None:
        (proc / "self/cgroup").write_text(line + "\n")
    (cgroup / directory / "inner").mkdir(parents=True)
    for name, count in numbers.items():
        (cgroup / directory / name).write_text(f"{count * MIB}\n")
    (cgroup / directory / "memory.stat").write_text(f"anon 5\n{cache} {50 * MIB}\n")
    assert processes.available_bytes(proc, cgroup) == expected * MIB
