"""Spark's own streaming checkpoint, as files: what a batch read (offsets), that it ended (commits), whose it is.

Only whole files are copied, never interpreted beyond the batch number in their names: the format is Spark's.
"""

from __future__ import annotations

import base64
import re
import uuid
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from checkpoint.storage.store import FileStore
from statebackend.errors import Conflict, CorruptData, InvalidRequest, NotFound

_NUMBERED = re.compile(r"(?:.*/)?(\d+)(?:\.compact)?")


@dataclass(frozen=True)
class QueryPosition:
    """Where a query stands: after `batch`, with the files of Spark's checkpoint that say so, by relative path."""

    query_id: str
    batch: int
    files: Mapping[str, bytes]

    def to_json(self) -> dict[str, Any]:
        packed = {path: base64.b64encode(zlib.compress(data)).decode() for path, data in self.files.items()}
        return {"version": 1, "query_id": self.query_id, "batch": self.batch, "files": packed}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> QueryPosition:
        try:
            files = {str(path): zlib.decompress(base64.b64decode(text)) for path, text in data["files"].items()}
            return cls(str(data["query_id"]), int(data["batch"]), files)
        except (KeyError, ValueError, TypeError, zlib.error) as error:
            raise CorruptData(f"the Spark offsets in a savepoint can't be read: {error!r}") from error


def read_position(store: FileStore, batch: int | None = None, *, without_state: bool = False) -> QueryPosition:
    """The position of a query after its last finished batch, or after the one named. Works beside the running query.

    `without_state`: leave Spark's own state behind, because it is being imported.
    """
    query_id = _query_id(store)
    committed = _batches(store, "commits")
    if not committed:
        raise NotFound("no batch of this query has been committed yet", path=store.url)
    if batch is None:
        batch = max(committed)
    if batch not in committed:
        raise NotFound(f"Spark's checkpoint has no committed batch {batch}", path=store.url,
                       found=f"{min(committed)}..{max(committed)}")
    if not without_state and any(_NUMBERED.fullmatch(info.path) or "/" in info.path for info in store.list("state")):
        raise InvalidRequest("the query has state of Spark's own besides ours, which a savepoint can't hold",
                             path=store.url_of("state"), hint="import it first with `holdfast spark import`")
    # Spark looks at the batch before the last one too when it starts.
    wanted = [f"{folder}/{number}" for folder, there in (("offsets", _batches(store, "offsets")), ("commits", committed))
              for number in (batch - 1, batch) if number in there]
    wanted += [info.path for info in store.list("sources") if _is_until(info.path, batch)]
    return QueryPosition(query_id, batch, {path: store.read(path) for path in wanted})


def _is_until(path: str, batch: int) -> bool:
    """Whether a log file of a source belongs to batches up to this one; unnumbered files always do."""
    if path.endswith(".crc"):
        return False
    match = _NUMBERED.fullmatch(path)
    return match is None or int(match[1]) <= batch


def _query_id(store: FileStore) -> str:
    try:
        return str(msgspec.json.decode(store.read("metadata"))["id"])
    except NotFound:
        raise NotFound("this is not the checkpoint location of a Spark query: it has no metadata", path=store.url,
                       hint="name the folder given as checkpointLocation") from None
    except (msgspec.DecodeError, KeyError, TypeError) as error:
        raise CorruptData(f"Spark's checkpoint metadata can't be read: {error}", path=store.url) from error


def _batches(store: FileStore, folder: str) -> set[int]:
    names = [info.path.rpartition("/")[2] for info in store.list(folder)]
    return {int(name) for name in names if name.isdigit()}


def write_position(store: FileStore, position: QueryPosition) -> str:
    """A new Spark checkpoint that continues after the position; the id of the new query. The folder must be empty."""
    if store.list(""):
        raise Conflict("the new checkpoint location is not empty", path=store.url, hint="name a folder of its own")
    query_id = str(uuid.uuid4())
    for path, data in position.files.items():
        store.write(path, data)
    store.write("metadata", msgspec.json.encode({"id": query_id}))
    return query_id
