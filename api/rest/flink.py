"""REST in Flink's shape: its paths, its field names, its way of asynchronous operations.

Flink's own client retries for minutes, without saying why, when a field is missing; so every field is always there.
"""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Path, Query, Request
from fastapi.responses import JSONResponse, Response

from api.rest import bodies, statistics
from api.rest.context import Service, encoded, service
from api.rest.registry import Command, JobRecord, now_ms
from statebackend.errors import InvalidRequest, NotFound

router = APIRouter(tags=["Flink's shape"])
Registered = Annotated[Service, Depends(service)]
JobId = Annotated[str, Path(pattern=r"^[0-9a-f]{32}$", examples=["0123456789abcdef0123456789abcdef"])]
TriggerId = Annotated[str, Path(pattern=r"^[0-9a-f]{32}$")]
CheckpointNumber = Annotated[int, Path(ge=0, lt=2**62)]
TASK_STATES = ("CANCELED", "INITIALIZING", "DEPLOYING", "FAILED", "CREATED", "CANCELING", "RUNNING", "SCHEDULED",
               "RECONCILING", "FINISHED")
TIMESTAMPS = ("CREATED", "FINISHED", "FAILED", "FAILING", "RECONCILING", "SUSPENDED", "INITIALIZING", "CANCELLING",
              "RUNNING", "RESTARTING", "CANCELED")


def shown_state(job: JobRecord) -> str:
    """Flink has no word for a job that stopped reporting; SUSPENDED is the one that is neither running nor ended."""
    return "SUSPENDED" if job.lost else job.state


@router.get("/overview")
@encoded
async def overview(found: Registered) -> dict[str, Any]:
    """Counts of jobs."""
    jobs = found.registry.jobs()
    states = [shown_state(job) for job in jobs]
    return {
        "taskmanagers": 0, "slots-total": 0, "slots-available": 0,
        "jobs-running": sum(state in ("RUNNING", "RESTARTING", "INITIALIZING", "CREATED") for state in states),
        "jobs-finished": states.count("FINISHED"), "jobs-cancelled": states.count("CANCELED"),
        "jobs-failed": states.count("FAILED"), "jobs-lost": sum(job.lost for job in jobs),
        "flink-version": "2.3.0", "flink-commit": "holdfast", "holdfast-version": found.version,
    }


@router.get("/config")
@encoded
async def config(found: Registered) -> dict[str, Any]:
    """How the page should behave."""
    return {"refresh-interval": 3000, "timezone-name": "UTC", "timezone-offset": 0, "flink-version": "2.3.0",
            "flink-revision": "holdfast", "features": {"web-submit": False, "web-cancel": True, "web-rescale": True,
                                                       "web-history": False},
            "holdfast-version": found.version, "roots": found.root_urls(), "starts-jobs": found.starts_jobs}


@router.get("/jobs")
@encoded
async def jobs(found: Registered) -> dict[str, Any]:
    """Ids and states of all jobs."""
    return {"jobs": [{"id": job.id, "status": shown_state(job)} for job in found.registry.jobs()]}


@router.get("/jobs/overview")
@encoded
async def jobs_overview(found: Registered) -> Response:
    """A line per job."""
    return found.cached("jobs-overview", found.jobs_version(),
                        lambda: {"jobs": [_overview_line(job, now_ms()) for job in found.registry.jobs()]})


@router.get("/jobs/{job_id}")
@encoded
async def job_details(job_id: JobId, found: Registered) -> dict[str, Any]:
    """A job with its vertices and plan."""
    job = found.registry.job(job_id)
    vertices = [_vertex(vertex, job) for vertex in _vertices(job)]
    counts = dict.fromkeys(TASK_STATES, 0)
    for vertex in vertices:
        counts[vertex["status"]] += 1
    plan = job.registration.get("plan") or {}
    moment = now_ms()
    return {
        "jid": job.id, "application-id": job.id, "name": job.name, "isStoppable": job.running,
        "state": shown_state(job), "job-type": "STREAMING", "schedulerType": "Default", "start-time": job.start_time,
        "end-time": job.end_time, "duration": (job.end_time if job.end_time >= 0 else moment) - job.start_time,
        "maxParallelism": job.registration.get("max_parallelism", 128), "now": moment,
        "timestamps": {**dict.fromkeys(TIMESTAMPS, 0), "CREATED": job.start_time,
                       shown_state(job): job.end_time if job.end_time >= 0 else job.start_time},
        "vertices": vertices, "status-counts": counts,
        "plan": {"jid": job.id, "name": job.name, "type": "STREAMING", "nodes": plan.get("nodes", [])},
        "pending-operators": 0, "lost": job.lost, "last-seen": job.last_seen,
        "runtime": job.registration.get("runtime"), "checkpoint-dir": job.registration.get("checkpoint_dir"),
        "backend": job.registration.get("backend"), "started-here": found.registry.launch(job.id) is not None,
        "host": job.registration.get("host"), "pid": job.registration.get("pid"),
        "operators": job.live.get("operators", {}),
        "last-restore-duration": job.live.get("metrics", {}).get("lastRestoreDuration"),
    }


@router.get("/jobs/{job_id}/checkpoints")
@encoded
async def checkpoints(job_id: JobId, found: Registered) -> Response:
    """Counts, summary, latest and history of a job's checkpoints."""
    job = found.registry.job(job_id)
    restored, metrics = job.registration.get("restored"), job.live.get("metrics", {})
    return found.cached(f"checkpoints-{job_id}", found.registry.version(job_id),
                        lambda: statistics.checkpoints_json(found.registry.checkpoints(job_id), restored, metrics))


@router.get("/jobs/{job_id}/checkpoints/config")
@encoded
async def checkpoint_config(job_id: JobId, found: Registered) -> dict[str, Any]:
    """The checkpoint settings of a job."""
    job = found.registry.job(job_id)
    given = job.registration.get("checkpoint_config") or {}
    defaults = {
        "mode": "exactly_once", "interval": 0, "timeout": 600_000, "min_pause": 0, "max_concurrent": 1,
        "externalization": {"enabled": True, "delete_on_cancellation": False},
        "state_backend": job.registration.get("backend") or "memory", "checkpoint_storage": "FileSystemCheckpointStorage",
        "unaligned_checkpoints": False, "tolerable_failed_checkpoints": 0, "aligned_checkpoint_timeout": 0,
        "checkpoints_after_tasks_finish": True, "state_changelog_enabled": False,
        "changelog_periodic_materialization_interval": 0, "changelog_storage": "none",
    }
    return {name: given.get(name, value) for name, value in defaults.items()}


@router.get("/jobs/{job_id}/checkpoints/details/{checkpoint_id}")
@encoded
async def checkpoint_details(job_id: JobId, checkpoint_id: CheckpointNumber, found: Registered) -> dict[str, Any]:
    """One checkpoint with its vertices."""
    return statistics.checkpoint_json(found.registry.checkpoint(job_id, checkpoint_id), tasks=True)


@router.get("/jobs/{job_id}/checkpoints/details/{checkpoint_id}/subtasks/{vertex}")
@encoded
async def checkpoint_subtasks(job_id: JobId, checkpoint_id: CheckpointNumber, vertex: str,
                              found: Registered) -> dict[str, Any]:
    """One vertex of a checkpoint with its subtasks."""
    shown = statistics.subtasks_json(found.registry.checkpoint(job_id, checkpoint_id), vertex)
    if shown is None:
        raise NotFound("the checkpoint knows no such vertex", vertex=vertex, checkpoint_id=checkpoint_id)
    return shown


@router.post("/jobs/{job_id}/checkpoints", status_code=202)
async def trigger_checkpoint(job_id: JobId, found: Registered, request: Request,
                             body: bodies.CheckpointTrigger | None = None) -> Response:
    """Ask a job for a checkpoint now."""
    body = body or bodies.CheckpointTrigger()
    arguments = {"full": body.checkpointType == "FULL"}
    return _accepted(found.registry.add_command(job_id, "checkpoint", arguments, body.triggerId), request)


@router.get("/jobs/{job_id}/checkpoints/{trigger_id}")
@encoded
async def checkpoint_trigger(job_id: JobId, trigger_id: TriggerId, found: Registered) -> dict[str, Any]:
    """What came of a triggered checkpoint."""
    command = found.registry.command(trigger_id, job_id, "checkpoint")
    return _progress(command, {"checkpointId": command.result.get("checkpoint_id")})


@router.post("/jobs/{job_id}/savepoints", status_code=202)
async def trigger_savepoint(job_id: JobId, found: Registered, request: Request,
                            body: bodies.SavepointTrigger | None = None) -> Response:
    """Ask a job for a savepoint; with `cancel-job` it stops after it."""
    body = body or bodies.SavepointTrigger.model_validate({})
    arguments = _savepoint_arguments(found, body.target_directory, body.formatType)
    kind = "stop" if body.cancel_job else "savepoint"
    arguments |= {"drain": False} if body.cancel_job else {}
    return _accepted(found.registry.add_command(job_id, kind, arguments, body.triggerId), request)


@router.get("/jobs/{job_id}/savepoints/{trigger_id}")
@encoded
async def savepoint_trigger(job_id: JobId, trigger_id: TriggerId, found: Registered) -> dict[str, Any]:
    """Where a triggered savepoint is, or why there is none."""
    command = found.registry.command(trigger_id, job_id, "savepoint", "stop")
    return _progress(command, {"location": command.result.get("location")})


@router.post("/jobs/{job_id}/stop", status_code=202)
async def stop(job_id: JobId, found: Registered, request: Request, body: bodies.StopTrigger | None = None) -> Response:
    """Stop a job with a savepoint; `drain` lets all event-time timers fire first."""
    body = body or bodies.StopTrigger()
    arguments = _savepoint_arguments(found, body.targetDirectory, body.formatType) | {"drain": bool(body.drain)}
    return _accepted(found.registry.add_command(job_id, "stop", arguments, body.triggerId), request, "savepoints")


@router.patch("/jobs/{job_id}", status_code=202)
async def cancel(job_id: JobId, found: Registered, mode: Annotated[str, Query(max_length=20)] = "cancel") -> dict[str, Any]:
    """Cancel a job."""
    if mode != "cancel":
        raise InvalidRequest("the only mode is cancel", found=mode)
    found.registry.add_command(job_id, "cancel", {}, None)
    return {}


@router.post("/savepoint-disposal", status_code=202)
async def dispose(body: bodies.Disposal, found: Registered) -> Response:
    """Delete a savepoint below one of the roots."""
    place = found.place(body.savepoint_path)
    operation = found.operations.start("dispose", {"source": place.url}, body.triggerId)
    return JSONResponse({"request-id": operation.id}, 202,
                        {"Location": f"/savepoint-disposal/{operation.id}", "Retry-After": "1"})


@router.get("/savepoint-disposal/{trigger_id}")
@encoded
async def disposal(trigger_id: TriggerId, found: Registered) -> dict[str, Any]:
    """What came of a disposal."""
    operation = found.registry.operation(trigger_id)
    if operation.kind != "dispose":
        raise NotFound("this trigger is no disposal", trigger_id=trigger_id, hint=f"GET /api/operations/{trigger_id}")
    if operation.status in ("QUEUED", "RUNNING"):
        return {"status": {"id": "IN_PROGRESS"}, "operation": None}
    failure = operation.result.get("failure")
    return {"status": {"id": "COMPLETED"}, "operation": {"failure-cause": _cause(failure)} if failure else {}}


@router.patch("/jobs/{job_id}/rescaling", status_code=202)
async def rescale(job_id: JobId, found: Registered, request: Request,
                  parallelism: Annotated[int, Query(ge=1, le=32768)],
                  triggerId: Annotated[str | None, Query(pattern=r"^[0-9a-f]{32}$")] = None) -> Response:
    """Stop a job with a savepoint and start it again from it at another parallelism (jobs that the service started)."""
    command = found.launcher.rescale(job_id, parallelism, triggerId)
    return _accepted(command, request, "rescaling")


@router.get("/jobs/{job_id}/rescaling/{trigger_id}")
@encoded
async def rescaling(job_id: JobId, trigger_id: TriggerId, found: Registered) -> dict[str, Any]:
    """What came of a rescaling; `jid` is the job that continues."""
    command = found.registry.command(trigger_id, job_id, "stop")
    if "then" not in command.arguments:
        raise NotFound("this trigger is no rescaling", trigger_id=trigger_id)
    if command.status == "COMPLETED" and "restarted_as" not in command.result:  # stopped, and not yet started again
        return {"status": {"id": "IN_PROGRESS"}, "operation": None}
    return _progress(command, {"location": command.result.get("location"), "jid": command.result.get("restarted_as")})


@router.get("/jobs/{job_id}/exceptions")
@encoded
async def exceptions(job_id: JobId, found: Registered, maxExceptions: Annotated[int, Query(ge=0, le=100)] = 20,
                     ) -> dict[str, Any]:
    """The latest failures of a job."""
    found.registry.job(job_id)
    entries = found.registry.exceptions(job_id, maxExceptions)
    latest = entries[0] if entries else None
    return {"root-exception": latest["message"] if latest else None, "timestamp": latest["timestamp"] if latest else None,
            "all-exceptions": [], "truncated": False,
            "exceptionHistory": {"truncated": False, "entries": [
                {"exceptionName": entry["message"].split(":")[0][:200], "stacktrace": entry["message"],
                 "timestamp": entry["timestamp"], "taskName": None, "endpoint": None, "taskManagerId": None,
                 "failureLabels": {}, "concurrentExceptions": []} for entry in entries]}}


@router.get("/jobs/{job_id}/metrics")
@encoded
async def metrics(job_id: JobId, found: Registered, get: Annotated[str | None, Query(max_length=4000)] = None,
                  ) -> list[dict[str, Any]]:
    """The names of a job's metrics, or with `get=a,b` their values."""
    told = found.registry.job(job_id).live.get("metrics", {})
    values = {name: value for name, value in told.items() if value is not None}
    if get is None:
        return [{"id": name} for name in sorted(values)]
    return [{"id": name, "value": str(values[name])} for name in get.split(",") if name in values]


def _savepoint_arguments(found: Service, target: str | None, format_type: str | None) -> dict[str, Any]:
    place = found.place(target) if target else None
    return {"target": place.url if place else None, "format": "native" if format_type == "NATIVE" else "open"}


def _accepted(command: Command, request: Request, noun: str | None = None) -> Response:
    path = request.url.path if noun is None else request.url.path.rsplit("/", 1)[0] + f"/{noun}"
    return JSONResponse({"request-id": command.request_id}, 202,
                        {"Location": f"{path}/{command.request_id}", "Retry-After": "1"})


def _progress(command: Command, result: dict[str, Any]) -> dict[str, Any]:
    if command.status == "IN_PROGRESS":
        return {"status": {"id": "IN_PROGRESS"}, "operation": None}
    if command.status == "FAILED":
        return {"status": {"id": "COMPLETED"}, "operation": {"failure-cause": _cause(command.result.get("failure")),
                                                             "failureCause": _cause(command.result.get("failure"))}}
    return {"status": {"id": "COMPLETED"}, "operation": {name: value for name, value in result.items() if value is not None}}


def _cause(message: str | None) -> dict[str, Any]:
    """Flink's client reads a serialized Java exception here; it also shows the class and the trace as text."""
    text = message or "unknown failure"
    return {"class": "java.util.concurrent.CompletionException", "stack-trace": text, "serialized-throwable": None}


def _vertices(job: JobRecord) -> list[dict[str, Any]]:
    live = {str(vertex.get("id")): vertex for vertex in job.live.get("vertices", []) if isinstance(vertex, dict)}
    registered = {str(vertex.get("id")): vertex for vertex in job.registration.get("vertices", [])
                  if isinstance(vertex, dict)}
    return [{**registered.get(name, {}), **live.get(name, {})} for name in {**registered, **live}]


def _vertex(vertex: dict[str, Any], job: JobRecord) -> dict[str, Any]:
    parallelism = vertex.get("parallelism", 1)
    status = str(vertex.get("status") or ("RUNNING" if job.running else job.state))
    status = status if status in TASK_STATES else "RUNNING"
    end = job.end_time
    return {
        "id": str(vertex.get("id", "")), "slotSharingGroupId": job.id, "name": str(vertex.get("name", "")),
        "maxParallelism": vertex.get("max_parallelism", 128), "parallelism": parallelism, "status": status,
        "start-time": job.start_time, "end-time": end,
        "duration": (end if end >= 0 else now_ms()) - job.start_time,
        "tasks": {**dict.fromkeys(TASK_STATES, 0), status: parallelism},
        "metrics": {
            "read-bytes": 0, "read-bytes-complete": False, "write-bytes": 0, "write-bytes-complete": False,
            "read-records": vertex.get("records_in", 0), "read-records-complete": True,
            "write-records": vertex.get("records_out", 0), "write-records-complete": True,
            "accumulated-backpressured-time": vertex.get("backpressured_ms", 0), "accumulated-idle-time": 0,
            "accumulated-busy-time": 0.0,
        },
        "back-pressure": vertex.get("back_pressure"), "uids": vertex.get("uids", []),
        "watermark": vertex.get("watermark"),
    }


_TASK_COUNTS = dict.fromkeys(("running", "canceling", "canceled", "created", "scheduled", "deploying", "reconciling",
                              "finished", "initializing", "failed"), 0)


def _overview_line(job: JobRecord, moment: int) -> dict[str, Any]:
    parallelisms = [int(vertex.get("parallelism", 1)) for vertex in job.registration.get("vertices", ())
                    if isinstance(vertex, dict)]
    tasks, state, metrics = sum(parallelisms), shown_state(job), job.live.get("metrics", {})
    counted = state.lower()
    if counted not in _TASK_COUNTS:
        counted = "running" if job.running and not job.lost else "canceled"
    return {
        "jid": job.id, "name": job.name, "jobType": "STREAMING", "schedulerType": "Default",
        "start-time": job.start_time, "end-time": job.end_time,
        "duration": (job.end_time if job.end_time >= 0 else moment) - job.start_time, "state": state,
        "last-modification": job.last_seen, "tasks": {**_TASK_COUNTS, counted: tasks, "total": tasks},
        "pending-operators": 0, "lost": job.lost, "runtime": job.registration.get("runtime"),
        "parallelism": max(parallelisms, default=1), "last-checkpoint": metrics.get("lastCompletedCheckpointId"),
        "last-checkpoint-duration": metrics.get("lastCheckpointDuration"),
    }
