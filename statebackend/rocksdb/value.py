"""Value state on RocksDB. Numbers, the common case, have classes of their own, made to be fast."""

from __future__ import annotations

import math
import struct
import time
from collections.abc import Callable
from typing import Any

import pyarrow as pa

from statebackend.clock import SystemClock
from statebackend.codecs.scalars import FloatType, IntType
from statebackend.descriptors import StateDescriptor
from statebackend.entries import unpack_time
from statebackend.errors import HoldfastError, InvalidRequest
from statebackend.rocksdb.base import TIME_WIDTH
from statebackend.rocksdb.flat import FlatState, encoded_column
from statebackend.state import ValueState
from statebackend.ttl import NEVER, NO_TIME_YET, TimeDomain

_TIME = struct.Struct(">Q")
_time_from, _time_pack, _TIME_BIAS = _TIME.unpack_from, _TIME.pack, 1 << 63


class RocksValueState(FlatState, ValueState[Any]):
    """Any type, with or without TTL; dirty entries hold stored bytes."""

    def value(self) -> Any:
        data = self._read(self._prefix())
        return self._default() if data is None else self._decode(data)

    def _default(self) -> Any:
        default = self.descriptor.default
        return default if default is None else self._type.copy(default)

    def update(self, value: Any) -> None:
        if value is None and not self._type.nullable:
            self.clear()
            return
        self._store(self._prefix(), value)

    def value_many(self, keys: pa.Array) -> pa.Array:
        return self._column(keys, self.descriptor.default)

    def update_many(self, keys: pa.Array, values: pa.Array) -> None:
        prefixes = self._prefixes(keys)
        self._write_many(prefixes, encoded_column(self, values, len(prefixes)))

    def get_values(self, keys: pa.Array) -> list[Any]:
        decode = self._decode
        return [None if data is None else decode(data) for data in self._read_many(self._prefixes(keys))]

    def put_values(self, keys: pa.Array, values: list[Any]) -> None:
        check, encode = self._check, self._encode
        for value in values:
            if value is not None:
                check(value)
        self._write_many(self._prefixes(keys), [None if value is None else encode(value) for value in values])

    def _merge(self, target: bytes, sources: list[bytes]) -> None:
        raise self._named(InvalidRequest("a value state can't be merged",
                                         hint="use a reducing, aggregating, list or map state"))


class RocksNumberState(RocksValueState):
    """Integers and floats without TTL; dirty entries hold the number itself, or stored bytes from batches."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        kind = self._type
        whole = isinstance(kind, IntType)
        self._low: Any = kind.minimum if isinstance(kind, IntType) else -math.inf
        self._high: Any = kind.maximum if isinstance(kind, IntType) else math.inf
        layout = struct.Struct(_layout(kind))
        self._unpack, self._unpack_from = layout.unpack, layout.unpack_from
        self._only = self._engine.parts.only
        # A 32-bit float must be checked for exactness, so it always takes the slow way.
        self._quick: type = int if whole else float if kind.fixed_value_width == 8 else bytes

    def value(self) -> Any:
        key = self._keys[self._context._token]
        if self._namespace is not None:
            key = key[:-1] + self._namespace
        try:
            held = self._dirty[key]
        except KeyError:
            store = self._only
            held = store.get(key) if store is not None and not self._frozen else self._lookup(key)
        if type(held) is bytes:
            return self._number(held)
        return self.descriptor.default if held is None else held

    def get_values(self, keys: pa.Array) -> list[Any]:
        numbers = self.value_many(keys)
        if numbers.null_count:
            return numbers.to_pylist()  # type: ignore[no-any-return]
        return numbers.to_numpy(zero_copy_only=False).tolist()  # type: ignore[no-any-return]

    def put_values(self, keys: pa.Array, values: list[Any]) -> None:
        self.update_many(keys, pa.array(values, self._type.arrow_type))

    def _number(self, data: bytes) -> Any:
        try:
            return self._unpack(data)[0]
        except struct.error:
            return self._decode(data)  # which says what is wrong with the bytes

    def update(self, value: Any) -> None:
        key = self._keys[self._context._token]
        if self._namespace is not None:
            key = key[:-1] + self._namespace
        if type(value) is not self._quick or not self._low <= value <= self._high:
            if value is None:
                self.clear()
                return
            value = self._accepted(value)
        dirty = self._dirty
        dirty[key] = value
        if len(dirty) >= self._limit:
            self._grown()

    def _accepted(self, value: Any) -> Any:
        try:
            self._check(value)
        except HoldfastError as error:
            raise self._named(error) from None
        return self._exact(value)


class RocksTtlNumberState(RocksNumberState):
    """The same with TTL; dirty entries hold (number, expiry), or stored bytes from batches.

    While dirty, the expiry is in the unit of the clock that is read: seconds of the wall clock, which is one call into
    C, or milliseconds of any other clock.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        expiry, ttl = self._expiry, self.descriptor.ttl
        assert expiry is not None
        assert ttl is not None
        is_wall = type(self._context.clock) is SystemClock and ttl.time is TimeDomain.PROCESSING
        self._clock: Callable[[], float] = time.time if is_wall else expiry.now
        self._unit = 1000 if is_wall else 1
        self._span: float = ttl.ttl_ms / 1000 if is_wall else ttl.ttl_ms
        self._updates_on_read = expiry.updates_on_read

    def value(self) -> Any:
        key = self._keys[self._context._token]
        if self._namespace is not None:
            key = key[:-1] + self._namespace
        try:
            held = self._dirty[key]
        except KeyError:
            store = self._only
            held = store.get(key) if store is not None and not self._frozen else self._lookup(key)
        if held is None:
            return self.descriptor.default
        if type(held) is bytes:
            value, expires = self._unpacked(held)
        else:
            value, expires = held
        if self._clock() >= expires:
            return self._expired(key, value)
        if self._updates_on_read:
            self._dirty[key] = value, self._renewed()
        return value

    def _renewed(self) -> float:
        now = self._clock()
        return now + self._span if now != NO_TIME_YET else NEVER

    def _unpacked(self, data: bytes) -> tuple[Any, float]:
        try:
            value, expires = self._unpack_from(data, TIME_WIDTH)[0], _time_from(data)[0] - _TIME_BIAS
        except struct.error:
            value, expires = self._decode(data[TIME_WIDTH:]), unpack_time(data)
        # Event time starts at the smallest number, where a float can't tell milliseconds apart: no division there.
        return value, expires if self._unit == 1 else expires / 1000

    def _expired(self, key: bytes, value: Any) -> Any:
        assert self._expiry is not None
        if self._expiry.on_read:
            self._dirty[key] = None
        return value if self._expiry.returns_expired else self.descriptor.default

    def update(self, value: Any) -> None:
        key = self._keys[self._context._token]
        if self._namespace is not None:
            key = key[:-1] + self._namespace
        if type(value) is not self._quick or not self._low <= value <= self._high:
            if value is None:
                self.clear()
                return
            value = self._accepted(value)
        dirty, now = self._dirty, self._clock()
        dirty[key] = value, now + self._span if now != NO_TIME_YET else NEVER
        if len(dirty) >= self._limit:
            self._grown()

    def stored(self, held: Any) -> bytes | None:
        if held is None or type(held) is bytes:
            return held
        expires = int(held[1] * self._unit)
        return _time_pack((expires if expires < NEVER else NEVER) + _TIME_BIAS) + self._encode(held[0])


def _layout(kind: Any) -> str:
    """The struct format of a number's value codec."""
    if isinstance(kind, FloatType):
        return "<d" if kind.bits == 64 else "<f"
    letter = {8: "b", 16: "h", 32: "i", 64: "q"}[kind.bits]
    return "<" + (letter if kind.signed else letter.upper())


def value_state_class(descriptor: StateDescriptor) -> type[RocksValueState]:
    """The class for a value state: numbers have faster ones."""
    kind = descriptor.value_type
    if not isinstance(kind, (IntType, FloatType)) or kind.nullable:
        return RocksValueState
    return RocksNumberState if descriptor.ttl is None else RocksTtlNumberState
