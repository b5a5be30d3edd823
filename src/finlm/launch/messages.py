"""Define the messages between head and agent: a line of JSON each, with `do` (to the agent) or `kind` and the fields.

An agent runs the code of its run directory, which may be older or newer than the head's: fields and messages that one
side does not know are left out, and what an older version does not send has a default.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any, TypeVar

MARK = "finlm-agent:"  # before an agent's messages: login scripts may print too


@dataclass(frozen=True)
class Greet:
    """Introduces the run to the agent, as the first request.

    port: rendezvous port to try, 0 = a free one, None = not this host's. stream: send log files home. events: send
    events.jsonl too. patience: seconds of silence until the ranks are ended. sent: up to which byte the head has which
    file.
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

    world: device numbers by host name. chosen: the devices of this host come from the hostfile or --include. node:
    number of this host. address, port: the rendezvous. step: finished steps to resume after. shards: the prepared data
    on the host, None when they are at the run's usual place.
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
    """Asks the agent to pass a signal on to its ranks."""

    signal: int


class Command(StrEnum):
    """Requests without fields: STACKS = ranks print their stacks, END = end ranks and agent, PING = the head lives."""

    STACKS = "stacks"
    END = "end"
    PING = "ping"


@dataclass(frozen=True)
class Hello:
    """The agent's first message.

    locked: it holds the host's part of the run. port: the free port, or why the requested port cannot be used. cores:
    CPU cores it may use. came_from, arrived_at: both addresses of the ssh connection, None on this machine.
    """

    locked: bool = True
    port: int | str | None = None
    cores: int | None = None
    came_from: str | None = None
    arrived_at: str | None = None
    hostname: str = ""


@dataclass(frozen=True)
class Log:
    """A piece of a file, by its name relative to the run directory; end: the byte behind the piece."""

    file: str
    text: str
    end: int | None = None


@dataclass(frozen=True)
class Beat:
    """Heartbeat: state letter of each living rank, free bytes on the run's disk, processes killed for memory."""

    ranks: dict[str, str] = field(default_factory=dict)
    free_bytes: int | None = None
    oom_kills: int | None = None


@dataclass(frozen=True)
class RankEnded:
    """Reports that a rank has ended with an exit code; signals are negative."""

    rank: int
    code: int


@dataclass(frozen=True)
class Refused:
    """Reports why the launcher could not be started."""

    reason: str


@dataclass(frozen=True)
class Exited:
    """Reports that the launcher has ended with an exit code; asked: the agent ended it itself."""

    code: int
    asked: bool = False


T = TypeVar("T", bound="Greet | Start | Stop | Reply")
Request = Greet | Start | Stop | Command
Reply = Hello | Log | Beat | RankEnded | Refused | Exited
REQUESTS: dict[str, type[Greet | Start | Stop]] = {"hello": Greet, "start": Start, "stop": Stop}
REPLIES: dict[str, type[Reply]] = {
    "hello": Hello,
    "log": Log,
    "beat": Beat,
    "rank": RankEnded,
    "refused": Refused,
    "exit": Exited,
}


def write_request(request: Request) -> str:
    """Return a request as a line of JSON."""
    return json.dumps({"do": request} if isinstance(request, Command) else _fields("do", REQUESTS, request))


def write_reply(reply: Reply) -> str:
    """Return a reply as a line of JSON."""
    return json.dumps(_fields("kind", REPLIES, reply))


def read_request(line: str) -> Request | None:
    """Return the request in a line of JSON; None for a request that this version does not know."""
    fields = json.loads(line)
    if fields["do"] in list(Command):
        return Command(fields["do"])
    return _read(REQUESTS, fields, fields["do"])


def read_reply(line: bytes) -> Reply | None:
    """Return the reply in a line of JSON; None for a reply that this version does not know."""
    fields = json.loads(line)
    return _read(REPLIES, fields, fields["kind"])


def _fields(key: str, kinds: Mapping[str, type], message: Any) -> Mapping[str, Any]:
    """Return a message's fields with its name in `kinds` under `key`."""
    return {key: next(name for name, kind in kinds.items() if kind is type(message)), **asdict(message)}


def _read(kinds: Mapping[str, type[T]], fields: Mapping[str, Any], name: str) -> T | None:
    """Build the message called `name` from the fields that its class knows; None for an unknown name."""
    if (kind := kinds.get(name)) is None:
        return None
    return kind(**{each.name: fields[each.name] for each in dataclasses.fields(kind) if each.name in fields})
