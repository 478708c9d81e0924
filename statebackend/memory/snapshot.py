"""The asynchronous part of a snapshot: entries encoded, sorted by key group and written, while the owner goes on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from statebackend.backend import KeyedHandle, PendingBase, PendingSnapshot
from statebackend.entries import write_entries
from statebackend.errors import Conflict, HoldfastError, InvalidRequest, Unavailable
from statebackend.files import SnapshotTarget, StateFile
from statebackend.memory.layers import give_way
from statebackend.memory.runs import Rows, RunSorter
from statebackend.memory.views import TableView
from statebackend.schema import StateSchema

if TYPE_CHECKING:
    from statebackend.memory.keyed import MemoryKeyed

MAX_FILES = 128
"""A chain of base and deltas longer than this is replaced by a new base."""


@dataclass(frozen=True)
class Chain:
    """The files of a finished snapshot, oldest first: a base, then deltas."""

    checkpoint_id: int
    epoch: int
    files: tuple[StateFile, ...]

    def wants_new_base(self, patience: int = 1) -> bool:
        """Whether the deltas have outgrown the base, so that replaying them costs more than writing it anew."""
        deltas = sum(file.size for file in self.files[1:])
        return not self.files or deltas > patience * self.files[0].size or len(self.files) >= patience * MAX_FILES


class Phase(Enum):
    NEW = "new"
    RUNNING = "running"
    ENDED = "ended"


@dataclass
class SnapshotPlan:
    """What the synchronous part has fixed."""

    checkpoint_id: int
    epoch: int
    parent: Chain | None
    views: list[TableView]
    raw: list[tuple[StateSchema, Iterable[pa.RecordBatch]]]
    schemas: tuple[StateSchema, ...]
    shared: bool
    max_state_size: int | None = None
    meta: dict[str, Any] = field(default_factory=dict)


class MemorySnapshot(PendingSnapshot):
    """One pending snapshot of a keyed backend. Only `cancel` may be called from another thread while it runs.

    `builds`: later snapshots may build on it once its checkpoint is completed.
    """

    builds = True

    def __init__(self, keyed: MemoryKeyed, target: SnapshotTarget, plan: SnapshotPlan) -> None:
        self._keyed = keyed
        self._target = target
        self._plan: SnapshotPlan | None = plan
        self.checkpoint_id = plan.checkpoint_id
        self.epoch = plan.epoch
        self.phase = Phase.NEW
        self._cancelled = False

    def run(self) -> KeyedHandle:
        with self._keyed.lock:
            if self._cancelled:
                raise self._given_up()
            if self.phase is not Phase.NEW or self._plan is None:
                raise Conflict("a snapshot runs once", checkpoint_id=self.checkpoint_id)
            self.phase = Phase.RUNNING
            plan, self._plan = self._plan, None
        chain: Chain | None = None
        try:
            self._keyed.await_folding()
            handle = self._write(plan)
            if self._cancelled:
                raise self._given_up()
            chain = Chain(plan.checkpoint_id, plan.epoch, handle.files)
            return handle
        except OSError as error:
            raise Unavailable(f"a snapshot can't be written: {error}", checkpoint_id=self.checkpoint_id,
                              operator=self._keyed.uid) from error
        finally:
            for view in plan.views:
                view.release()
            del plan
            self.phase = Phase.ENDED
            self._keyed.snapshot_ended(self, chain if self.builds else None)

    def cancel(self) -> None:
        with self._keyed.lock:
            already, self._cancelled = self._cancelled, True
            waiting = self.phase is Phase.NEW
            if waiting and self._plan is not None:
                for view in self._plan.views:
                    view.release()
                self.phase, self._plan = Phase.ENDED, None
        if waiting and not already:
            self._keyed.snapshot_cancelled(self)

    def _given_up(self) -> HoldfastError:
        return Conflict("the snapshot was cancelled", checkpoint_id=self.checkpoint_id, operator=self._keyed.uid)

    def _write(self, plan: SnapshotPlan) -> KeyedHandle:
        sorter = RunSorter()
        for rows in self._rows(plan):
            if self._cancelled:
                raise self._given_up()
            sorter.add(rows)
            give_way()
        before = plan.parent.files if plan.parent is not None else ()
        new: tuple[StateFile, ...] = ()
        if sorter.rows:
            hint = f"{'delta' if plan.parent is not None else 'base'}-{plan.checkpoint_id}"
            new = (write_entries(self._target, hint, self._unless_cancelled(sorter.batches()), shared=plan.shared),)
        keyed = self._keyed
        return KeyedHandle("entries", keyed.key_groups, keyed.max_parallelism, keyed.key_type.to_json(), plan.schemas,
                           (*before, *new), plan.meta, sum(file.size for file in new))

    def _unless_cancelled(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            if self._cancelled:
                raise self._given_up()
            yield batch

    def _rows(self, plan: SnapshotPlan) -> Iterator[Rows]:
        for view in plan.views:
            size = 0
            for rows in (view.full() if plan.parent is None else view.delta()):
                self._keyed.require_held(rows.groups, view.schema.name)
                size += rows.nbytes
                self._require_small(plan, view.schema.name, size)
                yield rows
        for schema, batches in plan.raw:
            size = 0
            for batch in batches:
                rows = self._keyed.raw_rows(batch)
                size += rows.nbytes
                self._require_small(plan, schema.name, size)
                yield rows

    def _require_small(self, plan: SnapshotPlan, name: str, size: int) -> None:
        if plan.max_state_size is not None and size > plan.max_state_size:
            raise InvalidRequest("a state is larger than the memory backend snapshots", state=name,
                                 operator=self._keyed.uid, found=f"more than {plan.max_state_size} bytes",
                                 expected=f"at most {plan.max_state_size} bytes", checkpoint_id=plan.checkpoint_id,
                                 hint="use the filesystem or rocksdb backend, or raise max_state_size")


class MemoryBase(MemorySnapshot, PendingBase):
    """All that the newest snapshot holds in one file, to take the place of the files of its chain."""

    builds = False

    def __init__(self, keyed: MemoryKeyed, target: SnapshotTarget, plan: SnapshotPlan, under: Chain) -> None:
        super().__init__(keyed, target, plan)
        self._under = under
        self._made: KeyedHandle | None = None

    def run(self) -> KeyedHandle:  # type: ignore[override]
        self._made = super().run()
        return self._made

    def adopt(self) -> bool:
        return self._made is not None and self._keyed.rebase(self._under, self._made.files)
