"""The options of a run, once for every command that runs a job."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from statebackend.errors import InvalidRequest

if TYPE_CHECKING:
    from checkpoint.protocol.settings import CheckpointSettings

Job = Annotated[str, typer.Argument(metavar="JOB.PY:FLOW", help="The job file and the flow in it.")]


@dataclass(frozen=True)
class RunOptions:
    """How a job runs, as the command line says it. A command gets them by `takes_run_options`."""

    checkpoint_dir: Annotated[str | None, typer.Option(
        "--checkpoint-dir", envvar="HOLDFAST_CHECKPOINT_DIR", help="Folder or URL where checkpoints are kept.")] = None
    checkpoint_interval: Annotated[str, typer.Option(
        "--checkpoint-interval", envvar="HOLDFAST_CHECKPOINT_INTERVAL",
        help="Time between checkpoints; 0 for none.")] = "1s"
    backend: Annotated[str, typer.Option(
        "--backend", envvar="HOLDFAST_BACKEND", help="memory, filesystem or rocksdb.")] = "filesystem"
    runtime: Annotated[str, typer.Option(
        "--runtime", envvar="HOLDFAST_RUNTIME", help="threads, processes or spark.")] = "threads"
    parallelism: Annotated[list[str] | None, typer.Option(
        "--parallelism", "-p", metavar="N|UID=N", envvar="HOLDFAST_PARALLELISM",
        help="Parallelism of all operators, or of one; repeatable.")] = None
    map_uid: Annotated[list[str] | None, typer.Option(
        "--map-uid", metavar="OLD=NEW", help="Give the state of a stored operator to another one; repeatable.")] = None
    allow_non_restored_state: Annotated[bool, typer.Option(
        "--allow-non-restored-state", help="Drop the state of operators that the flow no longer has.")] = False
    claim: Annotated[bool, typer.Option(
        "--claim", help="Own the checkpoint restored from PATH, and delete it once it is no longer needed.")] = False
    unaligned: Annotated[bool, typer.Option("--unaligned", help="Barriers overtake records.")] = False
    checkpoint_timeout: Annotated[str, typer.Option(
        "--checkpoint-timeout", help="A checkpoint that takes longer is given up.")] = "10m"
    tolerable_failures: Annotated[int, typer.Option(
        "--tolerable-failures", help="Failed checkpoints in a row that the job survives; one more restarts it.")] = 0
    retained: Annotated[int, typer.Option("--retained", help="Completed checkpoints to keep.")] = 1
    savepoint_dir: Annotated[str | None, typer.Option("--savepoint-dir", help="Default folder of savepoints.")] = None
    workers: Annotated[int | None, typer.Option(
        "--workers", help="Worker processes, or Spark tasks, to spread subtasks over.")] = None
    master: Annotated[str | None, typer.Option(
        "--master", help="Spark's master, for --runtime spark: local[4], spark://host:7077, ...")] = None
    conf: Annotated[list[str] | None, typer.Option(
        "--conf", metavar="NAME=VALUE", help="A Spark setting, for --runtime spark; repeatable.")] = None
    unfenced: Annotated[bool, typer.Option("--unfenced", help="Accept a store without conditional create.")] = False
    service: Annotated[str | None, typer.Option(
        "--service", envvar="HOLDFAST_SERVICE", help="URL of the service to report to.")] = None

    def settings(self) -> CheckpointSettings:
        from checkpoint.protocol.settings import CheckpointSettings

        none = self.checkpoint_dir is None or self.checkpoint_interval.strip() in ("0", "none")
        return CheckpointSettings(interval=None if none else self.checkpoint_interval, timeout=self.checkpoint_timeout,
                                  tolerable_failures=self.tolerable_failures, unaligned=self.unaligned,
                                  retained=self.retained, savepoint_dir=self.savepoint_dir)

    def arguments(self) -> dict[str, Any]:
        """What every runtime takes."""
        return {"checkpoint_dir": self.checkpoint_dir, "backend": self.backend, "settings": self.settings(),
                "parallelism": parallelism_of(self.parallelism or []),
                "uid_mapping": dict(pair_of(item) for item in self.map_uid or []),
                "allow_non_restored_state": self.allow_non_restored_state, "unfenced": self.unfenced}

    def spark_settings(self) -> dict[str, str]:
        return dict(pair_of(item, "a Spark setting is NAME=VALUE") for item in self.conf or [])


def takes_run_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command all options of a run; it gets them in one argument, `options`."""
    own = inspect.signature(command, eval_str=True).parameters
    shared = inspect.signature(RunOptions, eval_str=True).parameters
    parameters = [parameter for name, parameter in own.items() if name != "options"]
    parameters[-1:-1] = shared.values()  # the form of the output comes last

    @functools.wraps(command)
    def wrapped(**given: Any) -> None:
        command(options=RunOptions(**{name: given.pop(name) for name in shared}), **given)

    wrapped.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in parameters])
    wrapped.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return wrapped


def parallelism_of(given: list[str]) -> dict[str, int]:
    """`4` for all operators, `count=8` for one, as `start` takes them."""
    chosen: dict[str, int] = {}
    for item in given:
        uid, equals, number = item.rpartition("=")
        if not number.isdigit() or int(number) < 1:
            raise InvalidRequest("parallelism is a whole number of at least 1, or UID=NUMBER", found=item)
        chosen[uid if equals else ""] = int(number)
    return chosen


def pair_of(item: str, rule: str = "a mapping of uids is OLD=NEW") -> tuple[str, str]:
    """Both sides of `OLD=NEW`."""
    old, equals, new = item.partition("=")
    if not equals or not old or not new:
        raise InvalidRequest(rule, found=item)
    return old, new
