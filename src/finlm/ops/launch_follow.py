"""Following a run: its events on the screen, its trouble to the watchdog, signals to the ranks, until it is over.

events.jsonl is read as it grows, on this machine or as the first host's agent sends it home.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence
from typing import Any

from finlm.base import screen
from finlm.base.errors import RunFailed
from finlm.base.rundir import RunDir
from finlm.ops import launch_stop, launch_watch
from finlm.ops.launch_session import Session
from finlm.ops.launch_stop import Stop
from finlm.ops.launch_watch import Progress
from finlm.plan.plan import Plan
from finlm.recipe.schema import Launch
from finlm.record import live

POLL_SECONDS = 0.1
PING_SECONDS = 2.0
EXIT_SECONDS = 60.0  # from the trainer's end event to the end of its processes
DONE = ("finished", "interrupted", "failed")  # what the trainer's end event says


def follow(run: RunDir, plan: Plan, sessions: Sequence[Session], limits: Launch, seen: int, stop: Stop) -> None:
    """Show events behind the first `seen` bytes until the run is over. Raises RunFailed, recorded as an incident."""
    progress, status, next_ping = Progress(time.monotonic()), "", 0.0
    events = live.follow(run, seen)
    with live.shown(plan) as view:
        while True:
            now = time.monotonic()
            over = all(session.code is not None for session in sessions)  # asked first: no event comes after it
            for event in next(events):
                status = _seen(event, view, progress, now) or status
            if status in DONE:
                if over or progress.since(now) > EXIT_SECONDS:
                    break
            elif launch_watch.in_trouble(sessions, now):
                launch_watch.settle(sessions, now)
                for event in next(events):  # an end row that was behind the exit of its rank
                    status = _seen(event, view, progress, now) or status
                if status in DONE:
                    continue
                raise _failed(run, progress, launch_watch.cause(run, sessions, progress, time.monotonic()))
            elif launch_watch.is_stalled(progress, limits, now):
                raise _failed(run, progress, launch_watch.stalled(run, sessions, progress, limits, now))
            elif over:
                words = progress.words(now)
                raise _failed(run, progress, RunFailed("training ended without a word", evidence=words))
            if said := launch_watch.quiet(sessions, progress, limits, now):
                screen.say(said)
            stop.look(sessions, progress.stepped, limits.grace_seconds, now)
            view.refresh()
            if now > next_ping:
                next_ping = now + PING_SECONDS
                for session in sessions:
                    session.say(do="ping")
            time.sleep(POLL_SECONDS)
    if status == "interrupted":
        stop.ended(progress.step, 128 + signal.SIGTERM)
    elif status == "failed":
        raise RunFailed(
            f"the run ended itself after step {progress.step or 0:,}: {progress.incident.get('what')}",
            evidence=str(progress.incident.get("detail") or ""),
            fix=f"docs/incidents.md; {launch_stop.RESUMES}",
            is_final=True,
        )


def _failed(run: RunDir, progress: Progress, failure: RunFailed) -> RunFailed:
    """The failure, recorded."""
    run.append_event("incident", step=progress.step or 0, what=failure.problem, detail=failure.evidence)
    return failure


def _seen(event: dict[str, Any], view: live.View, progress: Progress, now: float) -> str:
    """Show one event and tell the watchdog; the status of an end event, else nothing."""
    if silence := progress.finished(now):
        screen.say(f"goes on after {silence:.0f} s")
    view.feed(event)
    if event["kind"] == "start" and event["step"]:
        progress.step = event["step"]
    elif event["kind"] == "step":
        progress.step, progress.stepped = event["step"], True
    elif event["kind"] == "incident":
        progress.incident = event
    elif event["kind"] == "end":
        return str(event["status"])
    return ""
