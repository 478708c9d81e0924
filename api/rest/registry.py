"""The service's own records in SQLite: jobs, their checkpoints, commands to them, and background operations.

One connection, one lock, WAL mode: every call is short, and what a call has returned survives a SIGKILL of the service.
"""

from __future__ import annotations

import sqlite3
import threading
import time
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from statebackend.errors import Conflict, IncompatibleState, InvalidRequest, NotFound

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
ENDED_STATES = frozenset({"FINISHED", "CANCELED", "FAILED"})
JOB_STATES = ENDED_STATES | {"INITIALIZING", "CREATED", "RUNNING", "RESTARTING", "CANCELLING", "SUSPENDED"}


def now_ms() -> int:
    return time.time_ns() // 1_000_000


def new_id() -> str:
    return uuid.uuid4().hex


@dataclass(frozen=True)
class JobRecord:
    """A job as last heard of. `lost`: it was running and has stopped reporting."""

    id: str
    name: str
    state: str
    start_time: int
    end_time: int
    last_seen: int
    registration: dict[str, Any]
    live: dict[str, Any]
    lost: bool

    @property
    def running(self) -> bool:
        return self.state not in ENDED_STATES


@dataclass(frozen=True)
class Command:
    """Something a job is asked to do, once. IN_PROGRESS until the job reports, or the job ends without doing it."""

    request_id: str
    job_id: str
    kind: str
    arguments: dict[str, Any]
    status: str
    result: dict[str, Any]
    created: int


@dataclass(frozen=True)
class Operation:
    """Background work of the service: QUEUED, RUNNING, COMPLETED, FAILED or CANCELED."""

    id: str
    kind: str
    arguments: dict[str, Any]
    status: str
    progress: float
    result: dict[str, Any]
    created: int
    ended: int | None


_JOB_COLUMNS = "id, name, state, start_time, end_time, last_seen, registration, live"
_COMMAND_COLUMNS = "request_id, job_id, kind, arguments, status, result, created"
_OPERATION_COLUMNS = "id, kind, arguments, status, progress, result, created, ended"


class Registry:
    """All records. Safe to use from any thread."""

    def __init__(self, path: Path, *, lost_after_ms: int = 15_000, history: int = 100) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._lock = threading.RLock()
        self._database = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
        self._lost_after_ms, self._history = lost_after_ms, history
        self._database.execute("pragma journal_mode = wal")
        self._database.execute("pragma synchronous = normal")
        self._database.execute("pragma busy_timeout = 5000")
        self._seen: dict[str, int] = {}
        self._versions: dict[str, int] = {}
        self._changes = 0
        self._started = now_ms()
        self._create(path)

    def _create(self, path: Path) -> None:
        with self._transaction():
            (version,) = self._database.execute("pragma user_version").fetchone()
            if version == 0:
                for statement in _SCHEMA.split(";"):
                    self._database.execute(statement)
                self._database.execute(f"pragma user_version = {SCHEMA_VERSION}")
            elif version != SCHEMA_VERSION:
                raise IncompatibleState("the service's database has another version", path=str(path),
                                        expected=SCHEMA_VERSION, found=version, hint="start with another --database")

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with self._lock:
            self._database.execute("begin immediate")
            try:
                yield self._database
            except BaseException:
                self._database.execute("rollback")
                raise
            self._database.execute("commit")

    def close(self) -> None:
        with self._lock:
            self._database.close()

    # Jobs

    def register_job(self, job_id: str, name: str, registration: dict[str, Any], state: str = "RUNNING") -> None:
        """A job reports for the first time, or again after a restart of its own or of the service."""
        moment = now_ms()
        start = int(registration.get("start_time") or moment)
        with self._transaction() as database:
            known = database.execute("select name from jobs where id = ?", (job_id,)).fetchone()
            if known is not None and known[0] != name:
                raise Conflict("this job id belongs to another job", job_id=job_id, expected=known[0], found=name)
            database.execute(
                "insert into jobs (id, name, state, start_time, last_seen, registration) values (?, ?, ?, ?, ?, ?) "
                "on conflict (id) do update set state = excluded.state, end_time = -1, "
                "last_seen = excluded.last_seen, registration = excluded.registration",
                (job_id, name, state, start, moment, _text(registration)))
            self._seen[job_id] = moment
            self._touch(job_id)

    def heartbeat(self, job_id: str, state: str, live: dict[str, Any], checkpoints: Iterable[dict[str, Any]],
                  exceptions: Iterable[dict[str, Any]] = ()) -> list[Command]:
        """What a job tells of itself; the answer is what it is asked to do and has not yet reported on."""
        if state not in JOB_STATES:
            raise InvalidRequest("unknown job state", found=state, expected=sorted(JOB_STATES))
        moment = now_ms()
        records, failures = list(checkpoints), list(exceptions)
        with self._transaction() as database:
            updated = database.execute(
                "update jobs set state = ?, last_seen = ?, live = ?, end_time = case when ? then "
                "(case when end_time < 0 then ? else end_time end) else -1 end where id = ?",
                (state, moment, _text(live), state in ENDED_STATES, moment, job_id))
            if updated.rowcount == 0:
                raise NotFound("no such job", job_id=job_id, hint="register it first")
            database.executemany("insert or replace into checkpoints values (?, ?, ?)",
                                 [(job_id, _checkpoint_id(record), _text(record)) for record in records])
            database.executemany("insert into exceptions values (?, ?, ?)",
                                 [(job_id, int(item.get("timestamp", moment)), str(item.get("message", "")))
                                  for item in failures])
            if records:
                self._trim(database, job_id)
            if state in ENDED_STATES:
                self._fail_open_commands(database, job_id, f"the job is {state} and did not do it")
            self._seen[job_id] = moment
            self._touch(job_id)
            return self._open_commands(database, job_id)

    def _trim(self, database: sqlite3.Connection, job_id: str) -> None:
        database.execute("delete from checkpoints where job_id = ?1 and checkpoint_id <= (select checkpoint_id from "
                         "checkpoints where job_id = ?1 order by checkpoint_id desc limit 1 offset ?2)",
                         (job_id, self._history))
        database.execute("delete from exceptions where job_id = ?1 and rowid not in (select rowid from exceptions where "
                         "job_id = ?1 order by timestamp desc limit 100)", (job_id,))

    def job(self, job_id: str) -> JobRecord:
        with self._lock:
            row = self._database.execute(f"select {_JOB_COLUMNS} from jobs where id = ?", (job_id,)).fetchone()
        if row is None:
            raise NotFound("no such job", job_id=job_id, hint="GET /jobs/overview lists the jobs")
        return self._job(row)

    def jobs(self) -> list[JobRecord]:
        with self._lock:
            rows = self._database.execute(f"select {_JOB_COLUMNS} from jobs order by start_time desc, id").fetchall()
        return [self._job(row) for row in rows]

    def _job(self, row: tuple[Any, ...]) -> JobRecord:
        seen = max(row[5], self._seen.get(row[0], 0), self._started)
        lost = row[2] not in ENDED_STATES and now_ms() - seen > self._lost_after_ms
        return JobRecord(row[0], row[1], row[2], row[3], row[4], row[5], _json(row[6]), _json(row[7]), lost)

    def version(self, job_id: str) -> int:
        """Grows with every change of the job's records: what caches and entity tags are made of."""
        return self._versions.get(job_id, 0)

    @property
    def changes(self) -> int:
        """Grows with every change of any job's records."""
        return self._changes

    def second(self) -> int:
        return now_ms() // 1000

    def _touch(self, job_id: str) -> None:
        self._changes += 1
        self._versions[job_id] = self._versions.get(job_id, 0) + 1

    def checkpoints(self, job_id: str) -> list[dict[str, Any]]:
        """The records of a job's checkpoints, newest first."""
        with self._lock:
            rows = self._database.execute(
                "select record from checkpoints where job_id = ? order by checkpoint_id desc", (job_id,)).fetchall()
        return [_json(row[0]) for row in rows]

    def checkpoint(self, job_id: str, checkpoint_id: int) -> dict[str, Any]:
        with self._lock:
            row = self._database.execute("select record from checkpoints where job_id = ? and checkpoint_id = ?",
                                         (job_id, checkpoint_id)).fetchone()
        if row is None:
            raise NotFound("no such checkpoint in the history of this job", job_id=job_id, checkpoint_id=checkpoint_id)
        return _json(row[0])

    def exceptions(self, job_id: str, limit: int) -> list[dict[str, Any]]:
        with self._lock:
            rows = self._database.execute("select timestamp, message from exceptions where job_id = ? "
                                          "order by timestamp desc limit ?", (job_id, limit)).fetchall()
        return [{"timestamp": row[0], "message": row[1]} for row in rows]

    # Commands

    def add_command(self, job_id: str, kind: str, arguments: dict[str, Any], request_id: str | None) -> Command:
        """Ask a job to do something. The same request id again gives the same command: a retry is safe."""
        chosen = _request_id(request_id)
        with self._transaction() as database:
            known = self._find_command(database, chosen)
            if known is not None:
                if (known.job_id, known.kind, known.arguments) != (job_id, kind, arguments):
                    raise Conflict("this trigger id was used for something else", trigger_id=chosen)
                return known
            self._require_willing(database, job_id, kind)
            database.execute("insert into commands (request_id, job_id, kind, arguments, status, created) "
                             "values (?, ?, ?, ?, 'IN_PROGRESS', ?)",
                             (chosen, job_id, kind, _text(arguments), now_ms()))
            self._touch(job_id)
        return self.command(chosen)

    def _require_willing(self, database: sqlite3.Connection, job_id: str, kind: str) -> None:
        row = database.execute(f"select {_JOB_COLUMNS} from jobs where id = ?", (job_id,)).fetchone()
        if row is None:
            raise NotFound("no such job", job_id=job_id, hint="GET /jobs/overview lists the jobs")
        job = self._job(row)
        if not job.running:
            raise Conflict(f"the job is {job.state}: there is nothing to {kind}", job_id=job_id)
        if job.lost:
            raise Conflict("the job has stopped reporting and can't be asked", job_id=job_id,
                           hint="look at its process; it is asked again when it reports")
        ending = [command.kind for command in self._open_commands(database, job_id) if command.kind in ("stop", "cancel")]
        if ending and kind != "cancel":
            raise Conflict(f"the job has been asked to {ending[0]} already", job_id=job_id)

    def command(self, request_id: str, job_id: str | None = None) -> Command:
        with self._lock:
            found = self._find_command(self._database, request_id)
        if found is None or (job_id is not None and found.job_id != job_id):
            raise NotFound("no such trigger", trigger_id=request_id)
        return found

    def finish_command(self, job_id: str, request_id: str, result: dict[str, Any]) -> None:
        """The job reports what came of a command; a second report changes nothing."""
        self.command(request_id, job_id)
        status = "FAILED" if result.get("failure") else "COMPLETED"
        with self._transaction() as database:
            database.execute("update commands set status = ?, result = ? where request_id = ? and status = 'IN_PROGRESS'",
                             (status, _text(result), request_id))
            self._touch(job_id)

    def fail_commands_of_lost_jobs(self) -> None:
        """A job that died in the middle of a command will not report on it: the one who asked is told."""
        for job in self.jobs():
            if job.lost and now_ms() - job.last_seen > 4 * self._lost_after_ms:
                with self._transaction() as database:
                    self._fail_open_commands(database, job.id, "the job has stopped reporting")

    def _fail_open_commands(self, database: sqlite3.Connection, job_id: str, why: str) -> None:
        for command in self._open_commands(database, job_id):
            # A stop or cancel that ends the job has done its work even if the last report got lost.
            done = command.kind == "cancel"
            database.execute("update commands set status = ?, result = ? where request_id = ?",
                             ("COMPLETED" if done else "FAILED", _text({} if done else {"failure": why}),
                              command.request_id))

    def _open_commands(self, database: sqlite3.Connection, job_id: str) -> list[Command]:
        rows = database.execute(f"select {_COMMAND_COLUMNS} from commands where job_id = ? and status = 'IN_PROGRESS' "
                                "order by created", (job_id,)).fetchall()
        return [_command(row) for row in rows]

    def _find_command(self, database: sqlite3.Connection, request_id: str) -> Command | None:
        row = database.execute(f"select {_COMMAND_COLUMNS} from commands where request_id = ?", (request_id,)).fetchone()
        return None if row is None else _command(row)

    # Operations

    def add_operation(self, kind: str, arguments: dict[str, Any], operation_id: str | None) -> tuple[Operation, bool]:
        """A new background operation, or the known one of that id; tells whether it is new."""
        chosen = _request_id(operation_id)
        with self._transaction() as database:
            known = self._find_operation(database, chosen)
            if known is not None:
                if (known.kind, known.arguments) != (kind, arguments):
                    raise Conflict("this trigger id was used for something else", trigger_id=chosen)
                return known, False
            database.execute("insert into operations (id, kind, arguments, status, progress, created) "
                             "values (?, ?, ?, 'QUEUED', 0, ?)", (chosen, kind, _text(arguments), now_ms()))
        return self.operation(chosen), True

    def operation(self, operation_id: str) -> Operation:
        with self._lock:
            found = self._find_operation(self._database, operation_id)
        if found is None:
            raise NotFound("no such operation", operation_id=operation_id)
        return found

    def operations(self, limit: int, before: int | None = None) -> list[Operation]:
        """Operations, newest first; `before` is the creation time of the last one seen."""
        with self._lock:
            rows = self._database.execute(
                f"select {_OPERATION_COLUMNS} from operations where created < ? order by created desc, id limit ?",
                (before if before is not None else 2**62, limit)).fetchall()
        return [_operation(row) for row in rows]

    def unfinished_operations(self) -> list[Operation]:
        with self._lock:
            rows = self._database.execute(f"select {_OPERATION_COLUMNS} from operations where status in "
                                          "('QUEUED', 'RUNNING') order by created").fetchall()
        return [_operation(row) for row in rows]

    def update_operation(self, operation_id: str, status: str, progress: float,
                         result: dict[str, Any] | None = None) -> None:
        ended = now_ms() if status in ("COMPLETED", "FAILED", "CANCELED") else None
        with self._transaction() as database:
            database.execute("update operations set status = ?, progress = ?, result = ?, ended = ? where id = ? and "
                             "status in ('QUEUED', 'RUNNING')",
                             (status, progress, _text(result or {}), ended, operation_id))
            self._changes += 1

    def _find_operation(self, database: sqlite3.Connection, operation_id: str) -> Operation | None:
        row = database.execute(f"select {_OPERATION_COLUMNS} from operations where id = ?", (operation_id,)).fetchone()
        return None if row is None else _operation(row)

    # Jobs that the service started itself

    def record_launch(self, job_id: str, pid: int | None, arguments: dict[str, Any]) -> None:
        with self._transaction() as database:
            database.execute("insert or replace into launches values (?, ?, ?, ?)",
                             (job_id, pid, _text(arguments), now_ms()))

    def launch(self, job_id: str) -> dict[str, Any] | None:
        with self._lock:
            row = self._database.execute("select arguments from launches where job_id = ?", (job_id,)).fetchone()
        return None if row is None else _json(row[0])

    def stopped_to_rescale(self) -> list[Command]:
        """Stops that have their savepoint and whose job was to start again but has not yet."""
        with self._lock:
            rows = self._database.execute(f"select {_COMMAND_COLUMNS} from commands where kind = 'stop' and "
                                          "status = 'COMPLETED' and arguments like '%\"then\"%' and "
                                          "result not like '%restarted_as%'").fetchall()
        return [_command(row) for row in rows]

    def note_restart(self, request_id: str, job_id: str) -> None:
        result = {**self.command(request_id).result, "restarted_as": job_id}
        with self._transaction() as database:
            database.execute("update commands set result = ? where request_id = ?", (_text(result), request_id))

    def note_failed_restart(self, request_id: str, why: str) -> None:
        result = {**self.command(request_id).result, "failure": why}
        with self._transaction() as database:
            database.execute("update commands set status = 'FAILED', result = ? where request_id = ?",
                             (_text(result), request_id))


def _command(row: tuple[Any, ...]) -> Command:
    return Command(row[0], row[1], row[2], _json(row[3]), row[4], _json(row[5]), row[6])


def _operation(row: tuple[Any, ...]) -> Operation:
    return Operation(row[0], row[1], _json(row[2]), row[3], row[4], _json(row[5]), row[6], row[7])


def _request_id(chosen: str | None) -> str:
    if chosen is None:
        return new_id()
    if len(chosen) != 32 or any(digit not in "0123456789abcdef" for digit in chosen):
        raise InvalidRequest("a trigger id has 32 lower-case hex digits", found=chosen)
    return chosen


def _checkpoint_id(record: dict[str, Any]) -> int:
    number = record.get("id")
    if not isinstance(number, int) or not 0 <= number < 2**62:
        raise InvalidRequest("a checkpoint record needs a numeric id", found=number)
    return number


def _text(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def _json(text: str) -> dict[str, Any]:
    decoded: dict[str, Any] = msgspec.json.decode(text)
    return decoded
