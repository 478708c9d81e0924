"""Values of any state type as JSON values: exact, and the same everywhere the command line prints them."""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from typing import Any
from uuid import UUID


def plain(value: Any) -> Any:
    """JSON has no bytes, NaN, dates or decimals: bytes become base64, the others text."""
    if value is None or isinstance(value, (str, bool, int)):
        return value.value if isinstance(value, Enum) else value
    if isinstance(value, float):
        return value if math.isfinite(value) else repr(value)
    if isinstance(value, (bytes, bytearray, memoryview)):
        return base64.b64encode(value).decode()
    if isinstance(value, (datetime, date, time)):
        return value.isoformat()
    if isinstance(value, (Decimal, UUID)):
        return str(value)
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, Mapping):
        return {_name(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(item) for item in value]
    return str(value)


def _name(key: Any) -> str:
    simple = plain(key)
    return simple if isinstance(simple, str) else str(simple)
