"""The writing half of `format("holdfast")`: each task writes the parts of its key groups, the driver publishes.

Every key group must lie in one task: `by_key_group` routes rows so. A savepoint becomes visible only when all tasks
have ended; a failed write leaves nothing.
"""

from __future__ import annotations

import itertools
import os
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
from pyspark.sql.datasource import DataSourceArrowWriter, WriterCommitMessage

from checkpoint.storage.metadata import CheckpointMetadata, OperatorEntry, SubtaskEntry
from checkpoint.storage.store import FileStore
from savepoint.columns import StateLayout
from savepoint.destination import Destination
from savepoint.opened import open_savepoint
from savepoint.sorting import SortedRows
from savepoint.transform import schema_of
from savepoint.writer import OpenHandleWriter
from spark_integration.arrow_types import arrow_schema
from spark_integration.keys import key_array, key_columns, key_group_column, key_type_of
from statebackend.backend import KeyedHandle
from statebackend.descriptors import ListStateDescriptor, MapStateDescriptor, StateDescriptor, ValueStateDescriptor
from statebackend.errors import InvalidRequest
from statebackend.keygroups import KeyGroupRange
from statebackend.schema import StateSchema
from statebackend.ttl import TtlConfig
from statebackend.types import StateType

_KINDS = ("value", "list", "map")


def by_key_group(df: Any, key: str | Sequence[str], *, parallelism: int = 4, max_parallelism: int = 128) -> Any:
    """The rows, with all of a key group in one of `parallelism` partitions: what a write needs."""
    fields = [df.schema[name] for name in key_columns(key, df.columns)]
    group = key_group_column(fields, max_parallelism)
    return df.repartitionById(parallelism, (group * parallelism / max_parallelism).cast("int"))


@dataclass
class PartMessage(WriterCommitMessage):  # type: ignore[misc]
    """What a task wrote: a handle as JSON, or None for no rows."""

    handle: dict[str, Any] | None


class StateWriter(DataSourceArrowWriter):  # type: ignore[misc]
    """Options: path, operator, state; key and value (columns, default `key` and `value`), kind (value, list, map),
    map_key, ttl, max_parallelism, like (a savepoint whose types and max parallelism of this state to take)."""

    def __init__(self, options: Mapping[str, str], schema: Any, overwrite: bool) -> None:
        if overwrite:
            raise InvalidRequest("a savepoint is never overwritten", hint='use mode("append") and a new folder')
        self._options = dict(options)
        for name in ("path", "operator", "state"):
            if not self._options.get(name):
                raise InvalidRequest(f"the holdfast format needs option {name!r} to write")
        self._uid = self._options["operator"]
        self._keys = key_columns(self._options.get("key", "key").split(","), schema.fieldNames())
        self._value = self._options.get("value", "map_value" if self._options.get("kind") == "map" else "value")
        if self._value not in schema.fieldNames():
            raise InvalidRequest(f"there is no column {self._value!r} to be the value", found=schema.fieldNames())
        self._map_key = self._options.get("map_key", "map_key")
        self._key_type, self._schema, self._max_parallelism = self._types(schema)
        self._folder = f"{self._options['path'].rstrip('/')}"
        with Destination(self._folder) as place:
            place.published = True  # only looked whether it is free

    def _types(self, schema: Any) -> tuple[StateType, StateSchema, int]:
        like = self._options.get("like")
        if like:
            with open_savepoint(like) as opened:
                return (opened.key_type(self._uid), opened.schema(self._uid, self._options["state"]),
                        opened.max_parallelism(self._uid))
        arrow = arrow_schema(schema)
        kind = self._options.get("kind", "value")
        ttl = TtlConfig(self._options["ttl"]) if self._options.get("ttl") else None
        value_type, name = arrow.field(self._value).type, self._options["state"]
        descriptor: StateDescriptor
        if kind == "map":
            descriptor = MapStateDescriptor(name, arrow.field(self._map_key).type, value_type, ttl=ttl)
        elif kind == "list":
            descriptor = ListStateDescriptor(name, value_type, ttl=ttl)
        elif kind == "value":
            descriptor = ValueStateDescriptor(name, value_type, ttl=ttl)
        else:
            raise InvalidRequest(f"there is no state kind {kind!r} to write", hint=f"use one of {', '.join(_KINDS)}")
        key_type = key_type_of([schema[name] for name in self._keys])
        return key_type, schema_of(descriptor, [], None), int(self._options.get("max_parallelism", "128"))

    def write(self, iterator: Iterator[pa.RecordBatch]) -> PartMessage:
        layout = StateLayout(self._schema, self._key_type)
        with SortedRows(layout, self._max_parallelism) as rows:
            for batch in iterator:
                if batch.num_rows:
                    rows.add(self._conformed(batch, layout))
            if not rows.rows:
                return PartMessage(None)
            everything = KeyGroupRange(0, self._max_parallelism - 1)
            span = self._span(rows, everything)
            with FileStore.at(self._folder) as store:
                writer = OpenHandleWriter(lambda path: store.writer(path), self._uid, self._key_type,
                                          self._max_parallelism, span, (self._schema,),
                                          {self._schema.name: rows.count(span)})
                try:
                    for batch in rows.read(span):
                        writer.write(self._schema.name, batch)
                    return PartMessage(writer.finish().to_json())
                except BaseException:
                    writer.abort()
                    raise

    def _span(self, rows: SortedRows, everything: KeyGroupRange) -> KeyGroupRange:
        groups = [group for group in everything if rows.count(KeyGroupRange(group, group))]
        return KeyGroupRange(groups[0], groups[-1])

    def _conformed(self, batch: pa.RecordBatch, layout: StateLayout) -> pa.RecordBatch:
        count = batch.num_rows
        for name in self._keys:
            if batch.column(batch.schema.get_field_index(name)).null_count:
                raise InvalidRequest(f"key column {name!r} has nulls", operator=self._uid)
        columns: dict[str, Any] = {"key_group": pa.array(np.zeros(count, np.int32)),
                                   "key": key_array(batch, self._keys, self._key_type)}
        if "list_index" in layout.arrow_schema.names:
            columns["list_index"] = pa.array(np.zeros(count, np.int64))
        if self._schema.map_key_type is not None:
            columns["map_key"] = self._schema.map_key_type.conform(batch.column(self._map_key))
        name = "map_value" if self._schema.kind == "map" else "value"
        columns[name] = self._schema.value_type.conform(batch.column(self._value))
        if columns[name].null_count and not self._schema.value_type.nullable:
            raise InvalidRequest(f"value column {self._value!r} has nulls", operator=self._uid,
                                 state=self._schema.name, hint="leave those rows out")
        if "expires_at" in layout.arrow_schema.names:
            wanted = layout.arrow_schema.field("expires_at").type
            columns["expires_at"] = batch.column("expires_at").cast(wanted) \
                if "expires_at" in batch.schema.names else self._expiry(count).cast(wanted)
        return pa.RecordBatch.from_arrays([columns[field] for field in layout.arrow_schema.names],
                                          schema=layout.arrow_schema)

    def _expiry(self, count: int) -> pa.Array:
        assert self._schema.ttl is not None
        return pa.array(np.full(count, time.time_ns() // 1_000_000 + self._schema.ttl.ttl_ms))

    def commit(self, messages: list[Any]) -> None:
        handles = sorted((KeyedHandle.from_json(message.handle) for message in messages
                          if message is not None and message.handle is not None),
                         key=lambda handle: handle.key_groups.first)
        for left, right in itertools.pairwise(handles):
            if left.key_groups.last >= right.key_groups.first:
                self.abort(messages)
                raise InvalidRequest("two tasks wrote the same key group", operator=self._uid,
                                     found=f"{left.key_groups} and {right.key_groups}",
                                     hint="write by_key_group(df, key), which gives each key group to one task")
        first = 0
        for index, handle in enumerate(handles):  # between them they own every key group, those without rows too
            last = handle.key_groups.last if index + 1 < len(handles) else self._max_parallelism - 1
            handles[index] = _stretched(handle, KeyGroupRange(first, last))
            first = last + 1
        subtasks = tuple(SubtaskEntry(index, keyed=(handle,)) for index, handle in enumerate(handles))
        operator = OperatorEntry(self._uid, self._uid, max(1, len(handles)), self._max_parallelism, subtasks)
        now = time.time_ns() // 1_000_000
        metadata = CheckpointMetadata(secrets.token_hex(16), "spark", 1, 0, "savepoint", "open", now, now,
                                      operators=(operator,))
        with FileStore.at(self._folder) as store:
            store.create("_metadata", metadata.to_bytes())

    def abort(self, messages: list[Any]) -> None:
        parent, _, name = self._folder.rpartition("/")
        with FileStore.at(parent or os.curdir) as store:
            store.delete_tree(name)


def _stretched(handle: KeyedHandle, span: KeyGroupRange) -> KeyedHandle:
    """The handle as the owner of a wider range, whose other key groups have no rows."""
    before, after = [0] * (handle.key_groups.first - span.first), [0] * (span.last - handle.key_groups.last)
    states = {name: {**told, **{which: [*before, *told[which], *after] for which in ("counts", "sizes")}}
              for name, told in handle.meta["states"].items()}
    return replace(handle, key_groups=span, meta={**handle.meta, "states": states})
