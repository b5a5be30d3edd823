"""Start the ranks of a run with the DeepSpeed launcher, follow events.jsonl, end everything that was started.

The launcher and its ranks get their own session, so that one signal ends them all: a SIGTERM to DeepSpeed's runner
alone leaves the ranks running as orphans. Success is the trainer's `end` event, not the exit code: the runner exits 0
when its child dies by a signal.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from finlm.base import files, screen
from finlm.base.errors import UserError
from finlm.base.rundir import RunDir, locked
from finlm.plan.plan import Plan
from finlm.recipe.cluster import Cluster, is_local
from finlm.recipe.schema import Recipe

POLL_SECONDS = 0.2


def refuse_remote_hosts(hosts: Cluster) -> None:
    """Raises UserError when the ranks would run anywhere but here."""
    remote = [host.name for host in hosts.hosts if not is_local(host.name)]
    if remote:
        raise UserError(
            f"the hostfile names other machines: {', '.join(remote)}",
            evidence="this version launches on one machine only",
            fix="comment the lines of hostfile.txt out, or leave --hostfile out, to train on this machine",
        )


def command(run: RunDir, plan: Plan, port: int) -> list[str]:
    """The DeepSpeed launcher's command line for a run on this machine."""
    return [
        *(sys.executable, "-m", "deepspeed.launcher.runner"),
        *("--hostfile", os.devnull),  # else the runner picks up /job/hostfile where there is one
        *(f"--num_gpus={plan.world_size}", "--master_addr=127.0.0.1", f"--master_port={port}", "--no_local_rank"),
        *("--module", "finlm.train", str(run.path)),
    ]


def host_env(recipe: Recipe, plan: Plan) -> dict[str, str]:
    """Environment of the ranks of a host: the recipe's env and the threads a rank may use."""
    env = {}
    if plan.device == "cpu":
        cores = len(os.sched_getaffinity(0))
        env["OMP_NUM_THREADS"] = str(max(1, cores // plan.hosts[0].slots))
    else:
        env["OMP_NUM_THREADS"] = "4" if plan.offload_optimizer == "none" else "16"
        env["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    return env | recipe.env


def write_host_env(run: RunDir, env: dict[str, str]) -> None:
    """Write env/<this host>.env, applied by every rank before torch is imported."""
    text = "".join(f"{name}={value}\n" for name, value in sorted(env.items()))
    files.write_text(run.env / f"{os.uname().nodename}.env", text)


def run_ranks(run: RunDir, plan: Plan) -> None:
    """Train to the end. Raises UserError with the first failing rank's last lines when it does not get there."""
    with locked(run) as lock:
        status = _launch(run, plan, lock)
    if status != "finished":
        raise UserError(
            f"training ended with status {status}",
            evidence=_last_words(run),
            fix=f"read {run.logs}; the same command resumes from the last complete checkpoint",
        )


def _launch(run: RunDir, plan: Plan, lock: int) -> str:
    """Start the launcher, follow it, and leave nothing behind; the status of the end event or "crashed"."""
    env = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, (str(run.code), os.environ.get("PYTHONPATH")))),
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}",  # ninja lies beside python
        "DS_SKIP_CUDA_CHECK": "1",  # nvcc may be newer than torch's CUDA within a major version
        "TOKENIZERS_PARALLELISM": "false",
    }
    run.logs.mkdir(parents=True, exist_ok=True)
    seen = run.events.stat().st_size if run.events.exists() else 0
    with (run.logs / "launcher.log").open("ab") as log:
        process = subprocess.Popen(
            command(run, plan, free_port()),
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            pass_fds=(lock,),
        )
    with _ended(process):
        return _follow(run, plan, process, seen)


def free_port() -> int:
    """A TCP port nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def _ended(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """Whatever happens in the block, no process of the launcher's session is left after it."""
    previous = signal.signal(signal.SIGTERM, _terminated)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
        for how, patience in ((signal.SIGTERM, 5.0), (signal.SIGKILL, 5.0)):
            if _session_is_gone(process, how, patience):
                break


def _terminated(*_: object) -> None:
    screen.say("terminated; the same command resumes from the last complete checkpoint")
    sys.exit(128 + signal.SIGTERM)


def _session_is_gone(process: subprocess.Popen[bytes], how: signal.Signals, patience: float) -> bool:
    deadline = time.monotonic() + patience
    try:
        os.killpg(process.pid, how)
        while time.monotonic() < deadline:
            process.poll()  # reaps, so that the group can become empty
            os.killpg(process.pid, 0)
            time.sleep(0.05)
    except ProcessLookupError:
        process.wait()
        return True
    return False


def _follow(run: RunDir, plan: Plan, process: subprocess.Popen[bytes], seen: int) -> str:
    """Show progress until the launcher ends; the status of the end event, or "crashed" without one."""
    status = "crashed"
    with screen.progress("training", plan.steps, "") as advance:
        for event in _events(run, process, seen):
            if event["kind"] == "start" and event["step"]:
                advance(event["step"])
            elif event["kind"] == "step":
                advance(1, f"step {event['step']}/{plan.steps}  {_describe(event)}")
            elif event["kind"] == "eval":
                screen.say(f"step {event['step']}: held-out loss {event['loss']:.4f}")
            elif event["kind"] == "incident":
                screen.say(f"step {event['step']}: {event['what']}: {event['detail']}")
            elif event["kind"] == "end":
                status = event["status"]
    return status


def _describe(event: dict[str, Any]) -> str:
    loss = "loss –" if event["loss"] is None else f"loss {event['loss']:.4f}"
    return f"{loss}  {event['tokens_per_second']:,.0f} tokens/s"


def _events(run: RunDir, process: subprocess.Popen[bytes], offset: int) -> Iterator[dict[str, Any]]:
    """Events behind the first offset bytes as they are written, until the launcher has ended and all are read."""
    while True:
        ended = process.poll() is not None
        if run.events.exists():
            with run.events.open("rb") as file:
                file.seek(offset)
                block = file.read()
            complete = block[: block.rfind(b"\n") + 1]
            offset += len(complete)
            yield from files.parse_json_lines(complete.splitlines())
        if ended:
            return
        time.sleep(POLL_SECONDS)


def _last_words(run: RunDir, lines: int = 12) -> str:
    """The end of the rank log that reports an error, preferring the rank that failed first."""
    logs = sorted(run.logs.glob("*.log"), key=lambda path: path.stat().st_mtime)
    texts = [(path, path.read_text(encoding="utf-8", errors="replace").splitlines()) for path in logs]
    for path, text in texts:
        if any("Error" in line for line in text) and path.name != "launcher.log":
            return "\n".join([f"{path}:", *text[-lines:]])
    for path, text in reversed(texts):
        if text:
            return "\n".join([f"{path}:", *text[-lines:]])
    return f"no output in {run.logs}"
