"""Starting a failed run again by itself, as long as that may help.

What fails at the same step again is a bad step: its data, its numbers, or the code; the machines are not to blame. What
fails on the same host again, at other steps, is a bad host. Either ends the restarts, with that word. A run that ended
itself (incidents.*, a signal) is not started again at all.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from finlm.base import screen
from finlm.base.errors import RunFailed, UserError
from finlm.base.rundir import RunDir
from finlm.ops import launch
from finlm.plan.plan import Plan
from finlm.recipe.cluster import Cluster
from finlm.recipe.schema import Recipe

LONGEST_WAIT_SECONDS = 600.0


@dataclass(frozen=True)
class Failure:
    """A launch that failed: the step it was in, the host to blame if one is known.

    Below 0, another number each time: it failed before its ranks knew at which step they begin.
    """

    step: int
    host: str
    has_stepped: bool


def run_ranks(
    run: RunDir,
    plan: Plan,
    recipe: Recipe,
    hosts: Cluster,
    *,
    network: Mapping[str, Mapping[str, str]] | None = None,
    accept_new: bool = False,
) -> None:
    """launch.run_ranks, at most recipe.launch.restarts times again. Raises the last RunFailed, which says why it is."""
    failures: list[Failure] = []
    while True:
        seen = sum(1 for _ in run.read_events())
        try:
            launch.run_ranks(run, plan, recipe, hosts, network=network, accept_new=accept_new)
            return
        except RunFailed as failure:
            if failure.is_final or not recipe.launch.restarts:
                raise
            failures.append(_failure(run, failure.host, seen, -1 - len(failures)))
            problem = reason_to_end(failures, recipe.launch.restarts, len(hosts.hosts))
            if problem:
                failure.evidence = f"{problem}\n{failure.evidence}"
                raise
            said = failure.problem
        except UserError as error:  # a host that failed may take a while to answer again
            if not failures or len(failures) >= recipe.launch.restarts:
                raise
            failures.append(Failure(-1 - len(failures), "", has_stepped=False))
            said = error.problem
        seconds = min(LONGEST_WAIT_SECONDS, recipe.launch.restart_wait_seconds * 2 ** (len(failures) - 1))
        screen.say(f"{said}\nrestart {len(failures)} of {recipe.launch.restarts} in {seconds:g} s")
        run.append_event("restart", number=len(failures), after=said, host=failures[-1].host, seconds=seconds)
        time.sleep(seconds)


def reason_to_end(failures: Sequence[Failure], restarts: int, hosts: int) -> str:
    """Why the last failure is not followed by a restart; empty when it is."""
    last, former = failures[-1], failures[:-1]
    if not last.has_stepped and not former:
        return "not restarted: it failed before its first step was finished"
    if any(one.step == last.step for one in former):
        blamed = {one.host for one in failures if one.step == last.step and one.host}
        where = f", both times on {last.host}" if blamed == {last.host} and hosts > 1 else ""
        why = "a bad step: its data, its numbers, or the code"
        return f"not restarted again: step {last.step:,} failed twice{where}; {why}"
    if hosts > 1 and last.host and any(one.host == last.host for one in former):
        own = [one.step for one in failures if one.host == last.host]
        when = " and ".join(f"in step {step:,}" if step > 0 else "while it began" for step in own)
        why = f"a bad host: go on without it, --exclude {last.host}"
        return f"not restarted again: {last.host} failed {when}; {why}"
    if len(failures) > restarts:
        return f"not restarted again: launch.restarts is {restarts}"
    return ""


def _failure(run: RunDir, host: str, seen: int, none: int) -> Failure:
    """Where the launch that has just failed had got to; `none` as its step when it did not say where it begins.

    seen: rows of events.jsonl before it.
    """
    step: int | None = None
    has_stepped = False
    for row in itertools.islice(run.read_events(), seen, None):
        if row["kind"] == "start":
            step, has_stepped = row["step"], False
        elif row["kind"] in ("step", "rollback") and step is not None:
            step, has_stepped = row["step"], True
    return Failure(none if step is None else step + 1, host, has_stepped)
