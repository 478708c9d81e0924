"""The service's calls into the library, with JSON values in and out; no logic of its own beyond paging and limits."""

from __future__ import annotations

import io
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

import savepoint
from checkpoint.storage import FileStore, locate
from savepoint.values import from_text, plain_rows, to_plain
from statebackend.errors import (
    Conflict,
    CorruptData,
    HoldfastError,
    IncompatibleState,
    InvalidRequest,
    NotFound,
    Unavailable,
)
from statebackend.keygroups import KeyGroupRange
from statebackend.types import StateType

_KIND_OF_EXIT = {kind.exit_code: kind for kind in (NotFound, IncompatibleState, Conflict, Unavailable, CorruptData)}
_DEPTH = 3
"""How deep below a root snapshots are looked for: root / job / chk-N."""


def snapshots(root: str, relative: Callable[[str], str]) -> list[dict[str, Any]]:
    """Every savepoint and checkpoint below a root by path; one that can't be opened is shown with the reason."""
    from savepoint.manage import list_savepoints

    found = sorted(list_savepoints(root, checkpoints=True, depth=_DEPTH, missing_ok=True), key=lambda item: item.path)
    return [{"path": item.path, "relative": relative(item.path), "complete": item.problem is None, "kind": item.kind,
             "format": item.format, "job_name": item.job_name, "checkpoint_id": item.checkpoint_id,
             "completed_timestamp": item.completed_timestamp, "reason": item.problem} for item in found]


def tag(url: str) -> str:
    """An entity tag of a snapshot: its metadata never changes once it is there."""
    located = locate(url)
    with FileStore.at(located.url) as store:
        return xxhash.xxh3_64_hexdigest(store.read("_metadata"))


def require_snapshot(url: str) -> None:
    """`NotFound` where there is none; what else may be wrong with it is for whoever reads it to tell."""
    try:
        savepoint.open(url).close()
    except NotFound:
        raise
    except HoldfastError:
        return


def require_free(url: str) -> None:
    """`Conflict` where something is published already."""
    with FileStore.at(url) as store:
        if store.exists("_metadata"):
            raise Conflict("there is a savepoint or checkpoint here already", path=url,
                           hint="choose another folder, or dispose of it first")


def describe(url: str, relative: str) -> dict[str, Any]:
    """Everything that the metadata of a snapshot tells."""
    with savepoint.open(url) as opened:
        metadata = opened.metadata
        return {
            "path": url, "relative": relative, "kind": metadata.kind, "format": metadata.format,
            "job_id": metadata.job_id, "job_name": metadata.job_name, "checkpoint_id": metadata.checkpoint_id,
            "trigger_timestamp": metadata.trigger_timestamp, "completed_timestamp": metadata.completed_timestamp,
            "unaligned": metadata.unaligned, "size": sum(operator.stored for operator in opened.operators()),
            "operators": [{
                "uid": operator.uid, "name": operator.name, "parallelism": operator.parallelism,
                "max_parallelism": operator.max_parallelism, "key_type": operator.key_type, "stored": operator.stored,
                "states": [_state(opened, operator.uid, state) for state in operator.states],
            } for operator in opened.operators()]}


def _state(opened: savepoint.Savepoint, uid: str, state: savepoint.StateInfo) -> dict[str, Any]:
    keyed = state.kind not in ("split", "union", "broadcast")
    groups = opened.key_groups(uid, state.name).to_pylist() if keyed else []
    largest = opened.largest_keys(uid, state.name) if keyed else []
    kind = state.value_type if state.map_key_type is None else f"{state.map_key_type} -> {state.value_type}"
    return {
        "name": state.name, "kind": state.kind, "type": kind, "key_type": state.key_type, "entries": state.rows,
        "bytes": state.size, "ttl": {"ttl_ms": state.ttl_ms} if state.ttl_ms else None,
        "key_groups": {str(row["key_group"]): row["rows"] for row in groups if row["rows"] is not None},
        "largest": [{"key": to_plain(row["key"]), "entries": row["rows"], "bytes": row["bytes"]} for row in largest],
        "schema": opened.schema(uid, state.name).to_json() if keyed else {"value_type": state.value_type},
    }


def entries(url: str, uid: str, state: str, *, start: tuple[int, int], limit: int, key: str | None = None,
            key_group: int | None = None, where: str | None = None) -> dict[str, Any]:
    """A page of entries from (key group, offset in it) on; `next` is where the next page starts."""
    with savepoint.open(url) as opened:
        keys = None if key is None or key == "" else [from_text(key, opened.key_type(uid))]
        last = opened.max_parallelism(uid) - 1
        if start[0] > last:
            raise InvalidRequest("this is no cursor of this list", field="cursor")
        groups = KeyGroupRange(start[0], last) if key_group is None else KeyGroupRange(key_group, key_group)
        reader = opened.read(uid, state, keys=keys, key_groups=groups, where=where or None)
        rows, more = _take(reader, opened.column_types(uid, state), start[1], limit)
        names = [{"name": field.name, "type": str(field.type)} for field in reader.schema]
    if not more:
        return {"columns": names, "rows": rows, "next": None}
    return {"columns": names, "rows": rows, "next": _after(rows, start)}


def _take(reader: pa.RecordBatchReader, kinds: Mapping[str, StateType], skip: int,
          limit: int) -> tuple[list[dict[str, Any]], bool]:
    """`limit` rows after `skip`, and whether there are more."""
    rows: list[dict[str, Any]] = []
    for batch in reader:
        if skip >= batch.num_rows:
            skip -= batch.num_rows
            continue
        wanted = batch.slice(skip, limit + 1 - len(rows))
        skip = 0
        rows += plain_rows(wanted, kinds)
        if len(rows) > limit:
            return rows[:limit], True
    return rows, False


def _after(rows: list[dict[str, Any]], start: tuple[int, int]) -> tuple[int, int]:
    """Where the row after the last one is: its key group and how many rows of that group were seen."""
    group = rows[-1].get("key_group", start[0])
    seen = sum(row.get("key_group", start[0]) == group for row in rows)
    return group, seen + (start[1] if group == start[0] else 0)


def lookup(url: str, uid: str, state: str, key: str) -> dict[str, Any]:
    """What a state holds for a key."""
    with savepoint.open(url) as opened:
        parsed = from_text(key, opened.key_type(uid))
        return {"key": to_plain(parsed), "value": to_plain(opened.lookup(uid, state, parsed))}


def lookup_latest(job_folder: str, uid: str, state: str, key: str) -> dict[str, Any]:
    """What the newest checkpoint of a running job holds for a key; one may go while it is read, then the next is taken."""
    for _ in range(5):
        with FileStore.at(job_folder) as store:
            numbers = sorted((int(name[4:]) for name in store.folders("") if name.startswith("chk-") and name[4:].isdigit()),
                             reverse=True)
            newest = next((number for number in numbers if store.exists(f"chk-{number}/_metadata")), None)
        if newest is None:
            break
        try:
            return {**lookup(f"{job_folder}/chk-{newest}", uid, state, key), "checkpoint_id": newest}
        except NotFound as error:
            if error.message.startswith(("operator", "the savepoint has no operator", "there is no key")):
                raise
    raise NotFound("the job has no completed checkpoint", path=job_folder)


def download(url: str, uid: str, state: str, form: str) -> Iterator[bytes]:
    """All entries of a state, encoded piece by piece."""
    opened = savepoint.open(url)
    try:
        reader = opened.read(uid, state)
    except BaseException:
        opened.close()
        raise
    return _encoded(opened, reader, opened.column_types(uid, state), form)


def _encoded(opened: savepoint.Savepoint, reader: pa.RecordBatchReader, kinds: Mapping[str, StateType],
             form: str) -> Iterator[bytes]:
    with opened:
        if form == "jsonl":
            for batch in reader:
                yield b"".join(msgspec.json.encode(row) + b"\n" for row in plain_rows(batch, kinds))
            return
        pipe = _Pipe()
        sink = pa.PythonFile(pipe, mode="w")
        make = pq.ParquetWriter if form == "parquet" else pa.ipc.new_stream
        with make(sink, reader.schema) as writer:
            for batch in reader:
                writer.write_batch(batch)
                yield pipe.drain()
        yield pipe.drain()


class _Pipe(io.RawIOBase):
    """What was written and not yet sent; the position goes on, because Parquet's footer holds offsets."""

    def __init__(self) -> None:
        self._pieces: list[bytes] = []
        self._position = 0

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        piece = bytes(data)
        self._pieces.append(piece)
        self._position += len(piece)
        return len(piece)

    def tell(self) -> int:
        return self._position

    def drain(self) -> bytes:
        pieces, self._pieces = self._pieces, []
        return b"".join(pieces)


def query(url: str, sql: str, limit: int, seconds: float) -> dict[str, Any]:
    """Run SQL over a snapshot, interrupted when it takes too long."""
    rows: list[list[Any]] = []
    with savepoint.open(url) as opened, opened.query(sql, seconds=seconds) as reader:
        columns = [{"name": field.name, "type": str(field.type)} for field in reader.schema]
        for batch in reader:
            plain = [[to_plain(value) for value in column.to_pylist()] for column in batch.columns]
            rows += [list(row) for row in zip(*plain)]
            if len(rows) > limit:
                break
    return {"columns": columns, "rows": rows[:limit], "truncated": len(rows) > limit}


def diff(left: str, right: str, limit: int) -> dict[str, Any]:
    """Totals of every state, and the first changes."""
    from savepoint.diff import changes, compare

    found = compare(left, right)
    totals = [{"operator": state.uid, "state": state.state, "added": state.added, "removed": state.removed,
               "changed": state.changed, "same": state.unchanged, "note": state.note} for state in found.states]
    rows = list(islice(changes(left, right), limit + 1)) if found else []
    return {"same": not found, "totals": totals, "operators": list(found.operators), "changes": rows[:limit],
            "truncated": len(rows) > limit}


def edit_preview(source: str, changes: list[dict[str, Any]]) -> dict[str, Any]:
    """What an edit would change."""
    from api.rest.savepoint_operations import patch_operation
    from savepoint.edit import Edit

    with Edit(source, [patch_operation(change) for change in changes]) as edit:
        return {"changes": edit.plan()}


def check(job: str, snapshot: str, uid_mapping: dict[str, str], allow_non_restored_state: bool,
          parallelism: int | None, operator_parallelism: dict[str, int]) -> dict[str, Any]:
    """What a restore would do. The job's file is loaded in a process of its own, never in the service."""
    command = [sys.executable, "-m", "api.cli.main", "savepoint", "check", snapshot, job, "-o", "json"]
    for old, new in uid_mapping.items():
        command += ["--map-uid", f"{old}={new}"]
    for uid, number in operator_parallelism.items():
        command += ["--parallelism", f"{uid}={number}"]
    command += ["--parallelism", str(parallelism)] if parallelism else []
    command += ["--allow-non-restored-state"] if allow_non_restored_state else []
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=Path(job.rpartition(":")[0]).parent)
    except subprocess.TimeoutExpired:
        raise Unavailable("the check did not end within 60 s") from None
    try:
        report = msgspec.json.decode(done.stdout)
    except msgspec.DecodeError:
        message = (done.stderr.strip().splitlines() or ["the check failed"])[-1].removeprefix("error: ")
        raise _KIND_OF_EXIT.get(done.returncode, InvalidRequest)(message) from None
    lines = [{"operator": state["operator"], "state": state["state"], "verdict": state["fate"], "reason": state["reason"]}
             for state in report["states"]]
    return {"ok": report["ok"], "lines": lines, "parallelism": report["parallelism"]}
