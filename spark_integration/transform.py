"""`stateful`: keyed state, timers and exactly-once epochs inside a plain Structured Streaming transform."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa

from checkpoint.dataflow.functions import Function
from checkpoint.storage.store import FileStore
from spark_integration import plan as plans
from spark_integration.epoch_store import EpochStore
from spark_integration.epochs import TaskRun, require_parallelism
from spark_integration.guard import guard
from spark_integration.keys import key_columns, key_type_of
from spark_integration.operators import Columns, FunctionOperator, Operator
from spark_integration.session import require_spark, storage_options
from spark_integration.task import BROADCAST, TaskPlan, versions
from statebackend.backend import backend_names
from statebackend.durations import duration_ms, size_bytes
from statebackend.errors import InvalidRequest

GATHER_ROWS = 200_000
"""Rows handed to an operator at once."""
TABLE_BYTES = 64 << 20
"""What a broadcast table may hold."""


def stateful(df: Any, *, key: str | Sequence[str], function: Any, output: Any, uid: str, checkpoint: str,
             parallelism: int | None = None, max_parallelism: int = 128, backend: str = "rocksdb",
             backend_options: Mapping[str, Any] | None = None, watermark: tuple[str, Any] | None = None,
             order_by: str | Sequence[str] = (), side_outputs: Mapping[str, Any] | None = None,
             broadcast: Any = None, idle_tick: Any = None, retain: int | None = None, epoch: int | None = None,
             start_empty: bool = False, isolate: bool = False, storage: Mapping[str, Any] | None = None,
             unfenced: bool = False) -> Any:
    """A DataFrame of what `function` yields for the rows of `df`, with state per key that survives restarts.

    df            a streaming DataFrame; or a batch one together with `epoch=`, which takes the place of the batch id
    key           one column or several; rows with a null key are refused
    function      a `KeyedProcessFunction` (rows come as dicts by column name) or one with `process_batch` (Arrow)
    output        columns of the result, as DDL text or a StructType
    uid           names the operator's state; unique within the checkpoint
    checkpoint    any fsspec URL; not Spark's checkpointLocation, and never inside it
    parallelism   ranges of key groups, each a task; may differ at every start. `spark.holdfast.<uid>.parallelism`
                  in Spark's configuration takes precedence; default: as in the last run, else Spark's
    backend       "rocksdb", "filesystem" or "memory"
    watermark     (column, delay): event time, as of the epoch before; default: what `withWatermark` says
    order_by      columns that fix the order of rows within a batch
    side_outputs  {tag: columns}: nullable struct columns of the result
    broadcast     a second, small DataFrame whose rows reach `process_broadcast` on every range: a stream, batch by
                  batch; or a table, which is read when this is called and delivered before the first batch of each run
    idle_tick     run a batch at least this often, so that timers fire on silent input
    retain        epochs kept; default: `spark.sql.streaming.minBatchesToRetain`
    start_empty   the operator is new to a query that has run before
    isolate       put a shuffle behind the operator, so that a coalesce or union may follow
    storage       options of the fsspec filesystem; `fs.s3a.*` of Spark's configuration is understood
    """
    if not isinstance(function, Function):
        raise InvalidRequest("function must be a KeyedProcessFunction object", found=type(function).__name__,
                             hint="pass an instance, not the class")
    def make(columns: Columns) -> Operator:
        return FunctionOperator(function, columns)

    return build(df, key=key, make_operator=make, function_name=type(function).__name__, output=output, uid=uid,
                 checkpoint=checkpoint, parallelism=parallelism, max_parallelism=max_parallelism, backend=backend,
                 backend_options=backend_options, watermark=watermark, order_by=order_by, side_outputs=side_outputs,
                 broadcast=broadcast, idle_tick=idle_tick, retain=retain, epoch=epoch, start_empty=start_empty,
                 isolate=isolate, storage=storage, unfenced=unfenced, gather_rows=GATHER_ROWS)


def build(df: Any, *, key: str | Sequence[str], make_operator: Any, function_name: str, output: Any, uid: str,
          checkpoint: str, parallelism: int | None, max_parallelism: int, backend: str,
          backend_options: Mapping[str, Any] | None, watermark: tuple[str, Any] | None,
          order_by: str | Sequence[str], side_outputs: Mapping[str, Any] | None, broadcast: Any, idle_tick: Any,
          retain: int | None, epoch: int | None, start_empty: bool, isolate: bool,
          storage: Mapping[str, Any] | None, unfenced: bool, gather_rows: int) -> Any:
    """The plan of any operator: what `stateful` and `aggregate` share."""
    session = df.sparkSession
    require_spark(session)
    if df.isStreaming:
        guard(session)
    if not isinstance(uid, str) or not uid:
        raise InvalidRequest("a stateful operator needs a uid that is not empty", found=uid)
    if backend not in backend_names():
        raise InvalidRequest(f"there is no state backend {backend!r}", hint=f"use one of {', '.join(backend_names())}")
    options = {**storage_options(session, checkpoint), **(storage or {})}
    if parallelism is None:
        parallelism = _earlier_parallelism(checkpoint, uid, options)
    width = _parallelism(session, uid, parallelism, max_parallelism)
    keys = key_columns(key, df.columns)
    key_fields = [df.schema[name] for name in keys]
    event_time, delay_ms = _watermark(df, watermark)
    table = None
    if broadcast is not None and df.isStreaming and not broadcast.isStreaming:
        broadcast, table = None, _table(broadcast)
    shared = broadcast is not None or idle_tick is not None
    columns = Columns(keys, tuple(df.columns), event_time,
                      BROADCAST if shared else None)
    result, arrow_output = plans.output_schemas(output, side_outputs or {})
    task_plan = TaskPlan(
        uid=uid, checkpoint=checkpoint, storage_options=options, unfenced=unfenced, parallelism=width,
        max_parallelism=max_parallelism, key_type=key_type_of(key_fields),
        columns=columns, output=arrow_output, operator=make_operator(columns), function_name=function_name,
        backend=backend, backend_options=_backend_options(session, backend, backend_options), delay_ms=delay_ms,
        retain=_retain(session, retain), start_empty=start_empty, slots=_slots(session, width),
        host_bytes=size_bytes(session.conf.get("spark.holdfast.hostCopies", "2GiB")),
        host_folder=session.conf.get("spark.holdfast.hostCopiesDir", ""),
        batch_run=_batch_run(df, epoch), gather_rows=gather_rows,
        order_by=_order(df, order_by), broadcast_table=table, versions=versions())
    if shared:
        rows = plans.routed_with_shared(df, key_fields, width, max_parallelism, broadcast,
                                        duration_ms(idle_tick) if idle_tick is not None else None)
    else:
        rows = plans.routed(df, key_fields, width, max_parallelism)
    out = plans.applied(rows, task_plan, result)
    return out.repartition(width) if isolate else out


def _parallelism(session: Any, uid: str, parallelism: int | None, max_parallelism: int) -> int:
    configured = session.conf.get(f"spark.holdfast.{uid}.parallelism", None)
    if configured is not None:
        if not str(configured).isdigit():
            raise InvalidRequest(f"spark.holdfast.{uid}.parallelism is no number", found=configured)
        parallelism = int(configured)
    if parallelism is None:
        context = getattr(session, "sparkContext", None)
        parallelism = min(context.defaultParallelism if context is not None else 4, max_parallelism)
    require_parallelism(parallelism, max_parallelism)
    return parallelism


def _earlier_parallelism(checkpoint: str, uid: str, options: Mapping[str, Any]) -> int | None:
    """The parallelism of the last run, or what a restore asked for."""
    with FileStore.at(checkpoint, **options) as store:
        known = EpochStore(store, uid).generations()
    return known[-1].parallelism if known else None


def _watermark(df: Any, watermark: tuple[str, Any] | None) -> tuple[str | None, int]:
    """The event-time column and the delay: as given, or as `withWatermark` left it in the schema."""
    if watermark is not None:
        if isinstance(watermark, str) or len(watermark) != 2:
            raise InvalidRequest("watermark takes a column and a delay", found=watermark,
                                 hint='write it like ("ts", "10s")')
        name, delay = watermark
        if name not in df.columns:
            raise InvalidRequest(f"there is no column {name!r} for the watermark", found=df.columns)
        return name, duration_ms(delay)
    for field in df.schema.fields:
        delay = (field.metadata or {}).get("spark.watermarkDelayMs")
        if delay is not None:
            return field.name, int(delay)
    return None, 0


def _order(df: Any, order_by: str | Sequence[str]) -> tuple[str, ...]:
    names = (order_by,) if isinstance(order_by, str) else tuple(order_by)
    for name in names:
        if name not in df.columns:
            raise InvalidRequest(f"there is no column {name!r} to order by", found=df.columns)
    return names


def _table(df: Any) -> bytes:
    """A small table as Arrow bytes, to travel with the plan."""
    table = df.toArrow()
    if table.nbytes > TABLE_BYTES:
        raise InvalidRequest("the broadcast table is too large: every task gets all of it", found=table.nbytes,
                             expected=f"at most {TABLE_BYTES} bytes",
                             hint="join it with the stream before stateful(), or select the columns that are needed")
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue().to_pybytes()  # type: ignore[no-any-return]


def _batch_run(df: Any, epoch: int | None) -> TaskRun | None:
    if df.isStreaming:
        if epoch is not None:
            raise InvalidRequest("epoch= is for batch DataFrames; a stream's epochs are its batch ids")
        return None
    if epoch is None:
        raise InvalidRequest("a batch DataFrame needs epoch=, the number of this step",
                             hint="count up from 0; running a number again starts from the epoch before it")
    return TaskRun(None, uuid.uuid4().hex, epoch)


def _retain(session: Any, retain: int | None) -> int:
    if retain is None:
        retain = int(session.conf.get("spark.sql.streaming.minBatchesToRetain", "100"))
    if retain < 2:
        raise InvalidRequest("at least two epochs must be retained", found=retain,
                             hint="a batch may be replayed from the epoch before it")
    return retain


def _backend_options(session: Any, backend: str, options: Mapping[str, Any] | None) -> dict[str, Any]:
    """The backend's options; RocksDB's memory limit is this worker's share of the executor's."""
    given = dict(options or {})
    if backend == "rocksdb" and "memory_limit" not in given:
        total = size_bytes(session.conf.get("spark.holdfast.memory", "512MiB"))
        workers = max(1, int(session.conf.get("spark.executor.cores", "0") or 0) or _cores(session))
        given["memory_limit"] = max(16 << 20, total // workers)
    return given


def _slots(session: Any, width: int) -> int:
    return max(1, int(session.conf.get("spark.holdfast.openRanges", str(max(2, min(width, 8))))))


def _cores(session: Any) -> int:
    context = getattr(session, "sparkContext", None)
    return int(context.defaultParallelism) if context is not None else 4
