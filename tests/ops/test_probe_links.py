"""How hosts meet during the probe, on this machine's own addresses."""

from __future__ import annotations

import socket
import threading
import time
from typing import Any

from finlm.ops import probe_links


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("", 0))
        return int(listener.getsockname()[1])


def request(me: str, port: int) -> dict[str, Any]:
    return {"me": me, "port": port, "token": "t", "seconds": 3, "peers": []}


def test_a_peer_is_told_by_its_answer_and_a_name_that_means_nothing_by_its_address() -> None:
    port = free_port()
    listener = probe_links.Listener(request("n1", port), {"n0"})
    ways = ["no-such-name.invalid", "127.0.0.1"]
    said = probe_links.call(request("n0", port), ways, time.monotonic() + 3)
    assert said["answered"] == "n1" and said["unresolved"] and said["error"] is None
    assert said["local"] == said["address"] == "127.0.0.1"
    assert listener.close(time.monotonic() + 60) == {"port": port, "free": True, "error": None}


def test_a_taken_port_is_seen_and_another_programs_answer_is_not_taken_for_a_host() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        threading.Thread(target=lambda: other.accept()[0].sendall(b"SSH-2.0-OpenSSH\n"), daemon=True).start()
        taken = probe_links.Listener(request("n0", port), set()).close(0)
        said = probe_links.call(request("n1", port), ["127.0.0.1"], time.monotonic() + 0.5)
    assert taken["free"] is False and "in use" in taken["error"]
    assert said["answered"] is None and said["error"]
    assert probe_links.Listener(request("n0", port), set()).close(0)["free"] is True


def test_interfaces_are_listed_with_every_address() -> None:
    (loopback,) = [card for card in probe_links.network() if card["name"] == "lo"]
    assert "127.0.0.1" in loopback["addresses"]
    assert probe_links.infiniband() == [] or all(port["device"] for port in probe_links.infiniband())


def test_hosts_log_in_to_each_other_in_different_orders() -> None:
    peers = [{"name": name, "ssh": ["true"]} for name in ("n0", "n1", "n2")]
    order = [[one["name"] for one in probe_links.rotated({"me": me, "peers": peers})] for me in ("n0", "n1", "n2")]
    assert order == [["n0", "n1", "n2"], ["n1", "n2", "n0"], ["n2", "n0", "n1"]]
