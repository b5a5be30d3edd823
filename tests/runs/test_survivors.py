"""A run that goes on by itself on other hosts: who is left out, who comes back, and what is told when nothing helps."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from finlm import pipeline
from finlm.base.errors import UserError
from finlm.base.rundir import RunDir
from finlm.base.runs import RunFailed
from finlm.doctor import gpus
from finlm.hosts import ssh
from finlm.launch import restart, start
from finlm.launch.head import HostsBack
from finlm.launch.restart import HostLost
from finlm.recipe import recipe
from finlm.recipe.cluster import Cluster, Host
from finlm.record import trackers
from finlm.runs import lineage

from helpers import QUICKSTART

FOUR = Cluster(tuple(Host(f"n{number}", 1) for number in range(3)), spares=(Host("n3", 1),))


class House:
    """Hosts of which some are down, and a `finlm train` on them whose launches end as the test says."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, path: Path, hosts: Cluster, *ends: Any) -> None:
        self.down: set[str] = set()
        self.ends, self.launched, self.told = list(ends), list[list[str]](), list[tuple[str, str]]()
        self.run, self.waits = RunDir(path / "quickstart-1"), list[float]()
        self.run.path.mkdir()
        monkeypatch.setattr(ssh, "answers", lambda name: name not in self.down)
        monkeypatch.setattr(gpus, "ask_kinds", lambda _, asked, *__: asked)
        monkeypatch.setattr(pipeline, "decide", self.decide)
        monkeypatch.setattr(lineage, "can_go_on", lambda *_: True)
        monkeypatch.setattr(restart.time, "sleep", self.sleep)
        monkeypatch.setattr(start, "notify", lambda _, event, __, text: self.told.append((event, text)))
        monkeypatch.setattr(trackers, "track_beside", lambda *_: nullcontext())
        monkeypatch.setattr(pipeline, "BEFORE_LAUNCH", (pipeline.Step("open", "", self.open),))
        monkeypatch.setattr(pipeline, "TRACKED", (pipeline.Step("train", "", self.launch),))
        monkeypatch.setattr(pipeline, "AFTER", ())
        self.fewest = 1
        self.training = pipeline.Training(recipe.load(QUICKSTART, ["launch.restarts=3"]), hosts, path)

    def open(self, t: pipeline.Training) -> None:
        """As the steps before launch: doctor refuses hosts that are down."""
        if self.down & {host.name for host in t.hosts.hosts}:
            raise pipeline.StepFailed("doctor or lint found an error")
        t.run, t.shards = self.run, SimpleNamespace(directory=self.run.path)  # type: ignore[assignment]
        t.plan = SimpleNamespace(precision="fp32", asynchronous_checkpoints=False)  # type: ignore[assignment]

    def decide(self, _: Any, hosts: Cluster, __: Any) -> tuple[Any, Any]:
        if len(hosts.hosts) < self.fewest:
            raise UserError("nothing fits")
        return None, None

    def launch(self, t: pipeline.Training) -> None:
        self.launched.append([host.name for host in t.hosts.hosts])
        self.ends.pop(0)()

    def sleep(self, seconds: float) -> None:
        self.waits.append(seconds)
        if len(self.waits) == 2:
            self.down.clear()

    def lose(self, *names: str, lost: str = "") -> Callable[[], None]:
        """An end of a launch: these hosts go down and the first of them is named."""

        def end() -> None:
            self.down |= set(names)
            error = HostLost(f"{names[0]} does not answer any more", host=names[0])
            error.is_gone = True
            raise error

        return end

    @property
    def actions(self) -> list[str]:
        return [row["action"] for row in self.run.read_events("restart")]


@pytest.fixture
def house(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> House:
    return House(monkeypatch, tmp_path, FOUR)


def fine() -> None:
    """A launch that trains to its end."""


def test_of_two_hosts_lost_at_once_a_spare_takes_the_place_of_one_and_the_other_is_left_out(house: House) -> None:
    house.ends = [house.lose("n1", "n2"), fine]
    assert pipeline.train(house.training) == 0
    assert house.launched == [["n0", "n1", "n2"], ["n0", "n3"]]
    assert house.actions == ["n3 in the place of n1, without n2"] and house.told[-1] == ("end", "finished")


def test_a_host_that_is_lost_while_the_run_starts_on_others_is_left_out_and_no_other_is_blamed(house: House) -> None:
    def lose_during_the_next_start() -> None:
        ask = gpus.ask_kinds

        def ask_and_lose(*words: Any) -> Cluster:
            house.down.add("n2")
            return ask(*words)

        gpus.ask_kinds = ask_and_lose
        house.lose("n1")()

    house.ends = [lose_during_the_next_start, fine]
    assert pipeline.train(house.training) == 0
    assert house.launched == [["n0", "n1", "n2"], ["n0", "n3"]]
    assert house.actions == ["n3 in the place of n1", "without n2"]


def test_a_replaced_host_is_a_spare_once_it_answers_again(house: House) -> None:
    def lose_the_spare() -> None:
        house.down.clear()
        house.lose("n3")()

    house.ends = [house.lose("n1"), lose_the_spare, fine]
    assert pipeline.train(house.training) == 0
    assert house.launched[1:] == [["n0", "n3", "n2"], ["n0", "n1", "n2"]]
    assert house.actions[-1] == "n1 in the place of n3"


def test_where_the_others_cannot_go_on_alone_the_lost_host_is_waited_for_once_a_checkpoint(house: House) -> None:
    house.fewest, house.ends = 4, [house.lose("n1"), house.lose("n1")]
    with pytest.raises(HostLost):
        pipeline.train(house.training)
    assert house.waits == [15.0, 30.0] and house.launched == [["n0", "n1", "n2"]] * 2
    assert house.actions == [restart.WAITED]
    assert house.told[-1] == ("end", "n1 does not answer any more")


def test_a_host_that_is_back_and_no_plan_takes_ends_no_run(house: House) -> None:
    def back() -> None:
        raise HostsBack(["n1"])

    refuse = iter([False, False, True, False])
    real = house.open

    def open_run(t: pipeline.Training) -> None:
        if next(refuse):
            raise UserError("nothing fits")
        real(t)

    pipeline.BEFORE_LAUNCH = (pipeline.Step("open", "", open_run),)
    house.training.hosts = Cluster(FOUR.hosts)
    house.ends = [house.lose("n1"), lambda: (house.down.clear(), back()), fine]
    assert pipeline.train(house.training) == 0
    assert house.launched == [["n0", "n1", "n2"], ["n0", "n2"], ["n0", "n2"]]
    assert house.actions == ["without n1", "with n1 again", "without n1"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_while_it_waits_for_a_restart_is_told(house: House, number: signal.Signals) -> None:
    house.ends = [lambda: os.kill(os.getpid(), number)]
    former = signal.signal(number, signal.SIG_DFL)  # SIGHUP is ignored under nohup
    try:
        with pytest.raises(SystemExit) as caught:
            pipeline.train(house.training)
        assert signal.getsignal(number) == signal.SIG_DFL
    finally:
        signal.signal(number, former)
    assert caught.value.code == 128 + number and house.told == [("end", f"ended with exit code {128 + number}")]


def test_the_end_of_a_run_that_goes_on_is_told_also_when_it_does_not_start(house: House) -> None:
    def refuse(t: pipeline.Training) -> None:
        if t.is_recovery:
            raise pipeline.StepFailed("doctor or lint found an error")
        house.open(t)

    pipeline.BEFORE_LAUNCH = (pipeline.Step("open", "", refuse),)
    house.training.hosts = Cluster(FOUR.hosts)
    house.ends = [house.lose("n1")]
    assert pipeline.train(house.training) == 1
    said = "n1 does not answer any more; without n1", "doctor or lint found an error"
    assert house.told == [("restart", said[0]), ("end", said[1])]


def test_a_mistake_of_the_first_start_is_no_matter_of_hosts(house: House) -> None:
    house.down.add("n1")
    assert pipeline.train(house.training) == 1 and not house.launched and not house.told


def test_a_bad_step_ends_a_run_that_goes_on(house: House) -> None:
    def fail() -> None:
        raise RunFailed("step 7 failed twice")

    house.ends = [house.lose("n1"), fail]
    with pytest.raises(RunFailed, match="failed twice"):
        pipeline.train(house.training)
    assert [event for event, _ in house.told] == ["restart", "end"]
