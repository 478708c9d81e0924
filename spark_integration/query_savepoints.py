"""Savepoints of a streaming query, taken beside it, and new queries that continue from them.

A savepoint holds the state of every operator after one batch and Spark's offsets of that batch. Restoring writes a
new pair of folders, Spark's and ours, under a new query id: the old query and its folders are left alone.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec
import xxhash

from checkpoint.storage.files import CheckpointSource
from checkpoint.storage.metadata import CheckpointMetadata, OperatorEntry, SubtaskEntry
from checkpoint.storage.store import FileStore
from savepoint.convert import to_native, to_open
from savepoint.destination import Destination
from savepoint.opened import Savepoint, open_savepoint
from spark_integration.epoch_store import EpochStore, operator_folder
from spark_integration.epochs import Acknowledgement, EpochId, Generation, Manifest
from spark_integration.spark_log import QueryPosition, read_position, write_position
from statebackend.backend import KeyedHandle
from statebackend.entries import write_entries
from statebackend.errors import Conflict, HoldfastError, InvalidRequest, NotFound
from statebackend.files import StateFile, writing
from statebackend.formats import merged_entries, operator_state

PROPERTY = "spark"
_COPY_FORMATS = ("rocksdb", "entries")


def operators_of(store: FileStore) -> list[str]:
    """The uids of the operators whose epochs lie below a checkpoint folder."""
    from urllib.parse import unquote

    return sorted(unquote(folder) for folder in store.folders() if store.list(f"{folder}/manifests"))


def list_epochs(checkpoint: str | os.PathLike[str], uid: str | None = None, *,
                storage: Mapping[str, Any] | None = None) -> list[dict[str, Any]]:
    """The retained epochs of a query's operators, newest first, with what their tasks did."""
    rows: list[dict[str, Any]] = []
    with FileStore.at(os.fspath(checkpoint), **(storage or {})) as store:
        known = operators_of(store)
        if not known:
            raise _no_epochs(store)
        if uid is not None and uid not in known:
            raise NotFound(f"the query has no operator {uid!r}", path=store.url, hint=f"it has {', '.join(known)}")
        for name in known if uid is None else [uid]:
            epochs = EpochStore(store, name)
            rows += [_epoch_row(epochs.manifest(epoch)) for epoch in epochs.chain()]
    return rows


def _no_epochs(store: FileStore) -> NotFound:
    return NotFound("there are no epochs of a Spark query here", path=store.url,
                    hint="name the folder given as checkpoint=")


def _epoch_row(manifest: Manifest) -> dict[str, Any]:
    done = [part.statistics for part in manifest.parts]
    return {"operator": manifest.uid, "epoch": manifest.id.epoch, "generation": manifest.id.generation,
            "parallelism": manifest.parallelism, "rows_in": sum(one.rows_in for one in done),
            "rows_out": sum(one.rows_out for one in done), "timers_fired": sum(one.timers_fired for one in done),
            "new_bytes": sum(one.new_bytes for one in done),
            "state_bytes": sum(part.handle.size for part in manifest.parts),
            "restore_ms": max((one.restore_ms for one in done), default=0),
            "slowest_ms": max((one.restore_ms + one.process_ms + one.store_ms for one in done), default=0),
            "published_ms": manifest.published_ms}


def open_epoch(checkpoint: str | os.PathLike[str], *, epoch: int | None = None, uids: Sequence[str] | None = None,
               checkpoint_location: str | None = None, storage: Mapping[str, Any] | None = None) -> Savepoint:
    """A query's state after a batch (the newest unless told), read in place, as the savepoint toolkit sees it.

    With Spark's `checkpoint_location` the batch is the last one that Spark has committed, and its offsets are in the
    metadata's properties. Close it when done.
    """
    store = FileStore.at(os.fspath(checkpoint), **(storage or {}))
    try:
        names = list(uids) if uids is not None else operators_of(store)
        if not names:
            raise _no_epochs(store)
        position = None
        if checkpoint_location is not None:
            with FileStore.at(checkpoint_location, **(storage or {})) as spark_store:
                position = read_position(spark_store, epoch)
        batch = position.batch if position is not None else epoch
        manifests = [_manifest_at(EpochStore(store, uid), batch) for uid in names]
        metadata = _metadata(manifests, position)
    except BaseException:
        store.close()
        raise
    return Savepoint(store.url, metadata, CheckpointSource(store, owns_store=True))


def open_as_checkpoint(url: str, **options: Any) -> tuple[CheckpointMetadata, CheckpointSource] | None:
    """The newest epoch of a query (its checkpoint folder) or of one operator (`<checkpoint>/<uid>`); None for neither.

    Registered as `holdfast.openers`, so that epochs can be named wherever a checkpoint path can.
    """
    from urllib.parse import unquote

    from checkpoint.storage.urls import split_url

    options.pop("unfenced", None)
    parent, name = split_url(str(url).rstrip("/"))
    for root, uids in ((str(url), None), (parent, [unquote(name)])):
        try:
            with FileStore.at(root or ".", **options) as store:
                found = operators_of(store) if uids is None else store.list(f"{name}/manifests")
            if not found:
                continue
            opened = open_epoch(root or ".", uids=uids, storage=options)
        except HoldfastError:
            continue
        return opened.metadata, opened.source
    return None


def _manifest_at(epochs: EpochStore, batch: int | None) -> Manifest:
    """The newest epoch at or below a batch: Spark skips an operator whose source has no new rows."""
    if batch is None:
        return epochs.latest()
    chain = epochs.chain()
    found = next((epoch for epoch in chain if epoch.epoch <= batch), None)
    if found is None:
        kept = f"{chain[-1].epoch}..{chain[0].epoch}" if chain else "none"
        raise NotFound(f"epoch {batch} is not kept any more", operator=epochs.uid, found=kept)
    return epochs.manifest(found)


def _metadata(manifests: Sequence[Manifest], position: QueryPosition | None) -> CheckpointMetadata:
    newest = max(manifests, key=lambda manifest: manifest.id)
    query_id = position.query_id if position is not None else newest.query_id
    properties: dict[str, Any] = {"epochs": {manifest.uid: list(manifest.id) for manifest in manifests}}
    times = {manifest.uid: [manifest.batch_time, manifest.max_event_time] for manifest in manifests}
    properties["times"] = times
    if position is not None:
        properties[PROPERTY] = position.to_json()
    batch = position.batch if position is not None else newest.id.epoch
    return CheckpointMetadata(
        job_id=(query_id or secrets.token_hex(16)).replace("-", ""), job_name="spark query", checkpoint_id=batch + 1,
        generation=newest.id.generation, completed_timestamp=newest.published_ms,
        operators=tuple(_operator(manifest) for manifest in manifests), properties=properties)


def _operator(manifest: Manifest) -> OperatorEntry:
    folder = operator_folder(manifest.uid)
    subtasks = []
    for index, part in enumerate(manifest.parts):
        files = tuple(file if file.inline is not None else replace(file, path=f"{folder}/{file.path}")
                      for file in part.handle.files)
        subtasks.append(SubtaskEntry(index, keyed=(replace(part.handle, files=files),),
                                     operator=_inline(part.operator) if part.operator else None))
    return OperatorEntry(manifest.uid, manifest.uid, manifest.parallelism, manifest.max_parallelism, tuple(subtasks))


def _inline(data: bytes) -> StateFile:
    return StateFile("operator-state", len(data), xxhash.xxh3_128_hexdigest(data), inline=data)


def savepoint(checkpoint: str | os.PathLike[str], destination: str | os.PathLike[str], *, checkpoint_location: str,
              epoch: int | None = None, format: str = "open", storage: Mapping[str, Any] | None = None) -> str:
    """Take a savepoint of a query, running or stopped, without pausing it; the URL of the savepoint.

    It holds the state after the last batch that Spark has committed (or after `epoch`, if that is still kept) and
    Spark's offsets of that batch.
    """
    if format not in ("open", "native"):
        raise InvalidRequest(f"there is no savepoint format {format!r}", hint="use open or native")
    with open_epoch(checkpoint, epoch=epoch, checkpoint_location=checkpoint_location, storage=storage) as opened, \
            Destination(destination) as place:
        metadata = to_open(opened, place) if format == "open" else to_native(opened, place)
        place.publish(replace(metadata, properties={**opened.metadata.properties, **metadata.properties}))
        return place.url


def restore_query(source: str | os.PathLike[str] | Savepoint, *, checkpoint_location: str, checkpoint: str,
                  parallelism: int | None = None, storage: Mapping[str, Any] | None = None) -> str:
    """Write a new Spark checkpoint and new state that continue exactly where a savepoint was taken; the new query id.

    Start the query with these two folders. `parallelism` is what `stateful` uses where it names none itself. Both
    folders must be empty; nothing is left in them if this fails.
    """
    opened = source if isinstance(source, Savepoint) else open_savepoint(source)
    with opened:
        properties = opened.metadata.properties.get(PROPERTY)
        if properties is None:
            raise InvalidRequest("this savepoint holds no Spark offsets, so no query can continue from it",
                                 path=opened.url, hint="take it with `holdfast spark savepoint`, which stores them")
        position = QueryPosition.from_json(properties)
        with FileStore.at(checkpoint, **(storage or {})) as store, \
                FileStore.at(checkpoint_location, **(storage or {})) as spark_store:
            if store.list("") or spark_store.list(""):
                raise Conflict("a folder to restore into is not empty", path=f"{store.url}, {spark_store.url}",
                               hint="name two new folders; the old query's are left alone")
            try:
                query_id = write_position(spark_store, position)
                for entry in opened.metadata.operators:
                    _restore_operator(opened, entry, store, position.batch, query_id, parallelism)
            except BaseException:
                spark_store.delete([info.path for info in spark_store.list("")])
                store.delete([info.path for info in store.list("")])
                raise
        return query_id


def rewind(checkpoint: str, checkpoint_location: str, epoch: int, *, to_checkpoint: str,
           to_checkpoint_location: str, storage: Mapping[str, Any] | None = None) -> str:
    """Go back to a retained epoch, Spark's offsets and our state together, in copies; the new query id."""
    opened = open_epoch(checkpoint, epoch=epoch, checkpoint_location=checkpoint_location, storage=storage)
    return restore_query(opened, checkpoint_location=to_checkpoint_location, checkpoint=to_checkpoint, storage=storage)


def _restore_operator(opened: Savepoint, entry: OperatorEntry, store: FileStore, batch: int, query_id: str,
                      parallelism: int | None) -> None:
    epochs = EpochStore(store, entry.uid, max_parallelism=entry.max_parallelism)
    epoch, attempt = EpochId(batch, 1), f"restored-{secrets.token_hex(6)}"
    files = epochs.files(epoch, attempt)
    parts: list[Acknowledgement] = []
    for subtask in entry.subtasks:
        stored = operator_state(subtask.operator, opened.source).to_bytes() if subtask.operator is not None else b""
        for number, handle in enumerate(subtask.keyed):
            copied = _copied(handle, opened, files)
            parts.append(Acknowledgement(handle.key_groups, f"{attempt}-{len(parts)}", copied,
                                         stored if number == 0 else b""))
    parts.sort(key=lambda part: part.key_groups.first)
    if not parts:
        return
    times = opened.metadata.properties.get("times", {}).get(entry.uid, [None, None])
    now = time.time_ns() // 1_000_000
    generation = Generation(1, attempt, query_id, batch, parallelism or entry.parallelism, None, now)
    manifest = Manifest(epoch, None, entry.uid, attempt, query_id, parts[0].handle.max_parallelism, tuple(parts),
                        times[0], times[1], now)
    epochs.store.create("generations/0000000001", msgspec.json.encode(generation.to_json()))
    epochs.store.create(f"manifests/{batch:010d}-0000000001", msgspec.json.encode(manifest.to_json()))


def _copied(handle: KeyedHandle, opened: Savepoint, files: Any) -> KeyedHandle:
    """The handle with its files in the new state folder: as they are, or as entries where no backend wrote them."""
    if handle.format in _COPY_FORMATS:
        return replace(handle, files=tuple(_copy(file, opened, files) for file in handle.files))
    entries = write_entries(files, "entries", merged_entries(handle, opened.source), shared=True)
    meta = {"version": 1, "next_sequence": handle.meta.get("next_sequence", 0)}
    return replace(handle, format="entries", files=(entries,), meta=meta, new_bytes=entries.size)


def _copy(file: StateFile, opened: Savepoint, files: Any) -> StateFile:
    if file.inline is not None:
        return file
    hint = file.path.rpartition("/")[2][-40:]
    with opened.source.open(file) as stream, writing(files, hint, shared=True) as (writer, done):
        while chunk := stream.read(1 << 20):
            writer.write(chunk)
    return done[0]
