"""From snapshot handles to open databases: link and clip what RocksDB wrote, write anew what others wrote.

A database of a handle is placed (linked where the source can), opened, and what belongs to other key groups is hidden
by one range delete; no entry is read. Its log is replayed on top. Entries of other formats are written in key order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import pyarrow as pa

from statebackend.backend import KeyedHandle
from statebackend.descriptors import StateKind
from statebackend.entries import OP_DELETE, OP_DELETE_PREFIX, OP_PUT, merge_entries, read_entries
from statebackend.errors import InvalidRequest
from statebackend.files import SnapshotSource
from statebackend.formats import handle_layers, require_restorable
from statebackend.keygroups import KeyGroupRange
from statebackend.rocksdb.context import bytes_of, optional_bytes_of
from statebackend.rocksdb.format import fetch_part
from statebackend.rocksdb.handles import FORMAT, Chain, StoredPart, chain_of
from statebackend.rocksdb.parts import Part, Parts
from statebackend.rocksdb.store import Operation, Store
from statebackend.rocksdb.writeback import after
from statebackend.schema import StateSchema, state_id_of, united_schema
from statebackend.types import StateType

MOST_PARTS = 16
"""More databases than this in one backend would cost more than writing them anew."""
OpenStore = Callable[[Path], Store]


@dataclass
class Restored:
    """Open databases, what is in them, and what there is to clean up in the background."""

    parts: Parts
    schemas: dict[str, StateSchema] = field(default_factory=dict)
    next_sequence: int = 0
    clipped: list[Store] = field(default_factory=list)


@dataclass(frozen=True)
class _Link:
    """A stored database that is to be opened for a range of its key groups."""

    part: StoredPart
    key_groups: KeyGroupRange


def restore(handles: Sequence[KeyedHandle], source: SnapshotSource | None, directory: Path, key_groups: KeyGroupRange,
            key_type: StateType, max_parallelism: int, open_store: OpenStore, uid: str) -> Restored:
    """Open the state of all handles that falls into the range; nothing stays open if that fails."""
    wanted = [handle for handle in handles if handle.key_groups.intersect(key_groups) is not None]
    require_restorable(handles, key_type, max_parallelism, uid)
    if wanted and source is None:
        raise InvalidRequest("restoring needs a source that reads the files", uid=uid)
    schemas, renumbered = _united_schemas(wanted)
    sequence = max((int(handle.meta.get("next_sequence", 0)) for handle in wanted), default=0)
    links, chains = ([], {}) if renumbered or source is None else _links(wanted, key_groups)
    opened: list[Part] = []
    try:
        opened, clipped = _open_links(links, source, directory, open_store)
        parts = Parts(_without_gaps(opened, key_groups, directory, open_store))
        opened = list(parts.parts)
        for index, handle in enumerate(wanted):
            assert source is not None
            if index in chains:
                _replay(chains[index], source, parts, key_groups)
            else:
                lists = {schema.state_id for schema in schemas.values() if schema.kind == StateKind.LIST.value}
                sequence = max(sequence, _rewrite(handle, source, parts, key_groups, renumbered.get(index, {}), lists))
    except BaseException:
        for part in opened:
            part.store.close()
        raise
    return Restored(parts, schemas, sequence, clipped)


def _united_schemas(handles: Sequence[KeyedHandle]) -> tuple[dict[str, StateSchema], dict[int, dict[int, int]]]:
    """The schemas of all handles under one numbering, and for each handle the ids that change.

    Ids follow from names, so they differ only where names collide in some handles and not in others.
    """
    united: dict[str, StateSchema] = {}
    renumbered: dict[int, dict[int, int]] = {}
    for index, handle in enumerate(handles):
        for schema in handle.schemas:
            known = united.get(schema.name)
            if known is None:
                taken = {other.state_id for other in united.values()}
                number = schema.state_id if schema.state_id not in taken else state_id_of(schema.name, taken)
                known = united[schema.name] = _numbered(schema, number)
            else:
                known = united[schema.name] = united_schema(known, schema)
            if known.state_id != schema.state_id:
                renumbered.setdefault(index, {})[schema.state_id] = known.state_id
    return united, renumbered


def _numbered(schema: StateSchema, state_id: int) -> StateSchema:
    return StateSchema(schema.name, state_id, schema.kind, schema.value_type, schema.map_key_type,
                       schema.namespace_type, schema.ttl, schema.function, schema.version)


def _links(handles: Sequence[KeyedHandle], key_groups: KeyGroupRange) -> tuple[list[_Link], dict[int, Chain]]:
    """The databases to link, and the handles they serve; none where they overlap or are too many."""
    links, chains = list[_Link](), dict[int, Chain]()
    for index, handle in enumerate(handles):
        if handle.format != FORMAT:
            continue
        chains[index] = chain_of(handle)
        for part in chains[index].parts:
            wanted = part.key_groups.intersect(key_groups)
            if wanted is not None:
                links.append(_Link(part, wanted))
    links.sort(key=lambda link: link.key_groups.first)
    overlap = any(left.key_groups.last >= right.key_groups.first for left, right in pairwise(links))
    return ([], {}) if overlap or len(links) > MOST_PARTS else (links, chains)


def _open_links(links: Sequence[_Link], source: SnapshotSource | None, directory: Path,
                open_store: OpenStore) -> tuple[list[Part], list[Store]]:
    for number, link in enumerate(links):
        assert source is not None
        fetch_part(link.part, source, directory / f"db-{number}")
    parts, clipped = list[Part](), list[Store]()
    try:
        for number, link in enumerate(links):
            store = open_store(directory / f"db-{number}")
            parts.append(Part(number, link.key_groups, store))
            if _clip(store, link):
                clipped.append(store)
    except BaseException:
        for part in parts:
            part.store.close()
        raise
    return parts, clipped


def _clip(store: Store, link: _Link) -> bool:
    """Hide the key groups that are not wanted: two range deletes, whatever the size."""
    held, wanted = link.part.key_groups, link.key_groups
    if held.first < wanted.first:
        store.delete_range(b"\x00\x00", wanted.first.to_bytes(2, "big"))
    if wanted.last < held.last:
        store.delete_range((wanted.last + 1).to_bytes(2, "big"), b"\xff\xff\xff")
    return held != wanted


def _without_gaps(parts: Sequence[Part], key_groups: KeyGroupRange, directory: Path,
                  open_store: OpenStore) -> list[Part]:
    """Parts that cover the whole range: a part takes the groups up to the next one, which it holds no entry of."""
    if not parts:
        return [Part(0, key_groups, open_store(directory / "db-0"))]
    bounds = [key_groups.first, *(part.key_groups.first for part in parts[1:]), key_groups.last + 1]
    return [Part(part.number, KeyGroupRange(first, after_last - 1), part.store)
            for part, first, after_last in zip(parts, bounds, bounds[1:])]


def _replay(chain: Chain, source: SnapshotSource, parts: Parts, key_groups: KeyGroupRange) -> None:
    for file in chain.log:
        for batch in read_entries(source, file, key_groups):
            write_batch(parts, batch)


def _rewrite(handle: KeyedHandle, source: SnapshotSource, parts: Parts, key_groups: KeyGroupRange,
             renumbered: dict[int, int], lists: set[int]) -> int:
    """Write the final entries of a handle in key order; the list sequence after the largest seen."""
    ids = {old.to_bytes(2, "big"): new.to_bytes(2, "big") for old, new in renumbered.items()}
    list_ids = {number.to_bytes(2, "big") for number in lists}
    largest = -1
    layers = handle_layers(handle, source, key_groups)
    # A single layer needs no merging: writing it in order applies its deletes.
    single = len(layers) == 1 and not ids
    for batch in layers[0] if single else merge_entries(layers):
        operations = operations_of(batch)
        if ids:
            operations = sorted((key[:2] + ids.get(key[2:4], key[2:4]) + key[4:], value) for key, value in operations)
        if single:
            write_batch(parts, batch, operations)
        else:
            parts.write(operations)
        if list_ids and "next_sequence" not in handle.meta:
            largest = max([largest, *(int.from_bytes(key[-8:], "big") for key, _ in operations if key[2:4] in list_ids)])
    return largest + 1


def operations_of(batch: pa.RecordBatch) -> list[Operation]:
    """The rows of an entry batch as operations."""
    keys, ops = bytes_of(batch.column(0)), batch.column(2)
    values = batch.column(1)
    if values.null_count == 0 and ops.null_count == 0 and not ops.to_numpy().any():
        return list(zip(keys, bytes_of(values)))
    found: list[Operation] = []
    for key, value, op in zip(keys, optional_bytes_of(values), ops.to_pylist()):
        if op == OP_PUT:
            found.append((key, b"" if value is None else value))
        elif op == OP_DELETE:
            found.append((key, None))
    return found


def write_batch(parts: Parts, batch: pa.RecordBatch, operations: list[Operation] | None = None) -> None:
    """Apply one batch of an entry file, prefix deletes included."""
    ops = batch.column(2).to_numpy()
    if not (ops == OP_DELETE_PREFIX).any():
        parts.write(operations_of(batch) if operations is None else operations)
        return
    for index, op in enumerate(ops.tolist()):
        row = batch.slice(index, 1)
        if op == OP_DELETE_PREFIX:
            prefix = bytes_of(row.column(0))[0]
            parts.store_of(prefix).delete_range(prefix, after(prefix))
        else:
            parts.write(operations_of(row))
