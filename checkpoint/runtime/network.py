"""How workers reach each other and their supervisor: Unix sockets on one machine, authenticated TCP between machines.

On TCP both sides prove that they know the run's token before anything else is read; the token itself never travels:

    server -> client   nonce (32 bytes)
    client -> server   nonce (32 bytes) | HMAC-SHA256(token, "client" | both nonces)
    server -> client   HMAC-SHA256(token, "server" | both nonces)

What follows is not encrypted.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import logging
import secrets
import socket
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from checkpoint.runtime.wire import Connection
from statebackend.errors import Unavailable

log = logging.getLogger("holdfast.runtime")

HANDSHAKE_SECONDS = 20.0
CONNECT_SECONDS = 20.0
KEEPALIVE = {"TCP_KEEPIDLE": 20, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3}
"""A machine that vanishes without a word is noticed within a minute."""
_NONCE, _PROOF = 32, 32


class Network(Protocol):
    """Makes connections between the processes of one run."""

    def listen(self, name: str) -> tuple[socket.socket, str]:
        """A listening socket, and the address under which the others reach it."""

    def admit(self, connected: socket.socket) -> Connection | None:
        """The connection behind an accepted socket; None, and the socket is closed, if it is not one of ours."""

    def connect(self, address: str) -> Connection: ...


@dataclass(frozen=True)
class UnixNetwork:
    """Sockets in a folder that only this user can enter."""

    folder: str

    def listen(self, name: str) -> tuple[socket.socket, str]:
        path = str(Path(self.folder) / name)
        server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        server.bind(path)
        server.listen(128)
        return server, path

    def admit(self, connected: socket.socket) -> Connection | None:
        return Connection(connected)

    def connect(self, address: str) -> Connection:
        client = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        client.connect(address)
        return Connection(client)


@dataclass(frozen=True)
class TcpNetwork:
    """TCP on one interface. `advertise` is the name that others know this machine by, where it is not `host`."""

    token: bytes = field(repr=False)
    host: str = "127.0.0.1"
    advertise: str | None = None

    def listen(self, name: str) -> tuple[socket.socket, str]:
        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        server = socket.create_server((self.host, 0), family=family, backlog=128)
        return server, f"{self.advertise or self.host}:{server.getsockname()[1]}"

    def admit(self, connected: socket.socket) -> Connection | None:
        try:
            _prepare(connected)
            self._check_client(connected)
        except (OSError, Unavailable) as error:
            log.warning("a connection was refused: %s", error)
            _drop(connected)
            return None
        connected.settimeout(None)
        return Connection(connected)

    def connect(self, address: str) -> Connection:
        host, _, port = address.rpartition(":")
        try:
            connected = socket.create_connection((host, int(port)), CONNECT_SECONDS)
        except OSError as error:
            raise Unavailable(f"no connection: {error}", address=address) from error
        try:
            _prepare(connected)
            self._check_server(connected)
        except (OSError, Unavailable) as error:
            _drop(connected)
            raise Unavailable(f"no connection: {error}", address=address) from error
        connected.settimeout(None)
        return Connection(connected)

    def _check_client(self, connected: socket.socket) -> None:
        mine = secrets.token_bytes(_NONCE)
        connected.sendall(mine)
        answer = _read(connected, _NONCE + _PROOF)
        theirs, proof = answer[:_NONCE], answer[_NONCE:]
        if not hmac.compare_digest(proof, self._proof(b"client", mine, theirs)):
            raise Unavailable("the other side does not have this run's token")
        connected.sendall(self._proof(b"server", mine, theirs))

    def _check_server(self, connected: socket.socket) -> None:
        theirs, mine = _read(connected, _NONCE), secrets.token_bytes(_NONCE)
        connected.sendall(mine + self._proof(b"client", theirs, mine))
        if not hmac.compare_digest(_read(connected, _PROOF), self._proof(b"server", theirs, mine)):
            raise Unavailable("the other side does not have this run's token")

    def _proof(self, role: bytes, server: bytes, client: bytes) -> bytes:
        return hmac.new(self.token, role + server + client, hashlib.sha256).digest()


def new_token() -> bytes:
    return secrets.token_bytes(32)


def local_host(connection: Connection) -> str:
    """The address of this end: the interface by which the other end is reached."""
    return str(connection.local_address[0])


def _prepare(connected: socket.socket) -> None:
    connected.settimeout(HANDSHAKE_SECONDS)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEPALIVE.items():
        if hasattr(socket, name):
            connected.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _read(connected: socket.socket, count: int) -> bytes:
    read = b""
    while len(read) < count:
        part = connected.recv(count - len(read))
        if not part:
            raise Unavailable("the other side closed the connection before it had proved who it is")
        read += part
    return read


def _drop(connected: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connected.shutdown(socket.SHUT_RDWR)
    connected.close()
