"""Arrow batches folded into reducing and aggregating state: group by key, one sorted read, one write per key.

Built-in functions over numbers go through Arrow kernels without a Python object per row; everything else is grouped
first, so that each key is decoded and encoded once a batch.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt

from statebackend.codecs.scalars import FloatType, IntType
from statebackend.entries import DEFAULT_NAMESPACE
from statebackend.errors import HoldfastError, InvalidRequest
from statebackend.rocksdb.base import MISSING, TIME_WIDTH
from statebackend.rocksdb.context import bytes_of, encode_prefixes, prefix_matrix, rows_as_bytes
from statebackend.rocksdb.flat import FlatState
from statebackend.types import StateType

_COMBINE = {"sum": pc.add_checked, "count": pc.add_checked, "min": pc.min_element_wise, "max": pc.max_element_wise}


def fold_built_in(state: FlatState, function: str | None, input_type: StateType | None, keys: Any, values: Any) -> bool:
    """Fold a batch with a built-in function; False where the types need the general way."""
    if function not in _COMBINE or not isinstance(state._type, (IntType, FloatType)):
        return False
    try:
        keys = state._context.conform(keys)
        column = _values(state, input_type, values, len(keys), function)
    except HoldfastError as error:
        error.context.setdefault("state", state.descriptor.name)
        raise
    if not len(keys):
        return True
    if function == "sum" and _may_overflow(column):
        return False
    grouped, prefixes = _group(state, keys, column, function)
    try:
        new = grouped.cast(state._type.arrow_type)
        old = _accumulators(state, prefixes)
        combined = _COMBINE[function](old, new)
    except pa.ArrowInvalid:
        return False  # a value is out of range: the general way finds out which
    if old.null_count and function in ("sum", "count"):
        combined = pc.coalesce(combined, new)
    _hold(state, prefixes, combined)
    return True


def _values(state: FlatState, input_type: StateType | None, values: Any, count: int, function: str) -> pa.Array:
    """The column to fold, without nulls; for a count only its length matters."""
    if function == "count":
        column = pa.nulls(len(values))
    else:
        column = (input_type if input_type is not None else state._type).conform(values)
    if len(column) != count:
        raise InvalidRequest("keys and values of a batch differ in length", expected=count, found=len(column))
    if function != "count" and column.null_count:
        raise InvalidRequest("a value to fold must not be null")
    return column


def _group(state: FlatState, keys: pa.Array, values: pa.Array, function: str) -> tuple[pa.Array, list[bytes]]:
    """The batch folded by key: one value and one entry key for each distinct key, in order of entry keys."""
    context = state._context
    plain = pt.is_integer(keys.type) or pt.is_string(keys.type) or pt.is_binary(keys.type)
    by = keys if plain else context.key_type.encode_key_array(keys)
    columns, aggregate = {"key": by, "value": values}, ("value", function)
    if function == "count":
        columns, aggregate = {"key": by}, ([], "count_all")  # type: ignore[assignment]
    result = pa.table(columns).group_by("key", use_threads=False).aggregate([aggregate])
    folded = _single(result.column("count_all" if function == "count" else f"value_{function}"))
    distinct = _single(result.column("key"))
    if not plain:
        distinct = context.key_type.decode_key_array(distinct)
    groups = context.groups_of(distinct)
    namespace = state._namespace or DEFAULT_NAMESPACE
    width = context.key_type.fixed_key_width
    if width is None:
        prefixes = encode_prefixes(context.key_type, distinct, groups, state.state_id, namespace)
        order = sorted(range(len(prefixes)), key=prefixes.__getitem__)
        return folded.take(pa.array(order)), [prefixes[index] for index in order]
    rows = prefix_matrix(context.key_type.encode_key_array(distinct), groups, width, state.state_id, namespace)
    index = _order(rows, groups, width)
    return folded.take(pa.array(index)), rows_as_bytes(rows[index])


def _may_overflow(column: pa.Array) -> bool:
    """Whether a sum of some rows could leave 64 bits, where Arrow would wrap around without a word."""
    if not pt.is_integer(column.type):
        return False
    ends = pc.min_max(column)
    largest = max(abs(ends["min"].as_py()), abs(ends["max"].as_py()))
    return bool(largest * len(column) >= 1 << 62)


def _single(column: pa.ChunkedArray) -> pa.Array:
    return column.chunk(0) if column.num_chunks == 1 else pa.concat_arrays(column.chunks)


def _order(rows: np.ndarray[Any, Any], groups: np.ndarray[Any, Any], width: int) -> np.ndarray[Any, Any]:
    if width == 8:
        numbers = np.ascontiguousarray(rows[:, 4:12]).view(">u8").ravel().astype(np.uint64)
        return np.lexsort((numbers, groups))
    return np.argsort(np.ascontiguousarray(rows).view(f"S{rows.shape[1]}").ravel(), kind="stable")


def _accumulators(state: FlatState, keys: list[bytes]) -> pa.Array:
    """The accumulators of sorted entry keys as an addition sees them; null where there is none."""
    if state._expiry is not None:
        limit, expired_too = state._expiry.limit(), state._expiry.returns_expired
        datas = [None if data is None or (data[:TIME_WIDTH] <= limit and not expired_too) else data[TIME_WIDTH:]
                 for data in state._lookup_many(keys)]
        return state._type.decode_array(pa.array(datas, pa.binary()))
    dirty = state._dirty
    held = list(map(dirty.get, keys)) if dirty else []
    if held and None not in held and bytes not in set(map(type, held)):
        return pa.array(held, state._type.arrow_type)
    if not dirty and not state._frozen:
        datas = state._engine.parts.get_many(keys)
    else:
        datas = state._lookup_many(keys)
    return state._type.decode_array(pa.array(datas, pa.binary()))


def _hold(state: FlatState, keys: list[bytes], values: pa.Array) -> None:
    """Store folded numbers under their sorted keys; they wait as numbers where they are few."""
    if state._expiry is not None or state.is_large(keys):
        state._write_many(keys, list(bytes_of(state._type.encode_array(values))), ordered=True)
    else:
        state._dirty.update(zip(keys, state._type.from_arrow(values)))
        state._grown_much()


def fold_objects(state: Any, keys: Any, values: Any, input_type: StateType | None) -> None:
    """Fold a batch with a Python function: each key is read and written once."""
    prefixes = state._prefixes(keys)
    column = input_type.from_arrow(values) if input_type is not None else \
        values.to_pylist() if hasattr(values, "to_pylist") else list(values)
    if len(column) != len(prefixes):
        raise state._named(InvalidRequest("keys and values of a batch differ in length", expected=len(prefixes),
                                          found=len(column)))
    if input_type is not None and not input_type.nullable and any(value is None for value in column):
        raise state._named(InvalidRequest("a value to fold must not be null"))
    distinct = sorted(set(prefixes))
    decode, step = state._decode, state._fold_step
    accumulators = {key: MISSING if data is None else decode(data)
                    for key, data in zip(distinct, state._read_many(distinct))}
    for key, value in zip(prefixes, column):
        accumulators[key] = step(accumulators[key], value)
    encoded = []
    for key, accumulator in accumulators.items():
        try:
            state._check(accumulator)
        except HoldfastError as error:
            error.context.setdefault("state", state.descriptor.name)
            error.context.setdefault("key", state._context.key_type.decode_key_from(key, 4)[0])
            raise
        encoded.append(state._encode(accumulator))
    state._write_many(list(accumulators), encoded)


def results_of(state: Any, datas: list[bytes | None]) -> pa.Array:
    """The results of accumulators as a column; its type is the accumulator's for built-ins except avg."""
    function, built_in = state.descriptor.function, state.descriptor.built_in
    if built_in in _COMBINE:
        return state._type.decode_array(pa.array(datas, pa.binary()))
    decode = state._decode
    results = [None if data is None else function.get_result(decode(data)) for data in datas]
    return pa.array(results, pa.float64()) if built_in == "avg" else pa.array(results)
