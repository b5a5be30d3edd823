"""The silent rank is the one whose stack is not like the others'."""

from __future__ import annotations

import faulthandler
import re
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from finlm.base.rundir import RunDir
from finlm.launch import watch
from finlm.launch.head import Session
from finlm.launch.watch import Progress
from finlm.recipe.cluster import Host
from finlm.recipe.schema import Launch

WAITS = (("/v/torch/distributed/distributed_c10d.py", 9, "all_reduce"), ("/r/code/finlm/train/pretrain.py", 67, "main"))
READS = (("/r/code/finlm/rows/shards.py", 5, "read"), ("/r/code/finlm/train/pretrain.py", 61, "main"))


def test_a_real_dump_is_read_to_the_main_threads_stack() -> None:
    with tempfile.TemporaryFile("w+") as file:
        file.write("step 3\n")
        file.flush()
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0, 2)
        file.write("step 4\n")
        file.seek(0)
        text = file.read()
    stack = watch.parse_stack(text)
    assert stack[0][2] == "test_a_real_dump_is_read_to_the_main_threads_stack"
    assert re.search(r"test_stacks.py:\d+ in test_a_real", watch.format_stack(stack))
    assert watch.parse_stack("no dump here\n") == ()


def test_the_odd_one_out_is_silent() -> None:
    assert watch.find_blamed_ranks({0: WAITS, 1: READS}, {}) == [1]
    assert watch.find_blamed_ranks({0: WAITS, 1: WAITS, 2: READS, 3: WAITS}, {}) == [2]
    elsewhere = (("/v/torch/_tensor.py", 1, "item"), ("/r/code/finlm/train/zero/checkpoint.py", 3, "save"))
    item = (("/v/torch/_tensor.py", 1, "item"), ("/r/code/finlm/train/pretrain.py", 150, "log_step"))
    assert watch.find_blamed_ranks({0: item, 1: elsewhere, 2: item}, {}) == [1]


def test_a_rank_without_an_answer_or_stopped_is_silent_and_equal_stacks_blame_nobody() -> None:
    assert watch.find_blamed_ranks({0: WAITS, 1: ()}, {}) == [1]
    assert watch.find_blamed_ranks({0: (), 1: ()}, {1: "T"}) == [1]
    assert watch.find_blamed_ranks({0: WAITS, 1: WAITS}, {0: "S", 1: "S"}) == []


class Answering(Session):
    """A host whose rank prints its stack, if any, after some seconds and in two parts, as a busy one does."""

    def __init__(self, run: RunDir, rank: int, stack: watch.Stack, seconds: float = 0.0, state: str = "S") -> None:
        super().__init__(Host(f"n{rank}", 1), rank, range(rank, rank + 1), local=False, stream=True, patience=60)
        self.log, self.stack, self.seconds = run.logs / f"n{rank}.{rank}.log", stack, seconds
        self.states = {str(rank): state}

    def send(self, request: Any) -> None:
        if self.stack:
            threading.Thread(target=self.answer).start()

    def answer(self) -> None:
        frames = "".join(f'  File "{file}", line {line} in {name}\n' for file, line, name in self.stack)
        worker = 'Thread 0x01 (most recent call first):\n  File "/usr/lib/python3/queue.py", line 1 in get\n'
        for seconds, text in (
            (self.seconds, worker),
            (0.3, f"\nCurrent thread 0x02 (most recent call first):\n{frames}"),
        ):
            time.sleep(seconds)
            with self.log.open("a") as file:
                file.write(text)


def blamed(run: RunDir, *sessions: Session) -> str:
    run.logs.mkdir()
    now = time.monotonic()
    return watch.explain_stall(run, sessions, Progress(now - 2000, step=3, stepped=True), Launch(), now).problem


def test_a_rank_that_answers_late_is_waited_for_and_not_blamed(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    assert blamed(run, Answering(run, 0, WAITS, 3.2), Answering(run, 1, READS)).startswith("rank 1 on n1 made no")


def test_a_stopped_rank_and_a_silent_host_are_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "STACK_SECONDS", 600.0)
    run = RunDir(tmp_path)
    silent = Answering(run, 2, ())
    silent.heard -= 30
    problem = blamed(run, Answering(run, 0, WAITS), Answering(run, 1, (), state="T"), silent)
    assert problem.startswith("rank 1 on n1 made no progress")
