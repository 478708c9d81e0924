"""The settings of checkpointing: parsed, checked, and refused at once where they exclude each other."""

from __future__ import annotations

from dataclasses import dataclass, fields
from datetime import timedelta
from typing import Any

from checkpoint.runtime.contracts import CheckpointKind, CheckpointOptions
from statebackend.durations import duration_ms
from statebackend.errors import InvalidRequest

Duration = str | int | float | timedelta
_TYPES: dict[str, tuple[type, ...]] = {"int": (int,), "bool": (bool,), "str | None": (str, type(None))}
"""By annotation; the others are durations."""


@dataclass(frozen=True)
class CheckpointSettings:
    """How a job takes checkpoints. Durations may be written as `1s`; they are stored as milliseconds.

    interval              None: only manual checkpoints, savepoints and the last checkpoint at the end of all input.
    timeout               a checkpoint that takes longer is given up.
    min_pause             rest between the end of one checkpoint and the start of the next.
    max_concurrent        checkpoints in progress at a time (savepoints are not counted).
    tolerable_failures    consecutive failed checkpoints that the job survives.
    exactly_once          False: barriers are not aligned, records may count twice after a restore.
    unaligned             barriers overtake records, which become part of the checkpoint.
    aligned_timeout       start aligned, go unaligned when a barrier has been on its way for longer. Needs `unaligned`.
    retained              completed checkpoints to keep.
    retain_on_cancellation  keep them when the job is cancelled.
    incremental           store only what changed, where the backend can.
    local_recovery        keep a second copy of state on local disk and restart from it where it is there.
    savepoint_dir         where savepoints go unless a request names a folder.
    history               how many checkpoints the statistics remember in detail.
    """

    interval: Duration | None = None
    timeout: Duration = 600_000
    min_pause: Duration = 0
    max_concurrent: int = 1
    tolerable_failures: int = 0
    exactly_once: bool = True
    unaligned: bool = False
    aligned_timeout: Duration | None = None
    retained: int = 1
    retain_on_cancellation: bool = True
    incremental: bool = True
    local_recovery: bool = False
    savepoint_dir: str | None = None
    history: int = 10

    def __post_init__(self) -> None:
        for setting in fields(self):
            self._check_type(setting.name, str(setting.type))
        self._check_ranges()
        self._check_combinations()

    def _check_type(self, name: str, annotation: str) -> None:
        """Refuse a value of a wrong type; a duration becomes milliseconds."""
        value, wanted = getattr(self, name), _TYPES.get(annotation)
        if wanted is not None:
            if not isinstance(value, wanted) or (isinstance(value, bool) and bool not in wanted):
                raise InvalidRequest(f"{name} is of a wrong type", setting=name, expected=annotation, found=value)
        elif value is not None or "None" not in annotation:
            try:
                object.__setattr__(self, name, duration_ms(value))
            except InvalidRequest as error:
                error.context["setting"] = name
                raise

    def _check_ranges(self) -> None:
        least = {"interval": 1, "timeout": 1, "min_pause": 0, "aligned_timeout": 0, "max_concurrent": 1,
                 "tolerable_failures": 0, "retained": 1, "history": 1}
        for name, minimum in least.items():
            value = getattr(self, name)
            if value is not None and value < minimum:
                raise InvalidRequest(f"{name} must be at least {minimum}", setting=name, found=value)

    def _check_combinations(self) -> None:
        if self.unaligned and not self.exactly_once:
            raise InvalidRequest("unaligned checkpoints and at-least-once mode exclude each other",
                                 hint="at-least-once never waits for alignment; switch one of the two off")
        if self.unaligned and self.max_concurrent > 1:
            raise InvalidRequest("unaligned checkpoints can't overlap each other", max_concurrent=self.max_concurrent,
                                 hint="set max_concurrent to 1 or switch unaligned off")
        if self.aligned_timeout is not None and not self.unaligned:
            raise InvalidRequest("aligned_timeout needs unaligned checkpoints to switch to",
                                 hint="set unaligned as well, or leave aligned_timeout out")
        if self.min_pause_ms > 0 and self.max_concurrent > 1:
            raise InvalidRequest("a pause between checkpoints and concurrent checkpoints exclude each other",
                                 min_pause_ms=self.min_pause_ms, max_concurrent=self.max_concurrent,
                                 hint="set max_concurrent to 1 or min_pause to 0")
        if self.aligned_timeout_ms is not None and self.aligned_timeout_ms >= self.timeout_ms:
            raise InvalidRequest("aligned_timeout is never reached: the checkpoint times out before",
                                 aligned_timeout_ms=self.aligned_timeout_ms, timeout_ms=self.timeout_ms,
                                 hint="make aligned_timeout shorter than timeout")

    @property
    def enabled(self) -> bool:
        """Whether checkpoints are taken at an interval."""
        return self.interval is not None

    @property
    def interval_ms(self) -> int | None:
        return None if self.interval is None else duration_ms(self.interval)

    @property
    def timeout_ms(self) -> int:
        return duration_ms(self.timeout)

    @property
    def min_pause_ms(self) -> int:
        return duration_ms(self.min_pause)

    @property
    def aligned_timeout_ms(self) -> int | None:
        return None if self.aligned_timeout is None else duration_ms(self.aligned_timeout)

    def checkpoint_options(self, *, full: bool = False) -> CheckpointOptions:
        """What the barriers of this job's checkpoints ask for."""
        timeout = self.aligned_timeout_ms
        return CheckpointOptions(CheckpointKind.CHECKPOINT, unaligned=self.unaligned and not timeout,
                                 aligned_timeout_ms=timeout or None, exactly_once=self.exactly_once,
                                 full=full or not self.incremental)

    def savepoint_options(self, *, location: str | None, stop: bool = False, drain: bool = False,
                          native: bool = False) -> CheckpointOptions:
        """What the barriers of a savepoint ask for: aligned and full, whatever the checkpoints are."""
        if drain and not stop:
            raise InvalidRequest("drain ends all windows and timers, so it needs stop",
                                 hint="ask for stop with drain, or for a savepoint without it")
        target = location or self.savepoint_dir
        if target is None:
            raise InvalidRequest("a savepoint needs a folder", hint="name one, or set savepoint_dir for the job")
        return CheckpointOptions(CheckpointKind.SAVEPOINT, exactly_once=True, full=True, stop=stop, drain=drain,
                                 native=native, location=target)

    def to_json(self) -> dict[str, Any]:
        """Every setting with its exact value (durations in milliseconds)."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def rest_config(self, *, state_backend: str = "", checkpoint_storage: str = "") -> dict[str, Any]:
        """Field by field what Flink's `/jobs/:jobid/checkpoints/config` shows."""
        return {
            "mode": "exactly_once" if self.exactly_once else "at_least_once",
            "interval": self.interval_ms if self.interval_ms is not None else 2**63 - 1,
            "timeout": self.timeout_ms, "min_pause": self.min_pause_ms, "max_concurrent": self.max_concurrent,
            "externalization": {"enabled": True, "delete_on_cancellation": not self.retain_on_cancellation},
            "state_backend": state_backend, "checkpoint_storage": checkpoint_storage,
            "unaligned_checkpoints": self.unaligned, "tolerable_failed_checkpoints": self.tolerable_failures,
            "aligned_checkpoint_timeout": self.aligned_timeout_ms or 0,
            "checkpoints_after_tasks_finish": True, "state_changelog_enabled": False,
            "changelog_periodic_materialization_interval": 0, "changelog_storage": "",
        }
