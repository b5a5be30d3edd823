"""Start the ranks of a run on all hosts, follow events.jsonl, end everything that was started.

Every host, this machine too, runs an agent (launch_agent.py) that starts DeepSpeed's launcher of one node
(`deepspeed.launcher.launch`, what `deepspeed --no_ssh` runs). DeepSpeed's pdsh mode was measured and left: killing its
launcher or ssh session on a host leaves the ranks there and the others waiting, arguments pass a remote shell unquoted,
environment is the same for all hosts, on SIGTERM it runs `pkill -f` that hits every DeepSpeed job of the interpreter,
and its exit code is 0 when its child dies by a signal. With an agent a host, each of these is ours to decide.

Success is the trainer's `end` event. What fails is told by launch_watch.py; nothing of a run is left on any host.
"""

from __future__ import annotations

import functools
import shutil
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from finlm.base.errors import RunFailed, UserError
from finlm.base.rundir import RunDir, locked, write_host_env
from finlm.ops import launch_follow, launch_stop, places, ssh, sync
from finlm.ops.doctor_trees import model_path
from finlm.ops.launch_env import host_env
from finlm.ops.launch_session import Session
from finlm.ops.places import there
from finlm.plan.plan import Plan
from finlm.recipe import recipe as recipes
from finlm.recipe.cluster import Cluster, Host
from finlm.recipe.schema import Recipe

END_SECONDS = 12.0
SYNCED = ("recipe.yaml", "plan.json", "ds_config.json", "manifest.json", "data.json", "code", "continued")


def run_ranks(
    run: RunDir,
    plan: Plan,
    recipe: Recipe | None = None,
    hosts: Cluster | None = None,
    *,
    network: Mapping[str, Mapping[str, str]] | None = None,
    accept_new: bool = False,
) -> None:
    """Train to the end on the plan's hosts. Raises RunFailed with the cause when it does not get there.

    recipe and hosts: the run directory's unless given; access to hosts may have changed since it was made. network:
    what each host's ranks need in their environment to talk through the right card (doctor_network.host_env).
    """
    recipe = recipe or recipes.load(run.recipe).recipe
    hosts = hosts or Cluster(tuple(Host(host.name, host.slots, host.gpu) for host in plan.hosts))
    with locked(run):
        sessions = _sessions(run, recipe, hosts, accept_new)
        former: dict[str, int] = {}
        try:
            with launch_stop.noted() as stop, _ended(sessions):
                _greet(run, recipe, sessions, accept_new)
                seen = run.events.stat().st_size if run.events.exists() else 0
                former = {str(path): _lines(path) for path in run.logs.glob("*.log")}
                _start(run, plan, recipe, hosts, sessions, network or {})
                launch_follow.follow(run, plan, sessions, recipe.launch, seen, stop)
        except RunFailed as failure:
            raise _diagnosed(run, failure, former) from None


def _sessions(run: RunDir, recipe: Recipe, hosts: Cluster, accept_new: bool) -> list[Session]:
    """Bring the run to every host and prepare a session for each. Raises UserError when a host cannot have it."""
    with ThreadPoolExecutor(16) as pool:
        own = list(pool.map(lambda host: ssh.is_this_machine(host.destination), hosts.hosts))
    here = [host.name for host, is_own in zip(hosts.hosts, own, strict=True) if is_own]
    if len(here) > 1:
        raise UserError(f"{' and '.join(here)} are the same machine: this one", fix="give it one line in the hostfile")
    remote = [host for host, is_own in zip(hosts.hosts, own, strict=True) if not is_own]
    status = dict.fromkeys(here, "this machine")
    if remote:
        model = model_path(recipe)
        data = [run.shards, model] if model else [run.shards]
        places = {host.destination: functools.partial(there, access=host.access) for host in remote}
        names = [host.destination for host in remote]
        if hosts.hosts[0] in remote and run.events.exists():
            # Rank 0 reads there which data roll-backs left out; a run that continues another, or a new disk, has none.
            run.lent_events.parent.mkdir(exist_ok=True)
            shutil.copyfile(run.events, run.lent_events)
        results = sync.sync(run.path, names, names=SYNCED, data=data, there=places, accept_new=accept_new)
        status |= {host.name: result.status for host, result in zip(remote, results, strict=True)}
    sessions, first, patience = [], 0, recipe.launch.outage_seconds
    for node, host in enumerate(hosts.hosts):
        ranks = range(first, first + host.slots)
        local, copied = status[host.name] == "this machine", status[host.name] == "equal"
        sessions.append(Session(host, node, ranks, local=local, stream=copied, patience=patience))
        first += host.slots
    return sessions


def _greet(run: RunDir, recipe: Recipe, sessions: Sequence[Session], accept_new: bool) -> None:
    """Start every agent and learn how the hosts are reached; what a former launch could not send home comes now."""
    wanted = 0 if recipe.launch.master_port == "auto" else recipe.launch.master_port
    for session in sessions:
        access = session.host.access
        session.start(
            run, there(run.path, access), places.python(access), wanted if session.node == 0 else None, accept_new
        )
    for session in sessions:
        session.wait_hello()
    port = sessions[0].hello["port"]
    if isinstance(port, str):
        raise UserError(
            f"port {wanted} of {sessions[0].name} cannot be used for the rendezvous",
            evidence=f"launch.master_port: {wanted}: {port}",
            fix=f"`ss -ltnp 'sport = :{wanted}'` on {sessions[0].name} names the process; or choose another port",
        )


def _start(
    run: RunDir,
    plan: Plan,
    recipe: Recipe,
    hosts: Cluster,
    sessions: Sequence[Session],
    network: Mapping[str, Mapping[str, str]],
) -> None:
    """Let every agent start its ranks."""
    addresses = _addresses(sessions)
    world = {host.name: list(host.devices or range(host.slots)) for host in hosts.hosts}
    for session in sessions:
        env = host_env(recipe, plan, session.host, session.hello["cores"], network.get(session.name, {}))
        write_host_env(run, session.name, env)
        shards = there(run.shards, session.host.access)
        session.say(
            do="start",
            env=env,
            world=world,
            chosen=bool(session.host.devices),
            node=session.node,
            address=addresses[sessions[0].name],
            port=sessions[0].hello["port"],
            shards=None if shards == run.shards else str(shards),
        )


def _addresses(sessions: Sequence[Session]) -> dict[str, str]:
    """Each host's address as its peers reach it: where ssh arrived, and for this machine from where it came."""
    if len(sessions) == 1:
        return {sessions[0].name: sessions[0].host.access.address or "127.0.0.1"}
    came_from = next((s.hello["came_from"] for s in sessions if not s.local and s.hello["came_from"]), None)
    found = {}
    for session in sessions:
        address = session.host.access.address or (came_from if session.local else session.hello["arrived_at"])
        if address is None:
            raise UserError(
                f"the address of {session.name} is not known",
                evidence="its ssh server does not say at which address the connection arrived (SSH_CONNECTION)",
                fix=f"give it in the recipe: hosts.{session.name}.address",
            )
        found[session.name] = address
    return found


@contextmanager
def _ended(sessions: Sequence[Session]) -> Iterator[None]:
    """Whatever happens in the block, no process of the run is left on a host that can be reached after it."""
    try:
        yield
    finally:
        for session in sessions:
            session.end()
        deadline = time.monotonic() + END_SECONDS
        for session in sessions:
            session.release(deadline)


def _diagnosed(run: RunDir, failure: RunFailed, former: Mapping[str, int]) -> RunFailed:
    """The failure with the known cause that the logs show. `former`: lines in the logs before this launch."""
    if failure.is_certain:
        return failure
    from finlm.ops import diagnose  # only a failed run needs its signatures

    try:
        found = diagnose.of_run(run.path, since=former)
    except OSError as error:
        failure.fix += f"\nthe logs could not be diagnosed: {error}"
        return failure
    new = [finding for finding in found if finding.fatal]
    if failure.exit_code != 128 + signal.SIGTERM:  # then it was this process that ended the other ranks
        new = [finding for finding in new if finding.cause != "sigterm_preempted"]
    if new:
        top = new[0]
        where = f"{Path(top.file).name}:{top.line}"
        failure.fix += f"\ndiagnosis of the logs ({where}): {top.title}\n{top.fix}".rstrip()
    return failure


def _lines(path: Path) -> int:
    with path.open("rb") as file:
        return sum(block.count(b"\n") for block in iter(lambda: file.read(1 << 20), b""))
