"""Launch a run, and launch it again after a failure while that may help.

The cause in the logs decides: a cause that another launch would meet again (a wrong recipe, a full disk, a missing
kernel) ends the run at once. A second failure at the same step means a bad step: its data, its numbers or the code. A
host that is gone, or that failed twice, is left out when the checkpoint is whole without it (HostLost): pipeline.py
then plans the run anew for a spare host or for the remaining hosts. Without such a checkpoint the launches wait for the
host, longer each time.

A run that ended itself (incidents.*, a signal) is not restarted. A launch that only set a damaged checkpoint aside does
not count: the next launch resumes from the checkpoint before it. A run that ran out of memory goes on with the next
plan that fits, if the recipe leaves open what that changes; launch.restarts does not count it, and there is no wait.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from finlm import config
from finlm.base import checkpoints, files, runs, screen
from finlm.base.errors import UserError
from finlm.base.rundir import RunDir
from finlm.base.runs import RunFailed
from finlm.base.units import format_bytes
from finlm.hosts import checkpoint_parts, ssh
from finlm.launch import start
from finlm.plan import out_of_memory
from finlm.plan.out_of_memory import Taken
from finlm.plan.plan import Plan, changed_keys
from finlm.recipe.cluster import Cluster, Host
from finlm.recipe.schema import Launch, Recipe
from finlm.record.report import run_page

LONGEST_WAIT_SECONDS = 600.0
BAD_HOST = "a bad host"
USED_UP = "not restarted again: launch.restarts is {}: used up"
WAITED = "again, once all hosts answer"


# Causes, by their id in diagnose/signatures.yaml, that another launch may not meet again: networks, hosts, devices.
PASSING = frozenset(
    {
        *("nccl_collective_timeout", "nccl_ib_error", "nccl_net_unreachable", "nccl_peer_died"),
        *("nccl_unhandled_system_error", "silent_hang_first_collective", "rdzv_store_peer_reset"),
        *("rdzv_master_unreachable", "rdzv_nodes_missing", "port_in_use", "ssh_unreachable", "hostname_unresolvable"),
        *("driver_not_working", "gpu_hw_error", "cuda_kernel_fault", "host_memory_insufficient", "ray_node_oom"),
        *("nfs_stale", "ckpt_corrupt", "hub_access", "sigterm_preempted", "sighup_disconnect", "unknown"),
    }
)


@dataclass(frozen=True)
class Failure:
    """A launch that failed: the step it was in, the host to blame ("" if unknown), and whether it finished a step.

    `step` is below 0, and different each time, when the launch failed before its ranks knew at which step they begin.
    `checkpoint` is the step of the newest checkpoint then, 0 for none.
    """

    step: int
    host: str
    has_stepped: bool
    checkpoint: int = 0


class HostLost(RunFailed):
    """Raised when the run can go on without `host`, which is gone (and may come back) or failed too often."""


def run_ranks(
    run: RunDir,
    plan: Plan,
    recipe: Recipe,
    hosts: Cluster,
    *,
    network: start.Network | None = None,
    accept_new_keys: bool = False,
) -> None:
    """Call start.launch_ranks(), and again after failures that may pass: launch.restarts times without new checkpoint.

    When a rank runs out of memory, the plan is replaced, in the run directory too, and restarts are counted anew.
    Prints why it restarts and records it as events. `accept_new_keys` stores unknown ssh host keys. Raises the last
    RunFailed, with the reason why it is not restarted; HostLost when the run can go on with other hosts; HostsBack when
    absent hosts answer again; UserError when the first launch cannot start; SystemExit after a signal.
    """
    if run.former_plans:  # a kill may have come between the new plan and its settings
        files.write_json(run.ds_config, config.deepspeed_settings(recipe, plan))
    restarts = Restarts(run, recipe, hosts)
    while True:
        seen = sum(1 for _ in run.read_events())
        # What stands in the logs already is of former launches.
        logged = {path: path.stat().st_size for path in run.logs.glob("*.log")}
        try:
            start.launch_ranks(run, plan, recipe, hosts, network=network, accept_new_keys=accept_new_keys)
            return
        except RunFailed as failure:
            if _has_set_checkpoint_aside(run, seen):
                screen.say("a damaged checkpoint was set aside: started again from the one before it")
                continue
            taken = {} if failure.is_final else _read_memory_use(run, logged)
            former = len(run.former_plans)
            is_replaceable = taken and former < out_of_memory.MOST
            if is_replaceable and (smaller := out_of_memory.next_plan(recipe, hosts, plan, taken, former)):
                _bring_checkpoint(run, plan, smaller, hosts, accept_new_keys)
                _replace_plan(run, plan, smaller, recipe, max(0, _describe_failure(run, "", seen, 0).step - 1))
                plan, restarts = smaller, Restarts(run, recipe, hosts)  # the smaller plan has not failed yet
                continue
            if taken and not is_replaceable:
                failure.evidence = f"planned again {out_of_memory.MOST} times before\n{failure.evidence}"
            restarts.wait_after(failure, plan, seen)
        except UserError as error:
            restarts.wait_after_no_start(error, plan)


class Restarts:
    """The failures of a run on a fixed set of hosts. After each failure it waits for the next launch, or raises."""

    def __init__(self, run: RunDir, recipe: Recipe, hosts: Cluster) -> None:
        """Begin with no failure."""
        self.run, self.recipe, self.hosts = run, recipe, hosts
        self.failures: list[Failure] = []

    def wait_after(self, failure: RunFailed, plan: Plan, seen: int) -> None:
        """Note a failed launch and sleep before the next launch; raise `failure`, or HostLost, when there must be none.

        `seen` is the number of rows of events.jsonl before that launch. A final failure, and any if launch.restarts is
        0, is raised as it is. Otherwise adds to its evidence why there is no restart, and to its fix what to do about a
        bad host; may ask the hosts over ssh. A wait is printed and recorded as a `restart` event.
        """
        limit = self.recipe.launch.restarts
        if failure.is_final or not limit:
            raise failure
        self.failures.append(_describe_failure(self.run, failure.host, seen, -1 - len(self.failures)))
        problem = reason_to_end(self.failures, self.recipe.launch, len(self.hosts.hosts), failure.cause)
        if failure.is_gone or BAD_HOST in problem:
            _raise_if_host_can_be_left(self.run, plan, self.hosts, failure, failure.host)
        if problem:
            failure.evidence = f"{problem}\n{failure.evidence}"
            if BAD_HOST in problem and _host_answers(self.hosts, failure.host):
                part = "go on without it while it answers and can give its part of the checkpoint"
                failure.fix += f"\n{part}: --exclude {failure.host}"
            elif BAD_HOST in problem:
                failure.fix += f"\n{checkpoint_parts.way_out(self.run, [failure.host])}"
            raise failure
        self._wait(failure.problem, failure.host)

    def wait_after_no_start(self, error: UserError, plan: Plan) -> None:
        """Note a launch that did not start and sleep before the next, since a failed host may take a while to answer.

        Prints and records the restart. Raises `error` when no failure came before it, RunFailed when the restarts are
        used up, HostLost when the host does not answer and the run can go on without it.
        """
        if not self.failures:
            raise error
        words = {word.strip(",:;") for word in error.problem.split()}  # a message of ssh has [user@]name[:port]
        host = next((each.name for each in self.hosts.hosts if words & {each.name, each.destination}), "")
        self.failures.append(Failure(-1 - len(self.failures), "", False, self.failures[-1].checkpoint))
        failure = RunFailed(error.problem, evidence=error.evidence, fix=error.fix, host=host)
        if host and not _host_answers(self.hosts, host):
            failure.is_gone = True
            _raise_if_host_can_be_left(self.run, plan, self.hosts, failure, host)
        if count_in_a_row(self.failures) > self.recipe.launch.restarts:
            last = max((row["step"] for row in self.run.read_events("step")), default=0)
            used = USED_UP.format(self.recipe.launch.restarts)
            failure.evidence = f"{used}; last completed step {last:,}\n{error.evidence}"
            raise failure from None
        self._wait(error.problem, host or self.failures[-2].host)

    def _wait(self, problem: str, host: str) -> None:
        """Print and record the problem and the `host` to blame ("" if unknown), and sleep; twice as long each time.

        The first wait, and the first after a new checkpoint, is launch.restart_wait_seconds, the longest 600 s.
        """
        launch, count = self.recipe.launch, count_in_a_row(self.failures)
        seconds = min(LONGEST_WAIT_SECONDS, launch.restart_wait_seconds * 2 ** (count - 1))
        screen.say(f"{problem}\nrestart {count} of {launch.restarts} in {seconds:g} s")
        record_restart(self.run, self.recipe, problem, host, "again", seconds)
        time.sleep(seconds)


def record_restart(run: RunDir, recipe: Recipe, after: str, host: str, action: str, seconds: float = 0.0) -> None:
    """Append a `restart` event to events.jsonl and run launch.notify, if set.

    `after` is the problem, `host` the host to blame or "", `action` what is done, in `seconds`.
    """
    number = 1 + sum(1 for _ in run.read_events("restart"))
    runs.record_event(run, "restart", number=number, after=after, host=host, action=action, seconds=seconds)
    start.notify(recipe.launch.notify, "restart", run.path, f"{after}; {action}")


def list_silent(hosts: Sequence[Host]) -> list[str]:
    """Ask these hosts over ssh, all at once, and return the names of those that do not answer within 10 s."""
    with ThreadPoolExecutor(16) as pool:
        answers = pool.map(ssh.answers, [host.destination for host in hosts])
        return [host.name for host, is_there in zip(hosts, answers, strict=True) if not is_there]


def wait_for_hosts(run: RunDir, recipe: Recipe, hosts: Cluster, after: str) -> bool:
    """Wait until all hosts answer, launch.restarts times and twice as long each time; return whether they do.

    Records and prints the problem `after`, and runs launch.notify (record_restart). Does none of this and returns False
    if the run has saved no checkpoint since it waited before.
    """
    kinds = [row.get("action", row["kind"]) for row in run.read_events()]
    if WAITED in kinds and not {"checkpoint", "in_memory"} & {*kinds[-kinds[::-1].index(WAITED) :]}:
        return False
    record_restart(run, recipe, after, "", WAITED)
    for number in range(recipe.launch.restarts):
        seconds = min(LONGEST_WAIT_SECONDS, recipe.launch.restart_wait_seconds * 2**number)
        screen.say(f"{after}: the other hosts cannot go on alone; they are asked again in {seconds:g} s")
        time.sleep(seconds)
        if not list_silent(hosts.hosts):
            return True
    return False


def write_report(run: RunDir) -> None:
    """Write report.html of a run whose training ended with an error; print why if it cannot be written."""
    try:
        run_page.build(run, ended=True)
    except Exception as wrong:  # such as a full disk, which may be why the run failed
        screen.say(f"{run.report} could not be written: {wrong}")


def notify_end(run: RunDir, recipe: Recipe, error: BaseException) -> None:
    """Run launch.notify, if set, to tell that the run ended by `error`; does not wait for it."""
    words = f"ended with exit code {error.code}" if isinstance(error, SystemExit) else str(error)
    start.notify(recipe.launch.notify, "end", run.path, words or type(error).__name__)


def count_in_a_row(failures: Sequence[Failure]) -> int:
    """Return how many failures in a row, up to the last, had the same newest checkpoint. `failures` is not empty."""
    return sum(1 for _ in itertools.takewhile(lambda each: each.checkpoint == failures[-1].checkpoint, failures[::-1]))


def reason_to_end(failures: Sequence[Failure], limits: Launch, hosts: int, cause: str = "") -> str:
    """Return the sentence that says why the run is not restarted after failures[-1]; "" if it is restarted.

    `hosts` is the number of hosts, `cause` the one in the logs or "". The run ends when the first failure came before
    any finished step; when another launch would meet the cause again (PASSING); after two failures at a step, or
    limits.host_failures of a host among several; after more than limits.restarts in a row without a new checkpoint.
    """
    last, former = failures[-1], failures[:-1]
    if not last.has_stepped and not former:
        return "not restarted: it failed before its first step was finished"
    if cause and cause not in PASSING:
        return "not restarted: another launch would meet the cause in the logs again"
    if any(failure.step == last.step for failure in former):
        blamed = {failure.host for failure in failures if failure.step == last.step and failure.host}
        where = f", both times on {last.host}" if blamed == {last.host} and hosts > 1 else ""
        why = "a bad step: its data, its numbers, or the code"
        return f"not restarted again: step {last.step:,} failed twice{where}; {why}"
    steps = [failure.step for failure in failures if last.host and failure.host == last.host]
    if hosts > 1 and len(steps) >= limits.host_failures:
        when = " and ".join(f"in step {step:,}" if step > 0 else "while it began" for step in steps)
        return f"not restarted again: {last.host} failed {when}; {BAD_HOST}"
    if count_in_a_row(failures) > limits.restarts:
        return USED_UP.format(limits.restarts)
    return ""


def _raise_if_host_can_be_left(run: RunDir, plan: Plan, hosts: Cluster, failure: RunFailed, host: str) -> None:
    """Raise HostLost if the run can go on without `host`; else return.

    It can when other hosts or spares remain and one of these holds: there is no checkpoint yet; a checkpoint is whole
    on this machine, or in the memory of the other hosts together; the host answers and can give its part. Asks the
    hosts over ssh.
    """
    if len(hosts.hosts) + len(hosts.spares) < 2 or plan.offload_optimizer == "nvme":  # no other plan can read these
        return
    on_disk, in_memory = run.recorded_checkpoint(), run.recorded_in_memory()
    if (on_disk or in_memory) and not checkpoint_parts.whole_step(run) and not _host_answers(hosts, host):
        others = dataclasses.replace(hosts, hosts=tuple(each for each in hosts.hosts if each.name != host))
        if not in_memory or not checkpoint_parts.whole_step_together(checkpoint_parts.list_holdings(run, others)):
            return
    lost = HostLost(failure.problem, evidence=failure.evidence, fix=failure.fix, exit_code=failure.exit_code, host=host)
    lost.is_gone = failure.is_gone
    raise lost from None


def _host_answers(hosts: Cluster, name: str) -> bool:
    """Return whether the host of this name answers (ssh.answers). StopIteration for a name that is not in `hosts`."""
    return ssh.answers(next(host.destination for host in hosts.hosts if host.name == name))


def _has_set_checkpoint_aside(run: RunDir, seen: int) -> bool:
    """Return whether the events after the first `seen` set a damaged checkpoint aside and start no training."""
    rows = list(itertools.islice(run.read_events(), seen, None))
    damaged = any(row["kind"] == "incident" and row["what"] == "damaged checkpoint" for row in rows)
    return damaged and not any(row["kind"] == "start" for row in rows)


def _describe_failure(run: RunDir, host: str, seen: int, unknown: int) -> Failure:
    """Return the Failure of the last launch, which began after `seen` rows of events.jsonl and blames `host`.

    Its step is the step after the last finished step, or `unknown` if its ranks did not start.
    """
    step: int | None = None
    has_stepped = False
    for row in itertools.islice(run.read_events(), seen, None):
        if row["kind"] == "start":
            step, has_stepped = row["step"], False
        elif row["kind"] in ("step", "rollback") and step is not None:
            step, has_stepped = row["step"], True
    return Failure(unknown if step is None else step + 1, host, has_stepped, run.newest_recorded())


def _read_memory_use(run: RunDir, logged: Mapping[Path, int]) -> dict[str, Taken]:
    """Return {host: memory use} of the hosts whose ranks ran out of memory in the last launch; {} when none did.

    `logged` has the log files' bytes before that launch.
    """
    by_host = {}
    for path in sorted(run.logs.glob("*.*.log")):
        if taken := out_of_memory.read(files.read_from(path, logged.get(path, 0))):
            by_host[path.name.rsplit(".", 2)[0]] = taken
    return by_host


def _bring_checkpoint(run: RunDir, plan: Plan, smaller: Plan, hosts: Cluster, accept_new_keys: bool) -> None:
    """Gather the newest common checkpoint into continued/ if `smaller` has another ZeRO stage or optimizer offload.

    Does nothing when all ranks are on this machine, or without a checkpoint that all hosts have. Raises UserError when
    the parts cannot be gathered.
    """
    is_cut = (plan.zero_stage, plan.offload_optimizer) != (smaller.zero_stage, smaller.offload_optimizer)
    if is_cut and ssh.split_local(hosts.hosts)[1]:
        # Each host has only its own ranks' parts, and other ranks need others: sync copies continued/ to every host.
        held = [holding.steps for holding in checkpoint_parts.list_holdings(run, hosts, accept_new_keys)]
        step = max(checkpoints.common_steps(held), default=0)
        if step and step not in dict(run.continued_checkpoints()):
            whole = checkpoint_parts.gather_checkpoint(run, hosts, step, accept_new_keys)
            runs.link_checkpoint(whole, run.path / "continued" / whole.name)


def _replace_plan(run: RunDir, plan: Plan, smaller: Plan, recipe: Recipe, step: int) -> None:
    """Write `smaller` and its DeepSpeed settings to the run; keep `plan` as plan.N.json; print and record the change.

    `step` is the last finished step, for the `incident` event.
    """
    number = len(run.former_plans) + 1
    keys = ", ".join(f"{key}: {new} instead of {old}" for key, (old, new) in changed_keys(plan, smaller).items())
    sizes = format_bytes(plan.gpu_bytes), format_bytes(smaller.gpu_bytes)
    what = "out of memory, planned again"
    detail = (
        f"{sizes[0]} a {'rank' if plan.device == 'cpu' else 'GPU'} had been planned, now {sizes[1]} with {keys}; "
        f"the former plan is plan.{number}.json, {number} of at most {out_of_memory.MOST}"
    )
    smaller = dataclasses.replace(smaller, reasons=(f"{what}: {detail}", *smaller.reasons))
    files.write_json(run.path / f"plan.{number}.json", plan.to_json())
    files.write_json(run.plan, smaller.to_json())
    files.write_json(run.ds_config, config.deepspeed_settings(recipe, smaller))
    run.append_event("incident", step=step, what=what, detail=detail, former=f"plan.{number}.json")
    screen.say(f"step {step:,}: {what}: {detail}")
