"""Keys of records: how they are taken out, which key group and channel they belong to."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter, itemgetter
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from checkpoint.dataflow.graph import KeySpec
from checkpoint.runtime.contracts import Partitioner, Records
from statebackend.errors import InvalidRequest
from statebackend.keygroups import key_groups_of
from statebackend.types import StateType, state_type


class KeySelector:
    """Takes the keys out of a batch; a field name works on dicts, dataclasses and NamedTuples alike."""

    def __init__(self, spec: KeySpec) -> None:
        self.key_type: StateType = state_type(spec.key_type)
        self._select = spec.select

    def many(self, values: list[Any]) -> list[Any]:
        if not values:
            return []
        getter = self._getter(values[0])
        try:
            return list(map(getter, values))
        except (KeyError, AttributeError, IndexError) as error:
            raise self._missing(getter, values, error) from error

    def to_arrow(self, keys: list[Any]) -> pa.Array:
        """Keys as a column; one that is not of the key's type is refused and named."""
        try:
            return self.key_type.to_arrow(keys)
        except (pa.ArrowException, TypeError, ValueError, AttributeError) as error:
            for key in keys:
                self.key_type.check(key)
            raise InvalidRequest(f"keys are not of the declared type: {error}", expected=str(self.key_type)) from error

    def key_groups(self, keys: list[Any], max_parallelism: int) -> npt.NDArray[np.int32]:
        return key_groups_of(self.to_arrow(keys), max_parallelism, self.key_type)

    def _getter(self, sample: Any) -> Callable[[Any], Any]:
        select = self._select
        if isinstance(select, str):
            return itemgetter(select) if isinstance(sample, dict) else attrgetter(select)
        return itemgetter(select) if isinstance(select, int) else select

    def _missing(self, getter: Callable[[Any], Any], values: list[Any], error: Exception) -> Exception:
        for value in values:
            try:
                getter(value)
            except (KeyError, AttributeError, IndexError) as found:
                if isinstance(self._select, (str, int)):
                    return InvalidRequest("a record lacks the field that it is keyed by", field=self._select,
                                          found=repr(value)[:200])
                found.add_note(f"in key_by, at the record {value!r:.200}")
                return found
        return error


class KeyPartitioner(Partitioner):
    """By key group: the records of a key always take the same channel."""

    def __init__(self, selector: KeySelector, max_parallelism: int) -> None:
        self._selector = selector
        self._max_parallelism = max_parallelism

    def split(self, records: Records, channels: int) -> list[tuple[int, Records]]:
        if channels == 1:
            return [(0, records)]
        keys = records.keys if records.keys is not None else self._selector.many(records.values)
        groups = self._selector.key_groups(keys, self._max_parallelism)
        targets = (groups.astype(np.int64) * channels // self._max_parallelism).tolist()
        return _deal(records, targets, channels)

    def reroute(self, records: Records, old_channel: tuple[int, int], new_parallelism: int) -> list[tuple[int, Records]]:
        return self.split(records, new_parallelism)


class RebalancePartitioner(Partitioner):
    """Evenly: every batch is cut into equal parts, and the channel of the first one moves on."""

    def __init__(self) -> None:
        self._next = 0

    def split(self, records: Records, channels: int) -> list[tuple[int, Records]]:
        if channels == 1:
            return [(0, records)]
        size = len(records)
        share, longer = divmod(size, channels)
        parts, begin = [], 0
        for offset in range(min(size, channels)):
            end = begin + share + (offset < longer)
            parts.append(((self._next + offset) % channels, _slice(records, begin, end)))
            begin = end
        self._next = (self._next + size) % channels
        return parts

    def reroute(self, records: Records, old_channel: tuple[int, int], new_parallelism: int) -> list[tuple[int, Records]]:
        return self.split(records, new_parallelism)


class ForwardPartitioner(Partitioner):
    """Subtask i to subtask i: a sender has one channel."""

    def split(self, records: Records, channels: int) -> list[tuple[int, Records]]:
        return [(0, records)]

    def reroute(self, records: Records, old_channel: tuple[int, int], new_parallelism: int) -> list[tuple[int, Records]]:
        return [(old_channel[1] % new_parallelism, records)]


class BroadcastPartitioner(Partitioner):
    """Everything to everyone. Batches are shared between the channels: receivers never change them."""

    broadcast = True

    def split(self, records: Records, channels: int) -> list[tuple[int, Records]]:
        return [(channel, records) for channel in range(channels)]

    def reroute(self, records: Records, old_channel: tuple[int, int], new_parallelism: int) -> list[tuple[int, Records]]:
        """To the subtask that reads the broadcast state of the old receiver; see `redistribute`."""
        receiver = old_channel[1]
        return [(receiver, records)] if receiver < new_parallelism else []


def _slice(records: Records, begin: int, end: int) -> Records:
    return Records(records.values[begin:end], records.timestamps[begin:end] if records.timestamps is not None else None,
                   records.keys[begin:end] if records.keys is not None else None)


def _deal(records: Records, targets: list[int], channels: int) -> list[tuple[int, Records]]:
    values: list[list[Any]] = [[] for _ in range(channels)]
    for target, value in zip(targets, records.values):
        values[target].append(value)
    timestamps: list[list[int | None]] | None = None
    if records.timestamps is not None:
        timestamps = [[] for _ in range(channels)]
        for target, stamp in zip(targets, records.timestamps):
            timestamps[target].append(stamp)
    return [(channel, Records(part, timestamps[channel] if timestamps is not None else None))
            for channel, part in enumerate(values) if part]
