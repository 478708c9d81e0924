"""Human durations and sizes in, exact numbers out: `7d` is 604,800,000 ms, `64MiB` is 67,108,864 bytes."""

from __future__ import annotations

import math
import re
from datetime import timedelta

from statebackend.errors import InvalidRequest

_DURATION_MS = {"ms": 1, "s": 1000, "m": 60_000, "min": 60_000, "h": 3_600_000, "d": 86_400_000, "w": 604_800_000}
_MILLISECOND = timedelta(milliseconds=1)
_SIZE = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30,
         "tb": 10**12, "tib": 2**40}
_NUMBER_UNIT = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([a-zA-Z]*)\s*")


def duration_ms(value: str | int | float | timedelta) -> int:
    """Milliseconds of `7d`, `1.5 h`, `250ms`, a timedelta, or a bare number of milliseconds."""
    if isinstance(value, timedelta):
        return value // _MILLISECOND
    if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
        return int(value)
    match = _NUMBER_UNIT.fullmatch(value) if isinstance(value, str) else None
    if match is None or match[2].lower() not in _DURATION_MS:
        raise InvalidRequest(f"{value!r} is not a duration", hint="write it like 500ms, 10s, 5m, 2h or 7d")
    return round(float(match[1]) * _DURATION_MS[match[2].lower()])


def size_bytes(value: str | int) -> int:
    """Bytes of `64MiB`, `1.5GB`, `4096`."""
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    match = _NUMBER_UNIT.fullmatch(value) if isinstance(value, str) else None
    if match is None or match[2].lower() not in _SIZE:
        raise InvalidRequest(f"{value!r} is not a size", hint="write it like 4096, 64KiB, 64MiB or 1.5GB")
    return round(float(match[1]) * _SIZE[match[2].lower()])
