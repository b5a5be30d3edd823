"""Ranks of runs, forked from one process that has imported the trainer: `with Ranks() as ranks: ranks.train(run)`.

Programs that would import it too can be run the same way (`ranks.run_program`).

A launch through `finlm train` costs 15 CPU seconds on two ranks, nearly all of them imports (torch, DeepSpeed,
transformers). Here they are paid once a session; each rank runs `finlm.train.__main__.main` as the launcher's ranks do.
What the launcher itself does is proved where it is used: tests/launch, tests/cluster, tests/test_train_command.py.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import runpy
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from finlm.base import processes
from finlm.base.imports import hasten_transformers
from finlm.base.rundir import RunDir
from finlm.plan.plan import Plan
from finlm.recipe import recipe
from finlm.train.__main__ import STAGES

HERE = Path(__file__).resolve().parent
END_SECONDS = 4.0  # from the failure of one rank to the end of the others


class Ranks:
    """The process that ranks are forked from; started at the first use."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def train(self, run: RunDir) -> list[dict[str, Any]]:
        """Run all ranks of a run directory to their end; its step rows. AssertionError with the logs when one fails."""
        codes = self.codes(run)
        logs = "\n".join(path.read_text()[-3000:] for path in sorted(run.logs.glob("*.log")))
        assert not any(codes), f"exit codes {codes}\n{logs}"
        return list(run.read_events("step"))

    def codes(self, run: RunDir, *fault: Any) -> list[int]:
        """Run all ranks of a run directory to their end; their exit codes (signals negative).

        fault: the name of a function in faults.py and its arguments; every rank calls it before it begins.
        """
        stage, plan = getattr(recipe.load(run.recipe).recipe, "stage", "pretrain"), Plan.read(run.plan)
        modules = [f"finlm.train.{STAGES[stage]}", *(["torch._inductor.compile_fx"] if plan.compiled else [])]
        request = {"run": str(run.path), "world_size": plan.world_size, "modules": modules, "fault": fault}
        return list(self._ask(request, run.logs))

    def run_program(self, program: Path, arguments: Sequence[str], directory: Path) -> tuple[int, str]:
        """Run a Python program in this working directory, to which it leaves logs; (exit code, what it printed)."""
        printed = directory / "printed.log"
        request = {"program": str(program), "arguments": arguments, "printed": str(printed)}
        return int(self._ask(request, directory)), printed.read_text(encoding="utf-8")

    def _ask(self, request: dict[str, Any], logs: Path) -> Any:
        """The answer to a request. logs: the directory of those to be shown when it does not come."""
        try:
            return self._answer(request)
        except BaseException:  # also of a test that ran out of time: the answer would be taken for the next one's
            self._kill(logs)
            raise

    def _answer(self, request: dict[str, Any]) -> Any:
        if self._process is None:
            paths = [str(HERE.parent / "src"), str(HERE), os.environ.get("PYTHONPATH", "")]
            # DeepSpeed compiles its CPU Adam with the ninja of this environment; threads would not survive a fork.
            path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
            env = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "PATH": path, "OMP_NUM_THREADS": "1"}
            env |= {"CXX": str(HERE / "g++"), "TORCHINDUCTOR_COMPILE_THREADS": "1"}
            command = [sys.executable, __file__]
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env, start_new_session=True
            )
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, f"the process of the ranks ended with {self._process.wait()}"
        return json.loads(answer)

    def _kill(self, logs: Path) -> None:
        """Print where the ranks are and kill them with their process; the next request starts another one."""
        if self._process is None:
            return
        for pid in processes.children(self._process.pid):
            processes.send_signal(pid, signal.SIGUSR1)  # each writes its stack to its log
        time.sleep(2)
        for path in sorted(logs.glob("*.log")):
            print(f"{path.name}: {path.read_text()[-4000:]}")
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._process = None

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process and self._process.stdin and self._process.stdout:
            self._process.stdin.close()
            self._process.wait(30)
            self._process.stdout.close()


def serve() -> None:
    """Answer a request a line on stdin with the exit codes on stdout, until stdin closes."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print must not mix with the answers
    warm_up()
    for line in sys.stdin:
        request = json.loads(line)
        answer: Any
        if "program" in request:
            answer = fork_program(**request)
        else:
            for name in request["modules"]:
                importlib.import_module(name)
            answer = fork_ranks(request["world_size"], ["finlm.train", request["run"]], request.get("fault", ()))
        print(json.dumps(answer), file=answers, flush=True)


def warm_up() -> None:
    """Import the trainer and what its ranks would import otherwise."""
    import gc

    gc.disable()
    hasten_transformers()
    for name in ("finlm.train.pretrain", "transformers.models.llama.modeling_llama"):
        importlib.import_module(name)
    know_cpu()
    gc.freeze()  # the ranks share these pages, and need not look for garbage there
    gc.enable()


def know_cpu() -> None:
    """Ask for the CPU's name once: DeepSpeed's CPU Adam asks in every rank, in two processes and 1.4 s."""
    import cpuinfo

    known = cpuinfo.get_cpu_info()
    cpuinfo.get_cpu_info = lambda: known


def fork_program(program: str, arguments: Sequence[str], printed: str) -> int:
    """Fork a process that runs a program as `python program arguments` does; its exit code.

    printed: the file for what it writes to stdout and stderr; it works in the directory of that.
    """
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.chdir(Path(printed).parent)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            for stream in (1, 2):
                os.dup2(os.open(printed, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
            sys.argv[:], sys.path[0] = [program, *arguments], str(Path(program).parent)
            runpy.run_path(program, run_name="__main__")
            code = 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
            print(end.code)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def fork_ranks(world_size: int, argv: Sequence[str], fault: Sequence[Any] = ()) -> list[int]:
    """Fork ranks that run finlm.train's main with these arguments; their exit codes."""
    port = str(processes.free_port(0))
    env = {"WORLD_SIZE": str(world_size), "LOCAL_SIZE": str(world_size)}
    env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "FINLM_HOST": "localhost"}
    children = []
    for rank in range(world_size):
        child = os.fork()
        if child == 0:
            os.environ.update(env, RANK=str(rank), LOCAL_RANK=str(rank))
            sys.argv[:] = argv
            try:
                from finlm.train import __main__

                if fault:
                    getattr(importlib.import_module("faults"), fault[0])(*fault[1:])
                __main__.main()
            finally:
                os._exit(99)  # main does not return
        children.append(child)
    return _exit_codes(children)


def _exit_codes(children: Sequence[int]) -> list[int]:
    """Exit codes in order; when one has failed, the others get END_SECONDS, as with a launcher."""
    codes: dict[int, int] = {}

    def kill_the_rest() -> None:
        for child in children:
            if child not in codes:
                with contextlib.suppress(ProcessLookupError):  # waited for, not yet noted
                    os.kill(child, signal.SIGKILL)

    timer = threading.Timer(END_SECONDS, kill_the_rest)
    while len(codes) < len(children):
        child, status = os.wait()
        codes[child] = os.waitstatus_to_exitcode(status)
        if codes[child] and timer.ident is None:
            timer.start()
    timer.cancel()
    return [codes[child] for child in children]


if __name__ == "__main__":
    serve()
