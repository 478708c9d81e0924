"""The open savepoint format: names, columns and limits that reader and writer share (docs/savepoints.md).

    <savepoint>/_metadata
    <savepoint>/<uid>/keyed/<state>/part-<first kg>-<last kg>.parquet
    <savepoint>/<uid>/timers/<event|processing>/part-<first kg>-<last kg>.parquet
    <savepoint>/<uid>/operator/<state>.parquet
    <savepoint>/<uid>/broadcast/<state>.parquet
    <savepoint>/<uid>/inflight/<edge>.parquet
"""

from __future__ import annotations

import hashlib
import re
from urllib.parse import quote

import pyarrow as pa

from statebackend.descriptors import StateKind

OPEN_FORMAT = "open"
OPEN_VERSION = 1
"""The version of handles, columns and file layout; readers refuse a higher one."""

KEY_GROUP, KEY, NAMESPACE, VALUE = "key_group", "key", "namespace", "value"
LIST_INDEX, MAP_KEY, MAP_VALUE = "list_index", "map_key", "map_value"
EXPIRES_AT, TIMESTAMP, SUBTASK, ELEMENT_INDEX = "expires_at", "timestamp", "subtask", "index"

KEY_GROUP_TYPE = pa.int32()
LIST_INDEX_TYPE = pa.int64()
EXPIRES_TYPE = pa.timestamp("ms", "UTC")
TIMER_TYPE = pa.int64()

IN_FLIGHT = "inflight"
"""The folder of an operator's records in flight, and their name where states have theirs: in SQL and in a diff."""

MIN_ROWS, MAX_ROWS = 16_384, 131_072
"""Row groups end at the first key-group border after MIN_ROWS, and at MAX_ROWS in any case."""
PART_ROWS = 4_194_304
"""A part ends at the first key-group border after so many rows: footers stay small, so look-ups stay fast."""
BATCH_ROWS = 65_536
LARGEST_KEYS = 10
COMPRESSION = "zstd"
COMPRESSION_LEVEL = 1

_SAFE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,149}")
_KEPT = "-."


def escape_name(name: str) -> str:
    """A file name for a uid or state name: itself where it is one, else percent-encoded; long ones end in a digest.

    Different names give different file names. `_metadata` keeps the real name, so nothing ever decodes these.
    """
    if _SAFE.fullmatch(name):
        return name
    escaped = quote(name, safe=_KEPT).replace("~", "%7E")
    if escaped[:1] in ("", ".", "_", "-"):
        escaped = "".join(f"%{byte:02X}" for byte in name[:1].encode()) + quote(name[1:], safe=_KEPT).replace("~", "%7E")
    if len(escaped) > 150:
        escaped = f"{escaped[:100].rstrip('%')}~{hashlib.sha256(name.encode()).hexdigest()[:32]}"
    return escaped or "%"


def state_folder(uid: str, state: str, kind: StateKind) -> str:
    """The folder of a keyed state's parts, relative to the savepoint."""
    if kind is StateKind.TIMER:
        return f"{escape_name(uid)}/timers/{escape_name(state.removeprefix('_timers_'))}"
    return f"{escape_name(uid)}/keyed/{escape_name(state)}"


def part_path(uid: str, state: str, kind: StateKind, first: int, last: int) -> str:
    return f"{state_folder(uid, state, kind)}/part-{first}-{last}.parquet"


def operator_path(uid: str, state: str, *, broadcast: bool) -> str:
    return f"{escape_name(uid)}/{'broadcast' if broadcast else 'operator'}/{escape_name(state)}.parquet"


def inflight_path(uid: str, edge: str) -> str:
    return f"{escape_name(uid)}/{IN_FLIGHT}/{escape_name(edge)}.parquet"
