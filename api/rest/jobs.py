"""How running jobs talk to the service: they register, report every few seconds, and take commands from the answer."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Path
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse, Response

from api.rest import bodies, library, statistics
from api.rest.context import Service, encoded, service
from api.rest.records import Beat
from statebackend.errors import InvalidRequest

router = APIRouter(tags=["Jobs"])
Registered = Annotated[Service, Depends(service)]
JobId = Annotated[str, Path(pattern=r"^[0-9a-f]{32}$", examples=["0123456789abcdef0123456789abcdef"])]
TriggerId = Annotated[str, Path(pattern=r"^[0-9a-f]{32}$")]


@router.put("/jobs/{job_id}/registration")
async def register(job_id: JobId, body: bodies.Registration, found: Registered) -> dict[str, Any]:
    """A job says that it runs; saying it again is harmless."""
    registration = body.model_dump(exclude={"name", "state"})
    found.registry.register_job(job_id, body.name, registration, body.state)
    return {"jid": job_id, "report-every-ms": max(500, found.settings.lost_after_ms // 6)}


@router.post("/jobs/{job_id}/heartbeat")
@encoded
async def heartbeat(job_id: JobId, body: bodies.Heartbeat, found: Registered) -> dict[str, Any]:
    """A job reports; the answer holds the commands that it has not yet reported on."""
    live = {"metrics": body.metrics, "vertices": body.vertices,
            "operators": {uid: told.model_dump(exclude_none=True) for uid, told in body.operators.items()}}
    checkpoints = [statistics.with_alignment(record) for record in body.checkpoints]
    commands = await found.beats.add(Beat.of(job_id, body.state, live, checkpoints, body.exceptions))
    return {"commands": [{"request-id": command.request_id, "kind": command.kind, "arguments": command.arguments}
                         for command in commands]}


@router.post("/jobs/{job_id}/commands/{trigger_id}/result")
async def command_result(job_id: JobId, trigger_id: TriggerId, body: bodies.CommandResult,
                         found: Registered) -> dict[str, Any]:
    """A job reports what came of a command; reporting it again is harmless."""
    found.registry.finish_command(job_id, trigger_id, body.model_dump(exclude_none=True))
    await run_in_threadpool(found.launcher.continue_after, found.registry.command(trigger_id))
    return {}


@router.post("/jobs", status_code=202)
async def start_job(body: bodies.JobStart, found: Registered) -> Response:
    """Start a job below one of the jobs folders, fresh or restored from a savepoint or checkpoint below a root."""
    arguments = body.model_dump(exclude={"triggerId"})
    if body.restore and body.restore != "latest":
        arguments["restore"] = found.place(body.restore).url
        if body.triggerId is None or found.registry.launch(body.triggerId) is None:
            await run_in_threadpool(library.require_snapshot, arguments["restore"])
    job_id = await run_in_threadpool(found.launcher.start, arguments, body.triggerId)
    return JSONResponse({"jid": job_id}, 202, {"Location": f"/jobs/{job_id}", "Retry-After": "1"})


@router.post("/jobs/check")
def check_job(body: bodies.JobStart, found: Registered) -> dict[str, Any]:
    """What starting with this body would restore, migrate, drop or refuse; nothing is started."""
    path, attribute = found.launcher.job_file(body.job)
    if not body.restore or body.restore == "latest":
        raise InvalidRequest("name the savepoint or checkpoint to check against", hint="set `restore` to its path")
    with found.heavy:
        return library.check(f"{path}:{attribute}", found.place(body.restore).url, body.uid_mapping,
                             body.allow_non_restored_state, body.parallelism, body.operator_parallelism)
