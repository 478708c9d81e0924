"""How the coordinator grows with the job: time, memory and storage requests of one checkpoint, 10 to 10,000 subtasks.

    python -m benchmarks.coordinator_scale                 # the table of docs/scaling.md

The subtasks are simulated (they acknowledge at once), the coordinator, the metadata and the storage are the real ones.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from benchmarks.measure import Asked, Benchmark, Growth, WrongAnswer
from checkpoint.protocol.coordinator import Coordinator
from checkpoint.protocol.messages import (
    Acknowledge,
    JobPlan,
    NotifyCompleted,
    Phase,
    Publish,
    Published,
    StatusReport,
    SubtaskId,
    SubtaskStats,
    TaskPlan,
    Tick,
)
from checkpoint.protocol.settings import CheckpointSettings
from checkpoint.runtime.contracts import OperatorSnapshot, SubtaskSnapshot
from checkpoint.storage.faults import FaultyDriver
from checkpoint.storage.metadata import CheckpointMetadata, OperatorEntry, SubtaskEntry
from checkpoint.storage.storage import JobStorage
from checkpoint.storage.store import FileStore
from statebackend import KeyedHandle, StateFile, key_group_range

MAX_PARALLELISM = 32768
JOB_ID = "0" * 32
SIZES = (10, 100, 1_000, 10_000)


@dataclass(frozen=True)
class Figures:
    """One checkpoint of a job with three operators of `subtasks` subtasks each. Seconds are CPU time."""

    subtasks: int
    trigger_to_publish_s: float
    write_metadata_s: float
    read_metadata_s: float
    metadata_bytes: int
    requests: int


def plan_of(subtasks: int) -> JobPlan:
    return JobPlan((TaskPlan("source", subtasks, (), ("source",), MAX_PARALLELISM),
                    TaskPlan("count", subtasks, ("source",), ("count",), MAX_PARALLELISM),
                    TaskPlan("sink", subtasks, ("count",), ("sink",), MAX_PARALLELISM)))


def snapshot_of(subtask: SubtaskId, subtasks: int) -> SubtaskSnapshot:
    """What such a subtask hands over: positions or transactions inline, keyed state as two shared files."""
    small = b"x" * 100
    operator = StateFile(f"{subtask.task}-{subtask.index}", len(small), xxhash.xxh3_128_hexdigest(small), inline=small)
    keyed: tuple[KeyedHandle, ...] = ()
    if subtask.task == "count":
        files = tuple(StateFile(f"shared/{subtask.task}-{subtask.index}-{number}", 1 << 20, "0" * 32, shared=True)
                      for number in range(2))
        groups = key_group_range(subtask.index, subtasks, MAX_PARALLELISM)
        keyed = (KeyedHandle("entries", groups, MAX_PARALLELISM, {"type": "string"}, (), files, new_bytes=1 << 20),)
    return SubtaskSnapshot((OperatorSnapshot(subtask.task, keyed, operator),))


def metadata_of(plan: JobPlan, publish: Publish) -> CheckpointMetadata:
    operators = tuple(OperatorEntry(task.task, task.task, task.parallelism, task.max_parallelism, tuple(
        SubtaskEntry(index, False, snapshot.operators[0].keyed, snapshot.operators[0].operator)
        for index in range(task.parallelism) for snapshot in (publish.snapshots[SubtaskId(task.task, index)],)))
        for task in plan.tasks)
    return CheckpointMetadata(JOB_ID, "scale", publish.checkpoint_id, operators=operators)


class SimulatedJob:
    """A coordinator whose subtasks all run, and their ready-made acknowledgements."""

    def __init__(self, subtasks: int) -> None:
        self.plan = plan_of(subtasks)
        self.coordinator = Coordinator(self.plan, CheckpointSettings(interval=1000))
        self.snapshots = {subtask: snapshot_of(subtask, subtasks) for subtask in self.plan.subtasks()}
        self.now = 0
        for subtask in self.snapshots:
            self.coordinator.handle(StatusReport(subtask, Phase.RUNNING), self.now)

    def trigger_to_publish(self) -> Publish:
        """One checkpoint, from the tick that triggers it to the request to publish."""
        self.now += 1000
        checkpoint_id = self.coordinator.statistics.counts["total"] + 1
        self.coordinator.handle(Tick(), self.now)
        stats = SubtaskStats(1, 2, 3, 4, 2 << 20, 1 << 20)
        publish: Publish | None = None
        for subtask, snapshot in self.snapshots.items():
            for action in self.coordinator.handle(Acknowledge(subtask, checkpoint_id, snapshot, stats), self.now):
                if isinstance(action, Publish):
                    publish = action
        if publish is None or len(publish.snapshots) != len(self.snapshots):
            raise WrongAnswer("the checkpoint was not to be published after the last acknowledgement")
        return publish

    def published(self, publish: Publish, path: str) -> None:
        actions = self.coordinator.handle(Published(publish.checkpoint_id, path), self.now)
        if NotifyCompleted(publish.checkpoint_id) not in actions:
            raise WrongAnswer("a published checkpoint was not complete")


def measure(subtasks: int, folder: Path) -> Figures:
    job = SimulatedJob(subtasks)
    driver = FaultyDriver(FileStore.at(str(folder)).driver)
    counted: Any = driver
    with FileStore(counted, str(folder)) as store, JobStorage(store, JOB_ID, job_name="scale") as storage:
        storage.claim_generation()
        job.published(warm := job.trigger_to_publish(), storage.publish(metadata_of(job.plan, warm)))
        before = driver.calls["*"]
        began = time.process_time()
        publish = job.trigger_to_publish()
        acknowledged = time.process_time()
        path = storage.publish(metadata_of(job.plan, publish))
        job.published(publish, path)
        written = time.process_time()
        requests = driver.calls["*"] - before
        size = storage.store.size(f"chk-{publish.checkpoint_id}/_metadata")
        reading = time.process_time()
        if len(storage.load(publish.checkpoint_id).operators[1].subtasks) != subtasks:
            raise WrongAnswer("the metadata read back has lost subtasks")
        read = time.process_time()
    return Figures(subtasks, acknowledged - began, written - acknowledged, read - reading, size, requests)


def coordinator_memory(subtasks: int) -> int:
    """Bytes that ten checkpoints leave behind in the coordinator: its history, with the figures of every subtask."""
    tracemalloc.start()
    try:
        job = SimulatedJob(subtasks)
        base = tracemalloc.get_traced_memory()[0]
        for _ in range(10):
            job.published(job.trigger_to_publish(), "chk")
        return tracemalloc.get_traced_memory()[0] - base
    finally:
        tracemalloc.stop()


class CoordinatorScale(Benchmark):
    """One checkpoint of 10,000 subtasks for each of three operators, from its trigger to stored metadata, in seconds of
    CPU, against the limit of 2 s that was set for it."""

    name = "coordinator-scale"
    unit = "s"
    baseline = "limit of 2 s"
    higher_is_better = False
    asked = {"holdfast": Asked(1.0)}
    rounds = (3, 5)
    subtasks = 10_000
    growth = Growth("subtasks", (100, 1_000, 10_000))

    def contenders(self) -> dict[str, Callable[[int], float]]:
        return {"limit of 2 s": lambda _seed: 2.0, "holdfast": lambda _seed: self._trigger_to_metadata()}

    def _trigger_to_metadata(self) -> float:
        figures = self._figures()
        return figures.trigger_to_publish_s + figures.write_metadata_s

    def _figures(self) -> Figures:
        folder = Path(tempfile.mkdtemp(prefix="holdfast-scale-"))
        try:
            return measure(self.subtasks // 10 if self.quick else self.subtasks, folder)
        finally:
            shutil.rmtree(folder, ignore_errors=True)


class CoordinatorMetadata(CoordinatorScale):
    """The metadata of that checkpoint, written and published, and read back: seconds of CPU, against the limit of 1 s."""

    name = "coordinator-metadata"
    baseline = "limit of 1 s"
    asked = {"write": Asked(1.0), "read": Asked(1.0)}

    def contenders(self) -> dict[str, Callable[[int], float]]:
        return {"limit of 1 s": lambda _seed: 1.0, "write": lambda _seed: self._figures().write_metadata_s,
                "read": lambda _seed: self._figures().read_metadata_s}


def table(sizes: tuple[int, ...] = SIZES) -> str:
    """The figures as the Markdown table of docs/scaling.md."""
    head = ("subtasks x 3 operators", "trigger to all acknowledged", "metadata written and published", "metadata read",
            "size of metadata", "coordinator's memory (10 checkpoints)", "storage requests of the coordinator")
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for size in sizes:
        folder = Path(tempfile.mkdtemp(prefix="holdfast-scale-"))
        try:
            one = measure(size, folder)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        cells = (f"{one.subtasks:,}", f"{one.trigger_to_publish_s * 1000:,.1f} ms",
                 f"{one.write_metadata_s * 1000:,.1f} ms", f"{one.read_metadata_s * 1000:,.1f} ms",
                 f"{one.metadata_bytes / 1024:,.0f} KiB", f"{coordinator_memory(size) / 1024:,.0f} KiB",
                 str(one.requests))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.coordinator_scale", description=__doc__.split("\n")[0])
    parser.add_argument("--largest", type=int, default=SIZES[-1], help="the largest number of subtasks")
    options = parser.parse_args()
    print(table(tuple(size for size in SIZES if size <= options.largest)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
