"""Bootstraps one keyed state from a table whose types tell the state's types, unless others are asked for."""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import chain
from typing import Any

import pyarrow as pa

from checkpoint.storage.metadata import CheckpointMetadata
from savepoint.bootstrap import SavepointWriter
from savepoint.convert import Progress
from savepoint.format import KEY, KEY_GROUP, NAMESPACE
from savepoint.frames import batches_of
from savepoint.naming import parse_type
from statebackend.descriptors import ListStateDescriptor, MapStateDescriptor, StateDescriptor, ValueStateDescriptor
from statebackend.errors import InvalidRequest
from statebackend.types import OptionalType, StateType, TupleType, state_type

KINDS = ("value", "list", "map")


def bootstrap_table(destination: str | os.PathLike[str], data: Any, state: str, *, kind: str = "value",
                    key: str | Sequence[str] = KEY, value: str | Sequence[str] | None = None, map_key: str = "map_key",
                    key_type: str | None = None, value_type: str | None = None, job_name: str = "bootstrap",
                    parallelism: int = 1, max_parallelism: int | None = None,
                    progress: Progress | None = None) -> CheckpointMetadata:
    """Write a savepoint with one state, `operator.state`, from a table or file."""
    uid, dot, name = state.partition(".")
    if not (uid and dot and name):
        raise InvalidRequest(f"{state!r} names no state", hint="write it as OPERATOR.STATE")
    if kind not in KINDS:
        raise InvalidRequest(f"there is no kind {kind!r}", hint=f"use one of {', '.join(KINDS)}")
    batches = batches_of(data)
    first = next(batches, None)
    if first is None:
        raise InvalidRequest("the data has no rows, so its types are not known", hint="start the job without a savepoint")
    keys = parse_type(key_type) if key_type else _key_type(first.schema, key)
    used = {*([key] if isinstance(key, str) else key), KEY_GROUP, NAMESPACE, *((map_key,) if kind == "map" else ())}
    names = value if value is not None else _value_names(first.schema, used, kind)
    values = parse_type(value_type) if value_type else _value_type(first.schema, names)
    descriptor = _descriptor(kind, name, values, first.schema, map_key)
    with SavepointWriter(destination, job_name=job_name, parallelism=parallelism, max_parallelism=max_parallelism,
                         progress=progress) as writer:
        writer.keyed(uid, descriptor, chain([first], batches), key_type=keys, key=key, value=names, map_key=map_key)
        return writer.close()


def _descriptor(kind: str, name: str, values: StateType, schema: pa.Schema, map_key: str) -> StateDescriptor:
    if kind == "list":
        return ListStateDescriptor(name, values)
    if kind == "map":
        return MapStateDescriptor(name, _column_type(schema, map_key), values)
    return ValueStateDescriptor(name, values)


def _key_type(schema: pa.Schema, key: str | Sequence[str]) -> StateType:
    if isinstance(key, str):
        return _column_type(schema, key)
    return TupleType(tuple(_column_type(schema, name) for name in key))


def _value_names(schema: pa.Schema, used: set[str], kind: str) -> str | list[str]:
    wanted = "map_value" if kind == "map" else "value"
    if wanted in schema.names:
        return wanted
    left = [name for name in schema.names if name not in used]
    return left[0] if len(left) == 1 else left


def _value_type(schema: pa.Schema, names: str | Sequence[str]) -> StateType:
    if isinstance(names, str):
        return _column_type(schema, names)
    fields = [pa.field(name, schema.field(name).type) for name in names if _column_type(schema, name)]
    return state_type(pa.struct(fields))


def _column_type(schema: pa.Schema, name: str) -> StateType:
    if name not in schema.names:
        raise InvalidRequest(f"the data has no column {name!r}", hint=f"it has {', '.join(schema.names)}")
    kind = state_type(schema.field(name).type)
    return kind.item if isinstance(kind, OptionalType) else kind
