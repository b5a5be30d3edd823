"""Ray's engine: the same bytes from hosts that share no disk; a host that is not fit is named before work begins."""

from __future__ import annotations

import errno
import importlib.util
import os
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from finlm import prepare
from finlm.base import files
from finlm.base.errors import UserError
from finlm.base.step_cache import Cache
from finlm.cli import main
from finlm.corpus import ray_engine, workers
from finlm.corpus.ray_engine import Expected, Order
from finlm.corpus.read import readers
from finlm.corpus.workers import Mapper, Result, Task
from finlm.launch import ray_cluster
from finlm.recipe import recipe
from finlm.recipe.cluster import Cluster, Host
from finlm.recipe.schema import Recipe
from finlm.rows.shards import Shards
from finlm.world import writer

from helpers import QUICKSTART, ROOT, double

# Looked for, not imported: Ray reads the cluster's token when it is imported, and that is set when the cluster starts.
needs_ray = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="pip install -r requirements-ray.lock")


def fail(error: Exception) -> None:
    raise error


def expect(cache: Path, **changes: Any) -> Expected:
    """What a host that shares no disk has to have."""
    settings = {"seen_from": "head", "cache": cache, "token": os.urandom(4).hex(), "files": ()}
    return Expected(**{**settings, "packages": ray_engine.list_packages(), **changes})


def test_a_connection_is_closed_when_the_cache_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[bool] = []
    ray = SimpleNamespace(
        init=lambda *_, **__: None, shutdown=lambda: closed.append(True), remote=lambda **_: lambda work: work
    )
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setattr(ray_engine.files, "write_text", lambda *_: fail(OSError(errno.ENOSPC, "no space")))
    with pytest.raises(OSError, match="no space"), ray_engine._connect("auto", tmp_path, 1, (), True):
        pass
    assert closed == [True]


class FakeRay(SimpleNamespace):
    """A cluster of the hosts `alive` and `dead`, whose tasks run in this process."""

    def __init__(self, alive: Iterable[str], dead: Iterable[str]) -> None:
        self.alive, self.dead = set(alive), set(dead)
        strategies = SimpleNamespace(NodeAffinitySchedulingStrategy=lambda node, soft: node)
        super().__init__(
            exceptions=SimpleNamespace(RayTaskError=TaskError, RayError=ConnectionError),
            util=SimpleNamespace(scheduling_strategies=strategies),
            get=lambda value: value,
            init=lambda *_, **__: None,
            shutdown=lambda: None,
            remote=lambda **_: lambda function: SimpleNamespace(remote=function),
            wait=lambda references, timeout: (references, []),
        )

    def nodes(self) -> list[dict[str, Any]]:
        hosts = [*((name, 1.0) for name in sorted(self.alive)), *((name, 0.0) for name in sorted(self.dead))]
        return [
            {"NodeID": f"{name}'s", "NodeManagerHostname": name, "Alive": bool(cores), "Resources": {"CPU": cores}}
            for name, cores in hosts
        ]


def fake_ray(monkeypatch: pytest.MonkeyPatch, alive: Iterable[str], dead: Iterable[str] = ()) -> FakeRay:
    ray = FakeRay(alive, dead)
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setitem(sys.modules, "ray.util", ray.util)
    monkeypatch.setitem(sys.modules, "ray.util.scheduling_strategies", ray.util.scheduling_strategies)
    return ray


@pytest.mark.parametrize("left", [{"node1"}, set[str]()])
def test_a_host_lost_while_every_result_comes_at_once_is_named_at_the_end(
    left: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ray = fake_ray(monkeypatch, {"node1", "node2"}, dead={"old"})
    with (
        ray_engine.RayEngine(tmp_path, 1, lambda: nullcontext("auto"), joins=True) as engine,
        engine.start(3) as run,
    ):
        results = run(double, [1, 2, 3])
        assert next(results) == 2
        ray.alive, ray.dead = left, {"node1", "node2", "old"} - left
        assert list(results) == [4, 6]
        assert "is lost" not in capsys.readouterr().err
    told = capsys.readouterr().err
    assert "node2 is lost; its chunks are done again by the others\n" in told and "chunks by host: " in told
    assert "old is lost" not in told, "it died before we came"


def test_the_error_of_the_block_is_not_hidden_by_what_is_left_of_the_cluster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ray = fake_ray(monkeypatch, {"node1"})
    with (
        pytest.raises(KeyError, match="the step's own"),
        ray_engine.RayEngine(tmp_path, 1, lambda: nullcontext("auto"), joins=True) as engine,
        engine.start(3),
    ):
        ray.nodes = lambda: fail(OSError("the cluster is gone"))
        raise KeyError("the step's own")


@pytest.mark.parametrize(
    ("joins", "fix"),
    [(True, "has to be a node of it"), (False, "run again; if Ray ends again, /tmp/ray")],
)
def test_a_cluster_that_cannot_be_used_is_the_users_own_or_finlms(
    joins: bool, fix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ray = fake_ray(monkeypatch, {"node1"})
    ray.init = lambda *_, **__: fail(ConnectionError("no answer at 10.0.0.1:6379"))
    with (
        ray_engine.RayEngine(tmp_path, 1, lambda: nullcontext("10.0.0.1:6379"), joins=joins) as engine,
        pytest.raises(UserError, match="cannot be used from this machine") as told,
        engine.start(3),
    ):
        pass
    assert fix in told.value.fix and told.value.evidence == "no answer at 10.0.0.1:6379"


class FarEngine:
    """Ray's worker function in this process, each task on an empty disk: what a task does not list is not there."""

    def __init__(self, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.cache, self.aside = cache, cache.with_name("aside")
        read = SimpleNamespace(remote=lambda path: (self.aside / path.relative_to(cache)).read_bytes())
        self.store = SimpleNamespace(read=read)
        self.sent = 0
        monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(get=lambda value: value))

    @contextmanager
    def start(self, at_most: int) -> Iterator[Mapper]:
        yield self.map

    def shares_cache(self) -> bool:
        return False

    def map(self, function: Callable[[Task], Result], tasks: Iterable[Task]) -> Iterator[Result]:
        for task in tasks:
            order = Order(function, task, workers.files_read(task), workers.files_written(task))
            self.cache.rename(self.aside)
            answer = ray_engine.work(order, expect(self.cache), self.store)
            shutil.rmtree(self.cache)
            self.aside.rename(self.cache)
            for path, data in answer.made.items():
                files.write_bytes(path, data)
            self.sent += len(answer.made)
            yield answer.value


def corpus(directory: Path, *overrides: str) -> Recipe:
    """A recipe with every kind of chunk task, over two files."""
    for name, seed in (("one", 3), ("two", 4)):
        part = writer.write_part("fin_news", directory / name, 300_000, seed, "train", 0)
        part.rename(directory / f"{name}.jsonl.gz")
    (directory / "asked.csv").write_text("id,Question,A,B,Answer\n0,下列哪一项是公司债券的兑付方式,过户,付息,A\n")
    settings = (
        f"data.sources=[{directory}/one.jsonl.gz, {directory}/two.jsonl.gz]",
        f"data.cache_dir={directory}/cache",
        f"data.decontaminate={directory}/asked.csv",
        f"data.clean.perplexity={{clean_set: {directory}/two.jsonl.gz, max_perplexity: 1000}}",
        "data.dedup=near",
        "data.num_proc=1",
        "tokenizer.vocab_size=4000",
    )
    return recipe.load(QUICKSTART, (*settings, *overrides)).recipe


def hashes(shards: Path) -> list[str]:
    return [row["sha256"] for row in Shards(shards).manifest["shards"]]


def test_hosts_without_a_shared_disk_get_what_they_read_and_send_what_they_make(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readers, "BLOCK_BYTES", 100_000)
    wanted = corpus(tmp_path)
    local = hashes(prepare.run(wanted).directory)
    cache = Cache(tmp_path / "far" / "cache", build=True)
    engine = FarEngine(cache.directory, monkeypatch)
    with cache.lock_cache():
        assert hashes(prepare.run_steps(wanted, cache, engine)) == local
    assert engine.sent == 2 * (3 + 4), (
        "two chunks: three files of documents, contamination, perplexity, signatures, tokens"
    )
    kept = {path.name for path in (tmp_path / "cache/chunks").rglob("*.npz")}
    assert kept == {path.name for path in (cache.directory / "chunks").rglob("*.npz")}


def test_chunks_that_are_kept_here_are_not_lost_on_a_host_that_does_not_have_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One file's list of chunks is known, the other's is not though its chunk is; then one more source comes."""
    wanted = corpus(tmp_path)
    cache = Cache(tmp_path / "far" / "cache", build=True)
    engine = FarEngine(cache.directory, monkeypatch)
    local = hashes(prepare.run(wanted).directory)
    with cache.lock_cache():
        prepare.run_steps(wanted, cache, engine)
        for step in (
            *cache.directory.glob("documents-*"),
            *list((cache.directory / "chunks/files").rglob("*.json"))[:1],
        ):
            shutil.rmtree(step) if step.is_dir() else step.unlink()
        assert hashes(prepare.run_steps(wanted, cache, engine)) == local
        shutil.copy(tmp_path / "one.jsonl.gz", tmp_path / "three.jsonl.gz")
        grown = corpus(tmp_path, f"data.sources={tmp_path}/*.jsonl.gz")
        assert hashes(prepare.run_steps(grown, cache, engine)) == hashes(prepare.run(grown).directory)


def test_without_ray_the_command_to_install_it_is_told_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ray_engine.importlib.util, "find_spec", lambda name: None)
    settings = ["--set", "data.engine=ray", "--set", f"data.cache_dir={tmp_path}/cache"]
    for command in (["prepare"], ["train", "--runs", f"{tmp_path}/runs"]):
        assert main.main([*command, str(QUICKSTART), *settings]) == 2
        assert "pip install -r requirements-ray.lock" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_host_with_other_packages_or_without_a_file_is_named(tmp_path: Path) -> None:
    host, words = os.uname().nodename, tmp_path / "words.txt"
    assert ray_engine.check_host(expect(tmp_path)) is False
    shared = expect(tmp_path)
    shared.token_file.touch()
    assert ray_engine.check_host(shared) is True
    with pytest.raises(UserError, match=f"{host} has other packages than head") as other:
        ray_engine.check_host(expect(tmp_path, packages=(("python", "3.8.1"),)))
    assert "there 3.8.1" in other.value.evidence
    with pytest.raises(UserError, match=f"words.txt is missing on {host}"):
        ray_engine.check_host(expect(tmp_path, files=((words, "0" * 64),)))
    words.write_text("a")
    with pytest.raises(UserError, match=f"words.txt on {host} is not that of head"):
        ray_engine.check_host(expect(tmp_path, files=((words, "0" * 64),)))
    with pytest.raises(UserError, match=f"{host} cannot write to data.cache_dir"):
        ray_engine.check_host(expect(words / "cache"))


def test_a_full_disk_names_its_host_and_other_errors_stay_what_they_are(tmp_path: Path) -> None:
    full, lost = OSError(errno.ENOSPC, "No space left on device"), OSError(errno.EIO, "Input/output error")
    with pytest.raises(UserError, match=f"the disk of {os.uname().nodename} is full"):
        ray_engine.work(Order(fail, full, (), ()), expect(tmp_path), None)
    with pytest.raises(OSError, match="Input/output") as other:
        ray_engine.work(Order(fail, lost, (), ()), expect(tmp_path), None)
    assert other.value.__notes__ == [f"on {os.uname().nodename}"]
    with pytest.raises(UserError, match="no text") as told:
        ray_engine.work(Order(fail, UserError("no text", evidence="a.jsonl:3"), (), ()), expect(tmp_path), None)
    assert told.value.evidence == f"a.jsonl:3\non {os.uname().nodename}"


class TaskError(Exception):
    """Ray's error of a task: its cause, or None where that could not be sent."""

    def __init__(self, cause: Exception | None, text: str = "") -> None:
        super().__init__(text)
        self.cause = cause


@pytest.mark.parametrize(
    ("raised", "host", "problem", "evidence"),
    [
        (TaskError(ImportError("No module named 'orjson'")), "node7", "node7 belongs", "No module named 'orjson'"),
        (RuntimeError("the runtime_env failed"), "node7", "node7 belongs", "runtime_env failed"),
        (RuntimeError("the worker died"), "", "a worker was lost 4 times", "at rows.jsonl:7"),
        (TaskError(UserError("bad row", evidence="on node7")), "", "bad row", "on node7\nat rows.jsonl:7"),
    ],
)
def test_a_host_of_a_joined_cluster_that_fails_is_named_with_what_it_did(
    raised: Exception, host: str, problem: str, evidence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    errors = SimpleNamespace(RayTaskError=TaskError, RayError=RuntimeError)
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(get=fail, exceptions=errors))
    with pytest.raises(UserError, match=problem) as told:
        ray_engine._get(raised, "rows.jsonl:7", host)
    assert evidence in told.value.evidence


def test_an_error_that_cannot_be_sent_says_where_it_happened(monkeypatch: pytest.MonkeyPatch) -> None:
    errors = SimpleNamespace(RayTaskError=TaskError, RayError=RuntimeError)
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(get=fail, exceptions=errors))
    with pytest.raises(TaskError) as told:
        ray_engine._get(TaskError(None, "ip=10.0.0.7"), "rows.jsonl:7")
    assert told.value.__notes__ == ["at rows.jsonl:7"]


def test_only_the_cache_is_handed_out(tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "secret").write_text("s")
    with pytest.raises(ValueError):
        ray_engine.Store(tmp_path / "cache").read(tmp_path / "cache" / ".." / "secret")


@pytest.mark.slow
@needs_ray
def test_a_chunk_whose_worker_always_dies_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = [str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
    wanted, here = recipe.load(QUICKSTART).recipe, Cluster((Host("localhost", 1),))
    with (
        ray_engine.RayEngine(tmp_path, 2, lambda: ray_cluster.start_ray(wanted, here, False)) as engine,
        engine.start(3) as run,
        pytest.raises(UserError, match="a worker was lost 4 times") as caught,
    ):
        assert next(run(double, [1])) == 2
        list(run(double, [2, 99]))
    assert caught.value.evidence.startswith("at 99\n")


@pytest.mark.slow
@needs_ray
def test_ray_on_this_machine_makes_the_same_bytes_and_leaves_no_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(readers, "BLOCK_BYTES", 50_000)
    local = hashes(prepare.run(corpus(tmp_path)).directory)
    far = corpus(tmp_path, "data.engine=ray", f"data.cache_dir={tmp_path}/far", "data.num_proc=2")
    assert hashes(prepare.run(far).directory) == local
    assert "chunks by host: " in capsys.readouterr().err
    running = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if os.access(path, os.R_OK)]
    assert not [line for line in running if str(os.getpid()).encode() in line and b"raylet" in line]
