"""The agent of a host at the other end of a line: what it takes over, sends home and starts.

Two directories stand for the run here and on the host; a program of a few lines stands for the launcher.
"""

from __future__ import annotations

import io
import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from finlm.base import processes
from finlm.base.errors import UserError
from finlm.base.processes import children
from finlm.base.rundir import RunDir
from finlm.base.runs import hold_lock
from finlm.launch import agent, head, start, watch
from finlm.launch.head import Session
from finlm.launch.messages import Hello, Log, Start
from finlm.launch.watch import Progress
from finlm.recipe.cluster import Host

LAUNCHER = """
import json, signal
from pathlib import Path
from finlm.base.rundir import RunDir
world = json.loads(sys.argv[1])["world"]
blocked = sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ()))
RunDir(Path(sys.argv[-1])).append_event("launched", step=1, world=world, blocked=blocked)
"""

Greet = Callable[[], Session]


def play_launcher(code: Path, program: str) -> None:
    """Have a program run in the place of the launcher, with its arguments."""
    (code / "played.py").write_text(f"import sys\n{program}")
    (code / "sitecustomize.py").write_text(
        "import os, sys\n"
        "if 'finlm.launch.node' in sys.orig_argv:\n"
        "    sys.argv = sys.orig_argv[sys.orig_argv.index('finlm.launch.node'):]\n"
        "    import played\n"
        "    os._exit(0)\n"
    )


@pytest.fixture
def here(tmp_path: Path) -> RunDir:
    (tmp_path / "here" / "logs").mkdir(parents=True)
    return RunDir(tmp_path / "here")


@pytest.fixture
def there(tmp_path: Path) -> RunDir:
    (tmp_path / "there" / "code").mkdir(parents=True)
    play_launcher(tmp_path / "there" / "code", LAUNCHER)
    (tmp_path / "there" / "logs").mkdir()
    return RunDir(tmp_path / "there")


@pytest.fixture
def greet(here: RunDir, there: RunDir) -> Iterator[Greet]:
    """Start an agent for the first host and hear its greeting."""
    sessions = []

    def start() -> Session:
        session = Session(Host("n1", 2), 0, range(2), local=True, stream=True, patience=20)
        sessions.append(session)
        session.start(here, there.path, sys.executable, None, False)
        session.wait_hello()
        return session

    yield start
    for session in sessions:
        session.end()
        session.release(time.monotonic() + 10)


def launched(session: Session, here: RunDir, *, chosen: bool = False, **env: str) -> dict[str, Any]:
    """What the program that stands for the launcher was given; as the head reads it once the agent has ended."""
    world = {"n0": [0, 1], "n1": [0, 1]}
    session.send(Start(env, world, chosen=chosen, node=1, address="n0", port=1, step=0))
    assert session.release(time.monotonic() + 20)
    return list(here.read_events("launched"))[-1]


def until(condition: Callable[[], bool], seconds: float) -> None:
    """Wait for a condition; AssertionError after so many seconds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


def steps(run: RunDir) -> list[Any]:
    return [row["step"] for row in run.read_events()]


def test_a_first_host_without_the_runs_events_takes_the_heads_copy_and_does_not_send_it_back(
    here: RunDir, there: RunDir, greet: Greet
) -> None:
    there.lent_events.parent.mkdir()
    there.append_event("rollback", step=900, data_step=1001)
    here.events.write_bytes(there.events.read_bytes())
    there.events.rename(there.lent_events)
    session = greet()
    assert steps(there) == [900]
    session.end()
    assert session.release(time.monotonic() + 10)
    assert steps(here) == [900]


def test_the_login_of_who_types_the_command_is_no_address_of_the_run(
    monkeypatch: pytest.MonkeyPatch, greet: Greet
) -> None:
    monkeypatch.setenv("SSH_CONNECTION", "203.0.113.7 51022 10.0.0.1 22")
    head, worker = greet(), Session(Host("n2", 2), 1, range(2, 4), local=False, stream=True, patience=20)
    worker.hello = Hello(came_from="10.0.0.1", arrived_at="10.0.0.2")
    assert head.wait_hello().came_from is None
    assert start._addresses([head, worker], start.Network()) == {"n1": "10.0.0.1", "n2": "10.0.0.2"}
    met = start.Network(addresses={"n1": "192.168.0.7"})  # 10.0.0.1 is the host that ssh jumped over
    assert start._addresses([head, worker], met) == {"n1": "192.168.0.7", "n2": "10.0.0.2"}


def test_rows_of_while_the_line_was_down_come_home_with_the_next_greeting(
    here: RunDir, there: RunDir, greet: Greet
) -> None:
    launched(greet(), here)
    here.append_event("incident", step=1)
    there.append_event("rollback", step=2)
    session = greet()
    assert steps(here) == [1, 1, 2]
    launched(session, here)
    assert steps(here) == [1, 1, 2, 1]


@pytest.mark.parametrize(
    ("visible", "chosen", "devices"),
    [
        ("4, GPU-5f1c,6", False, ["4", "GPU-5f1c"]),
        ("4,5", True, [0, 1]),  # by --include
        ("4", False, [0, 1]),  # doctor says what is wrong with it
    ],
)
def test_a_launcher_gets_the_devices_that_doctor_examined_and_no_signal_of_a_scheduler(
    here: RunDir, greet: Greet, visible: str, chosen: bool, devices: list[Any]
) -> None:
    row = launched(greet(), here, chosen=chosen, CUDA_VISIBLE_DEVICES=visible)
    assert row["world"] == {"n0": [0, 1], "n1": devices}
    assert row["blocked"] == [signal.SIGINT, signal.SIGTERM]


def test_ranks_end_in_time_though_nobody_takes_their_logs(there: RunDir) -> None:
    play_launcher(
        there.code,
        "import time\nopen(sys.argv[-1] + '/logs/n1.0.log', 'w').write('NCCL INFO\\n' * 500_000)\ntime.sleep(60)\n",
    )
    agent = subprocess.Popen(
        [sys.executable, "-m", "finlm.launch.agent"],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(there.code), *sys.path])},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert agent.stdin and agent.stdout
    hello = {"do": "hello", "run": str(there.path), "host": "n1", "slots": 1, "port": None, "events": False, "sent": {}}
    start = {"do": "start", "env": {}, "world": {"n1": [0]}, "chosen": True, "node": 0, "address": "n1", "port": 1}
    for wish in (hello | {"stream": True, "patience": 3}, start | {"step": 0, "shards": None}):
        agent.stdin.write(json.dumps(wish).encode() + b"\n")
        agent.stdin.flush()
    began = time.monotonic()
    until(lambda: children(agent.pid) != [], 10)
    until(lambda: children(agent.pid) == [], 10)
    assert time.monotonic() - began > 2
    agent.kill()
    agent.communicate()


def test_what_a_host_sends_waits_for_room_here_and_then_for_the_next_launch(
    here: RunDir, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(head, "WAITING_BYTES", 3000)
    session = Session(Host("n1", 2), 0, range(2), local=True, stream=True, patience=20)

    def take(letter: str, end: int) -> int:
        session._store_message(here, Log("logs/n1.0.log", letter * 2000, end))
        return session.sent["logs/n1.0.log"]

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (3000, before[1]))  # as a disk with so much room
    try:
        assert [take("a", 2000), take("b", 4000), take("c", 6000)] == [2000, 3000, 3000]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert take("d", 8000) == 6000 and take("e", 10_000) == 6000  # d did not fit in memory, so e is not taken either
    assert (here.logs / "n1.0.log").read_text() == "a" * 2000 + "b" * 2000 + "c" * 2000
    assert json.loads((here.path / ".sent-n1.json").read_text()) == {"logs/n1.0.log": 6000}
    assert capsys.readouterr().err.count("what n1 sends waits for room here") == 1


def test_what_cannot_be_understood_ends_the_run_with_its_own_cause(here: RunDir, tmp_path: Path) -> None:
    agent = tmp_path / "agent"
    words = json.dumps({"kind": "log", "file": "/etc/passwd", "text": "x", "end": 1})
    agent.write_text(f"#!/bin/sh\necho 'finlm-agent:{words}'\nexec sleep 30\n")
    agent.chmod(0o755)
    session = Session(Host("n1", 2), 0, range(2), local=True, stream=True, patience=20)
    session.start(here, tmp_path, str(agent), None, False)
    until(lambda: session.closed is not None, 10)
    now = time.monotonic()
    assert watch.in_trouble([session], now)
    failure = watch.find_first_failure(here, [session], Progress(now), now)
    assert failure.problem == "what n1 said was not understood here" and "'/etc/passwd'" in failure.evidence
    assert session._process is not None
    session._process.kill()
    session.release(now + 10)


def test_a_rank_that_outlives_its_launcher_is_seen_by_the_next_agent(
    there: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent, "LOCK_SECONDS", 0)
    monkeypatch.setenv("FINLM_HOST", "n1")
    for held in (agent._lock(there, "n1"), hold_lock(there), hold_lock(there)):  # an agent and two ranks
        assert held is not None
        assert agent._lock(there, "n1") is None
        os.close(held)
    assert agent._lock(there, "n1") is not None


def test_a_note_of_what_was_sent_that_a_power_cut_emptied_counts_for_nothing(here: RunDir, greet: Greet) -> None:
    (here.path / ".sent-n1.json").touch()
    assert greet().sent == {}


def test_a_signal_reaches_ranks_that_live_and_no_process_that_has_their_pid_now(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    code = "import subprocess\nfor rank in '01': subprocess.Popen(['sleep', '60'], env={'RANK': rank})\ninput()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE) as launcher:
        ranks = agent.Ranks(launcher.pid, 2)
        until(lambda: not ranks.find_ended() and len(ranks.pids) == 2, 10)
        first, second = ranks.pids[0], ranks.pids[1]
        os.kill(first, signal.SIGSTOP)
        until(lambda: ranks.states() == {0: "T", 1: "S"}, 10)
        ranks.born[1] = "1"  # as a process that got the pid of a rank after its end
        ranks.signal(signal.SIGKILL)
        assert ranks.find_ended()[-1] == (1, agent.MISSED)
        until(lambda: not processes.is_alive(first), 10)
        assert processes.is_alive(second)
        monkeypatch.setattr(ranks, "states", lambda: {0: "S"})  # it has ended since it was looked at
        os.kill(second, signal.SIGKILL)
        launcher.kill()
        launcher.wait()
        until(lambda: processes.read_status(first) is None, 10)
        ranks.signal(signal.SIGTERM)


def test_silent_agents_are_all_given_up_in_the_time_of_one(
    here: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(head, "HELLO_SECONDS", 1.0)
    program = tmp_path / "agent"
    program.write_text("#!/bin/sh\nexec sleep 60\n")
    program.chmod(0o755)
    hosts = [Session(Host(f"n{n}", 1), n, range(n, n + 1), local=True, stream=True, patience=20) for n in range(4)]
    began = time.monotonic()
    for session in hosts:
        session.start(here, tmp_path, str(program), None, False)
    for session in hosts:
        with pytest.raises(UserError, match="did not start"):
            session.wait_hello()
    assert time.monotonic() - began < 3
    for session in hosts:
        session.release(0.0)


def test_a_request_that_a_broken_connection_has_cut_ends_the_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO('{"do": "ping"}\n{"do": "pi'))
    line = agent.Line()
    assert line.next_request(10) is None
    assert not line.open
    line.finish()
