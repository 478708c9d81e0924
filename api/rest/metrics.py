"""Prometheus metrics of the service and of the jobs that report to it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from api.rest.registry import JobRecord, Registry

_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
SHOWN_OPERATORS = 100
"""Operators of a job that have series of their own: those with the most state."""
_FAMILIES = {
    "holdfast_job_info": ("A running job", "name", "runtime", "backend"),
    "holdfast_checkpoint_duration_seconds": ("Duration of the last completed checkpoint",),
    "holdfast_checkpoint_bytes": ("Bytes that the last completed checkpoint stored anew",),
    "holdfast_state_bytes": ("Full size of the last completed checkpoint",),
    "holdfast_checkpoint_alignment_seconds": ("Longest alignment of a subtask in the last completed checkpoint",),
    "holdfast_checkpoint_inflight_bytes": ("In-flight bytes in the last completed checkpoint",),
    "holdfast_checkpoints_completed": ("Completed checkpoints since the job's process began",),
    "holdfast_checkpoints_failed": ("Failed checkpoints since the job's process began",),
    "holdfast_restore_seconds": ("Duration of the last restore, until every subtask had its state",),
    "holdfast_operator_state_bytes": ("State of an operator in the last completed checkpoint", "operator"),
    "holdfast_key_group_skew": ("Records of the busiest key group over the mean of all, in the last minutes", "operator"),
    "holdfast_job_metric": ("Metrics that jobs report by name", "metric"),
}
_OF_LAST_CHECKPOINT = {
    "holdfast_checkpoint_duration_seconds": ("end_to_end_duration", 1e-3),
    "holdfast_checkpoint_bytes": ("checkpointed_size", 1), "holdfast_state_bytes": ("state_size", 1),
    "holdfast_checkpoint_alignment_seconds": ("alignment_duration", 1e-3),
    "holdfast_checkpoint_inflight_bytes": ("persisted_data", 1),
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
        yield from _of_running([job for job in jobs if job.running and not job.lost], self._registry.last_completed(),
                               self._registry.failed_checkpoints())


def _of_running(jobs: Iterable[JobRecord], completed: Mapping[str, Mapping[str, Any]],
                failed: Mapping[str, int]) -> Iterable[GaugeMetricFamily]:
    """What jobs that report tell of themselves. What a silent or ended one said last is no figure of now."""
    families = {name: GaugeMetricFamily(name, text, labels=["job", *labels]) for name, (text, *labels) in _FAMILIES.items()}

    def add(name: str, value: Any, *labels: str) -> None:
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            families[name].add_metric(labels, value)

    for job in jobs:
        told = job.live.get("metrics", {})
        add("holdfast_job_info", 1, job.id, job.name, str(job.registration.get("runtime")),
            str(job.registration.get("backend")))
        for name, (field, factor) in _OF_LAST_CHECKPOINT.items():
            value = completed.get(job.id, {}).get(field)
            add(name, value * factor if isinstance(value, (int, float)) else None, job.id)
        add("holdfast_checkpoints_completed", told.get("numberOfCompletedCheckpoints"), job.id)
        add("holdfast_checkpoints_failed", told.get("numberOfFailedCheckpoints", failed.get(job.id, 0)), job.id)
        restore = told.get("lastRestoreDuration")
        add("holdfast_restore_seconds", restore / 1000 if isinstance(restore, (int, float)) else None, job.id)
        operators = job.live.get("operators", {})
        for uid in sorted(operators, key=lambda uid: -operators[uid].get("state_bytes", 0))[:SHOWN_OPERATORS]:
            add("holdfast_operator_state_bytes", operators[uid].get("state_bytes"), job.id, uid)
            add("holdfast_key_group_skew", operators[uid].get("key_group_skew"), job.id, uid)
        for name, value in told.items():
            add("holdfast_job_metric", value, job.id, name)
    return families.values()
