"""Request bodies, checked field by field; unknown fields are ignored as Flink does, wrong types are refused."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from statebackend.durations import duration_ms
from statebackend.errors import InvalidRequest

HexId = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$", examples=["0123456789abcdef0123456789abcdef"])]
Uid = Annotated[str, Field(min_length=1, max_length=300)]
Url = Annotated[str, Field(min_length=1, max_length=4096)]
State = Literal["INITIALIZING", "CREATED", "RUNNING", "RESTARTING", "CANCELLING", "SUSPENDED", "FINISHED", "CANCELED",
                "FAILED"]


def _duration(text: str) -> str:
    try:
        duration_ms(text)
    except InvalidRequest as error:
        raise ValueError(str(error)) from None
    return text


class Body(BaseModel):
    model_config = ConfigDict(populate_by_name=True, extra="ignore")


class CheckpointTrigger(Body):
    checkpointType: Literal["CONFIGURED", "FULL", "INCREMENTAL"] = "CONFIGURED"
    triggerId: HexId | None = None


class SavepointTrigger(Body):
    target_directory: Url | None = Field(default=None, alias="target-directory", examples=["savepoints/"])
    cancel_job: bool = Field(default=False, alias="cancel-job")
    formatType: Literal["CANONICAL", "NATIVE"] | None = "CANONICAL"
    triggerId: HexId | None = None


class StopTrigger(Body):
    targetDirectory: Url | None = None
    drain: bool | None = False
    formatType: Literal["CANONICAL", "NATIVE"] | None = "CANONICAL"
    triggerId: HexId | None = None


class Disposal(Body):
    savepoint_path: Url = Field(alias="savepoint-path")
    triggerId: HexId | None = None


class Registration(Body):
    """What a job says of itself when it starts."""

    name: str = Field(min_length=1, max_length=300)
    state: State = "RUNNING"
    start_time: int | None = Field(None, ge=0, le=2**53)
    runtime: str = Field("threads", max_length=50)
    pid: int | None = Field(None, ge=0, le=2**31)
    host: str | None = Field(None, max_length=300)
    max_parallelism: int = Field(128, ge=1, le=32768)
    checkpoint_dir: str | None = Field(None, max_length=4096)
    backend: str | None = Field(None, max_length=100)
    vertices: list[dict[str, Any]] = Field(default_factory=list, max_length=10_000)
    plan: dict[str, Any] = Field(default_factory=dict)
    checkpoint_config: dict[str, Any] = Field(default_factory=dict)
    restored: dict[str, Any] | None = None


class OperatorReport(Body):
    """An operator's state as of the last checkpoint, and how uneven its keys are: the busiest key group over the mean."""

    state_bytes: int | None = Field(None, ge=0, le=2**62)
    key_group_skew: float | None = Field(None, ge=0, allow_inf_nan=False)
    busiest_key_group: int | None = Field(None, ge=0, le=32767)


class Heartbeat(Body):
    """What a job reports every few seconds; `checkpoints` holds records that are new or changed since the last one."""

    state: State
    checkpoints: list[dict[str, Any]] = Field(default_factory=list, max_length=1_000)
    exceptions: list[dict[str, Any]] = Field(default_factory=list, max_length=100)
    metrics: dict[str, float | int | str | None] = Field(default_factory=dict, max_length=200)
    vertices: list[dict[str, Any]] = Field(default_factory=list, max_length=10_000)
    operators: dict[Uid, OperatorReport] = Field(default_factory=dict, max_length=1_000)


class CommandResult(Body):
    location: str | None = Field(None, max_length=4096)
    checkpoint_id: int | None = Field(None, ge=0, le=2**53)
    failure: str | None = Field(None, max_length=20_000)


class JobStart(Body):
    """A job to start as a process of the service, fresh or restored."""

    job: str = Field(min_length=1, max_length=1000, examples=["clicks.py:flow"])
    restore: Url | None = Field(None, description="a savepoint or checkpoint below a root, or `latest`")
    parallelism: int | None = Field(None, ge=1, le=32768)
    operator_parallelism: dict[Uid, Annotated[int, Field(ge=1, le=32768)]] = Field(default_factory=dict)
    uid_mapping: dict[Uid, Uid] = Field(default_factory=dict)
    allow_non_restored_state: bool = False
    backend: Literal["memory", "filesystem", "rocksdb"] = "rocksdb"
    runtime: Literal["threads", "processes"] = "threads"
    checkpoint_dir: Url | None = None
    checkpoint_interval: Annotated[str, Field(max_length=30), AfterValidator(_duration)] = "10s"
    triggerId: HexId | None = None


class Query(Body):
    path: Url
    sql: str = Field(min_length=1, max_length=20_000, examples=["select * from count.total limit 10"])
    limit: int = Field(1000, ge=1, le=100_000)


class Diff(Body):
    left: Url
    right: Url
    limit: int = Field(100, ge=0, le=10_000)


class EntryChange(Body):
    """One change of an edit: set a value, or delete an entry."""

    operator: Uid
    state: Uid
    key: Any = None
    namespace: Any = None
    map_key: Any = None
    op: Literal["set", "delete"] = "set"
    value: Any = None


class Edit(Body):
    source: Url
    destination: Url
    changes: list[EntryChange] = Field(min_length=1, max_length=10_000)
    triggerId: HexId | None = None


class OperationStart(Body):
    kind: Literal["rescale", "convert", "copy", "verify", "edit", "dispose"]
    source: Url
    destination: Url | None = None
    parallelism: int | None = Field(None, ge=1, le=32768)
    max_parallelism: int | None = Field(None, ge=1, le=32768)
    format: Literal["open", "native"] = "open"
    changes: list[EntryChange] = Field(default_factory=list, max_length=10_000)
    triggerId: HexId | None = None


class PathOnly(Body):
    path: Url
