"""Prometheus metrics of the service and of the jobs that report to it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from api.rest.registry import Registry

_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
_CHECKPOINT_GAUGES = {
    "holdfast_checkpoint_duration_seconds": ("end_to_end_duration", 1e-3, "Duration of the last completed checkpoint"),
    "holdfast_checkpoint_bytes": ("checkpointed_size", 1, "Bytes that the last completed checkpoint stored anew"),
    "holdfast_state_bytes": ("state_size", 1, "Full size of the last completed checkpoint"),
    "holdfast_checkpoint_alignment_seconds": ("alignment_duration", 1e-3, "Alignment of the last completed checkpoint"),
    "holdfast_checkpoint_inflight_bytes": ("persisted_data", 1, "In-flight bytes in the last completed checkpoint"),
}


class Metrics:
    """The metrics of one app; a registry of its own, so that several apps live in one process."""

    def __init__(self, registry: Registry) -> None:
        self._collectors = CollectorRegistry()
        self._latency = Histogram("holdfast_request_seconds", "Time to answer a request", ["method", "route"],
                                  buckets=_BUCKETS, registry=self._collectors)
        self._requests = Counter("holdfast_requests", "Requests by route and status", ["method", "route", "status"],
                                 registry=self._collectors)
        self._collectors.register(_Jobs(registry))

    def observe(self, method: str, route: str, status: int, seconds: float) -> None:
        self._latency.labels(method, route).observe(seconds)
        self._requests.labels(method, route, str(status)).inc()

    def render(self) -> bytes:
        return generate_latest(self._collectors)


class _Jobs(Collector):
    """What the jobs reported, read when a scrape comes."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry

    def collect(self) -> Iterable[GaugeMetricFamily]:
        jobs = self._registry.jobs()
        states = GaugeMetricFamily("holdfast_jobs", "Jobs by state", labels=["state"])
        by_state: dict[str, int] = {}
        for job in jobs:
            state = "LOST" if job.lost else job.state
            by_state[state] = by_state.get(state, 0) + 1
        for state, count in by_state.items():
            states.add_metric([state], count)
        yield states
        failures = GaugeMetricFamily("holdfast_checkpoints_failed", "Failed checkpoints in the history", labels=["job"])
        gauges = {name: GaugeMetricFamily(name, text, labels=["job"]) for name, (_, _, text) in _CHECKPOINT_GAUGES.items()}
        reported = GaugeMetricFamily("holdfast_job_metric", "Metrics that jobs report by name", labels=["job", "metric"])
        completed, failed = self._registry.last_completed(), self._registry.failed_checkpoints()
        for job in jobs:
            if job.running:
                failures.add_metric([job.id], failed.get(job.id, 0))
                _add_checkpoint(job.id, completed.get(job.id, {}), gauges)
                for name, value in job.live.get("metrics", {}).items():
                    if isinstance(value, (int, float)):
                        reported.add_metric([job.id, name], value)
        yield failures
        yield from gauges.values()
        yield reported


def _add_checkpoint(job_id: str, record: dict[str, Any], gauges: dict[str, GaugeMetricFamily]) -> None:
    for name, (field, factor, _) in _CHECKPOINT_GAUGES.items():
        if isinstance(record.get(field), (int, float)):
            gauges[name].add_metric([job_id], record[field] * factor)
