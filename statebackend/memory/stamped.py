"""An integer and its expiry as one number: `expires_at << 64 | value`, the value shifted to be positive.

A pair would be a container that the garbage collector follows: with millions of them, freeing one touches its
neighbours in memory, and every access misses the cache once more.
"""

from __future__ import annotations

from typing import Any

from statebackend.memory.forms import is_int64
from statebackend.schema import StateSchema

_SHIFT, BIAS, MASK = 64, 1 << 63, (1 << 64) - 1


def is_stamped(schema: StateSchema) -> bool:
    """Whether entries of this state are held in this form: 64-bit integers of a value state with TTL."""
    return schema.kind == "value" and schema.ttl is not None and is_int64(schema.value_type)


def base_of(expires: int) -> int:
    """What to add to a value, for the number that holds it with this expiry."""
    return (expires << _SHIFT) + BIAS


def expiry_of(stamped: int) -> int:
    return stamped >> _SHIFT


def value_of(stamped: int) -> int:
    return (stamped & MASK) - BIAS


def least_live(now: int) -> int:
    """A number at or above this has not expired."""
    return (now + 1) << _SHIFT


def join(values: list[int], expiries: list[int]) -> list[Any]:
    return [(expires << _SHIFT) + BIAS + value for value, expires in zip(values, expiries)]
