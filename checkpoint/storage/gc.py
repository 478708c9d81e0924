"""Garbage collection: which files of a job nobody needs, and why; planned first, executed only when told.

The plan is made from what is in the store alone, so it works on a job that is running, stopped or gone.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from checkpoint.storage import generations, layout
from checkpoint.storage.drivers import FileInfo, is_temporary
from checkpoint.storage.metadata import CheckpointMetadata
from checkpoint.storage.registry import DeletionRules, GenerationRecord, Verdict, is_void
from checkpoint.storage.store import FileStore
from statebackend.clock import Clock, SystemClock
from statebackend.durations import duration_ms
from statebackend.errors import Conflict, HoldfastError, NotFound

DEFAULT_GRACE = "1h"

UNFINISHED = "its checkpoint was never completed, or has been dropped"
UNREFERENCED = "no completed checkpoint refers to it"
INTERRUPTED = "an interrupted write left it behind"
VOID = "its checkpoint was published by a run that had lost the job to a newer one"
PIN_EXPIRED = "the restore that held this pin is gone"
UPLOAD_ABANDONED = "an upload that was begun and never ended"


@dataclass(frozen=True)
class Orphan:
    """A file that nobody needs, and why. `upload_id` is set for an unfinished S3 upload, which is no file yet."""

    path: str
    size: int
    age_ms: int
    reason: str
    upload_id: str | None = None


@dataclass(frozen=True)
class GcPlan:
    """What would be deleted, what is spared for now and why, and what the plan could not judge."""

    url: str
    generation: int
    orphans: tuple[Orphan, ...]
    spared: tuple[tuple[Orphan, str], ...] = ()
    notes: tuple[str, ...] = ()
    kept_files: int = 0

    @property
    def bytes(self) -> int:
        return sum(orphan.size for orphan in self.orphans)


@dataclass
class _Facts:
    """What was seen in the store."""

    needed: set[str] = field(default_factory=set)
    completed: set[int] = field(default_factory=set)
    void: set[int] = field(default_factory=set)
    unreadable: dict[int, HoldfastError] = field(default_factory=dict)
    pinned: frozenset[int] = frozenset()
    expired_pins: frozenset[str] = frozenset()
    claims: list[GenerationRecord] = field(default_factory=list)


def plan_gc(store: FileStore, *, grace: str | int = DEFAULT_GRACE, clock: Clock | None = None) -> GcPlan:
    """The plan for one job folder."""
    now = (clock or SystemClock()).now_ms()
    grace_ms = duration_ms(grace)
    # Files first, references second: a checkpoint that completes in between refers to files that are either young
    # or referred to by the one before it, which is still there or was seen.
    listing = store.list(temporary=True)
    facts = _observe(store, listing, now)
    rules = DeletionRules(now, grace_ms)
    orphans: list[Orphan] = []
    spared: list[tuple[Orphan, str]] = []
    kept = 0
    for info in listing:
        reason = _reason(info, facts)
        if reason is None:
            kept += 1
            continue
        orphan = Orphan(info.path, info.size, max(0, now - info.modified_ms), reason)
        verdict = Verdict.PINNED if _held(info.path, facts) else rules.verdict(info.path, info.modified_ms, 0)
        if verdict is Verdict.DELETE:
            orphans.append(orphan)
        else:
            spared.append((orphan, verdict.value))
    orphans.extend(_abandoned_uploads(store, now - grace_ms, now))
    notes = tuple(f"checkpoint {checkpoint} can't be read, so no shared file is touched: {error}"
                  for checkpoint, error in facts.unreadable.items())
    newest = facts.claims[-1].number if facts.claims else 0
    return GcPlan(store.url, newest, tuple(orphans), tuple(spared), notes, kept)


def apply_gc(store: FileStore, plan: GcPlan, *, grace: str | int = 0, clock: Clock | None = None) -> tuple[Orphan, ...]:
    """Delete the orphans of a plan that are still orphans now. Returns those deleted."""
    current = plan_gc(store, grace=grace, clock=clock)
    if current.generation != plan.generation:
        raise Conflict("a newer run of the job has started since the plan was made", path=store.url,
                       expected=plan.generation, found=current.generation, hint="make a new plan")
    still = {(orphan.path, orphan.upload_id) for orphan in current.orphans}
    doomed = tuple(orphan for orphan in plan.orphans if (orphan.path, orphan.upload_id) in still)
    # Metadata of void checkpoints goes first: half deleted, they must not look complete.
    paths = sorted((orphan.path for orphan in doomed if orphan.upload_id is None),
                   key=lambda path: not path.endswith(f"/{layout.METADATA}"))
    store.delete(paths)
    for orphan in doomed:
        if orphan.upload_id is not None:
            store.abort_upload(orphan.path, orphan.upload_id)
    _remove_empty_folders(store, paths)
    return doomed


def _observe(store: FileStore, listing: list[FileInfo], now_ms: int) -> _Facts:
    facts = _Facts(claims=generations.read_claims(store))
    pins = generations.read_pins(store)
    facts.pinned = frozenset(pin.checkpoint_id for pin in pins if pin.expires_ms > now_ms)
    facts.expired_pins = frozenset(pin.path for pin in pins if pin.expires_ms <= now_ms)
    for info in listing:
        folder, _, name = info.path.partition("/")
        checkpoint = layout.checkpoint_of_folder(folder)
        if checkpoint is not None and name == layout.METADATA:
            _observe_checkpoint(store, checkpoint, facts)
    return facts


def _observe_checkpoint(store: FileStore, checkpoint: int, facts: _Facts) -> None:
    path = layout.checkpoint_metadata(checkpoint)
    try:
        metadata = CheckpointMetadata.from_bytes(store.read(path), path=store.url_of(path))
    except NotFound:
        return  # dropped meanwhile
    except HoldfastError as error:
        facts.unreadable[checkpoint] = error
        facts.completed.add(checkpoint)
        return
    if is_void(checkpoint, metadata.generation, facts.claims):
        facts.void.add(checkpoint)
        return
    facts.completed.add(checkpoint)
    facts.needed.add(path)
    facts.needed.update(metadata.stored_files())


def _reason(info: FileInfo, facts: _Facts) -> str | None:
    """Why nobody needs a file; None if somebody does, or may."""
    if info.path in facts.needed:
        return None
    folder = info.path.partition("/")[0]
    if folder == layout.PINS:
        return PIN_EXPIRED if info.path in facts.expired_pins else None
    if is_temporary(info.path):
        return INTERRUPTED
    checkpoint = layout.checkpoint_of_folder(folder)
    if checkpoint is not None:
        if checkpoint in facts.void:
            return VOID
        if checkpoint in facts.unreadable:
            return None
        return UNREFERENCED if checkpoint in facts.completed else UNFINISHED
    if folder == layout.SHARED:
        return None if facts.unreadable else UNREFERENCED
    return None  # claims, files that tasks own, and what is not ours


def _held(path: str, facts: _Facts) -> bool:
    """Whether a restore may be reading the file: one that pinned its checkpoint, or a checkpoint that is gone."""
    folder = path.partition("/")[0]
    if folder == layout.SHARED:
        return bool(facts.pinned - facts.completed)
    return layout.checkpoint_of_folder(folder) in facts.pinned


def _abandoned_uploads(store: FileStore, before_ms: int, now_ms: int) -> list[Orphan]:
    return [Orphan(path, 0, now_ms - before_ms, UPLOAD_ABANDONED, upload_id)
            for path, upload_id in store.abandoned_uploads(before_ms)]


def _remove_empty_folders(store: FileStore, deleted: list[str]) -> None:
    for folder in {path.partition("/")[0] for path in deleted}:
        local = store.local_path(folder)
        if local is not None and layout.checkpoint_of_folder(folder) is not None and local.is_dir() \
                and not any(local.iterdir()):
            local.rmdir()
