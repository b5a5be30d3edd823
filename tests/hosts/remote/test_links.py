"""How hosts meet during the probe, on this machine's own addresses."""

from __future__ import annotations

import socket
import threading
import time

from finlm.hosts.remote import links


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("", 0))
        return int(listener.getsockname()[1])


def request(me: str, port: int) -> links.Request:
    return links.Request(me, port, "t", 3, [])


def test_a_peer_is_told_by_its_answer_and_a_name_that_means_nothing_by_its_address() -> None:
    port = free_port()
    listener = links.Listener(request("n1", port), {"n0"})
    ways = ["no-such-name.invalid", "127.0.0.1"]
    said = links.call(request("n0", port), ways, time.monotonic() + 3)
    assert said.answered == "n1" and said.unresolved and said.error is None
    assert said.local == said.address == "127.0.0.1"
    assert listener.close(time.monotonic() + 60) == links.Port(port)


def test_a_taken_port_is_seen_and_another_programs_answer_is_not_taken_for_a_host() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        threading.Thread(target=lambda: other.accept()[0].sendall(b"SSH-2.0-OpenSSH\n"), daemon=True).start()
        taken = links.Listener(request("n0", port), set()).close(0)
        said = links.call(request("n1", port), ["127.0.0.1"], time.monotonic() + 0.5)
    assert taken.free is False and "in use" in taken.error
    assert said.answered is None and said.error
    assert links.Listener(request("n0", port), set()).close(0).free is True


def test_interfaces_are_listed_with_every_address() -> None:
    (loopback,) = [card for card in links.list_cards() if card.name == "lo"]
    assert "127.0.0.1" in loopback.addresses
    assert links.list_infiniband() == [] or all(port.device for port in links.list_infiniband())


def test_hosts_log_in_to_each_other_in_different_orders() -> None:
    peers = [links.Peer(name, [], ["true"]) for name in ("n0", "n1", "n2")]
    order = [[peer.name for peer in links.rotate_peers(me, peers)] for me in ("n0", "n1", "n2")]
    assert order == [["n0", "n1", "n2"], ["n1", "n2", "n0"], ["n2", "n0", "n1"]]
