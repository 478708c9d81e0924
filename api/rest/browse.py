"""What Flink lacks: browse roots, open snapshots, read, look up, query and compare them, and run operations on them."""

from __future__ import annotations

import asyncio
import base64
import binascii
from collections.abc import Iterator
from typing import Annotated, Any, Literal

import msgspec
from fastapi import APIRouter, Depends, Path, Query, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse, Response, StreamingResponse

from api.rest import bodies, library, savepoint_operations
from api.rest.context import Service, service
from api.rest.registry import Operation
from statebackend.errors import InvalidRequest, NotFound, Unavailable

router = APIRouter(tags=["Savepoints"])
Registered = Annotated[Service, Depends(service)]
PathText = Annotated[str, Query(min_length=1, max_length=4096, description="a snapshot below a root")]
Uid = Annotated[str, Query(min_length=1, max_length=300)]
Cursor = Annotated[str | None, Query(max_length=4096, description="`next` of the page before")]
OperationId = Annotated[str, Path(pattern=r"^[0-9a-f]{32}$")]


def heavy(found: Registered) -> Iterator[None]:
    """At most a few requests that read data run at the same time; the others are told to come again."""
    if not found.heavy.acquire(timeout=5):
        raise Unavailable("too many requests read data at the moment", hint="try again in a few seconds")
    try:
        yield
    finally:
        found.heavy.release()


@router.get("/roots")
async def roots(found: Registered) -> dict[str, Any]:
    """The folders that this service serves."""
    return {"roots": [{"index": index, "url": url} for index, url in enumerate(found.root_urls())]}


@router.get("/changes")
async def changes(found: Registered, since: Annotated[str | None, Query(max_length=30)] = None) -> dict[str, Any]:
    """A number that grows with every change of a job or operation; waits some seconds for one that is not `since`."""
    for _ in range(20):
        if str(found.registry.changes) != since:
            break
        await asyncio.sleep(0.25)
    return {"changes": found.registry.changes}


@router.get("/snapshots", dependencies=[Depends(heavy)])
def snapshots(found: Registered, root: Annotated[str | None, Query(max_length=4096)] = None, cursor: Cursor = None,
              limit: Annotated[int, Query(ge=1, le=1000)] = 100) -> dict[str, Any]:
    """Savepoints and checkpoints below a root, by path."""
    place = found.place(root or found.root_urls()[0])
    items = library.snapshots(place.url, lambda path: found.place(path).relative)
    after = str(_decoded(cursor)) if cursor else ""
    rest = [item for item in items if item["path"] > after][:limit + 1]
    return {"items": rest[:limit], "next": _encoded(rest[limit - 1]["path"]) if len(rest) > limit else None}


@router.get("/snapshot", dependencies=[Depends(heavy)])
def snapshot(path: PathText, found: Registered, request: Request) -> Response:
    """A snapshot: operators, states, schemas, sizes, entries by key group. From metadata; no data is read."""
    place = found.place(path)
    tag = f'"{library.tag(place.url)}"'
    if _matches(request.headers.get("if-none-match", ""), tag):
        return Response(status_code=304, headers={"ETag": tag})
    return JSONResponse(library.describe(place.url, place.relative), headers={"ETag": tag, "Cache-Control": "no-cache"})


@router.get("/snapshot/entries", dependencies=[Depends(heavy)])
def entries(path: PathText, operator: Uid, state: Uid, found: Registered, cursor: Cursor = None,
            key: Annotated[str | None, Query(max_length=10_000, description="a key, as JSON or plain text")] = None,
            key_group: Annotated[int | None, Query(ge=0, le=32767)] = None,
            where: Annotated[str | None, Query(max_length=2000, description="SQL condition, e.g. value > 10")] = None,
            limit: Annotated[int, Query(ge=1, le=1000)] = 100) -> dict[str, Any]:
    """A page of the entries of a state, by key group and key."""
    start = _position(cursor) if cursor else (0, 0)
    page = library.entries(found.place(path).url, operator, state, start=start, limit=limit, key=key, key_group=key_group,
                           where=where)
    return {**page, "next": _encoded(list(page["next"])) if page["next"] else None}


@router.get("/snapshot/lookup", dependencies=[Depends(heavy)])
def lookup(path: PathText, operator: Uid, state: Uid, key: Annotated[str, Query(max_length=10_000)],
           found: Registered) -> dict[str, Any]:
    """What a state holds for one key."""
    return library.lookup(found.place(path).url, operator, state, key)


@router.get("/snapshot/download", dependencies=[Depends(heavy)], response_class=StreamingResponse)
def download(path: PathText, operator: Uid, state: Uid, found: Registered,
             format: Literal["arrow", "parquet", "jsonl"] = "arrow") -> Response:
    """All entries of a state as an Arrow stream, a Parquet file or JSON lines."""
    media = {"arrow": "application/vnd.apache.arrow.stream", "parquet": "application/vnd.apache.parquet",
             "jsonl": "application/x-ndjson"}[format]
    stream = library.download(found.place(path).url, operator, state, format)
    name = "".join(letter if letter.isalnum() or letter in "-_." else "_" for letter in f"{operator}.{state}.{format}")
    return StreamingResponse(stream, media_type=media, headers={"Content-Disposition": f'attachment; filename="{name}"'})


@router.post("/query", dependencies=[Depends(heavy)])
def query(body: bodies.Query, found: Registered) -> dict[str, Any]:
    """Run a SELECT over the states of a snapshot as tables `operator.state`; read-only, confined to it, limited in time."""
    limit = min(body.limit, found.settings.max_rows)
    return library.query(found.place(body.path).url, body.sql, limit, found.settings.query_seconds)


@router.post("/diff", dependencies=[Depends(heavy)])
def diff(body: bodies.Diff, found: Registered) -> dict[str, Any]:
    """What differs between two snapshots: totals by state, and the first changes."""
    return library.diff(found.place(body.left).url, found.place(body.right).url, body.limit)


@router.post("/edit/preview", dependencies=[Depends(heavy)])
def edit_preview(body: bodies.Edit, found: Registered) -> dict[str, Any]:
    """What an edit would change; nothing is written."""
    library.require_free(found.place(body.destination).url)
    return library.edit_preview(found.place(body.source).url, [change.model_dump() for change in body.changes])


@router.post("/verify", dependencies=[Depends(heavy)])
def verify(body: bodies.PathOnly, found: Registered) -> dict[str, Any]:
    """Check every checksum, key group, schema and reference of a snapshot, and wait for the answer."""
    return savepoint_operations.run("verify", {"source": found.place(body.path).url}, lambda _done, _total: None)


@router.post("/operations", status_code=202)
async def start_operation(body: bodies.OperationStart, found: Registered) -> Response:
    """Rescale, convert, copy, verify, edit or dispose in the background."""
    arguments: dict[str, Any] = body.model_dump(exclude={"kind", "triggerId"}, exclude_none=True)
    arguments["source"] = found.place(body.source).url
    if body.kind in ("rescale", "convert", "copy", "edit"):
        if body.destination is None:
            raise InvalidRequest(f"{body.kind} needs a destination", field="destination")
        arguments["destination"] = found.place(body.destination).url
    if body.kind == "edit" and not body.changes:
        raise InvalidRequest("edit needs changes", field="changes")
    if body.triggerId is None or not found.registry.knows_operation(body.triggerId):
        await run_in_threadpool(_require_possible, arguments)
    operation = found.operations.start(body.kind, arguments, body.triggerId)
    return JSONResponse({"request-id": operation.id, **_shown(operation)}, 202,
                        {"Location": f"/api/operations/{operation.id}", "Retry-After": "1"})


def _require_possible(arguments: dict[str, Any]) -> None:
    """What can be told before it begins is told to whoever asks for it."""
    library.require_snapshot(arguments["source"])
    if "destination" in arguments:
        library.require_free(arguments["destination"])


@router.get("/operations")
async def operations(found: Registered, limit: Annotated[int, Query(ge=1, le=1000)] = 100,
                     cursor: Cursor = None) -> dict[str, Any]:
    """Operations, newest first."""
    after = _decoded(cursor) if cursor else [2**62, ""]
    if not (isinstance(after, list) and [type(part) for part in after] == [int, str] and abs(after[0]) < 2**63):
        raise InvalidRequest("this is no cursor of this list", field="cursor")
    items = found.registry.operations(limit + 1, (after[0], after[1]))
    last = items[limit - 1] if len(items) > limit else None
    return {"items": [_shown(item) for item in items[:limit]], "next": _encoded([last.created, last.id]) if last else None}


@router.get("/operations/{operation_id}")
async def operation(operation_id: OperationId, found: Registered) -> dict[str, Any]:
    """One operation with its progress and result."""
    return _shown(found.registry.operation(operation_id))


@router.delete("/operations/{operation_id}")
async def cancel_operation(operation_id: OperationId, found: Registered) -> dict[str, Any]:
    """Cancel an operation; no partial result stays."""
    return _shown(found.operations.cancel(operation_id))


@router.get("/jobs/{job_id}/state", dependencies=[Depends(heavy)])
def job_state(job_id: Annotated[str, Path(pattern=r"^[0-9a-f]{32}$")], operator: Uid, state: Uid,
              key: Annotated[str, Query(max_length=10_000)], found: Registered) -> dict[str, Any]:
    """What a running job's state holds for a key, as of its last completed checkpoint."""
    last = next((record for record in found.registry.checkpoints(job_id)
                 if record.get("status") == "COMPLETED" and not record.get("is_savepoint") and record.get("external_path")),
                None)
    if last is None:
        found.registry.job(job_id)
        raise NotFound("the job has no completed checkpoint yet", job_id=job_id)
    folder = found.place(str(last["external_path"]).rsplit("/chk-", 1)[0]).url
    return library.lookup_latest(folder, operator, state, key)


def _matches(header: str, tag: str) -> bool:
    """Whether an If-None-Match names the tag; a weak one will do, a snapshot never changes."""
    named = [part.strip().removeprefix("W/") for part in header.split(",")]
    return tag in named or "*" in named


def _shown(item: Operation) -> dict[str, Any]:
    return {"id": item.id, "kind": item.kind, "arguments": item.arguments, "status": item.status,
            "progress": item.progress, "result": item.result if item.ended is not None else {},
            "created": item.created, "ended": item.ended}


def _encoded(value: Any) -> str:
    return base64.urlsafe_b64encode(msgspec.json.encode(value)).decode().rstrip("=")


def _decoded(cursor: str) -> Any:
    try:
        return msgspec.json.decode(base64.urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4)))
    except (binascii.Error, msgspec.DecodeError, ValueError):
        raise InvalidRequest("this is no cursor of this service", field="cursor") from None


def _position(cursor: str) -> tuple[int, int]:
    value = _decoded(cursor)
    fits = isinstance(value, list) and len(value) == 2 and all(isinstance(item, int) and 0 <= item < 2**40 for item in value)
    if not fits:
        raise InvalidRequest("this is no cursor of this list", field="cursor")
    return value[0], value[1]
