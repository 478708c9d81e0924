"""The service's SQLite file: one connection that writes, one that reads, and the schema.

WAL mode: readers never wait for a writer. What a transaction has committed survives a SIGKILL of the service; only a
crash of the machine may take the last moments. Pages are moved from the log to the file by `tidy`, beside the writers,
so that no request waits for a disk.
"""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from statebackend.errors import IncompatibleState, Unavailable

SCHEMA_VERSION = 1
_SCHEMA = """
create table jobs (
    id text primary key, name text not null, state text not null, start_time integer not null,
    end_time integer not null default -1, last_seen integer not null, registration text not null,
    live text not null default '{}');
create table checkpoints (
    job_id text not null, checkpoint_id integer not null, record text not null,
    primary key (job_id, checkpoint_id)) without rowid;
create table commands (
    request_id text primary key, job_id text not null, kind text not null, arguments text not null,
    status text not null, result text not null default '{}', created integer not null);
create index commands_by_job on commands (job_id, status);
create table operations (
    id text primary key, kind text not null, arguments text not null, status text not null, progress real not null,
    result text not null default '{}', created integer not null, ended integer);
create table exceptions (job_id text not null, timestamp integer not null, message text not null);
create index exceptions_by_job on exceptions (job_id, timestamp);
create table launches (job_id text primary key, pid integer, arguments text not null, started integer not null);
"""
_LONG_LOG = 8 << 20


class Database:
    """Safe to use from any thread. A failure of the file or the disk is `Unavailable`, and changes nothing."""

    def __init__(self, path: Path) -> None:
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._writing, self._reading = threading.Lock(), threading.Lock()
        try:
            self._writer = self._connect()
            self._create()
            self._reader = self._connect()
        except sqlite3.Error as error:
            raise Unavailable(f"the service's database can't be opened: {error}", path=str(path)) from error

    def _connect(self) -> sqlite3.Connection:
        connection = sqlite3.connect(self._path, check_same_thread=False, isolation_level=None)
        for setting in ("busy_timeout = 5000", "journal_mode = wal", "synchronous = normal", "wal_autocheckpoint = 0"):
            connection.execute(f"pragma {setting}")
        return connection

    def _create(self) -> None:
        with self.transaction() as writer:
            (version,) = writer.execute("pragma user_version").fetchone()
            if version == 0:
                for statement in _SCHEMA.split(";"):
                    writer.execute(statement)
                writer.execute(f"pragma user_version = {SCHEMA_VERSION}")
            elif version != SCHEMA_VERSION:
                raise IncompatibleState("the service's database has another version", path=str(self._path),
                                        expected=SCHEMA_VERSION, found=version, hint="start with another --database")

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """All of what is written inside, or nothing."""
        with self._writing:
            try:
                self._writer.execute("begin immediate")
                try:
                    yield self._writer
                except BaseException:
                    self._writer.execute("rollback")
                    raise
                self._commit()
            except sqlite3.Error as error:
                raise Unavailable(f"the service's records can't be written: {error}", path=str(self._path),
                                  hint="is the disk full?") from error

    def _commit(self) -> None:
        try:
            self._writer.execute("commit")
        except sqlite3.Error:
            if self._writer.in_transaction:
                self._writer.execute("rollback")
            raise

    def rows(self, statement: str, *values: Any) -> list[tuple[Any, ...]]:
        """What a SELECT finds among all that is committed."""
        with self._reading, self._as_unavailable():
            return self._reader.execute(statement, values).fetchall()

    def scan(self, statement: str) -> list[tuple[Any, ...]]:
        """Like `rows` for a SELECT over much, on a connection of its own: nobody waits for it."""
        with self._as_unavailable(), closing(self._connect()) as connection:
            return connection.execute(statement).fetchall()

    def tidy(self) -> None:
        """Move what is committed from the log into the file, which holds up nobody; then start the log anew if it is long.

        The second step finds only what was written during the first, because under a steady load the log never ends.
        """
        with self._as_unavailable("moved from the log"), closing(self._connect()) as connection:
            connection.execute("pragma wal_checkpoint(passive)")
            if self._log_bytes() > _LONG_LOG:
                with self._writing:
                    connection.execute("pragma wal_checkpoint(truncate)")

    def _log_bytes(self) -> int:
        log = self._path.with_name(self._path.name + "-wal")
        return log.stat().st_size if log.exists() else 0

    @contextmanager
    def _as_unavailable(self, what: str = "read") -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise Unavailable(f"the service's records can't be {what}: {error}", path=str(self._path)) from error

    def close(self) -> None:
        with self._writing, self._reading:
            self._reader.close()
            self._writer.close()
