"""What the five kinds of keyed state on RocksDB share: keys, namespaces, expiry, and the way of a read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pyarrow as pa

from statebackend.descriptors import StateDescriptor
from statebackend.entries import DEFAULT_NAMESPACE, pack_time
from statebackend.errors import HoldfastError, InvalidRequest
from statebackend.rocksdb.context import KeyContext, decode_namespace, encode_namespace
from statebackend.rocksdb.writeback import Table, WriteBack, after
from statebackend.state import State
from statebackend.ttl import TimeDomain, TtlConfig, expires_at
from statebackend.types import StateType

TIME_WIDTH = 8
MISSING: Any = object()
PATIENCE = 4
"""Times its limit that a state may be dirty while a snapshot writes what was frozen; beyond, the owner waits."""


class Expiry:
    """The TTL rules of one state, on the eight bytes in front of each stored value."""

    __slots__ = ("_context", "_event_time", "_ttl_ms", "background", "filter_snapshots", "on_read", "returns_expired",
                 "updates_on_read")

    def __init__(self, ttl: TtlConfig, context: KeyContext) -> None:
        self._context = context
        self._event_time = ttl.time is TimeDomain.EVENT
        self._ttl_ms = ttl.ttl_ms
        self.updates_on_read = ttl.updates_on_read
        self.returns_expired = ttl.returns_expired
        self.on_read = ttl.cleanup.on_read
        self.filter_snapshots = ttl.cleanup.full_snapshot
        self.background = ttl.cleanup.background

    def now(self) -> int:
        return self._context.watermark if self._event_time else self._context.clock.now_ms()

    def stamp(self) -> bytes:
        """The expiry of an entry that is written now."""
        return pack_time(expires_at(self.now(), self._ttl_ms))

    def limit(self) -> bytes:
        """An entry is expired if its first eight bytes are at or below this."""
        return pack_time(self.now())


class RocksState(Table, State):
    """A registered state. It is its own table of dirty entries, so that a barrier swaps them in one step."""

    def __init__(self, descriptor: StateDescriptor, state_id: bytes, namespace_type: StateType | None,
                 context: KeyContext, engine: WriteBack, max_value_bytes: int, *, collection: bool) -> None:
        super().__init__(state_id, collection=collection)
        self.descriptor = descriptor
        self.namespace_type = namespace_type
        self._context = context
        self._keys = context.entry_keys(state_id)
        self._engine = engine
        self._limit = engine.limit
        self._weight_limit = engine.weight_limit
        self._namespace: bytes | None = None
        self._type = descriptor.value_type
        self._check: Callable[[Any], None] = self._type.checker()
        self._encode: Callable[[Any], bytes] = self._type.encode
        self._decode: Callable[[bytes], Any] = self._type.decode
        self._max_value = max_value_bytes
        self._expiry = Expiry(descriptor.ttl, context) if descriptor.ttl is not None else None
        self._fixed = self._type.fixed_value_width is not None

    # -- keys and namespaces

    def set_current_namespace(self, namespace: Any) -> None:
        try:
            encoded = encode_namespace(self.namespace_type, namespace)
        except HoldfastError as error:
            raise self._named(error) from None
        self._namespace = None if encoded == DEFAULT_NAMESPACE else encoded

    def _prefix(self) -> bytes:
        """`key group | state id | key | namespace` of the current key and namespace."""
        prefix = self._keys[self._context._token]
        return prefix if self._namespace is None else prefix[:-1] + self._namespace

    def _prefix_in(self, namespace: Any) -> bytes:
        return self._keys[self._context._token][:-1] + encode_namespace(self.namespace_type, namespace)

    def _prefixes(self, keys: Any) -> list[bytes]:
        try:
            return self._context.prefixes(keys, self.state_id, self._namespace)
        except HoldfastError as error:
            error.context.setdefault("state", self.descriptor.name)
            raise

    def _named(self, error: HoldfastError) -> HoldfastError:
        """The error with the state and the key it is about."""
        error.context.setdefault("state", self.descriptor.name)
        if self._context.key is not None:
            error.context.setdefault("key", self._context.key)
        return error

    def _encoded(self, value: Any) -> bytes:
        """A value checked, encoded and stamped."""
        try:
            self._check(value)
            data = self._encode(value)
        except HoldfastError as error:
            raise self._named(error) from None
        if len(data) > self._max_value:
            raise self.too_large(len(data))
        return data if self._expiry is None else self._expiry.stamp() + data

    def too_large(self, size: int) -> HoldfastError:
        return self._named(InvalidRequest("a value is larger than the limit", found=size, expected=self._max_value,
                                          hint="store it in parts, or raise max_value_bytes"))

    def _payload(self, data: bytes) -> bytes:
        return data if self._expiry is None else data[TIME_WIDTH:]

    def _is_full(self) -> bool:
        return len(self._dirty) >= self._limit or self._weight >= self._weight_limit

    def _grown(self) -> None:
        """After a write: make some room where too much is dirty. A pause of milliseconds, each time."""
        if self._is_full() and not (self._engine.is_settling_elsewhere() and len(self._dirty) < PATIENCE * self._limit
                                    and self._weight < PATIENCE * self._weight_limit):
            self._engine.evict(self)

    def _grown_much(self) -> None:
        """After a batch: make all the room that is needed."""
        while self._is_full():
            self._engine.evict(self)

    # -- over all keys

    def stream_keys(self, namespace: Any = None) -> Iterator[Any]:
        wanted = encode_namespace(self.namespace_type, namespace)
        decode = self._context.key_type.decode_key_from
        for prefix in self._live_prefixes():
            key, end = decode(prefix, 4)
            if prefix[end:] == wanted:
                yield key

    def namespaces(self) -> Iterator[Any]:
        head = self._keys[self._context._token][:-1]
        for prefix in list(self._live_prefixes(head)):
            yield decode_namespace(self.namespace_type, prefix, len(head))[0]

    def _live_prefixes(self, head: bytes | None = None) -> Iterator[bytes]:
        """Each `key group | state id | key | namespace` that has a live entry, once; all, or those with a head."""
        raise NotImplementedError

    def _stored_rows(self, head: bytes | None, *, keys_only: bool = False) -> Iterator[Any]:
        """Rows of this state in RocksDB: of all key groups, or those whose key has a head."""
        parts = self._engine.parts
        heads = [head] if head is not None else [group.to_bytes(2, "big") + self.state_id for group in parts.groups()]
        for begin in heads:
            yield from parts.scan(begin, after(begin), keys_only=keys_only)

    def clear_many(self, keys: pa.Array) -> None:
        for prefix in self._prefixes(keys):
            self._clear(prefix)
        self._grown_much()

    def clear(self) -> None:
        self._clear(self._prefix())
        self._grown()

    def _clear(self, prefix: bytes) -> None:
        raise NotImplementedError

    def _merge(self, target: bytes, sources: list[bytes]) -> None:
        raise NotImplementedError

    def merge_namespaces(self, target: Any, sources: Iterable[Any]) -> None:
        into = self._prefix_in(target)
        prefixes = dict.fromkeys(self._prefix_in(source) for source in sources)
        self._merge(into, [prefix for prefix in prefixes if prefix != into])
        self._grown()
