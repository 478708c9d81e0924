"""Background clean-up: the sweep that finds expired entries, and the thread that compacts what was deleted."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any

from statebackend.rocksdb.base import MISSING, TIME_WIDTH, RocksState
from statebackend.rocksdb.writeback import WriteBack, after

COMPACT_SHARE = 0.1
"""A pass that removed this share of what it saw is followed by a compaction; less leaves in time by itself."""


class Sweeper:
    """A cursor over the entries of all states with TTL: a tick examines some, a pass all of them."""

    def __init__(self, engine: WriteBack, states: Callable[[], list[RocksState]], compact: Callable[[], None]) -> None:
        self._engine = engine
        self._states = states
        self._compact = compact
        self._walk: Iterator[int] | None = None
        self._examined = self._removed = 0

    def tick(self, limit: int) -> int:
        """Examine up to `limit` entries from where the last tick stopped; how many were removed."""
        if self._walk is None:
            states = [state for state in self._states() if state._expiry is not None and state._expiry.background]
            if not states:
                return 0
            self._walk, self._examined, self._removed = self._pass(states), 0, 0
        before = self._removed
        for _ in range(limit):
            if next(self._walk, None) is None:
                self._walk = None
                self._finish()
                break
        return self._removed - before

    def _finish(self) -> None:
        if self._removed and self._removed >= COMPACT_SHARE * self._examined:
            for state in self._states():
                while state._dirty and state._expiry is not None:
                    self._engine.evict(state)
            self._compact()

    def _pass(self, states: list[RocksState]) -> Iterator[int]:
        """One step for each entry examined."""
        for state in states:
            yield from self._dirty_entries(state)
        for group in self._engine.parts.groups():
            for state in states:
                yield from self._stored_entries(state, group.to_bytes(2, "big") + state.state_id)

    def _dirty_entries(self, state: RocksState) -> Iterator[int]:
        for prefix in list(state._dirty):
            change = state._dirty.get(prefix)
            if not state.collection:
                yield self._examine(state, prefix, b"", state.stored(change))
            elif change is not None:
                for suffix in list(change.items):
                    yield self._examine(state, prefix, suffix, change.items.get(suffix))

    def _stored_entries(self, state: RocksState, prefix: bytes) -> Iterator[int]:
        """Rows of RocksDB in chunks, each read by a scan of its own: no iterator outlives a tick for long."""
        begin, end = prefix, after(prefix)
        while rows := self._engine.parts.scan(begin, end).take(512):
            for key, data in rows:
                prefix, suffix = key, b""
                if state.collection:
                    cut = state._suffix_start(key)  # type: ignore[attr-defined]
                    prefix, suffix = key[:cut], key[cut:]
                yield 0 if self._is_changed(state, prefix, suffix) else self._examine(state, prefix, suffix, data)
            begin = rows[-1][0] + b"\x00"

    def _is_changed(self, state: RocksState, prefix: bytes, suffix: bytes) -> bool:
        """Whether RocksDB no longer has the last word about an entry."""
        for layer in (state._dirty, *state._frozen):
            change: Any = layer.get(prefix, MISSING)
            if change is not MISSING and (not state.collection or change.cleared or suffix in change.items):
                return True
        return False

    def _examine(self, state: RocksState, prefix: bytes, suffix: bytes, data: bytes | None) -> int:
        self._examined += 1
        expiry = state._expiry
        if data is None or expiry is None or data[:TIME_WIDTH] > expiry.limit():
            return 1
        if state.collection:
            state._put(prefix, suffix, None)  # type: ignore[attr-defined]
        else:
            state._dirty[prefix] = None
            state._grown()
        self._removed += 1
        return 1


class Maintenance:
    """One thread for work that nobody waits for. Errors are kept and raised by the next `check`."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._idle = threading.Event()
        self._idle.set()
        self._open = 0
        self._lock = threading.Lock()
        self._stopping = False
        self.error: BaseException | None = None

    def submit(self, job: Callable[[], None]) -> None:
        with self._lock:
            if self._stopping:
                return
            self._open += 1
            self._idle.clear()
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=f"holdfast-{self._name}", daemon=True)
                self._thread.start()
        self._jobs.put(job)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                if not self._stopping:
                    job()
            except Exception as error:
                self.error = error
            with self._lock:
                self._open -= 1
                if not self._open:
                    self._idle.set()

    def wait(self, timeout: float | None = None) -> bool:
        """Until all work is done."""
        return self._idle.wait(timeout)

    def close(self) -> None:
        """Finish what runs, drop the rest."""
        with self._lock:
            self._stopping = True
            thread, self._thread = self._thread, None
        if thread is not None:
            self._jobs.put(None)
            thread.join()
