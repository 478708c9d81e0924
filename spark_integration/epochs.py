"""Which epoch a micro-batch starts from, when it is complete, and what may be forgotten: decisions, with no I/O.

Spark tells a task its query, its run and its batch, and nothing else; there is no hook on the driver. So an epoch is
a set of facts in storage. A *generation* is one run of a query, numbered in the order of starting. A task
*acknowledges* its key-group range; the epoch exists once a *manifest* names one acknowledgement for every range. The
chain of a generation is its own manifests, then the manifest it is based on, then that one's chain; manifests off the
chain do not exist.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from statebackend.backend import KeyedHandle
from statebackend.errors import Conflict, CorruptData, IncompatibleState, InvalidRequest, NotFound
from statebackend.keygroups import KeyGroupRange, key_group_range

MANIFEST_VERSION = 1


class EpochId(NamedTuple):
    """An epoch of one generation: batch `epoch` as run `generation` of the query computed it."""

    epoch: int
    generation: int


class TaskRun(NamedTuple):
    """What Spark tells a task: the query (stable over restarts), this run of it, the batch. Batch jobs have no query."""

    query_id: str | None
    run_id: str
    batch: int


@dataclass(frozen=True)
class Generation:
    """One run of a query, and where it started from. Written once, by whichever task came first."""

    number: int
    run_id: str
    query_id: str | None
    first_batch: int
    parallelism: int
    base: EpochId | None
    started_ms: int = 0

    def to_json(self) -> dict[str, Any]:
        return {"version": MANIFEST_VERSION, "number": self.number, "run_id": self.run_id, "query_id": self.query_id,
                "first_batch": self.first_batch, "parallelism": self.parallelism,
                "base": list(self.base) if self.base else None, "started_ms": self.started_ms}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Generation:
        _require_version(data, "a generation record")
        base = data["base"]
        return cls(int(data["number"]), str(data["run_id"]), data["query_id"], int(data["first_batch"]),
                   int(data["parallelism"]), EpochId(int(base[0]), int(base[1])) if base else None,
                   int(data["started_ms"]))


@dataclass(frozen=True)
class Statistics:
    """What one task did; summed up in the manifest."""

    rows_in: int = 0
    rows_out: int = 0
    timers_fired: int = 0
    new_bytes: int = 0
    restored: str = ""
    restore_ms: int = 0
    process_ms: int = 0
    store_ms: int = 0

    def to_json(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__dataclass_fields__}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Statistics:
        return cls(**{name: data[name] for name in cls.__dataclass_fields__ if name in data})


@dataclass(frozen=True)
class Acknowledgement:
    """A task attempt has read all rows of its range, and the state after them is stored.

    `operator` is the operator state of the partition, in its own encoding. `batch_time` and `max_event_time` are None
    where the task saw no row.
    """

    key_groups: KeyGroupRange
    attempt: str
    handle: KeyedHandle
    operator: bytes = b""
    batch_time: int | None = None
    max_event_time: int | None = None
    statistics: Statistics = field(default_factory=Statistics)

    def to_json(self) -> dict[str, Any]:
        import base64

        return {"version": MANIFEST_VERSION, "key_groups": [self.key_groups.first, self.key_groups.last],
                "attempt": self.attempt, "handle": self.handle.to_json(),
                "operator": base64.b64encode(self.operator).decode(), "batch_time": self.batch_time,
                "max_event_time": self.max_event_time, "statistics": self.statistics.to_json()}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Acknowledgement:
        import base64

        _require_version(data, "an acknowledgement")
        first, last = data["key_groups"]
        return cls(KeyGroupRange(int(first), int(last)), str(data["attempt"]), KeyedHandle.from_json(data["handle"]),
                   base64.b64decode(data["operator"]), data["batch_time"], data["max_event_time"],
                   Statistics.from_json(data["statistics"]))


@dataclass(frozen=True)
class Manifest:
    """A complete epoch: one acknowledgement for every range, and the epoch it was computed from."""

    id: EpochId
    parent: EpochId | None
    uid: str
    run_id: str
    query_id: str | None
    max_parallelism: int
    parts: tuple[Acknowledgement, ...]
    batch_time: int | None
    max_event_time: int | None
    published_ms: int = 0

    @property
    def parallelism(self) -> int:
        return len(self.parts)

    def part(self, key_groups: KeyGroupRange) -> Acknowledgement | None:
        """The part that covers exactly these key groups, if the epoch was cut that way."""
        return next((part for part in self.parts if part.key_groups == key_groups), None)

    def overlapping(self, key_groups: KeyGroupRange) -> list[Acknowledgement]:
        return [part for part in self.parts
                if part.key_groups.first <= key_groups.last and key_groups.first <= part.key_groups.last]

    def files(self) -> set[str]:
        """The paths of all state files that this epoch needs."""
        return {file.path for part in self.parts for file in part.handle.files if file.inline is None}

    def to_json(self) -> dict[str, Any]:
        return {"version": MANIFEST_VERSION, "epoch": self.id.epoch, "generation": self.id.generation,
                "parent": list(self.parent) if self.parent else None, "uid": self.uid, "run_id": self.run_id,
                "query_id": self.query_id, "max_parallelism": self.max_parallelism, "batch_time": self.batch_time,
                "max_event_time": self.max_event_time, "published_ms": self.published_ms,
                "parts": [part.to_json() for part in self.parts]}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Manifest:
        _require_version(data, "an epoch manifest")
        parent = data["parent"]
        return cls(EpochId(int(data["epoch"]), int(data["generation"])),
                   EpochId(int(parent[0]), int(parent[1])) if parent else None, str(data["uid"]), str(data["run_id"]),
                   data["query_id"], int(data["max_parallelism"]),
                   tuple(Acknowledgement.from_json(part) for part in data["parts"]), data["batch_time"],
                   data["max_event_time"], int(data["published_ms"]))


def _require_version(data: Mapping[str, Any], what: str) -> None:
    found = data.get("version")
    if found != MANIFEST_VERSION:
        raise IncompatibleState(f"{what} has a version that this release does not read", expected=MANIFEST_VERSION,
                                found=found, hint="use a newer release of holdfast")


@dataclass(frozen=True)
class OwnGeneration:
    """This run has its generation."""

    generation: Generation


@dataclass(frozen=True)
class OpenGeneration:
    """This run is new: its first task opens the next generation, based on `base`."""

    number: int
    base: EpochId | None


def decide_generation(run: TaskRun, known: Sequence[Generation], published: Iterable[EpochId],
                      acknowledged: Iterable[EpochId], start_empty: bool = False) -> OwnGeneration | OpenGeneration:
    """The generation of this run, or the one to open. An older run is fenced off by a newer one.

    A query that Spark continues in the middle, without any state of ours, has lost it, unless `start_empty` is said.
    """
    newest = max(known, key=lambda generation: generation.number, default=None)
    own = next((generation for generation in known if generation.run_id == run.run_id), None)
    if own is not None:
        if newest is not None and newest.number > own.number:
            raise fenced(own, newest)
        return OwnGeneration(own)
    if newest is None:
        if run.batch > 0 and run.query_id is not None and not start_empty:
            raise NotFound(f"Spark continues this query at batch {run.batch}, but there is no state for it",
                           query_id=run.query_id,
                           hint="check `checkpoint` and `uid`; say start_empty=True if the operator is new to the query")
        return OpenGeneration(1, None)
    if newest.query_id is not None and run.query_id is not None and newest.query_id != run.query_id:
        raise Conflict("this state belongs to another query", expected=newest.query_id, found=run.query_id,
                       hint="a query is known by Spark's checkpointLocation: use the one that this state was written "
                            "with, another `checkpoint` or `uid`, or `holdfast spark restore` to continue from a copy")
    published = set(published)
    base = newest_below(run.batch, newest, known, published)
    require_whole(run.batch, base, chain_of(newest, known, published, set(acknowledged)), published)
    if base is None and run.batch > 0 and known[0].first_batch < run.batch:
        oldest = min(published, default=None)
        raise NotFound(f"there is no epoch below batch {run.batch} to start from",
                       found=f"oldest epoch kept is {oldest.epoch}" if oldest else "no epoch was ever completed",
                       hint="Spark's checkpoint and the state must be of the same time: restore both from a savepoint")
    return OpenGeneration(newest.number + 1, base)


def fenced(own: Generation, newest: Generation) -> Conflict:
    return Conflict("a newer run of this query has taken over its state", expected=f"generation {own.number}",
                    found=f"generation {newest.number}", run_id=newest.run_id,
                    hint="stop this query; only the newest run goes on")


def chain_of(generation: Generation, known: Sequence[Generation], *sets: set[EpochId]) -> list[EpochId]:
    """The epochs of `sets` that lie on the chain of a generation, newest first."""
    by_number = {known_one.number: known_one for known_one in known}
    everything = set().union(*sets)
    chain: list[EpochId] = []
    bound: int | None = None
    current: Generation | None = generation
    while current is not None:
        chain += sorted((epoch for epoch in everything if epoch.generation == current.number
                         and (bound is None or epoch.epoch <= bound)), reverse=True)
        if current.base is None:
            return chain
        bound = current.base.epoch if bound is None else min(bound, current.base.epoch)
        current = by_number.get(current.base.generation)
    return chain


def newest_below(batch: int, generation: Generation, known: Sequence[Generation],
                 published: set[EpochId]) -> EpochId | None:
    """The newest published epoch below a batch, on the chain of a generation."""
    return next((epoch for epoch in chain_of(generation, known, published) if epoch.epoch < batch), None)


def require_whole(batch: int, base: EpochId | None, chain: Iterable[EpochId], published: set[EpochId]) -> None:
    """Refuse to go on over an epoch that some ranges acknowledged and others never did."""
    floor = base.epoch if base is not None else -1
    torn = [epoch for epoch in chain if floor < epoch.epoch < batch and epoch not in published]
    if torn:
        raise Conflict(f"batch {torn[-1].epoch} was computed only in part: not every key-group range was read",
                       epoch=torn[-1].epoch, generation=torn[-1].generation, batch=batch,
                       hint="a foreachBatch function must read all rows of its DataFrame (not only limit, take or "
                            f"show); go back to epoch {floor} with `holdfast spark restore` and run the batch again")


@dataclass(frozen=True)
class Publish:
    """Every range is acknowledged: this is the epoch."""

    parts: tuple[Acknowledgement, ...]


@dataclass(frozen=True)
class WaitFor:
    """These ranges have not been acknowledged yet; whoever comes last publishes."""

    missing: tuple[KeyGroupRange, ...]


def decide_publication(parallelism: int, max_parallelism: int,
                       acknowledgements: Iterable[Acknowledgement]) -> Publish | WaitFor:
    """One acknowledgement per range (of several attempts the one whose name sorts first), or what is missing."""
    by_range: dict[KeyGroupRange, Acknowledgement] = {}
    for one in sorted(acknowledgements, key=lambda one: one.attempt):
        by_range.setdefault(one.key_groups, one)
    wanted = [key_group_range(index, parallelism, max_parallelism) for index in range(parallelism)]
    missing = tuple(key_groups for key_groups in wanted if key_groups not in by_range)
    return WaitFor(missing) if missing else Publish(tuple(by_range[key_groups] for key_groups in wanted))


def manifest_of(run: TaskRun, generation: Generation, uid: str, max_parallelism: int, parent: Manifest | None,
                parts: Sequence[Acknowledgement], now_ms: int) -> Manifest:
    """The manifest of a complete epoch; times only grow along the chain."""
    older = (parent.batch_time, parent.max_event_time) if parent else (None, None)
    return Manifest(EpochId(run.batch, generation.number), parent.id if parent else None, uid, run.run_id,
                    run.query_id, max_parallelism, tuple(parts),
                    _latest([older[0], *(part.batch_time for part in parts)]),
                    _latest([older[1], *(part.max_event_time for part in parts)]), now_ms)


def _latest(times: Iterable[int | None]) -> int | None:
    return max((time for time in times if time is not None), default=None)


@dataclass(frozen=True)
class Forget:
    """What no retained epoch needs: manifests and acknowledgements by epoch, and the epoch whose files stay."""

    epochs: tuple[EpochId, ...]
    floor: EpochId


def decide_retention(newest: EpochId, retain: int, generation: Generation, known: Sequence[Generation],
                     published: set[EpochId], acknowledged: set[EpochId]) -> Forget | None:
    """Keep the chain from the newest epoch at or below `newest - retain` on; forget everything older, and what an
    older generation left off the chain at or below that epoch."""
    chain = [epoch for epoch in chain_of(generation, known, published) if epoch <= newest]
    floor = next((epoch for epoch in chain if epoch.epoch <= newest.epoch - retain), None)
    if floor is None:
        return None
    old = {epoch for epoch in published | acknowledged if epoch.epoch <= floor.epoch and epoch != floor}
    return Forget(tuple(sorted(old)), floor)


def require_parallelism(parallelism: int, max_parallelism: int) -> None:
    if not 1 <= max_parallelism <= 32768:
        raise InvalidRequest("max_parallelism must lie between 1 and 32768", found=max_parallelism)
    if not 1 <= parallelism <= max_parallelism:
        raise InvalidRequest("parallelism must lie between 1 and max_parallelism", found=parallelism,
                             expected=f"1..{max_parallelism}")


def require_same_cut(manifest: Manifest, max_parallelism: int, key_type: Mapping[str, Any]) -> None:
    """Key groups and key type can't change under stored state."""
    if manifest.max_parallelism != max_parallelism:
        raise IncompatibleState("max_parallelism differs from the stored state's", operator=manifest.uid,
                                expected=manifest.max_parallelism, found=max_parallelism,
                                hint="keep it, or take a savepoint, rescale it and restore the query from it")
    for part in manifest.parts:
        if dict(part.handle.key_type) != dict(key_type):
            raise IncompatibleState("the key has another type than the stored state's", operator=manifest.uid,
                                    expected=dict(part.handle.key_type), found=dict(key_type),
                                    hint="cast the key column to the stored type, or use another uid")
        if part.handle.max_parallelism != max_parallelism:
            raise CorruptData("a part of an epoch was cut for another max_parallelism", operator=manifest.uid)
