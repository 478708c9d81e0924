"""How a user's function works through the rows of one range in one micro-batch: record by record, or vectorised."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from typing import Any

import pyarrow as pa

from checkpoint.dataflow.functions import CheckpointedFunction, Function
from spark_integration.context import TaskContext
from spark_integration.kept import Chunk, Cursor
from spark_integration.rows import OutputBuilder, column_values, rows_of, shorten
from statebackend.errors import HoldfastError, InvalidRequest
from statebackend.ttl import TimeDomain

_TIMERS_AT_ONCE = 1000
_KEEP_ROWS = 64
"""Chunks of fewer rows are not worth telling keys apart first."""


@dataclass(frozen=True)
class Columns:
    """The columns of the rows that reach an operator, and their part in it.

    `records` are what the function sees. `broadcast` is the struct column of rows that every range gets.
    """

    keys: tuple[str, ...]
    records: tuple[str, ...]
    event_time: str | None = None
    broadcast: str | None = None


@dataclass(frozen=True)
class OutputSchema:
    """The main columns, and the columns of each side output, as Arrow sees them."""

    main: pa.Schema
    side: Mapping[str, pa.DataType] = field(default_factory=dict)


class Operator(ABC):
    """What one task runs. Built on the driver and shipped; `open` gives it state, and calls come in order:
    open, advance, process*, advance, snapshot, close."""

    uses_timers: bool = True

    @abstractmethod
    def open(self, context: TaskContext, output: OutputBuilder) -> None: ...

    @abstractmethod
    def process(self, rows: pa.Table) -> list[pa.RecordBatch]:
        """Work on rows in the order given; returns the output that is ready."""

    def process_broadcast(self, rows: pa.Table) -> None:
        raise InvalidRequest("this operator takes no broadcast rows")

    def advance(self) -> tuple[int, list[pa.RecordBatch]]:
        """Fire all timers that are due by the batch's clocks; how many, and the output that is ready."""
        return 0, []

    def snapshot(self, checkpoint_id: int, batch_time: int) -> None:
        """The state is about to be stored."""

    def close(self) -> None:
        """Release what `open` took; also called after a failure."""


class FunctionOperator(Operator):
    """Runs a `KeyedProcessFunction`: record by record, or by `process_batch` where the function defines it."""

    def __init__(self, function: Function, columns: Columns) -> None:
        self._function, self._columns = function, columns
        self._vectorised = getattr(function, "process_batch", None) is not None
        self._name = type(function).__name__

    def open(self, context: TaskContext, output: OutputBuilder) -> None:
        self._context, self._output, self._keyed = context, output, context.keyed
        if not self._vectorised:
            context.keep_values()
        if isinstance(self._function, CheckpointedFunction):
            self._function.initialize_state(context)
        self._call(lambda: self._function.open(context), "open", None, None)

    def process(self, rows: pa.Table) -> list[pa.RecordBatch]:
        if self._vectorised:
            return self._process_batch(rows)
        return self._process_chunk(rows)

    def _process_chunk(self, rows: pa.Table) -> list[pa.RecordBatch]:
        """Record by record; values of the chunk's keys are read and written at once, where the context keeps them."""
        kept, done, begin = self._context.kept, list[pa.RecordBatch](), 0
        if not kept or rows.num_rows < _KEEP_ROWS:
            for batch in rows.to_batches():
                self._process_records(batch, Cursor(), repeat(0))
                done += self._output.flush()
            return done
        chunk = Chunk(rows, self._columns.keys, self._keyed.key_type, self._columns.records)
        kept.begin(chunk)
        for batch in rows.to_batches():
            self._process_records(batch, kept.cursor, chunk.codes[begin:begin + batch.num_rows])
            done += self._output.flush()
            begin += batch.num_rows
        self._call(kept.end, "process", None, None)
        return done

    def _process_batch(self, rows: pa.Table) -> list[pa.RecordBatch]:
        function: Any = self._function
        table = rows.select(list(self._columns.records))
        result = self._call(lambda: function.process_batch(table, self._context), "process_batch", None, None)
        if result is None:
            return self._output.flush()
        if not isinstance(result, (pa.Table, pa.RecordBatch)):
            raise InvalidRequest("process_batch must return an Arrow table or None", function=self._name,
                                 found=type(result).__name__)
        return [*self._output.add_table(result), *self._output.flush()]

    def _process_records(self, batch: pa.RecordBatch, cursor: Cursor, slots: Iterable[int]) -> None:
        context, process = self._context, self._process_function()
        context.time_domain = context.timestamp = None
        set_key, extend = self._keyed.set_current_key, self._output.records.extend
        keys, rows, times = self._keys(batch), rows_of(batch, self._columns.records), self._event_times(batch)
        key = record = None
        try:
            if times is None:
                for key, cursor.slot, record in zip(keys, slots, rows):
                    set_key(key)
                    context.key = key
                    result = process(record, context)
                    if result is not None:
                        extend(result)
                return
            for key, cursor.slot, record, context.timestamp in zip(keys, slots, rows, times):
                set_key(key)
                context.key = key
                result = process(record, context)
                if result is not None:
                    extend(result)
        except Exception as error:
            raise self._failure(error, "process", key, record) from error

    def _process_function(self) -> Callable[[Any, TaskContext], Iterable[Any] | None]:
        process = getattr(self._function, "process", None)
        if process is None:
            raise InvalidRequest("the function has no process method", function=self._name)
        return process  # type: ignore[no-any-return]

    def process_broadcast(self, rows: pa.Table) -> None:
        function, context = self._function, self._context
        if not hasattr(function, "process_broadcast"):
            raise InvalidRequest("the function has no process_broadcast", function=self._name,
                                 hint="use a KeyedBroadcastProcessFunction")
        context.in_broadcast, context.key, context.timestamp = True, None, None
        record = None
        try:
            for record in rows.to_pylist():
                result = function.process_broadcast(record, context)
                if result is not None:
                    self._output.records.extend(result)
        except Exception as error:
            raise self._failure(error, "process_broadcast", None, record) from error
        finally:
            context.in_broadcast = False

    def advance(self) -> tuple[int, list[pa.RecordBatch]]:
        context = self._context
        fired = self._fire(TimeDomain.EVENT, context.watermark)
        fired += self._fire(TimeDomain.PROCESSING, context.timers.current_processing_time())
        return fired, self._output.flush()

    def _fire(self, domain: TimeDomain, until: int) -> int:
        on_timer = getattr(self._function, "on_timer", None)
        context, fired, timer = self._context, 0, None
        while on_timer is not None and (due := self._keyed.timers.pop_due(domain, until, _TIMERS_AT_ONCE)):
            context.time_domain = domain
            try:
                for timer in due:
                    self._keyed.set_current_key(timer.key)
                    context.key, context.timestamp = timer.key, timer.timestamp
                    result = on_timer(timer.timestamp, context)
                    if result is not None:
                        self._output.records.extend(result)
            except Exception as error:
                raise self._failure(error, "on_timer", timer.key if timer else None, timer) from error
            fired += len(due)
        context.time_domain = None
        return fired

    def snapshot(self, checkpoint_id: int, batch_time: int) -> None:
        if isinstance(self._function, CheckpointedFunction):
            self._context.checkpoint_id, self._context.checkpoint_timestamp = checkpoint_id, batch_time
            self._function.snapshot_state(self._context)

    def close(self) -> None:
        self._function.close()

    def _keys(self, batch: pa.RecordBatch) -> Iterable[Any]:
        columns = [column_values(batch.column(name)) for name in self._columns.keys]
        return columns[0] if len(columns) == 1 else zip(*columns)

    def _event_times(self, batch: pa.RecordBatch) -> Sequence[int | None] | None:
        name = self._columns.event_time
        return None if name is None else event_times(batch.column(name))

    def _call(self, call: Callable[[], Any], method: str, key: Any, record: Any) -> Any:
        try:
            return call()
        except Exception as error:
            raise self._failure(error, method, key, record) from error

    def _failure(self, error: Exception, method: str, key: Any, record: Any) -> HoldfastError:
        where = f"{self._name}.{method}"
        if isinstance(error, HoldfastError):
            context = {"function": where, "key": shorten(key) if key is not None else None,
                       "record": shorten(record) if record is not None else None, **error.context}
            return type(error)(error.message, hint=error.hint, **context)
        return HoldfastError(f"{where} raised {type(error).__name__}: {error}",
                             key=shorten(key) if key is not None else None,
                             record=shorten(record) if record is not None else None)


def event_times(column: pa.Array | pa.ChunkedArray) -> list[int | None]:
    """Event times in milliseconds since the epoch, of a timestamp, date or integer column."""
    return event_time_column(column).to_pylist()  # type: ignore[no-any-return]


def event_time_column(column: pa.Array | pa.ChunkedArray) -> Any:
    """A column of event times as int64 milliseconds."""
    if pa.types.is_timestamp(column.type):
        return column.cast(pa.timestamp("ms", column.type.tz), safe=False).cast(pa.int64())
    if pa.types.is_date(column.type):
        return column.cast(pa.timestamp("ms")).cast(pa.int64())
    return column.cast(pa.int64())


