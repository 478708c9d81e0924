"""Reading what the demo's runs have left, with DuckDB alone: nothing here imports Holdfast."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import duckdb

Counts = Mapping[str, int]


def counted_by_duckdb(clicks: Path) -> dict[str, int]:
    """The truth: clicks per user, straight from the input files."""
    return _pairs("select user, count(*) from read_json_auto(?) group by user", clicks / "*.jsonl")


def last_counts(folder: Path, pattern: str) -> dict[str, int]:
    """The highest count that a run has written for each user."""
    return _pairs("select user, max(n) from read_json_auto(?) group by user", folder / pattern)


def rows(folder: Path, pattern: str = "part-*.jsonl") -> int:
    """Rows in the committed files of a folder; none where there is no file yet."""
    if not any(folder.glob(pattern)):
        return 0
    return int(_all("select count(*) from read_json_auto(?)", str(folder / pattern))[0][0])


def rows_that_differ(left: Path, right: Path, pattern: str = "part-*.jsonl") -> int:
    """Rows that one folder has and the other lacks; a row that is there twice counts too."""
    sides = {"a": str(left / pattern), "b": str(right / pattern)}
    text = ("with a as (select user, n, count(*) as times from read_json_auto($a) group by all), "
            "b as (select user, n, count(*) as times from read_json_auto($b) group by all) "
            "select count(*) from a full join b using (user, n) where a.times is distinct from b.times")
    return int(_all(text, sides)[0][0])


def savepoint_query(state: str) -> str:
    """The SQL that opens a state of an open savepoint: plain Parquet, typed columns."""
    return f"select key, value from '{state}/*.parquet'"


def in_savepoint(state: Path) -> dict[str, int]:
    return _pairs(savepoint_query(str(state)))


def _pairs(text: str, path: Path | None = None) -> dict[str, int]:
    return dict(_all(text, [str(path)] if path is not None else None))


def _all(text: str, values: Any) -> list[tuple[Any, ...]]:
    with duckdb.connect() as connection:
        given = [values] if isinstance(values, str) else values
        found: list[tuple[Any, ...]] = connection.execute(text, given).fetchall()
    return found
