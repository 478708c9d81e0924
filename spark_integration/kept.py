"""Value states of the keys of a chunk of rows, held in lists: read in one go, written back in one go.

A per-record function asks for the state of one key at a time; a batch knows all its keys at the start. Each key of a
chunk has a slot, and a value state of the function is a list by slot: what `process` reads and writes while the chunk
lasts is an item of that list. The backend sees one read and one write of many keys, with what changed. Only values
that can't be changed in place are held so, and only where reading a value early is no act of its own (a TTL that
counts reads).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from spark_integration.keys import key_array
from spark_integration.rows import shorten
from statebackend.backend import KeyedBackend
from statebackend.codecs.base import StateType
from statebackend.codecs.records import TupleType
from statebackend.codecs.scalars import FloatType
from statebackend.descriptors import StateDescriptor, StateKind
from statebackend.errors import HoldfastError, InvalidRequest
from statebackend.state import ValueState

ONE_BY_ONE = 32
"""Reads of a chunk that are served singly; a state that is asked for more often is read for all keys at once."""
_UNREAD: Any = object()
_ARROW_ERRORS = (pa.ArrowException, TypeError, ValueError, OverflowError)


class Chunk:
    """The rows of a chunk by key: `codes[row]` is the slot of the row's key, `keys` the key of each slot."""

    def __init__(self, rows: pa.Table, names: Sequence[str], key_type: StateType, records: Sequence[str] = ()) -> None:
        """`records` are the columns that a function sees, and errors show."""
        codes, first = _codes(rows, names)
        self.codes: list[int] = codes.tolist()
        self.count = len(first)
        self._rows, self._records = rows, list(records)
        taken = rows.select(list(names)).take(pa.array(first))
        self.keys: pa.Array = key_array(taken, names, key_type)

    def record(self, slot: int, *, last: bool) -> dict[str, Any] | None:
        """The first or last record of a key. It is searched for: only errors ask."""
        if not self._records:
            return None
        row = len(self.codes) - 1 - self.codes[::-1].index(slot) if last else self.codes.index(slot)
        return self._rows.slice(row, 1).select(self._records).to_pylist()[0]  # type: ignore[no-any-return]


def _codes(rows: pa.Table, names: Sequence[str]) -> tuple[Any, Any]:
    """The slot of each row, and the first row of each slot; slots are numbered as keys first appear."""
    combined: Any = None
    for name in names:
        encoded = _whole(rows.column(name)).dictionary_encode()
        indices = encoded.indices.to_numpy(zero_copy_only=False).astype(np.int64)
        combined = indices if combined is None else combined * len(encoded.dictionary) + indices
        if len(names) > 1:  # numbered anew after each column, so that the product can't overflow
            combined = pa.array(combined).dictionary_encode().indices.to_numpy(zero_copy_only=False).astype(np.int64)
    first = np.zeros(int(combined.max()) + 1 if len(combined) else 0, np.int64)
    first[combined[::-1]] = np.arange(len(combined) - 1, -1, -1)
    return combined, first


def _whole(column: pa.ChunkedArray) -> pa.Array:
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()


def can_keep_keys(key_type: StateType) -> bool:
    """Whether equal columns mean equal keys: not so for floats, where 0.0 is -0.0 and every NaN the same key."""
    if isinstance(key_type, TupleType):
        return all(can_keep_keys(one) for one in key_type.types)
    return not isinstance(key_type, FloatType)


def can_keep(descriptor: StateDescriptor) -> bool:
    """Whether a state may be read ahead and written late: a plain value state."""
    kind = descriptor.value_type
    return descriptor.kind is StateKind.VALUE and kind.immutable and not kind.nullable and \
        kind.python_type is not None and (descriptor.ttl is None or not descriptor.ttl.updates_on_read)


class Cursor:
    """Whose turn it is: the slot of the current key."""

    __slots__ = ("slot",)

    def __init__(self) -> None:
        self.slot = 0


class KeptValue(ValueState[Any]):
    """A value state as a function sees it. Between chunks (timers, broadcasts) it is the backend's state itself."""

    __slots__ = ("_changed", "_chunk", "_cursor", "_default", "_exact", "_keys", "_reads", "_state", "_values", "descriptor")

    def __init__(self, state: ValueState[Any], cursor: Cursor) -> None:
        self._state, self.descriptor, self._cursor = state, state.descriptor, cursor
        self._exact = state.descriptor.value_type.python_type
        self._default = state.descriptor.default
        self._values: list[Any] = []
        self._changed = bytearray()
        self._chunk: Chunk | None = None
        self._keys: pa.Array | None = None
        self._reads = 0

    # -- chunks

    def begin(self, chunk: Chunk) -> None:
        self._chunk, self._keys, self._reads = chunk, chunk.keys, 0
        self._values, self._changed = [_UNREAD] * chunk.count, bytearray(chunk.count)

    def end(self) -> None:
        """Write what changed, and serve single calls from the backend again."""
        self.store(ended=True)
        self._chunk, self._keys, self._values, self._changed = None, None, [], bytearray()

    def store(self, ended: bool = False) -> None:
        """Write what changed so far; what is held stays good."""
        if self._keys is None:
            return
        which = np.flatnonzero(np.frombuffer(self._changed, np.uint8))
        if not len(which):
            return
        self._changed = bytearray(len(self._changed))
        values, keys = self._values, self._keys
        chosen = values if len(which) == len(values) else [values[index] for index in which.tolist()]
        named = keys if len(which) == len(values) else keys.take(pa.array(which))
        try:
            self._state.put_values(named, chosen)
        except (HoldfastError, *_ARROW_ERRORS) as error:
            self._refuse_misfit(which.tolist(), ended, error)
            raise

    def _refuse_misfit(self, slots: list[int], ended: bool, cause: Exception) -> None:
        """Name the first value that does not fit, its key, and a record of that key; nothing where all of them fit.

        The record is the key's last one of the chunk; before the chunk has ended the first, which surely was processed.
        """
        assert self._chunk is not None
        check = self.descriptor.value_type.check
        for slot in slots:
            value = self._values[slot]
            try:
                if value is not None:
                    check(value)
            except InvalidRequest as wrong:
                record = self._chunk.record(slot, last=ended)
                context = {**wrong.context, "state": self.descriptor.name, "key": self._chunk.keys[slot].as_py(),
                           "record": shorten(record) if record is not None else None}
                raise InvalidRequest(wrong.message, hint=wrong.hint, **context) from cause

    def _read(self, slot: int) -> Any:
        """The value of a slot that was not asked for yet."""
        held = self._values
        self._reads += 1
        if self._reads <= ONE_BY_ONE:
            value = held[slot] = self._state.value()
            return value
        stored = self._state.get_values(self._keys)
        self._values = [new if value is _UNREAD else value for value, new in zip(held, stored)]
        return self._values[slot]

    # -- what a function calls

    def value(self) -> Any:
        try:
            value = self._values[self._cursor.slot]
        except IndexError:
            return self._state.value()
        if value is _UNREAD:
            value = self._read(self._cursor.slot)
        return self._default if value is None else value

    def update(self, value: Any) -> None:
        if type(value) is self._exact:
            slot = self._cursor.slot
            try:
                self._values[slot] = value
            except IndexError:
                self._state.update(value)
                return
            self._changed[slot] = 1
        else:
            self._update_other(value)

    def _update_other(self, value: Any) -> None:
        """None clears; a value of another class than declared is checked, and made what it is stored as, at once."""
        if self._keys is None or value is not None:
            self._state.update(value)
        if self._keys is not None:
            slot = self._cursor.slot
            self._values[slot] = None if value is None else self._state.value()
            self._changed[slot] = 1

    def clear(self) -> None:
        self._update_other(None)

    # -- the rest goes to the backend, which then must know all

    def _forget(self) -> None:
        if self._keys is not None:
            self.store()
            self._values = [_UNREAD] * len(self._values)

    def value_many(self, keys: pa.Array) -> pa.Array:
        self.store()
        return self._state.value_many(keys)

    def update_many(self, keys: pa.Array, values: pa.Array) -> None:
        self._forget()
        self._state.update_many(keys, values)

    def clear_many(self, keys: pa.Array) -> None:
        self._forget()
        self._state.clear_many(keys)

    def set_current_namespace(self, namespace: Any) -> None:
        self._state.set_current_namespace(namespace)

    def merge_namespaces(self, target: Any, sources: Iterable[Any]) -> None:
        self._state.merge_namespaces(target, sources)

    def stream_keys(self, namespace: Any = None) -> Iterator[Any]:
        self.store()
        return self._state.stream_keys(namespace)

    def namespaces(self) -> Iterator[Any]:
        self.store()
        return self._state.namespaces()


class Kept:
    """The kept states of one task."""

    def __init__(self, keyed: KeyedBackend) -> None:
        self._keyed = keyed
        self.cursor = Cursor()
        self._states: dict[str, KeptValue] = {}

    def __bool__(self) -> bool:
        return bool(self._states)

    def state(self, descriptor: StateDescriptor) -> KeptValue:
        backing = self._keyed.state(descriptor)
        assert isinstance(backing, ValueState)
        return self._states.setdefault(descriptor.name, KeptValue(backing, self.cursor))

    def begin(self, chunk: Chunk) -> None:
        for state in self._states.values():
            state.begin(chunk)

    def end(self) -> None:
        for state in self._states.values():
            state.end()
