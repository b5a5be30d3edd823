"""Define the messages between head and agent: a line of JSON each.

Key `do` (to the agent) or `kind` (to the head) names the message; the other keys are its fields. An agent runs the code
of its run directory, which may be older or newer than the head's: fields and messages that a side does not know are
dropped, and fields that an older version does not send have a default.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

MARK = "finlm-agent:"  # before an agent's messages: login scripts may print too


@dataclass(frozen=True)
class Greet:
    """The first request to an agent: introduces the run.

    `run` is the run directory there, `host` the host's name in the hostfile, `slots` its number of ranks. `port` is the
    rendezvous port to try, 0 for any, None if it is not on this host. `stream`: send log files to the head, and with
    `events` events.jsonl. After `patience` seconds of silence the ranks are ended. The head has each file up to the
    byte in `sent`.
    """

    run: str
    host: str
    slots: int
    port: int | None
    stream: bool
    events: bool
    patience: float
    sent: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Start:
    """Asks the agent to start its ranks.

    `env` are variables for the ranks. `world` has device indices by host name, `node` is the index of this host, whose
    devices come from the hostfile or --include if `chosen`. `address` and `port` are the rendezvous. `step` is the
    number of finished steps to resume after. `shards` is the path of the prepared data here, None if as on the head.
    """

    env: dict[str, str]
    world: dict[str, list[int]]
    chosen: bool
    node: int
    address: str
    port: int
    step: int
    shards: str | None = None


@dataclass(frozen=True)
class Stop:
    """Asks the agent to send a signal to its ranks."""

    signal: int


class Command(StrEnum):
    """Requests without fields: STACKS = ranks print stacks, END = end ranks and agent, PING = the head lives."""

    STACKS = "stacks"
    END = "end"
    PING = "ping"


@dataclass(frozen=True)
class Hello:
    """The agent's first message.

    `locked`: it has the lock of the host's ranks. `port` is the free port, or the reason why the requested port cannot
    be used. `cores` are the CPU cores it may use. Its ssh connection goes from `came_from` to `arrived_at`.
    """

    locked: bool = True
    port: int | str | None = None
    cores: int | None = None
    came_from: str | None = None
    arrived_at: str | None = None
    hostname: str = ""


@dataclass(frozen=True)
class Log:
    """A piece of a file: its path below the run directory, its text, and the byte position behind it if known."""

    file: str
    text: str
    end: int | None = None


@dataclass(frozen=True)
class Beat:
    """Heartbeat: state letter by living rank, free bytes on the run's disk, kills for lack of memory since the start.

    `oom_kills` counts the whole host; None when the kernel does not tell.
    """

    ranks: dict[str, str] = field(default_factory=dict)
    free_bytes: int | None = None
    oom_kills: int | None = None


@dataclass(frozen=True)
class RankEnded:
    """Reports that a rank has ended, with its exit code; -N for signal N."""

    rank: int
    code: int


@dataclass(frozen=True)
class Refused:
    """Reports why the launcher could not be started."""

    reason: str


@dataclass(frozen=True)
class Exited:
    """Reports that the launcher has ended, with its exit code, -N for signal N. `asked`: the agent ended it."""

    code: int
    asked: bool = False


Request = Greet | Start | Stop | Command
Reply = Hello | Log | Beat | RankEnded | Refused | Exited
REQUESTS = {"hello": Greet, "start": Start, "stop": Stop}
REPLIES = {"hello": Hello, "log": Log, "beat": Beat, "rank": RankEnded, "refused": Refused, "exit": Exited}
NAMES: dict[type, dict[str, str]] = {kind: {"do": name} for name, kind in REQUESTS.items()}
NAMES |= {kind: {"kind": name} for name, kind in REPLIES.items()}


def write_message(message: Request | Reply) -> str:
    """Return a request or reply as JSON without line ends."""
    return json.dumps({"do": message} if isinstance(message, Command) else NAMES[type(message)] | asdict(message))


def read_request(line: str) -> Request | None:
    """Return the request in a line of JSON; None for a name that this version does not know.

    Raises ValueError if the line is not JSON, KeyError or TypeError if it is no request.
    """
    fields = json.loads(line)
    if fields["do"] in list(Command):
        return Command(fields["do"])
    request: Request | None = _read(REQUESTS, fields, fields["do"])
    return request


def read_reply(line: bytes) -> Reply | None:
    """Return the reply in a line of JSON; None for a name that this version does not know.

    Raises ValueError if the line is not JSON, KeyError or TypeError if it is no reply.
    """
    fields = json.loads(line)
    reply: Reply | None = _read(REPLIES, fields, fields["kind"])
    return reply


def _read(kinds: Mapping[str, Any], fields: Mapping[str, Any], name: str) -> Any:
    """Return the message called `name` with those of the fields that its class has; None for a name not in `kinds`."""
    if (kind := kinds.get(name)) is None:
        return None
    # An older sender leaves fields out, for which the class has defaults; what a newer sender adds is dropped.
    return kind(**{each.name: fields[each.name] for each in dataclasses.fields(kind) if each.name in fields})
