"""One entry for each key and namespace: what value, reducing and aggregating state on RocksDB share.

Dirty entries are held in one of three forms: None (removed), stored bytes, or, for numbers without TTL, the number
itself, so that hot keys are neither encoded nor decoded.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import repeat
from typing import Any

import pyarrow as pa

from statebackend.codecs.scalars import FloatType, IntType
from statebackend.errors import HoldfastError, InvalidRequest
from statebackend.rocksdb.base import MISSING, TIME_WIDTH, RocksState
from statebackend.rocksdb.context import bytes_of, optional_bytes_of


class FlatState(RocksState):
    """One stored value for each key and namespace."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, collection=False, **options)
        kind = self._type
        self.is_number = isinstance(kind, (IntType, FloatType)) and not kind.nullable
        """Whether dirty entries may hold the number itself."""
        self._exact: type = kind.python_type if self.is_number and kind.python_type is not None else bytes

    def stored(self, held: Any) -> bytes | None:
        return held if held is None or type(held) is bytes else self._encode(held)

    def all_stored(self, held: list[Any]) -> Iterable[bytes | None]:
        if self.is_number and set(map(type, held)) == {self._exact}:
            return bytes_of(self._type.encode_array(pa.array(held, self._type.arrow_type)))
        return map(self.stored, held)

    # -- one entry

    def _lookup(self, key: bytes) -> Any:
        """What is held of an entry that is not dirty: from frozen generations, then from RocksDB."""
        if self._frozen:
            for layer in reversed(self._frozen):
                held = layer.get(key, MISSING)
                if held is not MISSING:
                    return held
        return self._engine.parts.get(key)

    def _read(self, key: bytes) -> bytes | None:
        """The live payload of an entry, after the TTL rules of a read; None if there is none."""
        held = self._dirty.get(key, MISSING)
        data = self.stored(self._lookup(key) if held is MISSING else held)
        expiry = self._expiry
        if expiry is None or data is None:
            return data
        if data[:TIME_WIDTH] <= expiry.limit():
            if expiry.on_read:
                self._put(key, None)
            return data[TIME_WIDTH:] if expiry.returns_expired else None
        if expiry.updates_on_read:
            self._put(key, expiry.stamp() + data[TIME_WIDTH:])
        return data[TIME_WIDTH:]

    def _put(self, key: bytes, data: bytes | None) -> None:
        self._dirty[key] = data
        if data is not None and not self._fixed:
            self._weight += len(data)

    def _clear(self, prefix: bytes) -> None:
        self._dirty[prefix] = None

    def _value(self, key: bytes) -> Any:
        data = self._read(key)
        return None if data is None else self._decode(data)

    def _store(self, key: bytes, value: Any) -> None:
        self._put(key, self._encoded(value))
        if len(self._dirty) >= self._limit or self._weight >= self._weight_limit:
            self._grown()

    # -- many entries

    def _lookup_many(self, keys: list[bytes]) -> list[bytes | None]:
        """The stored bytes of many entries, dirty ones included; sorted multi-get for what is in RocksDB."""
        found: list[Any] = list(map(self._dirty.get, keys, repeat(MISSING)))
        for layer in reversed(self._frozen):
            found = [layer.get(key, MISSING) if held is MISSING else held for key, held in zip(keys, found)]
        absent = [index for index, held in enumerate(found) if held is MISSING]
        if self.is_number and len(absent) < len(found):
            found = [held if held is MISSING else self.stored(held) for held in found]
        if absent:
            absent.sort(key=keys.__getitem__)
            for index, data in zip(absent, self._engine.parts.get_many([keys[index] for index in absent])):
                found[index] = data
        return found

    def _read_many(self, keys: list[bytes]) -> list[bytes | None]:
        """The live payloads of many entries, after the TTL rules of a read."""
        found = self._lookup_many(keys)
        expiry = self._expiry
        if expiry is None:
            return found
        limit, stamp = expiry.limit(), expiry.stamp()
        live: list[bytes | None] = []
        for key, data in zip(keys, found):
            if data is None:
                live.append(None)
            elif data[:TIME_WIDTH] <= limit:
                if expiry.on_read:
                    self._put(key, None)
                live.append(data[TIME_WIDTH:] if expiry.returns_expired else None)
            else:
                if expiry.updates_on_read:
                    self._put(key, stamp + data[TIME_WIDTH:])
                live.append(data[TIME_WIDTH:])
        self._grown_much()
        return live

    def _column(self, keys: Any, default: Any = None) -> pa.Array:
        """The values of a column of keys, a default filled in."""
        datas = self._read_many(self._prefixes(keys))
        if default is not None:
            encoded = self._encode(default)
            datas = [encoded if data is None else data for data in datas]
        return self._type.decode_array(pa.array(datas, pa.binary()))

    def _write_many(self, keys: list[bytes], datas: list[bytes | None], *, ordered: bool = False) -> None:
        """Store encoded, unstamped values (None removes); of repeated keys the last wins. `ordered` keys are distinct."""
        sizes = [len(data) for data in datas if data is not None] if not self._fixed else []
        if sizes and max(sizes) > self._max_value:
            raise self.too_large(max(sizes))
        if self._expiry is not None:
            stamp = self._expiry.stamp()
            datas = [None if data is None else stamp + data for data in datas]
        if self.is_large(keys):
            self._write_through(keys, datas, ordered)
            return
        self._dirty.update(zip(keys, datas))
        self._weight += sum(sizes)
        self._grown_much()

    def is_large(self, keys: list[bytes]) -> bool:
        """Whether a batch would displace most of the dirty entries, so that holding it there gains nothing."""
        return 2 * len(keys) >= self._limit

    def _write_through(self, keys: list[bytes], datas: list[bytes | None], ordered: bool) -> None:
        """Write a large batch to RocksDB at once; if that fails it is dirty, as after an eviction that failed."""
        dirty = self._dirty
        if not ordered:
            changes = dict(zip(keys, datas))
            keys = sorted(changes)
            datas = list(map(changes.__getitem__, keys))
        try:
            self._engine.apply(zip(keys, datas))
        except HoldfastError:
            dirty.update(zip(keys, datas))
            raise
        for key in keys if dirty else ():
            dirty.pop(key, None)

    # -- all entries

    def _live_prefixes(self, head: bytes | None = None) -> Iterator[bytes]:
        overlay: dict[bytes, bytes | None] = {}
        for layer in (*self._frozen, self._dirty):
            for key in list(layer):
                held = layer.get(key, MISSING)  # a settled layer is emptied while we look: RocksDB has it then
                if held is not MISSING and (head is None or key.startswith(head)):
                    overlay[key] = self.stored(held)
        stored = self._stored_rows(head, keys_only=self._expiry is None)
        limit = self._expiry.limit() if self._expiry is not None else b""
        for key, data in overlay.items():
            if data is not None and not (limit and data[:TIME_WIDTH] <= limit):
                yield key
        for row in stored:
            key, data = (row, b"") if not limit else row
            if key not in overlay and not (limit and data[:TIME_WIDTH] <= limit):
                yield key


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
