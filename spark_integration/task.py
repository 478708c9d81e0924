"""One task of a stateful operator: restore its range, work through its rows, store the state, acknowledge, emit.

Output leaves only after the acknowledgement is durable, so that a reader that stops early (a `limit` or `show` in
foreachBatch) does not tear the epoch. Until then it is held in memory, and beyond some megabytes in a local file.
"""

from __future__ import annotations

import gc
import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from checkpoint.storage.store import FileStore
from spark_integration.bases import ADOPT_WITHIN, BaseTarget
from spark_integration.cache import FOLDER_PREFIX, Lease, SlotKey, Wanted, WorkerCache, local_root
from spark_integration.context import TaskContext
from spark_integration.epoch_store import EpochStore, Start
from spark_integration.epochs import (
    MANIFEST_VERSION,
    Acknowledgement,
    EpochId,
    Manifest,
    Statistics,
    TaskRun,
    require_same_cut,
)
from spark_integration.host_files import HostFiles, StateFiles, WarmFiles, linkable
from spark_integration.operators import Columns, Operator, OutputSchema, event_time_column
from spark_integration.rows import OutputBuilder, shorten
from spark_integration.taskinfo import TaskInfo, task_info
from statebackend.entries import ENTRIES_VERSION
from statebackend.errors import HoldfastError, IncompatibleState, InvalidRequest
from statebackend.keygroups import KeyGroupRange, key_group_range
from statebackend.operator_state import OperatorStateSnapshot, OperatorStateStore, redistribute
from statebackend.types import CODEC_VERSION, StateType

ROUTE = "__holdfast"
"""The column that carries a row's key group."""
BATCH_TIME = "__holdfast_time"
"""The column that carries the batch's time: milliseconds, as text, the same in every row."""
BROADCAST = "__holdfast_broadcast"
_SPOOL_BYTES = 64 << 20
_CLEAN_EVERY = 10


@dataclass(frozen=True)
class TaskPlan:
    """Everything a task needs to know, fixed on the driver and shipped with the plan. Options may hold secrets."""

    uid: str
    checkpoint: str
    storage_options: Mapping[str, Any] = field(repr=False)
    unfenced: bool
    parallelism: int
    max_parallelism: int
    key_type: StateType
    columns: Columns
    output: OutputSchema
    operator: Operator
    function_name: str
    backend: str
    backend_options: Mapping[str, Any]
    delay_ms: int
    retain: int
    start_empty: bool = False
    slots: int = 8
    host_bytes: int = 0
    host_folder: str = ""
    batch_run: TaskRun | None = None
    gather_rows: int = 0
    order_by: tuple[str, ...] = ()
    broadcast_table: bytes | None = field(default=None, repr=False)
    versions: tuple[tuple[str, Any], ...] = ()


_cache = WorkerCache()
_settled_in = 0
_stores: dict[tuple[str, str, int, bool], EpochStore] = {}
_hosts: dict[tuple[Path, int], HostFiles | None] = {}


class StatefulTask:
    """What `mapInArrow` calls: input batches in, output batches out."""

    def __init__(self, plan: TaskPlan) -> None:
        self._plan = plan

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        plan = self._plan
        settle_in()
        require_versions(plan.versions)
        info = task_info(plan.batch_run)
        key_groups = _own_range(plan, info)
        epochs = epoch_store(plan)
        start = epochs.start(info.run, plan.parallelism)
        if start.base is not None:
            require_same_cut(start.base, plan.max_parallelism, plan.key_type.to_json())
        attempt = _Attempt(plan, info, key_groups, epochs, start)
        spool = Spool()
        try:
            attempt.run(batches, spool)
            yield from spool
        finally:
            spool.close()


def settle_in() -> None:
    """Once per worker: exempt all that was imported from garbage collection.

    Spark's workers collect all garbage after each task, which walks every object of every library: tens of milliseconds
    that the next batch waits for.
    """
    global _settled_in
    if _settled_in != os.getpid():
        _settled_in = os.getpid()
        gc.freeze()


def versions() -> tuple[tuple[str, Any], ...]:
    """What driver and executors must agree on: formats, and Python itself, which unpickles the function."""
    return (("python", f"{sys.version_info.major}.{sys.version_info.minor}"), ("codec", CODEC_VERSION),
            ("entries", ENTRIES_VERSION), ("manifest", MANIFEST_VERSION))


def require_versions(driver: tuple[tuple[str, Any], ...]) -> None:
    if driver and driver != versions():
        raise IncompatibleState("driver and executor have different versions", expected=dict(driver),
                                found=dict(versions()), path=sys.executable,
                                hint="set PYSPARK_PYTHON, or ship one environment with `holdfast spark pack`")


def epoch_store(plan: TaskPlan) -> EpochStore:
    """The epochs of an operator; one store per process and folder, so that connections and manifests are kept."""
    name = (plan.checkpoint, plan.uid, plan.max_parallelism, plan.start_empty)
    if name not in _stores:
        store = FileStore.at(plan.checkpoint, unfenced=plan.unfenced, **plan.storage_options)
        _stores[name] = EpochStore(store, plan.uid, max_parallelism=plan.max_parallelism,
                                   start_empty=plan.start_empty, unfenced=plan.unfenced)
    return _stores[name]


def host_files(plan: TaskPlan, store: FileStore) -> HostFiles | None:
    """Copies of state files on this host; none where a hard link out of storage does as well."""
    folder = (Path(plan.host_folder) if plan.host_folder else local_root()) / f"{FOLDER_PREFIX}files-{os.getuid()}"
    if (folder, plan.host_bytes) not in _hosts:
        _hosts[folder, plan.host_bytes] = HostFiles.at(folder, plan.host_bytes)
    local = store.local_path("state")
    return None if local is not None and linkable(local, folder) else _hosts[folder, plan.host_bytes]


def _own_range(plan: TaskPlan, info: TaskInfo) -> KeyGroupRange:
    if info.partition >= plan.parallelism:
        raise _renumbered(plan, info.partition)
    return key_group_range(info.partition, plan.parallelism, plan.max_parallelism)


def _renumbered(plan: TaskPlan, partition: int) -> InvalidRequest:
    return InvalidRequest("rows arrived in a partition that is not theirs", operator=plan.uid, partition=partition,
                          parallelism=plan.parallelism,
                          hint="coalesce() and union() right after stateful() renumber its partitions: use "
                               "repartition(), or pass isolate=True")


class _Attempt:
    """One attempt at one range of one batch."""

    def __init__(self, plan: TaskPlan, info: TaskInfo, key_groups: KeyGroupRange, epochs: EpochStore,
                 start: Start) -> None:
        self._plan, self._info, self._key_groups, self._epochs, self._start = plan, info, key_groups, epochs, start
        self._epoch = EpochId(info.run.batch, start.generation.number)
        self._batch_time: int | None = None
        self._max_event_time: int | None = None
        self._statistics = Statistics()
        self._broadcasts: list[pa.RecordBatch] = []

    def run(self, batches: Iterator[pa.RecordBatch], spool: Spool) -> None:
        plan, start = self._plan, self._start
        files, new_base = self._files()
        url = self._epochs.store.url
        wanted = Wanted(SlotKey(url, plan.uid, self._key_groups, plan.backend), plan.key_type, plan.max_parallelism,
                        start.base, files, plan.backend_options, self._epoch.epoch, new_base)
        _cache.limit = plan.slots
        with _cache.lease(wanted) as lease:
            operator_state = self._operator_state()
            self._process(lease, operator_state, batches, spool)
            if start.published:
                return  # another action on the same batch: the epoch stands, this pass only repeats the output
            began = time.perf_counter()
            handle = lease.keyed.snapshot(self._epoch.epoch + 1, files).run()
            warmed = lease.restored == "restored" and isinstance(files, WarmFiles) and files.warm
            statistics = replace(self._statistics, new_bytes=handle.new_bytes, restore_ms=lease.milliseconds,
                                 restored="warmed" if warmed else lease.restored, store_ms=_ms_since(began))
            ack = Acknowledgement(self._key_groups, self._info.attempt, handle, _stored(operator_state),
                                  self._batch_time, self._max_event_time, statistics)
            manifest = self._epochs.acknowledge(self._info.run, start, plan.parallelism, ack)
            lease.settle(self._info.attempt, handle, self._epoch.epoch + 1)
        if manifest is not None:
            self._clean_up(manifest)

    def _files(self) -> tuple[StateFiles, BaseTarget]:
        """Where this attempt's files go and all files come from; and where a base goes that is made after it."""
        own = self._epochs.files(self._epoch, self._info.attempt)
        later = self._epochs.files(self._epoch._replace(epoch=self._epoch.epoch + ADOPT_WITHIN), self._info.attempt)
        host = host_files(self._plan, self._epochs.store)
        if host is None:
            return own, BaseTarget(later, later)
        return WarmFiles(own, host), BaseTarget(later, WarmFiles(later, host))

    def _operator_state(self) -> OperatorStateStore:
        base, plan = self._start.base, self._plan
        if base is None or not any(part.operator for part in base.parts):
            return OperatorStateStore(plan.uid)
        snapshots = [OperatorStateSnapshot.from_bytes(part.operator) if part.operator else OperatorStateSnapshot()
                     for part in base.parts]
        return OperatorStateStore(plan.uid, redistribute(snapshots, plan.parallelism)[self._info.partition].parts)

    def _process(self, lease: Lease, operator_state: OperatorStateStore, batches: Iterator[pa.RecordBatch],
                 spool: Spool) -> None:
        plan, base = self._plan, self._start.base
        began, fired, rows_in = time.perf_counter(), 0, 0
        inputs = self._inputs(batches)
        first = next(inputs, None)
        self._set_clocks(lease)
        output = OutputBuilder(plan.output.main, plan.output.side, plan.function_name)
        context = TaskContext(
            uid=plan.uid, subtask_index=self._info.partition, parallelism=plan.parallelism,
            max_parallelism=plan.max_parallelism, attempt=self._info.attempt_number,
            restored_checkpoint_id=base.id.epoch if base is not None else None, keyed=lease.keyed,
            clock=lease.clock, operator_state=operator_state, output=output.add_side)
        operator = plan.operator
        try:
            operator.open(context, output)
            if plan.broadcast_table is not None and (base is None or base.id.generation != self._epoch.generation):
                operator.process_broadcast(pa.ipc.open_stream(plan.broadcast_table).read_all())
            if operator.uses_timers:
                fired, ready = operator.advance()
                spool.add(ready)
            for table in self._gathered(first, inputs, operator):
                rows_in += table.num_rows
                spool.add(operator.process(table))
            if operator.uses_timers:
                more, ready = operator.advance()
                spool.add(ready)
                fired += more
            lease.keyed.sweep()
            operator.snapshot(self._epoch.epoch, lease.clock.now_ms())
            spool.add(output.flush(everything=True))
        finally:
            operator.close()
        self._statistics = Statistics(rows_in=rows_in, rows_out=output.rows_out, timers_fired=fired,
                                      process_ms=_ms_since(began))

    def _inputs(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Data rows, checked and with the route column noted; broadcast rows and ticks are taken out on the way."""
        for batch in batches:
            if batch.num_rows == 0:
                continue
            groups = batch.column(batch.schema.get_field_index(ROUTE)).to_numpy(zero_copy_only=False)
            self._batch_time = int(batch.column(batch.schema.get_field_index(BATCH_TIME))[0].as_py())
            if int(groups.min()) < self._key_groups.first or int(groups.max()) > self._key_groups.last:
                raise _renumbered(self._plan, self._info.partition)
            if self._plan.columns.broadcast is not None:
                batch = self._without_broadcast(batch)
            if batch.num_rows:
                self._require_keys(batch)
                self._note_event_time(batch)
                yield batch

    def _without_broadcast(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Rows for every range carry a struct (broadcast) or nothing but the clock (ticks) in place of columns."""
        kind = np.asarray(batch.column(batch.schema.get_field_index(f"{BROADCAST}_kind")))
        if not kind.any():
            return batch
        shared = batch.filter(pa.array(kind == 1))
        if shared.num_rows:
            struct = shared.column(shared.schema.get_field_index(BROADCAST))
            self._broadcasts.append(pa.RecordBatch.from_struct_array(struct))
        return batch.filter(pa.array(kind == 0))

    def _require_keys(self, batch: pa.RecordBatch) -> None:
        for name in self._plan.columns.keys:
            column = batch.column(batch.schema.get_field_index(name))
            if column.null_count:
                row = int(np.flatnonzero(np.asarray(column.is_null()))[0])
                record = batch.slice(row, 1).select(list(self._plan.columns.records)).to_pylist()[0]
                raise InvalidRequest(f"key column {name!r} is null in a row", operator=self._plan.uid, column=name,
                                     record=shorten(record), hint="filter such rows out before stateful()")

    def _note_event_time(self, batch: pa.RecordBatch) -> None:
        name = self._plan.columns.event_time
        if name is None:
            return
        latest = pc.max(event_time_column(batch.column(batch.schema.get_field_index(name)))).as_py()
        if latest is not None:
            self._max_event_time = latest if self._max_event_time is None else max(latest, self._max_event_time)

    def _set_clocks(self, lease: Lease) -> None:
        """Processing time is the batch's, or for a range without rows that of the epoch before; never the machine's."""
        base = self._start.base
        time_ms = self._batch_time if self._batch_time is not None else base.batch_time if base is not None else None
        lease.clock.set(time_ms or 0)
        if base is not None and base.max_event_time is not None and self._plan.columns.event_time is not None:
            lease.keyed.advance_watermark(base.max_event_time - self._plan.delay_ms)

    def _gathered(self, first: pa.RecordBatch | None, rest: Iterator[pa.RecordBatch],
                  operator: Operator) -> Iterator[pa.Table]:
        """Input in the pieces the operator wants; all broadcast rows come before all others.

        Spark sorts no stream, and a shuffle delivers in any order: `order_by` is done here, over the whole range.
        """
        limit, order = self._plan.gather_rows, self._plan.order_by
        if self._plan.columns.broadcast is not None or order:
            held = list(_chained(first, rest))
            if self._broadcasts:
                operator.process_broadcast(pa.Table.from_batches(self._broadcasts))
            if held:
                table = pa.Table.from_batches(held)
                yield table.sort_by([(name, "ascending") for name in order]) if order else table
            return
        held, rows = [], 0
        for batch in _chained(first, rest):
            held.append(batch)
            rows += batch.num_rows
            if rows >= limit:
                yield pa.Table.from_batches(held)
                held, rows = [], 0
        if held:
            yield pa.Table.from_batches(held)

    def _clean_up(self, manifest: Manifest) -> None:
        """Whoever published forgets old epochs now and then, beside the next batches."""
        if manifest.id.epoch % _CLEAN_EVERY:
            return

        def clean() -> None:
            try:
                self._epochs.forget(manifest, self._plan.retain)
            except HoldfastError as error:
                print(f"holdfast: old epochs of {self._plan.uid} were not cleaned up: {error}", file=sys.stderr)

        threading.Thread(target=clean, name="holdfast-clean", daemon=True).start()


def _chained(first: pa.RecordBatch | None, rest: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    if first is not None:
        yield first
    yield from rest


def _stored(state: OperatorStateStore) -> bytes:
    snapshot = state.snapshot()
    return snapshot.to_bytes() if snapshot.parts else b""


def _ms_since(began: float) -> int:
    return round((time.perf_counter() - began) * 1000)


class Spool:
    """Output that waits for the acknowledgement: in memory, and from some megabytes on in a local file."""

    def __init__(self, limit: int = _SPOOL_BYTES) -> None:
        self._limit, self._bytes = limit, 0
        self._memory: list[pa.RecordBatch] = []
        self._file: Any = None
        self._writer: Any = None

    def add(self, batches: list[pa.RecordBatch]) -> None:
        for batch in batches:
            if self._writer is None and self._bytes + batch.nbytes > self._limit:
                self._file = tempfile.TemporaryFile(dir=local_root())  # noqa: SIM115
                self._writer = pa.ipc.new_stream(self._file, batch.schema)
            if self._writer is not None:
                self._writer.write_batch(batch)
            else:
                self._memory.append(batch)
                self._bytes += batch.nbytes

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        while self._memory:
            yield self._memory.pop(0)
        if self._writer is not None:
            self._writer.close()
            self._file.seek(0)
            with pa.ipc.open_stream(self._file) as reader:
                yield from reader

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
