"""What `finlm sync` brings and leaves, between real ssh servers on hosts with disks of their own."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterator

import pytest

from .netcluster import WORK, Cluster
from .syncing import ENV, MAIN, REPO, on, refused, repository, sync, tree, until


@pytest.fixture(scope="module")
def lasting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """One cluster for this file: its tests change nothing but the work directories.

    Its user shares ssh connections, as many do: it must not disturb, and saves a third of the time.
    """
    with Cluster(2, tmp_path_factory.mktemp("cluster")) as cluster:
        shared = "ControlMaster auto\nControlPath ~/.ssh/%C\nControlPersist 60\n"
        (cluster[0].home / ".ssh" / "config").write_text(shared)
        yield cluster


@pytest.fixture
def pair(lasting: Cluster) -> Iterator[Cluster]:
    """Two hosts with empty work directories."""
    yield lasting
    for path in (path for host in lasting.hosts for path in host.work.iterdir()):
        if path.is_symlink():
            path.unlink()
        else:
            shutil.rmtree(path)


def test_code_arrives_on_every_host_with_the_same_tree_hash(trio: Cluster) -> None:
    here = repository(trio[0])
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
    assert "not empty and was not written by finlm sync" in said and "thesis.tex" in said and "ssh n1 mv " in said
    assert tree(on(pair[1])).keys() == {"thesis.tex"}


def test_a_directory_that_is_a_run_is_left_to_the_host_that_started_it(pair: Cluster) -> None:
    repository(pair[0])
    (on(pair[1]) / "checkpoints" / "step-20").mkdir(parents=True)
    (on(pair[1]) / ".lock").write_text("42 n1\n")
    said = refused(pair[0], "n1")
    assert f"{REPO} was started on n1, not on this machine" in said and "process 42 on n1 ran it last" in said
    assert "go on there" in said and not any(word in said for word in ("rm -", " mv ", "remove"))
    with pair[1].popen("flock", f"{REPO}/.lock", "sleep", "60") as holder:
        until(lambda: "is running now" in refused(pair[0], "n1"))
        pair[1].kill("sleep")
        holder.wait(10)


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
    (here / "hostfile.txt").write_text("-oProxyCommand=touch${IFS}/srv/job/owned slots=1\nn1 slots=1\n")
    done = pair[0].run(sys.executable, "-c", MAIN, "hostfile.txt", cwd=REPO, env=ENV, check=False)
    assert done.returncode == 2 and "is not a host name" in done.stderr
    assert not (pair[0].work / "owned").exists() and not on(pair[1]).exists()
