"""`holdfast run`: run a dataflow, show how it goes, end cleanly on Ctrl-C."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from contextlib import nullcontext
from typing import TYPE_CHECKING, Annotated, Any

import typer

from api.cli.claiming import claim_launch
from api.cli.output import Output, emit_object, note, warn
from api.cli.settings import quiet
from statebackend.errors import HoldfastError, InvalidRequest

if TYPE_CHECKING:
    from checkpoint.runtime.job import JobHandle

app = typer.Typer(rich_markup_mode=None, no_args_is_help=True)


@app.command()
def run(
    job: Annotated[str, typer.Argument(metavar="JOB.PY:FLOW", help="The job file and the flow in it.")],
    checkpoint_dir: Annotated[str | None, typer.Option("--checkpoint-dir", envvar="HOLDFAST_CHECKPOINT_DIR",
                                                       help="Folder or URL where checkpoints are kept.")] = None,
    checkpoint_interval: Annotated[str, typer.Option("--checkpoint-interval", envvar="HOLDFAST_CHECKPOINT_INTERVAL",
                                                     help="Time between checkpoints; 0 for none.")] = "1s",
    backend: Annotated[str, typer.Option("--backend", envvar="HOLDFAST_BACKEND",
                                         help="memory, filesystem or rocksdb.")] = "filesystem",
    runtime: Annotated[str, typer.Option("--runtime", envvar="HOLDFAST_RUNTIME",
                                         help="threads, processes or spark.")] = "threads",
    restore: Annotated[str | None, typer.Option(
        "--restore", metavar="latest|PATH", help="Go on from this flow's newest checkpoint, or start a new job from a "
        "checkpoint or savepoint.")] = None,
    parallelism: Annotated[list[str] | None, typer.Option(
        "--parallelism", "-p", metavar="N|UID=N", envvar="HOLDFAST_PARALLELISM",
        help="Parallelism of all operators, or of one; repeatable.")] = None,
    map_uid: Annotated[list[str] | None, typer.Option(
        "--map-uid", metavar="OLD=NEW", help="Give the state of a stored operator to another one; repeatable.")] = None,
    allow_non_restored_state: Annotated[bool, typer.Option(
        "--allow-non-restored-state", help="Drop the state of operators that the flow no longer has.")] = False,
    claim: Annotated[bool, typer.Option("--claim", help="Own the checkpoint restored from PATH, and delete it once it is "
                                                        "no longer needed.")] = False,
    unaligned: Annotated[bool, typer.Option("--unaligned", help="Barriers overtake records.")] = False,
    checkpoint_timeout: Annotated[str, typer.Option("--checkpoint-timeout", help="A checkpoint that takes longer is given "
                                                                                 "up.")] = "10m",
    tolerable_failures: Annotated[int, typer.Option(
        "--tolerable-failures", help="Failed checkpoints in a row that the job survives; one more restarts it.")] = 0,
    retained: Annotated[int, typer.Option("--retained", help="Completed checkpoints to keep.")] = 1,
    savepoint_dir: Annotated[str | None, typer.Option("--savepoint-dir", help="Default folder of savepoints.")] = None,
    workers: Annotated[int | None, typer.Option("--workers", help="Worker processes, or Spark tasks, to spread subtasks "
                                                                   "over.")] = None,
    master: Annotated[str | None, typer.Option("--master", help="Spark's master, for --runtime spark: local[4], "
                                                                "spark://host:7077, ...")] = None,
    conf: Annotated[list[str] | None, typer.Option(
        "--conf", metavar="NAME=VALUE", help="A Spark setting, for --runtime spark; repeatable.")] = None,
    unfenced: Annotated[bool, typer.Option("--unfenced", help="Accept a store without conditional create.")] = False,
    service: Annotated[str | None, typer.Option("--service", envvar="HOLDFAST_SERVICE",
                                                help="URL of the service to report to.")] = None,
    output: Output = None,
) -> None:
    """Run a dataflow with exactly-once checkpoints until its sources end.

    Ctrl-C takes a last checkpoint and ends cleanly; a second Ctrl-C ends at once.

    \b
    Examples:
      holdfast run job.py:flow --checkpoint-dir checkpoints/
      holdfast run job.py:flow --checkpoint-dir checkpoints/ --restore latest --parallelism 4
      holdfast run job.py:flow --checkpoint-dir s3://bucket/checkpoints --backend rocksdb --runtime processes
      holdfast run job.py:flow --checkpoint-dir s3://bucket/checkpoints --runtime spark --master spark://host:7077
    """
    claim_launch()
    from checkpoint.protocol.settings import CheckpointSettings
    from checkpoint.runtime.loading import load_flow, shadowed, split_reference

    for name in shadowed(split_reference(job)[0]):
        warn(f"the job's folder has a module {name!r}, but that name is a package of holdfast: `import {name}` in the "
             "job finds holdfast's; rename yours")
    flow = load_flow(job)
    no_interval = checkpoint_interval.strip() in ("0", "none")
    settings = CheckpointSettings(interval=None if no_interval or checkpoint_dir is None else checkpoint_interval,
                                  timeout=checkpoint_timeout, tolerable_failures=tolerable_failures,
                                  unaligned=unaligned, retained=retained, savepoint_dir=savepoint_dir)
    arguments: dict[str, Any] = {
        "checkpoint_dir": checkpoint_dir, "backend": backend, "settings": settings, "restore": restore,
        "parallelism": parallelism_of(parallelism or []), "uid_mapping": dict(pair_of(item) for item in map_uid or []),
        "allow_non_restored_state": allow_non_restored_state, "unfenced": unfenced,
        "job_id": os.environ.get("HOLDFAST_JOB_ID")}
    if runtime == "spark":
        from spark_integration import SparkRuntime

        config = dict(pair_of(item, "a Spark setting is NAME=VALUE") for item in conf or [])
        handle = SparkRuntime(master=master, config=config).start(flow, workers=workers, claim=claim, **arguments)
    else:
        from checkpoint.runtime.job import start

        handle = start(flow, runtime=runtime, job=job, workers=workers, claim=claim, **arguments)
    if restore == "latest" and handle.restore_point is None:
        note(f"no checkpoint of {flow.name!r} below {checkpoint_dir}: starting fresh")
    elif handle.restore_point is not None:
        note(f"restored from {handle.restore_point.url}")
    if checkpoint_dir is None:
        note("no --checkpoint-dir: nothing of this run's state will be kept")
    with _reporting(handle, service):
        _follow(handle)
    result = handle.wait()
    shown = {"job_id": result.job_id, "state": result.state, "checkpoint": result.checkpoint,
             "restarts": result.restarts, "seconds": round(result.duration_seconds, 3)}
    emit_object(shown, output, name="job_id", show=lambda: print(
        f"{result.state.lower()} after {result.duration_seconds:.1f} s, job {result.job_id}"
        + (f", checkpoint {result.checkpoint}" if result.checkpoint else "")))


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


def _reporting(handle: JobHandle, service: str | None) -> Any:
    if service is None:
        return nullcontext()
    from contextlib import closing

    from api.cli.reporting import RunningJob
    from api.rest.reporter import Reporter

    return closing(Reporter(service, RunningJob(handle)).start())


def _follow(handle: JobHandle) -> None:
    """Show progress until the job ends; turn the first Ctrl-C or SIGTERM into a last checkpoint."""
    stopping: list[threading.Thread] = []

    def interrupted(_signal: int, _frame: object) -> None:
        if stopping:
            os._exit(130)
        stopping.append(threading.Thread(target=_stop, args=(handle,), name="stopping", daemon=True))
        stopping[0].start()

    before = {number: signal.signal(number, interrupted) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        _show_progress(handle)
        for thread in stopping:
            thread.join()  # it has something to say about where to go on from
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _stop(handle: JobHandle) -> None:
    note("\nstopping with a last checkpoint (once more to end at once)")
    try:
        path = handle.stop_with_checkpoint(timeout=600)
    except HoldfastError as error:
        warn(f"the last checkpoint could not be taken: {error}")
    else:
        note(f"stopped; go on with --restore latest (from {path})")


def _show_progress(handle: JobHandle) -> None:
    shown, before, at = sys.stderr.isatty() and not quiet(), 0, time.monotonic()
    while True:
        try:
            handle.wait(0.5)
        except TimeoutError:
            if shown:
                before, at = _progress_line(handle, before, at)
            continue
        except HoldfastError:
            pass
        break
    if shown:
        print(file=sys.stderr)


def _progress_line(handle: JobHandle, before: int, at: float) -> tuple[int, float]:
    statistics = handle.statistics()
    total = sum(counters["records_in"] for counters in statistics["records"].values())
    now, counts = time.monotonic(), statistics["checkpoints"]["counts"]
    rate = max(0.0, (total - before) / max(now - at, 1e-3))
    latest = statistics["checkpoints"]["latest"]["completed"]
    last = f", last {latest['end_to_end_duration']} ms" if latest else ""
    print(f"\r{statistics['state'].lower()}: {total:,} records ({rate:,.0f}/s), {counts['completed']} checkpoints{last}"
          f", {statistics['restarts']} restarts\x1b[K", end="", file=sys.stderr, flush=True)
    return total, now
