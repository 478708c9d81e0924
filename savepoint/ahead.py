"""Reads ahead: what an iterator does next happens on a thread of its own while its consumer works."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")
DEPTH = 4


def ahead(items: Generator[T] | Iterator[T], depth: int = DEPTH) -> Iterator[T]:
    """The same items, of which up to `depth` are made before they are asked for.

    An error comes where the item would have come. When the consumer stops early, the source is closed on the way out.
    """
    end = object()
    with ThreadPoolExecutor(1, thread_name_prefix="holdfast-ahead") as pool:
        coming = deque(pool.submit(next, items, end) for _ in range(depth))
        try:
            while (item := coming.popleft().result()) is not end:
                coming.append(pool.submit(next, items, end))
                yield item  # type: ignore[misc]
        finally:
            for future in coming:
                future.cancel()
            if isinstance(items, Generator):
                pool.submit(items.close).result()
