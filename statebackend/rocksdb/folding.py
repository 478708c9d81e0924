"""Reducing and aggregating state on RocksDB: an accumulator for each key and namespace."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from statebackend.descriptors import AggregatingStateDescriptor, ReducingStateDescriptor
from statebackend.errors import HoldfastError
from statebackend.rocksdb.base import MISSING
from statebackend.rocksdb.flat import FlatState
from statebackend.rocksdb.fold import fold_built_in, fold_objects, results_of
from statebackend.state import AggregatingState, ReducingState
from statebackend.types import StateType


class FoldingState(FlatState):
    """What both kinds share: an addition is a write, so it applies the TTL rules of a write alone."""

    def _add(self, value: Any, input_type: StateType | None) -> None:
        key = self._prefix()
        if input_type is not None:
            try:
                input_type.check(value)
            except HoldfastError as error:
                raise self._named(error) from None
        data = self._read(key)
        self._store(key, self._fold_step(MISSING if data is None else self._decode(data), value))

    def _fold_step(self, accumulator: Any, value: Any) -> Any:
        """The accumulator after one more value; MISSING is where there is none yet."""
        raise NotImplementedError

    def _combined(self, left: Any, right: Any) -> Any:
        raise NotImplementedError

    def _merge(self, target: bytes, sources: list[bytes]) -> None:
        found = [data for data in map(self._read, sources) if data is not None]
        if found:
            old = self._read(target)
            accumulators = [self._decode(data) for data in ([] if old is None else [old]) + found]
            merged = accumulators[0]
            for accumulator in accumulators[1:]:
                merged = self._combined(merged, accumulator)
            self._store(target, merged)
        for key in sources:
            self._clear(key)


class RocksReducingState(FoldingState, ReducingState[Any]):
    descriptor: ReducingStateDescriptor

    def get(self) -> Any:
        data = self._read(self._prefix())
        if data is not None:
            return self._decode(data)
        default = self.descriptor.default
        return default if default is None else self._type.copy(default)

    def add(self, value: Any) -> None:
        self._add(value, None if self.descriptor.built_in == "count" else self._type)

    def _fold_step(self, accumulator: Any, value: Any) -> Any:
        if accumulator is MISSING:
            return 1 if self.descriptor.built_in == "count" else value
        return self.descriptor.reduce(accumulator, value)

    def _combined(self, left: Any, right: Any) -> Any:
        return left + right if self.descriptor.built_in == "count" else self.descriptor.reduce(left, right)

    def get_many(self, keys: pa.Array) -> pa.Array:
        return self._column(keys, self.descriptor.default)

    def add_many(self, keys: pa.Array, values: pa.Array) -> None:
        built_in = self.descriptor.built_in
        if not fold_built_in(self, built_in, self._type, keys, values):
            fold_objects(self, keys, values, None if built_in == "count" else self._type)


class RocksAggregatingState(FoldingState, AggregatingState[Any, Any]):
    descriptor: AggregatingStateDescriptor

    def get(self) -> Any:
        data = self._read(self._prefix())
        return None if data is None else self.descriptor.function.get_result(self._decode(data))

    def add(self, value: Any) -> None:
        self._add(value, None if self.descriptor.built_in == "count" else self.descriptor.input_type)

    def _fold_step(self, accumulator: Any, value: Any) -> Any:
        function = self.descriptor.function
        return function.add(function.create_accumulator() if accumulator is MISSING else accumulator, value)

    def _combined(self, left: Any, right: Any) -> Any:
        return self.descriptor.function.merge(left, right)

    def get_many(self, keys: pa.Array) -> pa.Array:
        return results_of(self, self._read_many(self._prefixes(keys)))

    def add_many(self, keys: pa.Array, values: pa.Array) -> None:
        built_in, input_type = self.descriptor.built_in, self.descriptor.input_type
        if not fold_built_in(self, built_in, input_type, keys, values):
            fold_objects(self, keys, values, None if built_in == "count" else input_type)
