"""How one state type became another, and how stored values follow; what would lose something is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from statebackend.codecs.base import StateType
from statebackend.codecs.containers import ListType, MapType, OptionalType, WireType
from statebackend.codecs.records import Field, RecordType, TupleType
from statebackend.codecs.scalars import FloatType, IntType
from statebackend.codecs.special import DecimalType, EnumType
from statebackend.codecs.temporal import DatetimeType, TimedeltaType
from statebackend.codecs.text import BytesType
from statebackend.errors import IncompatibleState, InvalidRequest
from statebackend.types import state_type_from_json

Convert = Callable[[Any], Any]
_UNITS = {"s": 0, "ms": 1, "us": 2}


@dataclass(frozen=True)
class TypeChange:
    """What changed from one type to another: nothing, things that a migration follows, or things that it can't."""

    changes: tuple[str, ...] = ()
    refusals: tuple[str, ...] = ()
    loses: bool = False
    """Whether a migration leaves out something that was stored."""
    may_fail: bool = False
    """Whether a migration may meet a value that the new type does not hold, and is refused then."""

    @property
    def is_none(self) -> bool:
        return not self.changes and not self.refusals

    def __add__(self, other: TypeChange) -> TypeChange:
        return TypeChange(self.changes + other.changes, self.refusals + other.refusals, self.loses or other.loses,
                          self.may_fail or other.may_fail)


NO_CHANGE = TypeChange()


def change_between(old: StateType, new: StateType, where: str = "the value", key: bool = False) -> TypeChange:
    """The difference of two types. `key` asks for keys, whose bytes and hash must not change at all."""
    if old == new:
        return NO_CHANGE
    if isinstance(old, IntType) and isinstance(new, IntType) and key:
        fits = old.signed == new.signed and old.bits <= new.bits
        return NO_CHANGE if fits else _refused(where, old, new)
    if isinstance(old, FloatType) and isinstance(new, FloatType) and key and old.bits <= new.bits:
        return NO_CHANGE
    if isinstance(old, EnumType) and isinstance(new, EnumType):
        return _enum_change(old, new, where)
    if isinstance(old, TupleType) and isinstance(new, TupleType) and len(old.types) == len(new.types):
        return _sum(change_between(left, right, f"{where}, place {index}", key)
                    for index, (left, right) in enumerate(zip(old.types, new.types)))
    if isinstance(old, RecordType) and isinstance(new, RecordType) and (not key or old.names == new.names):
        return _record_change(old, new, where, key)
    if isinstance(old, OptionalType) and isinstance(new, OptionalType):
        return change_between(old.item, new.item, where, key)
    if key:
        return NO_CHANGE if isinstance(old, BytesType) and _widens(old, new) else _refused(where, old, new)
    if isinstance(new, OptionalType):
        return TypeChange((f"{where} became optional",)) + change_between(old, new.item, where)
    if isinstance(old, ListType) and isinstance(new, ListType):
        return change_between(old.item, new.item, f"an element of {where}")
    if isinstance(old, MapType) and isinstance(new, MapType):
        return change_between(old.key, new.key, f"a key of {where}") + \
            change_between(old.value, new.value, f"an item of {where}")
    return _scalar_change(old, new, where)


def _sum(changes: Any) -> TypeChange:
    total = NO_CHANGE
    for change in changes:
        total = total + change
    return total


def _refused(where: str, old: StateType, new: StateType) -> TypeChange:
    return TypeChange((), (f"{where} changed from {old} to {new}",))


def _scalar_change(old: StateType, new: StateType, where: str) -> TypeChange:
    if _widens(old, new):
        return TypeChange((f"{where} was widened from {old} to {new}",), may_fail=not _holds_all(old, new))
    return _refused(where, old, new)


def _widens(old: StateType, new: StateType) -> bool:
    """Whether every value of `old` is exactly a value of `new`; of wide ints and floats, whether all usual ones are.

    A migration from int to float looks at each number, and refuses one beyond 2^53 that no float holds.
    """
    if isinstance(old, IntType) and isinstance(new, IntType):
        return new.minimum <= old.minimum and old.maximum <= new.maximum
    if isinstance(old, IntType) and isinstance(new, FloatType):
        return new.bits == 64 or old.bits <= 16
    if isinstance(old, FloatType) and isinstance(new, FloatType):
        return old.bits <= new.bits
    if isinstance(old, DecimalType) and isinstance(new, DecimalType):
        return new.scale >= old.scale and new.precision - new.scale >= old.precision - old.scale
    if isinstance(old, IntType) and isinstance(new, DecimalType):
        return new.precision - new.scale >= len(str(old.maximum))
    if isinstance(old, DatetimeType) and isinstance(new, DatetimeType):
        return old.zoned == new.zoned and _UNITS[old.unit] <= _UNITS[new.unit]
    if isinstance(old, TimedeltaType) and isinstance(new, TimedeltaType):
        return _UNITS[old.unit] <= _UNITS[new.unit]
    return isinstance(old, BytesType) and isinstance(new, BytesType) and new.length is None


def _holds_all(old: StateType, new: StateType) -> bool:
    """Of a type that widens another: whether it holds the largest values too."""
    return not (isinstance(old, IntType) and isinstance(new, FloatType)) or old.bits <= (32 if new.bits == 64 else 16)


def _enum_change(old: EnumType, new: EnumType, where: str) -> TypeChange:
    gone = [name for name in old.names if name not in new.names]
    if gone:
        return TypeChange((), (f"{where} may hold enum members that are gone: {', '.join(gone)}",))
    return NO_CHANGE


def _record_change(old: RecordType, new: RecordType, where: str, key: bool) -> TypeChange:
    before, after = {field.name: field for field in old.fields}, {field.name: field for field in new.fields}
    total = NO_CHANGE
    for name, field in after.items():
        if name in before:
            total += change_between(before[name].type, field.type, f"{where}, field {name}", key)
        elif field.default is not None or field.type.nullable:
            total += TypeChange((f"{where}: field {name} was added",))
        else:
            total += TypeChange((), (f"{where}: field {name} was added without a default",))
    dropped = [name for name in before if name not in after]
    total += TypeChange(tuple(f"{where}: field {name} was dropped" for name in dropped), loses=bool(dropped))
    kept = [name for name in old.names if name in after]
    if kept != [name for name in new.names if name in before] and not dropped:
        total += TypeChange((f"{where}: fields changed places",))
    return total


def value_migrator(old: StateType, new: StateType) -> Callable[[bytes], bytes] | None:
    """From value bytes of `old` to value bytes of `new`; None where they are the same. No class of the job is used."""
    if change_between(old, new).is_none:
        return None
    source, target = _plain(old), _plain(new)
    convert = _converter(source, target)
    return lambda data: target.encode(convert(source.decode(data)))


def column_migrator(old: StateType, new: StateType) -> Callable[[pa.BinaryArray], pa.BinaryArray] | None:
    """`value_migrator` over a column; numbers, dates and text are converted without a Python object per row."""
    convert = value_migrator(old, new)
    if convert is None:
        return None
    plain_old, plain_new = _plain(old), _plain(new)

    def one_by_one(column: pa.BinaryArray) -> pa.BinaryArray:
        return pa.array([None if value is None else convert(value) for value in column.to_pylist()], pa.binary())

    def at_once(column: pa.BinaryArray) -> pa.BinaryArray:
        try:
            return _null_as(column, plain_new.encode_array(plain_old.decode_array(column)))
        except (pa.ArrowInvalid, InvalidRequest):
            return one_by_one(column)  # Arrow refuses more than it must, and names less
    return one_by_one if any(isinstance(_inner(kind), WireType) for kind in (plain_old, plain_new)) else at_once


def _null_as(column: pa.BinaryArray, encoded: pa.BinaryArray) -> pa.BinaryArray:
    """A deletion stays one: an Optional type would make a None of it."""
    return encoded if not column.null_count else pc.if_else(column.is_valid(), encoded, pa.scalar(None, pa.binary()))


def _inner(kind: StateType) -> StateType:
    return kind.item if isinstance(kind, OptionalType) else kind


def _plain(kind: StateType) -> StateType:
    """The type without the job's classes, so that values are dicts and names while they are converted."""
    return state_type_from_json(kind.to_json())


def _converter(old: StateType, new: StateType) -> Convert:
    if isinstance(new, OptionalType):
        inner = _converter(old.item if isinstance(old, OptionalType) else old, new.item)
        return lambda value: None if value is None else inner(value)
    if isinstance(old, ListType) and isinstance(new, ListType):
        item = _converter(old.item, new.item)
        return lambda values: [item(value) for value in values]
    if isinstance(old, MapType) and isinstance(new, MapType):
        key, value = _converter(old.key, new.key), _converter(old.value, new.value)
        return lambda entries: {key(k): value(v) for k, v in entries.items()}
    if isinstance(old, TupleType) and isinstance(new, TupleType):
        places = [_converter(left, right) for left, right in zip(old.types, new.types)]
        return lambda fields: tuple([convert(field) for convert, field in zip(places, fields)])
    if isinstance(old, RecordType) and isinstance(new, RecordType):
        return _record_converter(old, new)
    if isinstance(new, FloatType):
        return _exactly_float if isinstance(old, IntType) else float
    return Decimal if isinstance(new, DecimalType) else _same


def _same(value: Any) -> Any:
    return value


def _exactly_float(value: int) -> float:
    number = float(value)
    if int(number) != value:
        raise IncompatibleState("a stored number is no float: it would lose its last digits", found=value,
                                hint="keep the type int, or change such numbers first with `holdfast savepoint edit`")
    return number


def _record_converter(old: RecordType, new: RecordType) -> Convert:
    before = {field.name: field.type for field in old.fields}
    steps = [(field.name, _converter(before[field.name], field.type) if field.name in before else None,
              None if field.name in before else _default(field)) for field in new.fields]

    def convert(record: dict[str, Any]) -> dict[str, Any]:
        return {name: default if step is None else step(record[name]) for name, step, default in steps}

    return convert


def _default(field: Field) -> Any:
    return None if field.default is None else field.type.decode(field.default)
