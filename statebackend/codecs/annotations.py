"""From a Python annotation or a pyarrow type to a state type."""

from __future__ import annotations

import dataclasses
import types
import typing
import uuid
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from typing import Annotated, Any, Union, get_args, get_origin

import pyarrow as pa
import pyarrow.types as pt

from statebackend.codecs.arrays import is_bytes, is_text
from statebackend.codecs.base import StateType
from statebackend.codecs.containers import ListType, MapType, OptionalType
from statebackend.codecs.records import Field, RecordType, TupleType
from statebackend.codecs.scalars import BoolType, FloatType, IntType
from statebackend.codecs.special import DecimalType, EnumType, PickledType, UuidType
from statebackend.codecs.temporal import DatetimeType, DateType, TimedeltaType, TimeType
from statebackend.codecs.text import BytesType, StrType
from statebackend.errors import InvalidRequest

_SIMPLE: dict[Any, StateType] = {
    int: IntType(), float: FloatType(), bool: BoolType(), str: StrType(), bytes: BytesType(), date: DateType(),
    datetime: DatetimeType(), time: TimeType(), timedelta: TimedeltaType(), Decimal: DecimalType(),
    uuid.UUID: UuidType()}
_HINT = ("use int, float, bool, str, bytes, date, datetime, Zoned, time, timedelta, Decimal, UUID, an Enum, Optional, "
         "list, dict, tuple, a NamedTuple, a dataclass, a pyarrow type, or Pickled(cls)")


@dataclasses.dataclass(frozen=True)
class ZonedMarker:
    """Marks a datetime as an instant with a zone."""


Zoned = Annotated[datetime, ZonedMarker()]
"""A datetime with a zone: stored as an instant, read back in UTC. A plain `datetime` has no zone."""


@dataclasses.dataclass(frozen=True)
class Digits:
    """The digits of a Decimal: `Annotated[Decimal, Digits(10, 2)]` has 10 digits, 2 of them after the point."""

    precision: int
    scale: int


def Pickled(cls: type = object) -> StateType:
    """Any picklable class as a state type. Tools and the service show such values as bytes and never load them."""
    if not isinstance(cls, type):
        raise InvalidRequest("Pickled takes a class", found=repr(cls))
    return PickledType(cls)


def state_type(annotation: Any) -> StateType:
    """The state type of a Python annotation, a pyarrow type, or a state type itself."""
    return _parse(annotation, ())


def _parse(annotation: Any, outer: tuple[type, ...]) -> StateType:
    if isinstance(annotation, StateType):
        return annotation
    if isinstance(annotation, pa.DataType):
        return _from_arrow(annotation)
    if annotation in _SIMPLE if isinstance(annotation, type) else False:
        return _SIMPLE[annotation]
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _annotated(arguments[0], arguments[1:], outer)
    if origin in (Union, types.UnionType):
        return _union(annotation, arguments, outer)
    if origin is list and len(arguments) == 1:
        return ListType(_parse(arguments[0], outer))
    if origin is dict and len(arguments) == 2:
        return MapType(_parse(arguments[0], outer), _parse(arguments[1], outer))
    if origin is tuple:
        return _tuple(arguments, outer)
    if isinstance(annotation, type):
        return _from_class(annotation, outer)
    if isinstance(annotation, typing.NewType):
        return _parse(annotation.__supertype__, outer)
    raise _unsupported(annotation)


def _annotated(plain: Any, marks: tuple[Any, ...], outer: tuple[type, ...]) -> StateType:
    for mark in marks:
        if isinstance(mark, Digits) and plain is Decimal:
            return DecimalType(mark.precision, mark.scale)
        if (isinstance(mark, ZonedMarker) or mark is ZonedMarker) and plain is datetime:
            return DatetimeType(zoned=True)
        if isinstance(mark, (StateType, pa.DataType)):
            return _parse(mark, outer)
    return _parse(plain, outer)


def _union(annotation: Any, arguments: tuple[Any, ...], outer: tuple[type, ...]) -> StateType:
    others = [argument for argument in arguments if argument is not type(None)]
    if len(others) != 1 or len(arguments) != 2:
        raise InvalidRequest(f"a state type can't be one of several types: {annotation}",
                             hint="only X | None works; give each alternative a field of its own")
    item = _parse(others[0], outer)
    return item if item.nullable else OptionalType(item)


def _tuple(arguments: tuple[Any, ...], outer: tuple[type, ...]) -> StateType:
    if len(arguments) == 2 and arguments[1] is Ellipsis:
        return ListType(_parse(arguments[0], outer), tuple)
    return TupleType(tuple(_parse(argument, outer) for argument in arguments))


def _from_class(cls: type, outer: tuple[type, ...]) -> StateType:
    if issubclass(cls, Enum):
        if not cls.__members__:
            raise InvalidRequest(f"the enum {cls.__qualname__} has no members")
        return EnumType.of(cls)
    if dataclasses.is_dataclass(cls):
        defaults = {field.name: _default_of(field) for field in dataclasses.fields(cls)}
        return _record(cls, tuple(defaults), defaults, outer)
    if issubclass(cls, tuple) and hasattr(cls, "_fields"):
        given = getattr(cls, "_field_defaults", {})
        return _record(cls, cls._fields, {name: (name in given, given.get(name)) for name in cls._fields}, outer)
    raise _unsupported(cls)


def _default_of(field: dataclasses.Field[Any]) -> tuple[bool, Any]:
    if field.default is not dataclasses.MISSING:
        return True, field.default
    if field.default_factory is not dataclasses.MISSING:
        return True, field.default_factory()
    return False, None


def _record(cls: type, names: tuple[str, ...], defaults: dict[str, tuple[bool, Any]],
            outer: tuple[type, ...]) -> StateType:
    if cls in outer:
        raise InvalidRequest(f"{cls.__qualname__} contains itself, which a state type can't",
                             hint="store the parts as entries of a map or list state, or use Pickled")
    try:
        hints = typing.get_type_hints(cls, include_extras=True)
    except NameError as error:
        raise InvalidRequest(f"the field types of {cls.__qualname__} can't be resolved: {error}",
                             hint="define the classes at module level") from error
    fields = []
    for name in names:
        if name not in hints:
            raise InvalidRequest(f"the field {name} of {cls.__qualname__} has no type")
        try:
            kind = _parse(hints[name], (*outer, cls))
        except InvalidRequest as error:
            error.context.setdefault("field", f"{cls.__qualname__}.{name}")
            raise
        fields.append(Field(name, kind, _encoded_default(kind, *defaults[name])))
    return RecordType(tuple(fields), cls)


def _encoded_default(kind: StateType, given: bool, default: Any) -> bytes | None:
    if not given or isinstance(kind, PickledType):
        return None
    try:
        kind.check(default)
    except InvalidRequest:
        return None  # a default of another type (a sentinel) can't complete stored records
    return kind.encode(default)


def _from_arrow(kind: pa.DataType) -> StateType:
    if isinstance(kind, pa.BaseExtensionType):
        return UuidType() if kind.extension_name == "arrow.uuid" else _from_arrow(kind.storage_type)
    if pt.is_integer(kind):
        return IntType(kind.bit_width, pt.is_signed_integer(kind))
    if pt.is_float64(kind) or pt.is_float32(kind):
        return FloatType(kind.bit_width)
    if pt.is_timestamp(kind) and kind.unit != "ns":
        return DatetimeType(kind.tz is not None, kind.unit)
    if pt.is_duration(kind) and kind.unit != "ns":
        return TimedeltaType(kind.unit)
    if pt.is_decimal128(kind) or pt.is_decimal32(kind) or pt.is_decimal64(kind):
        return DecimalType(kind.precision, kind.scale)
    if pt.is_fixed_size_binary(kind):
        return BytesType(kind.byte_width)
    if pt.is_map(kind):
        return MapType(_from_arrow(kind.key_type), _from_field(kind.item_field))
    if pt.is_list(kind) or pt.is_large_list(kind):
        return ListType(_from_field(kind.value_field))
    if pt.is_struct(kind):
        return RecordType(tuple(Field(field.name, _from_field(field)) for field in kind))
    if pt.is_dictionary(kind):
        return _from_arrow(kind.value_type)
    for test, found in _ARROW_SIMPLE:
        if test(kind):
            return found
    raise InvalidRequest(f"the Arrow type {kind} has no state type",
                         hint="cast nanoseconds to microseconds; use int, float, bool, string, binary, date32, "
                              "timestamp, duration, decimal128, list, map or struct")


_ARROW_SIMPLE = ((pt.is_boolean, BoolType()), (is_text, StrType()), (is_bytes, BytesType()), (pt.is_date, DateType()),
                 (lambda kind: pt.is_time(kind) and kind.unit != "ns", TimeType()))


def _from_field(field: pa.Field) -> StateType:
    kind = _from_arrow(field.type)
    return OptionalType(kind) if field.nullable else kind


def _unsupported(annotation: Any) -> InvalidRequest:
    name = getattr(annotation, "__qualname__", None) or str(annotation)
    return InvalidRequest(f"{name} has no state type", hint=_HINT)
