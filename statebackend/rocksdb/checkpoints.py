"""Which way each snapshot is stored, and what the next one may build on.

A snapshot is relative to the last completed one: a delta on top of its files, as long as the log stays smaller than
the state; then a materialisation. Until a snapshot is completed its changes belong to every later one too.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from statebackend.backend import PendingBase
from statebackend.files import SnapshotTarget, StateFile
from statebackend.rocksdb.changelog import Changelog
from statebackend.rocksdb.handles import Chain
from statebackend.rocksdb.options import RocksDBOptions
from statebackend.rocksdb.snapshot import (
    LIVE,
    DeltaSnapshot,
    Description,
    FullSnapshot,
    MaterialisedSnapshot,
    RocksSnapshot,
)
from statebackend.rocksdb.writeback import Generation, WriteBack

ROWS_THAT_TELL = 100
"""A log of fewer rows is mostly the frame of its file."""
Stored = Mapping[tuple[int, str, int], StateFile]


@dataclass(frozen=True)
class _Finished:
    """A snapshot whose files are stored and whose checkpoint is not completed yet."""

    generation: int
    chain: Chain | None
    tables: Stored


@dataclass(frozen=True)
class _Epoch:
    number: int
    log: Changelog


class Checkpoints:
    """The snapshots of one keyed backend. All calls come from the owner; `_finished` from a snapshot's thread."""

    def __init__(self, engine: WriteBack, directory: Path, options: RocksDBOptions, *, fresh: bool) -> None:
        self._engine = engine
        self._directory = directory
        self._floor = options.size("log_floor_bytes")
        self._log_files = options.log_max_files
        self.patience = 1
        """How many times its limits a log may reach before a snapshot materialises: callers that make bases raise it."""
        self._chain: Chain | None = Chain() if fresh else None
        """What the log is relative to: nothing at first; None where only a materialisation can be the next."""
        self._tables: Stored = {}
        self._completed = 0
        self._epochs: list[_Epoch] = []
        self._row_bytes_seen = 0.0
        self._done: dict[int, _Finished] = {}
        self._running: dict[int, RocksSnapshot] = {}
        self._tables_under: dict[int, Stored] = {}
        """The table files of the chain that a delta was begun on; another snapshot may complete while it runs."""
        self._lock = threading.Lock()
        engine.on_eviction = self.trim_log

    def snapshot(self, checkpoint_id: int, target: SnapshotTarget, description: Description, live: LIVE | None, *,
                 full: bool) -> RocksSnapshot:
        """The synchronous part: decide the way, freeze, hand out the rest."""
        materialise = not full and self._should_materialise()
        capture = self._directory / f"{checkpoint_id}-{self._engine._epoch}" if full or materialise else None
        generation = self._engine.freeze(capture, log_next=True)
        self._epochs.append(_Epoch(generation.number, generation.log))
        arguments = (checkpoint_id, self._engine, generation, target, description, self._finished)
        snapshot: RocksSnapshot
        if full:
            snapshot = FullSnapshot(*arguments).keeping(live)
        elif materialise:
            snapshot = MaterialisedSnapshot(*arguments).reusing(self._tables)
        else:
            assert self._chain is not None
            snapshot = DeltaSnapshot(*arguments).since(self._chain, [epoch.log for epoch in self._epochs])
            self._tables_under[checkpoint_id] = self._tables
        self._running[checkpoint_id] = snapshot
        return snapshot

    def _should_materialise(self) -> bool:
        chain = self._chain
        logs = [*(epoch.log for epoch in self._epochs), self._engine.log]
        if chain is None or not all(log.complete for log in logs) or len(chain.log) + 1 > self._log_files * self.patience:
            return True
        logged, rows = sum(log.bytes for log in logs), self._engine.dirty_rows()
        return chain.log_bytes + logged + int(rows * self._row_bytes()) > self._log_limit(chain) * self.patience

    def _row_bytes(self) -> float:
        """About what a change takes in the log: as the last ones did, else as the stored entries do, and some more."""
        if self._row_bytes_seen:
            return 1.2 * self._row_bytes_seen
        keys = self._engine.parts.estimated_keys()
        return 1.2 * self._engine.parts.live_bytes() / keys if keys else 48

    def _log_limit(self, chain: Chain | None) -> int:
        """A log may grow to the size of what it is a log to, and to the floor in any case."""
        return max(self._floor, sum(part.size for part in chain.parts) if chain is not None else 0)

    def trim_log(self) -> None:
        """Stop recording changes once the next snapshot has to materialise anyway."""
        log, limit = self._engine.log, self._log_limit(self._chain)
        if self._row_bytes_seen and 2 * self._row_bytes_seen * log.rows < limit * self.patience:
            return  # far from it: this comes after each eviction, and asking the file takes its time
        if self._epochs:  # a materialisation may be under way, whose size is not known yet
            limit = max(limit, self._engine.parts.live_bytes())
        if log.bytes > limit * self.patience:
            log.give_up()

    def _finished(self, checkpoint_id: int, generation: Generation, chain: Chain | None) -> None:
        with self._lock:
            snapshot = self._running.get(checkpoint_id)
            if snapshot is None:
                return  # aborted, or a newer one is completed: nothing may build on it
            tables = snapshot.uploaded if isinstance(snapshot, MaterialisedSnapshot) else \
                self._tables_under.pop(checkpoint_id, {})
            self._done[checkpoint_id] = _Finished(generation.number, chain, tables)
            if generation.log.rows > ROWS_THAT_TELL:
                self._row_bytes_seen = generation.log.bytes / generation.log.rows

    def completed(self, checkpoint_id: int) -> None:
        """Later snapshots build on this one."""
        with self._lock:
            finished = self._done.pop(checkpoint_id, None)
            for older in [number for number in self._done if number < checkpoint_id]:
                del self._done[older]
            self._running = {number: snapshot for number, snapshot in self._running.items() if number > checkpoint_id}
            self._tables_under = {number: tables for number, tables in self._tables_under.items()
                                  if number > checkpoint_id}
        if finished is None or finished.generation <= self._completed:
            return
        self._completed = finished.generation
        self._chain = finished.chain
        self._tables = finished.tables if finished.chain is not None else {}
        self._epochs = [epoch for epoch in self._epochs if epoch.number > finished.generation]

    def new_base(self, target: SnapshotTarget, description: Description) -> RocksBase | None:
        """A materialisation of what the newest snapshot holds, to be made beside the next ones."""
        under = self.newest_chain()
        if under is None or not self._wants_base(under) or self._engine.has_changes():
            return None
        generation = self._engine.freeze(self._directory / f"base-{self._engine._epoch}", log_next=True)
        self._epochs.append(_Epoch(generation.number, generation.log))
        return RocksBase(self, under, self.tables, self._engine, generation, target, description)

    def _wants_base(self, chain: Chain) -> bool:
        return len(chain.log) >= self._log_files or chain.log_bytes > self._log_limit(chain)

    def rebase(self, under: Chain, base: Chain, tables: Stored) -> bool:
        """Put a new base under the log: `base` holds what `under` did, which the chain has grown from.

        Not where the chain came to lie on another base meanwhile: files that ours shares with the old one may be gone.
        """
        chain = self._chain
        if chain is None or self._done or self._running or chain.parts != under.parts or \
                chain.log[:len(under.log)] != under.log:
            return False
        self._chain, self._tables = Chain(base.parts, chain.log[len(under.log):]), tables
        return True

    def newest_chain(self) -> Chain | None:
        """What the newest finished snapshot holds, completed or not."""
        with self._lock:
            return self._done[max(self._done)].chain if self._done else self._chain

    @property
    def tables(self) -> Stored:
        """The table files of the newest finished snapshot."""
        with self._lock:
            return self._done[max(self._done)].tables if self._done else self._tables

    def adopt(self, chain: Chain, tables: Stored) -> None:
        """The state is exactly what this chain holds, whoever stored it: the next snapshot builds on it."""
        with self._lock:
            self._done.clear()
            self._running.clear()
            self._tables_under.clear()
        self._epochs.clear()
        self._chain, self._tables = chain, tables

    def aborted(self, checkpoint_id: int) -> None:
        """Nothing builds on this one; its changes stay in the epochs that the next snapshot covers."""
        with self._lock:
            snapshot = self._running.pop(checkpoint_id, None)
            self._tables_under.pop(checkpoint_id, None)
            self._done.pop(checkpoint_id, None)
        if snapshot is not None:
            snapshot.cancel()


class RocksBase(PendingBase):
    """A materialisation that takes the place of a chain's files once it is stored."""

    def __init__(self, checkpoints: Checkpoints, under: Chain, stored: Stored, engine: WriteBack, generation: Generation,
                 target: SnapshotTarget, description: Description) -> None:
        self._checkpoints, self._under = checkpoints, under
        self._made: Chain | None = None
        self._snapshot = MaterialisedSnapshot(generation.number, engine, generation, target, description, self._finished)
        self._snapshot.reusing(stored)

    def _finished(self, _number: int, _generation: Generation, chain: Chain | None) -> None:
        self._made = chain

    def run(self) -> None:
        self._snapshot.run()

    def cancel(self) -> None:
        self._snapshot.cancel()

    def adopt(self) -> bool:
        return self._made is not None and self._checkpoints.rebase(self._under, self._made, self._snapshot.uploaded)
