"""Start the ranks of a run on all hosts, follow events.jsonl, and end everything that was started.

Every host, this machine too, runs an agent (agent.py) that starts the host's ranks (node.py) as DeepSpeed's launcher
for a single node does (`deepspeed --no_ssh`), without its three seconds of imports. DeepSpeed's pdsh mode was measured
and rejected: killing its launcher or ssh session on a host leaves the ranks there and the others waiting, arguments
pass a remote shell unquoted, the environment is the same for all hosts, on SIGTERM it runs a `pkill -f` that hits every
DeepSpeed job of the interpreter, and its exit code is 0 when its child dies of a signal.

A run has succeeded when its events.jsonl has the trainer's `end` event; watch.py names what failed.
"""

from __future__ import annotations

import functools
import os
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from finlm.base import screen
from finlm.base.errors import UserError
from finlm.base.rundir import RunDir
from finlm.base.runs import RunFailed, lock_run, record_event, write_host_env
from finlm.hosts import checkpoint_parts, ssh, sync
from finlm.hosts.file_trees import model_path
from finlm.hosts.ssh import path_on_host
from finlm.launch import copies, head, watch
from finlm.launch.adapters import host_env
from finlm.launch.head import Session, StopRequest
from finlm.launch.messages import Command, Start
from finlm.launch.watch import Progress
from finlm.plan.plan import Plan
from finlm.recipe import recipe as recipes
from finlm.recipe.cluster import Cluster, Host
from finlm.recipe.schema import Launch, Recipe
from finlm.record import live

END_SECONDS = 12.0
SYNCED = ("recipe.yaml", "plan.json", "ds_config.json", "manifest.json", "data.json", "code", "continued")


@dataclass(frozen=True)
class Network:
    """By host name: variables that choose its network card, and its address for other hosts (doctor/preflight.py)."""

    env: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    addresses: Mapping[str, str] = field(default_factory=dict)


def launch_ranks(
    run: RunDir,
    plan: Plan,
    recipe: Recipe | None = None,
    hosts: Cluster | None = None,
    *,
    network: Network | None = None,
    accept_new_keys: bool = False,
) -> None:
    """Lock the run, copy it to its hosts, start the ranks, and follow them to the end of training.

    `recipe` and `hosts` are the run directory's if None; access to hosts may have changed since it was made.
    `accept_new_keys` stores unknown ssh host keys. On return all processes are ended on the hosts that answer. Raises
    RunFailed, with the cause that the logs show, when training does not get to its end; HostsBack or SystemExit after a
    request to stop (head.StopRequest); UserError when a host cannot be used or the run is running.
    """
    recipe = recipe or recipes.load(run.recipe).recipe
    hosts = hosts or Cluster(tuple(Host(host.name, host.slots, host.gpu) for host in plan.hosts))
    with lock_run(run):
        step = checkpoint_parts.choose_step(run, checkpoint_parts.list_holdings(run, hosts, accept_new_keys))
        sessions = _copy_to_hosts(run, recipe, hosts, accept_new_keys)
        former: dict[str, int] = {}
        try:
            beside = copies.copy_beside(run, recipe, hosts, accept_new_keys)
            away = head.watch_away_hosts(hosts.away, recipe.launch.restart_wait_seconds)
            with beside, away as back, head.note_signals() as stop, _end_sessions_after(sessions):
                _start_agents(run, recipe, sessions, accept_new_keys)
                seen = run.events.stat().st_size if run.events.exists() else 0
                former = {str(path): _count_lines(path) for path in run.logs.glob("*.log")}
                _start_ranks(run, plan, recipe, step, sessions, network or Network())
                follow(Following(run, plan, sessions, recipe.launch, stop, back), seen)
        except RunFailed as failure:
            raise _add_diagnosis(run, failure, former) from None


def _copy_to_hosts(run: RunDir, recipe: Recipe, hosts: Cluster, accept_new_keys: bool) -> list[Session]:
    """Copy the run directory, data and start model to every other host, and return a Session per host; start no agent.

    Prints each result. If rank 0 is elsewhere, also copies the events to run.lent_events, for it to read. Raises
    UserError when two hosts are this machine, or a copy fails.
    """
    here, remote = ssh.split_local(hosts.hosts)
    if len(here) > 1:
        names = " and ".join(host.name for host in here)
        raise UserError(f"{names} are the same machine: this one", fix="give it one line in the hostfile")
    copied = set[str]()  # not the hosts that share this disk, where the logs are already
    if remote:
        model = model_path(recipe)
        data = [run.shards, model] if model else [run.shards]
        places = {host.destination: functools.partial(path_on_host, access=host.access) for host in remote}
        if hosts.hosts[0] in remote and run.events.exists():
            # Rank 0 reads there which data roll-backs left out; a run that continues another, or a new disk, has none.
            run.lent_events.parent.mkdir(exist_ok=True)
            shutil.copyfile(run.events, run.lent_events)
        results = sync.sync(run.path, places, names=SYNCED, data=data, accept_new_keys=accept_new_keys)
        copied = {host.name for host, result in zip(remote, results, strict=True) if result.status == "equal"}
    sessions, first, patience = [], 0, recipe.launch.outage_seconds
    for node, host in enumerate(hosts.hosts):
        ranks, stream = range(first, first + host.slots), host.name in copied
        sessions.append(Session(host, node, ranks, local=host in here, stream=stream, patience=patience))
        first += host.slots
    return sessions


def _start_agents(run: RunDir, recipe: Recipe, sessions: Sequence[Session], accept_new_keys: bool) -> None:
    """Start every agent and wait for its greeting; late logs of a former launch arrive now.

    Raises UserError when an agent does not start or ranks of a former launch still run.
    """
    wanted = 0 if recipe.launch.master_port == "auto" else recipe.launch.master_port
    for session in sessions:
        there, python = path_on_host(run.path, session.host.access), ssh.python_on_host(session.host.access)
        session.start(run, there, python, wanted if session.node == 0 else None, accept_new_keys)
    for session in sessions:
        session.wait_hello()


def _start_ranks(
    run: RunDir, plan: Plan, recipe: Recipe, step: int, sessions: Sequence[Session], network: Network
) -> None:
    """Write each host's environment to the run, and ask its agent to start ranks that resume after step `step`.

    Raises UserError when launch.master_port is taken on the first host, or the address of a host is not known.
    """
    port, wanted = sessions[0].wait_hello().port, recipe.launch.master_port
    if not isinstance(port, int):
        raise UserError(
            f"port {wanted} of {sessions[0].name} cannot be used for the rendezvous",
            evidence=f"launch.master_port: {wanted}: {port}",
            fix=f"`ss -ltnp 'sport = :{wanted}'` on {sessions[0].name} names the process; or choose another port",
        )
    address = _addresses(sessions, network)[sessions[0].name]
    world = {each.name: list(each.host.devices or range(each.host.slots)) for each in sessions}
    for session in sessions:
        env = host_env(recipe, plan, session.host, session.wait_hello().cores, network.env.get(session.name, {}))
        write_host_env(run, session.name, env)
        shards = path_on_host(run.shards, session.host.access)
        session.send(
            Start(
                env,
                world,
                chosen=bool(session.host.devices),
                node=session.node,
                address=address,
                port=port,
                step=step,
                shards=None if shards == run.shards else str(shards),
            )
        )


def _addresses(sessions: Sequence[Session], network: Network) -> dict[str, str]:
    """Return {host: address at which the other hosts reach it}: the recipe's, else doctor's, else the ssh connection's.

    A single host has 127.0.0.1 unless the recipe gives an address. Raises UserError when none is known.
    """
    if len(sessions) == 1:
        return {sessions[0].name: sessions[0].host.access.address or "127.0.0.1"}
    hello = {session.name: session.wait_hello() for session in sessions}
    came_from = next(filter(None, (hello[s.name].came_from for s in sessions if not s.local)), None)
    addresses = {}
    for session in sessions:
        over_ssh = came_from if session.local else hello[session.name].arrived_at
        address = session.host.access.address or network.addresses.get(session.name) or over_ssh
        if address is None:
            raise UserError(
                f"the address of {session.name} is not known",
                evidence="its ssh server does not say at which address the connection arrived (SSH_CONNECTION)",
                fix=f"give it in the recipe: hosts.{session.name}.address",
            )
        addresses[session.name] = address
    return addresses


@contextmanager
def _end_sessions_after(sessions: Sequence[Session]) -> Iterator[None]:
    """End every process of the run on all hosts that answer when the block ends; waits up to 12 s."""
    try:
        yield
    finally:
        for session in sessions:
            session.end()
        deadline = time.monotonic() + END_SECONDS
        for session in sessions:
            session.release(deadline)


def _add_diagnosis(run: RunDir, failure: RunFailed, former: Mapping[str, int]) -> RunFailed:
    """Add the cause that the logs show to the failure's `cause` and `fix`, if any, and return the same failure.

    `former` is the number of lines of each log before this launch, which do not count. A guess is added to `fix` and
    makes `cause` "unknown". A failure that is certain stays as it is; if the logs cannot be read, `fix` says so.
    """
    if failure.is_certain:
        return failure
    from finlm.diagnose import command  # only a failed run needs its signatures

    try:
        findings = command.of_run(run.path, since=former)
    except OSError as error:
        failure.fix += f"\nthe logs could not be diagnosed: {error}"
        return failure
    new = [finding for finding in findings if finding.fatal]
    if failure.exit_code != 128 + signal.SIGTERM:  # then it was this process that ended the other ranks
        new = [finding for finding in new if finding.cause != "sigterm_preempted"]
    if new:
        top = new[0]
        failure.cause = "unknown" if top.by_rule else top.cause  # a guess forbids no other launch
        where = f"{Path(top.file).name}:{top.line}"
        failure.fix += f"\ndiagnosis of the logs ({where}): {top.title}\n{top.fix}".rstrip()
    return failure


def _count_lines(path: Path) -> int:
    """Return the number of line ends in a file."""
    with path.open("rb") as file:
        return sum(block.count(b"\n") for block in iter(lambda: file.read(1 << 20), b""))


POLL_SECONDS = 0.1
PING_SECONDS = 2.0
SLEPT_SECONDS = 5.0  # between two looks: this machine slept, or was stopped
END_ROW_SECONDS = 30.0  # from the exit of a rank that was asked to stop to the end row, which comes with logs
EXIT_SECONDS = 60.0  # from the trainer's end event to the end of its processes
DONE = ("finished", "interrupted", "failed")  # what the trainer's end event says


@dataclass(frozen=True)
class Following:
    """The arguments of follow(). `back` returns the names of the hosts that were away and answer again."""

    run: RunDir
    plan: Plan
    sessions: Sequence[Session]
    limits: Launch
    stop: StopRequest
    back: Callable[[], list[str]] = list


def follow(f: Following, seen: int) -> None:
    """Show new events until the run is over, and watch its ranks. `seen` is the size of events.jsonl to skip, in bytes.

    Returns once the run has finished and its processes have ended, or 60 s after it finished. Also sends the agents
    pings and passes signals on. Raises RunFailed when the run ended itself, or when a rank or host fails or nothing is
    finished for too long, which is recorded as an incident; SystemExit or HostsBack after an interruption.
    """
    run, sessions, limits = f.run, f.sessions, f.limits
    progress, status, next_ping, before = Progress(time.monotonic()), "", 0.0, time.monotonic()
    events = live.follow(run, seen)
    with live.show_run(f.plan) as view:
        while True:
            now = time.monotonic()
            slept, before = now - before, now
            over = all(session.code is not None for session in sessions)  # asked first: no event comes after it
            for event in next(events):
                status = _show_event(f, event, view, progress) or status
            if status in DONE:
                if over or progress.since(now) > EXIT_SECONDS:
                    break
            elif slept > SLEPT_SECONDS:
                # Silence now says nothing of the hosts: what they sent meanwhile is still to be read.
                watch.note_sleep(sessions, progress, slept, now)
            elif watch.in_trouble(sessions, now):
                watch.wait_for_signs_of_life(sessions, now)
                if status := _wait_for_end_row(f, events, view, progress):
                    continue
                raise _record_failure(f, progress, watch.find_first_failure(run, sessions, progress, time.monotonic()))
            elif progress.since(now) > 60 * progress.limit(limits)[1]:
                raise _record_failure(f, progress, watch.explain_stall(run, sessions, progress, limits, now))
            elif over:
                words = progress.words(now)
                raise _record_failure(f, progress, RunFailed("training ended without a word", evidence=words))
            if sentence := watch.describe_silence(sessions, progress, limits, now):
                screen.say(sentence)
            f.stop.pass_on(sessions, progress.stepped, limits.grace_seconds, now)
            view.refresh()
            if now > next_ping:
                next_ping = now + PING_SECONDS
                for session in sessions:
                    session.send(Command.PING)
            time.sleep(POLL_SECONDS)
    if status == "interrupted":
        f.stop.finish(progress.step)
    elif status == "failed":
        raise RunFailed(
            f"the run ended itself after step {progress.step or 0:,}: {progress.incident.get('what')}",
            evidence=str(progress.incident.get("detail") or ""),
            fix=f"docs/incidents.md; {head.RESUMES}",
            is_final=True,
        )


def _wait_for_end_row(
    f: Following, events: Iterator[list[Mapping[str, Any]]], view: live.View, progress: Progress
) -> str:
    """Show the events that came with the exit of a rank, and return the status of the `end` event; "" if there is none.

    Ranks that were asked to stop fail too: then waits, at most 30 s, until the first host has sent all its events.
    """
    deadline, status = time.monotonic() + (0.0 if f.stop.passed_on is None else END_ROW_SECONDS), ""
    while True:
        first = f.sessions[0]
        is_last = first.code is not None or first.closed is not None or time.monotonic() >= deadline
        for event in next(events):
            status = _show_event(f, event, view, progress) or status
        if status or is_last:
            return status
        time.sleep(POLL_SECONDS)


def _record_failure(f: Following, progress: Progress, failure: RunFailed) -> RunFailed:
    """Append the failure to events.jsonl as an incident, run launch.notify if set, and return the same failure."""
    record_event(f.run, "incident", step=progress.step or 0, what=failure.problem, detail=failure.evidence)
    notify(f.limits.notify, "incident", f.run.path, failure.problem)
    return failure


def _show_event(f: Following, event: Mapping[str, Any], view: live.View, progress: Progress) -> str:
    """Show an event and update `progress`; return the status of an `end` event, else "".

    At a checkpoint requests a stop (f.stop) if absent hosts answer again; at an incident runs launch.notify. After a
    silence that was printed, prints that the run goes on.
    """
    now = time.monotonic()
    if silence := progress.note_finished(now):
        screen.say(f"goes on after {silence:.0f} s")
    view.feed(event)
    if event["kind"] == "start":
        progress.step, progress.generated = event["step"] or progress.step, False
    elif event["kind"] == "step":
        progress.step, progress.stepped, progress.generated = event["step"], True, False
    elif event["kind"] == "generated":
        progress.generated = True
    elif event["kind"] in ("checkpoint", "in_memory"):
        f.stop.stop_for_hosts(f.back(), now)
    elif event["kind"] == "incident":
        progress.incident = event
        notify(f.limits.notify, "incident", f.run.path, f"{event['what']}: {event['detail']}")
    elif event["kind"] == "end":
        return str(event["status"])
    return ""


NOTIFY_SECONDS = 60.0


def notify(command: str | None, event: str, run: Path, text: str) -> None:
    """Run the user's command `launch.notify` in a shell, in a thread; do nothing when it is None.

    The command gets FINLM_EVENT (incident, restart or end), FINLM_RUN (the run directory) and FINLM_TEXT (`text` in one
    line) in its environment. This process waits for the thread before it exits; a failure of the command is printed.
    """
    if command is not None:
        threading.Thread(target=_run_notify_command, args=(command, event, run, text), name="notify").start()


def _run_notify_command(command: str, event: str, run: Path, text: str) -> None:
    """Run the shell command of launch.notify, at most 60 s with all that it starts; print when it fails."""
    told = {"FINLM_EVENT": event, "FINLM_RUN": str(run.absolute()), "FINLM_TEXT": " ".join(text.split())}
    env = os.environ | told
    quiet, line = subprocess.DEVNULL, ["/bin/sh", "-c", command]
    with tempfile.TemporaryFile() as errors:  # a pipe would wait for what the command leaves in the background
        try:  # in a session of its own: Ctrl-C is for the run
            done = subprocess.Popen(line, env=env, stdin=quiet, stdout=quiet, stderr=errors, start_new_session=True)
        except OSError as error:
            screen.say(f"launch.notify: {error}")
            return
        try:
            done.wait(NOTIFY_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(done.pid, signal.SIGKILL)
            done.wait()
            screen.say(f"launch.notify did not end within {NOTIFY_SECONDS:g} s and was killed")
            return
        errors.seek(0)
        said = errors.read().decode(errors="replace").strip()[-300:]
    if done.returncode:
        screen.say(f"launch.notify ended with exit code {done.returncode}: {said}")
