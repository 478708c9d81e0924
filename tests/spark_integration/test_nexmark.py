"""NEXMark queries over our state give what plain Spark SQL gives on the same events as a batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.nexmark.events import write_events
from benchmarks.nexmark.queries import QUERIES, differences, expected, run_query

pytestmark = [pytest.mark.spark, pytest.mark.xdist_group("spark")]


@pytest.fixture(scope="module")
def events(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_events(tmp_path_factory.mktemp("nexmark") / "events", 6_000, 3, seed=11)


@pytest.mark.parametrize("name", QUERIES)
def test_a_query_as_a_stream_equals_plain_sql_at_rest(name: str, spark: Any, events: Path, tmp_path: Path) -> None:
    backend = "filesystem" if name in ("q7", "q8") else "rocksdb"
    found, _ = run_query(spark, name, events, tmp_path, backend=backend)
    wanted, missing, extra = differences(found, expected(spark, name, events))
    assert wanted > 3, "the events are such that there is something to find"
    assert (missing, extra) == (0, 0)
