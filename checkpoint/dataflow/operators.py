"""The operators of a chain: they work on whole batches in tight loops and push what comes out to the next ones."""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from itertools import compress
from operator import length_hint
from typing import Any

from checkpoint.connectors.base import SinkWriter, SourceReader
from checkpoint.dataflow.context import OperatorContext, Place, PlainTimers, SideOutputs
from checkpoint.dataflow.functions import CheckpointedFunction, OpenContext
from checkpoint.dataflow.graph import Node
from checkpoint.runtime.contracts import (
    OperatorRestore,
    OperatorSnapshot,
    SourceStatus,
)
from statebackend.backend import Backend, KeyedBackend, PendingSnapshot
from statebackend.clock import Clock
from statebackend.errors import InvalidRequest
from statebackend.files import SnapshotSource, SnapshotTarget, writing
from statebackend.operator_state import OperatorStateSnapshot, OperatorStateStore

Stamps = list[int | None] | None
Emit = Callable[[list[Any], Stamps], None]
_UNSAFE = re.compile(r"[^A-Za-z0-9_.-]+")


class Environment:
    """What the operators of one subtask share. `backend` is called once, by the first operator that is keyed."""

    def __init__(self, backend: Callable[[], Backend], clock: Clock, *, job_id: str = "", job_name: str = "",
                 run_id: str = "", subtask_index: int = 0, parallelism: int = 1, max_parallelism: int = 128,
                 attempt: int = 0, enumerations: Mapping[str, Any] | None = None,
                 closing: Callable[[], None] | None = None) -> None:
        self._factory = backend
        self._backend: Backend | None = None
        self._closing = closing
        self.clock = clock
        self.enumerations: Mapping[str, Any] = enumerations or {}
        self.job_id, self.job_name, self.run_id, self.attempt = job_id, job_name, run_id, attempt
        self.subtask_index, self.parallelism, self.max_parallelism = subtask_index, parallelism, max_parallelism

    @property
    def backend(self) -> Backend:
        if self._backend is None:
            self._backend = self._factory()
        return self._backend

    def place(self, uid: str, restored: int | None) -> Place:
        return Place(uid, self.subtask_index, self.parallelism, self.max_parallelism, attempt=self.attempt,
                     job_id=self.job_id, job_name=self.job_name, run_id=self.run_id, restored_checkpoint_id=restored)

    def close(self) -> None:
        try:
            if self._backend is not None:
                self._backend.close()
        finally:
            if self._closing is not None:
                self._closing()


class Operator:
    """One operator in one subtask. Outputs are connected before `open`; lists that were emitted are never changed."""

    def __init__(self, node: Node, environment: Environment) -> None:
        self.node, self.uid, self.environment = node, node.uid, environment
        self.emits: list[Emit] = []
        self.side_emits: dict[str, list[Emit]] = {}
        self.place: Place
        self.store: OperatorStateStore
        self.records_in = 0
        self.records_out = 0

    def open(self, restore: OperatorRestore, source: SnapshotSource | None, checkpoint_id: int | None) -> None:
        self.place = self.environment.place(self.uid, checkpoint_id)
        self.store = OperatorStateStore(self.uid, restore.operator)

    def process(self, values: list[Any], timestamps: Stamps) -> None:
        raise InvalidRequest("this operator takes no input", operator=self.uid)

    def process_input(self, logical_input: int, values: list[Any], timestamps: Stamps) -> None:
        self.process(values, timestamps)

    def watermark(self, watermark: int) -> None:
        """Event time has advanced; what that sets off is emitted before the watermark goes on."""

    def processing_time(self, now_ms: int) -> int | None:
        """Do what is due; when to come again."""
        return None

    def finish(self) -> None:
        """No more input."""

    def prepare_snapshot(self, checkpoint_id: int, timestamp: int) -> None:
        """Bring the operator state up to date."""

    def keyed(self) -> KeyedBackend | None:
        return None

    def snapshot(self, checkpoint_id: int, target: SnapshotTarget, timestamp: int, *,
                 full: bool) -> PendingOperatorSnapshot:
        self.prepare_snapshot(checkpoint_id, timestamp)
        keyed = self.keyed()
        pending = keyed.snapshot(checkpoint_id, target, full=full) if keyed is not None else None
        return PendingOperatorSnapshot(self.uid, pending, self.store.snapshot(), target)

    def checkpoint_completed(self, checkpoint_id: int) -> None:
        keyed = self.keyed()
        if keyed is not None:
            keyed.checkpoint_completed(checkpoint_id)

    def checkpoint_aborted(self, checkpoint_id: int) -> None:
        keyed = self.keyed()
        if keyed is not None:
            keyed.checkpoint_aborted(checkpoint_id)

    def close(self) -> None:
        """Release everything."""

    def emit(self, values: list[Any], timestamps: Stamps) -> None:
        if values:
            self.records_out += len(values)
            for emit in self.emits:
                emit(values, timestamps)

    def emit_side(self, side: SideOutputs) -> None:
        if not side.values:
            return
        for name, values, timestamps in side.take():
            for emit in self.side_emits.get(name, ()):
                emit(values, timestamps)


class PendingOperatorSnapshot:
    """The asynchronous part of one operator's snapshot."""

    def __init__(self, uid: str, keyed: PendingSnapshot | None, operator: OperatorStateSnapshot,
                 target: SnapshotTarget) -> None:
        self._uid, self._keyed, self._operator, self._target = uid, keyed, operator, target

    def run(self) -> OperatorSnapshot:
        keyed = (self._keyed.run(),) if self._keyed is not None else ()
        if not self._operator.parts:
            return OperatorSnapshot(self._uid, keyed)
        hint = f"operator-{_UNSAFE.sub('_', self._uid)[:60]}"
        with writing(self._target, hint, shared=False) as (writer, done):
            writer.write(self._operator.to_bytes())
        return OperatorSnapshot(self._uid, keyed, done[0])

    def cancel(self) -> None:
        if self._keyed is not None:
            self._keyed.cancel()


class MapOperator(Operator):
    def process(self, values: list[Any], timestamps: Stamps) -> None:
        self.records_in += len(values)
        left = iter(values)
        try:
            mapped = list(map(self.node.body, left))
        except Exception as error:
            raise noted(error, self, last_taken(values, left)) from None
        self.emit(mapped, timestamps)


class FilterOperator(Operator):
    def process(self, values: list[Any], timestamps: Stamps) -> None:
        self.records_in += len(values)
        predicate, left = self.node.body, iter(values)
        try:
            chosen = list(map(predicate, left))
        except Exception as error:
            raise noted(error, self, last_taken(values, left)) from None
        self.emit(list(compress(values, chosen)), None if timestamps is None else list(compress(timestamps, chosen)))


class FlatMapOperator(Operator):
    def process(self, values: list[Any], timestamps: Stamps) -> None:
        self.records_in += len(values)
        function, out = self.node.body, list[Any]()
        stamps: Stamps = None if timestamps is None else []
        try:
            for index, value in enumerate(values):
                result = function(value)
                if result is not None:
                    out.extend(result)
                    if stamps is not None and timestamps is not None:
                        stamps.extend([timestamps[index]] * (len(out) - len(stamps)))
        except Exception as error:
            raise noted(error, self, value) from None
        self.emit(out, stamps)


class FunctionOperator(Operator):
    """What all operators with a Function share: a copy of it, its life cycle, its notices."""

    def __init__(self, node: Node, environment: Environment) -> None:
        super().__init__(node, environment)
        self.function = own_copy(node)
        self.call = giving_records(self.function.process)
        self.side = SideOutputs()
        self.opened = False

    def open_function(self, ctx: OpenContext) -> None:
        if isinstance(self.function, CheckpointedFunction):
            self.function.initialize_state(ctx)
        self.opened = True
        self.function.open(ctx)

    def prepare_snapshot(self, checkpoint_id: int, timestamp: int) -> None:
        if isinstance(self.function, CheckpointedFunction):
            from checkpoint.dataflow.context import CheckpointContext

            self.function.snapshot_state(CheckpointContext(self.place, self.store, checkpoint_id, timestamp))

    def checkpoint_completed(self, checkpoint_id: int) -> None:
        super().checkpoint_completed(checkpoint_id)
        self.function.checkpoint_completed(checkpoint_id)

    def checkpoint_aborted(self, checkpoint_id: int) -> None:
        super().checkpoint_aborted(checkpoint_id)
        self.function.checkpoint_aborted(checkpoint_id)

    def close(self) -> None:
        if self.opened:
            self.function.close()

    def run_batch(self, call: Callable[[Any, Any], Any], ctx: Any, values: list[Any], timestamps: Stamps) -> None:
        """One call per record; outputs carry the timestamp of their record."""
        out: list[Any] = []
        stamps: Stamps = None if timestamps is None else []
        try:
            for index, value in enumerate(values):
                if timestamps is not None:
                    ctx.timestamp = timestamps[index]
                result = call(value, ctx)
                if result is not None:
                    out.extend(result)
                    if stamps is not None:
                        stamps.extend([ctx.timestamp] * (len(out) - len(stamps)))
        except Exception as error:
            raise noted(error, self, value) from None
        self.emit(out, stamps)
        self.emit_side(self.side)


class ProcessOperator(FunctionOperator):
    """Runs a ProcessFunction."""

    def open(self, restore: OperatorRestore, source: SnapshotSource | None, checkpoint_id: int | None) -> None:
        super().open(restore, source, checkpoint_id)
        self._clocks = PlainTimers(self.uid, self.environment.clock)
        self._ctx = OperatorContext(self.place, self._clocks, self.store, self.side)
        self.open_function(self._ctx)

    def process(self, values: list[Any], timestamps: Stamps) -> None:
        self.records_in += len(values)
        self._ctx.timestamp = None
        self.run_batch(self.call, self._ctx, values, timestamps)

    def watermark(self, watermark: int) -> None:
        self._clocks.watermark = watermark


class TimestampsOperator(Operator):
    """Assigns timestamps, and the watermarks of the whole chain from here on."""

    on_watermark: Callable[[int], None]
    on_idle: Callable[[], None]

    def open(self, restore: OperatorRestore, source: SnapshotSource | None, checkpoint_id: int | None) -> None:
        super().open(restore, source, checkpoint_id)
        if self.node.watermarks is None:
            raise InvalidRequest("assign_timestamps needs a WatermarkStrategy", operator=self.uid)
        self._generator = self.node.watermarks.generator()

    def process(self, values: list[Any], timestamps: Stamps) -> None:
        self.records_in += len(values)
        stamps = self._generator.timestamps(values, timestamps)
        self.emit(values, stamps)
        advanced = self._generator.observe(stamps, self.environment.clock.now_ms())
        if advanced is not None:
            self.on_watermark(advanced)

    def processing_time(self, now_ms: int) -> int | None:
        if self._generator.becomes_idle(now_ms):
            self.on_idle()
        return self._generator.idle_at()


class SourceOperator(Operator):
    """Polls a source's reader; assigns timestamps and watermarks where the flow gives a strategy."""

    on_watermark: Callable[[int], None]
    on_idle: Callable[[], None]

    def open(self, restore: OperatorRestore, source: SnapshotSource | None, checkpoint_id: int | None) -> None:
        super().open(restore, source, checkpoint_id)
        self._generator = self.node.watermarks.generator() if self.node.watermarks is not None else None
        ctx = OperatorContext(self.place, PlainTimers(self.uid, self.environment.clock), self.store, SideOutputs())
        ctx.enumeration = self.environment.enumerations.get(self.uid)
        self._reader: SourceReader = self.node.body.reader(ctx)
        self._opened = True

    _opened = False

    def poll(self, limit: int) -> SourceStatus:
        batch = self._reader.poll(limit)
        values, timestamps = batch.values, batch.timestamps
        if not values:
            return batch.status
        self.records_in += len(values)
        if self._generator is None:
            self.emit(values, timestamps)
            return batch.status
        timestamps = self._generator.timestamps(values, timestamps)
        self.emit(values, timestamps)
        advanced = self._generator.observe(timestamps, self.environment.clock.now_ms())
        if advanced is not None:
            self.on_watermark(advanced)
        return batch.status

    def processing_time(self, now_ms: int) -> int | None:
        wake = self._reader.wake_at_ms()
        if self._generator is None:
            return wake
        if self._generator.becomes_idle(now_ms):
            self.on_idle()
        return earliest(wake, self._generator.idle_at())

    def prepare_snapshot(self, checkpoint_id: int, timestamp: int) -> None:
        self._reader.snapshot(checkpoint_id)

    def checkpoint_completed(self, checkpoint_id: int) -> None:
        self._reader.checkpoint_completed(checkpoint_id)

    def checkpoint_aborted(self, checkpoint_id: int) -> None:
        self._reader.checkpoint_aborted(checkpoint_id)

    def close(self) -> None:
        if self._opened:
            self._reader.close()


class SinkOperator(Operator):
    """Hands batches to a sink's writer."""

    _opened = False

    def open(self, restore: OperatorRestore, source: SnapshotSource | None, checkpoint_id: int | None) -> None:
        super().open(restore, source, checkpoint_id)
        clocks = PlainTimers(self.uid, self.environment.clock)
        self._writer: SinkWriter = self.node.body.writer(OperatorContext(self.place, clocks, self.store, SideOutputs()))
        self._opened = True

    def process(self, values: list[Any], timestamps: Stamps) -> None:
        self.records_in += len(values)
        self._writer.write(values, timestamps)

    def finish(self) -> None:
        self._writer.finish()

    def prepare_snapshot(self, checkpoint_id: int, timestamp: int) -> None:
        self._writer.snapshot(checkpoint_id)

    def checkpoint_completed(self, checkpoint_id: int) -> None:
        self._writer.checkpoint_completed(checkpoint_id)

    def checkpoint_aborted(self, checkpoint_id: int) -> None:
        self._writer.checkpoint_aborted(checkpoint_id)

    def close(self) -> None:
        if self._opened:
            self._writer.close()


def giving_records(function: Callable[..., Any]) -> Callable[..., Any]:
    """A user's function as the loops call it: one record that is returned bare is told, and not taken apart."""
    if inspect.isgeneratorfunction(function):
        return function

    def call(*arguments: Any) -> Any:
        result = function(*arguments)
        if result is None or type(result) is list:
            return result
        if isinstance(result, (dict, str, bytes)) or hasattr(result, "_fields"):
            raise InvalidRequest(f"{function.__name__} gave a single record, where an iterable of records is meant",
                                 found=type(result).__name__, hint="yield it, or return [record]")
        return result
    return call


def own_copy(node: Node) -> Any:
    """A subtask's own copy of the user's function: subtasks share nothing but what the user shares on purpose."""
    try:
        return copy.deepcopy(node.body)
    except Exception as error:
        raise InvalidRequest("a function can't be copied for its subtasks", operator=node.uid, found=str(error),
                             hint="make connections, locks and files in open(), not in __init__") from error


def noted(error: Exception, operator: Operator, record: Any) -> Exception:
    """The same error, telling the operator and the record."""
    place = operator.environment
    error.add_note(f"in operator {operator.uid!r}, subtask {place.subtask_index} of {place.parallelism}, "
                   f"at the record {record!r:.300}")
    return error


def last_taken(values: list[Any], left: Iterator[Any]) -> Any:
    """The record that an iterator over `values` gave last: the one a call over the batch failed at."""
    return values[len(values) - length_hint(left) - 1]


def earliest(*times: int | None) -> int | None:
    return min((time for time in times if time is not None), default=None)
