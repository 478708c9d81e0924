"""The service under load: a thousand reporting jobs, fifty clients with mixed reads at a fixed rate, latencies."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from benchmarks.measure import Asked, Benchmark, WrongAnswer

JOBS, CLIENTS, RATE = 1_000, 50, 300


class ServiceLoad(Benchmark):
    """A thousand registered jobs that report every five seconds, a hundred checkpoints of history each, and fifty clients
    that together send 300 mixed reads a second: the 99th percentile of the answers' latency in milliseconds, against
    the limit of 100 ms; any error, or fewer requests than asked, is a wrong answer."""

    name = "service-load"
    unit = "ms p99"
    higher_is_better = False
    baseline = "limit of 100 ms"
    asked = {"holdfast": Asked(1.0)}
    rounds = (1, 1)

    def setup(self) -> None:
        self.jobs, self.seconds = (100, 10) if self.quick else (JOBS, 300)
        self.folder = Path(tempfile.mkdtemp(prefix="holdfast-bench-"))
        (self.folder / "root").mkdir()
        self.port = _free_port()
        command = [sys.executable, "-m", "api.cli.main", "serve", "--port", str(self.port), "--root",
                   str(self.folder / "root"), "--database", str(self.folder / "service.db"), "--lost-after", "60s"]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self._wait_until_ready()
        asyncio.run(self._register())

    def teardown(self) -> None:
        self.process.terminate()
        self.process.wait(10)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _wait_until_ready(self) -> None:
        for _ in range(100):
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/ready", timeout=1):
                    return
            except OSError:
                time.sleep(0.1)
        raise WrongAnswer("the service did not start")

    def contenders(self) -> dict[str, Callable[[int], float]]:
        return {"limit of 100 ms": lambda _seed: 100.0, "holdfast": lambda _seed: asyncio.run(self._load())}

    async def _register(self) -> None:
        connection = await _Connection.open(self.port)
        history = [{"id": number, "status": "COMPLETED", "end_to_end_duration": number, "state_size": number * 1000,
                    "num_subtasks": 4, "num_acknowledged_subtasks": 4} for number in range(1, 101)]
        vertices = [{"id": f"v{number}", "name": f"operator {number}", "parallelism": 4} for number in range(3)]
        for number in range(self.jobs):
            await connection.request("PUT", f"/jobs/{_job(number)}/registration", {"name": f"job-{number}",
                                                                                  "vertices": vertices})
            await connection.request("POST", f"/jobs/{_job(number)}/heartbeat", {"state": "RUNNING", "checkpoints": history})
        connection.close()

    async def _load(self) -> float:
        """Clients at a fixed rate each, and reporters beside them; latency counts from when a request was due."""
        end = time.perf_counter() + self.seconds
        before = _resident(self.process.pid)
        latencies: list[float] = []
        errors: list[str] = []
        tasks = [self._client(number, end, latencies, errors) for number in range(CLIENTS)]
        tasks += [self._reporter(part, end, errors) for part in range(4)]
        await asyncio.gather(*tasks)
        if errors:
            raise WrongAnswer(f"{len(errors)} errors, the first: {errors[0]}")
        if len(latencies) < 0.97 * RATE * self.seconds:
            raise WrongAnswer(f"only {len(latencies) / self.seconds:.0f} requests a second")
        grown = _resident(self.process.pid) - before
        if grown > 200 * 2**20:
            raise WrongAnswer(f"memory grew by {grown / 2**20:.0f} MiB")
        return float(np.percentile(latencies, 99)) * 1000

    async def _client(self, number: int, end: float, latencies: list[float], errors: list[str]) -> None:
        random = np.random.default_rng(number)
        connection = await _Connection.open(self.port)
        every = CLIENTS / RATE
        due = time.perf_counter() + random.random() * every
        while due < end:
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            job = _job(int(random.integers(0, self.jobs)))
            paths = (f"/jobs/{job}", f"/jobs/{job}/checkpoints", f"/jobs/{job}/checkpoints/details/50",
                     f"/jobs/{job}/checkpoints/config", f"/jobs/{job}/metrics", "/jobs/overview", "/overview")
            path = paths[int(random.choice(len(paths), p=(0.3, 0.3, 0.15, 0.1, 0.09, 0.01, 0.05)))]
            status = await connection.request("GET", path)
            if status != 200:
                errors.append(f"{path} answered {status}")
            latencies.append(time.perf_counter() - due)
            due += every
        connection.close()

    async def _reporter(self, part: int, end: float, errors: list[str]) -> None:
        connection = await _Connection.open(self.port)
        own = range(part, self.jobs, 4)
        every, number = 5 / len(own), 100
        while time.perf_counter() < end:
            number += 1
            for job in own:
                started = time.perf_counter()
                record = {"id": number, "status": "COMPLETED", "state_size": 5}
                body = {"state": "RUNNING", "checkpoints": [record]}
                status = await connection.request("POST", f"/jobs/{_job(job)}/heartbeat", body)
                if status != 200:
                    errors.append(f"heartbeat answered {status}")
                if time.perf_counter() > end:
                    break
                await asyncio.sleep(max(0.0, every - (time.perf_counter() - started)))
        connection.close()


class _Connection:
    """A keep-alive connection with just enough HTTP for a load test."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, port: int) -> None:
        self._reader, self._writer, self._port = reader, writer, port

    @classmethod
    async def open(cls, port: int) -> _Connection:
        return cls(*await asyncio.open_connection("127.0.0.1", port), port)

    async def request(self, method: str, path: str, body: Mapping[str, object] | None = None) -> int:
        data = b"" if body is None else json.dumps(body).encode()
        head = (f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1:{self._port}\r\nContent-Type: application/json\r\n"
                f"Content-Length: {len(data)}\r\n\r\n")
        self._writer.write(head.encode() + data)
        status = int((await self._reader.readline()).split()[1])
        length = 0
        while (line := await self._reader.readline()) not in (b"\r\n", b""):
            name, _, value = line.partition(b":")
            if name.lower() == b"content-length":
                length = int(value)
        await self._reader.readexactly(length)
        return status

    def close(self) -> None:
        self._writer.close()


def _job(number: int) -> str:
    return f"{number:032x}"


def _free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _resident(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0
