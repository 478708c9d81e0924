"""What all states of a keyed backend share: the current key, its encoding, and the time that TTL counts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

from statebackend.clock import Clock
from statebackend.entries import DEFAULT_NAMESPACE, NAMED_NAMESPACE
from statebackend.errors import InvalidRequest
from statebackend.keygroups import KeyGroupRange, key_groups_of, key_hasher
from statebackend.types import StateType

KEY_CACHE = 65_536
MIN_WATERMARK = -(2**63)
_CACHED_TYPES = (int, str, bytes)


class _NoType:
    """No key has this type: it switches the key cache off."""


class _NoKey:
    """The current key before one is set: any use of it fails, at no cost to uses that have one."""

    __slots__ = ()

    def __hash__(self) -> int:
        raise no_key()

    def __getitem__(self, _index: Any) -> Any:
        raise no_key()


NO_KEY: Any = _NoKey()


class KeyContext:
    """The current key as `key group | key | default namespace`, encoded once, remembered for the keys seen lately."""

    __slots__ = ("_cache", "_check", "_exact", "_hash", "_key", "_short", "clock", "key_groups", "key_type",
                 "max_parallelism", "watermark")

    def __init__(self, key_type: StateType, max_parallelism: int, key_groups: KeyGroupRange, clock: Clock) -> None:
        self.key_type = key_type
        self.max_parallelism = max_parallelism
        self.key_groups = key_groups
        self.clock = clock
        self.watermark = MIN_WATERMARK
        self._key: Any = None
        self._short: bytes = NO_KEY
        self._hash = key_hasher(key_type)
        self._check = key_type.checker()
        # Equal keys of different types (1, True, 1.0) must not meet in the cache, so only exact scalar types use it.
        exact = key_type.python_type
        self._exact: type = exact if exact in _CACHED_TYPES and not key_type.nullable else _NoType
        self._cache: dict[Any, bytes] = {}

    def set_key(self, key: Any) -> None:
        if type(key) is self._exact:
            short = self._cache.get(key)
            if short is not None:
                self._key, self._short = key, short
                return
        short = self.encode(key)
        if type(key) is self._exact:
            if len(self._cache) >= KEY_CACHE:
                self._cache = {}
            self._cache[key] = short
        self._key, self._short = key, short

    def encode(self, key: Any) -> bytes:
        """`key group | key | default namespace` of a key that is checked here."""
        if key is None:
            raise InvalidRequest("a key must not be None", expected=str(self.key_type))
        self._check(key)
        group = self._hash(key) % self.max_parallelism
        groups = self.key_groups
        if not groups.first <= group <= groups.last:
            raise InvalidRequest("this key belongs to a key group that is not held here", key=key, found=group,
                                 expected=f"{groups.first}..{groups.last}")
        return group.to_bytes(2, "big") + self.key_type.encode_key(key) + DEFAULT_NAMESPACE

    def decode(self, short: bytes) -> tuple[Any, int]:
        """The key in `key group | key | ...`, and the offset of what follows it."""
        return self.key_type.decode_key_from(short, 2)

    @property
    def key(self) -> Any:
        return None if self._short is NO_KEY else self._key

    @property
    def short(self) -> bytes:
        if self._short is NO_KEY:
            raise no_key()
        return self._short

    def shorts(self, keys: pa.Array, namespace: bytes | None = None) -> list[bytes]:
        """`key group | key | namespace` of each row of a column of keys."""
        keys = self.conform(keys)
        groups = self.groups_of(keys)
        return encode_shorts(self.key_type, keys, groups, namespace or DEFAULT_NAMESPACE)

    def conform(self, keys: Any) -> pa.Array:
        array = self.key_type.conform(keys)
        if array.null_count:
            raise InvalidRequest("a column of keys must not hold nulls", row=int(np.flatnonzero(
                array.is_null().to_numpy(zero_copy_only=False))[0]))
        return array

    def groups_of(self, keys: pa.Array) -> np.ndarray[Any, Any]:
        groups = np.asarray(key_groups_of(keys, self.max_parallelism, self.key_type))
        held = self.key_groups
        if len(groups) and (int(groups.min()) < held.first or int(groups.max()) > held.last):
            wrong = int(np.flatnonzero((groups < held.first) | (groups > held.last))[0])
            raise InvalidRequest("a key of the batch belongs to a key group that is not held here", row=wrong,
                                 key=keys[wrong].as_py(), found=int(groups[wrong]),
                                 expected=f"{held.first}..{held.last}")
        return groups


def encode_shorts(key_type: StateType, keys: pa.Array, groups: np.ndarray[Any, Any], namespace: bytes) -> list[bytes]:
    """Short keys of a column; without a Python object per part of a key where the key has a fixed width."""
    encoded = key_type.encode_key_array(keys)
    count, width = len(keys), key_type.fixed_key_width
    if count == 0:
        return []
    if width is None:
        prefixes = [group.to_bytes(2, "big") for group in range(int(groups.max()) + 1)]
        return [prefixes[group] + key + namespace for group, key in zip(groups.tolist(), bytes_of(encoded))]
    return [bytes(row) for row in short_matrix(encoded, groups, width, namespace).view(
        f"V{2 + width + len(namespace)}").ravel().tolist()]


def short_matrix(encoded: pa.Array, groups: np.ndarray[Any, Any], width: int, namespace: bytes) -> np.ndarray[Any, Any]:
    """An (n, 2 + width + namespace) byte matrix of short keys."""
    count = len(encoded)
    offsets = np.frombuffer(encoded.buffers()[1], np.int32, count + 1, encoded.offset * 4)
    data = np.frombuffer(encoded.buffers()[2], np.uint8, count * width, int(offsets[0])).reshape(count, width)
    rows = np.empty((count, 2 + width + len(namespace)), np.uint8)
    rows[:, :2] = groups.astype(">u2").view(np.uint8).reshape(count, 2)
    rows[:, 2:2 + width] = data
    rows[:, 2 + width:] = np.frombuffer(namespace, np.uint8)
    return rows


def bytes_of(array: pa.Array) -> list[bytes]:
    """The rows of a binary array without nulls as bytes: several times faster than `to_pylist`."""
    count = len(array)
    if count == 0:
        return []
    offsets = np.frombuffer(array.buffers()[1], np.int32, count + 1, array.offset * 4)
    begin, end = int(offsets[0]), int(offsets[-1])
    if end == begin:
        return [b""] * count
    data = array.buffers()[2][begin:end].to_pybytes()
    bounds = (offsets - begin).tolist()
    return [data[low:high] for low, high in zip(bounds, bounds[1:])]


def optional_bytes_of(array: pa.Array) -> list[bytes | None]:
    """The rows of a binary array, None where null."""
    rows: list[bytes | None] = list(bytes_of(array))
    if array.null_count:
        for index in np.flatnonzero(array.is_null().to_numpy(zero_copy_only=False)).tolist():
            rows[index] = None
    return rows


def encode_namespace(namespace_type: StateType | None, namespace: Any) -> bytes:
    """The namespace part of an entry key; None is the default namespace."""
    if namespace is None:
        return DEFAULT_NAMESPACE
    if namespace_type is None:
        raise InvalidRequest("this state was registered without a namespace type", found=namespace,
                             hint="pass namespace_type= when registering the state")
    namespace_type.check(namespace)
    return NAMED_NAMESPACE + namespace_type.encode_key(namespace)


def decode_namespace(namespace_type: StateType | None, data: bytes, offset: int) -> tuple[Any, int]:
    """The namespace that starts at `offset`, and the offset after it."""
    if data[offset:offset + 1] == DEFAULT_NAMESPACE:
        return None, offset + 1
    if namespace_type is None:
        return data[offset:], len(data)
    return namespace_type.decode_key_from(data, offset + 1)


def no_key() -> InvalidRequest:
    return InvalidRequest("there is no current key", hint="call set_current_key first, or use a batch call")
