"""Tuples, NamedTuples and dataclasses: values with a fixed row of typed fields."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Sequence
from operator import attrgetter, itemgetter
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from statebackend.codecs import hashing
from statebackend.codecs.arrays import I64, ByteColumn, joined, spread
from statebackend.codecs.base import Conversion, StateType
from statebackend.codecs.containers import RecordKey, WireType
from statebackend.errors import InvalidRequest


class FieldsType(WireType):
    """What tuples and records share: msgpack arrays as values, field after field as keys and in hashes."""

    names: tuple[str, ...]
    types: tuple[StateType, ...]

    def _set_fields(self, names: tuple[str, ...], types: tuple[StateType, ...]) -> None:
        self.names, self.types = names, types
        self.arrow_type = pa.struct([pa.field(name, kind.arrow_type) for name, kind in zip(names, types)])
        self.wire_type = tuple.__class_getitem__(tuple(kind.wire_type for kind in types))  # type: ignore[attr-defined]
        widths = [kind.fixed_key_width for kind in types]
        if all(width is not None for width in widths):
            self.fixed_key_width = sum(width or 0 for width in widths)
        self._to_wires = None if all(kind.to_wire is None for kind in types) else [kind.to_wire for kind in types]
        self._from_wires = None if all(kind.from_wire is None for kind in types) else \
            [kind.from_wire for kind in types]
        self._checks = [kind.check for kind in types]
        self._key_encoders = [kind.encode_key for kind in types]
        self._key_hashers = [kind.hash_unsigned for kind in types]
        self._prepare()

    def split(self, value: Any) -> Sequence[Any]:
        """The field values of a value."""
        raise NotImplementedError

    def build(self, fields: Sequence[Any]) -> Any:
        """A value from its field values."""
        raise NotImplementedError

    def _fields_to_wire(self, value: Any) -> Sequence[Any]:
        fields = self.split(value)
        if self._to_wires is None:
            return fields
        return tuple([field if convert is None else convert(field) for field, convert in zip(fields, self._to_wires)])

    def _fields_from_wire(self, wire: Sequence[Any]) -> Any:
        if self._from_wires is not None:
            wire = [field if convert is None else convert(field) for field, convert in zip(wire, self._from_wires)]
        return self.build(wire)

    def _check_fields(self, value: Any) -> None:
        fields = self.split(value)
        try:
            for check, field in zip(self._checks, fields):
                check(field)
        except InvalidRequest:
            self._name_wrong_field(fields)
            raise

    def _name_wrong_field(self, fields: Sequence[Any]) -> None:
        for name, check, field in zip(self.names, self._checks, fields):
            try:
                check(field)
            except InvalidRequest as error:
                inner = error.context.get("field")
                error.context["field"] = name if inner is None else f"{name}.{inner}"
                raise

    def copy(self, value: Any) -> Any:
        if self.immutable:
            return value
        return self.build([kind.copy(field) for kind, field in zip(self.types, self.split(value))])

    def require_key(self) -> None:
        if not self.types:
            raise self._no_key()
        for kind in self.types:
            (kind.item if kind.nullable else kind).require_key()  # type: ignore[attr-defined]

    def encode_key(self, value: Any) -> bytes:
        return b"".join([encode(field) for encode, field in zip(self._key_encoders, self.split(value))])

    def decode_key_from(self, data: bytes, offset: int = 0) -> tuple[Any, int]:
        fields = []
        for kind in self.types:
            field, offset = kind.decode_key_from(data, offset)
            fields.append(field)
        return self.build(fields), offset

    def hash_unsigned(self, value: Any, seed: int) -> int:
        for hash_field, field in zip(self._key_hashers, self.split(value)):
            if field is not None:
                seed = hash_field(field, seed)
        return seed

    def _hash_rows(self, array: pa.Array, seeds: Any) -> hashing.U64:
        for kind, column in zip(self.types, array.flatten()):
            seeds = kind.hash_array(column, seeds)
        return seeds if isinstance(seeds, np.ndarray) else np.full(len(array), seeds, np.uint64)

    def encode_key_array(self, array: Any) -> pa.BinaryArray:
        array = self.conform(array)
        columns = [kind.encode_key_array(column) for kind, column in zip(self.types, array.flatten())]
        encoded = joined(columns, len(array))
        if not array.null_count:
            return encoded
        return pc.if_else(pc.is_valid(array), encoded, pa.scalar(None, pa.binary()))  # fields may all be optional

    def read_keys(self, column: ByteColumn, positions: I64, ends: I64) -> tuple[pa.Array, I64]:
        columns = []
        for kind in self.types:
            values, positions = kind.read_keys(column, positions, ends)
            columns.append(values)
        return pa.StructArray.from_arrays(columns, fields=list(self.arrow_type)), positions

    def decode_key_array(self, array: pa.BinaryArray) -> pa.Array:
        column = ByteColumn(array.drop_null())
        values, after = self.read_keys(column, column.begins, column.ends)
        if bool((after != column.ends).any()):
            self.corrupt(b"", "there are bytes too many")
        return spread(values, array.is_valid().to_numpy(zero_copy_only=False))

    def to_arrow(self, values: Sequence[Any]) -> pa.Array:
        split = self.split
        nothing = (None,) * len(self.types)
        rows = [nothing if value is None else split(value) for value in values]
        return self._columns_to_arrow(values, rows, [kind.to_arrow for kind in self.types])

    def wire_to_arrow(self, wires: Sequence[Any]) -> pa.Array:
        nothing = (None,) * len(self.types)
        rows = [nothing if wire is None else wire for wire in wires]
        return self._columns_to_arrow(wires, rows, [kind.wire_to_arrow for kind in self.types])

    def arrow_to_wire(self, array: Any) -> list[Any]:
        return self._rows_from_arrow(array, [kind.arrow_to_wire for kind in self.types], tuple)

    def _columns_to_arrow(self, values: Sequence[Any], rows: Sequence[Any], converts: list[Conversion]) -> pa.Array:
        if not self.types:
            return pa.array([None if value is None else {} for value in values], self.arrow_type)
        columns = [convert(list(map(itemgetter(place), rows))) for place, convert in enumerate(converts)]
        mask = pa.array([value is None for value in values]) if any(value is None for value in values) else None
        return pa.StructArray.from_arrays(columns, fields=list(self.arrow_type), mask=mask)

    def from_arrow(self, array: Any) -> list[Any]:
        return self._rows_from_arrow(array, [kind.from_arrow for kind in self.types], self.build)

    def _rows_from_arrow(self, array: Any, converts: list[Conversion], build: Conversion) -> list[Any]:
        array = self.conform(array)
        if not self.types:
            return [None if value is None else build(()) for value in array.to_pylist()]
        columns = [convert(column) for convert, column in zip(converts, array.flatten())]
        if not array.null_count:
            return [build(fields) for fields in zip(*columns)]
        valid = pc.is_valid(array).to_pylist()
        return [build(fields) if there else None for there, fields in zip(valid, zip(*columns))]


class TupleType(FieldsType):
    """A tuple of a fixed length with a type for each place."""

    tag: ClassVar[str] = "tuple"
    python_type = tuple

    def __init__(self, types: tuple[StateType, ...]) -> None:
        self._set_fields(tuple(f"f{index}" for index in range(len(types))), tuple(types))
        self.immutable = all(kind.immutable for kind in types)
        if self._to_wires is not None:
            self.to_wire = self._fields_to_wire
        if self._from_wires is not None:
            self.from_wire = self._fields_from_wire

    def split(self, value: Any) -> Sequence[Any]:
        return value  # type: ignore[no-any-return]

    def build(self, fields: Sequence[Any]) -> Any:
        return tuple(fields)

    def check(self, value: Any) -> None:
        if type(value) is not tuple:
            self.refuse(value)
        if len(value) != len(self.types):
            self.refuse(value, f"a tuple has {len(value)} fields instead of {len(self.types)}")
        self._check_fields(value)

    def shape(self) -> dict[str, Any]:
        return {"type": "tuple", "items": [kind.shape() for kind in self.types]}

    def describe(self) -> dict[str, Any]:
        return {"type": "tuple", "items": [kind.describe() for kind in self.types]}

    def arguments(self) -> tuple[Any, ...]:
        return (self.types,)

    def __str__(self) -> str:
        return f"tuple[{', '.join(map(str, self.types)) or '()'}]"


@dataclasses.dataclass(frozen=True)
class Field:
    """A field of a record. `default` is the encoded default value, by which older data is completed."""

    name: str
    type: StateType
    default: bytes | None = None


class RecordType(FieldsType):
    """A dataclass or NamedTuple; without the class (read from JSON, or an Arrow struct) a dict."""

    tag: ClassVar[str] = "record"

    def __init__(self, fields: tuple[Field, ...], cls: type | None = None, class_name: str | None = None) -> None:
        self.fields, self.cls = tuple(fields), cls
        self.class_name = class_name if cls is None else f"{cls.__module__}.{cls.__qualname__}"
        self.python_type = cls if cls is not None else dict
        self._set_fields(tuple(field.name for field in fields), tuple(field.type for field in fields))
        self.split, self.build = _access(cls, self.names)  # type: ignore[method-assign, assignment]
        self.to_wire, self.from_wire = self._fields_to_wire, self._fields_from_wire
        if self._to_wires is None:
            self.to_wire = self.split
        if self._from_wires is None:
            self.from_wire = self.build
        self.immutable = _frozen(cls) and all(kind.immutable for kind in self.types)

    def check(self, value: Any) -> None:
        if type(value) is not self.python_type and (self.cls is not None or not isinstance(value, dict)):
            self.refuse(value)
        if self.cls is None and set(value) != set(self.names):  # type: ignore[call-overload]
            self.refuse(value, "a record has other fields than declared")
        try:
            self._check_fields(value)
        except AttributeError as error:
            self.refuse(value, f"a field is not set: {error}")

    def require_key(self) -> None:
        super().require_key()
        if self.cls is not None and self.cls.__hash__ is None:
            raise InvalidRequest(f"{self.cls.__qualname__} can't be a key: its values can be changed",
                                 hint="declare it with @dataclass(frozen=True)")

    def decode_key_from(self, data: bytes, offset: int = 0) -> tuple[Any, int]:
        value, end = super().decode_key_from(data, offset)
        return (value if self.cls is not None else RecordKey(value)), end

    def shape(self) -> dict[str, Any]:
        return {"type": "record",
                "fields": [{"name": field.name, "type": field.type.shape()} for field in self.fields]}

    def describe(self) -> dict[str, Any]:
        fields: list[dict[str, Any]] = []
        for field in self.fields:
            default = {} if field.default is None else {"default": field.default.hex()}
            fields.append({"name": field.name, "type": field.type.describe(), **default})
        return {"type": "record", "class": self.class_name, "fields": fields}

    def arguments(self) -> tuple[Any, ...]:
        return self.fields, self.cls, self.class_name

    def __str__(self) -> str:
        name = (self.class_name or "record").rpartition(".")[2]
        return f"{name}({', '.join(f'{field.name}: {field.type}' for field in self.fields)})"


def _frozen(cls: type | None) -> bool:
    if cls is None:
        return False
    return issubclass(cls, tuple) or bool(cls.__dataclass_params__.frozen)  # type: ignore[attr-defined]


def _access(cls: type | None, names: tuple[str, ...]) -> tuple[Callable[[Any], Any], Callable[[Any], Any]]:
    """How a record is taken apart and put together; a dataclass's __init__ does not run again."""
    if cls is None:
        get: Callable[[Any], Any] = itemgetter(*names) if names else _nothing
        return (get if len(names) != 1 else lambda value: (get(value),)), lambda fields: dict(zip(names, fields))
    if issubclass(cls, tuple):
        return tuple, cls._make  # type: ignore[attr-defined]
    get = attrgetter(*names) if names else _nothing
    split = get if len(names) != 1 else lambda value: (get(value),)
    new, set_field = object.__new__, object.__setattr__

    if not hasattr(cls, "__post_init__") and tuple(inspect.signature(cls.__init__).parameters)[1:] == names and \
            cls.__dataclass_params__.init:  # type: ignore[attr-defined]
        return split, lambda fields: cls(*fields)

    def build_plain(fields: Sequence[Any]) -> Any:
        value = new(cls)
        value.__dict__.update(zip(names, fields))
        return value

    def build_slotted(fields: Sequence[Any]) -> Any:
        value = new(cls)
        for name, field in zip(names, fields):
            set_field(value, name, field)
        return value

    slotted = any(hasattr(parent, "__slots__") for parent in cls.__mro__[:-1])
    return split, build_slotted if slotted else build_plain


def _nothing(_value: Any) -> tuple[()]:
    return ()
