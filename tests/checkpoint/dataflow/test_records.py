"""The codec of records: whatever goes in comes out, and nothing else is accepted."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from typing import NamedTuple
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkpoint.dataflow.records import RecordCodec
from checkpoint.runtime.contracts import Records
from statebackend import CorruptData, IncompatibleState, InvalidRequest

scalars = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(), st.binary(),
                    st.decimals(allow_nan=False), st.uuids(), st.datetimes(), st.dates(), st.times(), st.timedeltas())
values = st.recursive(scalars, lambda inner: st.one_of(
    st.lists(inner, max_size=4), st.tuples(inner, inner), st.dictionaries(st.text(), inner, max_size=4),
    st.dictionaries(st.tuples(st.integers(), st.text()), inner, max_size=3),
    st.sets(st.integers(), max_size=4), st.frozensets(st.text(), max_size=4)), max_leaves=10)


class Point(NamedTuple):
    x: int
    tags: set[str]


@dataclass
class Click:
    user: str
    at: datetime


@given(st.lists(values, max_size=8))
def test_every_value_comes_back_equal_and_of_its_type(batch):
    decoded = RecordCodec().decode(RecordCodec().encode(Records(batch))).values
    assert decoded == batch
    assert [type(value) for value in decoded] == [type(value) for value in batch]


def test_timestamps_and_keys_travel_with_the_values():
    records = Records(["a", "b"], [1, None], [("k", 1), ("k", 2)])
    decoded = RecordCodec().decode(RecordCodec().encode(records))
    assert (decoded.values, decoded.timestamps, decoded.keys) == (records.values, records.timestamps, records.keys)


@pytest.mark.parametrize(("kind", "value"), [
    (Point, Point(2**70, {"a"})), (Click, Click("ann", datetime(2026, 11, 18, 13, 0, tzinfo=UTC)))])
def test_records_of_a_record_type_come_back_as_such(kind, value):
    codec = RecordCodec(kind)
    assert codec.decode(codec.encode(Records([value]))).values == [value]


def test_special_values_keep_their_type():
    batch = [date(2026, 1, 2), time(3, 4, 5), timedelta(days=-1, microseconds=7), Decimal("1.20"),
             UUID(int=5), 2**64, -(2**63) - 1, (1, (2, [3])), {"a": {1, 2}}]
    assert RecordCodec().decode(RecordCodec().encode(Records(batch))).values == batch


def test_an_object_of_another_class_is_refused_with_the_way_out():
    with pytest.raises(InvalidRequest, match="record_type"):
        RecordCodec().encode(Records([object()]))


def test_a_newer_version_and_damage_are_told_apart():
    data = RecordCodec().encode(Records([1, 2, 3]))
    with pytest.raises(IncompatibleState, match="version"):
        RecordCodec().decode(bytes([99]) + data[1:])
    with pytest.raises(CorruptData):
        RecordCodec().decode(data[:-2])
    with pytest.raises(IncompatibleState):
        RecordCodec().decode(b"")


def test_typed_records_need_their_type_again():
    data = RecordCodec(Point).encode(Records([Point(1, set())]))
    with pytest.raises(IncompatibleState, match="record_type"):
        RecordCodec().decode(data)
