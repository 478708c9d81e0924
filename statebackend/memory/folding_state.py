"""Reducing and aggregating state: values folded into one per key and namespace."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

from statebackend.descriptors import AggregatingStateDescriptor, ReducingStateDescriptor
from statebackend.errors import InvalidRequest
from statebackend.memory.batch_state import Batches, dtype_of, fold_into, identity_of, is_number
from statebackend.memory.forms import incoming
from statebackend.memory.layers import MISSING
from statebackend.memory.table_state import TableState
from statebackend.state import AggregatingState, ReducingState
from statebackend.ttl import NEVER
from statebackend.types import StateType


class _FoldingState(TableState):
    """An accumulator under each slot: a value, or (value, expires_at) with TTL. MISSING where nothing was added."""

    def _visible(self, slot: Any, *, reading: bool) -> Any:
        """The accumulator as a read or an addition sees it."""
        stored = self.delta[slot]
        expiry = self.expiry
        if stored is MISSING or expiry is None:
            return stored
        if expiry.now() >= stored[1]:
            if reading and expiry.on_read:
                self.remove(slot)
            return stored[0] if expiry.returns_expired else MISSING
        if reading and expiry.refresh:
            self.delta[slot] = (stored[0], expiry.stamp())
        return stored[0]

    def _store(self, slot: Any, accumulator: Any) -> None:
        accepted = self.accept(accumulator)
        self.delta[slot] = accepted if self.expiry is None else (accepted, self.expiry.stamp())

    def _given(self, accumulator: Any) -> Any:
        """An accumulator for the caller's function, which may change it."""
        return accumulator if self._outgoing is None else self._outgoing(accumulator)

    def is_live(self, slot: Any) -> bool:
        stored = self.delta[slot]
        return stored is not MISSING and (self.expiry is None or self.expiry.now() < stored[1])

    def examine(self, slot: Any, now: int) -> tuple[int, int, int]:
        stored = self.delta[slot]
        if stored is MISSING or self.expiry is None:
            return 0, 0, NEVER
        if now < stored[1]:
            return 1, 0, stored[1]
        self.remove(slot)
        return 1, 1, NEVER

    def _add(self, slot: Any, value: Any) -> None:
        raise NotImplementedError

    def _result(self, slot: Any) -> Any:
        raise NotImplementedError

    def _combined(self, left: Any, right: Any) -> Any:
        raise NotImplementedError

    def merge_slots(self, target: Any, sources: list[Any]) -> None:
        merged = self._visible(target, reading=False)
        found = [value for value in (self._visible(slot, reading=False) for slot in sources) if value is not MISSING]
        if found:
            for value in found:
                merged = value if merged is MISSING else self._combined(self._given(merged), self._given(value))
            self._store(target, merged)
        for slot in sources:
            self.remove(slot)

    def _use_columns(self, built_in: str | None, input_type: StateType | None) -> None:
        """Let batches be folded by columns where function, types and keys allow it."""
        if built_in is None or not Batches.possible(self) or not (built_in == "count" or is_number(input_type)):
            return
        if built_in == "avg":
            self.batches = Batches(self, (np.dtype(np.float64), np.dtype(np.int64)))
        elif is_number(self.value_type):
            dtype = dtype_of(self.value_type)
            self.batches = Batches(self, (dtype,), identity_of(built_in, dtype))

    def _fold_batch(self, built_in: str | None, keys: Any, values: Any, input_type: StateType | None) -> bool:
        """Fold a batch by columns; False, with nothing changed, where it must be looped."""
        column = None if self.batches is None else self.batches.keys(keys)
        if column is None or self.batches is None or built_in is None:
            return False
        numbers = None
        if built_in != "count":
            assert input_type is not None
            if isinstance(values, (pa.Array, pa.ChunkedArray)) and values.null_count:
                return False  # the loop names the key
            numbers = self.batches.numbers(values, input_type, len(column))
        elif len(values) != len(column):
            return False
        fold = fold_into(built_in)
        return self.batches.change(column, lambda table, slots: fold(table, slots, numbers))

    def _read_batch(self, keys: Any) -> tuple[list[Any], Any] | None:
        column = None if self.batches is None else self.batches.keys(keys)
        return None if column is None or self.batches is None else self.batches.read(column)

    def _add_rows(self, keys: pa.Array, values: list[Any]) -> None:
        with self.batch(keys) as held:
            if len(held) != len(values):
                raise InvalidRequest("keys and values of a batch differ in length", state=self.name, keys=len(held),
                                     values=len(values))
            for key, slot, value in zip(held, self.slots_of(held), values):
                self.keyed.key = key
                self._add(slot, value)

    def _results(self, keys: pa.Array) -> list[Any]:
        return [self._result(slot) for slot in self.slots_of(self.held_keys(keys))]


class MemoryReducingState(_FoldingState, ReducingState[Any]):
    """Folded by a function of two values; the first value is stored as it is, and 'count' starts at one."""

    descriptor: ReducingStateDescriptor

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._reduce = self.descriptor.reduce
        self._counts = self.descriptor.built_in == "count"
        self._use_columns(self.descriptor.built_in, self.value_type)

    def add(self, value: Any) -> None:
        self._add(self.slot(), value)
        self.touched()

    def _add(self, slot: Any, value: Any) -> None:
        value = self.accept(value) if not self._counts else 1
        old = self._visible(slot, reading=False)
        self._store(slot, value if old is MISSING else self._reduce(self._given(old), value))

    def get(self) -> Any:
        self.touched()
        return self._result(self.slot())

    def _result(self, slot: Any) -> Any:
        found = self._visible(slot, reading=True)
        return self._given(self.descriptor.default if found is MISSING else found) if \
            found is not MISSING or self.descriptor.default is not None else None

    def _combined(self, left: Any, right: Any) -> Any:
        return left + right if self._counts else self._reduce(left, right)

    def add_many(self, keys: pa.Array, values: pa.Array) -> None:
        if not self._fold_batch(self.descriptor.built_in, keys, values, self.value_type):
            column = [1] * len(values) if self._counts else self.values_of(values, len(values))
            self._add_rows(keys, column)

    def get_many(self, keys: pa.Array) -> pa.Array:
        read = self._read_batch(keys)
        if read is None:
            return self.value_type.to_arrow(self._results(keys))
        (numbers,), there = read
        if self.descriptor.default is not None:
            numbers[~there] = self.descriptor.default
            return pa.array(numbers)
        return pa.array(numbers, mask=~there)


class MemoryAggregatingState(_FoldingState, AggregatingState[Any, Any]):
    """Folded by an aggregate function; the accumulator is stored, `get` gives the function's result."""

    descriptor: AggregatingStateDescriptor

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._function = self.descriptor.function
        kind = self.descriptor.input_type
        self._check_input = incoming(kind, self.keyed.max_value_bytes) if kind is not None else None
        self._use_columns(self.descriptor.built_in, kind)

    def add(self, value: Any) -> None:
        self._add(self.slot(), value)
        self.touched()

    def _add(self, slot: Any, value: Any) -> None:
        if self._check_input is not None and self.descriptor.built_in != "count":
            try:
                value = self._check_input(value)
            except InvalidRequest as error:
                raise self.named_error(error) from error
        old = self._visible(slot, reading=False)
        start = self._function.create_accumulator() if old is MISSING else self._given(old)
        self._store(slot, self._function.add(start, value))

    def get(self) -> Any:
        self.touched()
        return self._result(self.slot())

    def _result(self, slot: Any) -> Any:
        found = self._visible(slot, reading=True)
        return None if found is MISSING else self._function.get_result(self._given(found))

    def _combined(self, left: Any, right: Any) -> Any:
        return self._function.merge(left, right)

    def add_many(self, keys: pa.Array, values: pa.Array) -> None:
        kind = self.descriptor.input_type
        if self._fold_batch(self.descriptor.built_in, keys, values, kind):
            return
        if kind is not None and self.descriptor.built_in != "count":
            column = self.values_of(values, len(values), kind)
        else:
            column = values.to_pylist() if isinstance(values, (pa.Array, pa.ChunkedArray)) else list(values)
        self._add_rows(keys, column)

    def get_many(self, keys: pa.Array) -> pa.Array:
        built_in = self.descriptor.built_in
        read = self._read_batch(keys)
        if read is not None:
            columns, there = read
            numbers = columns[0] if built_in != "avg" else columns[0] / np.where(there, columns[1], 1)
            return pa.array(numbers, mask=~there)
        results = self._results(keys)
        if built_in == "avg":
            return pa.array(results, pa.float64())
        return self.value_type.to_arrow(results) if built_in is not None else pa.array(results)
