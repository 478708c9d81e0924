"""A savepoint that version 1 of the open format wrote once: every later release reads the same rows out of it."""

from __future__ import annotations

import json
from pathlib import Path

import savepoint
from savepoint.values import to_plain
from statebackend import KeyGroupRange, ListStateDescriptor, ValueStateDescriptor, create_backend

GOLDEN = Path(__file__).resolve().parents[1] / "golden/v1"


def test_the_rows_are_what_they_were() -> None:
    expected = json.loads((GOLDEN / "open-savepoint.json").read_text())
    with savepoint.open(GOLDEN / "open-savepoint") as opened:
        found = {info.name: [to_plain(row) for row in opened.read("count", info.name).read_all().to_pylist()]
                 for info in opened.states()}
    assert found == expected


def test_it_verifies_and_restores() -> None:
    assert savepoint.verify_savepoint(GOLDEN / "open-savepoint")
    with savepoint.open(GOLDEN / "open-savepoint") as opened, create_backend("filesystem") as backend:
        keyed = backend.keyed(uid="count", key_type=str, key_groups=KeyGroupRange(0, 127), restore=opened.handles("count"),
                              source=opened.source)
        total, events = keyed.state(ValueStateDescriptor("total", int)), keyed.state(ListStateDescriptor("events", str))
        keyed.set_current_key("user-11")
        assert (total.value(), events.get()) == (11, ["e0", "e1", "e2"])
