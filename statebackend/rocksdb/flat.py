"""Value, reducing and aggregating state on RocksDB: one entry for each key and namespace."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import repeat
from typing import Any

import pyarrow as pa

from statebackend.descriptors import AggregatingStateDescriptor, ReducingStateDescriptor
from statebackend.errors import HoldfastError, InvalidRequest
from statebackend.rocksdb.base import MISSING, TIME_WIDTH, RocksState
from statebackend.rocksdb.context import optional_bytes_of
from statebackend.state import AggregatingState, ReducingState, ValueState


class FlatState(RocksState):
    """One stored value for each key and namespace; `None` in the dirty entries stands for removed."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, collection=False, **options)

    # -- one entry

    def _lookup(self, short: bytes) -> bytes | None:
        """The stored bytes that are not dirty: from frozen generations, then from RocksDB."""
        for layer in reversed(self._frozen):
            data: bytes | None = layer.get(short, MISSING)
            if data is not MISSING:
                return data
        return self._engine.parts.get(short[:2] + self.state_id + short[2:])

    def _read(self, short: bytes) -> bytes | None:
        """The live payload of an entry, after the TTL rules; None if there is none."""
        data = self._dirty.get(short, MISSING)
        if data is MISSING:
            data = self._lookup(short)
        expiry = self._expiry
        if expiry is None or data is None:
            return data  # type: ignore[no-any-return]
        if data[:TIME_WIDTH] <= expiry.limit():
            if expiry.on_read:
                self._put(short, None)
            return data[TIME_WIDTH:] if expiry.returns_expired else None
        if expiry.updates_on_read:
            self._put(short, expiry.stamp() + data[TIME_WIDTH:])
        return data[TIME_WIDTH:]  # type: ignore[no-any-return]

    def _put(self, short: bytes, data: bytes | None) -> None:
        self._dirty[short] = data
        if data is not None and not self._fixed:
            self._weight += len(data)

    def _clear(self, short: bytes) -> None:
        self._dirty[short] = None

    def _value(self, short: bytes) -> Any:
        data = self._read(short)
        return None if data is None else self._decode(data)

    def _store(self, short: bytes, value: Any) -> None:
        self._put(short, self._encoded(value))
        if len(self._dirty) >= self._limit or self._weight >= self._weight_limit:
            self._grown()

    # -- many entries

    def _lookup_many(self, shorts: list[bytes]) -> list[bytes | None]:
        """The stored bytes of many entries, dirty ones included; sorted multi-get for what is in RocksDB."""
        found: list[Any] = list(map(self._dirty.get, shorts, repeat(MISSING)))
        for layer in reversed(self._frozen):
            found = [layer.get(short, MISSING) if data is MISSING else data for short, data in zip(shorts, found)]
        absent = [index for index, data in enumerate(found) if data is MISSING]
        if absent:
            absent.sort(key=shorts.__getitem__)
            state_id = self.state_id
            keys = [short[:2] + state_id + short[2:] for short in map(shorts.__getitem__, absent)]
            for index, data in zip(absent, self._engine.parts.get_many(keys)):
                found[index] = data
        return found

    def _read_many(self, shorts: list[bytes]) -> list[bytes | None]:
        """The live payloads of many entries, after the TTL rules."""
        found = self._lookup_many(shorts)
        expiry = self._expiry
        if expiry is None:
            return found
        limit, stamp = expiry.limit(), expiry.stamp()
        live: list[bytes | None] = []
        for short, data in zip(shorts, found):
            if data is None:
                live.append(None)
            elif data[:TIME_WIDTH] <= limit:
                if expiry.on_read:
                    self._put(short, None)
                live.append(data[TIME_WIDTH:] if expiry.returns_expired else None)
            else:
                if expiry.updates_on_read:
                    self._put(short, stamp + data[TIME_WIDTH:])
                live.append(data[TIME_WIDTH:])
        self._grown()
        return live

    def _decoded_many(self, keys: Any) -> pa.Array:
        return self._type.decode_array(pa.array(self._read_many(self._shorts(keys)), pa.binary()))

    def _write_many(self, shorts: list[bytes], datas: list[bytes | None]) -> None:
        """Store encoded, unstamped values (None removes); of repeated keys the last wins."""
        sizes = [len(data) for data in datas if data is not None] if not self._fixed else []
        if sizes and max(sizes) > self._max_value:
            raise self.too_large(max(sizes))
        if self._expiry is not None:
            stamp = self._expiry.stamp()
            datas = [None if data is None else stamp + data for data in datas]
        self._dirty.update(zip(shorts, datas))
        self._weight += sum(sizes)
        self._grown()

    # -- all entries

    def _live_shorts(self, prefix: bytes | None = None) -> Iterator[bytes]:
        overlay: dict[bytes, bytes | None] = {}
        for layer in (*self._frozen, self._dirty):
            for short in list(layer):
                data = layer.get(short, MISSING)  # a settled layer is emptied while we look: RocksDB has it then
                if data is not MISSING and (prefix is None or short.startswith(prefix)):
                    overlay[short] = data
        stored = self._stored(prefix, keys_only=self._expiry is None)
        limit = self._expiry.limit() if self._expiry is not None else b""
        for short, data in overlay.items():
            if data is not None and not (limit and data[:TIME_WIDTH] <= limit):
                yield short
        for row in stored:
            key, data = (row, b"") if not limit else row
            short = key[:2] + key[4:]
            if short not in overlay and not (limit and data[:TIME_WIDTH] <= limit):
                yield short


class RocksValueState(FlatState, ValueState[Any]):
    def value(self) -> Any:
        short = self._context._short
        if self._namespace is not None:
            short = short[:-1] + self._namespace
        if self._expiry is None:
            try:
                data = self._dirty[short]
            except KeyError:
                data = self._lookup(short)
        else:
            data = self._read(short)
        if data is None:
            return self._default()
        return self._decode(data)

    def _default(self) -> Any:
        default = self.descriptor.default
        return default if default is None else self._type.copy(default)

    def update(self, value: Any) -> None:
        if value is None and not self._type.nullable:
            self.clear()
            return
        short = self._context._short
        if self._namespace is not None:
            short = short[:-1] + self._namespace
        try:
            self._check(value)
            data = self._encode(value)
        except HoldfastError as error:
            raise self._named(error) from None
        if not self._fixed:
            if len(data) > self._max_value:
                raise self.too_large(len(data))
            self._weight += len(data)
        if self._expiry is not None:
            data = self._expiry.stamp() + data
        dirty = self._dirty
        dirty[short] = data
        if len(dirty) >= self._limit or self._weight >= self._weight_limit:
            self._grown()

    def value_many(self, keys: pa.Array) -> pa.Array:
        default = self.descriptor.default
        datas = self._read_many(self._shorts(keys))
        if default is not None:
            encoded = self._encode(default)
            datas = [encoded if data is None else data for data in datas]
        return self._type.decode_array(pa.array(datas, pa.binary()))

    def update_many(self, keys: pa.Array, values: pa.Array) -> None:
        shorts = self._shorts(keys)
        self._write_many(shorts, encoded_column(self, values, len(shorts)))

    def _merge(self, target: bytes, sources: list[bytes]) -> None:
        raise self._named(InvalidRequest("a value state can't be merged",
                                         hint="use a reducing, aggregating, list or map state"))


class RocksReducingState(FlatState, ReducingState[Any]):
    descriptor: ReducingStateDescriptor

    def get(self) -> Any:
        value = self._value(self._short())
        if value is None:
            default = self.descriptor.default
            return default if default is None else self._type.copy(default)
        return value

    def add(self, value: Any) -> None:
        short = self._short()
        self._guard(value)
        self._store(short, self._folded(short, value))

    def _guard(self, value: Any) -> None:
        if self.descriptor.built_in == "count":
            return
        try:
            self._check(value)
        except HoldfastError as error:
            raise self._named(error) from None

    def _folded(self, short: bytes, value: Any) -> Any:
        data = self._read(short)
        if data is None:
            return 1 if self.descriptor.built_in == "count" else value
        return self.descriptor.reduce(self._decode(data), value)

    def get_many(self, keys: pa.Array) -> pa.Array:
        datas = self._read_many(self._shorts(keys))
        if self.descriptor.default is not None:
            encoded = self._encode(self.descriptor.default)
            datas = [encoded if data is None else data for data in datas]
        return self._type.decode_array(pa.array(datas, pa.binary()))

    def add_many(self, keys: pa.Array, values: pa.Array) -> None:
        from statebackend.rocksdb.fold import fold_built_in, fold_objects

        if not fold_built_in(self, self.descriptor.built_in, self._type, keys, values):
            fold_objects(self, keys, values, self._type)

    def _fold_step(self, accumulator: Any, value: Any) -> Any:
        if accumulator is MISSING:
            return 1 if self.descriptor.built_in == "count" else value
        return self.descriptor.reduce(accumulator, value)

    def _merge(self, target: bytes, sources: list[bytes]) -> None:
        merged = self._value(target)
        for short in sources:
            value = self._value(short)
            self._clear(short)
            if value is None:
                continue
            if merged is None:
                merged = value
            elif self.descriptor.built_in == "count":
                merged += value
            else:
                merged = self.descriptor.reduce(merged, value)
        if merged is not None:
            self._store(target, merged)


class RocksAggregatingState(FlatState, AggregatingState[Any, Any]):
    descriptor: AggregatingStateDescriptor

    def get(self) -> Any:
        data = self._read(self._short())
        return None if data is None else self.descriptor.function.get_result(self._decode(data))

    def add(self, value: Any) -> None:
        short = self._short()
        input_type = self.descriptor.input_type
        if input_type is not None and self.descriptor.built_in != "count":
            try:
                input_type.check(value)
            except HoldfastError as error:
                raise self._named(error) from None
        data = self._read(short)
        self._store(short, self._fold_step(MISSING if data is None else self._decode(data), value))

    def _fold_step(self, accumulator: Any, value: Any) -> Any:
        function = self.descriptor.function
        return function.add(function.create_accumulator() if accumulator is MISSING else accumulator, value)

    def get_many(self, keys: pa.Array) -> pa.Array:
        from statebackend.rocksdb.fold import results_of

        return results_of(self, self._read_many(self._shorts(keys)))

    def add_many(self, keys: pa.Array, values: pa.Array) -> None:
        from statebackend.rocksdb.fold import fold_built_in, fold_objects

        input_type = self.descriptor.input_type
        if not fold_built_in(self, self.descriptor.built_in, input_type, keys, values):
            fold_objects(self, keys, values, input_type)

    def _merge(self, target: bytes, sources: list[bytes]) -> None:
        merged = MISSING
        for short in (target, *sources):
            data = self._read(short)
            if data is not None:
                accumulator = self._decode(data)
                merged = accumulator if merged is MISSING else self.descriptor.function.merge(merged, accumulator)
            if short != target:
                self._clear(short)
        if merged is not MISSING:
            self._store(target, merged)


def encoded_column(state: RocksState, values: Any, count: int) -> list[bytes | None]:
    """A column of values as stored bytes; a null stays None unless the type encodes it."""
    try:
        array = state._type.conform(values)
        if len(array) != count:
            raise InvalidRequest("keys and values of a batch differ in length", expected=count, found=len(array))
        encoded = state._type.encode_array(array)
    except HoldfastError as error:
        error.context.setdefault("state", state.descriptor.name)
        raise
    rows = optional_bytes_of(encoded)
    if state._type.nullable and encoded.null_count:
        nothing = state._type.encode(None)
        rows = [nothing if row is None else row for row in rows]
    return rows


__all__ = ["FlatState", "RocksAggregatingState", "RocksReducingState", "RocksValueState", "encoded_column"]
