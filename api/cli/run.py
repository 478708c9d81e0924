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

from api.cli.output import Format, Output, emit_object, note, warn
from api.cli.run_options import Job, RunOptions, takes_run_options
from api.cli.settings import quiet
from api.rest.claiming import claim_launch
from statebackend.errors import HoldfastError

if TYPE_CHECKING:
    from checkpoint.runtime.job import JobHandle

app = typer.Typer(rich_markup_mode=None, no_args_is_help=True)


@app.command()
@takes_run_options
def run(
    job: Job,
    options: RunOptions,
    restore: Annotated[str | None, typer.Option(
        "--restore", metavar="latest|PATH", help="Go on from this flow's newest checkpoint, or start a new job from a "
        "checkpoint or savepoint.")] = None,
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
    run_job(job, options, restore, output)


def run_job(job: str, options: RunOptions, restore: str | None, output: Format | None) -> None:
    """Run a job to its end and tell how it went."""
    claim_launch()
    from checkpoint.runtime.loading import load_flow, shadowed, split_reference

    for name in shadowed(split_reference(job)[0]):
        warn(f"the job's folder has a module {name!r}, but that name is a package of holdfast: `import {name}` in the "
             "job finds holdfast's; rename yours")
    flow = load_flow(job)
    if options.runtime == "spark":
        from spark_integration import SparkRuntime

        handle = SparkRuntime(master=options.master, config=options.spark_settings()).start(
            flow, workers=options.workers, claim=options.claim, restore=restore,
            job_id=os.environ.get("HOLDFAST_JOB_ID"), **options.arguments())
    else:
        from checkpoint.runtime.job import start

        handle = start(flow, runtime=options.runtime, job=job, workers=options.workers, claim=options.claim,
                       restore=restore, job_id=os.environ.get("HOLDFAST_JOB_ID"), **options.arguments())
    if restore == "latest" and handle.restore_point is None:
        note(f"no checkpoint of {flow.name!r} below {options.checkpoint_dir}: starting fresh")
    elif handle.restore_point is not None and handle.restore_point.again:
        note(f"the last run of {flow.name!r} was restored from {handle.restore_point.url} and completed no checkpoint: "
             "that is the latest there is")
    elif handle.restore_point is not None and handle.restore_point.stopped:
        note(f"the last run of {flow.name!r} stopped with {handle.restore_point.url}: that is the latest there is")
    if options.checkpoint_dir is None:
        note("no --checkpoint-dir: nothing of this run's state will be kept")
    with _reporting(handle, options.service):
        _follow(handle)
    result = handle.wait()
    shown = {"job_id": result.job_id, "state": result.state, "checkpoint": result.checkpoint,
             "restarts": result.restarts, "seconds": round(result.duration_seconds, 3)}
    emit_object(shown, output, name="job_id", show=lambda: print(
        f"{result.state.lower()} after {result.duration_seconds:.1f} s, job {result.job_id}"
        + (f", checkpoint {result.checkpoint}" if result.checkpoint else "")))


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
    if handle.root is None:
        note("\nstopping; without --checkpoint-dir nothing of this run's state is kept")
    else:
        note("\nstopping with a last checkpoint (once more to end at once)")
    try:
        path = handle.stop_with_checkpoint(timeout=600)
    except HoldfastError as error:
        warn(f"the last checkpoint could not be taken: {error}")
    else:
        note("stopped" if handle.root is None else f"stopped; go on with --restore latest (from {path})")


def _show_progress(handle: JobHandle) -> None:
    shown, before, at = sys.stderr.isatty() and not quiet(), 0, time.monotonic()
    told = handle.restore_point is None
    while True:
        if not told:
            told = _tell_restored(handle)
        try:
            handle.wait(0.5 if told else 0.05)
        except TimeoutError:
            if shown:
                before, at = _progress_line(handle, before, at)
            continue
        except HoldfastError:
            pass
        break
    if not told:
        _tell_restored(handle)
    if shown:
        print(file=sys.stderr)


def _tell_restored(handle: JobHandle) -> bool:
    """Say it once it is true: a subtask may refuse what it is given."""
    if handle.has_started and handle.restore_point is not None:
        note(f"restored from {handle.restore_point.url}")
    return handle.has_started


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
