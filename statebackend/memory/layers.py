"""A table as layers of dicts: what changed since the last freeze, over frozen generations, over a base.

Only the owner's thread writes the active layer. A freeze swaps it for an empty one, whatever its size. Frozen layers
never change until they have been folded into the base, which a snapshot's writer does, oldest first, when no snapshot
still reads the base. A reader goes from the newest layer to the base, so folding is invisible to it.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any, NoReturn

from statebackend.errors import Closed, InvalidRequest

CHUNK = 4096
"""Entries handled at a time on the writer's thread, so that the interpreter is never held for long."""
_PAUSE = 0.0005
"""Seconds; long enough for a waiting thread to wake up and take over."""
RELEASED_AT_ONCE = 400_000
"""A dict of so many entries becomes lists within some milliseconds."""


class _Missing:
    __slots__ = ()

    def __repr__(self) -> str:
        return "MISSING"


class _NoKey:
    """The current key before one is set: any look-up with it fails, at no cost to look-ups that have one."""

    __slots__ = ()

    def __hash__(self) -> int:
        raise InvalidRequest("no current key is set", hint="call set_current_key(key) before per-record calls")


MISSING: Any = _Missing()
NO_KEY: Any = _NoKey()


class Layer(dict[Any, Any]):
    """Entries put since the last freeze, and the keys removed. A key in both was put last.

    A look-up of an absent key asks the older layers, so that the common case is one plain dict access.
    """

    __slots__ = ("folded", "removed", "table")

    def __init__(self, table: Layers) -> None:
        super().__init__()
        self.table = table
        self.folded = False
        self.removed: set[Any] = set()

    def __missing__(self, key: Any) -> Any:
        return self.table.older(key)

    def __reduce__(self) -> NoReturn:
        raise TypeError("a layer can't be pickled")


class ClosedLayer(Layer):
    """What a closed table has in place of its active layer."""

    __slots__ = ()

    def _refuse(self, *_args: Any, **_kwargs: Any) -> NoReturn:
        raise Closed("this state backend has been closed", state=getattr(self.table, "name", None))

    __getitem__ = __setitem__ = __delitem__ = __contains__ = __iter__ = __len__ = _refuse  # type: ignore[assignment]
    get = pop = items = keys = values = update = setdefault = clear = _refuse  # type: ignore[assignment]


class Layers:
    """The layered table. `absent` is what a look-up of an unknown key gives.

    `columns` is there in states that work on Arrow batches: a columnar table below the base, which then holds only
    what per-record calls changed since the last batch.
    """

    __slots__ = ("absent", "base", "columns", "delta", "frozen")

    def __init__(self, absent: Any = MISSING) -> None:
        self.absent = absent
        self.base = Layer(self)
        self.columns: Any = None
        self.frozen: tuple[Layer, ...] = ()
        self.delta = Layer(self)

    def older(self, key: Any) -> Any:
        """The entry below the active layer."""
        if key in self.delta.removed:
            return self.absent
        for layer in self.frozen:
            if layer.folded:
                self.prune()
                continue
            value = layer.get(key, MISSING)
            if value is not MISSING:
                return value
            if key in layer.removed:
                return self.absent
        base = self.base
        value = base.get(key, MISSING)
        if value is not MISSING:
            return value
        if self.columns is None or key in base.removed:
            return self.absent
        return self.columns.get(key, self.absent)

    def stored_below(self, key: Any) -> bool:
        """Whether a layer under the active one, or the base, has the key."""
        for layer in (*self.frozen, self.base):
            if layer.get(key, MISSING) is not MISSING:
                return True
            if key in layer.removed:
                return False
        return self.columns is not None and self.columns.get(key, MISSING) is not MISSING

    def remove(self, key: Any) -> None:
        self.delta.pop(key, None)
        if self.stored_below(key):
            self.delta.removed.add(key)

    def prune(self) -> None:
        """Forget frozen layers that have become part of the base. Only the owner's thread does this."""
        self.frozen = tuple(layer for layer in self.frozen if not layer.folded)

    def freeze(self) -> Layer:
        """Start a new active layer; the old one is what changed until now."""
        self.prune()
        layer = self.delta
        self.frozen = (layer, *self.frozen)
        self.delta = Layer(self)
        return layer

    def slots(self) -> list[Any]:
        """Every stored key once, expired or not. A copy: the table may change while it is walked."""
        layers = [layer for layer in (self.delta, *self.frozen) if layer or layer.removed]
        if not layers and self.columns is None:
            return list(self.base)
        seen: set[Any] = set()
        found: list[Any] = []
        for layer in (*layers, self.base):
            for key in list(layer):
                if key not in seen:
                    seen.add(key)
                    found.append(key)
            seen.update(list(layer.removed))
        if self.columns is not None:
            found.extend(key for key in self.columns.live_keys() if key not in seen)
        return found

    def merged(self, layers: Iterable[Layer]) -> tuple[dict[Any, Any], set[Any]]:
        """The sum of layers, oldest first: entries put, and keys removed and not put again."""
        several = [layer for layer in layers if layer or layer.removed]
        if len(several) == 1:
            return several[0], {key for key in several[0].removed if key not in several[0]}
        puts: dict[Any, Any] = {}
        removed: set[Any] = set()
        for layer in several:
            for key in layer.removed:
                puts.pop(key, None)
                removed.add(key)
            for part in chunks(layer.items()):
                puts.update(part)
        return puts, {key for key in removed if key not in puts}

    def fold(self, layer: Layer, base: Layer) -> Iterator[None]:
        """Move a frozen layer into the base, yielding now and then so that the writer can pause."""
        for part in chunks(layer.removed):
            for key in part:
                base.pop(key, None)
            if self.columns is not None:
                base.removed.update(part)
            yield
        items = iter(layer.items())
        for _ in range(0, len(layer), CHUNK):
            base.update(islice(items, CHUNK))
            yield

    def close(self) -> None:
        self.delta = ClosedLayer(self)
        self.frozen, self.base, self.columns = (), Layer(self), None


def chunks(entries: Iterable[Any], size: int = CHUNK) -> Iterator[list[Any]]:
    """Lists of at most `size` entries."""
    iterator = iter(entries)
    while part := list(islice(iterator, size)):
        yield part


def columns(entries: dict[Any, Any], size: int = CHUNK) -> Iterator[tuple[list[Any], list[Any]]]:
    """The keys and the values of a dict that is at rest, in lists of at most `size`; a pair of each would cost twice."""
    keys, values = iter(entries), iter(entries.values())
    while part := list(islice(keys, size)):
        yield part, list(islice(values, size))


def give_way() -> None:
    """Let the owner go on before the writer's next piece of work.

    Two threads that both want the interpreter get half of it each. One that lets go of it after every piece gets its
    next turn when the other has had a whole switch interval, so the owner keeps most of it.
    """
    time.sleep(_PAUSE)


def release(layer: dict[Any, Any]) -> None:
    """Empty a dict piece by piece: freeing a large one at once would hold the interpreter for tens of milliseconds.

    Taking entries out one by one looks each of them up again, which costs six times as much as giving them up from
    lists; but the lists are made in one go, so a very large dict is first made smaller.
    """
    removed = getattr(layer, "removed", None)
    pop = layer.popitem
    while len(layer) > RELEASED_AT_ONCE:
        for _ in range(CHUNK):
            pop()
    held = [list(layer), list(layer.values())]
    layer.clear()
    for entries in held:
        while entries:
            del entries[-CHUNK:]
            give_way()
    while removed:
        for _ in range(min(CHUNK, len(removed))):
            removed.pop()
