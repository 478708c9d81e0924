"""Re-cuts a savepoint for another parallelism or another max parallelism, without a running job."""

from __future__ import annotations

import os
from typing import Any

from checkpoint.storage.metadata import CheckpointMetadata
from savepoint.convert import Progress
from savepoint.opened import Savepoint
from savepoint.transform import Transform
from statebackend.errors import InvalidRequest
from statebackend.keygroups import key_group_range, require_max_parallelism


def rescale_savepoint(source: str | os.PathLike[str], destination: str | os.PathLike[str], *,
                      parallelism: int | dict[str, int] | None = None, max_parallelism: int | None = None,
                      progress: Progress | None = None) -> CheckpointMetadata:
    """Write the savepoint anew with files cut for `parallelism`, and keys grouped anew for `max_parallelism`."""
    if parallelism is None and max_parallelism is None:
        raise InvalidRequest("say what is to change", hint="give --parallelism, --max-parallelism or both")
    for number in parallelism.values() if isinstance(parallelism, dict) else [parallelism]:
        if number is not None and number < 1:
            raise InvalidRequest("parallelism must be at least 1", found=number)
    transform = Transform(source)
    if parallelism is not None:
        transform.set_parallelism(parallelism)
    if max_parallelism is not None:
        transform.set_max_parallelism(require_max_parallelism(max_parallelism))
    return transform.write(destination, progress=progress)


def plan_rescale(savepoint: Savepoint, parallelism: int, uid: str | None = None) -> list[dict[str, Any]]:
    """What each new subtask would get at another parallelism: key groups, rows, bytes, and which old ones it is from.

    Read from metadata alone; rows and bytes are None where only reading would tell.
    """
    found = []
    for entry in savepoint.metadata.operators if uid is None else (savepoint.entry(uid),):
        if not savepoint.handles(entry.uid):
            continue
        limit = savepoint.max_parallelism(entry.uid)
        groups = savepoint.key_groups(entry.uid)
        rows, sizes = groups.column("rows").to_pylist(), groups.column("bytes").to_pylist()
        for index in range(parallelism):
            span = key_group_range(index, parallelism, limit)
            old = sorted({group * entry.parallelism // limit for group in span})
            found.append({"operator": entry.uid, "subtask": index, "key_groups": str(span),
                          "rows": _total(rows[span.first:span.last + 1]),
                          "bytes": _total(sizes[span.first:span.last + 1]), "from_subtasks": old})
    return found


def _total(numbers: list[int | None]) -> int | None:
    return None if any(number is None for number in numbers) else sum(number or 0 for number in numbers)
