"""What a drill breaks and what that cost; the share of the time that trains, against its expectation."""

from __future__ import annotations

import json
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from finlm.base.errors import UserError
from finlm.base.rundir import RunDir
from finlm.cli import main
from finlm.hosts import ssh
from finlm.hosts.remote import fault
from finlm.plan import planner
from finlm.recipe import recipe, shape
from finlm.recipe.cluster import Cluster, Host
from finlm.runs import drill
from finlm.runs.drill import Failing, Injury

from helpers import QUICKSTART, ROOT, finlm_here


def test_costs_are_read_from_the_events(tmp_path: Path) -> None:
    rows = [{"kind": "step", "step": step, "time": 100.0 + step} for step in range(1, 11)]
    rows += [
        {"kind": "incident", "step": 10, "time": 114.0},
        {"kind": "restart", "time": 115.0},
        {"kind": "start", "step": 8, "time": 120.0},
        *({"kind": "step", "step": step, "time": 115.0 + step} for step in range(9, 20)),
    ]
    (tmp_path / "events.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    injury = Injury("rank-killed", "n1", 10, 111.0, "killed")
    share = drill._measure(RunDir(tmp_path), [injury], began=101.0, stopped=134.0)
    assert (injury.detected_after, injury.training_after, injury.steps_lost) == (3.0, 13.0, 2)
    assert share == pytest.approx(1 - (13.0 + 2 * 1.0) / 33.0)  # 13 s without a step, two steps of 1 s done again


def test_an_unknown_fault_is_refused_with_the_known_ones() -> None:
    with pytest.raises(UserError, match="no fault is called earthquake") as caught:
        drill.check_kinds("rank-killed,earthquake")
    assert "connection-cut" in caught.value.fix
    assert {*drill.check_kinds("")} == {*fault.FAULTS} - {"disk-filled"}
    assert drill.check_kinds("disk-filled") == ["disk-filled"]


@pytest.mark.parametrize("kind", ["rank-killed", "agent-killed"])
def test_only_processes_of_the_run_are_killed(kind: str, tmp_path: Path) -> None:
    word = fault.RANK if kind == "rank-killed" else fault.AGENT
    code = "import time; time.sleep(60)"
    mine, other = (
        subprocess.Popen([sys.executable, "-c", code, "-m", word, str(tmp_path / name)]) for name in ("run", "other")
    )
    try:
        assert str(mine.pid) in fault.FAULTS[kind](tmp_path / "run")
        assert mine.wait(10) == -9 and other.poll() is None
        with pytest.raises(LookupError):
            fault.FAULTS[kind](tmp_path / "run")
    finally:
        mine.kill()
        other.kill()


def test_a_disk_is_full_for_a_while_and_has_its_room_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mount = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(tmp_path)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting a tmpfs needs root")
    try:
        before, during = shutil.disk_usage(tmp_path).free, list[int]()
        monkeypatch.setattr(fault.time, "sleep", lambda _: during.append(shutil.disk_usage(tmp_path).free))
        assert fault.FAULTS["disk-filled"](tmp_path) == "8 MiB filled for 20 s"
        assert during == [0] and shutil.disk_usage(tmp_path).free == before and not list(tmp_path.iterdir())
        monkeypatch.setattr(fault, "MOST_FILLED", 2**20)
        with pytest.raises(LookupError, match="more than the drill fills"):
            fault.FAULTS["disk-filled"](tmp_path)
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


def test_a_byte_of_the_newest_checkpoint_is_turned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    part = tmp_path / "checkpoints" / "step-10" / "a.pt"
    part.parent.mkdir(parents=True)
    part.write_bytes(bytes(100))
    monkeypatch.setattr(fault, "send_signal", lambda *_: "killed")
    assert "a.pt of step-10; killed" in fault.damage_checkpoint(tmp_path)
    assert part.read_bytes().count(1) == 1


TRAINS = """
import json, pathlib, signal, sys, time
run = pathlib.Path(sys.argv[1]) / "toy-1"
run.mkdir(parents=True)
(run / "recipe.yaml").touch()
(run / "plan.json").write_text(sys.argv[2])
rows = (run / "events.jsonl").open("a")
def write(**row):
    print(json.dumps({"time": time.time(), **row}), file=rows, flush=True)
def stop(*_):
    write(kind="end", step=1, status="interrupted")
    sys.exit(143)
signal.signal(signal.SIGTERM, stop)
write(kind="start", step=0)
for step in range(1, 1000):
    write(kind="step", step=step)
    write(kind="checkpoint", step=step)
    time.sleep(0.05)
"""
DRILLS = """
import signal, sys
from pathlib import Path
from finlm.recipe.cluster import Cluster, Host
from finlm.runs import drill
drill.POLL_SECONDS = 0.05
signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job of a shell inherits that it is ignored
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # and under nohup this
runs, hosts = Path(sys.argv[3]), Cluster((Host("localhost", 1),))
train = [sys.executable, "-c", sys.argv[1], str(runs), sys.argv[2]]
drill.drill(drill.Drill(train, "toy", hosts, runs, ["connection-cut"], 600, 0.3), drill.show)
"""


def plan_on(*names: str) -> str:
    """The quickstart's plan for ranks on these hosts, as JSON."""
    wanted = recipe.load(QUICKSTART).recipe
    hosts = Cluster(tuple(Host(name, 1) for name in names))
    return json.dumps(planner.make(wanted, hosts, shape.of(wanted, 4096)).to_json())


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_drill_that_is_interrupted_ends_its_training_and_shows_what_it_has_seen(
    how: signal.Signals, tmp_path: Path
) -> None:
    command = [sys.executable, "-u", "-c", DRILLS, TRAINS, plan_on("localhost"), str(tmp_path / "runs")]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, start_new_session=True) as process:
        assert process.stderr
        heard = process.stderr.readline()  # the first fault: it cannot be caused here
        assert "connection-cut on localhost: not done: LookupError: no agent here" in heard
        process.send_signal(how)
        try:
            said, _ = process.communicate(timeout=30)
        finally:
            process.kill()
    assert "connection-cut (not done)" in said and "%, 0 faults" in said
    assert [row["kind"] for row in RunDir(tmp_path / "runs/toy-1").read_events()][-1] == "end"


def test_a_drill_whose_run_saves_no_checkpoint_ends_in_its_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(drill, "POLL_SECONDS", 0.05)
    program = TRAINS.replace('write(kind="checkpoint", step=step)', "pass").replace("1000", "200")  # for ten seconds
    train = [sys.executable, "-c", program, str(tmp_path), plan_on("localhost")]
    hosts = Cluster((Host("localhost", 1),))
    drill.drill(drill.Drill(train, "toy", hosts, tmp_path, ["connection-cut"], 0.6, 0.2), drill.show)
    assert "0 faults" in capsys.readouterr().out
    assert [row["status"] for row in RunDir(tmp_path / "toy-1").read_events("end")] == ["interrupted"]


def test_a_second_interruption_kills_the_training_and_the_table_is_shown_all_the_same(tmp_path: Path) -> None:
    stubborn = TRAINS.replace("    sys.exit(143)", "    time.sleep(60)")
    command = [sys.executable, "-u", "-c", DRILLS, stubborn, plan_on("localhost"), str(tmp_path / "runs")]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, start_new_session=True) as process:
        assert process.stderr and "not done" in process.stderr.readline()
        process.send_signal(signal.SIGINT)
        events = tmp_path / "runs/toy-1/events.jsonl"
        while "interrupted" not in events.read_text():  # the training has its SIGTERM
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        try:
            said, _ = process.communicate(timeout=30)
        finally:
            process.kill()
    assert "connection-cut (not done)" in said and "%, 0 faults" in said


@pytest.mark.parametrize(
    ("program", "problem", "fix"),
    [
        (TRAINS.replace("1000", "2"), "the run ended before the drill did", "train.steps=N"),
        ("import sys; sys.exit(1)", "the drill's run did not begin", "read its last words above"),
    ],
    ids=["short", "refused"],
)
def test_a_run_that_is_too_short_and_one_that_does_not_begin_are_told_apart(
    program: str, problem: str, fix: str, tmp_path: Path
) -> None:
    train = [sys.executable, "-c", program, str(tmp_path), plan_on("localhost")]
    hosts = Cluster((Host("localhost", 1),))
    with pytest.raises(UserError, match=problem) as caught:
        drill.drill(drill.Drill(train, "toy", hosts, tmp_path, ["rank-killed"], 60, 30), drill.show)
    assert fix in caught.value.fix


def test_a_drill_into_which_no_fault_fits_is_refused_before_it_trains(tmp_path: Path) -> None:
    settings = drill.Drill(["false"], "toy", Cluster((Host("localhost", 1),)), tmp_path, ["rank-killed"], 60, 120)
    with pytest.raises(UserError, match="no fault fits"):
        drill.drill(settings, drill.show)


def test_where_only_this_machine_is_left_the_next_fault_waits_for_no_copy(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "toy-1")
    run.path.mkdir()
    (run.path / "recipe.yaml").touch()
    run.plan.write_text(plan_on("localhost"))
    for kind in ("copied", "restart", "checkpoint"):
        run.append_event(kind, step=1)
        time.sleep(0.01)
    settings = drill.Drill([], "toy", Cluster((Host("localhost", 1), Host("n1", 1))), tmp_path, [], 60, 30)
    settings.before = set()
    since = next(run.read_events("restart"))["time"]
    with subprocess.Popen(["sleep", "60"]) as settings.process:
        try:
            assert drill._wait_for_checkpoint(settings, since, time.time() + 2)
        finally:
            settings.process.kill()


def test_a_lost_host_gets_no_more_faults_and_one_that_does_not_answer_ends_no_drill(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "plan.json").write_text(plan_on("n0", "n2"))  # n1 is lost, n2 was its spare
    run, all_hosts = RunDir(tmp_path), Cluster((Host("n0", 1), Host("n1", 1)), spares=(Host("n2", 1), Host("n3", 1)))
    hosts = drill._list_hosts(run, all_hosts)
    assert [host.name for host in hosts] == ["n0", "n2"]

    def fail(*_: object, **__: object) -> None:
        raise UserError("n2 does not answer")

    monkeypatch.setattr(ssh, "run", fail)
    injury = drill._injure(run, hosts[1], "rank-killed")
    assert not injury.is_done and "n2 does not answer" in injury.what


def test_all_processes_of_a_run_are_killed_and_none_of_a_run_whose_name_begins_alike(tmp_path: Path) -> None:
    code = "import time; print(flush=True); time.sleep(60)"
    words = [(fault.RANK, "run"), (fault.RANK, "run"), (fault.AGENT, "run"), (fault.RANK, "run.2")]
    started = [
        subprocess.Popen([sys.executable, "-c", code, "-m", word, str(tmp_path / name)], stdout=subprocess.PIPE)
        for word, name in words
    ]
    try:
        for process in started:
            assert process.stdout and process.stdout.readline()
        said = fault.FAULTS["all-killed"](tmp_path / "run")
        assert all(str(process.pid) in said for process in started[:3])
        assert [process.wait(10) for process in started[:3]] == [-9] * 3 and started[3].poll() is None
    finally:
        for process in started:
            process.kill()
            process.communicate()


@pytest.mark.parametrize(
    ("hosts", "rate", "interval"), [(16, 1 / 16, 720.0), (1200, 0.02, 300.0), (1, 0.5, 1800.0)], ids=str
)
def test_the_simulation_agrees_with_the_expectation(hosts: int, rate: float, interval: float) -> None:
    failing = Failing(hosts, rate, interval, stall=2.0, detection=60.0, restart=120.0)
    found = drill.forecast(failing, 90 * drill.DAY)
    lost = 60.0 + 120.0 + interval / 2  # of a failure, where they are rare beside checkpoints
    expected = interval / (interval + 2.0) * failing.between / (failing.between + lost)
    assert found.share == pytest.approx(expected, abs=0.006)
    assert found.low < found.share < found.high


def test_one_failure_a_day_of_16_hosts_leaves_97_percent() -> None:
    failing = Failing(16, 1 / 16, interval=600.0, stall=1.0, detection=60.0, restart=120.0)
    assert drill.forecast(failing, 30 * drill.DAY).share > 0.97


def test_plan_prints_it() -> None:
    done = finlm_here("plan", ROOT / "recipes/xuanyuan-6b/pretrain.yaml", "--failures", "0.1", "--json")
    assert done.returncode == 0, done.stderr
    assert "failures a host and day: one in" in done.stdout + done.stderr
    assert 0.5 < json.loads(done.stdout.splitlines()[-1])["failures"]["share"] < 1


@pytest.mark.parametrize("odd", ["0", "-1", "nan", "1e-320", "often"])
def test_odd_failure_rates_are_mistakes_of_the_user(odd: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main.main(["plan", str(QUICKSTART), f"--failures={odd}"])
    assert caught.value.code == 2 and repr(odd) in capsys.readouterr().err


def test_ranks_may_fail_while_they_come_up_the_first_time_too() -> None:
    failing = Failing(1, 1.0, interval=600.0, stall=0.0, detection=60.0, restart=3600.0)
    early = random.Random()
    early.expovariate = lambda _: 1800.0  # type: ignore[method-assign] - each launch ends before it trains
    assert drill.simulate(failing, drill.DAY, early) == 0.0
    never = random.Random()
    never.expovariate = lambda _: 1e9  # type: ignore[method-assign]
    assert drill.simulate(failing, drill.DAY, never) == pytest.approx(23 / 24, abs=0.01)


def test_a_rate_that_leaves_no_time_to_train_is_refused_at_once() -> None:
    failing = Failing(2, 1e9, interval=600.0, stall=1.0, detection=60.0, restart=120.0)
    with pytest.raises(UserError, match=r"1e\+09 failures a host and day leave no time to train") as caught:
        drill.forecast(failing, 30 * drill.DAY)
    assert "60 seconds until one is noticed" in caught.value.evidence and "--failures 0.0038" in caught.value.fix


def test_a_long_run_with_many_failures_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = list[float]()
    monkeypatch.setattr(drill, "simulate", lambda failing, wanted, chance: seconds.append(wanted) or 0.5)
    drill.forecast(Failing(1, 100.0, interval=600.0, stall=1.0, detection=60.0, restart=120.0), 1e9)
    assert set(seconds) == {drill.MOST_FAILURES * 864.0}
