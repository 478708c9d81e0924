"""Schemas: what is compatible, what is migrated and how its bytes follow, what is refused and how it is said."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field, make_dataclass, replace
from datetime import datetime
from decimal import Decimal
from typing import Annotated, Any

import pyarrow as pa
import pytest

from statebackend import (
    AggregatingStateDescriptor,
    CorruptData,
    IncompatibleState,
    InvalidRequest,
    ListStateDescriptor,
    MapStateDescriptor,
    ReducingStateDescriptor,
    TimeDomain,
    TtlConfig,
    ValueStateDescriptor,
)
from statebackend.entries import pack_time
from statebackend.schema import (
    StateSchema,
    Verdict,
    column_migrator_of,
    compare_schemas,
    is_identity,
    migrator,
    require_compatible,
    require_key_type,
    state_id_of,
    united_schema,
)
from statebackend.ttl import NEVER
from statebackend.types import Digits, state_type


class Two(enum.Enum):
    A = 1
    B = 2


class Three(enum.Enum):
    A = 1
    B = 2
    C = 3


@dataclass
class Inner:
    x: int


@dataclass
class WiderInner:
    x: int
    y: str = "?"


@dataclass
class Old:
    name: str
    count: Annotated[int, pa.int32()]
    inner: Inner
    gone: float = 0.0


@dataclass
class New:
    count: int
    name: str
    inner: WiderInner
    tags: list[str] = field(default_factory=lambda: ["new"])
    note: str | None = None
    size: WiderInner = field(default_factory=lambda: WiderInner(7))


@dataclass
class NoDefault:
    x: int
    y: str


def value(annotation: Any, **options: Any) -> StateSchema:
    return StateSchema.of(ValueStateDescriptor("s", annotation, **options), 7)


@pytest.mark.parametrize("schema", [
    value(int), value(Old), value(Two, ttl=TtlConfig("7d")),
    StateSchema.of(ListStateDescriptor("l", Old), 1),
    StateSchema.of(MapStateDescriptor("m", str, dict[str, int]), 2, int),
    StateSchema.of(ReducingStateDescriptor("r", int, "sum"), 3, tuple[int, int]),
    StateSchema.of(ReducingStateDescriptor("f", int, lambda a, b: a), 3),
    StateSchema.of(AggregatingStateDescriptor("a", float, "avg"), 4),
])
def test_a_schema_survives_json_without_its_classes(schema: StateSchema) -> None:
    again = StateSchema.from_json(schema.to_json())
    assert again == schema
    assert again.to_json() == schema.to_json()
    assert compare_schemas(again, schema).verdict is Verdict.COMPATIBLE
    assert is_identity(again, schema)


def test_damaged_or_newer_schemas_are_named() -> None:
    data = value(int).to_json()
    with pytest.raises(IncompatibleState, match="version"):
        StateSchema.from_json({**data, "version": 2})
    for wrong in ({"version": 1}, {**data, "state_id": "x"}, {**data, "value_type": {"codec_version": 1, "type": "?"}},
                  {**data, "ttl": {}}):
        with pytest.raises(CorruptData):
            StateSchema.from_json(wrong)


def test_state_ids_come_from_the_name_and_evade_those_taken() -> None:
    first = state_id_of("count", ())
    assert 0 <= first < 65536
    assert state_id_of("count", ()) == first
    assert state_id_of("count", {first}) == (first + 1) % 65536
    assert state_id_of("count", {65535, first, (first + 1) % 65536}) == (first + 2) % 65536
    with pytest.raises(InvalidRequest):
        state_id_of("count", range(65536))


MIGRATED: list[tuple[Any, Any, Any, Any]] = [
    # old type, new type, a value, what becomes of it
    (pa.int32(), int, -5, -5),
    (pa.uint8(), pa.int16(), 255, 255),
    (pa.uint32(), int, 2**32 - 1, 2**32 - 1),
    (pa.int32(), float, -5, -5.0),
    (int, float, 2**53, 2.0**53),
    (int, float, -2**62, -2.0**62),
    (pa.uint64(), float, 2**63, 2.0**63),
    (list[int], list[float], [1, 2], [1.0, 2.0]),
    (pa.int16(), pa.float32(), 7, 7.0),
    (pa.float32(), float, 1.5, 1.5),
    (pa.int16(), Annotated[Decimal, Digits(8, 2)], -31, Decimal(-31)),
    (Annotated[Decimal, Digits(5, 2)], Annotated[Decimal, Digits(9, 4)], Decimal("123.45"), Decimal("123.45")),
    (pa.timestamp("s"), datetime, datetime(2024, 1, 1), datetime(2024, 1, 1)),
    (pa.binary(2), bytes, b"ab", b"ab"),
    (int, int | None, 5, 5),
    (pa.int32(), int | None, 5, 5),
    (pa.int32(), float | None, 5, 5.0),
    (list[Annotated[int, pa.int8()]], list[int], [1, 2], [1, 2]),
    (dict[str, Inner], dict[str, WiderInner], {"a": Inner(1)}, {"a": WiderInner(1)}),
    (tuple[Annotated[int, pa.int8()], str], tuple[int, str | None], (1, "a"), (1, "a")),
    (Inner, WiderInner, Inner(4), WiderInner(4)),
    (WiderInner, Inner, WiderInner(4, "z"), Inner(4)),
    (Old, New, Old("n", 5, Inner(6), 2.5), New(5, "n", WiderInner(6), ["new"], None, WiderInner(7))),
    (list[Old] | None, list[New] | None, [Old("n", 5, Inner(6))], [New(5, "n", WiderInner(6))]),
]


@pytest.mark.parametrize("case", range(len(MIGRATED)))
def test_a_change_that_loses_nothing_is_migrated(case: int) -> None:
    before, after, stored, expected = MIGRATED[case]
    old, new = value(before), value(after)
    comparison = require_compatible(old, new)
    assert comparison.verdict is Verdict.MIGRATED
    assert comparison.reasons
    assert not is_identity(old, new)
    restored = StateSchema.from_json(old.to_json())
    data = old.value_type.encode(stored)
    migrated = migrator(restored, new)(data)
    again = new.value_type.decode(migrated)
    assert again == expected
    assert type(again) is type(expected)
    column = column_migrator_of(restored, new)(pa.array([data, None, data], pa.binary()))
    assert column.to_pylist() == [migrated, None, migrated]


def test_a_number_that_no_float_holds_is_refused_when_it_is_met() -> None:
    old, new = value(int), value(float)
    good, bad = old.value_type.encode(7), old.value_type.encode(2**53 + 1)
    with pytest.raises(IncompatibleState, match="9007199254740993"):
        migrator(old, new)(bad)
    with pytest.raises(IncompatibleState, match="9007199254740993"):
        column_migrator_of(old, new)(pa.array([good, bad, good], pa.binary()))


@pytest.mark.parametrize(("before", "after"), [
    (int, pa.int32()), (float, pa.float32()), (int, pa.float32()), (float, int), (int, str), (str, int), (int | None, int),
    (Inner, NoDefault), (Three, Two), (datetime, pa.timestamp("s")), (pa.timestamp("us", "UTC"), datetime),
    (bytes, pa.binary(2)),
    (tuple[int, str], tuple[int, str, int]), (list[int], dict[int, int]), (list[int], list[str]), (Inner, int),
    (dict[str, int], dict[int, int]), (pa.uint64(), int), (int, pa.uint64()),
    (Annotated[Decimal, Digits(9, 4)], Annotated[Decimal, Digits(9, 2)]), (tuple[int, str], Inner), (str, bytes),
])
def test_a_change_that_could_lose_something_is_refused_with_both_schemas_and_the_way_out(before: Any, after: Any) -> None:
    old, new = StateSchema.from_json(value(before).to_json()), value(after)
    assert compare_schemas(old, new).verdict is Verdict.REFUSED
    with pytest.raises(IncompatibleState) as caught:
        require_compatible(old, new)
    error = caught.value
    assert error.context["state"] == "s"
    assert error.context["stored"] == str(old)
    assert error.context["declared"] == str(new)
    assert "savepoint" in (error.hint or "")
    with pytest.raises(IncompatibleState):
        migrator(old, new)


def test_an_enum_may_gain_members() -> None:
    assert compare_schemas(value(Two), value(Three)).verdict is Verdict.COMPATIBLE
    assert is_identity(value(Two), value(Three))


def test_another_kind_map_key_namespace_or_function_is_refused() -> None:
    def reducing(function: Any) -> StateSchema:
        return StateSchema.of(ReducingStateDescriptor("s", int, function), 7)

    def mapped(key: Any, namespace: Any = None) -> StateSchema:
        return StateSchema.of(MapStateDescriptor("s", key, int), 7, namespace)

    refused = [(value(int), StateSchema.of(ListStateDescriptor("s", int), 7)), (mapped(str), mapped(int)),
               (mapped(int), mapped(str)), (mapped(str, int), mapped(str)), (mapped(str, int), mapped(str, str)),
               (reducing("sum"), reducing("max"))]
    for old, new in refused:
        assert compare_schemas(old, new).verdict is Verdict.REFUSED, (old, new)
    fine = [(mapped(pa.int16()), mapped(int)), (mapped(str), mapped(str, int)),
            (reducing("sum"), reducing(lambda a, b: a + b)),
            (mapped(Two), mapped(Three)), (mapped(tuple[int, Two]), mapped(tuple[int, Three]))]
    for old, new in fine:
        assert compare_schemas(old, new).verdict is Verdict.COMPATIBLE, (old, new)


def test_a_key_type_that_spreads_keys_otherwise_is_refused() -> None:
    require_key_type(state_type(pa.int32()), state_type(int), "op")
    require_key_type(state_type(Two), state_type(Three), "op")
    for old, new in ((int, str), (float, int), (int, pa.int32()), (pa.uint32(), int), (str, bytes), (tuple[int], int)):
        with pytest.raises(IncompatibleState) as caught:
            require_key_type(state_type(old), state_type(new), "op")
        assert caught.value.context["operator"] == "op"


def test_ttl_may_be_switched_on_and_off() -> None:
    plain, expiring = value(pa.int32()), value(int, ttl=TtlConfig("10s"))
    comparison = compare_schemas(plain, expiring)
    assert comparison.verdict is Verdict.MIGRATED
    assert "TTL was switched on" in comparison.reasons
    data = plain.value_type.encode(5)
    on = migrator(plain, expiring, now_ms=1000)(data)
    assert on == pack_time(11_000) + expiring.value_type.encode(5)
    off = migrator(expiring, value(int))(on)
    assert off == expiring.value_type.encode(5)
    column = pa.array([data, None])
    assert column_migrator_of(plain, expiring, 1000)(column).to_pylist() == [on, None]
    assert column_migrator_of(expiring, value(int))(pa.array([on, None])).to_pylist() == [off, None]


def test_an_expiry_stays_when_only_the_value_changes() -> None:
    old, new = value(pa.int32(), ttl=TtlConfig("10s")), value(int, ttl=TtlConfig("20s"))
    data = pack_time(77) + old.value_type.encode(5)
    expected = pack_time(77) + new.value_type.encode(5)
    assert migrator(old, new, 1000)(data) == expected
    assert column_migrator_of(old, new, 1000)(pa.array([data, None])).to_pylist() == [expected, None]


def test_another_length_of_ttl_is_compatible_and_another_clock_starts_anew() -> None:
    short, long = value(int, ttl=TtlConfig("10s")), value(int, ttl=TtlConfig("20s"))
    assert compare_schemas(short, long).verdict is Verdict.COMPATIBLE
    assert is_identity(short, long)
    event = value(int, ttl=TtlConfig("20s", time=TimeDomain.EVENT))
    assert compare_schemas(short, event).verdict is Verdict.MIGRATED
    data = pack_time(77) + short.value_type.encode(5)
    assert migrator(short, event, 1000)(data) == pack_time(21_000) + short.value_type.encode(5)
    assert migrator(short, event, -2**63)(data) == pack_time(NEVER) + short.value_type.encode(5)
    assert column_migrator_of(short, event, 1000)(pa.array([data])).to_pylist() == [migrator(short, event, 1000)(data)]


def test_the_same_schema_is_the_identity() -> None:
    schema = value(Old)
    data = schema.value_type.encode(Old("a", 1, Inner(2)))
    assert migrator(StateSchema.from_json(schema.to_json()), schema)(data) is data
    column = pa.array([data])
    assert column_migrator_of(schema, schema)(column) is column


def test_schemas_read_well() -> None:
    assert str(value(int, ttl=TtlConfig("10s"))) == "value[int], ttl 0:00:10"
    assert str(StateSchema.of(MapStateDescriptor("m", str, float), 1, int)) == "map[str, float], namespace int"


def test_a_namespace_must_be_a_key() -> None:
    with pytest.raises(InvalidRequest, match="can't be a key"):
        StateSchema.of(ValueStateDescriptor("s", int), 1, list[int])


def test_parts_of_a_checkpoint_are_held_under_the_schema_that_the_other_migrates_to() -> None:
    narrow, wide = value(pa.int16()), value(int)
    assert united_schema(narrow, wide) == united_schema(wide, narrow) == wide
    plain, aged = value(int), value(int, ttl=TtlConfig("1h"))
    assert united_schema(plain, aged) == united_schema(aged, plain) == aged
    none, one, two = (value(make_dataclass("R", fields)) for fields in
                      ([("x", int)], [("x", int), ("y", int, 7)], [("x", int), ("y", int)]))
    assert united_schema(none, one) == united_schema(one, none) == one, "nothing is lost where that can be"
    assert united_schema(none, two) == united_schema(two, none) == none, "a field can't be made up, so it was dropped"
    renamed = value(make_dataclass("R", [("x", int), ("z", int, 0)]))
    with pytest.raises(IncompatibleState, match="disagree"):
        united_schema(one, renamed)


def test_parts_of_a_checkpoint_may_differ_in_a_namespace_not_seen() -> None:
    plain = StateSchema.of(ValueStateDescriptor("total", int), 7)
    windowed = replace(plain, namespace_type=state_type(int), state_id=9)
    assert united_schema(plain, windowed) == replace(windowed, state_id=7)
    assert united_schema(windowed, plain) == windowed
    with pytest.raises(IncompatibleState, match="disagree"):
        united_schema(windowed, replace(plain, namespace_type=state_type(str)))
    with pytest.raises(IncompatibleState, match="disagree"):
        united_schema(plain, replace(plain, value_type=state_type(str)))
