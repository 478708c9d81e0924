"""Jobs as processes of the service: only files below the named folders, only for administrators.

A started job lives in a session of its own and reports like any other, so that it outlives the service.

A launch is recorded first and runs at most once: the first thing that a started process does is to create the launch's
claim, a file that must not exist yet, and a process that comes second ends. So a service that was killed at any moment
in between simply starts again whatever has no claim.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import subprocess
import sys
from pathlib import Path
from typing import Any

from api.rest.claiming import CLAIM_VARIABLE, SECOND, claimant
from api.rest.registry import Command, Registry, new_id, now_ms
from api.rest.roots import Roots
from api.rest.settings import ServiceSettings
from statebackend.errors import Conflict, HoldfastError, InvalidRequest, NotFound, Unavailable


class Launcher:
    """Starts jobs, and starts them again after a rescaling."""

    def __init__(self, settings: ServiceSettings, registry: Registry, roots: Roots) -> None:
        self._settings, self._registry, self._roots = settings, registry, roots
        database = settings.database.absolute()  # jobs run in folders of their own
        self._token_path = database.with_suffix(".token")
        self._claims = database.with_suffix(".launches")
        self._logs = database.parent / "logs"
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def job_file(self, reference: str) -> tuple[Path, str]:
        """The file and attribute of `file.py:flow`; the file must lie below a jobs folder after symlinks."""
        if not self._settings.jobs_dirs:
            raise InvalidRequest("this service starts no jobs", hint="start it with --jobs-dir FOLDER")
        name, _, attribute = reference.partition(":")
        if not attribute.isidentifier() or not name.endswith(".py") or "\0" in name:
            raise InvalidRequest("a job is named like file.py:flow", found=reference)
        for folder in self._settings.jobs_dirs:
            root = folder.resolve()
            path = (root / name).resolve()
            if path.is_relative_to(root) and path.is_file():
                return path, attribute
        raise NotFound("no such job file below the jobs folders", job=reference)

    def start(self, arguments: dict[str, Any], job_id: str | None = None) -> str:
        """Start a job; with an id that was used already, nothing is started again."""
        job_id = job_id or new_id()
        if self._registry.launch(job_id) is not None:
            return job_id
        path, attribute = self.job_file(str(arguments["job"]))
        command = self._command(path, attribute, arguments)
        registration = {"runtime": arguments.get("runtime", "threads")}
        if self._registry.add_launch(job_id, path.stem, registration, arguments):
            reached("launch recorded")
            try:
                self._spawn(job_id, command, path.parent)
            except OSError as error:
                self._fail(job_id, f"it could not be started: {error}")
                raise Unavailable(f"the job could not be started: {error}", job_id=job_id) from error
        return job_id

    def _spawn(self, job_id: str, command: list[str], folder: Path) -> None:
        self._logs.mkdir(parents=True, exist_ok=True)
        self._claims.mkdir(parents=True, exist_ok=True)
        environment = os.environ | {"HOLDFAST_JOB_ID": job_id, "HOLDFAST_SERVICE_TOKEN": self.token(),
                                    CLAIM_VARIABLE: str(self._claims / job_id)}
        with open(self._log_of(job_id), "ab") as log:
            self._processes[job_id] = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                                                       env=environment, cwd=folder, start_new_session=True)
        reached("process started")

    def _log_of(self, job_id: str) -> Path:
        return self._logs / f"{job_id}.log"

    def _command(self, path: Path, attribute: str, arguments: dict[str, Any]) -> list[str]:
        folder = arguments.get("checkpoint_dir") or f"{self._roots.urls[0]}/checkpoints"
        command = [sys.executable, "-P", "-m", "api.cli.main", "run", f"{path}:{attribute}",
                   "--checkpoint-dir", self._roots.place(folder).url,
                   "--checkpoint-interval", str(arguments.get("checkpoint_interval", "10s")),
                   "--backend", str(arguments.get("backend", "rocksdb")),
                   "--runtime", str(arguments.get("runtime", "threads")), "--service", self.url()]
        restore = arguments.get("restore")
        if restore:
            command += ["--restore", restore if restore == "latest" else self._roots.place(restore).url]
        if arguments.get("parallelism"):
            command += ["--parallelism", str(arguments["parallelism"])]
        for uid, parallelism in (arguments.get("operator_parallelism") or {}).items():
            command += ["--parallelism", f"{uid}={parallelism}"]
        for old, new in (arguments.get("uid_mapping") or {}).items():
            command += ["--map-uid", f"{old}={new}"]
        if arguments.get("allow_non_restored_state"):
            command += ["--allow-non-restored-state"]
        return command

    def rescale(self, job_id: str, parallelism: int, trigger_id: str | None = None) -> Command:
        """Ask a job that was started here to stop with a savepoint; it starts again when the savepoint is there."""
        self._registry.job(job_id)
        if self._registry.launch(job_id) is None:
            raise Conflict("only jobs that this service started can be rescaled by it", job_id=job_id,
                           hint="stop it with a savepoint, then `holdfast run --restore PATH --parallelism N`")
        arguments = {"target": f"{self._roots.urls[0]}/savepoints", "format": "open", "drain": False,
                     "then": {"parallelism": parallelism}}
        return self._registry.add_command(job_id, "stop", arguments, trigger_id)

    def continue_after(self, command: Command) -> None:
        """The second half of a rescaling. The new job's id is the trigger id, so that it can't be started twice."""
        then = command.arguments.get("then")
        if not then or command.status != "COMPLETED" or not command.result.get("location"):
            return
        started = self._registry.launch(command.job_id) or {}
        arguments = {**started, "restore": command.result["location"], "parallelism": then["parallelism"],
                     "operator_parallelism": {}}
        try:
            self.start(arguments, command.request_id)
        except (HoldfastError, OSError) as error:
            self._registry.note_failed_restart(command.request_id, f"stopped, but could not be started again: {error}")
        else:
            self._registry.note_restart(command.request_id, command.request_id)

    def resume(self) -> None:
        """Finish what the service was about to do when it died: launches without a claim, and rescalings."""
        for job_id in self._registry.launches_not_heard_of():
            arguments = self._registry.launch(job_id)
            if arguments is None or (self._claims / job_id).exists():
                continue
            try:
                path, attribute = self.job_file(str(arguments["job"]))
                self._spawn(job_id, self._command(path, attribute, arguments), path.parent)
            except (HoldfastError, OSError) as error:
                self._fail(job_id, f"it could not be started: {error}")
        for command in self._registry.stopped_to_rescale():
            self.continue_after(command)

    def look_after(self) -> None:
        """A process that ended without saying so is a failed job, and its log tells why."""
        for job_id, process in list(self._processes.items()):
            if process.poll() is None:
                continue
            if process.returncode not in (0, SECOND):
                self._fail_if_open(job_id, f"the process ended with {process.returncode}")
            del self._processes[job_id]
        for job_id in self._registry.launches_not_heard_of():
            claimed_by = claimant(self._claims / job_id)
            if job_id not in self._processes and claimed_by is not None and not _alive(claimed_by):
                self._fail_if_open(job_id, "the process ended before it reported")

    def _fail_if_open(self, job_id: str, why: str) -> None:
        if self._registry.job(job_id).running:
            self._fail(job_id, f"{why}\n{_tail(self._log_of(job_id))}".strip())

    def _fail(self, job_id: str, why: str) -> None:
        self._registry.heartbeat(job_id, "FAILED", {}, [], [{"message": why, "timestamp": now_ms()}])

    def forget(self, job_ids: list[str]) -> None:
        """Remove the logs and claims of jobs that are no longer known."""
        for job_id in job_ids:
            self._log_of(job_id).unlink(missing_ok=True)
            (self._claims / job_id).unlink(missing_ok=True)

    def url(self) -> str:
        scheme = "https" if self._settings.certificate else "http"
        host = "127.0.0.1" if self._settings.host in ("0.0.0.0", "::", "localhost") else self._settings.host
        return f"{scheme}://{host}:{self._settings.port}"

    def token(self) -> str:
        """The token with which jobs of this service report; made once, readable by this user only."""
        if not self._token_path.exists():
            draft = self._token_path.with_suffix(f".token.{secrets.token_hex(8)}")  # a pid comes again, in a container say
            try:
                with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as stream:
                    stream.write(secrets.token_urlsafe(32))
                with contextlib.suppress(FileExistsError):  # two first jobs at once: one token
                    os.link(draft, self._token_path)  # with all of it in it, or not at all
            finally:
                draft.unlink(missing_ok=True)
        return self._token_path.read_text().strip()


def reached(_point: str) -> None:
    """A moment between two steps of a launch; tests end the service here."""


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _tail(log: Path, size: int = 4000) -> str:
    if not log.exists():
        return ""
    with open(log, "rb") as stream:
        stream.seek(max(0, log.stat().st_size - size))
        return stream.read().decode(errors="replace")
