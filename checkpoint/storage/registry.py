"""Who needs which file, and what may be deleted: pure decisions over facts that storage code has observed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum

from statebackend.errors import InvalidRequest


class SharedFileRegistry:
    """Counts how many completed checkpoints refer to each stored file. Belongs to one thread.

    It holds nothing that can't be rebuilt from the retained checkpoints, and is rebuilt from them after a restart.
    """

    def __init__(self) -> None:
        self._files: dict[int, frozenset[str]] = {}
        self._counts: Counter[str] = Counter()

    @classmethod
    def rebuilt(cls, checkpoints: Mapping[int, Iterable[str]]) -> SharedFileRegistry:
        """The registry of these completed checkpoints and the paths they refer to."""
        registry = cls()
        for checkpoint_id, paths in checkpoints.items():
            registry.register(checkpoint_id, paths)
        return registry

    def register(self, checkpoint_id: int, paths: Iterable[str]) -> None:
        """A checkpoint is complete and refers to these files."""
        if checkpoint_id in self._files:
            raise InvalidRequest("a checkpoint is registered twice", checkpoint_id=checkpoint_id)
        self._files[checkpoint_id] = frozenset(paths)
        self._counts.update(self._files[checkpoint_id])

    def unregister(self, checkpoint_id: int) -> frozenset[str]:
        """A checkpoint is given up; the files that nobody refers to any longer. Unknown ones had none."""
        paths = self._files.pop(checkpoint_id, frozenset())
        self._counts.subtract(paths)
        freed = frozenset(path for path in paths if self._counts[path] <= 0)
        for path in freed:
            del self._counts[path]
        return freed

    def references(self, path: str) -> int:
        return self._counts.get(path, 0)

    @property
    def checkpoints(self) -> tuple[int, ...]:
        return tuple(sorted(self._files))

    @property
    def needed(self) -> frozenset[str]:
        """Every file that some checkpoint refers to."""
        return frozenset(self._counts)

    def files_of(self, checkpoint_id: int) -> frozenset[str]:
        return self._files.get(checkpoint_id, frozenset())


@dataclass(frozen=True)
class Retention:
    """Which completed checkpoints stay and which go; `spared` stay only because somebody is still using them."""

    keep: tuple[int, ...]
    drop: tuple[int, ...]
    spared: tuple[int, ...] = ()


def retention(completed: Collection[int], retained: int, *, in_use: Collection[int] = (),
              pinned: Collection[int] = ()) -> Retention:
    """Keep the newest `retained`; the newest is never dropped.

    `in_use` are those that a checkpoint in progress builds upon (it may refer to their files once it completes),
    `pinned` those that a restore is reading.
    """
    if retained < 1:
        raise InvalidRequest("the number of retained checkpoints must be at least 1", found=retained)
    ordered = sorted(completed)
    keep, others = ordered[-retained:], ordered[:-retained]
    spared = [checkpoint for checkpoint in others if checkpoint in in_use or checkpoint in pinned]
    drop = [checkpoint for checkpoint in others if checkpoint not in spared]
    return Retention(tuple(keep), tuple(drop), tuple(spared))


class Verdict(Enum):
    """What is to be done with a file, read as a sentence."""

    DELETE = "may be deleted"
    REFERENCED = "a checkpoint refers to it"
    PINNED = "a running restore may need it"
    YOUNG = "younger than the grace period"
    NOT_NEWEST = "only the newest generation deletes"


@dataclass(frozen=True)
class DeletionRules:
    """The facts that decide about every file alike."""

    now_ms: int
    grace_ms: int
    newest_generation: bool = True
    pinned: frozenset[str] = frozenset()

    def verdict(self, path: str, modified_ms: int, references: int) -> Verdict:
        """Whether a file may go. A file from the future (a clock that jumped back) counts as young."""
        if not self.newest_generation:
            return Verdict.NOT_NEWEST
        if references > 0:
            return Verdict.REFERENCED
        if path in self.pinned:
            return Verdict.PINNED
        if self.now_ms - modified_ms < self.grace_ms:
            return Verdict.YOUNG
        return Verdict.DELETE


@dataclass(frozen=True)
class GenerationRecord:
    """A claim on a job: its number, and the newest checkpoint there was when it took over (None: not yet looked)."""

    number: int
    base: int | None = None


def is_void(checkpoint_id: int, generation: int, claims: Iterable[GenerationRecord]) -> bool:
    """Whether a checkpoint was published by a writer that had lost its job: a newer one started from an older one."""
    return any(claim.number > generation and claim.base is not None and checkpoint_id > claim.base
               for claim in claims)
