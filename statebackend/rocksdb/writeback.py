"""The write-back layer: changed entries in Python dicts in front of RocksDB, frozen generation by generation.

A read looks at the dirty entries of its state, then at frozen generations (newest first), then into RocksDB. A barrier
freezes what is dirty; a frozen generation is written ("settled") in order, by the snapshot's thread or by the owner
when it needs the room. A capture (hard links of all databases) belongs to a barrier: it is made right after that
barrier's generation is settled and before anything later reaches RocksDB.
"""

from __future__ import annotations

import shutil
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from statebackend.errors import Closed, HoldfastError
from statebackend.rocksdb.changelog import Changelog
from statebackend.rocksdb.parts import Parts
from statebackend.rocksdb.store import WRITE_CHUNK, Operation

EVICT_ENTRIES = 2_000
"""Entries written at once when a state has too many dirty ones: a pause of some milliseconds."""
LOG_ROWS = 4_000
Dirty = dict[bytes, Any]


class Bucket:
    """Changes to one list or map: suffix -> value, or None where removed. `cleared` hides all that is stored."""

    __slots__ = ("cleared", "items")

    def __init__(self, cleared: bool = False) -> None:
        self.cleared = cleared
        self.items: dict[bytes, bytes | None] = {}


class Table:
    """The dirty entries of one state, by `key group | state id | key | namespace`.

    In a flat table that is the entry key, and the change is what the state holds (`stored` makes bytes of it) or None
    for removed. In a table of collections it is the prefix of the entry keys, and the change is a `Bucket`.
    """

    __slots__ = ("_dirty", "_frozen", "_weight", "collection", "state_id")

    def __init__(self, state_id: bytes, *, collection: bool) -> None:
        self.state_id = state_id
        self.collection = collection
        self._dirty: Dirty = {}
        self._frozen: tuple[Dirty, ...] = ()
        self._weight = 0

    def stored(self, held: Any) -> bytes | None:
        """The stored form of a change in a flat table."""
        return held  # type: ignore[no-any-return]

    def all_stored(self, held: list[Any]) -> Iterable[bytes | None]:
        """The stored forms of many changes."""
        return map(self.stored, held)

    def no_changes(self) -> Dirty:
        """What to hold changes in from now on."""
        return {}

    def layers_changed(self) -> None:
        """A generation was frozen or settled: what lies below the dirty entries is another now."""


class Generation:
    """What was dirty at a barrier, the log of the epoch that the barrier ended, and what to do once it is written."""

    __slots__ = ("capture", "captured", "contents", "log", "number", "settled")

    def __init__(self, number: int, contents: list[tuple[Table, Dirty]], log: Changelog, capture: Path | None) -> None:
        self.number = number
        self.contents = contents
        self.log = log
        self.capture = capture
        self.captured = False
        self.settled = False


class WriteBack:
    """All tables of a keyed backend and the order in which their entries reach RocksDB.

    `freeze`, `evict` and `settle_all` belong to the owner's thread; `settle` may come from any.
    """

    def __init__(self, parts: Parts, directory: Path, *, entries: int, weight: int, logging: bool) -> None:
        self.parts = parts
        self.limit = entries
        self.weight_limit = weight
        self.tables: list[Table] = []
        self._directory = directory
        directory.mkdir(parents=True, exist_ok=True)
        self._epoch = 0
        self._pending: deque[Generation] = deque()
        self._writing = threading.RLock()
        self._swapping = threading.Lock()
        self._closed = False
        self._settler = 0
        self.log = self._new_log(logging)
        self.on_eviction: Callable[[], None] = _nothing
        """Called on the owner's thread after entries were written and logged before a barrier asked for it."""

    def _new_log(self, enabled: bool) -> Changelog:
        self._epoch += 1
        return Changelog(self._directory / f"epoch-{self._epoch}.arrow", enabled=enabled)

    def add_table(self, table: Table) -> None:
        self.tables.append(table)

    # -- barrier

    def freeze(self, capture: Path | None, *, log_next: bool) -> Generation:
        """The synchronous part of a snapshot: swap the dirty dicts away; takes as long for any size."""
        with self._swapping:
            contents = []
            for table in self.tables:
                if table._dirty:
                    contents.append((table, table._dirty))
                    table._frozen = (*table._frozen, table._dirty)
                    table._dirty, table._weight = table.no_changes(), 0
                    table.layers_changed()
            generation = Generation(self._epoch, contents, self.log, capture)
            self._pending.append(generation)
        self.log = self._new_log(log_next)
        return generation

    def has_changes(self) -> bool:
        """Whether anything was changed since the last barrier."""
        return self.log.rows > 0 or any(table._dirty for table in self.tables)

    def restart_log(self) -> None:
        """Everything held is stored elsewhere: record changes from here on."""
        self.log.give_up()
        self.log = self._new_log(True)

    def dirty_rows(self) -> int:
        """About how many changes are not yet in the log."""
        return sum(len(layer) for table in self.tables for layer in (table._dirty, *table._frozen))

    # -- settling

    def settle(self, through: Generation) -> None:
        """Write frozen generations up to this one, oldest first, and make their captures."""
        while not through.settled:
            with self._writing:
                if self._closed:
                    raise Closed("the backend was closed while a snapshot was written")
                if self._pending and not through.settled:
                    self._settler = threading.get_ident()
                    try:
                        self._settle_one(self._pending[0])
                        self._pending.popleft()
                    finally:
                        self._settler = 0

    def is_settling_elsewhere(self) -> bool:
        """Whether another thread writes a frozen generation just now, for which the owner would have to wait."""
        return self._settler not in (0, threading.get_ident())

    def settle_all(self) -> None:
        """Make room for later changes: everything frozen is written, captures included."""
        while self._pending:
            self.settle(self._pending[-1])

    def _settle_one(self, generation: Generation) -> None:
        self._write(_operations_of(generation.contents, self._existing), generation.log)
        generation.log.seal()
        if generation.capture is not None and not generation.captured:
            self._capture(generation.capture)
            generation.captured = True
        with self._swapping:
            for table, dirty in generation.contents:
                table._frozen = tuple(layer for layer in table._frozen if layer is not dirty)
                table.layers_changed()
        generation.settled = True
        release, generation.contents = generation.contents, []
        for _, dirty in release:
            _release(dirty)

    def _capture(self, directory: Path) -> None:
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True)
        try:
            for part in self.parts.parts:
                part.store.checkpoint(directory / str(part.number))
        except HoldfastError:
            shutil.rmtree(directory, ignore_errors=True)
            raise

    def _write(self, operations: Iterator[Operation], log: Changelog) -> None:
        log.start_run()
        while chunk := list(islice(operations, LOG_ROWS)):
            self.parts.write(chunk)
            log.append(chunk)

    # -- the owner

    def apply(self, operations: Iterable[Operation]) -> None:
        """Write sorted operations at once, after everything frozen. For batches that need no caching."""
        with self._writing:
            self.settle_all()
            self._write(iter(operations), self.log)
        self.on_eviction()

    def evict(self, table: Table, count: int = EVICT_ENTRIES) -> None:
        """Write the oldest dirty entries of a state and forget them; nothing is lost if that fails."""
        self.settle_all()
        dirty = table._dirty
        oldest = sorted(islice(dirty, count))
        operations: Iterator[Operation]
        if table.collection:
            operations = _operations_of([(table, {key: dirty[key] for key in oldest})], self._existing)
        else:
            operations = zip(oldest, table.all_stored(list(map(dirty.__getitem__, oldest))))
        with self._writing:
            self._write(operations, self.log)
        self.on_eviction()
        if len(oldest) == len(dirty):
            table._dirty, table._weight = table.no_changes(), 0
            return
        table._weight -= table._weight * len(oldest) // len(dirty)
        for key in oldest:
            del dirty[key]

    def flush(self) -> None:
        """Write every dirty entry of every state."""
        self.settle_all()
        for table in self.tables:
            while table._dirty:
                self.evict(table)

    def _existing(self, prefix: bytes) -> list[bytes]:
        """The stored entry keys of a list or map that is being replaced."""
        return list(self.parts.scan(prefix, after(prefix), keys_only=True))

    def close(self) -> None:
        with self._writing:
            self._closed = True
            self._pending.clear()
            self.log.give_up()


def after(prefix: bytes) -> bytes:
    """The smallest key above every key with this prefix. Entry keys never start with sixteen set bits and more."""
    stripped = prefix.rstrip(b"\xff")
    return stripped[:-1] + bytes([stripped[-1] + 1]) if stripped else b"\xff" * (len(prefix) + 16)


def _operations_of(contents: list[tuple[Table, Dirty]],
                   existing: Callable[[bytes], list[bytes]]) -> Iterator[Operation]:
    """All changes as point operations in key order; sorted group by group, so that no sort takes long.

    An entry key is the key group, then the state id: within a group the states follow one another.
    """
    ordered = sorted(contents, key=_state_id)
    grouped = [_by_group(dirty) for _, dirty in ordered]
    for group in sorted(set().union(*grouped)):
        for (table, dirty), groups in zip(ordered, grouped):
            keys = groups.pop(group, None)
            if keys is None:
                continue
            if table.collection:
                yield from sorted([operation for key in keys for operation in
                                   _bucket_operations(key, dirty[key], existing)], key=_first)
            else:
                keys.sort()
                yield from zip(keys, table.all_stored(list(map(dirty.__getitem__, keys))))


def _by_group(dirty: Dirty) -> dict[bytes, list[bytes]]:
    groups: defaultdict[bytes, list[bytes]] = defaultdict(list)
    for key in list(dirty):
        groups[key[:2]].append(key)
    return groups


def _state_id(content: tuple[Table, Dirty]) -> bytes:
    return content[0].state_id


def _nothing() -> None:
    """No log to trim."""


def _first(operation: Operation) -> bytes:
    return operation[0]


def _bucket_operations(prefix: bytes, bucket: Bucket, existing: Callable[[bytes], list[bytes]]) -> list[Operation]:
    changes = {prefix + suffix: value for suffix, value in list(bucket.items.items())}
    if bucket.cleared:
        for key in existing(prefix):
            changes.setdefault(key, None)
    return list(changes.items())


def _release(dirty: Dirty) -> None:
    """Free a generation piecemeal: dropping a large dict at once stops every thread for milliseconds."""
    pop = dirty.popitem
    while dirty:
        for _ in range(min(WRITE_CHUNK, len(dirty))):
            pop()
