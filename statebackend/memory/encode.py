"""From slots and stored values to entries: vectorised over chunks, one function per kind of state."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from statebackend.codecs.arrays import binary_rows, joined, rows_of
from statebackend.entries import DEFAULT_NAMESPACE, NAMED_NAMESPACE, OP_DELETE, OP_DELETE_PREFIX, OP_PUT
from statebackend.keygroups import key_groups_of
from statebackend.memory.forms import KeyForm, encoder
from statebackend.memory.runs import Rows
from statebackend.memory.stamped import expiry_of, is_stamped, value_of
from statebackend.schema import StateSchema

if TYPE_CHECKING:
    from statebackend.memory.map_state import MapPart

CHUNK_ROWS = 8192
_SIGN = np.uint64(1 << 63)


def fixed_bytes(data: bytes, rows: int) -> pa.BinaryArray:
    """The same bytes in every row."""
    if not data:
        return pa.array([data] * rows, pa.binary())
    return binary_rows(np.broadcast_to(np.frombuffer(data, np.uint8), (rows, len(data))))


def times_of(milliseconds: Any) -> pa.BinaryArray:
    """Eight bytes a row that sort like the signed numbers."""
    numbers = np.asarray(milliseconds, np.int64).view(np.uint64) ^ _SIGN
    return binary_rows(numbers.byteswap().view(np.uint8).reshape(len(numbers), 8))


class EntryEncoder:
    """Encodes the entries of one state. Slots are keys, or (key, namespace) pairs where `named`."""

    def __init__(self, schema: StateSchema, form: KeyForm, max_parallelism: int, namespace_form: KeyForm | None) -> None:
        self._id = np.frombuffer(schema.state_id.to_bytes(2, "big"), np.uint8)
        self._form = form
        self.key_type = form.kind
        self.max_parallelism = max_parallelism
        self._namespace_form = namespace_form
        self._ttl = schema.ttl is not None
        self._stamped = is_stamped(schema)
        self._encode = encoder(schema.value_type)
        self._suffix = KeyForm(schema.map_key_type) if schema.map_key_type is not None else None

    # -- keys

    def _hashed(self, keys: list[Any]) -> tuple[Any, pa.BinaryArray]:
        """Key groups and encodings."""
        column, encoded = self._form.column_and_encoded(keys)
        return key_groups_of(column, self.max_parallelism, self._form.kind).astype(np.uint16), encoded

    def _namespaces(self, namespaces: Iterable[Any]) -> pa.BinaryArray:
        form = self._namespace_form
        return pa.array([DEFAULT_NAMESPACE if held is None or form is None else NAMED_NAMESPACE + form.encode(held)
                         for held in namespaces], pa.binary())

    def _prefixes(self, groups: Any) -> Any:
        rows = np.empty((len(groups), 4), np.uint8)
        rows[:, :2] = groups.astype(">u2").view(np.uint8).reshape(-1, 2)
        rows[:, 2:] = self._id
        return rows

    def slot_keys(self, slots: list[Any]) -> tuple[Any, pa.BinaryArray]:
        """Key groups, and entry keys up to the namespace."""
        keys = [slot[0] for slot in slots] if self._namespace_form is not None else slots
        return self.entry_keys(keys, None if self._namespace_form is None else [slot[1] for slot in slots])

    def entry_keys(self, keys: list[Any], namespaces: list[Any] | None) -> tuple[Any, pa.BinaryArray]:
        groups, encoded = self._hashed(keys)
        return groups, self.with_prefix(groups, encoded, namespaces)

    def with_prefix(self, groups: Any, encoded: pa.BinaryArray, namespaces: list[Any] | None = None) -> pa.BinaryArray:
        prefix, width = self._prefixes(groups), self._form.kind.fixed_key_width
        if namespaces is not None:
            return joined([binary_rows(prefix), encoded, self._namespaces(namespaces)], len(groups))
        if width is None:
            return joined([binary_rows(prefix), encoded, fixed_bytes(DEFAULT_NAMESPACE, len(groups))], len(groups))
        rows = np.zeros((len(groups), 4 + width + 1), np.uint8)
        rows[:, :4] = prefix
        rows[:, 4:4 + width] = rows_of(encoded, width, "key")
        return binary_rows(rows)

    # -- values

    def values(self, stored: list[Any]) -> pa.BinaryArray:
        if not self._ttl:
            return self._encode(stored)
        if self._stamped:
            return joined([times_of(list(map(expiry_of, stored))), self._encode(list(map(value_of, stored)))], len(stored))
        return joined([times_of([pair[1] for pair in stored]), self._encode([pair[0] for pair in stored])], len(stored))

    # -- rows

    def puts(self, slots: list[Any], stored: list[Any]) -> Rows:
        """Value, reducing and aggregating entries."""
        groups, keys = self.slot_keys(slots)
        return Rows(groups, keys, self.values(stored), np.full(len(slots), OP_PUT, np.uint8))

    def deletes(self, slots: list[Any], op: int = OP_DELETE) -> Rows:
        groups, keys = self.slot_keys(slots)
        return Rows(groups, keys, pa.nulls(len(slots), pa.binary()), np.full(len(slots), op, np.uint8))

    def suffixed(self, slots: list[Any], counts: list[int], suffixes: pa.BinaryArray, values: pa.BinaryArray | None,
                 op: int = OP_PUT) -> Rows:
        """Entries below slots: `counts[i]` of them for `slots[i]`."""
        groups, keys = self.slot_keys(slots)
        index = np.repeat(np.arange(len(slots)), counts)
        rows = len(index)
        keys = joined([keys.take(pa.array(index)), suffixes], rows)
        values = values if values is not None else pa.nulls(rows, pa.binary())
        return Rows(groups[index], keys, values, np.full(rows, op, np.uint8))

    def lists(self, slots: list[Any], stored: list[list[Any]], *, replace: bool) -> Iterator[Rows]:
        """List elements, numbered from 0; `replace` first removes what was stored."""
        if replace and slots:
            yield self.deletes(slots, OP_DELETE_PREFIX)
        for slot_part, list_part in _bounded(slots, stored):
            counts = [len(elements) for elements in list_part]
            flat = [element for elements in list_part for element in elements]
            numbers = np.concatenate([np.arange(count) for count in counts]) if counts else np.zeros(0)
            sequence = numbers.astype(">u8").view(np.uint8).reshape(-1, 8)
            yield self.suffixed(slot_part, counts, binary_rows(sequence), self.values(flat))

    def maps(self, slots: list[Any], stored: list[dict[Any, Any]]) -> Iterator[Rows]:
        """All entries of whole maps."""
        assert self._suffix is not None
        for slot_part, map_part in _bounded(slots, stored):
            counts = [len(entries) for entries in map_part]
            keys = [key for entries in map_part for key in entries]
            flat = [value for entries in map_part for value in entries.values()]
            yield self.suffixed(slot_part, counts, self._suffix.encoded(keys), self.values(flat))

    def map_changes(self, slots: list[Any], parts: list[MapPart]) -> Iterator[Rows]:
        """What changed in maps: whole ones are replaced, in the others single entries are."""
        assert self._suffix is not None
        whole = [slot for slot, part in zip(slots, parts) if part.whole]
        if whole:
            yield self.deletes(whole, OP_DELETE_PREFIX)
        gone = [(slot, part.removed) for slot, part in zip(slots, parts) if part.removed and not part.whole]
        if gone:
            keys = [key for _, removed in gone for key in removed]
            yield self.suffixed([slot for slot, _ in gone], [len(removed) for _, removed in gone],
                                self._suffix.encoded(keys), None, OP_DELETE)
        yield from self.maps(slots, parts)  # type: ignore[arg-type]

    def timers(self, timers: list[tuple[int, Any, Any]], op: int) -> Rows:
        """Timer entries, whose timestamp stands before the key."""
        keys = [timer[1] for timer in timers]
        groups, encoded = self._hashed(keys)
        parts = [binary_rows(self._prefixes(groups)), times_of([timer[0] for timer in timers]),
                 encoded, self._namespaces([timer[2] for timer in timers])]
        values = fixed_bytes(b"", len(timers)) if op == OP_PUT else pa.nulls(len(timers), pa.binary())
        return Rows(groups, joined(parts, len(timers)), values, np.full(len(timers), op, np.uint8))


def _bounded(slots: list[Any], collections: list[Any]) -> Iterator[tuple[list[Any], list[Any]]]:
    """Cut slots and their lists or maps so that a part has a bounded number of entries.

    A single collection larger than the bound is cut too, unless it is a list, whose numbering must go on.
    """
    begin = rows = 0
    for index, collection in enumerate(collections):
        if rows and rows + len(collection) > CHUNK_ROWS:
            yield slots[begin:index], collections[begin:index]
            begin, rows = index, 0
        rows += len(collection)
        if isinstance(collection, dict) and len(collection) > CHUNK_ROWS:
            yield from (([slots[index]], [part]) for part in _map_parts(collection))
            begin, rows = index + 1, 0
    if begin < len(slots) and rows:
        yield slots[begin:], collections[begin:]


def _map_parts(entries: dict[Any, Any]) -> Iterator[dict[Any, Any]]:
    items = iter(entries.items())
    while part := dict(islice(items, CHUNK_ROWS)):
        yield part


Encode = Callable[[list[Any], list[Any]], Iterable[Rows]]
