"""The contract of the five keyed kinds, per record and per Arrow batch.

Per-record calls work on the backend's current key and the state's current namespace. Batch calls name their keys
(any Arrow array or chunked array of the key type) and work in the current namespace too; rows with a null key are
refused. No call is thread-safe: a keyed backend belongs to one thread, and only snapshots leave it.
A value handed in or out is the caller's: changing it afterwards never changes the state.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Generic, TypeVar

import pyarrow as pa

from statebackend.descriptors import StateDescriptor

K = TypeVar("K")
V = TypeVar("V")
IN = TypeVar("IN")
OUT = TypeVar("OUT")


class State(ABC):
    """What all kinds share."""

    descriptor: StateDescriptor

    @abstractmethod
    def clear(self) -> None:
        """Remove the state of the current key and namespace."""

    @abstractmethod
    def clear_many(self, keys: pa.Array) -> None:
        """Remove the state of each key in the current namespace."""

    @abstractmethod
    def set_current_namespace(self, namespace: Any) -> None:
        """The namespace of the following calls; None is the default one. Must fit the registered namespace type."""

    @abstractmethod
    def merge_namespaces(self, target: Any, sources: Iterable[Any]) -> None:
        """Move the current key's state of `sources` into `target`.

        Lists are concatenated (target first), maps united (later sources win), reducing and aggregating states
        folded. Value states have no merge and refuse the call.
        """

    @abstractmethod
    def stream_keys(self, namespace: Any = None) -> Iterator[Any]:
        """Every key that has an entry in the namespace, each once, in no fixed order; expired entries not counted.

        The state may be changed while iterating; whether such changes are seen is not defined.
        """

    @abstractmethod
    def namespaces(self) -> Iterator[Any]:
        """The namespaces in which the current key has an entry."""


class ValueState(State, Generic[V]):
    @abstractmethod
    def value(self) -> V | None:
        """The value, or the descriptor's default if unset or expired."""

    @abstractmethod
    def update(self, value: V | None) -> None:
        """Set the value; None clears, unless the type is Optional, where it is a value."""

    @abstractmethod
    def value_many(self, keys: pa.Array) -> pa.Array:
        """The value of each key, in order; defaults filled in, null where there is none."""

    @abstractmethod
    def update_many(self, keys: pa.Array, values: pa.Array) -> None:
        """Set the value of each key; of repeated keys the last wins; a null clears unless the type is Optional."""

    def get_values(self, keys: pa.Array) -> list[V | None]:
        """As `value_many`, as Python values; None or the default where there is none."""
        return self.descriptor.value_type.from_arrow(self.value_many(keys))

    def put_values(self, keys: pa.Array, values: list[V | None]) -> None:
        """As `update_many` with Python values, for a type that is not Optional: None clears."""
        self.update_many(keys, self.descriptor.value_type.to_arrow(values))


class ListState(State, Generic[V]):
    @abstractmethod
    def get(self) -> list[V]:
        """The elements in the order they were added; empty if unset."""

    @abstractmethod
    def add(self, value: V) -> None: ...

    @abstractmethod
    def add_all(self, values: Iterable[V]) -> None: ...

    @abstractmethod
    def update(self, values: Iterable[V]) -> None:
        """Replace the list; an empty one is the same as `clear`."""

    @abstractmethod
    def get_many(self, keys: pa.Array) -> pa.Array:
        """A list array: the elements of each key, empty where unset."""

    @abstractmethod
    def add_many(self, keys: pa.Array, values: pa.Array) -> None:
        """Append values[i] to the list of keys[i], in order."""

    @abstractmethod
    def update_many(self, keys: pa.Array, values: pa.Array) -> None:
        """Replace the list of each key by values[i], a list array."""


class MapState(State, Generic[K, V]):
    """Iteration is by map key, in order of the key codec, in every backend."""

    @abstractmethod
    def get(self, key: K) -> V | None: ...

    @abstractmethod
    def put(self, key: K, value: V) -> None: ...

    @abstractmethod
    def put_all(self, entries: Mapping[K, V] | Iterable[tuple[K, V]]) -> None: ...

    @abstractmethod
    def remove(self, key: K) -> None: ...

    @abstractmethod
    def contains(self, key: K) -> bool: ...

    @abstractmethod
    def entries(self) -> Iterator[tuple[K, V]]: ...

    @abstractmethod
    def keys(self) -> Iterator[K]:
        """The map keys of the current key (the keys of the stream come from `stream_keys`)."""

    @abstractmethod
    def values(self) -> Iterator[V]: ...

    @abstractmethod
    def is_empty(self) -> bool: ...

    @abstractmethod
    def get_many(self, keys: pa.Array, map_keys: pa.Array) -> pa.Array:
        """The value under map_keys[i] of keys[i]; null where there is none."""

    @abstractmethod
    def put_many(self, keys: pa.Array, map_keys: pa.Array, values: pa.Array) -> None: ...

    @abstractmethod
    def remove_many(self, keys: pa.Array, map_keys: pa.Array) -> None: ...

    @abstractmethod
    def entries_many(self, keys: pa.Array) -> pa.Array:
        """A map array: the whole map of each key, empty where unset."""



class ReducingState(State, Generic[V]):
    @abstractmethod
    def add(self, value: V) -> None: ...

    @abstractmethod
    def get(self) -> V | None: ...

    @abstractmethod
    def add_many(self, keys: pa.Array, values: pa.Array) -> None:
        """Fold values[i] into keys[i]; built-in functions do it without a Python object per row."""

    @abstractmethod
    def get_many(self, keys: pa.Array) -> pa.Array: ...


class AggregatingState(State, Generic[IN, OUT]):
    @abstractmethod
    def add(self, value: IN) -> None: ...

    @abstractmethod
    def get(self) -> OUT | None: ...

    @abstractmethod
    def add_many(self, keys: pa.Array, values: pa.Array) -> None: ...

    @abstractmethod
    def get_many(self, keys: pa.Array) -> pa.Array:
        """The result of each key; null where nothing was added."""
