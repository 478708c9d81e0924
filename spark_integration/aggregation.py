"""`aggregate`: the DataFrame face of the declarative aggregates."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa

from spark_integration.aggregates import Aggregate, AggregateOperator, CombineTask, parse_aggregates
from spark_integration.arrow_types import arrow_schema, spark_schema, spark_type
from spark_integration.keys import key_columns, key_type_of
from spark_integration.operators import Columns, Operator
from spark_integration.transform import build
from statebackend.errors import InvalidRequest
from statebackend.ttl import TtlConfig

_GATHER_ROWS = 1_000_000
_COMBINE_ROWS = 500_000


def aggregate(df: Any, *, key: str | Sequence[str], aggs: Mapping[str, Any], uid: str, checkpoint: str,
              parallelism: int | None = None, max_parallelism: int = 128, backend: str = "rocksdb",
              backend_options: Mapping[str, Any] | None = None, ttl: TtlConfig | None = None, combine: bool = False,
              order_by: str | Sequence[str] = (), retain: int | None = None, epoch: int | None = None,
              start_empty: bool = False, isolate: bool = False, storage: Mapping[str, Any] | None = None,
              unfenced: bool = False) -> Any:
    """Running aggregates per key: for each key that a batch touches, its key columns and new values.

        aggregate(events, key="user", aggs={"n": "count", "total": ("sum", "amount")}, uid="totals", checkpoint=...)

    aggs      {column of the result: "count" or (function, input column)}; functions are count, sum, min, max, avg,
              last and collect. Nulls are skipped, as in SQL; `last` and `collect` follow `order_by`
    ttl       forget a key's values some time after they last changed
    combine   aggregate the rows of each input partition before the shuffle: pays when a batch has many rows per key

    The other arguments are those of `stateful`.
    """
    keys = key_columns(key, df.columns)
    key_fields = [df.schema[name] for name in keys]
    arrow = arrow_schema(df.schema)
    aggregates = parse_aggregates(aggs, {field.name: field.type for field in arrow})
    clash = set(keys) & {one.name for one in aggregates}
    if clash:
        raise InvalidRequest("an aggregate has the name of a key column", found=sorted(clash))
    result = _result_type(df, keys, aggregates)
    rows = _combined(df, keys, aggregates) if combine else _needed(df, keys, aggregates, order_by)
    key_type = key_type_of(key_fields)

    def make(columns: Columns) -> Operator:
        return AggregateOperator(columns, aggregates, key_type, ttl, combine)

    return build(rows, key=keys, make_operator=make, function_name="aggregate", output=result, uid=uid,
                 checkpoint=checkpoint, parallelism=parallelism, max_parallelism=max_parallelism, backend=backend,
                 backend_options=backend_options, watermark=None, order_by=order_by, side_outputs=None,
                 broadcast=None, idle_tick=None, retain=retain, epoch=epoch, start_empty=start_empty,
                 isolate=isolate, storage=storage, unfenced=unfenced, gather_rows=_GATHER_ROWS)


def _needed(df: Any, keys: Sequence[str], aggregates: Sequence[Aggregate], order_by: str | Sequence[str]) -> Any:
    """Only the columns that count: the others need not cross the shuffle."""
    from pyspark.sql import functions as F

    from spark_integration.keys import quoted

    order = (order_by,) if isinstance(order_by, str) else tuple(order_by)
    inputs = [one.column for one in aggregates if one.column is not None]
    return df.select(*[F.col(quoted(name)) for name in dict.fromkeys([*keys, *inputs, *order])])


def _combined(df: Any, keys: Sequence[str], aggregates: Sequence[Aggregate]) -> Any:
    if any(one.function in ("last", "collect") for one in aggregates):
        raise InvalidRequest("last and collect can't be combined before the shuffle: the order of rows would be lost",
                             hint="leave combine out")
    key_schema = arrow_schema(df.select(*keys).schema)
    fields = [*key_schema]
    for one in aggregates:
        fields.append(pa.field(one.name, one.value_type))
        if one.function != "count":
            fields.append(pa.field(one.rows_name, pa.int64()))
    schema = pa.schema(fields)
    task = CombineTask(keys, aggregates, schema, _COMBINE_ROWS)
    return _needed(df, keys, aggregates, ()).mapInArrow(_plain(task), spark_schema(schema))


def _plain(task: CombineTask) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    def holdfast_combine(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        yield from task(batches)

    return holdfast_combine


def _result_type(df: Any, keys: Sequence[str], aggregates: Sequence[Aggregate]) -> Any:
    from pyspark.sql.types import ArrayType, StructField, StructType

    fields = [StructField(name, df.schema[name].dataType, True) for name in keys]
    for one in aggregates:
        if one.function in ("min", "max", "last", "collect"):
            kind = df.schema[one.column].dataType
            kind = ArrayType(kind) if one.function == "collect" else kind
        else:
            kind = spark_type(one.value_type)
        fields.append(StructField(one.name, kind, True))
    return StructType(fields)
