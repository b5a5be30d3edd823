"""Decide from what the agents report whether a run is in trouble, and name the host and rank at fault.

There are four kinds of trouble: a rank or launcher ended with an error, an agent ended, a host is silent (for
launch.outage_seconds, also when the network is down), nothing was finished for too long (launch.start_minutes,
launch.stall_minutes). A failure causes others: ranks fail on the connection to a dead rank within a second, so the
cause is chosen after a short wait in which the other hosts show that they live. In a hang all ranks print their stacks
(faulthandler, SIGUSR1): usually all ranks but one wait for that rank in a collective. When all wait at the same line,
the network or a device is at fault.

It ends nothing; start.py ends the processes that are left.
"""

from __future__ import annotations

import re
import signal
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from finlm.base import files
from finlm.base.rundir import RunDir
from finlm.base.runs import RunFailed
from finlm.base.units import format_bytes
from finlm.hosts import checkpoint_parts, ssh
from finlm.launch.agent import MISSED
from finlm.launch.head import RESUMES, Session
from finlm.launch.messages import Command
from finlm.recipe.schema import Launch

SETTLE_SECONDS = 1.5  # what one dead rank does to the others shows by then
DOUBT_SECONDS = 12.0  # how long a host may be silent in that wait before it is the suspect
STACK_SECONDS = 12.0  # for the stacks of all ranks to be printed and sent
STACK_QUIET_SECONDS = 0.7  # a stack is whole when its log has not grown for so long: agents send every 0.2 s
FULL_BYTES = 1 << 24
QUIET_SECONDS = 60.0  # nothing finished for so long is said aloud, again after twice the time
HEARD_SECONDS = 6.0  # agents beat every 2 s
_CONSEQUENCE = re.compile(
    r"Connection (closed|reset) by peer|Broken pipe|NCCL.*(remote process exited|unhandled system error)|"
    r"Read timeout|Timed out waiting|No route to host|Connection timed out|failed to recv|Socket Timeout"
)


@dataclass
class Progress:
    """The last finished step of a run, and when anything was last finished, in time.monotonic() seconds."""

    started: float
    step: int | None = None
    at: float | None = None
    stepped: bool = False
    generated: bool = False  # the answers that the next step learns from are there
    incident: Mapping[str, Any] = field(default_factory=dict)  # the newest one
    longest: float = 0.0  # seconds between two things finished since the first step
    reported: float = 0.0  # seconds of the present silence that were printed
    slept: float = 0.0  # the longest time that this machine did not run, as a laptop that sleeps
    excused: dict[str, float] = field(default_factory=dict)  # Session.heard by host, as note_sleep set it

    def note_finished(self, now: float) -> float:
        """Note that something was finished at `now`, monotonic seconds.

        Returns the seconds of silence before it if that silence was printed, else 0.
        """
        silence, reported = self.since(now), self.reported
        if self.stepped and not reported:  # a silence that was printed is no measure of what is usual
            self.longest = max(self.longest, silence)
        self.at, self.reported = now, 0.0
        return silence if reported else 0.0

    def since(self, now: float) -> float:
        """Return the seconds since anything was finished, or since the launch. `now` is in time.monotonic() seconds."""
        return now - (self.started if self.at is None else self.at)

    def limit(self, limits: Launch) -> tuple[str, float]:
        """Return (key, minutes) of the limit of a silence: stall_minutes, before the first step start_minutes."""
        return ("stall_minutes", limits.stall_minutes) if self.stepped else ("start_minutes", limits.start_minutes)

    def words(self, now: float) -> str:
        """Return a sentence with the last finished step and its age in seconds at monotonic `now`."""
        if self.step is None:
            return f"no step was completed in {now - self.started:.0f} s"
        if self.generated:
            return f"last completed step {self.step:,}; answers for the next came {self.since(now):.0f} s ago"
        return f"last completed step {self.step:,}, {self.since(now):.0f} s ago"


def in_trouble(sessions: Sequence[Session], now: float) -> bool:
    """Return whether a rank, launcher, agent or host has failed, or is silent for too long at monotonic `now`."""
    return any(_has_failed(session) or _is_lost(session, now) for session in sessions)


def describe_silence(sessions: Sequence[Session], progress: Progress, limits: Launch, now: float) -> str:
    """Return a sentence about a run that has finished nothing for long; "" when there is nothing new to print.

    Long is at least 60 s and three times the longest usual silence. Sets progress.reported, so that the next sentence
    comes after twice the silence.
    """
    silence = progress.since(now)
    if silence < max(QUIET_SECONDS, 3 * progress.longest, 2 * progress.reported):
        return ""
    progress.reported = silence
    lost = [s for s in sessions if now - s.heard > HEARD_SECONDS]
    if lost:
        hosts = ", ".join(f"{s.name} last heard of {now - s.heard:.0f} s ago" for s in lost)
        return f"{progress.words(now)}; {hosts}: given up after {lost[0].patience:.0f} s (launch.outage_seconds)"
    key, minutes = progress.limit(limits)
    return f"{progress.words(now)}; every host answers; given up after {minutes:g} minutes (launch.{key})"


def note_sleep(sessions: Sequence[Session], progress: Progress, slept: float, now: float) -> None:
    """Note that this machine did not run for `slept` seconds, and set each host's time of last contact to `now`.

    Does so only once for a host that has sent nothing since.
    """
    progress.slept = max(progress.slept, slept)
    for session in sessions:
        # Excused once only: a machine so busy that it seems to sleep would wait for a dead host forever.
        if session.heard != progress.excused.get(session.name):
            session.heard = progress.excused[session.name] = now


def _has_failed(session: Session) -> bool:
    """Return whether a rank or launcher ended with an error, or the agent is gone without the launcher's exit code."""
    if session.refused or session.error or any(code for _, _, code in session.exits) or session.code:
        return True
    return session.closed is not None and session.code is None


def _is_lost(session: Session, now: float) -> bool:
    """Return whether the connection is open but has been silent for longer than session.patience."""
    return session.closed is None and now - session.heard > session.patience


def wait_for_signs_of_life(sessions: Sequence[Session], now: float) -> None:
    """Wait, 1.5 to 12 s, until every host has sent something after `now` or ended, or an agent's connection has broken.

    Returns at once when a host is known to be lost. `now` is in time.monotonic() seconds.
    """
    if any(_is_lost(session, now) for session in sessions):
        return
    time.sleep(SETTLE_SECONDS)
    while time.monotonic() < now + DOUBT_SECONDS:
        if any(s.closed is not None and s.code is None for s in sessions):
            return
        if all(s.closed is not None or s.code is not None or s.heard > now for s in sessions):
            return
        time.sleep(0.05)


def find_first_failure(run: RunDir, sessions: Sequence[Session], progress: Progress, now: float) -> RunFailed:
    """Return the failure that came first, with its host, rank, exit code and last log lines.

    Call it when in_trouble() is true, after wait_for_signs_of_life(). Looks in this order: this machine slept; a host
    could not start its ranks, or sent what is not understood; ranks were killed or failed by themselves; hosts, agents
    or launchers are gone; ranks failed on the connection to another rank. May ask a silent host over ssh (up to 10 s),
    and append a line about memory to a launcher's log. Raises NotJson for a damaged plan.json.
    """
    words = progress.words(now)
    if progress.slept > sessions[0].patience - 5:
        failure = RunFailed(
            f"this machine did not run for {progress.slept:.0f} s, so the hosts ended their ranks",
            evidence=f"{words}; launch.outage_seconds is {sessions[0].patience:g}",
            fix=f"start the run on a machine that does not sleep, or raise launch.outage_seconds; {RESUMES}",
        )
        failure.is_certain = True
        return failure
    for session in sessions:
        if session.refused:
            fix = f"mend it on {session.name}; {RESUMES}"
            return RunFailed(f"{session.name} could not start its ranks", evidence=session.refused, fix=fix)
        if session.error:
            problem = f"what {session.name} said was not understood here"
            return RunFailed(problem, evidence=session.error, fix=f"the same version of finlm on both? {RESUMES}")
    exits = []
    for s in sessions:
        # When the agent looked too late, the launcher's code is the same.
        missed = s.code or -int(signal.SIGKILL)
        exits += [(when, s.node, rank, missed if code == MISSED else code) for when, rank, code in s.exits if code]
    exits.sort()
    # A rank that lost its connection to another rank says so in its last lines, and is not the cause.
    causes = [
        (when, node, rank, code)
        for when, node, rank, code in exits
        if code < 0 or not _CONSEQUENCE.search(_read_tail(log_of(run, sessions[node], rank), 40))
    ]
    if causes or not (gone := _explain_lost_host(run, sessions, words, now, bool(exits))):
        _, node, rank, code = (causes or exits)[0]
        return _explain_failed_rank(run, sessions[node], rank, code, words)
    return gone


def _explain_lost_host(
    run: RunDir, sessions: Sequence[Session], words: str, now: float, ranks_failed: bool
) -> RunFailed | None:
    """Return the failure of a host, agent or launcher that ended without an exit of its ranks; None if there is none.

    `words` describes the run's progress. Raises NotJson for a damaged plan.json.
    """
    for session in sessions:
        # Agents beat every 2 s: a host that is silent when ranks fail elsewhere on their connection is the cause.
        silent = now - session.heard > (5 if ranks_failed else session.patience)
        if session.code is None and (session.closed is not None or silent):
            return _explain_silent_host(run, session, words, now)
    for session in sessions:
        if session.code and not any(code for *_, code in session.exits):
            ended = f"was killed by signal {-session.code}" if session.code < 0 else f"ended with {session.code}"
            return RunFailed(
                f"the launcher on {session.name} {ended}",
                evidence=f"{words}\n{_last_words(run.logs / f'{session.name}.launcher.log')}",
                fix=f"read {run.logs}; {RESUMES}",
            )
    return None


def _explain_failed_rank(run: RunDir, session: Session, rank: int, code: int, words: str) -> RunFailed:
    """Return the failure of a rank that ended with `code` (-N for signal N), with its last log lines and a fix.

    `words` describes the run's progress. After SIGKILL calls _explain_sigkill(), which may write to a log.
    """
    where = f"rank {rank} on {session.name}"
    if session.free_bytes is not None and session.free_bytes < FULL_BYTES:
        words += f"\nthe run directory's disk on {session.name} is full: {format_bytes(session.free_bytes)} free"
    evidence = f"{words}\n{_last_words(log_of(run, session, rank))}"
    ended, fix = f"ended with exit code {code}", f"read {run.logs}; {RESUMES}"
    is_sigkill = code == -signal.SIGKILL
    if code < 0:
        name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
        ended, fix, code = f"was killed by {name}", f"read {log_of(run, session, rank)}; {RESUMES}", 128 - code
    if is_sigkill:
        counted, fix = _explain_sigkill(run, session)
        evidence = f"{counted}\n{evidence}"
    failure = RunFailed(f"{where} {ended}", evidence=evidence, fix=fix, exit_code=code, host=session.name)
    failure.is_certain = is_sigkill and session.oom_kills is not None
    return failure


def _explain_sigkill(run: RunDir, session: Session) -> tuple[str, str]:
    """Return (evidence, fix) for a rank killed by SIGKILL: whether the kernel did it for lack of memory.

    If it did, appends that to the host's launcher log here, where diagnose reads it.
    """
    at = "" if session.local else f"ssh {ssh.ssh_name(session.host.destination)} "
    if session.oom_kills:
        counted = f"the kernel of {session.name} counted {session.oom_kills} oom_kill since the ranks started"
        with (run.logs / f"{session.name}.launcher.log").open("a", encoding="utf-8") as log:
            log.write(f"finlm: {counted}\n")
        return counted, f"host memory was full: {at}dmesg -T | grep -i 'killed process'\n{RESUMES}"
    if session.oom_kills is None:
        return (
            f"{session.name} does not tell whether the kernel did it",
            f"the kernel kills so when memory is full: {at}dmesg -T | grep -i 'killed process'\n{RESUMES}",
        )
    return (
        f"not for memory: the kernel of {session.name} counted no oom_kill since the ranks started",
        f"who sent it? A scheduler, a container's manager, a person: their logs; {RESUMES}",
    )


def _explain_silent_host(run: RunDir, session: Session, words: str, now: float) -> RunFailed:
    """Return the failure of a host that is silent or whose agent is gone, after asking it over ssh (up to 10 s).

    If it answers, as this machine always does, its agent or the connection was ended; else the failure is marked
    is_gone. `words` describes the run's progress. Raises NotJson for a damaged plan.json.
    """
    first, last = session.ranks[0], session.ranks[-1]
    ranks = f"rank {first}" if first == last else f"ranks {first} to {last}"
    evidence = f"{words}\nlast heard of {session.name} {now - session.heard:.0f} s ago"
    errors = ssh.last_lines(session.errors(), 3)
    evidence += f"\n{errors}" if errors else ""
    if session.local or ssh.answers(session.host.destination):
        return RunFailed(
            f"finlm's agent on {session.name} ({ranks}), or the connection to it, was ended from outside",
            evidence=f"{evidence}\n{session.name} itself answers",
            fix=f"who killed it? Its ranks ended with it; {RESUMES}",
            host=session.name,
        )
    name = ssh.login(session.host.destination).rpartition("@")[2]
    failure = RunFailed(
        f"{session.name} ({ranks}) does not answer any more",
        evidence=evidence,
        fix=f"is it switched on and on the network? ping {name}; its ranks end by themselves after "
        f"{session.patience:.0f} s without a connection (launch.outage_seconds); {RESUMES}"
        f"\n{checkpoint_parts.way_out(run, [session.name])}",
        host=session.name,
    )
    failure.is_gone = True
    return failure


def explain_stall(
    run: RunDir, sessions: Sequence[Session], progress: Progress, limits: Launch, now: float
) -> RunFailed:
    """Ask all ranks for their stacks, for up to 12 s, and return a failure that names the ranks the others wait for.

    Names no rank if no stack differs from the others.
    """
    logs = {rank: (session, log_of(run, session, rank)) for session in sessions for rank in session.ranks}
    stacks = _ask_for_stacks(run, sessions)
    states = {int(rank): state for session in sessions for rank, state in session.states.items()}
    blamed = find_blamed_ranks(stacks, states)
    key, minutes = progress.limit(limits)
    lines = [progress.words(now)]
    for rank in blamed or stacks:
        state = f", state {states[rank]} (stopped)" if states.get(rank) in ("T", "t") else ""
        lines += [f"rank {rank} on {logs[rank][0].name}{state}:", format_stack(stacks[rank])]
    others = sorted({place_of(stacks[rank]) for rank in stacks if rank not in blamed and stacks[rank]})
    if blamed:
        named = ", ".join(f"rank {rank} on {logs[rank][0].name}" for rank in blamed)
        problem = f"{named} made no progress for {60 * minutes:,.0f} s"
        lines += [f"the others wait at {'; '.join(others)}"] if others else []
    else:
        problem = f"no rank made progress for {60 * minutes:,.0f} s, and no stack differs from the others"
    fix = f"read {run.logs}; raise launch.{key} ({minutes:g}) when it needs longer; {RESUMES}"
    return RunFailed(problem, evidence="\n".join(lines), fix=fix)


def _ask_for_stacks(run: RunDir, sessions: Sequence[Session]) -> dict[int, Stack]:
    """Have all ranks print their stacks, and return these by rank; () for a rank that printed none within 12 s.

    Returns earlier once every rank that can answer has a stack and the logs have stopped growing.
    """
    paths = {rank: log_of(run, session, rank) for session in sessions for rank in session.ranks}
    sizes = {rank: path.stat().st_size if path.exists() else 0 for rank, path in paths.items()}
    for session in sessions:
        session.send(Command.STACKS)
    began = quiet_since = time.monotonic()
    said: dict[int, str] = {}
    while True:
        now = time.monotonic()
        former, said = said, {rank: files.read_from(path, sizes[rank]) for rank, path in paths.items()}
        stacks = {rank: parse_stack(text) for rank, text in said.items()}
        quiet_since = quiet_since if said == former else now
        mute = {int(rank) for s in sessions for rank, state in s.states.items() if state in ("T", "t")}
        mute |= {rank for s in sessions if s.closed is not None or began - s.heard > HEARD_SECONDS for rank in s.ranks}
        # Too early, a slow rank would be blamed for the hang, or half a dump would show another thread's stack.
        if all(stacks[rank] or rank in mute for rank in stacks) and now - quiet_since > STACK_QUIET_SECONDS:
            return stacks
        if now - began > STACK_SECONDS:
            return stacks
        time.sleep(0.05)


def log_of(run: RunDir, session: Session, rank: int) -> Path:
    """Return the path of a rank's log on this machine."""
    return Path(run.logs) / f"{session.name}.{rank}.log"


def _read_tail(path: Path, lines: int) -> str:
    """Return the last `lines` lines of a file; "" if there is no file."""
    if not path.exists():
        return ""
    return "\n".join(path.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:])


def _last_words(path: Path, lines: int = 12) -> str:
    """Return a log's path and its last `lines` lines below that, or a sentence that nothing was written."""
    return f"{path}:\n{_read_tail(path, lines)}" if path.exists() else f"{path}: nothing was written"


_FRAME = re.compile(r'^  File "(.+)", line (\d+) in (.+)$')
_WAITING = ("/torch/distributed/", "/deepspeed/comm/")

Stack = tuple[tuple[str, int, str], ...]
"""(file, line, function), innermost first."""


def parse_stack(text: str) -> Stack:
    """Return the stack of the thread that comes last in a log's text, which is the main thread; () without a dump."""
    stack: list[tuple[str, int, str]] = []
    inside = False
    for line in text.splitlines():
        frame = _FRAME.match(line)
        if re.match(r"(Current thread|Thread) 0x", line):
            stack, inside = [], True
        elif frame and inside:
            stack.append((frame[1], int(frame[2]), frame[3]))
        else:
            inside = False
    return tuple(stack)


def find_blamed_ranks(stacks: Mapping[int, Stack], states: Mapping[int, str]) -> list[int]:
    """Return the ranks to blame for a hang; [] when nothing distinguishes any from the others.

    `stacks`, not empty, has () for a rank that did not answer; `states` has the kernel's state letters. Blames ranks
    that are stopped, else ranks without a stack, else those that wait in no collective. Else blames the smallest groups
    that wait at the same line, if these are under half of all ranks.
    """
    stopped = [rank for rank in stacks if states.get(rank) in ("T", "t")]
    mute = [rank for rank, stack in stacks.items() if not stack]
    if stopped or mute:
        return stopped or mute
    free = [rank for rank, stack in stacks.items() if not any(part in stack[0][0] for part in _WAITING)]
    if 0 < len(free) < len(stacks):
        return free
    places = Counter(place_of(stack) for stack in stacks.values())
    rarest = min(places.values())
    odd = [rank for rank, stack in stacks.items() if places[place_of(stack)] == rarest]
    return odd if len(places) > 1 and 2 * len(odd) < len(stacks) else []


def place_of(stack: Stack) -> str:
    """Return the line of finlm's code that is innermost in a stack, else of any code: `pretrain.py:151 in log_step`.

    For () it is `?:0 in ?`.
    """
    innermost = next((frame for frame in stack if "/finlm/" in frame[0]), stack[0] if stack else ("?", 0, "?"))
    return f"{innermost[0].rpartition('/')[2]}:{innermost[1]} in {innermost[2]}"


def format_stack(stack: Stack) -> str:
    """Return the innermost 8 frames of a stack as text, one per line; for () a line that it printed no stack."""
    lines = [f"  {'/'.join(file.split('/')[-2:])}:{line} in {name}" for file, line, name in stack[:8]]
    return "\n".join(lines) or "  it printed no stack"
