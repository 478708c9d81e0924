"""Operator state: list, union list and broadcast state of one subtask, and how they are dealt out again on restore."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import msgspec

from statebackend.descriptors import ListStateDescriptor, MapStateDescriptor
from statebackend.errors import CorruptData, IncompatibleState, InvalidRequest
from statebackend.migration import change_between, value_migrator
from statebackend.types import StateType, state_type_from_json

OPERATOR_STATE_VERSION = 1


class Distribution(StrEnum):
    """How the elements of all old subtasks reach the new ones."""

    SPLIT = "split"
    UNION = "union"
    BROADCAST = "broadcast"


@dataclass(frozen=True)
class OperatorStatePart:
    """One state of one subtask as stored: encoded elements (list, union) or encoded key-value pairs (broadcast)."""

    name: str
    distribution: Distribution
    value_type: Mapping[str, Any]
    map_key_type: Mapping[str, Any] | None
    elements: tuple[bytes, ...] = ()
    pairs: tuple[tuple[bytes, bytes], ...] = ()


@dataclass(frozen=True)
class OperatorStateSnapshot:
    """All operator state of one subtask."""

    parts: tuple[OperatorStatePart, ...] = field(default_factory=tuple)

    def to_bytes(self) -> bytes:
        return msgspec.msgpack.encode({"version": OPERATOR_STATE_VERSION, "parts": [
            [part.name, part.distribution.value, dict(part.value_type),
             dict(part.map_key_type) if part.map_key_type is not None else None, part.elements, part.pairs]
            for part in self.parts]})

    @classmethod
    def from_bytes(cls, data: bytes) -> OperatorStateSnapshot:
        try:
            decoded = msgspec.msgpack.decode(data)
            version, parts = decoded["version"], decoded["parts"]
            if version != OPERATOR_STATE_VERSION:
                raise IncompatibleState("operator state has a version that this release does not read",
                                        expected=OPERATOR_STATE_VERSION, found=version)
            return cls(tuple(
                OperatorStatePart(name, Distribution(distribution), value_type, map_key_type, tuple(elements),
                                  tuple((key, value) for key, value in pairs))
                for name, distribution, value_type, map_key_type, elements, pairs in parts))
        except (msgspec.DecodeError, KeyError, TypeError, ValueError) as error:
            raise CorruptData(f"operator state can't be decoded: {error}") from error


class OperatorListState:
    """A list of elements held by one subtask. Values handed in or out are copies."""

    def __init__(self, name: str, distribution: Distribution, element_type: StateType) -> None:
        self.name, self.distribution, self.element_type = name, distribution, element_type
        self._elements: list[bytes] = []

    def get(self) -> list[Any]:
        return [self.element_type.decode(element) for element in self._elements]

    def add(self, value: Any) -> None:
        self.element_type.check(value)
        self._elements.append(self.element_type.encode(value))

    def add_all(self, values: Iterable[Any]) -> None:
        encoded = [self._encode(value) for value in values]
        self._elements.extend(encoded)

    def update(self, values: Iterable[Any]) -> None:
        self._elements = [self._encode(value) for value in values]

    def clear(self) -> None:
        self._elements = []

    def _encode(self, value: Any) -> bytes:
        self.element_type.check(value)
        return self.element_type.encode(value)


class BroadcastState:
    """A map that every subtask holds in full. `read_only()` is the view of the side that may not write."""

    def __init__(self, name: str, key_type: StateType, value_type: StateType) -> None:
        self.name, self.key_type, self.value_type = name, key_type, value_type
        self._pairs: dict[bytes, bytes] = {}

    def get(self, key: Any) -> Any:
        stored = self._pairs.get(self._key(key))
        return None if stored is None else self.value_type.decode(stored)

    def put(self, key: Any, value: Any) -> None:
        self._pairs[self._key(key)] = self._value(value)

    def put_all(self, entries: Mapping[Any, Any] | Iterable[tuple[Any, Any]]) -> None:
        pairs = entries.items() if isinstance(entries, Mapping) else entries
        self._pairs.update([(self._key(key), self._value(value)) for key, value in pairs])

    def remove(self, key: Any) -> None:
        self._pairs.pop(self._key(key), None)

    def contains(self, key: Any) -> bool:
        return self._key(key) in self._pairs

    def entries(self) -> Iterator[tuple[Any, Any]]:
        for key in sorted(self._pairs):
            yield self.key_type.decode_key(key), self.value_type.decode(self._pairs[key])

    def keys(self) -> Iterator[Any]:
        return (key for key, _ in self.entries())

    def values(self) -> Iterator[Any]:
        return (value for _, value in self.entries())

    def is_empty(self) -> bool:
        return not self._pairs

    def clear(self) -> None:
        self._pairs.clear()

    def read_only(self) -> ReadOnlyBroadcastState:
        return ReadOnlyBroadcastState(self)

    def _key(self, key: Any) -> bytes:
        self.key_type.check(key)
        return self.key_type.encode_key(key)

    def _value(self, value: Any) -> bytes:
        self.value_type.check(value)
        return self.value_type.encode(value)


class ReadOnlyBroadcastState:
    """What the keyed side of a broadcast function sees; a write is refused with the reason."""

    def __init__(self, state: BroadcastState) -> None:
        self._state = state
        self.get, self.contains, self.entries = state.get, state.contains, state.entries
        self.keys, self.values, self.is_empty = state.keys, state.values, state.is_empty

    def _refuse(self, *_args: Any, **_kwargs: Any) -> None:
        raise InvalidRequest("broadcast state is read-only on the keyed side", state=self._state.name,
                             hint="write it in process_broadcast, which runs alike on every subtask")

    put = put_all = remove = clear = _refuse


class OperatorStateStore:
    """The operator state of one subtask of one operator. Belongs to one thread."""

    def __init__(self, uid: str, restored: Sequence[OperatorStatePart] = ()) -> None:
        self.uid = uid
        self._lists: dict[str, OperatorListState] = {}
        self._broadcasts: dict[str, BroadcastState] = {}
        self._restored = {part.name: part for part in restored}

    def list_state(self, descriptor: ListStateDescriptor) -> OperatorListState:
        """Elements are dealt out evenly when the parallelism changes."""
        return self._list(descriptor, Distribution.SPLIT)

    def union_list_state(self, descriptor: ListStateDescriptor) -> OperatorListState:
        """Every subtask gets the elements of all subtasks on every restore."""
        return self._list(descriptor, Distribution.UNION)

    def broadcast_state(self, descriptor: MapStateDescriptor) -> BroadcastState:
        """A map that is the same on every subtask, because only the broadcast side writes it."""
        name = descriptor.name
        self._require_unused(name, self._lists)
        known = self._broadcasts.get(name)
        if known is None:
            known = BroadcastState(name, descriptor.map_key_type, descriptor.value_type)
            part = self._stored(name, Distribution.BROADCAST)
            if part is not None:
                convert = _migration(part, descriptor.value_type, descriptor.map_key_type)
                known._pairs = {key: convert(value) for key, value in part.pairs}
                del self._restored[name]
            self._broadcasts[name] = known
        elif known.value_type != descriptor.value_type or known.key_type != descriptor.map_key_type:
            raise InvalidRequest("an operator state is registered twice with different types", state=name)
        return known

    def snapshot(self) -> OperatorStateSnapshot:
        """What is held now; state that was restored but not registered stays in."""
        parts = [OperatorStatePart(state.name, state.distribution, state.element_type.to_json(), None,
                                   elements=tuple(state._elements)) for state in self._lists.values()]
        parts += [OperatorStatePart(state.name, Distribution.BROADCAST, state.value_type.to_json(),
                                    state.key_type.to_json(), pairs=tuple(sorted(state._pairs.items())))
                  for state in self._broadcasts.values()]
        return OperatorStateSnapshot((*parts, *self._restored.values()))

    def _list(self, descriptor: ListStateDescriptor, distribution: Distribution) -> OperatorListState:
        name = descriptor.name
        self._require_unused(name, self._broadcasts)
        known = self._lists.get(name)
        if known is None:
            known = OperatorListState(name, distribution, descriptor.value_type)
            part = self._stored(name, distribution)
            if part is not None:
                convert = _migration(part, descriptor.value_type)
                known._elements = [convert(element) for element in part.elements]
                del self._restored[name]
            self._lists[name] = known
        elif known.distribution is not distribution or known.element_type != descriptor.value_type:
            raise InvalidRequest("an operator state is registered twice with different types", state=name)
        return known

    def _stored(self, name: str, distribution: Distribution) -> OperatorStatePart | None:
        part = self._restored.get(name)
        if part is not None and part.distribution is not distribution:
            raise IncompatibleState("operator state was stored with another distribution", state=name,
                                    expected=distribution.value, found=part.distribution.value,
                                    hint="register it as it was stored, or rename or drop it in a savepoint")
        return part

    def _require_unused(self, name: str, others: Mapping[str, Any]) -> None:
        if name in others:
            raise InvalidRequest("an operator state is registered twice with different kinds", state=name)


def _migration(part: OperatorStatePart, value_type: StateType,
               key_type: StateType | None = None) -> Callable[[bytes], bytes]:
    """How stored values become values of the declared type; refused where that would lose something."""
    stored = state_type_from_json(part.value_type)
    change = change_between(stored, value_type)
    if key_type is not None and part.map_key_type is not None:
        change += change_between(state_type_from_json(part.map_key_type), key_type, "the map key", key=True)
    if change.refusals:
        raise IncompatibleState(f"stored operator state does not fit what the job declares: {'; '.join(change.refusals)}",
                                state=part.name, stored=str(stored), declared=str(value_type),
                                hint="declare it as it was stored, give it a new name, or drop it in a savepoint")
    return value_migrator(stored, value_type) or _unchanged


def _unchanged(value: bytes) -> bytes:
    return value


def redistribute(old: Sequence[OperatorStateSnapshot], parallelism: int) -> list[OperatorStateSnapshot]:
    """Deal the operator state of all old subtasks (in subtask order) out to `parallelism` new ones.

    Split lists: unchanged parallelism gives each subtask its own list back; otherwise all elements in subtask order
    are cut into contiguous parts, the first ones a longer. Union lists: everything to everyone. Broadcast: subtask i
    reads the copy of old subtask i mod old parallelism.
    """
    if parallelism < 1:
        raise InvalidRequest("parallelism must be at least 1", found=parallelism)
    new: list[list[OperatorStatePart]] = [[] for _ in range(parallelism)]
    names = list(dict.fromkeys(part.name for snapshot in old for part in snapshot.parts))
    for name in names:
        parts = [next((part for part in snapshot.parts if part.name == name), None) for snapshot in old]
        sample = next(part for part in parts if part is not None)
        for part in parts:
            if part is not None and not _same_types(part, sample):
                raise IncompatibleState("subtasks stored one operator state with different types", state=name)
        for index, part in enumerate(_deal(parts, sample, parallelism)):
            if part is not None:
                new[index].append(part)
    return [OperatorStateSnapshot(tuple(parts)) for parts in new]


def _same_types(part: OperatorStatePart, other: OperatorStatePart) -> bool:
    if part.value_type == other.value_type and part.map_key_type == other.map_key_type:
        return part.distribution is other.distribution
    return part.distribution is other.distribution and (part.map_key_type is None) == (other.map_key_type is None) and \
        state_type_from_json(part.value_type) == state_type_from_json(other.value_type) and \
        (part.map_key_type is None or other.map_key_type is None
         or state_type_from_json(part.map_key_type) == state_type_from_json(other.map_key_type))


def _deal(parts: Sequence[OperatorStatePart | None], sample: OperatorStatePart,
          parallelism: int) -> Sequence[OperatorStatePart | None]:
    if sample.distribution is Distribution.BROADCAST:
        held = [part for part in parts if part is not None]
        return [parts[index] if index < len(parts) and parts[index] is not None else held[index % len(held)]
                for index in range(parallelism)]
    if sample.distribution is Distribution.SPLIT and len(parts) == parallelism:
        return parts
    elements = [element for part in parts if part is not None for element in part.elements]
    if sample.distribution is Distribution.UNION:
        return [_with_elements(sample, elements)] * parallelism
    share, longer = divmod(len(elements), parallelism)
    cuts = [index * share + min(index, longer) for index in range(parallelism + 1)]
    return [_with_elements(sample, elements[cuts[index]:cuts[index + 1]]) for index in range(parallelism)]


def _with_elements(sample: OperatorStatePart, elements: Sequence[bytes]) -> OperatorStatePart:
    return OperatorStatePart(sample.name, sample.distribution, sample.value_type, None, elements=tuple(elements))
