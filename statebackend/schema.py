"""What is stored about a state beside its data, and whether stored state fits what a job declares now."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from statebackend.descriptors import MapStateDescriptor, StateDescriptor
from statebackend.errors import CorruptData, IncompatibleState, InvalidRequest
from statebackend.migration import change_between, column_migrator, value_migrator
from statebackend.ttl import TtlConfig, expires_at
from statebackend.types import StateType, state_type, state_type_from_json

STATE_IDS = 65536
SCHEMA_VERSION = 1
_ALL = (1 << 31) - 1  # an open end makes binary_slice fail on some arrays (pyarrow 26)


@dataclass(frozen=True)
class StateSchema:
    """One state as stored: what its entries mean. Two schemas of one state can be compared without its data."""

    name: str
    state_id: int
    kind: str
    value_type: StateType
    map_key_type: StateType | None = None
    namespace_type: StateType | None = None
    ttl: TtlConfig | None = None
    function: str | None = None
    version: int = SCHEMA_VERSION

    @classmethod
    def of(cls, descriptor: StateDescriptor, state_id: int, namespace_type: Any = None) -> StateSchema:
        """The schema of a registered state."""
        namespace = None if namespace_type is None else state_type(namespace_type)
        if namespace is not None:
            namespace.require_key()
        map_key = descriptor.map_key_type if isinstance(descriptor, MapStateDescriptor) else None
        return cls(descriptor.name, state_id, descriptor.kind.value, descriptor.value_type, map_key, namespace,
                   descriptor.ttl, getattr(descriptor, "built_in", None))

    def to_json(self) -> dict[str, Any]:
        return {
            "version": self.version, "name": self.name, "state_id": self.state_id, "kind": self.kind,
            "value_type": self.value_type.to_json(),
            "map_key_type": None if self.map_key_type is None else self.map_key_type.to_json(),
            "namespace_type": None if self.namespace_type is None else self.namespace_type.to_json(),
            "ttl": None if self.ttl is None else self.ttl.to_json(),
            "function": self.function,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> StateSchema:
        """The schema again, without loading any class of the job."""
        version = data.get("version")
        if version != SCHEMA_VERSION:
            raise IncompatibleState("a schema has a version that this release does not read", state=data.get("name"),
                                    expected=SCHEMA_VERSION, found=version, hint="use a newer release of holdfast")
        try:
            return cls(str(data["name"]), int(data["state_id"]), str(data["kind"]),
                       state_type_from_json(data["value_type"]), _type_or_none(data["map_key_type"]),
                       _type_or_none(data["namespace_type"]),
                       None if data["ttl"] is None else TtlConfig.from_json(data["ttl"]), data["function"], version)
        except (KeyError, TypeError, ValueError) as error:
            raise CorruptData(f"a stored schema can't be read: {error!r}", state=data.get("name")) from error

    def __str__(self) -> str:
        inner = str(self.value_type) if self.map_key_type is None else f"{self.map_key_type}, {self.value_type}"
        namespace = "" if self.namespace_type is None else f", namespace {self.namespace_type}"
        ttl = "" if self.ttl is None else f", ttl {self.ttl.ttl}"
        return f"{self.kind}[{inner}]{namespace}{ttl}"


def _type_or_none(data: Mapping[str, Any] | None) -> StateType | None:
    return None if data is None else state_type_from_json(data)


def state_id_of(name: str, taken: Collection[int]) -> int:
    """The two-byte id of a state: the hash of its name, or the next free one."""
    if len(taken) >= STATE_IDS:
        raise InvalidRequest(f"an operator can't hold more than {STATE_IDS} states", state=name)
    candidate = xxhash.xxh64_intdigest(name.encode()) % STATE_IDS
    while candidate in taken:
        candidate = (candidate + 1) % STATE_IDS
    return candidate


class Verdict(StrEnum):
    """What restoring a state under a new schema means."""

    COMPATIBLE = "compatible"
    MIGRATED = "migrated"
    REFUSED = "refused"


@dataclass(frozen=True)
class SchemaComparison:
    """The verdict, each reason for it, and the way out where it is a refusal."""

    verdict: Verdict
    reasons: tuple[str, ...] = ()
    hint: str | None = None

    def __bool__(self) -> bool:
        return self.verdict is not Verdict.REFUSED


_WAY_OUT = ("declare the state as it was stored, give it a new name, or convert or drop it in a savepoint "
            "(holdfast savepoint transform)")


def compare_schemas(old: StateSchema, new: StateSchema) -> SchemaComparison:
    """Whether state stored under `old` can be read under `new`: as it is, after migration, or not."""
    refusals, changes = list[str](), list[str]()
    if old.kind != new.kind:
        refusals.append(f"the kind changed from {old.kind} to {new.kind}")
    refusals += _fixed_type("map key", old.map_key_type, new.map_key_type)
    if old.namespace_type is not None:
        refusals += _fixed_type("namespace", old.namespace_type, new.namespace_type)
    functions = {old.function, new.function}
    if len(functions) == 2 and (None not in functions or "avg" in functions):
        refusals.append(f"the function changed from {old.function} to {new.function}")
    value = change_between(old.value_type, new.value_type)
    refusals += value.refusals
    changes += value.changes
    if (old.ttl is None) != (new.ttl is None):
        changes.append("TTL was switched on" if new.ttl is not None else "TTL was switched off")
    elif _restamped(old, new):
        changes.append("TTL counts another time, so that every entry starts anew")
    if refusals:
        return SchemaComparison(Verdict.REFUSED, tuple(refusals), _WAY_OUT)
    return SchemaComparison(Verdict.MIGRATED if changes else Verdict.COMPATIBLE, tuple(changes))


def _fixed_type(what: str, old: StateType | None, new: StateType | None) -> list[str]:
    if old == new or (old is not None and new is not None and change_between(old, new, key=True).is_none):
        return []
    return [f"the {what} type changed from {old} to {new}"]


def require_compatible(old: StateSchema, new: StateSchema) -> SchemaComparison:
    """The comparison; a refusal is raised, naming the state, both schemas and the way out."""
    comparison = compare_schemas(old, new)
    if comparison.verdict is Verdict.REFUSED:
        raise IncompatibleState(f"stored state does not fit what the job declares: {'; '.join(comparison.reasons)}",
                                state=new.name, stored=str(old), declared=str(new), hint=comparison.hint)
    return comparison


def require_key_type(old: StateType, new: StateType, uid: str | None = None) -> None:
    """Refuse a key type that would order or spread keys otherwise than the stored one."""
    if _fixed_type("key", old, new):
        raise IncompatibleState("stored state has another key type than the job declares", operator=uid,
                                stored=str(old), declared=str(new),
                                hint="key by the stored type, or convert the keys in a savepoint")


def is_identity(old: StateSchema, new: StateSchema) -> bool:
    """Whether entry values stored under `old` are already entry values of `new`."""
    return (old.ttl is None) == (new.ttl is None) and not _restamped(old, new) and \
        change_between(old.value_type, new.value_type).is_none


def _restamped(old: StateSchema, new: StateSchema) -> bool:
    """Whether stored expiries mean nothing under the new schema, because they were counted in another time."""
    return old.ttl is not None and new.ttl is not None and old.ttl.time is not new.ttl.time


@dataclass(frozen=True)
class _Frame:
    """What happens to the eight bytes of an expiry in front of a value: skipped, kept, or a new one put there."""

    skip: int
    keep: int
    prefix: bytes

    @classmethod
    def between(cls, old: StateSchema, new: StateSchema, now_ms: int) -> _Frame:
        skip = 8 if old.ttl is not None else 0
        if new.ttl is None:
            return cls(skip, 0, b"")
        if old.ttl is not None and not _restamped(old, new):
            return cls(skip, 8, b"")
        # before the first watermark event time is unknown: such entries stay until they are written again
        return cls(skip, 0, pack_expiry(expires_at(now_ms, new.ttl.ttl_ms)))


def pack_expiry(expires_at_ms: int) -> bytes:
    """The eight bytes in front of a value that expires."""
    return (expires_at_ms + (1 << 63)).to_bytes(8, "big")


def migrator(old: StateSchema, new: StateSchema, now_ms: int = 0) -> Callable[[bytes], bytes]:
    """From entry value bytes under `old` to entry value bytes under `new`.

    Entries without an expiry get the one of an entry written at `now_ms` when TTL was switched on.
    """
    require_compatible(old, new)
    convert = value_migrator(old.value_type, new.value_type)
    frame = _Frame.between(old, new, now_ms)
    skip, keep, prefix = frame.skip, frame.keep, frame.prefix

    def migrate(entry: bytes) -> bytes:
        value = entry[skip:] if skip else entry
        return prefix + entry[:keep] + (value if convert is None else convert(value))

    return _unchanged if convert is None and skip == keep and not prefix else migrate


def column_migrator_of(old: StateSchema, new: StateSchema,
                       now_ms: int = 0) -> Callable[[pa.BinaryArray], pa.BinaryArray]:
    """`migrator` over a column of entry values."""
    require_compatible(old, new)
    convert = column_migrator(old.value_type, new.value_type)
    frame = _Frame.between(old, new, now_ms)
    if convert is None and frame.skip == frame.keep and not frame.prefix:
        return lambda column: column

    def migrate(column: pa.BinaryArray) -> pa.BinaryArray:
        values = pc.binary_slice(column, frame.skip, _ALL) if frame.skip else column
        if convert is not None:
            values = convert(values)
        nothing = pa.scalar(b"", pa.binary())
        if frame.keep:
            values = pc.binary_join_element_wise(pc.binary_slice(column, 0, frame.keep), values, nothing)
        elif frame.prefix:
            values = pc.binary_join_element_wise(pa.scalar(frame.prefix, pa.binary()), values, nothing)
        return values

    return migrate


def _unchanged(entry: bytes) -> bytes:
    return entry


def united_schema(known: StateSchema, other: StateSchema) -> StateSchema:
    """The schema under which the parts of a state that two subtasks stored are held together; keeps the first one's id.

    Handles of one checkpoint agree, except that a subtask may not have seen a namespace yet, still has the TTL of an
    earlier run, or has not registered a state whose schema the others have migrated since. It is one of the two: that
    to which the other can be migrated, and where both can, the one that loses nothing.
    """
    namespace = known.namespace_type or other.namespace_type
    left = replace(known, namespace_type=namespace)
    right = replace(other, namespace_type=other.namespace_type or namespace, state_id=known.state_id)
    if _can_follow(right, left, losing=False):
        return left
    if _can_follow(left, right, losing=False):
        return right
    ways = [new for old, new in ((right, left), (left, right)) if _can_follow(old, new, losing=True)]
    if len(ways) == 1:
        return ways[0]
    raise IncompatibleState("the parts of a snapshot disagree about a state", state=known.name, stored=str(known),
                            found=str(other), hint="convert the checkpoint to a savepoint and change it with "
                            "`holdfast savepoint transform`")


def _can_follow(old: StateSchema, new: StateSchema, *, losing: bool) -> bool:
    """Whether entries of one schema can be migrated to the other, and what they hold with them unless `losing`."""
    loses = change_between(old.value_type, new.value_type).loses or (old.ttl is not None and new.ttl is None)
    return (losing or not loses) and bool(compare_schemas(old, new))
