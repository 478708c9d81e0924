"""State types: what a Python annotation or pyarrow type means for checking, storing, ordering and showing values.

    state_type(int), state_type(dict[str, list[float]]), state_type(MyDataclass), state_type(pa.int32())

The codecs themselves are in `statebackend.codecs`, their bytes in docs/formats/codecs.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from statebackend.codecs.annotations import Digits, Pickled, Zoned, state_type
from statebackend.codecs.base import CODEC_VERSION, StateType
from statebackend.codecs.containers import ListType, MapType, OptionalType
from statebackend.codecs.records import Field, RecordType, TupleType
from statebackend.codecs.scalars import BoolType, FloatType, IntType
from statebackend.codecs.special import DecimalType, EnumType, PickledType, UuidType
from statebackend.codecs.temporal import DatetimeType, DateType, TimedeltaType, TimeType
from statebackend.codecs.text import BytesType, StrType
from statebackend.errors import CorruptData, IncompatibleState


def state_type_from_json(data: Mapping[str, Any]) -> StateType:
    """The type that `to_json` described. No class is loaded: records decode to dicts, enums to names."""
    version = data.get("codec_version")
    if version != CODEC_VERSION:
        raise IncompatibleState("a type was stored with a codec version that this release does not read",
                                expected=CODEC_VERSION, found=version, hint="use a newer release of holdfast")
    try:
        return _from_json(data)
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptData(f"a stored type can't be read: {error!r}") from error


def _from_json(data: Mapping[str, Any]) -> StateType:
    return _READERS[data["type"]](data)


def _record(data: Mapping[str, Any]) -> StateType:
    fields = tuple(Field(str(field["name"]), _from_json(field["type"]),
                         bytes.fromhex(field["default"]) if "default" in field else None) for field in data["fields"])
    return RecordType(fields, None, data.get("class"))


_READERS: dict[str, Callable[[Mapping[str, Any]], StateType]] = {
    "int": lambda data: IntType(int(data["bits"]), bool(data["signed"])),
    "float": lambda data: FloatType(int(data["bits"])),
    "bool": lambda data: BoolType(),
    "str": lambda data: StrType(),
    "bytes": lambda data: BytesType(data.get("length")),
    "date": lambda data: DateType(),
    "datetime": lambda data: DatetimeType(bool(data["zoned"]), str(data["unit"])),
    "time": lambda data: TimeType(),
    "timedelta": lambda data: TimedeltaType(str(data["unit"])),
    "decimal": lambda data: DecimalType(int(data["precision"]), int(data["scale"])),
    "uuid": lambda data: UuidType(),
    "enum": lambda data: EnumType(tuple(data["names"]), None, data.get("class")),
    "pickled": lambda data: PickledType(None, data.get("class")),
    "optional": lambda data: OptionalType(_from_json(data["item"])),
    "list": lambda data: ListType(_from_json(data["item"])),
    "map": lambda data: MapType(_from_json(data["key"]), _from_json(data["value"])),
    "tuple": lambda data: TupleType(tuple(_from_json(item) for item in data["items"])),
    "record": _record,
}

__all__ = ["CODEC_VERSION", "Digits", "Field", "ListType", "MapType", "OptionalType", "Pickled", "RecordType",
           "StateType", "TupleType", "Zoned", "state_type", "state_type_from_json"]
