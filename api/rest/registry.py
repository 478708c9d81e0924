"""The service's own records: jobs, their checkpoints, commands to them, and background operations.

What a call has returned survives a SIGKILL of the service. Jobs are also kept in memory, as last committed, because
every page asks for all of them and they change with every report.
"""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from api.rest.database import Database
from api.rest.records import (
    ENDED_STATES,
    Beat,
    Command,
    JobRecord,
    Operation,
    from_text,
    new_id,
    now_ms,
    request_id,
    to_text,
)
from statebackend.errors import Conflict, HoldfastError, NotFound

__all__ = ["Command", "JobRecord", "Operation", "Registry", "new_id", "now_ms"]

_JOB_COLUMNS = "id, name, state, start_time, end_time, last_seen, registration, live"
_COMMAND_COLUMNS = "request_id, job_id, kind, arguments, status, result, created"
_OPERATION_COLUMNS = "id, kind, arguments, status, progress, result, created, ended"
_KEPT_EXCEPTIONS = 100


class Registry:
    """All records. Safe to use from any thread."""

    def __init__(self, path: Path, *, lost_after_ms: int = 15_000, history: int = 100) -> None:
        self.database = Database(path)
        self._lost_after_ms, self._history = lost_after_ms, history
        self._jobs = {row[0]: _job(row) for row in self.database.rows(f"select {_JOB_COLUMNS} from jobs")}
        self._asked = {row[0] for row in self.database.rows("select job_id from commands where status = 'IN_PROGRESS'")}
        self._versions: dict[str, int] = {}
        self._changes = 0
        self._order = threading.Lock()  # what is in memory changes in the order in which it was committed
        self._started = now_ms()

    def close(self) -> None:
        self.database.close()

    # Jobs

    def register_job(self, job_id: str, name: str, registration: dict[str, Any], state: str = "RUNNING") -> None:
        """A job reports for the first time, or again after a restart of its own or of the service.

        A new run of a known job knows nothing of what the one before it was asked: who asked is told, and may ask again.
        """
        with self._order:
            known = self._jobs.get(job_id)
            with self.database.transaction() as database:
                job = self._write_registration(database, job_id, name, registration, state)
                if known is not None and known.incarnation != job.incarnation and not known.only_launched:
                    _fail_open_commands(database, job_id, "the job was started again before it was done")
            self._remember(job)

    def _write_registration(self, database: sqlite3.Connection, job_id: str, name: str, registration: dict[str, Any],
                            state: str) -> JobRecord:
        known, moment = self._jobs.get(job_id), now_ms()
        if known is not None and known.name != name and not known.only_launched:
            raise Conflict("this job id belongs to another job", job_id=job_id, expected=known.name, found=name)
        start = known.start_time if known is not None else int(registration.get("start_time") or moment)
        job = JobRecord(job_id, name, state, start, -1, moment, registration, known.live if known is not None else {})
        database.execute(
            "insert into jobs (id, name, state, start_time, last_seen, registration) values (?, ?, ?, ?, ?, ?) "
            "on conflict (id) do update set name = excluded.name, state = excluded.state, end_time = -1, "
            "last_seen = excluded.last_seen, registration = excluded.registration",
            (job_id, name, state, start, moment, to_text(registration)))
        return job

    def heartbeat(self, job_id: str, state: str, live: dict[str, Any], checkpoints: Iterable[dict[str, Any]],
                  exceptions: Iterable[dict[str, Any]] = ()) -> list[Command]:
        """What a job tells of itself; the answer is what it is asked to do and has not yet reported on."""
        (answer,) = self.heartbeats([Beat.of(job_id, state, live, list(checkpoints), list(exceptions))])
        if isinstance(answer, HoldfastError):
            raise answer
        return answer

    def heartbeats(self, beats: Sequence[Beat]) -> list[list[Command] | HoldfastError]:
        """Many jobs' reports in one transaction; the answer to each is its commands, or why it was not taken."""
        answers: list[list[Command] | HoldfastError] = []
        changed: dict[str, JobRecord] = {}
        with self._order:
            with self.database.transaction() as database:
                for beat in beats:
                    known = changed.get(beat.job_id) or self._jobs.get(beat.job_id)
                    if known is None:
                        answers.append(NotFound("no such job", job_id=beat.job_id, hint="register it first"))
                        continue
                    changed[beat.job_id] = self._write_beat(database, beat, known)
                    answers.append(self._commands_for(database, beat.job_id))
            for job in changed.values():
                self._remember(job)
        return answers

    def _commands_for(self, database: sqlite3.Connection, job_id: str) -> list[Command]:
        """Most jobs are asked for nothing, and then the database isn't either."""
        if job_id not in self._asked:
            return []
        commands = _open_commands(database, job_id)
        if not commands:
            self._asked.discard(job_id)
        return commands

    def _write_beat(self, database: sqlite3.Connection, beat: Beat, known: JobRecord) -> JobRecord:
        ended = beat.state in ENDED_STATES
        end = (known.end_time if known.end_time >= 0 else beat.moment) if ended else -1
        database.execute("update jobs set state = ?, last_seen = ?, live = ?, end_time = ? where id = ?",
                         (beat.state, beat.moment, to_text(beat.live), end, beat.job_id))
        if beat.checkpoints:
            database.executemany("insert or replace into checkpoints values (?, ?, ?)",
                                 [(beat.job_id, number, text) for number, text in beat.checkpoints])
            database.execute("delete from checkpoints where job_id = ?1 and checkpoint_id <= (select checkpoint_id from "
                             "checkpoints where job_id = ?1 order by checkpoint_id desc limit 1 offset ?2)",
                             (beat.job_id, self._history))
        if beat.exceptions:
            database.executemany("insert into exceptions values (?, ?, ?)",
                                 [(beat.job_id, moment, message) for moment, message in beat.exceptions])
            database.execute("delete from exceptions where job_id = ?1 and rowid not in (select rowid from exceptions "
                             "where job_id = ?1 order by timestamp desc limit ?2)", (beat.job_id, _KEPT_EXCEPTIONS))
        if ended:
            _fail_open_commands(database, beat.job_id, f"the job is {beat.state} and did not do it")
        return replace(known, state=beat.state, last_seen=beat.moment, live=beat.live, end_time=end)

    def job(self, job_id: str) -> JobRecord:
        known = self._jobs.get(job_id)
        if known is None:
            raise NotFound("no such job", job_id=job_id, hint="GET /jobs/overview lists the jobs")
        return self._seen_now(known, now_ms())

    def jobs(self) -> list[JobRecord]:
        """All jobs, the latest started first."""
        moment = now_ms()
        return sorted((self._seen_now(job, moment) for job in list(self._jobs.values())),
                      key=lambda job: (-job.start_time, job.id))

    def _seen_now(self, job: JobRecord, moment: int) -> JobRecord:
        silent = moment - max(job.last_seen, self._started) > self._lost_after_ms
        return replace(job, lost=True) if silent and job.running else job

    def _remember(self, job: JobRecord) -> None:
        self._jobs[job.id] = job
        self._touch(job.id)

    def version(self, job_id: str) -> int:
        """Grows with every change of the job's records: what caches and entity tags are made of."""
        return self._versions.get(job_id, 0)

    @property
    def changes(self) -> int:
        """Grows with every change of any job's records."""
        return self._changes

    def _touch(self, job_id: str) -> None:
        self._changes += 1
        self._versions[job_id] = self._versions.get(job_id, 0) + 1

    def checkpoints(self, job_id: str) -> list[dict[str, Any]]:
        """The records of a job's checkpoints, newest first."""
        rows = self.database.rows("select record from checkpoints where job_id = ? order by checkpoint_id desc", job_id)
        return [from_text(row[0]) for row in rows]

    def checkpoint(self, job_id: str, checkpoint_id: int) -> dict[str, Any]:
        rows = self.database.rows("select record from checkpoints where job_id = ? and checkpoint_id = ?", job_id,
                                  checkpoint_id)
        if not rows:
            raise NotFound("no such checkpoint in the history of this job", job_id=job_id, checkpoint_id=checkpoint_id)
        return from_text(rows[0][0])

    def last_completed(self) -> dict[str, dict[str, Any]]:
        """The newest completed checkpoint of every job that has one."""
        rows = self.database.scan("select job_id, max(checkpoint_id), record from checkpoints "
                                  "where json_extract(record, '$.status') = 'COMPLETED' group by job_id")
        return {row[0]: from_text(row[2]) for row in rows}

    def failed_checkpoints(self) -> dict[str, int]:
        """How many checkpoints in its history failed, of every job with any."""
        return {row[0]: row[1] for row in self.database.scan(
            "select job_id, count(*) from checkpoints where json_extract(record, '$.status') = 'FAILED' group by job_id")}

    def exceptions(self, job_id: str, limit: int) -> list[dict[str, Any]]:
        rows = self.database.rows("select timestamp, message from exceptions where job_id = ? "
                                  "order by timestamp desc limit ?", job_id, limit)
        return [{"timestamp": row[0], "message": row[1]} for row in rows]

    # Commands

    def add_command(self, job_id: str, kind: str, arguments: dict[str, Any], trigger_id: str | None) -> Command:
        """Ask a job to do something. The same trigger id again gives the same command: a retry is safe."""
        chosen = request_id(trigger_id)
        with self.database.transaction() as database:
            known = _find_command(database, chosen)
            if known is not None:
                if (known.job_id, known.kind, known.arguments) != (job_id, kind, arguments):
                    raise Conflict("this trigger id was used for something else", trigger_id=chosen)
                return known
            self._require_willing(database, job_id, kind)
            command = Command(chosen, job_id, kind, arguments, "IN_PROGRESS", {}, now_ms())
            database.execute("insert into commands (request_id, job_id, kind, arguments, status, created) "
                             "values (?, ?, ?, ?, 'IN_PROGRESS', ?)",
                             (chosen, job_id, kind, to_text(arguments), command.created))
            self._asked.add(job_id)
        self._touch(job_id)
        return command

    def _require_willing(self, database: sqlite3.Connection, job_id: str, kind: str) -> None:
        job = self.job(job_id)
        if not job.running:
            raise Conflict(f"the job is {job.state}: there is nothing to {kind}", job_id=job_id)
        if job.lost:
            raise Conflict("the job has stopped reporting and can't be asked", job_id=job_id,
                           hint="look at its process; it is asked again when it reports")
        ending = [command.kind for command in _open_commands(database, job_id) if command.kind in ("stop", "cancel")]
        if ending and kind != "cancel":
            raise Conflict(f"the job has been asked to {ending[0]} already", job_id=job_id)

    def command(self, trigger_id: str, job_id: str | None = None, *kinds: str) -> Command:
        """The command of a trigger; where they are named, only if it is of that job and one of those kinds."""
        rows = self.database.rows(f"select {_COMMAND_COLUMNS} from commands where request_id = ?", trigger_id)
        found = _command(rows[0]) if rows else None
        if found is None or (job_id is not None and found.job_id != job_id) or (kinds and found.kind not in kinds):
            raise NotFound("no such trigger", trigger_id=trigger_id)
        return found

    def finish_command(self, job_id: str, trigger_id: str, result: dict[str, Any]) -> None:
        """The job reports what came of a command; a second report changes nothing."""
        self.command(trigger_id, job_id)
        status = "FAILED" if result.get("failure") else "COMPLETED"
        with self.database.transaction() as database:
            database.execute("update commands set status = ?, result = ? where request_id = ? and status = 'IN_PROGRESS'",
                             (status, to_text(result), trigger_id))
        self._touch(job_id)

    def fail_commands_of_lost_jobs(self) -> None:
        """A job that died in the middle of a command will not report on it: the one who asked is told."""
        for job in self.jobs():
            if job.lost and job.id in self._asked and now_ms() - job.last_seen > 4 * self._lost_after_ms:
                with self.database.transaction() as database:
                    _fail_open_commands(database, job.id, "the job has stopped reporting")
                self._touch(job.id)

    def stopped_to_rescale(self) -> list[Command]:
        """Stops that have their savepoint and whose job was to start again but has not yet."""
        return [_command(row) for row in self.database.rows(
            f"select {_COMMAND_COLUMNS} from commands where kind = 'stop' and status = 'COMPLETED' and "
            "json_extract(arguments, '$.then') is not null and json_extract(result, '$.restarted_as') is null")]

    def note_restart(self, trigger_id: str, job_id: str) -> None:
        self._set_result(trigger_id, "COMPLETED", {"restarted_as": job_id})

    def note_failed_restart(self, trigger_id: str, why: str) -> None:
        self._set_result(trigger_id, "FAILED", {"failure": why})

    def _set_result(self, trigger_id: str, status: str, more: dict[str, Any]) -> None:
        result = {**self.command(trigger_id).result, **more}
        with self.database.transaction() as database:
            database.execute("update commands set status = ?, result = ? where request_id = ?",
                             (status, to_text(result), trigger_id))

    # Operations

    def add_operation(self, kind: str, arguments: dict[str, Any], operation_id: str | None) -> tuple[Operation, bool]:
        """A new background operation, or the known one of that id; tells whether it is new."""
        chosen = request_id(operation_id)
        with self.database.transaction() as database:
            row = database.execute(f"select {_OPERATION_COLUMNS} from operations where id = ?", (chosen,)).fetchone()
            if row is not None:
                known = _operation(row)
                if (known.kind, known.arguments) != (kind, arguments):
                    raise Conflict("this trigger id was used for something else", trigger_id=chosen)
                return known, False
            database.execute("insert into operations (id, kind, arguments, status, progress, created) "
                             "values (?, ?, ?, 'QUEUED', 0, ?)", (chosen, kind, to_text(arguments), now_ms()))
        self._changes += 1
        return self.operation(chosen), True

    def operation(self, operation_id: str) -> Operation:
        rows = self.database.rows(f"select {_OPERATION_COLUMNS} from operations where id = ?", operation_id)
        if not rows:
            raise NotFound("no such operation", operation_id=operation_id)
        return _operation(rows[0])

    def knows_operation(self, operation_id: str) -> bool:
        return bool(self.database.rows("select 1 from operations where id = ?", operation_id))

    def operations(self, limit: int, after: tuple[int, str] = (2**62, "")) -> list[Operation]:
        """Operations, newest first; `after` is the creation time and id of the last one seen."""
        return [_operation(row) for row in self.database.rows(
            f"select {_OPERATION_COLUMNS} from operations where created < ?1 or (created = ?1 and id > ?2) "
            "order by created desc, id limit ?3", *after, limit)]

    def unfinished_operations(self) -> list[Operation]:
        return [_operation(row) for row in self.database.rows(
            f"select {_OPERATION_COLUMNS} from operations where status in ('QUEUED', 'RUNNING') order by created")]

    def update_operation(self, operation_id: str, status: str, progress: float,
                         result: dict[str, Any] | None = None) -> None:
        """What became of an unfinished operation; without a result, the one that is there stays."""
        ended = now_ms() if status in ("COMPLETED", "FAILED", "CANCELED") else None
        with self.database.transaction() as database:
            database.execute("update operations set status = ?, progress = ?, result = coalesce(?, result), ended = ? "
                             "where id = ? and status in ('QUEUED', 'RUNNING')",
                             (status, progress, None if result is None else to_text(result), ended, operation_id))
        self._changes += 1

    # Jobs that the service started itself

    def add_launch(self, job_id: str, name: str, registration: dict[str, Any], arguments: dict[str, Any]) -> bool:
        """Take note that a job is to be started, and show it; False where that id was launched before."""
        with self._order:
            with self.database.transaction() as database:
                if database.execute("select 1 from launches where job_id = ?", (job_id,)).fetchone() is not None:
                    return False
                job = self._write_registration(database, job_id, name, {**registration, "only_launched": True},
                                               "INITIALIZING")
                database.execute("insert into launches values (?, null, ?, ?)", (job_id, to_text(arguments), now_ms()))
            self._remember(job)
        return True

    def launch(self, job_id: str) -> dict[str, Any] | None:
        """The arguments with which the service started a job; None where it did not."""
        rows = self.database.rows("select arguments from launches where job_id = ?", job_id)
        return from_text(rows[0][0]) if rows else None

    def launches_not_heard_of(self) -> list[str]:
        """Jobs that the service was to start and that have never reported."""
        return [job.id for job in self.jobs() if job.only_launched and job.running]

    # What is no longer needed

    def prune(self, ended_jobs: int, records: int) -> list[str]:
        """Forget all but the newest ended jobs, finished commands and finished operations; tells which jobs went."""
        with self._order:
            with self.database.transaction() as database:
                gone = [row[0] for row in database.execute(
                    "select id from jobs where end_time >= 0 order by end_time desc limit -1 offset ?", (ended_jobs,))]
                for job_id in gone:
                    _delete_job(database, job_id)
                _delete_all_but_newest(database, "commands", "request_id", records)
                _delete_all_but_newest(database, "operations", "id", records)
            for job_id in gone:
                self._jobs.pop(job_id, None)
                self._versions.pop(job_id, None)
        self._changes += bool(gone)
        return gone


def _job(row: tuple[Any, ...]) -> JobRecord:
    return JobRecord(row[0], row[1], row[2], row[3], row[4], row[5], from_text(row[6]), from_text(row[7]))


def _command(row: tuple[Any, ...]) -> Command:
    return Command(row[0], row[1], row[2], from_text(row[3]), row[4], from_text(row[5]), row[6])


def _operation(row: tuple[Any, ...]) -> Operation:
    return Operation(row[0], row[1], from_text(row[2]), row[3], row[4], from_text(row[5]), row[6], row[7])


def _find_command(database: sqlite3.Connection, trigger_id: str) -> Command | None:
    row = database.execute(f"select {_COMMAND_COLUMNS} from commands where request_id = ?", (trigger_id,)).fetchone()
    return None if row is None else _command(row)


def _open_commands(database: sqlite3.Connection, job_id: str) -> list[Command]:
    rows = database.execute(f"select {_COMMAND_COLUMNS} from commands where job_id = ? and status = 'IN_PROGRESS' "
                            "order by created", (job_id,)).fetchall()
    return [_command(row) for row in rows]


def _fail_open_commands(database: sqlite3.Connection, job_id: str, why: str) -> None:
    for command in _open_commands(database, job_id):
        # A cancel of a job that has ended has done its work even if the last report got lost.
        done = command.kind == "cancel"
        database.execute("update commands set status = ?, result = ? where request_id = ?",
                         ("COMPLETED" if done else "FAILED", to_text({} if done else {"failure": why}),
                          command.request_id))


def _delete_job(database: sqlite3.Connection, job_id: str) -> None:
    database.execute("delete from jobs where id = ?", (job_id,))
    for table in ("checkpoints", "commands", "exceptions", "launches"):
        database.execute(f"delete from {table} where job_id = ?", (job_id,))


def _delete_all_but_newest(database: sqlite3.Connection, table: str, key: str, kept: int) -> None:
    database.execute(f"delete from {table} where {key} in (select {key} from {table} where status not in "
                     "('IN_PROGRESS', 'QUEUED', 'RUNNING') order by created desc limit -1 offset ?)", (kept,))
