"""One prepared corpus and one finished tiny run, shared by every end-to-end test of the session."""

from __future__ import annotations

import fcntl
import gc
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from xdist.scheduler import LoadFileScheduling

from finlm import prepare
from finlm.base.imports import hasten_transformers
from finlm.base.rundir import RunDir
from finlm.base.runs import RunFailed
from finlm.launch import start
from finlm.recipe import cluster, recipe

from helpers import QUICKSTART, ROOT, TINY, finlm, new_run, sets
from ranks import Ranks

HERE = Path(__file__).resolve().parent
gc.disable()  # until all is imported: to look for garbage among what stays is a sixth of a collection
hasten_transformers()
os.environ["FINLM_LANG"] = "en"  # whatever the machine speaks
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # each of hundreds of commands would compile finlm again
os.environ["OMP_NUM_THREADS"] = "1"  # threads that spin for a core that others use made a test 20 times as long
os.environ["OMP_WAIT_POLICY"] = "passive"  # also where a command chooses more threads
os.environ["XDG_CONFIG_HOME"] = f"{tempfile.gettempdir()}/finlm-tests-{os.getpid()}"  # no user's GPUs
# The longest first, so that no worker is left with one of them at the end, and hosts that wait beside ranks that train.
FIRST = (
    *("test_docs.py", "cluster", "train/test_training.py", "train/zero/test_checkpoint.py", "test_benchmarks.py"),
    *("train/test_toy.py", "test_train_command.py", "admit/test_gate.py", "test_out_of_memory.py", "train/post"),
    *("test_config.py", "train/test_incidents.py", "test_prepare"),
)
# What tools leave in a checkout by themselves.
LEFT_BY_TOOLS = {".git", ".venv", "__pycache__", ".pytest_cache", ".mypy_cache", ".ruff_cache"}
BEFORE = pytest.StashKey[set[Path]]()


class ByFile(LoadFileScheduling):  # type: ignore[misc]
    """A file's tests go to one worker, and those that raise hosts to two: they wait more than they compute."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.split("::")[0]
        return file if "/cluster/" not in file else "launches" if "_launch" in file or "_sync" in file else "losses"


@pytest.hookimpl(optionalhook=True)  # also with -p no:xdist
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> ByFile:
    """pytest-xdist 3.8 does not see groups of marks under pytest 9.2, whose items keep their names elsewhere."""
    return ByFile(config, log)


def pytest_collection_finish() -> None:
    """What was imported and collected stays: no test looks for garbage in it."""
    gc.freeze()
    gc.enable()


def files_of_the_checkout() -> set[Path]:
    """Every file and directory, but for those of tools."""
    paths = set[Path]()
    for directory, names, files in os.walk(HERE.parent):
        names[:] = [name for name in names if name not in LEFT_BY_TOOLS and not name.endswith(".egg-info")]
        paths.update(Path(directory, name) for name in (*names, *files))
    return paths


def pytest_sessionstart(session: pytest.Session) -> None:
    """Note what is in the checkout; one process of the session does."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        session.config.stash[BEFORE] = files_of_the_checkout()


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail the session when a test left something in the checkout: the next command would take it for the user's."""
    if BEFORE not in session.config.stash:
        return
    if left := sorted(str(path) for path in files_of_the_checkout() - session.config.stash[BEFORE]):
        print(f"\nFAILED: the tests left {len(left)} files in the checkout: {', '.join(left[:10])}")
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest first."""

    def rank(item: pytest.Item) -> int:
        name = item.path.relative_to(HERE).as_posix()
        return next((place for place, prefix in enumerate(FIRST) if name.startswith(prefix)), len(FIRST))

    items.sort(key=rank)


def once(tmp_path_factory: pytest.TempPathFactory, name: str, build: Callable[[Path], None]) -> Path:
    """A directory that the first of the session's workers builds and the others wait for."""
    base = tmp_path_factory.getbasetemp()
    directory = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / name
    with directory.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not directory.exists():
            build(directory)
    return directory


@pytest.fixture(autouse=True)
def clean_checkout() -> Iterator[None]:
    """Fail a test while which something new appears at the top of the checkout; with two workers both are named."""
    before = set(os.listdir(HERE.parent)) | LEFT_BY_TOOLS
    yield
    assert set(os.listdir(HERE.parent)) <= before


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """Overrides that make the quickstart a run of seconds, with the session's own cache."""

    def build(cache: Path) -> None:
        prepare.run(recipe.load(QUICKSTART, (*TINY, f"data.cache_dir={cache}")).recipe)

    return (*TINY, f"data.cache_dir={once(tmp_path_factory, 'cache', build)}")


@pytest.fixture(scope="session")
def finished(tiny: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> tuple[RunDir, str]:
    """A tiny run that went through `finlm train`, and what it printed. Other workers read it: copy it to change it."""

    def build(runs: Path) -> None:
        result = finlm("train", QUICKSTART, *sets(tiny), "--runs", runs)
        assert result.returncode == 0, result.stderr
        (runs / "printed.txt").write_text(result.stderr)

    runs = once(tmp_path_factory, "runs", build)
    (path,) = runs.glob("quickstart-*")
    return RunDir(path), (runs / "printed.txt").read_text()


@pytest.fixture(scope="session")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the checkout, where commands leave runs and caches; its .venv is this one."""
    copy = tmp_path_factory.mktemp("checkout") / ROOT.name
    left_out = {".git", ".venv", "runs", "cache"}
    shutil.copytree(ROOT, copy, ignore=lambda path, _: left_out if Path(path) == ROOT else {"__pycache__"})
    subprocess.run(["bash", "scripts/setup.sh"], cwd=ROOT, check=True)  # the copy finds it done
    (copy / ".venv").symlink_to(ROOT / ".venv")
    return copy


RunMaker = Callable[..., RunDir]
ForkedLaunch = Callable[..., None]


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """Runs the ranks of a run directory at a fifth of a launch's cost: ranks.train(make_run(...)) gives the rows."""
    with Ranks() as forked:
        yield forked


@pytest.fixture
def forked_launch(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> ForkedLaunch:
    """forked_launch(*fault): ranks that this process launches from now on are forked, each with a fault of faults.py.

    For tests of what comes before and after a launch; a rank that fails ends it as a launch of several ranks ends.
    """

    def use(*fault: Any) -> None:
        def launch(run: RunDir, *_: Any, **__: Any) -> None:
            if any(codes := ranks.codes(run, *fault)):
                raise RunFailed(f"exit codes {codes}")

        monkeypatch.setattr(start, "launch_ranks", launch)

    return use


@pytest.fixture
def make_run(tiny: tuple[str, ...], tmp_path: Path) -> RunMaker:
    """Create a run directory of the tiny recipe; make_run(*overrides, ranks=2) does not start it.

    names: hosts of the plan, which share the ranks; gpu: their kind.
    """

    def make(
        *overrides: str, ranks: int = 2, names: tuple[str, ...] = ("localhost",), gpu: str | None = None
    ) -> RunDir:
        loaded = recipe.load(QUICKSTART, (*tiny, f"train.cpu_ranks={ranks}", *overrides))
        hosts = cluster.Cluster(tuple(cluster.Host(name, ranks // len(names), gpu, 8 * 2**30) for name in names))
        return new_run(loaded, hosts, tmp_path / "runs")

    return make
