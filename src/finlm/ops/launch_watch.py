"""The watchdog: decides from what the agents say whether a run is in trouble, and names the host and rank at fault.

Four kinds of trouble: a rank or launcher ended with an error, an agent ended, a host is silent (launch.outage_seconds,
also for a network that went away), nothing was finished for too long (launch.start_minutes, launch.stall_minutes). One
failure makes others: ranks fail on the connection to a dead one within a second, so the cause is chosen after a short
wait in which the other hosts show that they live.

It only looks; launch.py ends what is left.
"""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from finlm.base.errors import RunFailed
from finlm.base.rundir import RunDir
from finlm.base.units import format_bytes
from finlm.ops import launch_ranks, launch_stacks, ssh
from finlm.ops.launch_session import Session
from finlm.recipe.schema import Launch

SETTLE_SECONDS = 1.5  # what one dead rank does to the others shows by then
DOUBT_SECONDS = 12.0  # how long a host may be silent in that wait before it is the suspect
STACK_SECONDS = 3.0
FULL_BYTES = 1 << 24
QUIET_SECONDS = 60.0  # nothing finished for so long is said aloud, again after twice the time
HEARD_SECONDS = 6.0  # agents beat every 2 s
_CONSEQUENCE = re.compile(
    r"Connection (closed|reset) by peer|Broken pipe|NCCL.*(remote process exited|unhandled system error)|"
    r"Read timeout|Timed out waiting|No route to host|Connection timed out|failed to recv|Socket Timeout"
)
_RESUME = "the same command resumes from the last complete checkpoint"


@dataclass
class Progress:
    """What events.jsonl says: the last finished step and when anything was last finished."""

    started: float
    step: int | None = None
    at: float | None = None
    stepped: bool = False
    incident: Mapping[str, Any] = field(default_factory=dict)  # the newest one
    longest: float = 0.0  # seconds between two things finished since the first step
    told: float = 0.0  # seconds of the present silence that were told

    def finished(self, now: float) -> float:
        """Something was finished now; the seconds of a silence that was told before, 0 without one."""
        silence, told = self.since(now), self.told
        if self.stepped and not told:  # a silence is no measure of what is usual
            self.longest = max(self.longest, silence)
        self.at, self.told = now, 0.0
        return silence if told else 0.0

    def since(self, now: float) -> float:
        """Seconds since anything was finished, or since the launch."""
        return now - (self.started if self.at is None else self.at)

    def words(self, now: float) -> str:
        """For a message: the last completed step and its age."""
        if self.step is None:
            return f"no step was completed in {now - self.started:.0f} s"
        return f"last completed step {self.step:,}, {self.since(now):.0f} s ago"


def in_trouble(sessions: Sequence[Session], now: float) -> bool:
    """True when some rank, launcher, agent or host is not as it should be."""
    return any(_has_failed(session) or _is_lost(session, now) for session in sessions)


def is_stalled(progress: Progress, limits: Launch, now: float) -> bool:
    """True when nothing was finished for too long."""
    minutes = limits.stall_minutes if progress.stepped else limits.start_minutes
    return progress.since(now) > 60 * minutes


def quiet(sessions: Sequence[Session], progress: Progress, limits: Launch, now: float) -> str:
    """A sentence on a run that does nothing for long, as after a network outage; empty while there is none to say."""
    silence = progress.since(now)
    if silence < max(QUIET_SECONDS, 3 * progress.longest, 2 * progress.told):
        return ""
    progress.told = silence
    lost = [s for s in sessions if now - s.heard > HEARD_SECONDS]
    if lost:
        hosts = ", ".join(f"{s.name} last heard of {now - s.heard:.0f} s ago" for s in lost)
        return f"{progress.words(now)}; {hosts}: given up after {lost[0].patience:.0f} s (launch.outage_seconds)"
    key, minutes = ("stall", limits.stall_minutes) if progress.stepped else ("start", limits.start_minutes)
    return f"{progress.words(now)}; every host answers; ended after {minutes:g} minutes (launch.{key}_minutes)"


def _has_failed(session: Session) -> bool:
    if session.refused or session.error or any(code for _, _, code in session.exits) or session.code:
        return True
    return session.closed is not None and session.code is None


def _is_lost(session: Session, now: float) -> bool:
    return session.closed is None and now - session.heard > session.patience


def settle(sessions: Sequence[Session], now: float) -> None:
    """Wait until every host has shown that it lives after `now`, or one is known to be gone."""
    if any(_is_lost(session, now) for session in sessions):
        return
    time.sleep(SETTLE_SECONDS)
    while time.monotonic() < now + DOUBT_SECONDS:
        if any(s.closed is not None and s.code is None for s in sessions):
            return
        if all(s.closed is not None or s.code is not None or s.heard > now for s in sessions):
            return
        time.sleep(0.05)


def cause(run: RunDir, sessions: Sequence[Session], progress: Progress, now: float) -> RunFailed:
    """The failure that came first, with its host, rank, exit code and last words. Call after settle().

    In this order: a host that could not start, ranks killed or failed for reasons of their own, hosts and agents that
    are gone, launchers that ended without their ranks, ranks that failed on the connection to another one.
    """
    words = progress.words(now)
    for session in sessions:
        if session.refused:
            fix = f"mend it on {session.name}; {_RESUME}"
            return RunFailed(f"{session.name} could not start its ranks", evidence=session.refused, fix=fix)
        if session.error:
            problem = f"what {session.name} said was not understood here"
            return RunFailed(problem, evidence=session.error, fix=f"the same version of finlm on both? {_RESUME}")
    exits = sorted((when, s.node, rank, _code(s, code)) for s in sessions for when, rank, code in s.exits if code)
    own = [one for one in exits if one[3] < 0 or not _is_consequence(run, sessions[one[1]], one[2])]
    if own or not (gone := _gone(run, sessions, words, now, bool(exits))):
        _, node, rank, code = (own or exits)[0]
        return _rank_failed(run, sessions[node], rank, code, words)
    return gone


def _code(session: Session, code: int) -> int:
    """A rank's exit code; the launcher's, which is the same, where the agent looked too late."""
    return code if code != launch_ranks.MISSED else session.code or -int(signal.SIGKILL)


def _is_consequence(run: RunDir, session: Session, rank: int) -> bool:
    return _CONSEQUENCE.search(_tail(log_of(run, session, rank), 40)) is not None


def _gone(run: RunDir, sessions: Sequence[Session], words: str, now: float, doubt: bool) -> RunFailed | None:
    """A host, agent or launcher that ended without an exit of its ranks."""
    for session in sessions:
        silent = now - session.heard > (5 if doubt else session.patience)
        if session.code is None and (session.closed is not None or silent):
            return _host_lost(session, words, now)
    for session in sessions:
        if session.code and not session.exits:
            ended = f"was killed by signal {-session.code}" if session.code < 0 else f"ended with {session.code}"
            return RunFailed(
                f"DeepSpeed's launcher on {session.name} {ended}",
                evidence=f"{words}\n{_last_words(run.logs / f'{session.name}.launcher.log')}",
                fix=f"read {run.logs}; {_RESUME}",
            )
    return None


def _rank_failed(run: RunDir, session: Session, rank: int, code: int, words: str) -> RunFailed:
    where = f"rank {rank} on {session.name}"
    if session.free_bytes is not None and session.free_bytes < FULL_BYTES:
        words += f"\nthe run directory's disk on {session.name} is full: {format_bytes(session.free_bytes)} free"
    evidence = f"{words}\n{_last_words(log_of(run, session, rank))}"
    if code >= 0:
        return RunFailed(
            f"{where} ended with exit code {code}",
            evidence=evidence,
            fix=f"read {run.logs}; {_RESUME}",
            exit_code=code,
            host=session.name,
        )
    name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
    fix, is_certain = f"read {log_of(run, session, rank)}; {_RESUME}", False
    if code == -signal.SIGKILL:
        counted, fix = _who_killed(run, session)
        evidence = f"{counted}\n{evidence}"
        is_certain = session.oom_kills is not None
    return RunFailed(
        f"{where} was killed by {name}",
        evidence=evidence,
        fix=fix,
        exit_code=128 - code,
        host=session.name,
        is_certain=is_certain,
    )


def _who_killed(run: RunDir, session: Session) -> tuple[str, str]:
    """(evidence, fix) for a SIGKILL: the kernel counts those it sends when memory is full. Kept in the log too."""
    at = "" if session.local else f"ssh {ssh.typed(session.host.destination)} "
    if session.oom_kills:
        counted = f"the kernel of {session.name} counted {session.oom_kills} oom_kill since the ranks started"
        with (run.logs / f"{session.name}.launcher.log").open("a", encoding="utf-8") as log:
            log.write(f"finlm: {counted}\n")
        return counted, f"host memory was full: {at}dmesg -T | grep -i 'killed process'\n{_RESUME}"
    if session.oom_kills is None:
        return (
            f"{session.name} does not tell whether the kernel did it",
            f"the kernel kills so when memory is full: {at}dmesg -T | grep -i 'killed process'\n{_RESUME}",
        )
    return (
        f"not for memory: the kernel of {session.name} counted no oom_kill since the ranks started",
        f"who sent it? A scheduler, a container's manager, a person: their logs; {_RESUME}",
    )


def _host_lost(session: Session, words: str, now: float) -> RunFailed:
    ranks = (
        f"rank {session.ranks[0]}" if len(session.ranks) == 1 else f"ranks {session.ranks[0]} to {session.ranks[-1]}"
    )
    evidence = f"{words}\nlast heard of {session.name} {now - session.heard:.0f} s ago"
    said = ssh.last_lines(session.errors(), 3)
    evidence += f"\n{said}" if said else ""
    if session.local or _answers(session):
        return RunFailed(
            f"finlm's agent on {session.name} ({ranks}), or the connection to it, was ended from outside",
            evidence=f"{evidence}\n{session.name} itself answers",
            fix=f"who killed it? Its ranks ended with it; {_RESUME}",
            host=session.name,
        )
    name = ssh.login(session.host.destination).rpartition("@")[2]
    return RunFailed(
        f"{session.name} ({ranks}) does not answer any more",
        evidence=evidence,
        fix=f"is it switched on and on the network? ping {name}; its ranks end by themselves after "
        f"{session.patience:.0f} s without a connection (launch.outage_seconds); {_RESUME}",
        host=session.name,
    )


def _answers(session: Session) -> bool:
    try:
        ssh.run(session.host.destination, ["true"], timeout_seconds=10)
    except Exception:  # whatever it is, it is no answer
        return False
    return True


def stalled(run: RunDir, sessions: Sequence[Session], progress: Progress, limits: Launch, now: float) -> RunFailed:
    """Ask all ranks for their stacks and name the silent one."""
    logs = {rank: (session, log_of(run, session, rank)) for session in sessions for rank in session.ranks}
    sizes = {rank: path.stat().st_size if path.exists() else 0 for rank, (_, path) in logs.items()}
    for session in sessions:
        session.say(do="stacks")
    time.sleep(STACK_SECONDS)
    stacks = {rank: launch_stacks.parse(_since(path, sizes[rank])) for rank, (_, path) in logs.items()}
    states = {int(rank): state for session in sessions for rank, state in session.states.items()}
    blamed = launch_stacks.silent(stacks, states)
    key, minutes = ("stall", limits.stall_minutes) if progress.stepped else ("start", limits.start_minutes)
    lines = [progress.words(now)]
    for rank in blamed or stacks:
        state = f", state {states[rank]} (stopped)" if states.get(rank) in ("T", "t") else ""
        lines += [f"rank {rank} on {logs[rank][0].name}{state}:", launch_stacks.show(stacks[rank])]
    others = sorted({launch_stacks.place(stacks[rank]) for rank in stacks if rank not in blamed and stacks[rank]})
    if blamed:
        named = ", ".join(f"rank {rank} on {logs[rank][0].name}" for rank in blamed)
        problem = f"{named} made no progress for {60 * minutes:,.0f} s"
        lines += [f"the others wait at {'; '.join(others)}"] if others else []
    else:
        problem = f"no rank made progress for {60 * minutes:,.0f} s, and no stack differs from the others"
    fix = f"read {run.logs}; raise launch.{key}_minutes ({minutes:g}) when it needs longer; {_RESUME}"
    return RunFailed(problem, evidence="\n".join(lines), fix=fix)


def log_of(run: RunDir, session: Session, rank: int) -> Path:
    """Where a rank's log lies here."""
    return Path(run.logs) / f"{session.name}.{rank}.log"


def _since(path: Path, offset: int) -> str:
    if not path.exists():
        return ""
    with path.open("rb") as file:
        file.seek(offset)
        return file.read().decode(errors="replace")


def _tail(path: Path, lines: int) -> str:
    if not path.exists():
        return ""
    return "\n".join(path.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:])


def _last_words(path: Path, lines: int = 12) -> str:
    return f"{path}:\n{_tail(path, lines)}" if path.exists() else f"{path}: nothing was written"
