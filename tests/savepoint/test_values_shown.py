"""Values of every type as people see and type them: in text output, look-ups, patches and SQL."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from enum import Enum
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

import savepoint
from checkpoint.storage.files import CheckpointTarget
from checkpoint.storage.metadata import CheckpointMetadata, OperatorEntry, SubtaskEntry
from checkpoint.storage.store import FileStore
from savepoint.diff import changes
from savepoint.naming import parse_assignment
from savepoint.values import from_text, plain_rows
from statebackend import KeyGroupRange, MapStateDescriptor, ValueStateDescriptor, Zoned, create_backend


class Color(Enum):
    RED = 1
    BLUE = 2


@dataclass(frozen=True)
class Place:
    town: str
    id: UUID


@dataclass(frozen=True)
class Visit:
    place: Place
    at: Zoned
    tags: tuple[str, int]


ONE, TWO = UUID(int=1), UUID(int=2)
PLACE = Place("Ulm", ONE)
VISIT = Visit(PLACE, datetime(2024, 5, 6, 7, 8, 9, 10, UTC), ("a", 1))
SHOWN_VISIT = {"place": {"town": "Ulm", "id": str(ONE)}, "at": "2024-05-06T07:08:09.000010+00:00", "tags": ["a", 1]}

# key type, key, how it is typed, how it is shown
KEYS: list[tuple[Any, Any, str, Any]] = [
    (UUID, ONE, str(ONE), str(ONE)),
    (int, 7, "7", 7),
    (str, "7", "7", "7"),
    (bytes, b"\x00\xff", '"AP8="', "AP8="),
    (bool, True, "true", True),
    (float, 1.5, "1.5", 1.5),
    (datetime, datetime(2024, 2, 29, 12), "2024-02-29 12:00", "2024-02-29T12:00:00"),
    (Decimal, Decimal("1.5"), "1.5", "1.5"),
    (date, date(2024, 2, 29), "2024-02-29", "2024-02-29"),
    (Zoned, datetime(2024, 2, 29, 12, tzinfo=UTC), "2024-02-29T12:00:00Z", "2024-02-29T12:00:00+00:00"),
    (tuple[str, int], ("a", 1), '["a", 1]', ["a", 1]),
    (tuple[UUID, int], (TWO, 3), json.dumps([str(TWO), 3]), [str(TWO), 3]),
    (Color, Color.BLUE, "BLUE", "BLUE"),
    (Place, PLACE, json.dumps({"town": "Ulm", "id": str(ONE)}), {"town": "Ulm", "id": str(ONE)}),
]
VALUES: list[tuple[Any, Any, Any]] = [
    (UUID, TWO, str(TWO)),
    (Visit, VISIT, SHOWN_VISIT),
    (UUID | None, None, None),
    (list[UUID], [ONE, TWO], [str(ONE), str(TWO)]),
    (dict[UUID, tuple[int, int]], {ONE: (1, 2)}, [[str(ONE), [1, 2]]]),
    (timedelta, timedelta(days=1, microseconds=5), 86400.000005),
    (time, time(1, 2, 3), "01:02:03"),
    (Decimal, Decimal("2.250"), "2.25"),
    (Zoned, datetime(2024, 1, 1, 1, tzinfo=timezone(timedelta(hours=2))), "2023-12-31T23:00:00+00:00"),
    (float, float("nan"), "nan"),
    (Color, Color.RED, "RED"),
]


def written(folder: Path, key_type: Any, value_type: Any, key: Any, value: Any) -> Path:
    """An open savepoint of one entry, taken from a backend as a job would."""
    store = FileStore.at(str(folder / "native"))
    with create_backend("filesystem") as backend:
        keyed = backend.keyed(uid="op", key_type=key_type, max_parallelism=8, key_groups=KeyGroupRange(0, 7))
        keyed.set_current_key(key)
        keyed.state(ValueStateDescriptor("state", value_type)).update(value)
        keyed.state(MapStateDescriptor("map", UUID, UUID)).put(ONE, TWO)
        target = CheckpointTarget(store, "", "op", 0, inline_threshold=64, self_contained=True)
        handle = keyed.snapshot(1, target, full=True).run()
    entry = OperatorEntry("op", "op", 1, 8, (SubtaskEntry(0, keyed=(handle,)),))
    store.write("_metadata", CheckpointMetadata("0" * 32, "types", 1, 0, "savepoint", operators=(entry,)).to_bytes())
    savepoint.convert_savepoint(folder / "native", folder / "sp")
    return folder / "sp"


def shown(path: Path, state: str = "state", **options: Any) -> Iterator[dict[str, Any]]:
    with savepoint.open(path) as opened:
        for batch in opened.read("op", state, **options):
            yield from plain_rows(batch, opened.column_types("op", state))


@pytest.mark.parametrize(("kind", "key", "typed", "expected"), KEYS, ids=lambda value: str(value)[:30])
def test_a_key_is_shown_typed_found_and_patched_in_one_form(kind, key, typed, expected, tmp_path) -> None:
    path = written(tmp_path, kind, int, key, 1)
    assert [row["key"] for row in shown(path)] == [expected]
    with savepoint.open(path) as opened:
        for text in (typed, json.dumps(expected)):
            assert len(list(shown(path, keys=[from_text(text, opened.key_type("op"))]))) == 1
        [largest] = opened.largest_keys("op", "state")
        assert largest["key"] == expected
        operation = parse_assignment(opened, f"op.state:{typed}=5")
    with savepoint.Edit(path, [operation]) as edit:
        [row] = edit.plan()
        assert (row["key"], row["before"], row["after"]) == (expected, 1, 5)
        edit.write(tmp_path / "new")
    [row] = changes(path, tmp_path / "new")
    assert (row["key"], row["before"], row["after"]) == (expected, 1, 5)


@pytest.mark.parametrize(("kind", "value", "expected"), VALUES, ids=lambda value: str(value)[:30])
def test_a_value_is_shown_and_patched_in_one_form(kind, value, expected, tmp_path) -> None:
    path = written(tmp_path, str, kind, "k", value)
    found = [row["value"] for row in shown(path)]
    if value is None:
        assert found in ([], [None])
        return
    assert found == [expected]
    with savepoint.Edit(path, [{"op": "set", "operator": "op", "state": "state", "key": "new", "value": expected}]) as edit:
        assert [row["after"] for row in edit.plan()] == [expected]
        edit.write(tmp_path / "new")
    assert sorted(row["key"] for row in shown(tmp_path / "new") if row["value"] == expected) == ["k", "new"]


def test_sql_knows_uuids(tmp_path) -> None:
    path = written(tmp_path, UUID, UUID, ONE, TWO)
    with savepoint.open(path) as opened:
        assert opened.query(f"select value from op.state where key = '{ONE}'").read_all().to_pylist() == [
            {"value": str(TWO)}]
        assert opened.query("select map_key, map_value from op.map").read_all().to_pylist() == [
            {"map_key": str(ONE), "map_value": str(TWO)}]
        assert opened.read("op", "state", where=f"value = '{TWO}'", keys=[ONE]).read_all().column("key").to_pylist() == [
            ONE.bytes]


def test_a_decimal_keeps_every_digit_that_was_typed(tmp_path) -> None:
    path = written(tmp_path, Decimal, int, Decimal("12345678901234567.123456789"), 1)
    with savepoint.open(path) as opened:
        key = from_text("12345678901234567.123456789", opened.key_type("op"))
        assert opened.lookup("op", "state", key) == 1
