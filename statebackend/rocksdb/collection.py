"""List and map state on RocksDB: many entries for each key and namespace, told apart by a suffix.

A list element's suffix is a sequence number that grows over the whole backend, so `add` writes without reading.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import pyarrow as pa

from statebackend.descriptors import MapStateDescriptor
from statebackend.entries import pack_sequence
from statebackend.errors import HoldfastError, InvalidRequest
from statebackend.rocksdb.base import MISSING, TIME_WIDTH, RocksState
from statebackend.rocksdb.context import optional_bytes_of
from statebackend.rocksdb.flat import encoded_column
from statebackend.rocksdb.writeback import Bucket, after
from statebackend.state import ListState, MapState
from statebackend.types import StateType


class ListSequence:
    """The next list sequence of a backend: one counter for all lists, kept in snapshots."""

    __slots__ = ("next",)

    def __init__(self, start: int = 0) -> None:
        self.next = start

    def take(self, count: int = 1) -> int:
        first = self.next
        self.next += count
        return first


class CollectionState(RocksState):
    """Entries `key group | state | key | namespace | suffix`; changes of one collection are kept in a `Bucket`."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, collection=True, **options)
        self._changes = 0

    # -- changes

    def _bucket(self, prefix: bytes) -> Bucket:
        bucket: Bucket | None = self._dirty.get(prefix)
        if bucket is None:
            bucket = self._dirty[prefix] = Bucket()
        return bucket

    def _put(self, prefix: bytes, suffix: bytes, data: bytes | None) -> None:
        bucket: Bucket | None = self._dirty.get(prefix)
        if bucket is None:
            bucket = self._dirty[prefix] = Bucket()
        if data is None and bucket.cleared:
            bucket.items.pop(suffix, None)
        else:
            bucket.items[suffix] = data
        self._weight += 64 if data is None else 64 + len(data)
        if self._weight >= self._weight_limit or len(self._dirty) >= self._limit:
            self._grown()

    def _clear(self, prefix: bytes) -> None:
        self._dirty[prefix] = Bucket(cleared=True)

    # -- reads

    def _overlay(self, prefix: bytes) -> tuple[dict[bytes, bytes | None], bool]:
        """The changes of a collection that are not in RocksDB, and whether they hide all that is."""
        bucket: Bucket | None = self._dirty.get(prefix)
        if not self._frozen:
            return ({}, False) if bucket is None else (bucket.items, bucket.cleared)
        overlay: dict[bytes, bytes | None] = {}
        hidden = False
        for layer in (*self._frozen, self._dirty):
            bucket = layer.get(prefix)
            if bucket is not None:
                if bucket.cleared:
                    overlay, hidden = {}, True
                overlay.update(bucket.items)
        return overlay, hidden

    def _rows(self, prefix: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Suffix and stored bytes of each entry of a collection, in order of suffixes, expired ones included."""
        overlay, hidden = self._overlay(prefix)
        changed = sorted(overlay.items())
        if hidden:
            yield from ((suffix, data) for suffix, data in changed if data is not None)
            return
        width, position = len(prefix), 0
        for key, data in self._engine.parts.scan(prefix, after(prefix)):
            suffix = key[width:]
            while position < len(changed) and changed[position][0] < suffix:
                change = changed[position]
                position += 1
                if change[1] is not None:
                    yield change  # type: ignore[misc]
            if suffix not in overlay:
                yield suffix, data
        yield from ((suffix, data) for suffix, data in changed[position:] if data is not None)

    def _live_rows(self, prefix: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Suffix and payload of each entry, after the TTL rules."""
        expiry = self._expiry
        if expiry is None:
            yield from self._rows(prefix)
            return
        limit, stamp = expiry.limit(), expiry.stamp()
        for suffix, data in list(self._rows(prefix)):
            if data[:TIME_WIDTH] <= limit:
                if expiry.on_read:
                    self._put(prefix, suffix, None)
                if expiry.returns_expired:
                    yield suffix, data[TIME_WIDTH:]
                continue
            if expiry.updates_on_read:
                self._put(prefix, suffix, stamp + data[TIME_WIDTH:])
            yield suffix, data[TIME_WIDTH:]

    def _live_prefixes(self, head: bytes | None = None) -> Iterator[bytes]:
        changed: dict[bytes, None] = {}
        for layer in (*self._frozen, self._dirty):
            changed.update((prefix, None) for prefix in list(layer) if head is None or prefix.startswith(head))
        for prefix in changed:
            if self._holds(prefix):
                yield prefix
        last, limit = b"", self._expiry.limit() if self._expiry is not None else b""
        for row in self._stored_rows(head, keys_only=not limit):
            key, data = (row, b"") if not limit else row
            if limit and data[:TIME_WIDTH] <= limit:
                continue
            prefix = key[:self._suffix_start(key)]
            if prefix != last and prefix not in changed:
                yield prefix
            last = prefix

    def _suffix_start(self, key: bytes) -> int:
        """Where the suffix of an entry key begins."""
        _, end = self._context.key_type.decode_key_from(key, 4)
        if key[end] == 0:
            return end + 1
        if self.namespace_type is None:
            raise InvalidRequest("this state was stored with namespaces", state=self.descriptor.name,
                                 hint="pass namespace_type= when registering the state")
        return self.namespace_type.decode_key_from(key, end + 1)[1]

    def _holds(self, prefix: bytes) -> bool:
        limit = self._expiry.limit() if self._expiry is not None else None
        return any(limit is None or data[:TIME_WIDTH] > limit for _, data in self._rows(prefix))


class RocksListState(CollectionState, ListState[Any]):
    _sequence: ListSequence

    def bind(self, sequence: ListSequence) -> RocksListState:
        self._sequence = sequence
        return self

    def get(self) -> list[Any]:
        decode = self._decode
        return [decode(data) for _, data in self._live_rows(self._prefix())]

    def add(self, value: Any) -> None:
        prefix = self._prefix()
        self._put(prefix, pack_sequence(self._sequence.take()), self._encoded(value))

    def add_all(self, values: Iterable[Any]) -> None:
        prefix = self._prefix()
        self._append(prefix, [self._encoded(value) for value in self._values(values)])

    def update(self, values: Iterable[Any]) -> None:
        prefix = self._prefix()
        datas = [self._encoded(value) for value in self._values(values)]
        self._clear(prefix)
        self._append(prefix, datas)

    def _values(self, values: Iterable[Any]) -> Iterable[Any]:
        if values is None or isinstance(values, (str, bytes)) or not isinstance(values, Iterable):
            raise self._named(InvalidRequest("a list state takes an iterable of elements", found=type(values).__name__))
        return values

    def _append(self, prefix: bytes, datas: list[bytes]) -> None:
        first = self._sequence.take(len(datas))
        for sequence, data in enumerate(datas, first):
            self._put(prefix, pack_sequence(sequence), data)

    def get_many(self, keys: pa.Array) -> pa.Array:
        prefixes = self._prefixes(keys)
        offsets, datas = [0], list[bytes]()
        for prefix in prefixes:
            datas.extend(data for _, data in self._live_rows(prefix))
            offsets.append(len(datas))
        elements = self._type.decode_array(pa.array(datas, pa.binary()))
        return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), elements)

    def add_many(self, keys: pa.Array, values: pa.Array) -> None:
        prefixes = self._prefixes(keys)
        datas = stamped(self, encoded_column(self, values, len(prefixes)))
        first = self._sequence.take(len(datas))
        for sequence, (prefix, data) in enumerate(zip(prefixes, datas), first):
            self._put(prefix, pack_sequence(sequence), data)

    def update_many(self, keys: pa.Array, values: pa.Array) -> None:
        prefixes = self._prefixes(keys)
        lists = list_column(self, values, len(prefixes))
        offsets = lists.offsets.to_pylist()
        flat = encoded_column(self, lists.values, len(lists.values))
        replaced = {prefix: (begin, end) for prefix, begin, end in zip(prefixes, offsets, offsets[1:])}
        new = {prefix: stamped(self, flat[begin:end]) for prefix, (begin, end) in replaced.items()}
        for prefix, datas in new.items():
            self._clear(prefix)
            self._append(prefix, datas)

    def _merge(self, target: bytes, sources: list[bytes]) -> None:
        for prefix in sources:
            rows = [data for _, data in self._rows(prefix)]
            self._clear(prefix)
            self._append(target, rows)


class RocksMapState(CollectionState, MapState[Any, Any]):
    descriptor: MapStateDescriptor

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._map_key_type: StateType = self.descriptor.map_key_type
        self._check_map_key = self._map_key_type.checker()

    def _suffix(self, key: Any) -> bytes:
        try:
            self._check_map_key(key)
            return self._map_key_type.encode_key(key)
        except HoldfastError as error:
            raise self._named(error) from None

    def _stored_entry(self, prefix: bytes, suffix: bytes) -> bytes | None:
        for layer in (self._dirty, *reversed(self._frozen)):
            bucket = layer.get(prefix)
            if bucket is not None:
                data: bytes | None = bucket.items.get(suffix, MISSING)
                if data is not MISSING:
                    return data
                if bucket.cleared:
                    return None
        return self._engine.parts.get(prefix + suffix)

    def _live_entry(self, prefix: bytes, suffix: bytes) -> bytes | None:
        data, expiry = self._stored_entry(prefix, suffix), self._expiry
        if expiry is None or data is None:
            return data
        if data[:TIME_WIDTH] <= expiry.limit():
            if expiry.on_read:
                self._put(prefix, suffix, None)
            return data[TIME_WIDTH:] if expiry.returns_expired else None
        if expiry.updates_on_read:
            self._put(prefix, suffix, expiry.stamp() + data[TIME_WIDTH:])
        return data[TIME_WIDTH:]

    def get(self, key: Any) -> Any:
        data = self._live_entry(self._prefix(), self._suffix(key))
        return None if data is None else self._decode(data)

    def put(self, key: Any, value: Any) -> None:
        self._put(self._prefix(), self._suffix(key), self._encoded(value))

    def put_all(self, entries: Mapping[Any, Any] | Iterable[tuple[Any, Any]]) -> None:
        prefix = self._prefix()
        pairs = entries.items() if isinstance(entries, Mapping) else entries
        for suffix, data in [(self._suffix(key), self._encoded(value)) for key, value in pairs]:
            self._put(prefix, suffix, data)

    def remove(self, key: Any) -> None:
        self._put(self._prefix(), self._suffix(key), None)

    def contains(self, key: Any) -> bool:
        return self._live_entry(self._prefix(), self._suffix(key)) is not None

    def entries(self) -> Iterator[tuple[Any, Any]]:
        rows = list(self._live_rows(self._prefix()))
        decode_key, decode = self._map_key_type.decode_key, self._decode
        return iter([(decode_key(suffix), decode(data)) for suffix, data in rows])

    def keys(self) -> Iterator[Any]:
        decode_key = self._map_key_type.decode_key
        return iter([decode_key(suffix) for suffix, _ in self._live_rows(self._prefix())])

    def values(self) -> Iterator[Any]:
        decode = self._decode
        return iter([decode(data) for _, data in self._live_rows(self._prefix())])

    def is_empty(self) -> bool:
        return next(iter(self._live_rows(self._prefix())), None) is None

    # -- batches

    def _suffixes(self, map_keys: Any, count: int) -> list[bytes]:
        array = self._map_key_type.conform(map_keys)
        if len(array) != count:
            raise self._named(InvalidRequest("keys and map keys of a batch differ in length", expected=count,
                                             found=len(array)))
        if array.null_count and not self._map_key_type.nullable:
            raise self._named(InvalidRequest("a map key must not be null"))
        if self._map_key_type.nullable:
            return [self._map_key_type.encode_key(key) for key in self._map_key_type.from_arrow(array)]
        return [row or b"" for row in optional_bytes_of(self._map_key_type.encode_key_array(array))]

    def get_many(self, keys: pa.Array, map_keys: pa.Array) -> pa.Array:
        prefixes = self._prefixes(keys)
        suffixes = self._suffixes(map_keys, len(prefixes))
        datas = [self._live_entry(prefix, suffix) for prefix, suffix in zip(prefixes, suffixes)]
        return self._type.decode_array(pa.array(datas, pa.binary()))

    def put_many(self, keys: pa.Array, map_keys: pa.Array, values: pa.Array) -> None:
        prefixes = self._prefixes(keys)
        suffixes = self._suffixes(map_keys, len(prefixes))
        datas = stamped(self, encoded_column(self, values, len(prefixes)))
        for prefix, suffix, data in zip(prefixes, suffixes, datas):
            self._put(prefix, suffix, data)

    def remove_many(self, keys: pa.Array, map_keys: pa.Array) -> None:
        prefixes = self._prefixes(keys)
        for prefix, suffix in zip(prefixes, self._suffixes(map_keys, len(prefixes))):
            self._put(prefix, suffix, None)

    def entries_many(self, keys: pa.Array) -> pa.Array:
        offsets, suffixes, datas = [0], list[bytes](), list[bytes]()
        for prefix in self._prefixes(keys):
            for suffix, data in self._live_rows(prefix):
                suffixes.append(suffix)
                datas.append(data)
            offsets.append(len(datas))
        map_keys = self._map_key_type.decode_key_array(pa.array(suffixes, pa.binary()))
        return pa.MapArray.from_arrays(pa.array(offsets, pa.int32()), map_keys,
                                       self._type.decode_array(pa.array(datas, pa.binary())))

    def _merge(self, target: bytes, sources: list[bytes]) -> None:
        for prefix in sources:
            rows = list(self._rows(prefix))
            self._clear(prefix)
            for suffix, data in rows:
                self._put(target, suffix, data)


def stamped(state: CollectionState, datas: list[bytes | None]) -> list[bytes]:
    """Encoded elements with their expiry; elements can't be null, and none may be too large."""
    stamp = state._expiry.stamp() if state._expiry is not None else b""
    rows = []
    for data in datas:
        if data is None:
            raise state._named(InvalidRequest("an element must not be null", expected=str(state._type)))
        if len(data) > state._max_value:
            raise state.too_large(len(data))
        rows.append(stamp + data)
    return rows


def list_column(state: CollectionState, values: Any, count: int) -> pa.ListArray:
    """A column of lists without nulls (a null list is an empty one)."""
    if isinstance(values, pa.ChunkedArray):
        values = values.combine_chunks()
    array = values if isinstance(values, pa.Array) else pa.array(values, pa.list_(state._type.arrow_type))
    if len(array) != count:
        raise state._named(InvalidRequest("keys and values of a batch differ in length", expected=count,
                                          found=len(array)))
    if not isinstance(array, pa.ListArray):
        array = array.cast(pa.list_(state._type.arrow_type))
    return pa.ListArray.from_arrays(_offsets(array), array.flatten())


def _offsets(array: pa.ListArray) -> pa.Array:
    lengths = [length or 0 for length in array.value_lengths().to_pylist()]
    offsets = [0]
    for length in lengths:
        offsets.append(offsets[-1] + length)
    return pa.array(offsets, pa.int32())
