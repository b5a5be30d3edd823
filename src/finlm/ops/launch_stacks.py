"""Which rank is the silent one: from the stacks that all ranks print when the watchdog asks (faulthandler, SIGUSR1).

In a hang all ranks but one wait for that one in a collective, so the odd one out is named. When all wait at the same
place, no rank is to blame and all are shown: then it is the network, or a device.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping

_FRAME = re.compile(r'^  File "(.+)", line (\d+) in (.+)$')
_WAITING = ("/torch/distributed/", "/deepspeed/comm/")

Stack = tuple[tuple[str, int, str], ...]
"""(file, line, function), innermost first."""


def parse(text: str) -> Stack:
    """The main thread's stack in the last dump of a log's text; empty when there is none. It is printed last."""
    stack: list[tuple[str, int, str]] = []
    inside = False
    for line in text.splitlines():
        found = _FRAME.match(line)
        if re.match(r"(Current thread|Thread) 0x", line):
            stack, inside = [], True
        elif found and inside:
            stack.append((found[1], int(found[2]), found[3]))
        else:
            inside = False
    return tuple(stack)


def silent(stacks: Mapping[int, Stack], states: Mapping[int, str]) -> list[int]:
    """Ranks to blame, by their stacks (empty = no answer) and the kernel's state letters; empty when nothing tells."""
    stopped = [rank for rank in stacks if states.get(rank) in ("T", "t")]
    mute = [rank for rank, stack in stacks.items() if not stack]
    if stopped or mute:
        return stopped or mute
    free = [rank for rank, stack in stacks.items() if not any(part in stack[0][0] for part in _WAITING)]
    if 0 < len(free) < len(stacks):
        return free
    places = Counter(place(stack) for stack in stacks.values())
    rarest = min(places.values())
    odd = [rank for rank, stack in stacks.items() if places[place(stack)] == rarest]
    return odd if len(places) > 1 and 2 * len(odd) < len(stacks) else []


def place(stack: Stack) -> str:
    """Where a stack stands, by the innermost frame of our own code: `pretrain.py:151 in log_step`."""
    own = next((frame for frame in stack if "/finlm/" in frame[0]), stack[0] if stack else ("?", 0, "?"))
    return f"{own[0].rpartition('/')[2]}:{own[1]} in {own[2]}"


def show(stack: Stack, frames: int = 8) -> str:
    """The innermost frames, one a line."""
    lines = [f"  {'/'.join(file.split('/')[-2:])}:{line} in {name}" for file, line, name in stack[:frames]]
    return "\n".join(lines) or "  it printed no stack"
