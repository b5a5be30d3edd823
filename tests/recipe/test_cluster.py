"""Hostfiles and hardware: DeepSpeed's format, mistakes with file and line."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from finlm.base.errors import UserError
from finlm.cli import main
from finlm.recipe import cluster
from finlm.recipe import recipe as recipes
from finlm.recipe.schema import Hardware, HardwareHost, HostAccess

from helpers import QUICKSTART

MIXED = Hardware(
    hosts=(
        HardwareHost(name="a", slots=2, gpu="A100-40G", memory="256GiB"),  # type: ignore[arg-type]
        HardwareHost(name="b", slots=2, gpu="V100-32G"),
    ),
    network_gbit=25.0,
)


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "hostfile.txt"
    path.write_text(text)
    return path


def test_a_hostfile_is_read_in_order_with_kinds_from_hardware(tmp_path: Path) -> None:
    found = cluster.load(write(tmp_path, "# two hosts\nb slots=2  # V100\n\na slots=1\n"), MIXED)
    assert [(host.name, host.slots, host.gpu) for host in found.hosts] == [("b", 2, "V100-32G"), ("a", 1, "A100-40G")]
    assert found.hosts[1].memory_bytes == 256 * 2**30
    assert (found.world_size, found.network_gbit, found.is_cpu) == (3, 25.0, False)


def test_the_gpu_option_wins_and_unknown_hosts_are_cpu_ranks(tmp_path: Path) -> None:
    path = write(tmp_path, "a slots=1\nc slots=4\n")
    assert [host.gpu for host in cluster.load(path, MIXED).hosts] == ["A100-40G", None]
    assert [host.gpu for host in cluster.load(path, MIXED, gpu="H200").hosts] == ["H200", "H200"]
    assert cluster.load(path).is_cpu


def test_hosts_that_nobody_asks_need_a_kind_from_hardware(tmp_path: Path) -> None:
    found = cluster.load(write(tmp_path, "a slots=1\nc slots=4\n"), MIXED)
    with pytest.raises(UserError, match="does not say which GPUs c has") as caught:
        cluster.check_hardware(found, MIXED)
    assert "hardware.hosts: a, b" in caught.value.evidence
    alike = cluster.load(write(tmp_path, "a slots=1\nc slots=4\n"), MIXED, "H200")
    assert cluster.check_hardware(alike, MIXED) is alike


def test_every_bad_line_is_named_with_file_and_line(tmp_path: Path) -> None:
    path = write(tmp_path, "a slots=2\nb\nc slots=0\na slots=1\nd slots=two\n")
    with pytest.raises(UserError) as caught:
        cluster.load(path)
    lines = caught.value.evidence.splitlines()
    assert [line.removeprefix(f"{path}:").split(":")[0] for line in lines] == ["2", "3", "4", "5"]
    assert "expected `name slots=N` or `name slots=N spare`, got 'b'" in lines[0]
    assert "0 slots" in lines[1]
    assert "appears twice" in lines[2]


def test_names_that_a_shell_would_read_are_refused(tmp_path: Path) -> None:
    for name in ("a;reboot", "$(id)", "-oProxyCommand=x", "root@a", "a:22", "'a'"):
        with pytest.raises(UserError, match="1 mistake") as caught:
            cluster.load(write(tmp_path, f"{name} slots=1\n"))
        assert "hostfile.txt:1: " in caught.value.evidence and "is not a host name" in caught.value.evidence


def test_a_user_and_a_port_are_told_where_they_belong(tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        cluster.load(write(tmp_path, "root@a:2222 slots=1\nb:22 slots=1\n"))
    user_and_port, port = caught.value.evidence.splitlines()
    assert "hosts: {a: {user: root, port: 2222}}" in user_and_port and "hosts: {b: {port: 22}}" in port


def test_include_and_exclude_are_deepspeeds(tmp_path: Path) -> None:
    path = write(tmp_path, "a slots=4\nb slots=4\nc slots=2\n")

    def left(**ways: str) -> list[tuple[str, int, tuple[int, ...]]]:
        return [(host.name, host.slots, host.devices) for host in cluster.load(path, **ways).hosts]  # type: ignore[arg-type]

    assert left(include="c@a:0,2") == [("a", 2, (0, 2)), ("c", 2, ())]
    assert left(exclude="a@b:1") == [("b", 3, (0, 2, 3)), ("c", 2, ())]
    for ways in ({"include": "d"}, {"include": "a:9"}, {"exclude": "a:x"}, {"exclude": "a@b@c"}):
        with pytest.raises(UserError):
            left(**ways)
    assert "a 2, c 1" in cluster.load(path, include="a:0,1@c:0").unequal_slots
    assert cluster.load(path, include="a@b").unequal_slots == ""


def test_access_to_hosts_comes_from_the_recipe_and_its_mistakes_have_a_line(tmp_path: Path) -> None:
    access = {"b": HostAccess(user="train", port=2222)}
    hosts = cluster.load(write(tmp_path, "a slots=1\nb slots=1\n"), access=access).hosts
    assert [host.destination for host in hosts] == ["a", "train@b:2222"]
    with pytest.raises(UserError, match=r"hosts.worker-b: the hostfile .* has no such host; did you mean worker-a\?"):
        cluster.load(write(tmp_path, "worker-a slots=1\n"), access={"worker-b": HostAccess()})
    path = tmp_path / "recipe.yaml"
    path.write_text(f"base: {QUICKSTART}\nhosts:\n  b: {{port: 70000, work_dir: here}}\n  c: {{user: 'a b'}}\n")
    with pytest.raises(UserError) as caught:
        recipes.load(path)
    for line, key in ((3, "port"), (3, "work_dir"), (4, "user")):
        assert f"recipe.yaml:{line}: hosts.{'bc'[line - 3]}.{key}: should be" in caught.value.evidence


def test_empty_and_missing_hostfiles_are_user_mistakes(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="names no host"):
        cluster.load(write(tmp_path, "# nothing\n"))
    with pytest.raises(UserError, match="cannot read the hostfile"):
        cluster.load(tmp_path / "gone.txt")


@pytest.mark.parametrize(
    "raw",
    ["# 主机\na slots=2  # 头节点\n".encode("gbk"), "a slots=2\r\n# 主机\r\n".encode("utf-8-sig")],
    ids=("gbk", "bom"),
)
def test_comments_of_any_encoding_and_a_byte_order_mark_do_no_harm(
    raw: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("hostfile.txt").write_bytes(raw)
    found = cluster.default_hostfile()
    assert found is not None and [(host.name, host.slots) for host in cluster.load(found).hosts] == [("a", 2)]
    Path("hostfile.txt").write_bytes(raw.replace(b"a slots=2", b""))
    assert cluster.default_hostfile() is None
    assert main.main(["sync", "--dry-run"]) == 0
    assert "names no host" in capsys.readouterr().err


def test_a_count_stands_for_identical_hosts(tmp_path: Path) -> None:
    hardware = Hardware(hosts=(HardwareHost(name="node", slots=8, gpu="A800-80G", count=3),))
    found = cluster.from_hardware(hardware)
    assert [host.name for host in found.hosts] == ["node-1", "node-2", "node-3"]
    assert found.world_size == 24
    assert cluster.load(write(tmp_path, "node-2 slots=8\n"), hardware).hosts[0].gpu == "A800-80G"
    alone = Hardware(hosts=(HardwareHost(name="node", slots=8),))
    assert [host.name for host in cluster.from_hardware(alone).hosts] == ["node"]


def test_this_machine_has_the_ranks_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "visible_gpus", lambda: {})
    found = cluster.local(3)
    assert (found.world_size, found.is_cpu, found.hosts[0].name) == (3, True, "localhost")
    assert (found.hosts[0].memory_bytes or 0) > 2**28
    monkeypatch.setattr(cluster, "visible_gpus", lambda: dict.fromkeys(range(4), "NVIDIA H200"))
    assert (cluster.local(3).world_size, cluster.local(3).hosts[0].gpu) == (4, "NVIDIA H200")
    assert cluster.local(3).hosts[0].devices == ()
    grows = Hardware(hosts=(HardwareHost(name="localhost", slots=4, gpu="H200", memory=1 << 40),))
    assert [cluster.local(3, one).hosts[0].memory_bytes == 1 << 40 for one in (grows, None)] == [True, False]
    monkeypatch.setattr(cluster, "visible_gpus", lambda: {2: "NVIDIA H200", 3: "NVIDIA H200"})
    assert (cluster.local(3).world_size, cluster.local(3).hosts[0].devices) == (2, (2, 3))


@pytest.mark.parametrize(
    ("visible", "names"),
    [
        ("0,2", {0: "A", 2: "C"}),
        ("2,0", {2: "C", 0: "A"}),
        ("1,9,0", {1: "B"}),
        ("", {}),
        ("-1", {}),
        ("GPU-b", {1: "B"}),
        ("GPU-x", {}),
    ],
)
def test_cuda_visible_devices_limits_the_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, visible: str, names: dict[int, str]
) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\nprintf '0, A, GPU-a1\\n1, B, GPU-b2\\n2, C, GPU-c3\\n'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert list(cluster.visible_gpus().items()) == list(names.items())


def fake_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: list[dict[str, str]]) -> None:
    """Put an nvidia-smi on the path that answers for these GPUs, and warns of the first one before."""
    program = tmp_path / "nvidia-smi"
    program.write_text(
        f"#!{sys.executable}\nimport sys\nprint('WARNING: infoROM is corrupted at gpu 0000:1b:00.0')\n"
        f"keys = sys.argv[1].partition('=')[2].split(',')\n"
        f"for row in {rows!r}:\n    print(', '.join(row[key] for key in keys))\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")


A100 = {"name": "NVIDIA A100-PCIE-40GB", "memory.total": "40960 MiB"}
V100 = {"name": "Tesla V100-SXM2-32GB", "memory.total": "32768 MiB"}


def test_this_machines_gpus_of_several_kinds_are_planned_as_the_smallest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    gpus = [each | {"index": str(n), "uuid": f"GPU-{n}"} for n, each in enumerate((A100, V100, A100))]
    fake_smi(tmp_path, monkeypatch, gpus)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert [(host.slots, host.gpu) for host in cluster.local(2).hosts] == [(3, V100["name"])]
    assert f"planned for {V100['name']}, the one with less memory" in capfd.readouterr().err
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,2")
    assert [(host.slots, host.gpu) for host in cluster.local(2).hosts] == [(2, A100["name"])]
    assert capfd.readouterr().err == ""


def test_a_row_of_nvidia_smi_that_cannot_be_read_moves_no_index(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = {"index": "1", "uuid": "GPU-1", "name": "a name, with a comma"}
    gpus = [{"index": "0", "uuid": "GPU-0", "name": "A"}, broken, {"index": "2", "uuid": "GPU-2", "name": "C"}]
    fake_smi(tmp_path, monkeypatch, gpus)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert cluster.visible_gpus() == {0: "A", 2: "C"}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-2,0")
    assert list(cluster.visible_gpus()) == [2, 0]


def test_a_machine_without_a_driver_has_no_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert cluster.visible_gpus() == {}


def test_a_line_may_end_in_spare_and_have_max_slots(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text("a slots=2 max_slots=4\nb slots=2 spare\n")
    hosts = cluster.load(path)
    assert [host.name for host in hosts.hosts] == ["a"] and [host.name for host in hosts.spares] == ["b"]
    path.write_text("b slots=2 spare\n")
    with pytest.raises(UserError, match="are spares"):
        cluster.load(path)


def test_hosts_are_replaced_left_and_taken_in_again() -> None:
    a, b, c = (cluster.Host(name, 1) for name in "abc")
    hosts = cluster.Cluster((a, b), spares=(c,))
    assert hosts.leave({"b": False}, [c])[0] == cluster.Cluster((a, c))
    assert hosts.leave({"b": True}, [c])[0] == cluster.Cluster((a, c), spares=(b,))
    assert hosts.leave({"a": True, "b": False}, [c]) == (
        cluster.Cluster((c,), spares=(a,)),
        "c in the place of a, without b",
    )
    without, _ = hosts.leave({"a": True}, ())
    assert (
        without.hosts == (b,)
        and without.away == (a,)
        and without.with_back(["a"]) == cluster.Cluster((b, a), spares=(c,))
    )
    assert hosts.leave({"a": False}, ())[0].away == ()
