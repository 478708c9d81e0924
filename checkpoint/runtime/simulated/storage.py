"""Storage and an external system in memory, both with faults: checkpoints by generation, and sink transactions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from checkpoint.protocol.messages import Publish, SubtaskId
from checkpoint.runtime.contracts import CheckpointOptions, SubtaskSnapshot
from checkpoint.runtime.simulated.scenario import Value
from statebackend.errors import Conflict, CorruptData, Unavailable
from statebackend.files import FileWriter, StateFile


@dataclass
class SimState:
    """All state of one subtask: by key, the splits of a source, the broadcast copy, a sink's open transactions."""

    keyed: dict[Any, int] = field(default_factory=dict)
    splits: list[tuple[int, int, int]] = field(default_factory=list)
    rules: dict[Value, int] = field(default_factory=dict)
    transactions: list[tuple[int, str]] = field(default_factory=list)

    def copy(self) -> SimState:
        return SimState(dict(self.keyed), list(self.splits), dict(self.rules), list(self.transactions))


@dataclass(frozen=True)
class StoredCheckpoint:
    checkpoint_id: int
    options: CheckpointOptions
    snapshots: Mapping[SubtaskId, SubtaskSnapshot]
    parallelism: Mapping[str, int]


class SimStorage:
    """What survives every crash. Publication is refused to all but the newest generation."""

    def __init__(self) -> None:
        self.generation = 0
        self.checkpoints: dict[int, StoredCheckpoint] = {}
        self.savepoints: dict[int, StoredCheckpoint] = {}
        self._files: dict[str, Any] = {}
        self._serial = 0

    def begin(self) -> int:
        """A new run takes the job over."""
        self.generation += 1
        return self.generation

    def store(self, hint: str, content: Any) -> StateFile:
        self._serial += 1
        path = f"{hint}-{self._serial}"
        self._files[path] = content
        return StateFile(path, 10, "")

    def load(self, file: StateFile) -> Any:
        if file.path not in self._files:
            raise CorruptData("a checkpoint refers to a file that was deleted", path=file.path)
        return self._files[file.path]

    def publish(self, generation: int, publish: Publish, parallelism: Mapping[str, int]) -> StoredCheckpoint:
        if generation != self.generation:
            raise Conflict("a newer generation has taken over", expected=self.generation, found=generation)
        stored = StoredCheckpoint(publish.checkpoint_id, publish.options, dict(publish.snapshots), dict(parallelism))
        place = self.savepoints if publish.options.kind == "savepoint" else self.checkpoints
        place[publish.checkpoint_id] = stored
        return stored

    def states(self, stored: StoredCheckpoint, task: str) -> list[SimState]:
        """Copies of the state of every subtask of a task."""
        files = [stored.snapshots[SubtaskId(task, index)].operators[0].operator
                 for index in range(stored.parallelism[task])]
        return [self.load(file).copy() for file in files if file is not None]

    def newest(self) -> StoredCheckpoint | None:
        return self.checkpoints[max(self.checkpoints)] if self.checkpoints else None

    def discard(self, generation: int, checkpoint_id: int) -> None:
        if generation == self.generation and checkpoint_id in self.checkpoints:
            self.discard_files(generation, self.checkpoints.pop(checkpoint_id).snapshots)

    def discard_files(self, generation: int, snapshots: Mapping[SubtaskId, SubtaskSnapshot]) -> None:
        if generation != self.generation:
            return
        for snapshot in snapshots.values():
            files = [operator.operator for operator in snapshot.operators] + [snapshot.in_flight]
            for file in files:
                if file is not None:
                    self._files.pop(file.path, None)


class SimTarget:
    """Where one snapshot's files go; refuses some of them."""

    def __init__(self, storage: SimStorage, random: Random, failing: float) -> None:
        self._storage, self._random, self._failing = storage, random, failing

    def store(self, hint: str, content: Any) -> StateFile:
        if self._random.random() < self._failing:
            raise Unavailable("the store does not answer")
        return self._storage.store(hint, content)

    def create(self, hint: str, *, shared: bool) -> FileWriter:
        raise NotImplementedError("simulated state is stored whole")

    def upload(self, local: Path, hint: str, *, shared: bool) -> StateFile:
        raise NotImplementedError("simulated state is stored whole")


class TransactionLog:
    """The system that sinks write to: prepared transactions become visible by commit, which may be repeated."""

    def __init__(self) -> None:
        self._prepared: dict[str, list[Value]] = {}
        self._committed: set[str] = set()

    def prepare(self, transaction: str, records: list[Value]) -> None:
        assert transaction not in self._prepared, f"{transaction} was prepared twice"
        self._prepared[transaction] = list(records)

    def commit(self, transaction: str) -> None:
        self._committed.add(transaction)

    def output(self) -> Counter[Value]:
        """Everything that is visible."""
        return Counter(value for transaction in self._committed for value in self._prepared[transaction])
