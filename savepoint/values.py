"""State values as JSON values and back: exact, and the same in patches, metadata and whatever prints rows.

| type                    | JSON                                      |
| text, bool, integer     | themselves                                |
| float                   | number, or "nan", "inf", "-inf"           |
| bytes, opaque values    | base64 text                               |
| date, time, timestamp   | ISO 8601 text                             |
| decimal, UUID           | text; decimals without zeros at the end   |
| duration                | seconds                                   |
| list, tuple             | array                                     |
| struct (dataclass)      | object                                    |
| map                     | array of [key, value]; an object is taken |
| enum                    | its name                                  |
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from typing import TYPE_CHECKING, Any
from uuid import UUID

from statebackend.errors import InvalidRequest

if TYPE_CHECKING:
    from statebackend.types import StateType


def to_plain(value: Any) -> Any:
    """A JSON value for any Python value that Arrow hands out."""
    if isinstance(value, Enum):
        return value.name
    if value is None or isinstance(value, (str, bool, int)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else repr(value)
    if isinstance(value, (bytes, bytearray, memoryview)):
        return base64.b64encode(value).decode()
    if isinstance(value, (datetime, date, time)):
        return value.isoformat()
    if isinstance(value, Decimal):
        return _digits(value)
    if isinstance(value, UUID):
        return str(value)
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, Mapping):
        return {_member(key): to_plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [to_plain(item) for item in value]
    if is_dataclass(value):
        return {field.name: to_plain(getattr(value, field.name)) for field in fields(value)}
    return str(value)


def _digits(value: Decimal) -> str:
    """A decimal without the zeros that its declared scale adds."""
    text = format(value, "f")
    return text.rstrip("0").rstrip(".") if "." in text else text


def plain_column(column: Any, kind: StateType | None) -> list[Any]:
    """JSON values of an Arrow column; its state type tells what Arrow's own type does not: UUIDs from bytes, tuples
    from records."""
    values = column.to_pylist()
    if kind is None or not _tells_more(kind):
        return [to_plain(value) for value in values]
    return [_plain(value, kind) for value in values]


def plain_value(value: Any, kind: StateType | None) -> Any:
    """The same for one value, as Arrow hands it out or as the state type has it in Python."""
    return to_plain(value) if kind is None or not _tells_more(kind) else _plain(value, kind)


def plain_rows(batch: Any, kinds: Mapping[str, StateType]) -> list[dict[str, Any]]:
    """The rows of a batch as JSON objects; `kinds` are the state types of its columns, where known."""
    names = batch.schema.names
    columns = [plain_column(column, kinds.get(name)) for name, column in zip(names, batch.columns)]
    return [dict(zip(names, row)) for row in zip(*columns)]


def _tells_more(kind: StateType) -> bool:
    inner = [getattr(kind, name) for name in ("item", "key", "value") if name in _INNER.get(kind.tag, ())]
    return kind.tag in ("uuid", "tuple", "map") or any(map(_tells_more, (*inner, *getattr(kind, "types", ()))))


_INNER = {"optional": ("item",), "list": ("item",), "map": ("key", "value")}


def _plain(value: Any, kind: Any) -> Any:
    """The JSON value of a value of a state type, as Arrow hands it out or as Python has it."""
    if value is None:
        return None
    if kind.tag == "uuid":
        return str(value if isinstance(value, UUID) else UUID(bytes=value))
    if kind.tag == "optional":
        return _plain(value, kind.item)
    if kind.tag == "list":
        return [_plain(item, kind.item) for item in value]
    if kind.tag == "map":
        pairs = value.items() if isinstance(value, Mapping) else value
        return [[_plain(key, kind.key), _plain(item, kind.value)] for key, item in pairs]
    if kind.tag == "tuple":
        items = value.values() if isinstance(value, Mapping) else value
        return [_plain(item, inner) for item, inner in zip(items, kind.types)]
    if kind.tag == "record" and isinstance(value, Mapping):
        return {name: _plain(value[name], inner) for name, inner in zip(kind.names, kind.types)}
    return to_plain(value)


def _member(key: Any) -> str:
    simple = to_plain(key)
    return simple if isinstance(simple, str) else str(simple)


def from_plain(value: Any, kind: StateType) -> Any:
    """The value of a state type that a JSON value stands for; a misfit is `InvalidRequest`."""
    try:
        converted = _CONVERTERS.get(kind.tag, _same)(value, kind)
    except (ValueError, TypeError, ArithmeticError, AttributeError) as error:
        raise InvalidRequest(f"{value!r} is no value of type {kind}", hint=str(error) or None) from error
    kind.check(converted)
    return converted


def from_text(text: str, kind: StateType) -> Any:
    """A value typed on a command line: JSON where it is JSON of that type, else the text itself."""
    return from_plain(plain_text(text, kind), kind)


def plain_text(text: str, kind: StateType) -> Any:
    """The JSON value that a text typed on a command line stands for; what is no value of the type is refused."""
    try:
        value = json.loads(text, parse_float=str) if kind.tag == "decimal" else json.loads(text)
        from_plain(value, kind)
    except (ValueError, InvalidRequest):
        from_plain(text, kind)
        return text
    return value


def _same(value: Any, _kind: Any) -> Any:
    return value


def _float(value: Any, _kind: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise TypeError("a number is wanted")
    return float(value)


def _bytes(value: Any, _kind: Any) -> bytes:
    try:
        return value if isinstance(value, bytes) else base64.b64decode(value, validate=True)
    except ValueError as error:
        raise ValueError("bytes are written as base64 text") from error


def _datetime(value: Any, kind: Any) -> datetime:
    moment = value if isinstance(value, datetime) else datetime.fromisoformat(value)
    return moment.replace(tzinfo=UTC) if kind.zoned and moment.tzinfo is None else moment


def _map(value: Any, kind: Any) -> dict[Any, Any]:
    pairs = value.items() if isinstance(value, dict) else value
    return {_key(key, kind.key): from_plain(item, kind.value) for key, item in pairs}


def _key(key: Any, kind: StateType) -> Any:
    """JSON objects have text members only: `{"7": ...}` is a map with the key 7."""
    return from_text(key, kind) if isinstance(key, str) and kind.tag not in ("str", "enum") else from_plain(key, kind)


def _record(value: Any, kind: Any) -> Any:
    names = kind.names
    if isinstance(value, (list, tuple)) and len(value) == len(names):
        value = dict(zip(names, value))
    if not isinstance(value, dict):
        raise TypeError(f"an object with the fields {', '.join(names)} is wanted")
    unknown, missing = sorted(set(value) - set(names)), [name for name in names if name not in value]
    if unknown:
        raise ValueError(f"there is no field {unknown[0]!r}; fields are {', '.join(names)}")
    if missing:
        raise ValueError(f"the field {missing[0]!r} is missing")
    return kind.build([from_plain(value[name], field) for name, field in zip(names, kind.types)])


def _tuple(value: Any, kind: Any) -> tuple[Any, ...]:
    items = list(value.values()) if isinstance(value, dict) else value
    if not isinstance(items, (list, tuple)) or len(items) != len(kind.types):
        raise ValueError(f"an array of {len(kind.types)} is wanted")
    return tuple(from_plain(item, inner) for item, inner in zip(items, kind.types))


_CONVERTERS: dict[str, Any] = {
    "float": _float,
    "bytes": _bytes,
    "pickled": _bytes,
    "date": lambda value, _kind: value if isinstance(value, date) else date.fromisoformat(value),
    "datetime": _datetime,
    "time": lambda value, _kind: value if isinstance(value, time) else time.fromisoformat(value),
    "timedelta": lambda value, _kind: value if isinstance(value, timedelta) else timedelta(seconds=value),
    "decimal": lambda value, _kind: Decimal(str(value)),
    "uuid": lambda value, _kind: value if isinstance(value, UUID) else UUID(value),
    "optional": lambda value, kind: None if value is None else from_plain(value, kind.item),
    "list": lambda value, kind: kind.container([from_plain(item, kind.item) for item in value]),
    "map": _map,
    "tuple": _tuple,
    "record": _record,
}
