"""What a job runs with, and how one subtask of it is built: the same in the supervisor's process and in workers."""

from __future__ import annotations

import shutil
import tempfile
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from checkpoint.dataflow.chain import FlowChain
from checkpoint.dataflow.channel_state import FlowChannelCodec
from checkpoint.dataflow.graph import Dataflow
from checkpoint.dataflow.operators import Environment
from checkpoint.dataflow.plan import Plan, Vertex, plan
from checkpoint.protocol.messages import SubtaskId
from checkpoint.runtime.contracts import CheckpointOptions
from checkpoint.runtime.host import Assignment
from checkpoint.runtime.local_recovery import LocalCopies
from checkpoint.runtime.restoring import RestoredSubtask
from checkpoint.runtime.subtask import Subtask, Transport
from checkpoint.runtime.wiring import Wiring
from checkpoint.storage.layout import safe_name
from checkpoint.storage.storage import JobStorage
from statebackend.backend import Backend, create_backend
from statebackend.clock import Clock, SystemClock
from statebackend.errors import InvalidRequest
from statebackend.files import SnapshotTarget


@dataclass(frozen=True)
class BackendChoice:
    """A backend by name with its options. `directory` below which each subtask has its own working folder."""

    name: str = "filesystem"
    options: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, given: str | Mapping[str, Any] | BackendChoice | None) -> BackendChoice:
        """From a name, or a mapping such as `{"name": "rocksdb", "memory_limit": "256MiB"}`."""
        if given is None:
            return cls()
        if isinstance(given, BackendChoice):
            return given
        if isinstance(given, str):
            return cls(given)
        if not isinstance(given, Mapping) or not isinstance(given.get("name"), str):
            raise InvalidRequest("a backend is a name, or a mapping with a name and options", found=repr(given))
        return cls(given["name"], {key: value for key, value in given.items() if key != "name"})


@dataclass(frozen=True)
class JobSpec:
    """Everything a worker needs besides the flow itself; plain values only."""

    job_id: str
    job_name: str
    run_id: str
    root: str
    backend: BackendChoice
    generation: int = 0
    unfenced: bool = False
    inline_threshold: int | str = "20KiB"
    parallelism: Mapping[str, int] = field(default_factory=dict)
    storage_options: Mapping[str, Any] = field(default_factory=dict)
    work_dir: str | None = None
    channel_credit: int | None = None
    local_recovery: bool = False

    def to_json(self) -> dict[str, Any]:
        return {"job_id": str(self.job_id), "job_name": self.job_name, "run_id": self.run_id, "root": self.root,
                "backend": {"name": self.backend.name, **self.backend.options}, "generation": self.generation,
                "unfenced": self.unfenced, "inline_threshold": self.inline_threshold,
                "parallelism": dict(self.parallelism), "storage_options": dict(self.storage_options),
                "work_dir": self.work_dir, "channel_credit": self.channel_credit, "local_recovery": self.local_recovery}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> JobSpec:
        return cls(**{**data, "backend": BackendChoice.of(data["backend"])})

    def storage(self) -> JobStorage:
        return JobStorage(self.root, self.job_id, inline_threshold=self.inline_threshold, unfenced=self.unfenced,
                          generation=self.generation, job_name=self.job_name, **self.storage_options)


class Builder:
    """Builds subtasks of one flow in this process."""

    def __init__(self, flow: Dataflow, spec: JobSpec, storage: JobStorage, clock: Clock | None = None) -> None:
        self.flow, self.spec, self.storage = flow, spec, storage
        self.clock: Clock = clock or SystemClock()
        self.plan: Plan = plan(flow, spec.parallelism)
        self.wiring = Wiring(self.plan)
        self.codec = FlowChannelCodec(flow)
        self._vertices = {vertex.id: vertex for vertex in self.plan.vertices}
        self._copies: dict[SubtaskId, LocalCopies] = {}
        self._copies_dir = WorkDir(spec.work_dir, "copies")

    def assignment(self, subtask: SubtaskId, attempt: int, restored: RestoredSubtask | None, *,
                   foreign: bool = False, enumerations: Mapping[str, Any] | None = None) -> Assignment:
        """`foreign`: the restored files are not this job's, so the first checkpoint must not build on them."""
        vertex = self._vertices[subtask.task]

        def build(transport: Transport) -> Subtask:
            return self._subtask(vertex, subtask, attempt, transport, restored, foreign, enumerations or {})

        restore = restored.restore if restored is not None else None
        if restore is not None and subtask in self._copies:
            restore = replace(restore, source=self._copies[subtask].source(restore.source))
        return Assignment(subtask, attempt, build, restore,
                          self.wiring.receivers(vertex, subtask.index), self.wiring.senders(vertex, subtask.index))

    def vertex(self, task: str) -> Vertex:
        return self._vertices[task]

    def close(self) -> None:
        """Remove local copies; nothing runs any more."""
        self._copies_dir.remove()

    def local_copy_hits(self) -> int:
        """How many files restarts took from local copies."""
        return sum(copies.hits for copies in self._copies.values())

    def _copies_of(self, subtask: SubtaskId) -> LocalCopies:
        return self._copies.setdefault(
            subtask, LocalCopies(self._copies_dir.path() / f"{safe_name(subtask.task)}-{subtask.index}"))

    def _subtask(self, vertex: Vertex, subtask: SubtaskId, attempt: int, transport: Transport,
                 restored: RestoredSubtask | None, foreign: bool, enumerations: Mapping[str, Any]) -> Subtask:
        work = WorkDir(self.spec.work_dir, f"{safe_name(vertex.id)}-{subtask.index}")
        environment = Environment(
            lambda: open_backend(self.spec.backend, work), self.clock, job_id=self.spec.job_id,
            job_name=self.spec.job_name, run_id=self.spec.run_id, subtask_index=subtask.index,
            parallelism=vertex.parallelism, max_parallelism=self.flow.max_parallelism, attempt=attempt,
            enumerations=enumerations, closing=work.remove)
        copies = self._copies_of(subtask) if self.spec.local_recovery else None
        chain = FlowChain(self.plan, vertex, environment, inner=restored.inner if restored is not None else (),
                          first_full=foreign, observer=copies)

        def target(checkpoint_id: int, options: CheckpointOptions) -> SnapshotTarget:
            if options.location is not None and options.native:
                return self.storage.savepoint_target(options.location, vertex.id, subtask.index)
            stored = self.storage.target(checkpoint_id, vertex.id, subtask.index)
            return copies.target(checkpoint_id, stored) if copies is not None and options.location is None else stored

        options: dict[str, Any] = {}
        if self.spec.channel_credit is not None:
            options = {"credit": self.spec.channel_credit, "queue_limit": self.spec.channel_credit}
        return Subtask(subtask, chain, self.wiring.input_edges(vertex, subtask.index),
                       self.wiring.output_edges(vertex, subtask.index), transport, clock=self.clock, codec=self.codec,
                       target=target, attempt=attempt, **options)


class WorkDir:
    """A subtask's own working folder, made when first asked for and removed when the subtask closes."""

    def __init__(self, parent: str | None, name: str) -> None:
        self._parent, self._name = parent, name
        self._made: Path | None = None
        self._lock = threading.Lock()

    def path(self) -> Path:
        with self._lock:
            if self._made is None:
                if self._parent is not None:
                    Path(self._parent).mkdir(parents=True, exist_ok=True)
                self._made = Path(tempfile.mkdtemp(prefix=f"holdfast-{self._name}-", dir=self._parent))
            return self._made

    def remove(self) -> None:
        if self._made is not None:
            shutil.rmtree(self._made, ignore_errors=True)
            self._made = None


def open_backend(choice: BackendChoice, work: WorkDir) -> Backend:
    """The backend of one subtask; RocksDB works in the subtask's own folder unless told where."""
    options = dict(choice.options)
    if choice.name == "rocksdb" and "directory" not in options:
        options["directory"] = str(work.path() / "db")
    return create_backend(choice.name, **options)
