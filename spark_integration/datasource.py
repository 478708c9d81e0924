"""`format("holdfast")`: savepoints, checkpoints and epochs as Spark data, Arrow both ways.

    spark.read.format("holdfast").option("path", "sp").option("operator", "count").option("state", "total").load()
    spark.read.format("holdfast").option("path", "sp").option("table", "states").load()      # or "operators"
    by_key_group(df, "user").write.format("holdfast").option("operator", "count").option("state", "total").save("sp")

Reading makes a task of each range of key groups that was written, small ones joined. Options of both: path, operator,
state. Of reading: table, epoch (for a query's checkpoint folder), partitions, pushdown.

With `pushdown=true` filters on `key_group` and `key` decide what is read at all. It has to be asked for, because Spark
(4.3) keeps the narrowed reader with the DataFrame: the same DataFrame used again without the filter would miss rows.
Load one for each filtered query, and it is safe. Spark wants `spark.sql.python.filterPushdown.enabled` for it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    InputPartition,
    LessThan,
    LessThanOrEqual,
)

from savepoint.format import OPEN_FORMAT
from savepoint.opened import Savepoint, open_savepoint
from spark_integration.arrow_types import arrow_schema, spark_schema
from statebackend.errors import InvalidRequest, NotFound
from statebackend.keygroups import KeyGroupRange, key_grouper

NAME = "holdfast"
_TABLES = ("operators", "states")
TASK_BYTES = 16 << 20
"""Small neighbouring ranges share a task up to this size: a task costs as much as reading some megabytes."""


def register(session: Any) -> None:
    """Make the format known to a session; harmless to repeat."""
    session.dataSource.register(HoldfastDataSource)


def open_any(path: str, epoch: str | None = None) -> Savepoint:
    """A savepoint or checkpoint, or the epochs of a Spark query at its checkpoint folder."""
    if epoch is None:
        try:
            return open_savepoint(path)
        except NotFound as error:
            missing = error
    else:
        missing = None
    from spark_integration.query_savepoints import open_epoch

    try:
        return open_epoch(path, epoch=int(epoch) if epoch is not None else None)
    except NotFound as error:
        raise missing or error from None


class HoldfastDataSource(DataSource):  # type: ignore[misc]
    """The data source that `register` adds to a session."""

    @classmethod
    def name(cls) -> str:
        return NAME

    def schema(self) -> Any:
        return spark_schema(StateReader(self.options).arrow_schema())

    def reader(self, schema: Any) -> StateReader:
        kind = FilteredStateReader if self.options.get("pushdown", "false").lower() == "true" else StateReader
        return kind(self.options, arrow_schema(schema))

    def writer(self, schema: Any, overwrite: bool) -> Any:
        from spark_integration.datasink import StateWriter

        return StateWriter(self.options, schema, overwrite)


class KeyGroups(InputPartition):  # type: ignore[misc]
    """One task: a range of key groups, and the keys that are wanted of it (None: all)."""

    def __init__(self, first: int, last: int, keys: tuple[Any, ...] | None) -> None:
        super().__init__((first, last))
        self.first, self.last, self.keys = first, last, keys


class StateReader(DataSourceReader):  # type: ignore[misc]
    """Reads one state, or a table of what is there."""

    def __init__(self, options: Mapping[str, str], schema: pa.Schema | None = None) -> None:
        self._path = _required(options, "path")
        self._epoch = options.get("epoch")
        self._table = options.get("table")
        if self._table is not None and self._table not in _TABLES:
            raise InvalidRequest(f"there is no table {self._table!r}", hint=f"use one of {', '.join(_TABLES)}")
        if self._table is None:
            self._uid, self._state = _required(options, "operator"), _required(options, "state")
        self._wanted_partitions = int(options.get("partitions", "0"))
        self._schema = schema
        self._first, self._last = 0, 2**15
        self._keys: tuple[Any, ...] | None = None

    def arrow_schema(self) -> pa.Schema:
        """The columns, from metadata alone."""
        with open_any(self._path, self._epoch) as opened:
            if self._table is not None:
                return _metadata_table(opened, self._table).schema
            return _readable(opened.read(self._uid, self._state, key_groups=[]).schema)

    def partitions(self) -> Sequence[InputPartition]:
        if self._table is not None:
            return [KeyGroups(0, 0, None)]
        with open_any(self._path, self._epoch) as opened:
            limit = opened.max_parallelism(self._uid)
            first, last = max(0, self._first), min(self._last, limit - 1)
            if first > last:
                return []
            if self._keys is not None:
                return self._key_partitions(opened, limit, first, last)
            ranges = self._ranges(opened, limit)
        return [KeyGroups(max(span.first, first), min(span.last, last), None) for span in ranges
                if span.first <= last and first <= span.last] or []

    def _key_partitions(self, opened: Savepoint, limit: int, first: int, last: int) -> list[InputPartition]:
        assert self._keys is not None
        kind = opened.key_type(self._uid)
        group_of = key_grouper(kind, limit)
        by_group: dict[int, list[Any]] = {}
        for key in self._keys:
            try:
                kind.check(key)
            except InvalidRequest:
                return [KeyGroups(first, last, None)]  # not comparable here: Spark filters
            by_group.setdefault(group_of(key), []).append(key)
        return [KeyGroups(group, group, tuple(keys)) for group, keys in sorted(by_group.items())
                if first <= group <= last]

    def _ranges(self, opened: Savepoint, limit: int) -> list[KeyGroupRange]:
        """As the option says, else as the state was written, with small files of the open format joined."""
        count = min(self._wanted_partitions, limit)
        if count:
            bounds = [-(-index * limit // count) for index in range(count + 1)]
            return [KeyGroupRange(low, high - 1) for low, high in itertools.pairwise(bounds)]
        sizes: dict[KeyGroupRange, int] = {}
        for handle in opened.handles(self._uid):  # in order of key groups
            size = handle.size if handle.format == OPEN_FORMAT else TASK_BYTES
            sizes[handle.key_groups] = sizes.get(handle.key_groups, 0) + size
        overlap = any(left.last >= right.first for left, right in itertools.pairwise(sizes))
        return [KeyGroupRange(0, limit - 1)] if overlap or not sizes else _joined(sizes)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, KeyGroups)
        assert self._schema is not None
        with open_any(self._path, self._epoch) as opened:
            if self._table is not None:
                yield from _cast(_metadata_table(opened, self._table), self._schema).to_batches()
                return
            reader = opened.read(self._uid, self._state, keys=partition.keys,
                                 key_groups=KeyGroupRange(partition.first, partition.last))
            for batch in reader:
                if batch.num_rows:
                    yield from _cast(pa.Table.from_batches([batch]), self._schema).to_batches()


class FilteredStateReader(StateReader):
    """A reader that takes filters: of its own, because Spark refuses any that could unless the session allows it."""

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:
        """Take what narrows the key groups or names keys; Spark applies every filter again, so none is lost."""
        if self._table is None:
            for one in filters:
                self._narrow(one)
        return filters

    def _narrow(self, one: Filter) -> None:
        attribute = getattr(one, "attribute", None)
        value = getattr(one, "value", None)
        if attribute == ("key_group",) and isinstance(value, int):
            if isinstance(one, (EqualTo, GreaterThanOrEqual)):
                self._first = max(self._first, value)
            if isinstance(one, (EqualTo, LessThanOrEqual)):
                self._last = min(self._last, value)
            if isinstance(one, GreaterThan):
                self._first = max(self._first, value + 1)
            if isinstance(one, LessThan):
                self._last = min(self._last, value - 1)
        elif attribute == ("key_group",) and isinstance(one, In) and isinstance(value, (tuple, list)):
            self._first, self._last = max(self._first, min(value)), min(self._last, max(value))
        elif attribute == ("key",) and isinstance(one, EqualTo):
            self._keys = (value,)
        elif attribute == ("key",) and isinstance(one, In) and isinstance(value, (tuple, list)):
            self._keys = tuple(value)


def _joined(sizes: Mapping[KeyGroupRange, int]) -> list[KeyGroupRange]:
    """Neighbours put together while they are no larger than a task should be."""
    joined: list[KeyGroupRange] = []
    held = 0
    for span, size in sizes.items():
        if joined and held + size <= TASK_BYTES:
            joined[-1], held = KeyGroupRange(joined[-1].first, span.last), held + size
        else:
            joined.append(span)
            held = size
    return joined


def _required(options: Mapping[str, str], name: str) -> str:
    value = options.get(name)
    if not value:
        raise InvalidRequest(f"the holdfast format needs option {name!r}",
                             hint='read with options path, operator and state, or with table="states"')
    return value


def _readable(schema: pa.Schema) -> pa.Schema:
    """Types that Spark has: unsigned numbers become the next larger signed ones, durations whole microseconds."""
    return pa.schema([pa.field(field.name, _spark_type(field.type)) for field in schema])


def _spark_type(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_unsigned_integer(kind):
        return pa.decimal128(20, 0) if kind.bit_width == 64 else pa.int64() if kind.bit_width == 32 else pa.int32()
    if pa.types.is_time(kind):
        return pa.int64()
    if pa.types.is_struct(kind):
        return pa.struct([pa.field(field.name, _spark_type(field.type)) for field in kind])
    if pa.types.is_fixed_size_binary(kind):
        return pa.binary()
    return kind


def _cast(table: pa.Table, schema: pa.Schema) -> pa.Table:
    return table if table.schema.equals(schema) else table.select(schema.names).cast(schema)


def _metadata_table(opened: Savepoint, which: str) -> pa.Table:
    if which == "operators":
        return pa.Table.from_pylist([
            {"operator": one.uid, "name": one.name, "parallelism": one.parallelism,
             "max_parallelism": one.max_parallelism, "key_type": one.key_type, "stored_bytes": one.stored,
             "states": len(one.states)} for one in opened.operators()],
            pa.schema([("operator", pa.string()), ("name", pa.string()), ("parallelism", pa.int32()),
                       ("max_parallelism", pa.int32()), ("key_type", pa.string()), ("stored_bytes", pa.int64()),
                       ("states", pa.int32())]))
    return pa.Table.from_pylist([
        {"operator": one.uid, "state": one.name, "kind": one.kind, "key_type": one.key_type,
         "value_type": one.value_type, "map_key_type": one.map_key_type, "namespace_type": one.namespace_type,
         "ttl_ms": one.ttl_ms, "rows": one.rows, "bytes": one.size} for one in opened.states()],
        pa.schema([("operator", pa.string()), ("state", pa.string()), ("kind", pa.string()), ("key_type", pa.string()),
                   ("value_type", pa.string()), ("map_key_type", pa.string()), ("namespace_type", pa.string()),
                   ("ttl_ms", pa.int64()), ("rows", pa.int64()), ("bytes", pa.int64())]))
