"""The checkpoints of one job: claimed by a generation, written file by file, published last, kept and dropped.

    storage = JobStorage("s3://bucket/checkpoints", JobId.random())
    storage.claim_generation()                        # older runs of this job can no longer publish
    target = storage.target(1, "count", 0)            # a SnapshotTarget for subtask 0 of operator "count"
    storage.publish(metadata)                         # conditional create of chk-1/_metadata
    storage.retain(3)                                 # drop what is no longer needed
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Collection, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from checkpoint.storage import generations, layout
from checkpoint.storage.files import CheckpointSource, CheckpointTarget
from checkpoint.storage.generations import Origin
from checkpoint.storage.layout import JobId
from checkpoint.storage.metadata import CheckpointMetadata, MetadataSummary
from checkpoint.storage.opening import Located, check_files, load_metadata, locate, way_out_of
from checkpoint.storage.registry import DeletionRules, SharedFileRegistry, Verdict, is_void, retention
from checkpoint.storage.store import FileStore
from checkpoint.storage.urls import join_url, protocol_of
from statebackend.clock import Clock, SystemClock
from statebackend.durations import duration_ms, size_bytes
from statebackend.errors import Conflict, CorruptData, HoldfastError, InvalidRequest, NotFound, Unavailable
from statebackend.files import StateFile

if TYPE_CHECKING:
    from checkpoint.storage.probe import ProbeReport

DEFAULT_INLINE_THRESHOLD = "20KiB"
DEFAULT_GRACE = "10s"


@dataclass(frozen=True)
class CheckpointInfo:
    """A completed checkpoint in a listing. `error` tells why its metadata can't be read; `summary` is None then."""

    job_id: JobId
    checkpoint_id: int
    path: str
    summary: MetadataSummary | None
    error: HoldfastError | None = None

    @property
    def generation(self) -> int:
        return self.summary.generation if self.summary is not None else 0


class JobStorage:
    """The folder `<root>/<job id>`. Calls may come from several threads; one process of a job publishes and deletes.

    inline_threshold  files smaller than this are stored inside `_metadata`
    grace             dropped files stay for this long, so that a reader without a pin can finish
    unfenced          accept a store without conditional create
    job_name          kept with the claim, so that a job whose checkpoints are damaged can still be told by name
    """

    def __init__(self, root: str | FileStore, job_id: str, *, inline_threshold: str | int = DEFAULT_INLINE_THRESHOLD,
                 grace: str | int = DEFAULT_GRACE, unfenced: bool = False, generation: int = 0,
                 job_name: str = "", clock: Clock | None = None, **options: Any) -> None:
        self.job_id, self.job_name = JobId(job_id), job_name
        self._owns_store = not isinstance(root, FileStore)
        self._root = root if isinstance(root, FileStore) else FileStore.at(root, unfenced=unfenced, **options)
        self._options, self._unfenced = options, unfenced
        self.store = self._root.child(self.job_id)
        self.inline_threshold, self.grace_ms = size_bytes(inline_threshold), duration_ms(grace)
        self.generation = generation
        self._clock: Clock = clock or SystemClock()
        self._lock = threading.RLock()
        self._registry: SharedFileRegistry | None = None
        self._created: dict[int, set[str]] = {}
        self._doomed: dict[str, int] = {}
        self._dropped: set[int] = set()
        self._savepoints: dict[str, FileStore] = {}
        self._unreadable = self._swept = self._closed = False

    @classmethod
    def of_folder(cls, store: FileStore) -> JobStorage:
        """The storage of a job whose own folder is a store; for reading."""
        storage = cls(store, store.url.rstrip("/").rpartition("/")[2])
        storage.store = store
        return storage

    @property
    def url(self) -> str:
        """The job's folder, fit to be shown."""
        return self.store.url

    def __repr__(self) -> str:
        return f"JobStorage({self.url!r}, generation={self.generation})"

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopened, (self._root, self.job_id, self.inline_threshold, self.grace_ms, self._unfenced,
                           self.generation, self.job_name, self._options)

    # generations

    def claim_generation(self) -> int:
        """Take the job over: older runs can neither publish nor delete from now on. Returns the new generation.

        The newest completed checkpoint at this moment is what this run starts from; anything that an older run
        publishes later is void.
        """
        self.generation = generations.claim(self.store, self._clock, self.job_name)
        completed = self._completed()
        generations.record_base(self.store, self.generation, completed[-1].checkpoint_id if completed else 0)
        with self._lock:
            self._registry, self._swept = None, False
        return self.generation

    def require_newest(self) -> None:
        """Raise `Conflict` if a newer run has taken this job over."""
        generations.require_newest(self.store, self.generation)

    def record_origin(self, url: str, *, stopped_with: int = 0) -> None:
        """This job begins from a checkpoint or savepoint that is not its own, or stops with one; see `find_origin`."""
        generations.record_origin(self.store, Origin(self.job_name, url, self._clock.now_ms(), stopped_with=stopped_with,
                                                     generation=self.generation if stopped_with else 0))

    def probe(self) -> ProbeReport:
        """The start-up probe: raises if the store does not honour conditional create (and is not unfenced)."""
        report = self._root.probe(quick=True)
        report.require(unfenced=self._unfenced)
        return report

    # writing

    def target(self, checkpoint_id: int, uid: str, subtask: int) -> CheckpointTarget:
        """Where one subtask of one operator writes its files of one checkpoint."""
        return CheckpointTarget(self.store, layout.checkpoint_folder(checkpoint_id), uid, subtask,
                                inline_threshold=self.inline_threshold, generation=self.generation,
                                created=lambda path: self._note_created(checkpoint_id, path))

    def new_savepoint_folder(self, directory: str) -> str:
        """A fresh folder URL for a savepoint of this job below a directory."""
        return join_url(directory, layout.new_savepoint_folder(self.job_id))

    def savepoint_target(self, folder: str, uid: str, subtask: int) -> CheckpointTarget:
        """Where one subtask writes its files of a native savepoint; nothing is shared with checkpoints."""
        with self._lock:
            store = self._savepoints.get(folder)
            if store is None:
                store = self._savepoints[folder] = FileStore.at(folder, unfenced=self._unfenced,
                                                                **self._options_for(folder))
        return CheckpointTarget(store, "", uid, subtask, inline_threshold=self.inline_threshold, self_contained=True,
                                generation=self.generation)

    def publish(self, metadata: CheckpointMetadata, *, folder: str | None = None) -> str:
        """Make a checkpoint, or with `folder` a savepoint, exist: its `_metadata` is created, last and at once.

        Returns its URL. `Conflict` if a newer generation has taken over, or if it exists already.
        """
        if metadata.is_savepoint:
            return self._publish_savepoint(metadata, folder)
        metadata = replace(metadata, generation=self.generation)
        path = layout.checkpoint_metadata(metadata.checkpoint_id)
        self.require_newest()
        self._create_metadata(path, metadata.to_bytes())
        # A run that took over since the check above may have started from an older checkpoint, which makes this
        # one void: only if there is still no newer run is it certain that later ones will see it.
        self.require_newest()
        with self._lock:
            self._created.pop(metadata.checkpoint_id, None)
            if self._registry is not None:
                self._registry.register(metadata.checkpoint_id, metadata.stored_files())
        return self.store.url_of(layout.checkpoint_folder(metadata.checkpoint_id))

    def abort(self, checkpoint_id: int, files: Iterable[StateFile] = ()) -> None:
        """Remove what an unfinished checkpoint has stored so far; `files` are those known from acknowledgements.

        What is still being written is left to garbage collection.
        """
        if self.store.exists(layout.checkpoint_metadata(checkpoint_id)):
            raise Conflict("the checkpoint is complete and can't be aborted", checkpoint_id=checkpoint_id)
        with self._lock:
            created = self._created.pop(checkpoint_id, set())
            created.update(file.path for file in files if file.shared and file.inline is None)
            needed = self._registered().needed
            self._doom(path for path in created if path not in needed)
            self._dropped.add(checkpoint_id)
        self.store.delete([info.path for info in self.store.list(layout.checkpoint_folder(checkpoint_id))
                           if layout.is_private_file_of(info.path, self.generation)])
        self._flush_doomed()

    # reading

    def load(self, path: str | int) -> CheckpointMetadata:
        """The metadata of a checkpoint of this job by its number, or of any checkpoint or savepoint by URL."""
        located = self._locate(path)
        try:
            return load_metadata(located)
        finally:
            self._release(located)

    def source(self, path: str | int, *, on_damage: Callable[[CorruptData], None] | None = None) -> CheckpointSource:
        """The files of a checkpoint of this job by its number, or of any checkpoint or savepoint by URL.

        A checkpoint of another job is pinned until the source is closed: that job may be running, and drop it.
        """
        located = self._locate(path)
        if located.store is self.store and isinstance(path, int):
            return CheckpointSource(self.store, on_damage=on_damage, way_out=lambda: self.way_out(path))
        return CheckpointSource(located.store, on_damage=on_damage, way_out=way_out_of(located), owns_store=True,
                                on_close=self._pinned(located))

    def list_checkpoints(self) -> list[CheckpointInfo]:
        """The completed checkpoints, oldest first; void ones left out, unreadable ones with their error."""
        return self._completed()

    def latest(self, *, checksums: bool = False) -> CheckpointMetadata | None:
        """The newest completed checkpoint, None where there is none.

        If it is damaged, the error says how, and its hint names the newest good one; there is no silent fallback.
        """
        completed = self._completed()
        if not completed:
            return None
        newest = completed[-1]
        try:
            return self._checked(newest, checksums=checksums)
        except (CorruptData, NotFound) as error:
            error.hint = self.way_out(newest.checkpoint_id)
            raise

    def previous_good(self, before: int) -> CheckpointInfo | None:
        """The newest checkpoint below an id whose every file is what was written."""
        for info in reversed(self._completed()):
            if info.checkpoint_id < before:
                try:
                    self._checked(info, checksums=True)
                except (CorruptData, NotFound):
                    continue
                return info
        return None

    def pin(self, checkpoint_id: int) -> AbstractContextManager[str]:
        """Hold a checkpoint's files while the block runs; load its metadata inside."""
        return generations.pinned(self.store, checkpoint_id, self._clock)

    # dropping

    def retain(self, count: int, *, in_use: Collection[int] = ()) -> tuple[int, ...]:
        """Drop completed checkpoints beyond the newest `count`; call it after publishing. Returns those dropped.

        `in_use` are completed checkpoints that one in progress builds upon. Pinned ones stay. The first drop of a
        generation also removes orphans that an earlier run left behind.
        """
        self.require_newest()
        with self._lock:
            registry = self._registered()
            decision = retention(registry.checkpoints, count, in_use=in_use,
                                 pinned=generations.live_pins(self.store, self._clock.now_ms()))
            for checkpoint in decision.drop:
                self._drop(registry, checkpoint)
        self._flush_doomed()
        self._sweep_orphans_once()
        return decision.drop

    def discard(self, checkpoint_id: int) -> None:
        """Drop one completed checkpoint, whatever the retained count. `Conflict` while a restore has it pinned."""
        self.require_newest()
        if checkpoint_id in generations.live_pins(self.store, self._clock.now_ms()):
            raise Conflict("a running restore is reading this checkpoint", checkpoint_id=checkpoint_id, path=self.url)
        with self._lock:
            self._drop(self._registered(), checkpoint_id)
        self._flush_doomed()
        self._sweep_orphans_once()

    def close(self) -> None:
        """End orderly: what was dropped goes now, whatever its age, for no writer is left. Idempotent."""
        if self._closed:
            return
        self._closed = True
        try:
            self._flush_doomed(grace_ms=0)
        finally:
            for store in self._savepoints.values():
                store.close()
            if self._owns_store:
                self._root.close()

    def __enter__(self) -> JobStorage:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    # inner workings

    def _publish_savepoint(self, metadata: CheckpointMetadata, folder: str | None) -> str:
        if folder is None:
            raise InvalidRequest("a savepoint is published into a folder of its own")
        outside = next((file for file in metadata.files() if file.inline is None and (
            file.shared or file.path.startswith((f"{layout.SHARED}/", "chk-")))), None)
        if outside is not None:
            raise InvalidRequest("a savepoint must hold all its files itself", path=outside.path,
                                 hint="take a full snapshot for a savepoint")
        self.require_newest()
        with FileStore.at(folder, unfenced=self._unfenced, **self._options_for(folder)) as store:
            store.create(layout.METADATA, replace(metadata, generation=self.generation).to_bytes())
            return store.url

    def _create_metadata(self, path: str, data: bytes) -> None:
        for _ in range(3):
            try:
                self.store.create(path, data)
                return
            except Conflict:
                if not self._left_by_fenced_writer(path):
                    raise
                self.store.delete([path])
        raise Conflict("a fenced-off run of this job keeps publishing the same checkpoint", path=self.store.url_of(path))

    def _left_by_fenced_writer(self, path: str) -> bool:
        """Whether the checkpoint at `path` is void: published by an older run after this one had taken over."""
        try:
            found = CheckpointMetadata.summary(self.store.read(path), path=self.store.url_of(path))
        except NotFound:
            return True
        claims = generations.read_claims(self.store)
        return found.generation < self.generation and is_void(found.checkpoint_id, found.generation, claims)

    def _locate(self, path: str | int) -> Located:
        if isinstance(path, int):
            return Located(self.store, layout.checkpoint_metadata(path))
        return locate(path, unfenced=self._unfenced, **self._options_for(path))

    def _options_for(self, url: str) -> dict[str, Any]:
        """The options of our own store, for a URL of the same kind; others go by their environment."""
        return self._options if protocol_of(url) == protocol_of(self._root.url) else {}

    def _pinned(self, located: Located) -> Callable[[], None] | None:
        """Pin a checkpoint in the folder of a job that has had runs; the function releases it."""
        checkpoint = layout.checkpoint_of_folder(located.metadata_path.rpartition("/")[0])
        if checkpoint is None or generations.newest_generation(located.store) == 0:
            return None
        pin = generations.pinned(located.store, checkpoint, self._clock)
        try:
            pin.__enter__()
        except Unavailable:
            return None  # a folder that we may only read: its files are kept by its owner's grace period alone

        def release() -> None:
            with contextlib.suppress(Unavailable):  # it expires by itself
                pin.__exit__(None, None, None)

        return release

    def _release(self, located: Located) -> None:
        if located.store is not self.store:
            located.store.close()

    def _completed(self) -> list[CheckpointInfo]:
        ids = sorted(checkpoint for checkpoint in map(layout.checkpoint_of_folder, self.store.folders())
                     if checkpoint is not None)
        claims = generations.read_claims(self.store)
        infos = [info for info in self.store.map(self._look_at, ids) if info is not None]
        return [info for info in infos
                if info.summary is None or not is_void(info.checkpoint_id, info.summary.generation, claims)]

    def _look_at(self, checkpoint_id: int) -> CheckpointInfo | None:
        path = layout.checkpoint_metadata(checkpoint_id)
        shown = self.store.url_of(layout.checkpoint_folder(checkpoint_id))
        try:
            summary = CheckpointMetadata.summary(self.store.read(path), path=self.store.url_of(path))
        except NotFound:
            return None
        except HoldfastError as error:
            return CheckpointInfo(self.job_id, checkpoint_id, shown, None, error)
        return CheckpointInfo(self.job_id, checkpoint_id, shown, summary)

    def _checked(self, info: CheckpointInfo, *, checksums: bool) -> CheckpointMetadata:
        if info.error is not None:
            raise info.error
        metadata = load_metadata(Located(self.store, layout.checkpoint_metadata(info.checkpoint_id)))
        check_files(self.store, metadata, checksums=checksums)
        return metadata

    def way_out(self, damaged: int) -> str:
        """What to do about a damaged checkpoint: names the newest good one before it."""
        good = self.previous_good(damaged)
        if good is None:
            return "there is no older good checkpoint of this job: restore a savepoint"
        return f"the previous good one is {good.path}: restore it with --restore {good.path}"

    def _registered(self) -> SharedFileRegistry:
        if self._registry is None:
            completed = self._completed()
            # One that can't be read (a newer format, say) may need any shared file: nothing is deleted then.
            self._unreadable = any(info.error is not None for info in completed)
            self._registry = SharedFileRegistry.rebuilt({
                info.checkpoint_id: load_metadata(
                    Located(self.store, layout.checkpoint_metadata(info.checkpoint_id))).stored_files()
                for info in completed if info.error is None})
        return self._registry

    def _note_created(self, checkpoint_id: int, path: str) -> None:
        with self._lock:
            self._created.setdefault(checkpoint_id, set()).add(path)

    def _drop(self, registry: SharedFileRegistry, checkpoint_id: int) -> None:
        """Metadata first: what is half dropped is an orphan, never a checkpoint that lacks files."""
        self.store.delete([layout.checkpoint_metadata(checkpoint_id)])
        self._doom(registry.unregister(checkpoint_id))
        self._dropped.add(checkpoint_id)

    def _doom(self, paths: Iterable[str]) -> None:
        now = self._clock.now_ms()
        self._doomed.update(dict.fromkeys(paths, now))

    def _flush_doomed(self, grace_ms: int | None = None) -> None:
        """Delete what was dropped long enough ago, if this is the newest run and no restore may need it."""
        with self._lock:
            if self._doomed:
                self._delete_due(self.grace_ms if grace_ms is None else grace_ms)
            self._remove_empty_folders()

    def _delete_due(self, grace_ms: int) -> None:
        registry = self._registered()
        rules = DeletionRules(self._clock.now_ms(), grace_ms,
                              newest_generation=generations.newest_generation(self.store) <= self.generation)
        pins = generations.live_pins(self.store, rules.now_ms)
        if self._unreadable or pins - set(registry.checkpoints):
            return  # a restore holds a checkpoint that was dropped meanwhile: its files are among these
        due = [path for path, since in self._doomed.items()
               if rules.verdict(path, since, registry.references(path)) is Verdict.DELETE]
        self.store.delete(due)
        for path in due:
            del self._doomed[path]

    def _remove_empty_folders(self) -> None:
        """A local store keeps empty folders; those of dropped checkpoints go as soon as they are empty."""
        for checkpoint in tuple(self._dropped):
            folder = self.store.local_path(layout.checkpoint_folder(checkpoint))
            if folder is not None and folder.is_dir() and any(folder.iterdir()):
                continue
            if folder is not None and folder.is_dir():
                folder.rmdir()
            self._dropped.discard(checkpoint)

    def _sweep_orphans_once(self) -> None:
        if self._swept:
            return
        self._swept = True
        from checkpoint.storage.gc import apply_gc, plan_gc
        plan = plan_gc(self.store, clock=self._clock)
        if plan.orphans:
            apply_gc(self.store, plan, clock=self._clock)


def _reopened(root: FileStore, job_id: str, inline_threshold: int, grace_ms: int, unfenced: bool, generation: int,
              job_name: str, options: dict[str, Any]) -> JobStorage:
    storage = JobStorage(root, job_id, inline_threshold=inline_threshold, grace=grace_ms, unfenced=unfenced,
                         generation=generation, job_name=job_name)
    storage._options, storage._owns_store = options, True
    return storage


def dispose(url: str, **options: Any) -> None:
    """Delete a savepoint, or a checkpoint that no other one shares files with; its `_metadata` goes first.

    A checkpoint's shared files are deleted if no other completed checkpoint of its job refers to them.
    """
    located = locate(url, **options)
    with located.store as store:
        metadata = load_metadata(located)
        if metadata.is_savepoint:
            store.delete([layout.METADATA])
            # Only what belongs to it: a savepoint may have been put where other things lie.
            store.delete(metadata.stored_files())
            folder = store.local_path("")
            if folder is not None and folder.is_dir():
                _remove_empty_tree(folder)
            return
        parent = store.url.rstrip("/").rpartition("/")[0]
        newest = generations.newest_generation(store)
        with JobStorage(parent, metadata.job_id, generation=newest, **options) as storage:
            storage.discard(metadata.checkpoint_id)


def _remove_empty_tree(folder: Path) -> None:
    for path in sorted((path for path in folder.rglob("*") if path.is_dir()), reverse=True):
        if not any(path.iterdir()):
            path.rmdir()
    if not any(folder.iterdir()):
        folder.rmdir()


def find_jobs(root: str | FileStore, **options: Any) -> list[JobId]:
    """The jobs that have a folder below a checkpoint root."""
    if isinstance(root, FileStore):
        return [JobId(name) for name in root.folders() if layout.is_job_folder(name)]
    with FileStore.at(root, **options) as store:
        return find_jobs(store)


def find_latest(root: str | FileStore, job_name: str, **options: Any) -> CheckpointInfo | None:
    """The newest completed checkpoint of a flow below a root: of its job that completed one last.

    One whose metadata can't be read counts, and is returned with its error: nobody falls back silently.
    """
    if not isinstance(root, FileStore):
        with FileStore.at(root, **options) as store:
            return find_latest(store, job_name)
    best: tuple[int, CheckpointInfo] | None = None
    for job_id in find_jobs(root):
        storage = JobStorage(root, job_id)
        completed = storage.list_checkpoints()
        if completed and _is_named(storage, completed, job_name):
            time = max((info.summary.completed_timestamp for info in completed if info.summary is not None), default=0)
            if best is None or time > best[0]:
                best = (time, completed[-1])
    return best[1] if best is not None else None


def find_origin(root: FileStore, job_name: str, latest: CheckpointInfo | None) -> Origin | None:
    """What the newest job of a flow began from or stopped with, if no completed checkpoint is newer than that.

    `latest` is what `find_latest` found. Within a job numbers tell what is newer, between jobs times do.
    """
    since = 0 if latest is None or latest.summary is None else latest.summary.completed_timestamp
    origins = [origin for job_id in find_jobs(root) if (origin := generations.read_origin(root.child(job_id))) is not None
               and origin.job_name == job_name
               and (origin.started_at > since or (latest is not None and latest.job_id == job_id))
               and _newest(JobStorage(root, job_id)) <= origin.stopped_with
               and origin.generation in (0, generations.newest_generation(root.child(job_id)))]
    return max(origins, key=lambda origin: origin.started_at, default=None)


def _newest(storage: JobStorage) -> int:
    return max((info.checkpoint_id for info in storage.list_checkpoints()), default=0)


def _is_named(storage: JobStorage, completed: list[CheckpointInfo], job_name: str) -> bool:
    names = {info.summary.job_name for info in completed if info.summary is not None}
    return job_name in names if names else job_name == generations.claimed_job_name(storage.store)
