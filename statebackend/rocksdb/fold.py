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

from statebackend.codecs.records import TupleType
from statebackend.codecs.scalars import FloatType, IntType
from statebackend.errors import HoldfastError, InvalidRequest
from statebackend.rocksdb.base import MISSING, TIME_WIDTH
from statebackend.rocksdb.context import bytes_of, encode_shorts, optional_bytes_of, short_matrix
from statebackend.rocksdb.flat import FlatState
from statebackend.types import StateType

_AVERAGE = struct_of_average = np.dtype([("sum", "<f8"), ("count", "<i8")])
_COMBINE = {"sum": pc.add_checked, "count": pc.add_checked, "min": pc.min_element_wise, "max": pc.max_element_wise}


def fold_built_in(state: FlatState, function: str | None, input_type: StateType | None, keys: Any, values: Any) -> bool:
    """Fold a batch with a built-in function; False where the types need the general way."""
    if function not in _COMBINE or not isinstance(state._type, (IntType, FloatType)):
        return False
    keys = state._context.conform(keys)
    column = _values(state, input_type, values, len(keys), function)
    if not len(keys):
        return True
    grouped, shorts = _group(state, keys, column, function)
    old = state._type.decode_array(_payloads(state, shorts))
    try:
        new = grouped.cast(state._type.arrow_type)
        combined = _COMBINE[function](old, new)
    except pa.ArrowInvalid as error:
        raise InvalidRequest(f"a folded value is out of range: {error}", state=state.descriptor.name,
                             expected=str(state._type)) from error
    if old.null_count and function in ("sum", "count"):
        combined = pc.coalesce(combined, new)
    state._write_many(shorts, list(bytes_of(state._type.encode_array(combined))))
    return True


def _values(state: FlatState, input_type: StateType | None, values: Any, count: int, function: str) -> pa.Array:
    """The column to fold, without nulls; for a count only its length matters."""
    kind = input_type if input_type is not None else state._type
    try:
        column = values if function == "count" else kind.conform(values)
    except HoldfastError as error:
        raise state._named(error) from None
    if isinstance(column, pa.ChunkedArray):
        column = column.combine_chunks()
    if len(column) != count:
        raise state._named(InvalidRequest("keys and values of a batch differ in length", expected=count,
                                          found=len(column)))
    if function != "count" and column.null_count:
        raise state._named(InvalidRequest("a value to fold must not be null"))
    return column


def _group(state: FlatState, keys: pa.Array, values: pa.Array, function: str) -> tuple[pa.Array, list[bytes]]:
    """The batch folded by key: one value and one short key for each distinct key, in order of short keys."""
    context = state._context
    plain = pt.is_integer(keys.type) or pt.is_string(keys.type) or pt.is_binary(keys.type)
    by = keys if plain else context.key_type.encode_key_array(keys)
    aggregate = ("value", "count", pc.CountOptions(mode="all")) if function == "count" else ("value", function)
    table = pa.table({"key": by, "value": values})
    result = table.group_by("key", use_threads=False).aggregate([aggregate])
    folded = result.column(f"value_{function}").combine_chunks()
    distinct = result.column("key").combine_chunks()
    if isinstance(distinct, pa.ChunkedArray):
        distinct, folded = pa.concat_arrays(distinct.chunks), pa.concat_arrays(folded.chunks)
    if not plain:
        distinct = context.key_type.decode_key_array(distinct)
    groups = context.groups_of(distinct)
    namespace = state._namespace or b"\x00"
    width = context.key_type.fixed_key_width
    if width is None:
        shorts = encode_shorts(context.key_type, distinct, groups, namespace)
        order = sorted(range(len(shorts)), key=shorts.__getitem__)
        return folded.take(pa.array(order)), [shorts[index] for index in order]
    rows = short_matrix(context.key_type.encode_key_array(distinct), groups, width, namespace)
    index = _order(rows, groups, width)
    sorted_rows = rows[index]
    return folded.take(pa.array(index)), sorted_rows.view(f"V{rows.shape[1]}").ravel().tolist()


def _order(rows: np.ndarray[Any, Any], groups: np.ndarray[Any, Any], width: int) -> np.ndarray[Any, Any]:
    if width == 8:
        numbers = np.ascontiguousarray(rows[:, 2:10]).view(">u8").ravel().astype(np.uint64)
        return np.lexsort((numbers, groups))
    return np.argsort(rows.view(f"S{rows.shape[1]}").ravel(), kind="stable")


def _payloads(state: FlatState, shorts: list[bytes]) -> pa.Array:
    """The live accumulators of sorted short keys; null where there is none."""
    if state._expiry is None and not state._dirty and not state._frozen:
        state_id = state.state_id
        return pa.array(state._engine.parts.get_many([short[:2] + state_id + short[2:] for short in shorts]), pa.binary())
    if state._expiry is None:
        return pa.array(state._lookup_many(shorts), pa.binary())
    limit = state._expiry.limit()
    return pa.array([None if data is None or data[:TIME_WIDTH] <= limit else data[TIME_WIDTH:]
                     for data in state._lookup_many(shorts)], pa.binary())


def fold_objects(state: Any, keys: Any, values: Any, input_type: StateType | None) -> None:
    """Fold a batch with a Python function: each key is read and written once."""
    shorts = state._shorts(keys)
    column = values.to_pylist() if input_type is None and hasattr(values, "to_pylist") else \
        list(values) if input_type is None else input_type.from_arrow(values)
    if len(column) != len(shorts):
        raise state._named(InvalidRequest("keys and values of a batch differ in length", expected=len(shorts),
                                          found=len(column)))
    if input_type is not None and not input_type.nullable and any(value is None for value in column):
        raise state._named(InvalidRequest("a value to fold must not be null"))
    distinct = sorted(set(shorts))
    decode, step = state._decode, state._fold_step
    accumulators = {short: MISSING if data is None else decode(data)
                    for short, data in zip(distinct, state._read_many(distinct))}
    for short, value in zip(shorts, column):
        accumulators[short] = step(accumulators[short], value)
    encoded = []
    for accumulator in accumulators.values():
        try:
            state._check(accumulator)
        except HoldfastError as error:
            raise state._named(error) from None
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


__all__ = ["TupleType", "fold_built_in", "fold_objects", "optional_bytes_of", "results_of"]
