"""A service to measure, in a process of its own, and a connection that costs little beside it."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

import msgspec

from benchmarks.measure import WrongAnswer


class MeasuredService:
    """`holdfast serve` on a free port with an empty root."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="holdfast-bench-"))
        self.root = self.folder / "root"
        self.root.mkdir()
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = int(probe.getsockname()[1])
        self.url = f"http://127.0.0.1:{self.port}"
        command = [sys.executable, "-m", "api.cli.main", "serve", "--port", str(self.port), "--root", str(self.root),
                   "--database", str(self.folder / "service.db"), "--lost-after", "60s"]
        with open(self.folder / "service.log", "wb") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log)
        self._wait_until_ready()

    def _wait_until_ready(self) -> None:
        for _ in range(300):
            try:
                with urllib.request.urlopen(f"{self.url}/ready", timeout=1):
                    return
            except OSError:
                time.sleep(0.1)
        raise WrongAnswer("the service did not start")

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(15)
        shutil.rmtree(self.folder, ignore_errors=True)

    @property
    def resident_bytes(self) -> int:
        return int(Path(f"/proc/{self._process.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    @property
    def cpu_seconds(self) -> float:
        """CPU time of the service so far."""
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class Connection(asyncio.Protocol):
    """A kept-alive connection with just enough HTTP: one request at a time, bodies are counted and not kept."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._transport: asyncio.Transport | None = None
        self._answer: asyncio.Future[int] | None = None
        self._head = bytearray()
        self._status = 0
        self._missing = -1

    @classmethod
    async def open(cls, port: int) -> Connection:
        _, connection = await asyncio.get_running_loop().create_connection(lambda: cls(port), "127.0.0.1", port)
        return connection

    async def request(self, method: str, path: str, body: object = None) -> int:
        """The status of the answer, when all of it has come."""
        assert self._transport is not None
        data = b"" if body is None else msgspec.json.encode(body)
        self._answer = asyncio.get_running_loop().create_future()
        self._head.clear()
        self._missing = -1
        self._transport.write(f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1:{self._port}\r\nContent-Type: application/json"
                              f"\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data)
        return await self._answer

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        if self._missing < 0:
            self._head += data
            end = self._head.find(b"\r\n\r\n")
            if end < 0:
                return
            self._status = int(self._head[9:12])
            self._missing = _content_length(self._head[:end].lower()) - (len(self._head) - end - 4)
        else:
            self._missing -= len(data)
        if self._missing <= 0 and self._answer is not None and not self._answer.done():
            self._answer.set_result(self._status)

    def connection_lost(self, error: Exception | None) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(error or ConnectionError("the service closed the connection"))


def _content_length(head: bytearray) -> int:
    start = head.find(b"content-length:")
    return 0 if start < 0 else int(head[start + 15:].split(b"\r\n", 1)[0])
