"""Values of one state type as another: by the rules of migration, else by an Arrow cast that loses nothing."""

from __future__ import annotations

import pyarrow as pa

from statebackend.errors import IncompatibleState
from statebackend.migration import change_between, value_migrator
from statebackend.types import StateType


def retyped(column: pa.Array, old: StateType, new: StateType, state: str) -> pa.Array:
    """The column under the new type; a value that the new type can't hold exactly is refused."""
    if old == new:
        return column
    try:
        return _cast(column, old, new)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError, pa.ArrowTypeError) as error:
        change = change_between(old, new)
        if change.refusals:
            raise IncompatibleState(f"values can't change their type: {'; '.join(change.refusals)}", state=state,
                                    stored=str(old), wanted=str(new),
                                    hint="map a function over the entries that returns the new type") from error
    convert = value_migrator(old, new)
    encoded = old.encode_array(column).to_pylist()
    if convert is None:
        return new.decode_array(pa.array(encoded, pa.binary()))
    return new.decode_array(pa.array([None if value is None else convert(value) for value in encoded], pa.binary()))


def _cast(column: pa.Array, old: StateType, new: StateType) -> pa.Array:
    """Numbers, text and the like by Arrow; records go by migration, which knows defaults."""
    if pa.types.is_nested(new.arrow_type) or pa.types.is_nested(old.arrow_type):
        raise pa.ArrowNotImplementedError("nested")
    if column.null_count and not new.nullable:
        raise pa.ArrowInvalid("null")
    return column.cast(new.arrow_type)
