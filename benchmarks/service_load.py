"""The service under load: a thousand reporting jobs, fifty clients with mixed reads at a fixed rate, latencies."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import numpy as np

from benchmarks.measure import Asked, Benchmark, WrongAnswer
from benchmarks.service_client import Connection, MeasuredService

JOBS, CLIENTS, RATE, REPORT_SECONDS = 1_000, 50, 300, 5.0
REPORTERS = 50
READS = {"/jobs/{}": 0.3, "/jobs/{}/checkpoints": 0.3, "/jobs/{}/checkpoints/details/100": 0.15,
         "/jobs/{}/checkpoints/config": 0.1, "/jobs/{}/metrics": 0.09, "/jobs/overview": 0.01, "/overview": 0.05}


class ServiceLoad(Benchmark):
    """A thousand registered jobs that report every five seconds, a hundred checkpoints of history each, and fifty clients
    that together send 300 mixed reads a second: the 99th percentile of the answers' latency in milliseconds, against
    the limit of 100 ms; any error, fewer requests than asked, or memory that grows, is a wrong answer."""

    name = "service-load"
    unit = "ms p99"
    higher_is_better = False
    baseline = "limit of 100 ms"
    asked = {"holdfast": Asked(1.0)}
    rounds = (1, 1)

    def setup(self) -> None:
        self.jobs, self.seconds = (100, 10) if self.quick else (JOBS, 300)
        self.service = MeasuredService()
        asyncio.run(self._register())

    def teardown(self) -> None:
        self.service.close()

    def contenders(self) -> dict[str, Callable[[int], float]]:
        return {"limit of 100 ms": lambda _seed: 100.0, "holdfast": lambda _seed: asyncio.run(self._load())}

    async def _register(self) -> None:
        connection = await Connection.open(self.service.port)
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
        latencies: list[float] = []
        errors: list[str] = []
        resident: list[int] = []
        tasks = [self._client(number, end, latencies, errors) for number in range(CLIENTS)]
        tasks += [self._reporter(part, end, errors) for part in range(REPORTERS)]
        await asyncio.gather(*tasks, self._weigh(end, resident))
        if errors:
            raise WrongAnswer(f"{len(errors)} errors, the first: {errors[0]}")
        if len(latencies) < 0.97 * RATE * self.seconds:
            raise WrongAnswer(f"only {len(latencies) / self.seconds:.0f} requests a second")
        warm = resident[len(resident) // 4]  # caches have filled by then
        if resident[-1] - warm > max(0.1 * warm, 32 << 20):
            raise WrongAnswer(f"memory grew from {warm >> 20} to {resident[-1] >> 20} MiB")
        return float(np.percentile(latencies, 99)) * 1000

    async def _weigh(self, end: float, resident: list[int]) -> None:
        while time.perf_counter() < end:
            resident.append(self.service.resident_bytes)
            await asyncio.sleep(1)

    async def _client(self, number: int, end: float, latencies: list[float], errors: list[str]) -> None:
        random = np.random.default_rng(number)
        connection = await Connection.open(self.service.port)
        paths, shares = list(READS), np.fromiter(READS.values(), float)
        every = CLIENTS / RATE
        due = time.perf_counter() + random.random() * every
        while due < end:
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            path = paths[int(random.choice(len(paths), p=shares))].format(_job(int(random.integers(0, self.jobs))))
            status = await connection.request("GET", path)
            if status != 200:
                errors.append(f"{path} answered {status}")
            latencies.append(time.perf_counter() - due)
            due += every
        connection.close()

    async def _reporter(self, part: int, end: float, errors: list[str]) -> None:
        """Report for every fiftieth job, each on its time."""
        connection = await Connection.open(self.service.port)
        own = range(part, self.jobs, REPORTERS)
        every = REPORT_SECONDS / len(own)
        due, beat = time.perf_counter() + every * part / REPORTERS, 0
        while due < end:
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            job, record = own[beat % len(own)], {"id": 101 + beat // len(own), "status": "COMPLETED", "state_size": 5}
            status = await connection.request("POST", f"/jobs/{_job(job)}/heartbeat",
                                              {"state": "RUNNING", "checkpoints": [record]})
            if status != 200:
                errors.append(f"heartbeat answered {status}")
            due, beat = due + every, beat + 1
        connection.close()


def _job(number: int) -> str:
    return f"{number:032x}"
