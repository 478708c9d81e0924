"""The DataFrame plan of a stateful operator: key group, shuffle by range, batch time, one Python pass. Public API only.

    withColumn(route) -> withColumn(time) -> repartitionById(P, route * P div m) -> mapInArrow(task)

The time of the batch travels with its rows, because Spark fixes `current_timestamp()` per micro-batch (and repeats it
when a batch is replayed) but tells a task nothing of it. It goes as text: Spark writes numbers into the code that it
generates, which a number that changes would make it compile again for every batch, and a text it passes by reference.

Nothing stands between the shuffle and the operator: an operator must run in batches too in which no row reaches it (it has
timers to fire and an epoch to complete). Adaptive execution replaces a projection of an empty shuffle by an empty relation
without partitions, and the operator above would not run; an empty shuffle itself it keeps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa

from spark_integration.arrow_types import arrow_schema
from spark_integration.keys import key_group_column, quoted
from spark_integration.operators import OutputSchema
from spark_integration.task import BATCH_TIME, BROADCAST, ROUTE, StatefulTask, TaskPlan
from spark_integration.ticks import TICKS, TickSource
from statebackend.errors import InvalidRequest

KIND = f"{BROADCAST}_kind"
DATA_ROW, BROADCAST_ROW, TICK_ROW = 0, 1, 2


def struct_type(schema: Any, what: str) -> Any:
    """A Spark schema from DDL text or a StructType."""
    from pyspark.sql.types import StructType

    if isinstance(schema, str):
        try:
            schema = StructType.fromDDL(schema)
        except Exception as error:
            raise InvalidRequest(f"the columns of {what} can't be read: {error}", found=schema,
                                 hint='write them like "user string, n bigint"') from None
    if not isinstance(schema, StructType) or not schema.fields:
        raise InvalidRequest(f"{what} needs columns", found=str(schema), hint='write them like "user string, n bigint"')
    return schema


def output_schemas(output: Any, side_outputs: Mapping[str, Any]) -> tuple[Any, OutputSchema]:
    """The Spark schema of the result (side outputs as nullable structs) and what the task makes of it."""
    from pyspark.sql.types import StructField, StructType

    main = struct_type(output, "output")
    sides = {name: struct_type(columns, f"side output {name!r}") for name, columns in side_outputs.items()}
    taken = set(main.fieldNames())
    for name in sides:
        if name in taken:
            raise InvalidRequest(f"side output {name!r} has the name of an output column")
    fields = [StructField(field.name, field.dataType, True) for field in main.fields] if sides else list(main.fields)
    result = StructType([*fields, *(StructField(name, kind, True) for name, kind in sides.items())])
    arrow = arrow_schema(main)
    sides_arrow = {name: pa.struct(list(arrow_schema(kind))) for name, kind in sides.items()}
    return result, OutputSchema(arrow, sides_arrow)


def routed(df: Any, key_fields: Sequence[Any], parallelism: int, max_parallelism: int) -> Any:
    """The rows with their key group, each in the partition that owns it."""
    return _spread(df.withColumn(ROUTE, key_group_column(key_fields, max_parallelism)), parallelism, max_parallelism)


def _spread(rows: Any, parallelism: int, max_parallelism: int) -> Any:
    """Rows with a key group, each in its partition, with the time of the batch."""
    from pyspark.sql import functions as F

    owner = (F.col(ROUTE) * parallelism / max_parallelism).cast("int")
    time = F.unix_millis(F.current_timestamp()).cast("string")
    return rows.withColumn(BATCH_TIME, time).repartitionById(parallelism, owner)


def routed_with_shared(df: Any, key_fields: Sequence[Any], parallelism: int, max_parallelism: int,
                       broadcast: Any | None, tick_ms: int | None) -> Any:
    """As `routed`, together with rows that go to every range: those of a broadcast stream, and clock ticks."""
    from pyspark.sql import functions as F

    shared_type = broadcast.schema if broadcast is not None else "struct<tick: bigint>"
    empty = F.lit(None).cast(shared_type)
    rows = df.withColumn(ROUTE, key_group_column(key_fields, max_parallelism))
    rows = rows.withColumn(BROADCAST, empty).withColumn(KIND, F.lit(DATA_ROW))
    if broadcast is not None:
        struct = F.struct(*[F.col(quoted(name)) for name in broadcast.columns])
        rows = rows.unionByName(_to_all(df, broadcast, struct.cast(shared_type), BROADCAST_ROW, parallelism,
                                        max_parallelism))
    if tick_ms is not None:
        ticks = tick_stream(df.sparkSession, tick_ms)
        rows = rows.unionByName(_to_all(df, ticks, empty, TICK_ROW, parallelism, max_parallelism))
    return _spread(rows, parallelism, max_parallelism)


def _to_all(like: Any, df: Any, struct: Any, kind: int, parallelism: int, max_parallelism: int) -> Any:
    """Each row once for every range, routed to its first key group, with the columns of `like` left null."""
    from pyspark.sql import functions as F

    firsts = F.array(*[F.lit(-(-index * max_parallelism // parallelism)).cast("bigint")
                       for index in range(parallelism)])
    spread = df.select(struct.alias(BROADCAST), F.explode(firsts).alias(ROUTE))
    nulls = [F.lit(None).cast(field.dataType).alias(field.name) for field in like.schema.fields]
    return spread.select(*nulls, F.col(ROUTE), F.col(BROADCAST), F.lit(kind).alias(KIND))


def tick_stream(session: Any, interval_ms: int) -> Any:
    """A stream with one row per interval."""
    session.dataSource.register(TickSource)
    return session.readStream.format(TICKS).option("interval_ms", str(interval_ms)).load()


def applied(rows: Any, plan: TaskPlan, result: Any) -> Any:
    """The operator over routed rows."""
    return rows.mapInArrow(named_function(plan), result)


def named_function(plan: TaskPlan) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """A plain function, named after the operator in Spark's plans; secrets in the plan's options are not shown."""
    task = StatefulTask(plan)

    def holdfast(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        yield from task(batches)

    holdfast.__name__ = "holdfast_" + "".join(c if c.isalnum() else "_" for c in plan.uid)
    return holdfast
