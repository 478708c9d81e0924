"""Connections between workers on TCP: only who knows the run's token gets one."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from checkpoint.runtime import network
from checkpoint.runtime.network import TcpNetwork, local_host, new_token
from checkpoint.runtime.wire import Connection, Kind
from statebackend import Unavailable


class Server:
    """Accepts connections and keeps what it admitted; `None` for those it refused."""

    def __init__(self, token: bytes) -> None:
        self._network = TcpNetwork(token)
        self._socket, self.address = self._network.listen("control")
        self.admitted: list[Connection | None] = []
        self._changed = threading.Condition()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                connected, _ = self._socket.accept()
            except OSError:
                return
            found = self._network.admit(connected)
            with self._changed:
                self.admitted.append(found)
                self._changed.notify_all()

    def wait(self, count: int) -> list[Connection | None]:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.admitted) >= count, 60)
        return self.admitted

    def close(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        for connection in self.admitted:
            if connection is not None:
                connection.close()
                connection._reader.close()


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server(b"right" * 8)
    yield made
    made.close()


def test_who_has_the_token_is_connected_in_both_directions(server: Server) -> None:
    client = TcpNetwork(b"right" * 8).connect(server.address)
    [other] = server.wait(1)
    assert other is not None
    client.send_value(Kind.HELLO, [1])
    assert other.receive() == (Kind.HELLO, b"\x91\x01")
    other.send(Kind.CLOSE)
    assert client.receive() == (Kind.CLOSE, b"")
    assert local_host(client) == "127.0.0.1"
    client.close()
    assert other.receive() is None
    assert client.receive() is None


def test_a_wrong_token_is_refused_by_the_server(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(Unavailable):
        TcpNetwork(b"wrong" * 8).connect(server.address)
    assert server.wait(1) == [None]
    assert "this run's token" in caplog.text
    assert "right" not in caplog.text


def test_a_server_without_the_token_is_refused_by_the_client() -> None:
    listening = socket.create_server(("127.0.0.1", 0))

    def pretend() -> None:
        connected, _ = listening.accept()
        with connected:
            connected.sendall(b"n" * 32)
            connected.recv(1024)
            connected.sendall(b"p" * 32)
            connected.recv(1)

    thread = threading.Thread(target=pretend, daemon=True)
    thread.start()
    with pytest.raises(Unavailable, match="token"):
        TcpNetwork(b"right" * 8).connect(f"127.0.0.1:{listening.getsockname()[1]}")
    thread.join(30)
    listening.close()


def test_a_connection_that_says_nothing_is_dropped(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "HANDSHAKE_SECONDS", 0.2)
    host, port = server.address.split(":")
    with socket.create_connection((host, int(port)), 30) as silent:
        assert server.wait(1) == [None]
        assert len(silent.recv(64)) == 32
        assert silent.recv(64) == b""


def test_what_one_connection_proved_can_not_be_played_to_another(server: Server) -> None:
    def answers(hello: bytes) -> tuple[socket.socket, Any]:
        host, port = server.address.split(":")
        connected = socket.create_connection((host, int(port)), 30)
        assert len(connected.recv(32, socket.MSG_WAITALL)) == 32
        connected.sendall(hello)
        return connected, connected.recv(32)

    seen: list[bytes] = []

    class Eavesdropped(TcpNetwork):
        def _proof(self, role: bytes, server: bytes, client: bytes) -> bytes:
            proof = super()._proof(role, server, client)
            if role == b"client":
                seen.append(client + proof)
            return proof

    Eavesdropped(b"right" * 8).connect(server.address).close()
    replayed, answer = answers(seen[0])
    replayed.close()
    assert answer == b""
    assert server.wait(2)[1] is None


def test_the_token_is_random_and_shown_nowhere() -> None:
    token = new_token()
    assert len({token, new_token()}) == 2
    assert repr(token) not in repr(TcpNetwork(token))
    assert token.hex() not in repr(TcpNetwork(token))
