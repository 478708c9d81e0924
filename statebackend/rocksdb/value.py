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
from statebackend.entries import pack_time
from statebackend.errors import HoldfastError, InvalidRequest
from statebackend.rocksdb.base import TIME_WIDTH
from statebackend.rocksdb.flat import FlatState, encoded_column
from statebackend.rocksdb.writeback import Dirty
from statebackend.state import ValueState
from statebackend.ttl import TimeDomain, expires_at


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
        self._unpack = layout.unpack
        self._overlay: type[Dirty] = type("Overlay", (dict,), {"__slots__": ()})
        self.layers_changed()
        self._dirty = self.no_changes()
        # A 32-bit float must be checked for exactness, so it always takes the slow way.
        self._quick: type = int if whole else float if kind.fixed_value_width == 8 else bytes

    def no_changes(self) -> Dirty:
        return self._overlay()

    def layers_changed(self) -> None:
        """Subscripting the dirty entries goes on to what lies below them: no exception, and mostly no Python either."""
        if self._frozen:
            self._overlay.__missing__ = self._lookup  # type: ignore[attr-defined]
        else:
            self._engine.parts.serve(self._overlay)

    def value(self) -> Any:
        key = self._keys[self._context._token]
        if self._namespace is not None:
            key = key[:-1] + self._namespace
        held = self._dirty[key]
        if type(held) is bytes:
            try:
                return self._unpack(held)[0]
            except struct.error:
                return self._decode(held)  # which says what is wrong with the bytes
        return self.descriptor.default if held is None else held

    def get_values(self, keys: pa.Array) -> list[Any]:
        numbers = self.value_many(keys)
        if numbers.null_count:
            return numbers.to_pylist()  # type: ignore[no-any-return]
        return numbers.to_numpy(zero_copy_only=False).tolist()  # type: ignore[no-any-return]

    def put_values(self, keys: pa.Array, values: list[Any]) -> None:
        self.update_many(keys, pa.array(values, self._type.arrow_type))

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
    """The same with TTL; dirty entries hold stored bytes, stamp and number, which is one call to make or to open.

    Stamps are compared as bytes. What they are compared with, and the stamp of an entry written now, change once a
    millisecond and are kept until then.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        expiry, ttl = self._expiry, self.descriptor.ttl
        assert expiry is not None
        assert ttl is not None
        # The wall clock is one call into C, in seconds; any other clock tells milliseconds.
        is_wall = type(self._context.clock) is SystemClock and ttl.time is TimeDomain.PROCESSING
        self._clock: Callable[[], float] = time.time if is_wall else expiry.now
        self._unit = 1000 if is_wall else 1
        self._ttl_ms = ttl.ttl_ms
        self._updates_on_read = expiry.updates_on_read
        layout = struct.Struct(f"<{TIME_WIDTH}s{_layout(self._type)[1:]}")
        self._open, self._pack = layout.unpack, layout.pack
        self._tick_begin: float = 0
        self._tick_end: float = 0
        self._stamp_now = self._stamp_written = b""

    def _tick(self, now: float) -> None:
        millis = int(now * self._unit)
        self._stamp_now, self._stamp_written = pack_time(millis), pack_time(expires_at(millis, self._ttl_ms))
        if self._unit == 1:  # no division: event time starts where a float can't tell milliseconds apart
            self._tick_begin, self._tick_end = millis, millis + 1
        else:
            self._tick_begin, self._tick_end = millis / self._unit, (millis + 1) / self._unit

    def value(self) -> Any:
        key = self._keys[self._context._token]
        if self._namespace is not None:
            key = key[:-1] + self._namespace
        held = self._dirty[key]
        if held is None:
            return self.descriptor.default
        if not self._tick_begin <= (now := self._clock()) < self._tick_end:
            self._tick(now)
        try:
            stamp, value = self._open(held)
        except struct.error:
            stamp, value = held[:TIME_WIDTH], self._decode(held[TIME_WIDTH:])
        if stamp <= self._stamp_now:
            return self._expired(key, value)
        if self._updates_on_read:
            self._dirty[key] = self._pack(self._stamp_written, value)
        return value

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
        if not self._tick_begin <= (now := self._clock()) < self._tick_end:
            self._tick(now)
        dirty = self._dirty
        dirty[key] = self._pack(self._stamp_written, value)
        if len(dirty) >= self._limit:
            self._grown()

    def stored(self, held: Any) -> bytes | None:
        return held  # type: ignore[no-any-return]


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
