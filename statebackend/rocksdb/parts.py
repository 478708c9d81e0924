"""Which database holds which key groups: one after a fresh start, one for each clipped source after rescaling."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from statebackend.errors import InvalidRequest
from statebackend.keygroups import KeyGroupRange
from statebackend.rocksdb.store import Operation, Scan, Store


@dataclass(frozen=True)
class Part:
    """A database that holds a range of key groups. `number` tells it from the others of this backend."""

    number: int
    key_groups: KeyGroupRange
    store: Store


class Parts:
    """All databases of a keyed backend, ordered by key group, without gaps or overlaps."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self.parts = tuple(sorted(parts, key=lambda part: part.key_groups.first))
        self.first, self.last = self.parts[0].key_groups.first, self.parts[-1].key_groups.last
        self.only = self.parts[0].store if len(self.parts) == 1 else None
        """The database where there is but one."""
        self._stores = [part.store for part in self.parts
                        for _ in range(part.key_groups.first, part.key_groups.last + 1)]

    def store_of(self, key: bytes) -> Store:
        """The database of an entry key."""
        if self.only is not None:
            return self.only
        group = key[0] << 8 | key[1]
        if not self.first <= group <= self.last:
            raise InvalidRequest("a key belongs to a key group that is not held here", found=group,
                                 expected=f"{self.first}..{self.last}")
        return self._stores[group - self.first]

    def get(self, key: bytes) -> bytes | None:
        store = self.only
        return store.get(key) if store is not None else self.store_of(key).get(key)

    def serve(self, overlay: type[dict[bytes, Any]]) -> None:
        """Let dicts of this class find what they lack in the databases."""
        if self.only is not None:
            self.only.serve(overlay)
        else:
            overlay.__missing__ = self.get  # type: ignore[attr-defined]

    def get_many(self, keys: list[bytes]) -> list[bytes | None]:
        """The values of many sorted keys."""
        if self.only is not None:
            return self.only.get_many(keys)
        found: list[bytes | None] = []
        for store, begin, end in self._cuts(keys):
            found.extend(store.get_many(keys[begin:end]))
        return found

    def write(self, operations: Sequence[Operation]) -> None:
        """Apply operations that are sorted by key group."""
        if self.only is not None:
            self.only.write(operations)
            return
        for store, begin, end in self._cuts([key for key, _ in operations]):
            store.write(operations[begin:end])

    def _cuts(self, keys: Sequence[bytes]) -> Iterator[tuple[Store, int, int]]:
        begin = 0
        while begin < len(keys):
            store = self.store_of(keys[begin])
            end = begin + 1
            while end < len(keys) and self.store_of(keys[end]) is store:
                end += 1
            yield store, begin, end
            begin = end

    def scan(self, begin: bytes, end: bytes, **options: Any) -> Scan:
        """A range inside one key group."""
        return self.store_of(begin).scan(begin, end, **options)

    def groups(self) -> range:
        return range(self.first, self.last + 1)

    def live_bytes(self) -> int:
        return sum(part.store.live_bytes() for part in self.parts)

    def estimated_keys(self) -> int:
        return sum(part.store.estimated_keys() for part in self.parts)

    def flush(self) -> None:
        for part in self.parts:
            part.store.flush()

    def compact(self) -> None:
        for part in self.parts:
            part.store.compact()

    def close(self) -> None:
        for part in self.parts:
            part.store.close()
