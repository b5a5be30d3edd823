"""What `finlm sync` promises, between real ssh servers on hosts with disks of their own."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import finlm

from .netcluster import HOME, WORK, Cluster, Host

SOURCE = Path(finlm.__file__).parents[1]
ENV = {"PYTHONPATH": str(SOURCE), "PYTHONDONTWRITEBYTECODE": "1"}
REPO = f"{WORK}/repo"
DRIVER = """
import dataclasses, json, pathlib, sys
from finlm.base import screen
from finlm.base.errors import UserError
from finlm.ops import sync
request = json.loads(sys.argv[1])
hosts, root = request.pop("hosts"), pathlib.Path(request.pop("root"))
try:
    results = sync.sync(root, hosts, **request | {"data": [pathlib.Path(p) for p in request.get("data", [])]})
except UserError as error:
    screen.fail(error)
    sys.exit(2)
print(json.dumps([dataclasses.asdict(result) for result in results]))
"""
MAIN = """
import pathlib, sys
from finlm.base import screen
from finlm.base.errors import UserError
from finlm.ops import sync
try:
    sys.exit(sync.main(pathlib.Path(sys.argv[1]), False, False))
except UserError as error:
    screen.fail(error)
    sys.exit(2)
"""


def repository(host: Host, path: str = REPO) -> Path:
    """A small git checkout on a host; where it lies on the real machine."""
    here = host.srv / Path(path).relative_to("/srv")
    (here / "src").mkdir(parents=True)
    (here / "requirements.txt").write_text("rich\n")
    (here / "src" / "model.py").write_text("hidden_size = 64\n")
    (here / "src" / "资产负债表.py").write_text("# 中文文件名\n", encoding="utf-8")
    (here / "src" / "latest").symlink_to("model.py")
    (here / "run.sh").write_text("#!/bin/sh\n")
    (here / "run.sh").chmod(0o755)
    (here / ".gitignore").write_text("/cache/\n*.log\n")
    host.run("git", "init", "-q", path)
    return here


def start(host: Host, *hosts: str, root: str = REPO, **request: Any) -> list[str]:
    """The command line of a sync from host."""
    line = json.dumps({"root": root, "hosts": hosts, **request})
    return host.argv([sys.executable, "-c", DRIVER, line], env=ENV)


def sync(host: Host, *hosts: str, **request: Any) -> list[dict[str, Any]]:
    """Sync from host to hosts; the results."""
    done = subprocess.run(start(host, *hosts, **request), capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    results: list[dict[str, Any]] = json.loads(done.stdout)
    return results


def refused(host: Host, *hosts: str, **request: Any) -> str:
    """Sync from host to hosts, which fails as a user's mistake; what it said."""
    done = subprocess.run(start(host, *hosts, **request), capture_output=True, text=True, timeout=60)
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    return done.stderr


def tree(path: Path) -> dict[str, str]:
    """What lies below path, without git's and sync's own files, by a way of its own."""
    found = {}
    for file in sorted(path.rglob("*")):
        name = file.relative_to(path).as_posix()
        if name.startswith((".git/", ".finlm-")) or (file.is_dir() and not file.is_symlink()):
            continue
        content = os.fsencode(file.readlink()) if file.is_symlink() else file.read_bytes()
        found[name] = f"{hashlib.sha256(content).hexdigest()} {file.lstat().st_mode:o}"
    return found


def on(host: Host, path: str = REPO) -> Path:
    """Where a path of a host lies on the real machine."""
    return host.srv / Path(path).relative_to("/srv")


def until(condition: Callable[[], bool], seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.005)


def test_code_arrives_on_every_host_with_the_same_tree_hash(trio: Cluster) -> None:
    here = repository(trio[0])
    (here / ".git" / "info" / "exclude").write_text("")
    results = sync(trio[0], "n0", "n1", "n2")
    assert [result["status"] for result in results] == ["this machine", "equal", "equal"]
    assert tree(on(trio[1])) == tree(on(trio[2])) == tree(here)
    records = [json.loads((on(host) / ".finlm-sync.json").read_text()) for host in (trio[1], trio[2])]
    assert {record["trees"][REPO]["tree"] for record in records} == {results[1]["tree"], results[2]["tree"]}
    assert results[1]["tree"] == results[2]["tree"]
    assert sync(trio[0], "n1")[0]["sent_files"] == 0
    assert not list(here.glob(".finlm-*"))


def test_an_ignored_file_does_not_travel_and_an_uncommitted_one_does(pair: Cluster) -> None:
    here = repository(pair[0])
    (here / "cache").mkdir()
    (here / "cache" / "tokens.bin").write_bytes(b"x")
    (here / "train.log").write_text("loss\n")
    (here / "new.py").write_text("x = 1\n")
    sync(pair[0], "n1")
    there = tree(on(pair[1]))
    assert "new.py" in there and "train.log" not in there and "cache/tokens.bin" not in there


def test_without_git_everything_travels_but_a_hosts_own(pair: Cluster) -> None:
    here = repository(pair[0])
    pair[0].run("rm", "-r", f"{REPO}/.git")
    for name in (".venv/bin/python", "cache/a", "runs/b", "src/__pycache__/c.pyc", "src/runs/kept.py"):
        (here / name).parent.mkdir(parents=True, exist_ok=True)
        (here / name).write_text("x")
    sync(pair[0], "n1")
    left_out = {".venv/bin/python", "cache/a", "runs/b", "src/__pycache__/c.pyc"}
    assert set(tree(on(pair[1]))) == set(tree(here)) - left_out


def test_a_file_deleted_here_disappears_there_and_foreign_files_stay(pair: Cluster) -> None:
    here = repository(pair[0])
    (here / "old").mkdir()
    (here / "old" / "recipe.yaml").write_text("a: 1\n")
    sync(pair[0], "n1")
    for name in (".venv", "cache", "runs"):
        (on(pair[1]) / name).mkdir()
    (on(pair[1]) / "runs" / "events.jsonl").write_text("{}\n")
    (on(pair[1]) / "notes.txt").write_text("mine\n")
    (here / "old" / "recipe.yaml").unlink()
    assert sync(pair[0], "n1")[0]["removed_files"] == 1
    assert not (on(pair[1]) / "old").exists()
    assert (on(pair[1]) / "notes.txt").read_text() == "mine\n"
    assert (on(pair[1]) / "runs" / "events.jsonl").exists()


def test_a_file_may_become_a_directory_and_back(pair: Cluster) -> None:
    here = repository(pair[0])
    sync(pair[0], "n1")
    (here / "run.sh").unlink()
    (here / "run.sh").mkdir()
    (here / "run.sh" / "step").write_text("1\n")
    sync(pair[0], "n1")
    assert tree(on(pair[1])) == tree(here)
    (here / "run.sh" / "step").unlink()
    (here / "run.sh").rmdir()
    (here / "run.sh").symlink_to("src")
    sync(pair[0], "n1")
    assert tree(on(pair[1])) == tree(here)


def test_a_directory_that_sync_did_not_write_is_refused_and_left_alone(pair: Cluster) -> None:
    repository(pair[0])
    on(pair[1]).mkdir()
    (on(pair[1]) / "thesis.tex").write_text("years of work\n")
    said = refused(pair[0], "n1")
    assert "not empty and was not written by finlm sync" in said and "thesis.tex" in said and "rm -r" in said
    assert tree(on(pair[1])).keys() == {"thesis.tex"}


def test_a_foreign_file_in_the_way_of_a_new_one_is_not_overwritten(pair: Cluster) -> None:
    here = repository(pair[0])
    sync(pair[0], "n1")
    (on(pair[1]) / "notes.txt").write_text("mine\n")
    (here / "notes.txt").write_text("yours\n")
    said = refused(pair[0], "n1")
    assert f"{REPO}/notes.txt" in said and "in the way" in said
    assert (on(pair[1]) / "notes.txt").read_text() == "mine\n"


def test_a_host_with_its_own_venv_and_cache_is_not_dirty(pair: Cluster) -> None:
    repository(pair[0])
    (on(pair[1]) / ".venv").mkdir(parents=True)
    (on(pair[1]) / "cache").mkdir()
    assert sync(pair[0], "n1")[0]["status"] == "equal"


def test_a_dry_run_counts_and_writes_nothing(pair: Cluster) -> None:
    here = repository(pair[0])
    result = sync(pair[0], "n1", dry_run=True)[0]
    assert result["status"] == "would change" and result["sent_files"] == len(tree(here))
    assert not on(pair[1]).exists()
    sync(pair[0], "n1")
    (here / "run.sh").unlink()
    (here / "new.py").write_text("x = 1\n")
    result = sync(pair[0], "n1", dry_run=True)[0]
    assert (result["sent_files"], result["removed_files"]) == (1, 1)
    assert (on(pair[1]) / "run.sh").exists()


def test_a_host_that_is_down_is_named_within_15_s_and_the_others_are_synced(trio: Cluster) -> None:
    here = repository(trio[0])
    mac = trio[1].run("cat", f"/sys/class/net/{trio[1].interface}/address").stdout.strip()
    trio[1].power_off()  # the address stays in the ARP table: packets vanish without "no route to host"
    neighbour = ("ip", "neigh", "replace", trio[1].address, "lladdr", mac, "dev", trio[0].interface)
    trio[0].run(*neighbour, "nud", "permanent")
    began = time.monotonic()
    said = refused(trio[0], "n1", "n2")
    assert time.monotonic() - began < 15
    assert "1 of 2 hosts are not in sync: n1" in said and "n1 does not answer" in said
    assert tree(on(trio[2])) == tree(here)


def test_a_changed_host_key_is_refused_with_the_way_out(pair: Cluster) -> None:
    repository(pair[0])
    pair[1].new_host_key()
    for accept_new in (False, True):
        said = refused(pair[0], "n1", accept_new=accept_new)
        assert "host key of n1 has changed" in said and "ssh-keygen -R n1" in said
    assert not on(pair[1]).exists()
    pair[0].run("ssh-keygen", "-R", "n1")
    assert sync(pair[0], "n1", accept_new=True)[0]["status"] == "equal"


def test_an_unknown_host_key_is_refused_unless_new_ones_are_accepted(pair: Cluster) -> None:
    repository(pair[0])
    known = pair[0].home / ".ssh" / "known_hosts"
    known.write_text("")
    said = refused(pair[0], "n1")
    assert "host key of n1 is not known" in said and "--accept-new" in said
    assert known.read_text() == ""
    sync(pair[0], "n1", accept_new=True)
    assert sync(pair[0], "n1")[0]["status"] == "equal"


def test_every_other_reason_of_ssh_is_named_with_its_fix(pair: Cluster) -> None:
    repository(pair[0])
    said = refused(pair[0], "n9")
    assert "the name n9 does not resolve" in said
    (pair[1].home / ".ssh" / "authorized_keys").write_text("")
    assert "ssh-copy-id n1" in refused(pair[0], "n1")
    pair[1].kill("sshd")
    assert "n1 refuses ssh connections" in refused(pair[0], "n1")


def test_what_a_host_lacks_is_named_with_its_fix(pair: Cluster) -> None:
    repository(pair[0])
    for program, path in (("python3", sys.base_prefix), ("rsync", "/usr/bin/rsync")):
        (pair[1].home / ".bashrc").write_text(f"PATH={HOME}/bin\n")
        (pair[1].home / "bin").mkdir(exist_ok=True)
        if program == "rsync":
            (pair[1].home / "bin" / "python3").symlink_to(Path(sys.executable).resolve())
        said = refused(pair[0], "n1")
        assert f"{program} is not installed on n1" in said and f"apt-get install {program}" in said, path


def test_a_login_script_that_prints_is_named(pair: Cluster) -> None:
    repository(pair[0])
    (pair[1].home / ".bashrc").write_text("echo welcome to n1; yes welcome | head -c 9000\n")
    said = refused(pair[0], "n1")
    assert "login scripts on n1 print text" in said and "ssh n1 true" in said


def test_a_drifted_file_is_found_and_repaired(pair: Cluster) -> None:
    here = repository(pair[0])
    sync(pair[0], "n1")
    drifted = on(pair[1]) / "src" / "model.py"
    times = drifted.stat()
    drifted.write_text("hidden_size = 65\n")  # the same length and time: rsync's quick check sees nothing
    os.utime(drifted, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert sync(pair[0], "n1")[0]["repaired"] == ["src/model.py"]
    assert tree(on(pair[1])) == tree(here)


def test_a_path_with_spaces_quotes_and_wildcards_works(pair: Cluster) -> None:
    path, decoy = (f'{WORK}/{word}t\'s a "研究" dir $HOME `x` \\ {end}' for word, end in (("[i]", "*"), ("i", "x")))
    here = repository(pair[0], path)
    (here / "a 'b' \"c\" $d *.py").write_text("x = 1\n")
    (here / os.fsdecode(b"latin-1 \xe9 and\nnewline")).write_text("x\n")
    on(pair[1], decoy).mkdir()  # what the wildcards would match
    sync(pair[0], "n1", root=path)
    assert tree(on(pair[1], path)) == tree(here)
    assert not list(on(pair[1], decoy).iterdir())


@pytest.mark.parametrize("side", ["sending", "receiving"])
def test_a_big_files_transfer_goes_on_after_kill_9_of_rsync(pair: Cluster, side: str) -> None:
    repository(pair[0])
    size = 120 << 20
    data = on(pair[0], f"{WORK}/shards")
    data.mkdir()
    (data / "0.bin").write_bytes(os.urandom(size))
    there = on(pair[1], f"{WORK}/shards")
    with subprocess.Popen(
        start(pair[0], "n1", data=[f"{WORK}/shards"]), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        until(lambda: any(path.stat().st_size > size // 4 for path in there.glob(".0.bin.*")))
        assert pair[0 if side == "sending" else 1].kill("rsync") > 0
        _, said = process.communicate(timeout=30)
    assert process.returncode == 2 and "n1" in said and "run the same command again" in said, said
    assert not (there / "0.bin").exists()  # whole or absent
    result = sync(pair[0], "n1", data=[f"{WORK}/shards"])[0]
    assert result["sent_bytes"] < 0.8 * size
    assert (there / "0.bin").read_bytes() == (data / "0.bin").read_bytes()
    assert [path.name for path in there.iterdir()] == ["0.bin"]


def test_two_hosts_that_share_the_directory_are_left_alone(pair: Cluster) -> None:
    here = repository(pair[0])
    on(pair[1]).symlink_to(here)  # the real machine's path, visible on both hosts as a shared disk is
    result = sync(pair[0], "n1")[0]
    assert result["status"] == "shared" and result["sent_files"] == 0
    assert not list(here.glob(".finlm-*"))


def test_only_this_machine_in_the_hostfile_is_said_and_fine(pair: Cluster) -> None:
    here = repository(pair[0])
    for hosts in ("n0 slots=2\n", "localhost slots=2\n", f"{pair[0].address} slots=1\n"):
        (here / "hostfile.txt").write_text(hosts)
        done = pair[0].run(sys.executable, "-c", MAIN, "hostfile.txt", cwd=f"{REPO}/src/..", env=ENV)
        assert "the hostfile names only this machine: nothing to sync" in done.stderr
    (here / "hostfile.txt").write_text("# n1 slots=2\n")
    assert "nothing to sync" in pair[0].run(sys.executable, "-c", MAIN, "hostfile.txt", cwd=REPO, env=ENV).stderr


def test_the_hostfile_of_the_repository_is_synced_from_a_folder_below(pair: Cluster) -> None:
    here = repository(pair[0])
    (here / "hostfile.txt").write_text("n0 slots=1\nn1 slots=1\n")
    done = pair[0].run(sys.executable, "-c", MAIN, "../hostfile.txt", cwd=f"{REPO}/src", env=ENV)
    assert "n0: this machine" in done.stderr and "n1: equal, tree" in done.stderr
    assert tree(on(pair[1])) == tree(here)


def test_a_host_name_that_is_an_option_is_refused(pair: Cluster) -> None:
    here = repository(pair[0])
    (here / "hostfile.txt").write_text("-oProxyCommand=touch${IFS}/srv/work/owned slots=1\nn1 slots=1\n")
    done = pair[0].run(sys.executable, "-c", MAIN, "hostfile.txt", cwd=REPO, env=ENV, check=False)
    assert done.returncode == 2 and "is not a host name" in done.stderr
    assert not (pair[0].work / "owned").exists() and not on(pair[1]).exists()
