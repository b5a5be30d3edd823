"""How a host is reached: its address as its peers see it, and a free port on it.

Nothing is guessed from host names, which Debian resolves to 127.0.1.1: an ssh connection itself says from where it
came and at which address it arrived.
"""

from __future__ import annotations

import os
import socket
from typing import Any


def facts(port: int | None) -> dict[str, Any]:
    """What a host's agent greets with. `port`: the rendezvous port to try; 0 = any free one; None = not this host's."""
    connection = os.environ.get("SSH_CONNECTION", "").split()
    return {
        "hostname": os.uname().nodename,
        "came_from": connection[0] if len(connection) == 4 else None,
        "arrived_at": connection[2] if len(connection) == 4 else None,
        "cores": len(os.sched_getaffinity(0)),
        "port": None if port is None else free_port(port),
    }


def free_port(port: int) -> int | str:
    """`port`, or a free one for 0; the reason when it cannot be listened on."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # torch's store sets it too
        try:
            probe.bind(("", port))
            return int(probe.getsockname()[1])
        except OSError as error:
            return str(error.strerror)
