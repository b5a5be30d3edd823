"""The probe: one JSON document from any host's Python 3.8, whatever is missing there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from finlm.hosts.remote import probe

PROBE = Path(probe.__file__)
SECTIONS = {
    *("hostname", "machine", "rsync", "python", "platform", "cpu", "cores", "memory", "disks", "shm"),
    *("limits", "tools", "libaio", "packages", "extensions", "errors"),
}


def run(*options: str, env: dict[str, str] | None = None) -> dict[str, Any]:
    command = [sys.executable, str(PROBE), *options]
    done = subprocess.run(command, env=os.environ | (env or {}), capture_output=True, text=True, check=True)
    facts: dict[str, Any] = json.loads(done.stdout)
    return facts


def test_this_machine_answers_every_section_without_an_error(tmp_path: Path) -> None:
    facts = run(f"--disk=run={tmp_path}/not/yet")
    assert set(facts) == SECTIONS
    assert facts["errors"] == {}
    assert facts["python"]["executable"] == sys.executable
    assert 1 <= facts["cores"]["usable"] <= facts["cores"]["logical"]
    assert 0 < facts["memory"]["available"] <= facts["memory"]["total"]
    assert facts["disks"]["run"]["free"] > 0 and facts["disks"]["run"]["writable"]
    assert facts["disks"]["run"]["is_directory"] and not probe.disk(f"{__file__}/runs").is_directory
    assert facts["packages"]["torch"].startswith("2.")
    assert facts["cpu"]


def test_a_section_that_fails_is_null_with_its_reason_and_the_others_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise OSError("no such thing")

    monkeypatch.setattr(probe, "memory", broken)
    facts = probe.gather_facts({})
    assert facts["memory"] is None
    assert facts["errors"] == {"memory": "OSError: no such thing"}
    assert facts["cores"].usable >= 1


def test_a_host_without_any_tool_still_answers(tmp_path: Path) -> None:
    facts = run(env={"PATH": str(tmp_path), "CUDA_HOME": str(tmp_path)})
    assert facts["errors"] == {}
    assert facts["tools"]["g++"] is None and facts["tools"]["nvcc"] is None
    assert facts["libaio"] is None


def test_ninja_beside_the_interpreter_is_found_and_told_from_one_on_path(tmp_path: Path) -> None:
    beside = Path(sys.executable).parent / "ninja"
    if not beside.exists():
        pytest.skip(f"requirements.txt's ninja is not beside {sys.executable}")
    ninja = run(env={"PATH": str(tmp_path)})["tools"]["ninja"]
    assert ninja["path"] == str(beside) and ninja["on_path"] is False and ninja["version"]


def test_a_lock_is_held_only_while_a_process_has_it_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    (tmp_path / "cpu_adam").mkdir()
    lock = tmp_path / "cpu_adam/lock"
    with lock.open("w"):
        assert [lock.held for lock in probe.extensions().locks] == [True]
    assert [(one.path, one.held) for one in probe.extensions().locks] == [(str(lock), False)]


def test_locks_are_found_in_the_default_place_with_its_version_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TORCH_EXTENSIONS_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    lock = tmp_path / "torch_extensions/py311_cpu/cpu_adam/lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    assert [one.path for one in probe.extensions().locks] == [str(lock)]


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({"cpu.max": "150000 100000"}, 1.5),
        ({"cpu.max": "max 100000"}, None),
        ({"cpu.cfs_quota_us": "50000", "cpu.cfs_period_us": "100000"}, 0.5),
        ({"cpu.cfs_quota_us": "-1", "cpu.cfs_period_us": "100000"}, None),
    ],
)
def test_the_cgroups_quota_limits_the_usable_cores(
    files: dict[str, str], quota: float | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(probe, "cgroups", lambda controller: iter([tmp_path]))
    facts = probe.cores()
    assert facts.usable == min(facts.affinity, quota or facts.affinity)


def test_a_cgroups_memory_limit_counts_the_page_cache_as_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = {"memory.max": "1000000", "memory.current": "900000", "memory.stat": "anon 1\ninactive_file 300000\n"}
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(probe, "cgroups", lambda controller: iter([tmp_path]))
    assert probe.memory().available == 400_000
    assert probe.memory().cgroup_limit == 1_000_000


def test_checkpoints_already_written_are_counted(tmp_path: Path) -> None:
    shard = tmp_path / "checkpoints/step-5/shard.pt"
    shard.parent.mkdir(parents=True)
    shard.write_bytes(b"x" * 1000)
    assert 1000 <= probe.disk(str(tmp_path)).checkpoint_bytes < 20_000
