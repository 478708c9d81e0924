"""Key columns: their state type, and the Spark expression that gives a row's key group without any Python."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from statebackend.errors import InvalidRequest
from statebackend.types import StateType, TupleType, state_type

_HINT = "use integers, floats, booleans, strings, binary, dates, timestamps or decimals, or cast the column"


def key_columns(key: str | Sequence[str], columns: Sequence[str]) -> tuple[str, ...]:
    """The names of the key columns; refused where one is missing or named twice."""
    names = (key,) if isinstance(key, str) else tuple(key)
    if not names:
        raise InvalidRequest("a key needs at least one column")
    if len(set(names)) != len(names):
        raise InvalidRequest("a key column is named twice", found=list(names))
    for name in names:
        if name not in columns:
            raise InvalidRequest(f"there is no column {name!r} to be the key", found=list(columns))
    return names


def key_type_of(fields: Sequence[Any]) -> StateType:
    """The state type of a key made of these Spark fields: a scalar for one, a tuple for several."""
    types = tuple(_field_type(field) for field in fields)
    return types[0] if len(types) == 1 else TupleType(types)


def _field_type(field: Any) -> StateType:
    kind = field.dataType
    name = kind.typeName()
    if name in ("byte", "short", "integer", "long", "tinyint", "smallint", "int", "bigint"):
        return state_type(int)
    if name in ("float", "double"):
        return state_type(float)
    simple: dict[str, Any] = {"string": str, "char": str, "varchar": str, "binary": bytes, "boolean": bool,
                              "date": pa.date32(), "timestamp": pa.timestamp("us", "UTC"),
                              "timestamp_ntz": pa.timestamp("us")}
    if name in simple:
        return state_type(simple[name])
    if name.startswith("decimal"):
        return state_type(pa.decimal128(kind.precision, kind.scale))
    raise InvalidRequest(f"column {field.name!r} can't be a key: its type is {kind.simpleString()}", hint=_HINT)


def key_group_column(fields: Sequence[Any], max_parallelism: int) -> Any:
    """`pmod(xxhash64(key), m)`, with integers widened to 64 bits and floats to doubles, as `key_group_of` does."""
    from pyspark.sql import functions as F

    columns = []
    for field in fields:
        name = field.dataType.typeName()
        column = F.col(quoted(field.name))
        if name in ("byte", "short", "integer", "tinyint", "smallint", "int"):
            column = column.cast("bigint")
        elif name == "float":
            column = column.cast("double")
        columns.append(column)
    return F.pmod(F.xxhash64(*columns), F.lit(max_parallelism))


def quoted(name: str) -> str:
    """A column name as Spark reads it, whatever characters it has."""
    return "`" + name.replace("`", "``") + "`"


def key_array(table: Any, names: Sequence[str], key_type: StateType) -> pa.Array:
    """The keys of a table or batch as one array of the key type."""
    columns = [table.column(name) for name in names]
    whole = [column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column for column in columns]
    if len(whole) == 1:
        return key_type.conform(whole[0])
    fields = [key_type.arrow_type.field(index) for index in range(key_type.arrow_type.num_fields)]
    arrays = [column.cast(field.type) for column, field in zip(whole, fields)]
    return pa.StructArray.from_arrays(arrays, fields=fields)
