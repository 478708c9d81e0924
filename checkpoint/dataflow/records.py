"""The codec of records on process channels and in channel state: versioned, self-describing, never runs code.

Grammar (docs/formats/records.md):

    batch  = version (u8 = 1) | msgpack [values, timestamps, keys, record type]
    values = a list of msgpack values; what msgpack lacks is an extension:
             1 tuple   2 set   3 frozenset   4 datetime   5 date   6 time   7 timedelta   8 Decimal   9 UUID
             10 integer beyond 64 bits   11 map with keys that are not scalars   12 record (its fields, in order)
    record type = null, or [name, field names]: the values are then of extension 12

Batches of plain values (numbers, text, bytes, flat dicts and lists of them) take a fast path with no Python step a value.
"""

from __future__ import annotations

import dataclasses
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from typing import Any
from uuid import UUID

import msgspec

from checkpoint.runtime.contracts import Records
from statebackend.errors import CorruptData, IncompatibleState, InvalidRequest

RECORDS_VERSION = 1
_TUPLE, _SET, _FROZENSET, _DATETIME, _DATE, _TIME, _TIMEDELTA, _DECIMAL, _UUID, _BIGINT, _MAP, _RECORD = range(1, 13)
_PLAIN = frozenset({int, float, str, bytes, bool, type(None)})
_HASHABLE_KEY = frozenset({int, float, str, bytes, bool, type(None)})
_I64_MIN, _U64_MAX = -(2**63), 2**64 - 1
_encode = msgspec.msgpack.Encoder().encode
Ext = msgspec.msgpack.Ext


class RecordCodec:
    """Encodes batches of one stream. `record_type` (a dataclass or NamedTuple) is what decoding gives back."""

    def __init__(self, record_type: Any = None) -> None:
        self._record_type = record_type
        self._fields = record_fields(record_type) if record_type is not None else None
        self._decode = msgspec.msgpack.Decoder(ext_hook=self._decode_extension).decode

    def encode(self, records: Records) -> bytes:
        values: list[Any] = records.values
        keys = records.keys
        if not _all_plain(values):
            values = [self._wrap(value) for value in values]
        if keys is not None and not _all_plain(keys):
            keys = [self._wrap(key) for key in keys]
        typed = [self._record_type.__name__, self._fields] if self._record_type is not None else None
        try:
            body = _encode([values, records.timestamps, keys, typed])
        except OverflowError:
            wrapped = [self._wrap(value) for value in records.values]
            body = _encode([wrapped, records.timestamps, keys, typed])
        return bytes([RECORDS_VERSION]) + body

    def decode(self, data: bytes | memoryview) -> Records:
        view = memoryview(data)
        if len(view) == 0 or view[0] != RECORDS_VERSION:
            raise IncompatibleState("stored records have a version that this release does not read",
                                    expected=RECORDS_VERSION, found=view[0] if len(view) else None)
        try:
            values, timestamps, keys, _ = self._decode(view[1:])
        except (msgspec.DecodeError, ValueError, TypeError) as error:
            raise CorruptData(f"stored records can't be decoded: {error}") from error
        return Records(values, timestamps, keys)

    def _wrap(self, value: Any) -> Any:
        kind = type(value)
        if kind in _PLAIN:
            return value if kind is not int or _I64_MIN <= value <= _U64_MAX else Ext(_BIGINT, str(value).encode())
        if kind is dict:
            if _HASHABLE_KEY.issuperset(map(type, value)):
                return {key: self._wrap(item) for key, item in value.items()}
            return Ext(_MAP, _encode([[self._wrap(key), self._wrap(item)] for key, item in value.items()]))
        if kind is list:
            return [self._wrap(item) for item in value]
        if self._record_type is not None and kind is self._record_type:
            return Ext(_RECORD, _encode([self._wrap(getattr(value, name)) for name in self._fields or ()]))
        if kind in _CONTAINERS:
            return Ext(_CONTAINERS[kind], _encode([self._wrap(item) for item in value]))
        if kind in _SCALARS:
            code, write = _SCALARS[kind]
            return Ext(code, write(value))
        raise InvalidRequest("a record has a value that can't travel between processes or be kept in a checkpoint",
                             found=f"{kind.__module__}.{kind.__qualname__}",
                             hint="use plain values, or name the dataclass or NamedTuple with record_type=")

    def _decode_extension(self, code: int, data: memoryview) -> Any:
        if code == _RECORD:
            fields = self._decode(data)
            if self._record_type is None:
                raise IncompatibleState("stored records are of a record type that the stream no longer names",
                                        hint="give the operator its record_type= again")
            return self._record_type(*fields)
        if code in _READ_CONTAINER:
            return _READ_CONTAINER[code](self._decode(data))
        if code in _READ_SCALAR:
            return _READ_SCALAR[code](bytes(data).decode())
        raise CorruptData("stored records have an extension that this release does not know", found=code)


def record_fields(record_type: Any) -> list[str]:
    """The field names of a dataclass or NamedTuple, in constructor order."""
    if dataclasses.is_dataclass(record_type):
        return [field.name for field in dataclasses.fields(record_type) if field.init]
    names = getattr(record_type, "_fields", None)
    if names is None:
        raise InvalidRequest("record_type takes a dataclass or a NamedTuple", found=repr(record_type))
    return list(names)


def _all_plain(values: list[Any]) -> bool:
    """Whether msgpack carries the values as they are; integers beyond 64 bits are found by the encoder itself."""
    kinds = set(map(type, values))
    if kinds <= _PLAIN:
        return True
    if kinds != {dict}:
        return False
    return all(_PLAIN.issuperset(map(type, value.values())) and _HASHABLE_KEY.issuperset(map(type, value))
               for value in values)


_CONTAINERS: dict[type, int] = {tuple: _TUPLE, set: _SET, frozenset: _FROZENSET}
_READ_CONTAINER: dict[int, Any] = {_TUPLE: tuple, _SET: set, _FROZENSET: frozenset,
                                   _MAP: lambda pairs: dict(map(tuple, pairs))}
_SCALARS: dict[type, tuple[int, Any]] = {
    datetime: (_DATETIME, lambda value: value.isoformat().encode()),
    date: (_DATE, lambda value: value.isoformat().encode()),
    time: (_TIME, lambda value: value.isoformat().encode()),
    timedelta: (_TIMEDELTA, lambda value: f"{value.days},{value.seconds},{value.microseconds}".encode()),
    Decimal: (_DECIMAL, lambda value: str(value).encode()),
    UUID: (_UUID, lambda value: value.hex.encode()),
}
_READ_SCALAR: dict[int, Any] = {
    _DATETIME: datetime.fromisoformat, _DATE: date.fromisoformat, _TIME: time.fromisoformat,
    _TIMEDELTA: lambda text: timedelta(*map(int, text.split(","))),
    _DECIMAL: Decimal, _UUID: UUID, _BIGINT: int,
}
