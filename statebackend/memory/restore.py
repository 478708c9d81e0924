"""Restored state: kept as Arrow entries until the job registers it, then checked, migrated and decoded by columns."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from statebackend.backend import KeyedHandle
from statebackend.codecs.arrays import joined, rows_of
from statebackend.entries import merge_entries
from statebackend.errors import CorruptData
from statebackend.files import SnapshotSource
from statebackend.formats import handle_layers, require_restorable
from statebackend.keygroups import KeyGroupRange
from statebackend.memory.encode import fixed_bytes
from statebackend.memory.forms import KeyForm, decoder
from statebackend.memory.stamped import is_stamped, join
from statebackend.schema import StateSchema, column_migrator_of, is_identity, migrator, united_schema
from statebackend.types import StateType

_END = 2**31 - 1
_SIGN = np.uint64(1 << 63)
Batches = list[pa.RecordBatch]


class RawState:
    """A restored state that nobody has registered yet: per handle, its layers of entries, oldest first.

    Handles may have stored it under several schemas; all is held under the one that they can be migrated to.
    """

    def __init__(self, schema: StateSchema) -> None:
        self.schema = schema
        self._handles: list[list[Batches]] = []

    def expect(self, schema: StateSchema) -> None:
        """A handle has the state under this schema. Comes for every handle before the entries of any."""
        self.schema = united_schema(self.schema, schema)

    def add(self, schema: StateSchema, layers: list[Batches], now_ms: int) -> None:
        if not any(layers):
            return
        if not is_identity(schema, self.schema):
            migrate = column_migrator_of(schema, self.schema, now_ms)
            layers = [[pa.RecordBatch.from_arrays([batch.column(0), migrate(batch.column(1)), batch.column(2)],
                                                  schema=batch.schema) for batch in layer] for layer in layers]
        self._handles.append(layers)

    def entries(self) -> Iterator[pa.RecordBatch]:
        """The final entries: puts only; those of one key group stand together, within each handle."""
        for layers in self._handles:
            used = [layer for layer in layers if layer]
            if len(used) == 1 and _puts_only(used[0]) and self.schema.kind != "list":
                yield from used[0]
            else:
                yield from merge_entries(used)

    def count(self) -> int:
        self.settle()
        return sum(batch.num_rows for layers in self._handles for layer in layers for batch in layer)

    def settle(self) -> None:
        """Replay the layers once, so that later readers find one."""
        for layers in self._handles:
            if len(layers) > 1 or not _puts_only(layers[0]):
                layers[:] = [list(merge_entries(layers))]


def _puts_only(batches: Batches) -> bool:
    return all(not batch.column(2).to_numpy().any() for batch in batches)


def larger_batches(batches: Iterable[pa.RecordBatch], rows: int = 65_536) -> Iterator[pa.RecordBatch]:
    """The same entries in fewer batches: decoding has a price per batch."""
    waiting: Batches = []
    held = 0
    for batch in batches:
        waiting.append(batch)
        held += batch.num_rows
        if held >= rows:
            yield pa.concat_batches(waiting)
            waiting, held = [], 0
    if waiting:
        yield pa.concat_batches(waiting)


def read_handles(handles: Sequence[KeyedHandle], source: SnapshotSource, key_type: StateType, max_parallelism: int,
                 key_groups: KeyGroupRange, uid: str, take_id: Callable[[str], int],
                 now_of: Callable[[StateSchema], int]) -> dict[str, RawState]:
    """All entries of the range, by state name, under the state ids of this backend."""
    states: dict[str, RawState] = {}
    require_restorable(handles, key_type, max_parallelism, uid)
    for handle in handles:
        for schema in handle.schemas:
            if schema.name not in states:
                states[schema.name] = RawState(_with_id(schema, take_id(schema.name)))
            if handle.key_groups.intersect(key_groups) is not None:
                states[schema.name].expect(schema)
    for handle in handles:
        overlap = handle.key_groups.intersect(key_groups)
        if overlap is not None:
            _read_handle(handle, source, overlap, states, now_of)
    return states


def _read_handle(handle: KeyedHandle, source: SnapshotSource, key_groups: KeyGroupRange,
                 states: dict[str, RawState], now_of: Callable[[StateSchema], int]) -> None:
    held = {schema.state_id: schema for schema in handle.schemas}
    layers = handle_layers(handle, source, key_groups)
    by_state: dict[int, list[Batches]] = {state_id: [[] for _ in layers] for state_id in held}
    for index, layer in enumerate(layers):
        for batch in layer:
            for state_id, part in _by_state(batch):
                if state_id not in held:
                    raise CorruptData("a snapshot has entries of a state that it does not describe", found=state_id)
                new_id = states[held[state_id].name].schema.state_id
                by_state[state_id][index].append(part if new_id == state_id else _renumbered(part, new_id))
    for state_id, schema in held.items():
        state = states[schema.name]
        state.add(schema, by_state[state_id], now_of(state.schema))


def _by_state(batch: pa.RecordBatch) -> Iterator[tuple[int, pa.RecordBatch]]:
    ids = _state_ids(batch.column(0))
    found = np.unique(ids)
    if len(found) == 1:
        yield int(found[0]), batch
        return
    for state_id in found:
        yield int(state_id), batch.filter(pa.array(ids == state_id))


def _state_ids(keys: pa.Array) -> Any:
    ids = pc.binary_slice(keys, 2, 4)
    return np.ascontiguousarray(rows_of(ids, 2, "entry key")).view(">u2").reshape(-1)


def _renumbered(batch: pa.RecordBatch, state_id: int) -> pa.RecordBatch:
    keys = batch.column(0)
    renamed = joined([pc.binary_slice(keys, 0, 2), fixed_bytes(state_id.to_bytes(2, "big"), len(keys)),
                      pc.binary_slice(keys, 4, _END)], len(keys))
    return pa.RecordBatch.from_arrays([renamed, batch.column(1), batch.column(2)], schema=batch.schema)


def _with_id(schema: StateSchema, state_id: int) -> StateSchema:
    return StateSchema(schema.name, state_id, schema.kind, schema.value_type, schema.map_key_type,
                       schema.namespace_type, schema.ttl, schema.function, schema.version)


class EntryDecoder:
    """Decodes the entries of one state into keys, namespaces, suffixes and stored values, column by column."""

    def __init__(self, old: StateSchema, new: StateSchema, form: KeyForm, namespace_form: KeyForm | None,
                 now_ms: int) -> None:
        self._old, self._new = old, new
        self._form = form
        self._namespace_form = namespace_form
        self._suffix_form = KeyForm(new.map_key_type) if new.map_key_type is not None else None
        self._decode = decoder(new.value_type)
        self._migrate = None if is_identity(old, new) else migrator(old, new, now_ms)

    def columns(self, batch: pa.RecordBatch) -> tuple[list[Any], list[Any] | None, list[Any] | None]:
        """Held keys, held namespaces (None: all default), held map keys or None."""
        tails = pc.binary_slice(batch.column(0), 8 + 4 if self._old.kind == "timer" else 4, _END)
        if self._old.kind == "list":
            tails = pc.binary_slice(tails, 0, -8)
        width = self._form.kind.fixed_key_width
        if width is not None:
            keys, rest = pc.binary_slice(tails, 0, width), pc.binary_slice(tails, width, _END)
            return (self._form.from_encoded(keys), *self._after_key(rest))
        if self._old.namespace_type is None and self._suffix_form is None:
            self._require_default(pc.binary_slice(tails, -1, _END))
            return self._form.from_encoded(pc.binary_slice(tails, 0, -1)), None, None
        return self._by_row(tails)

    def _after_key(self, rest: pa.BinaryArray) -> tuple[list[Any] | None, list[Any] | None]:
        if self._old.namespace_type is None:
            self._require_default(pc.binary_slice(rest, 0, 1))
            if self._suffix_form is None:
                return None, None
            return None, self._suffix_form.from_encoded(pc.binary_slice(rest, 1, _END))
        namespaces, suffixes = [], []
        for data in rest.to_pylist():
            namespace, end = self._namespace(data, 0)
            namespaces.append(namespace)
            suffixes.append(data[end:])
        return namespaces, self._held_suffixes(suffixes)

    def _held_suffixes(self, suffixes: list[bytes]) -> list[Any] | None:
        return None if self._suffix_form is None else self._suffix_form.from_encoded(pa.array(suffixes, pa.binary()))

    def _by_row(self, tails: pa.BinaryArray) -> tuple[list[Any], list[Any] | None, list[Any] | None]:
        kind, keys, namespaces, suffixes = self._form.kind, [], [], []
        for data in tails.to_pylist():
            _, end = kind.decode_key_from(data, 0)
            keys.append(data[:end])
            namespace, end = self._namespace(data, end)
            namespaces.append(namespace)
            suffixes.append(data[end:])
        named = None if self._old.namespace_type is None else namespaces
        return self._form.from_encoded(pa.array(keys, pa.binary())), named, self._held_suffixes(suffixes)

    def _namespace(self, data: bytes, offset: int) -> tuple[Any, int]:
        mark = data[offset:offset + 1]
        if mark == b"\x00":
            return None, offset + 1
        form = self._namespace_form
        if mark != b"\x01" or form is None:
            raise CorruptData("an entry key has no namespace where one must be", state=self._old.name,
                              found=data[:32].hex())
        value, end = form.kind.decode_key_from(data, offset + 1)
        return (value if form.direct else data[offset + 1:end]), end

    def _require_default(self, marks: pa.BinaryArray) -> None:
        if len(marks) and rows_of(marks, 1, "namespace").any():
            raise CorruptData("an entry key has a namespace where none may be", state=self._old.name)

    def stored(self, values: pa.BinaryArray) -> list[Any]:
        """The stored form of each value: itself, or (value, expires_at), as one number where that is the form."""
        if self._migrate is not None:
            migrate = self._migrate
            values = pa.array([migrate(value) for value in values.to_pylist()], pa.binary())
        if self._new.ttl is None:
            return self._decode(values)
        times = np.ascontiguousarray(rows_of(pc.binary_slice(values, 0, 8), 8, "expiry")).view(">u8").reshape(-1)
        expires = (times.astype(np.uint64) ^ _SIGN).view(np.int64).tolist()
        decoded = self._decode(pc.binary_slice(values, 8, _END))
        return join(decoded, expires) if is_stamped(self._new) else list(zip(decoded, expires))

    def times(self, batch: pa.RecordBatch) -> list[int]:
        """Timestamps of timer entries."""
        data = np.ascontiguousarray(rows_of(pc.binary_slice(batch.column(0), 4, 12), 8, "time")).view(">u8").reshape(-1)
        return (data.astype(np.uint64) ^ _SIGN).view(np.int64).tolist()  # type: ignore[no-any-return]

    def slots(self, keys: list[Any], namespaces: list[Any] | None) -> Iterable[Any]:
        if self._namespace_form is None:
            return keys
        return list(zip(keys, namespaces if namespaces is not None else [None] * len(keys)))
