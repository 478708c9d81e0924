"""Running a flow as a job: `run` waits for its end, `start` gives a handle on it while it runs."""

from __future__ import annotations

import atexit
import contextlib
import shutil
import time
import uuid
import weakref
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

from checkpoint.dataflow.graph import Dataflow
from checkpoint.protocol.messages import CancelJob, CompleteRequest, Restored, TriggerCheckpoint, TriggerSavepoint
from checkpoint.protocol.restart import RestartStrategy, restart_strategy
from checkpoint.protocol.settings import CheckpointSettings
from checkpoint.runtime.deployment import BackendChoice, Builder, JobSpec
from checkpoint.runtime.executor import Executor, RestoreFrom
from checkpoint.runtime.restore_point import RestorePoint, dispose_claimed, resolve_restore
from checkpoint.runtime.restoring import Restorer
from checkpoint.runtime.runtimes import Runtime, runtime_of
from checkpoint.runtime.skew import skews
from checkpoint.runtime.supervisor import JobState, Supervisor
from checkpoint.storage.layout import JobId
from checkpoint.storage.storage import JobStorage
from checkpoint.storage.store import FileStore
from checkpoint.storage.urls import local_path_of
from statebackend.clock import Clock
from statebackend.errors import HoldfastError, InvalidRequest

DEFAULT_INTERVAL = "10s"


@dataclass(frozen=True)
class JobResult:
    """How a job ended. `checkpoint` is where to restore from: the last completed checkpoint, or the stop savepoint.

    None where there is nothing to restore from, as after a run without a checkpoint folder.
    """

    job_id: str
    state: str
    checkpoint: str | None
    checkpoint_id: int | None
    restarts: int
    duration_seconds: float
    records: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    checkpoints: Mapping[str, Any] = field(default_factory=dict)


class JobHandle:
    """A job while it runs. All calls may come from any thread."""

    def __init__(self, flow: Dataflow, supervisor: Supervisor, executor: Executor, *, runtime: str, root: str | None,
                 restore_point: RestorePoint | None) -> None:
        self.flow, self.runtime, self.root, self.restore_point = flow, runtime, root, restore_point
        self._supervisor, self._executor = supervisor, executor
        self._started = time.monotonic()
        self._ended: float | None = None

    @property
    def job_id(self) -> str:
        return str(self._supervisor.builder.spec.job_id)

    @property
    def state(self) -> JobState:
        return self._supervisor.state

    @property
    def backend(self) -> str:
        return self._supervisor.builder.spec.backend.name

    @property
    def settings(self) -> CheckpointSettings:
        return self._supervisor.settings

    @property
    def has_started(self) -> bool:
        """Whether every subtask has taken its state over and begun to work."""
        return self._supervisor.has_started

    @property
    def is_running(self) -> bool:
        return not self._supervisor.done.is_set()

    def trigger_checkpoint(self, *, full: bool = False, timeout: float | None = None) -> str:
        """Take a checkpoint now; returns its URL when it is complete."""
        return _path(self._ask(TriggerCheckpoint(_request_id(), full), timeout))

    def trigger_savepoint(self, target: str | None = None, *, format: str = "open",
                          timeout: float | None = None) -> str:
        """Take a savepoint into a new folder below `target` (or the default savepoint folder); returns its URL."""
        return _path(self._ask(self._savepoint(target, format), timeout))

    def stop_with_savepoint(self, target: str | None = None, *, format: str = "open", drain: bool = False,
                            timeout: float | None = None) -> str:
        """Take a savepoint and end: no record after it is processed. `drain` fires all event-time timers first."""
        request = replace(self._savepoint(target, format), stop=True, drain=drain)
        path = _path(self._ask(request, timeout))
        self._supervisor.done.wait(timeout)
        return path

    def stop_with_checkpoint(self, timeout: float | None = None) -> str | None:
        """Take a last checkpoint, then end: `--restore latest` goes on from there. None if it could not be taken."""
        try:
            path = self.trigger_checkpoint(timeout=timeout)
        except HoldfastError:
            if self.is_running:
                self.cancel(timeout=timeout)
            raise
        if self.is_running:
            self.cancel(timeout=timeout)
        return path

    def cancel(self, timeout: float | None = None) -> None:
        """End where it stands. Completed checkpoints stay, unless the settings say otherwise."""
        try:
            self._ask(CancelJob(_request_id()), timeout)
        except HoldfastError:
            if self.is_running:
                raise
        self._supervisor.done.wait(timeout)

    def wait(self, timeout: float | None = None) -> JobResult:
        """Wait for the end. A job that failed raises its error; a time-out raises TimeoutError and changes nothing."""
        if not self._supervisor.done.wait(timeout):
            raise TimeoutError(f"the job {self.job_id} is still running")
        self._ended = self._ended or time.monotonic()
        error = self._supervisor.error
        if error is None:
            return self.result()
        if isinstance(error, HoldfastError) or not isinstance(error, Exception):
            raise error
        raise _job_failed(self.flow.name, error) from error

    def result(self) -> JobResult:
        latest = self._supervisor.coordinator.latest
        if latest is not None and self.root is None and latest.options.location is None:
            latest = None  # it goes with the run
        return JobResult(self.job_id, self.state.value, latest.path if latest is not None else None,
                         latest.checkpoint_id if latest is not None else None, self._supervisor.restarts,
                         (self._ended or time.monotonic()) - self._started, self.records(),
                         self._supervisor.coordinator.statistics.to_rest())

    def records(self) -> dict[str, dict[str, int]]:
        """Records in and out, by operator uid, since the last (re)start."""
        return _records(self._tasks())

    def statistics(self) -> dict[str, Any]:
        """What there is to know: state, subtasks with load and counters, checkpoints in Flink's form, failures, skew."""
        supervisor, tasks = self._supervisor, self._tasks()
        return {
            "job_id": self.job_id, "name": self.flow.name, "state": self.state.value, "runtime": self.runtime,
            "restarts": supervisor.restarts, "duration_ms": int((time.monotonic() - self._started) * 1000),
            "last_restore_ms": supervisor.last_restore_ms, "tasks": tasks, "records": _records(tasks),
            "key_groups": skews(subtask.get("key_groups", {}) for subtask in tasks),
            "checkpoints": supervisor.coordinator.statistics.to_rest(),
            "exceptions": [{"timestamp": failure.timestamp, "message": failure.message, "subtask": failure.subtask,
                            "stacktrace": failure.trace} for failure in list(supervisor.failures)],
        }

    def checkpoint_details(self, checkpoint_id: int) -> dict[str, Any] | None:
        record = self._supervisor.coordinator.statistics.record(checkpoint_id)
        return record.to_rest_details() if record is not None else None

    def checkpoint_subtasks(self, checkpoint_id: int, task: str) -> dict[str, Any] | None:
        record = self._supervisor.coordinator.statistics.record(checkpoint_id)
        return record.to_rest_subtasks(task) if record is not None else None

    def plan(self) -> dict[str, Any]:
        return self.flow.describe(self._supervisor.builder.spec.parallelism)

    def _tasks(self) -> list[dict[str, Any]]:
        return self._executor.statistics() if self.is_running else self._supervisor.last_statistics

    def _savepoint(self, target: str | None, format: str) -> TriggerSavepoint:
        if format not in ("open", "native"):
            raise InvalidRequest("a savepoint is open or native", found=format)
        folder = target or self.settings.savepoint_dir
        if folder is not None and "://" not in folder:
            folder = local_path_of(folder)  # workers may have another working folder
        location = self._supervisor.builder.storage.new_savepoint_folder(folder) if folder is not None else None
        return TriggerSavepoint(_request_id(), location, native=format == "native")

    def _ask(self, request: TriggerCheckpoint | TriggerSavepoint | CancelJob, timeout: float | None) -> CompleteRequest:
        future: Future[CompleteRequest] = self._supervisor.request(request)
        return future.result(timeout)


def start(flow: Dataflow, *, checkpoint_dir: str | None = None, backend: str | Mapping[str, Any] | None = None,
          runtime: str | Runtime = "threads", settings: CheckpointSettings | None = None,
          restart: RestartStrategy | str | None = None, restore: str | None = None,
          parallelism: int | Mapping[str, int] | None = None, uid_mapping: Mapping[str, str] | None = None,
          allow_non_restored_state: bool = False, claim: bool = False,
          job_id: str | None = None, job: str | None = None, workers: int | None = None, region_restart: bool = True,
          unfenced: bool = False, storage_options: Mapping[str, Any] | None = None, work_dir: str | None = None,
          channel_credit: int | None = None, clock: Clock | None = None) -> JobHandle:
    """Start a flow as a job in the background. See `run` for the arguments."""
    flow.validate()
    place = runtime_of(runtime)
    if settings is None:
        settings = CheckpointSettings(interval=DEFAULT_INTERVAL if checkpoint_dir is not None else None)
    overrides = dict(parallelism) if isinstance(parallelism, Mapping) else \
        {"": parallelism} if parallelism is not None else {}
    flow.parallelisms(overrides)
    options = dict(storage_options or {})
    point = None
    if restore is not None:
        point = resolve_restore(checkpoint_dir, flow, restore, unfenced=unfenced, **options)
    run_id = uuid.uuid4().hex
    root = place.checkpoint_root(checkpoint_dir, run_id)
    chosen_id = point.job_id if point is not None and point.job_id is not None else \
        JobId(job_id) if job_id is not None else JobId.random()
    spec = JobSpec(chosen_id, flow.name, run_id, str(root), BackendChoice.of(backend), unfenced=unfenced,
                   parallelism=overrides, storage_options=options, work_dir=work_dir, channel_credit=channel_credit,
                   local_recovery=settings.local_recovery)
    storage = spec.storage()
    try:
        return _start(flow, spec, storage, settings, _strategy(restart, settings), point, place, job, workers,
                      uid_mapping or {}, allow_non_restored_state, claim, region_restart, checkpoint_dir, clock)
    except BaseException:
        storage.close()
        raise


def _start(flow: Dataflow, spec: JobSpec, storage: JobStorage, settings: CheckpointSettings,
           restart: RestartStrategy | None,
           point: RestorePoint | None, runtime: Runtime, job: str | None, workers: int | None,
           uid_mapping: Mapping[str, str], allow_non_restored_state: bool, claim: bool, region_restart: bool,
           root: str | None, clock: Clock | None) -> JobHandle:
    storage.probe()
    generation = storage.claim_generation()
    spec = replace(spec, generation=generation)
    builder = Builder(flow, spec, storage, clock)
    restore, restored = None, None
    if point is not None:
        point = point.newest(storage)
        restore = RestoreFrom(point.reference, point.foreign, False, dict(uid_mapping), allow_non_restored_state)
        retained = tuple(info.checkpoint_id for info in storage.list_checkpoints()) if not point.foreign else ()
        restored = Restored(point.metadata.checkpoint_id, point.url, point.metadata.is_savepoint, retained)
        source = storage.source(point.reference)
        try:
            Restorer(builder.plan, point.metadata, source, builder.codec, restore.options).check()
        finally:
            if point.foreign:
                source.close()
        if point.foreign and root is not None:
            storage.record_origin(point.url)
    disposal = point if point is not None and claim and point.foreign else None
    supervisor = Supervisor(
        builder, settings, restart, restore=restore, restored=restored,
        region_restart=region_restart and runtime.region_restart,
        properties={"backend": spec.backend.name, "runtime": runtime.name},
        first_completed=(lambda: dispose_claimed(disposal)) if disposal is not None else None,
        closing=(lambda: _remove_root(spec.root)) if root is None else None)
    executor = runtime.executor(builder, supervisor, job=job, workers=workers)
    handle = JobHandle(flow, supervisor, executor, runtime=runtime.name, root=root, restore_point=point)
    _running.add(handle)
    supervisor.start(executor)
    return handle


_running: weakref.WeakSet[JobHandle] = weakref.WeakSet()


@atexit.register
def _end_jobs() -> None:
    """A program that ends while a job runs: the job is cancelled, so that backends and workers close in order."""
    for handle in list(_running):
        if handle.is_running:
            with contextlib.suppress(Exception):
                handle.cancel(timeout=10)


def run(flow: Dataflow, *, checkpoint_dir: str | None = None, backend: str | Mapping[str, Any] | None = None,
        runtime: str | Runtime = "threads", settings: CheckpointSettings | None = None, restore: str | None = None,
        parallelism: int | Mapping[str, int] | None = None, **options: Any) -> JobResult:
    """Run a flow to its end.

    checkpoint_dir  folder or fsspec URL for checkpoints; without one nothing outlives the run
    backend         memory, filesystem (default) or rocksdb, or a mapping with "name" and options
    runtime         threads (default), processes, or a Runtime such as spark_integration's SparkRuntime
    settings        CheckpointSettings; by default a checkpoint every 10 s where there is a checkpoint_dir
    restore         "latest" for this flow's newest checkpoint, or the path of a checkpoint or savepoint
    parallelism     overrides that of all operators (a number), or of some (a mapping by uid)

    More, by keyword: restart (a RestartStrategy or its name), uid_mapping, allow_non_restored_state, claim, job_id, job
    ("file.py:attribute", for worker processes), workers, region_restart, unfenced, storage_options, work_dir.
    A failure that the restart strategy does not forgive is raised.
    """
    handle = start(flow, checkpoint_dir=checkpoint_dir, backend=backend, runtime=runtime, settings=settings,
                   restore=restore, parallelism=parallelism, **options)
    try:
        return handle.wait()
    except KeyboardInterrupt:
        handle.cancel(timeout=30)
        raise


def _remove_root(root: str) -> None:
    """Checkpoints of a run without a checkpoint folder go with it."""
    with FileStore.at(root) as store:
        for folder in store.folders():
            store.delete_tree(folder)
    if "://" not in root:
        shutil.rmtree(root, ignore_errors=True)


def _strategy(given: RestartStrategy | str | None, settings: CheckpointSettings) -> RestartStrategy | None:
    return restart_strategy(given, checkpointing=settings.enabled) if isinstance(given, str) else given


def _records(tasks: list[dict[str, Any]]) -> dict[str, dict[str, int]]:
    totals: dict[str, dict[str, int]] = {}
    for subtask in tasks:
        for uid, counters in subtask["operators"].items():
            known = totals.setdefault(uid, dict.fromkeys(counters, 0))
            for name, value in counters.items():
                known[name] += value
    return totals


def _path(answer: CompleteRequest) -> str:
    return answer.path or ""


def _request_id() -> str:
    return uuid.uuid4().hex


def _job_failed(name: str, error: BaseException) -> HoldfastError:
    notes = " ".join(getattr(error, "__notes__", ()))
    return HoldfastError(f"the job {name!r} failed: {type(error).__name__}: {error}" + (f" {notes}" if notes else ""))
