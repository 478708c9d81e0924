"""Every type: value -> bytes -> value is the identity, keys keep order, array paths equal scalar paths."""

from __future__ import annotations

import dataclasses
import enum
import math
import pickle
import uuid
from contextlib import suppress
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Context, Decimal
from typing import Annotated, Any, NamedTuple, NewType, Optional

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from statebackend.errors import CorruptData, IncompatibleState, InvalidRequest
from statebackend.types import Digits, Pickled, StateType, Zoned, state_type, state_type_from_json


class Colour(enum.Enum):
    RED = 1
    GREEN = "g"
    BLUE = (0, 0, 1)


class Point(NamedTuple):
    x: int
    label: str | None = None


@dataclasses.dataclass
class Address:
    street: str
    number: int = 1


@dataclasses.dataclass
class Person:
    name: str
    born: date
    address: Address
    tags: list[str] = dataclasses.field(default_factory=list)
    seen: dict[str, datetime] = dataclasses.field(default_factory=dict)
    colour: Colour | None = None
    score: float = 0.0


@dataclasses.dataclass(frozen=True, slots=True)
class Place:
    country: str
    zone: int | None
    point: Point


@dataclasses.dataclass
class Lone:
    only: int


@dataclasses.dataclass
class Nothing:
    pass


INTS = st.integers(-2**63, 2**63 - 1)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20) | st.sampled_from(["", "\0", "a\0", "a\0\0b", "é€😀"])
BYTES = st.binary(max_size=20) | st.sampled_from([b"", b"\0", b"\0\xff", b"\xff\0"])
FLOATS = st.floats(allow_nan=False)
MICROS = st.integers(-2**63, 2**63 - 1)
COLOURS = st.sampled_from(list(Colour))
POINTS = st.builds(Point, INTS, st.none() | TEXT)
ADDRESSES = st.builds(Address, TEXT, INTS)
PEOPLE = st.builds(Person, TEXT, st.dates(), ADDRESSES, st.lists(TEXT, max_size=3),
                   st.dictionaries(TEXT, st.datetimes(), max_size=3), st.none() | COLOURS, FLOATS)
PLACES = st.builds(Place, TEXT, st.none() | INTS, POINTS)
SPANS = st.timedeltas(timedelta(days=-100_000), timedelta(days=100_000))


def decimals(precision: int, scale: int) -> st.SearchStrategy[Decimal]:
    limit = 10**precision - 1
    return st.integers(-limit, limit).map(lambda number: Decimal(number).scaleb(-scale, Context(prec=40)))


KEYS: dict[str, tuple[Any, st.SearchStrategy[Any]]] = {
    "int": (int, INTS),
    "int8": (pa.int8(), st.integers(-128, 127)),
    "int32": (pa.int32(), st.integers(-2**31, 2**31 - 1)),
    "uint16": (pa.uint16(), st.integers(0, 2**16 - 1)),
    "uint64": (pa.uint64(), st.integers(0, 2**64 - 1)),
    "float": (float, FLOATS),
    "float32": (pa.float32(), st.floats(width=32, allow_nan=False)),
    "bool": (bool, st.booleans()),
    "str": (str, TEXT),
    "bytes": (bytes, BYTES),
    "bytes of 4": (pa.binary(4), st.binary(min_size=4, max_size=4)),
    "date": (date, st.dates()),
    "datetime": (datetime, st.datetimes()),
    "datetime in s": (pa.timestamp("s"), st.datetimes().map(lambda moment: moment.replace(microsecond=0))),
    "zoned": (Zoned, st.datetimes().map(lambda moment: moment.replace(tzinfo=UTC))),
    "time": (time, st.times()),
    "timedelta": (timedelta, SPANS),
    "timedelta in ms": (pa.duration("ms"), st.integers(-2**40, 2**40).map(lambda ms: timedelta(milliseconds=ms))),
    "decimal": (Decimal, decimals(38, 18)),
    "decimal(10, 2)": (Annotated[Decimal, Digits(10, 2)], decimals(10, 2)),
    "uuid": (uuid.UUID, st.uuids()),
    "enum": (Colour, COLOURS),
    "tuple": (tuple[int, str], st.tuples(INTS, TEXT)),
    "tuple with None": (tuple[str | None, float | None], st.tuples(st.none() | TEXT, st.none() | FLOATS)),
    "nested tuple": (tuple[tuple[bytes, bool], date], st.tuples(st.tuples(BYTES, st.booleans()), st.dates())),
    "fixed tuple": (tuple[int, date, bool], st.tuples(INTS, st.dates(), st.booleans())),
    "named tuple": (Point, POINTS),
    "frozen dataclass": (Place, PLACES),
}
VALUES: dict[str, tuple[Any, st.SearchStrategy[Any]]] = KEYS | {
    "optional int": (Optional[int], st.none() | INTS),  # noqa: UP045
    "optional str": (str | None, st.none() | TEXT),
    "optional list": (list[int] | None, st.none() | st.lists(INTS, max_size=3)),
    "list of int": (list[int], st.lists(INTS, max_size=5)),
    "list of optional": (list[int | None], st.lists(st.none() | INTS, max_size=5)),
    "list of uuid": (list[uuid.UUID], st.lists(st.uuids(), max_size=3)),
    "list of lists": (list[list[str]], st.lists(st.lists(TEXT, max_size=3), max_size=3)),
    "tuple of any length": (tuple[float, ...], st.lists(FLOATS, max_size=5).map(tuple)),
    "dict": (dict[str, int], st.dictionaries(TEXT, INTS, max_size=4)),
    "dict of dicts": (dict[int, dict[str, float]],
                      st.dictionaries(INTS, st.dictionaries(TEXT, FLOATS, max_size=3), max_size=3)),
    "dict by place": (dict[Place, list[Colour]], st.dictionaries(PLACES, st.lists(COLOURS, max_size=2), max_size=3)),
    "dict by date": (dict[date, Decimal], st.dictionaries(st.dates(), decimals(38, 18), max_size=3)),
    "dataclass": (Person, PEOPLE),
    "list of dataclasses": (list[Person], st.lists(PEOPLE, max_size=2)),
    "dataclass of one field": (Lone, st.builds(Lone, INTS)),
    "dataclass of no field": (Nothing, st.just(Nothing())),
    "struct": (pa.struct({"a": pa.int64(), "b": pa.list_(pa.string())}),
               st.fixed_dictionaries({"a": st.none() | INTS, "b": st.none() | st.lists(st.none() | TEXT, max_size=2)})),
    "arrow map": (pa.map_(pa.string(), pa.float64()), st.dictionaries(TEXT, st.none() | FLOATS, max_size=3)),
    "pickled": (Pickled(bytearray), BYTES.map(bytearray)),
}


def each(cases: dict[str, Any]) -> Any:
    return pytest.mark.parametrize("case", list(cases))


@each(VALUES)
def test_value_to_bytes_and_back_is_the_identity(case: str) -> None:
    annotation, strategy = VALUES[case]
    kind = state_type(annotation)

    @settings(max_examples=40, deadline=None)
    @given(strategy)
    def run(value: Any) -> None:
        kind.check(value)
        data = kind.encode(value)
        assert type(data) is bytes
        again = kind.decode(data)
        assert again == value
        assert type(again) is type(value)
        assert kind.encode(again) == data
        if kind.fixed_value_width is not None:
            assert len(data) == kind.fixed_value_width

    run()


@each(VALUES)
def test_arrays_encode_and_decode_like_single_values(case: str) -> None:
    annotation, strategy = VALUES[case]
    kind = state_type(annotation)

    @settings(max_examples=25, deadline=None)
    @given(st.lists(st.none() | strategy, max_size=6), st.integers(0, 2))
    def run(values: list[Any], skipped: int) -> None:
        column = kind.to_arrow(values)
        assert column.type == kind.arrow_type
        assert kind.from_arrow(column) == values
        part, rest = column.slice(skipped), values[skipped:]
        assert kind.from_arrow(part) == rest
        encoded = kind.encode_array(part)
        assert encoded.type == pa.binary()
        encoded.validate(full=True)
        missing = kind.encode(None) if kind.nullable else None
        assert encoded.to_pylist() == [missing if value is None else kind.encode(value) for value in rest]
        decoded = kind.decode_array(encoded)
        decoded.validate(full=True)
        assert decoded.type == kind.arrow_type
        assert kind.from_arrow(decoded) == rest

    run()


@each(KEYS)
def test_keys_keep_their_order_and_tell_where_they_end(case: str) -> None:
    annotation, strategy = KEYS[case]
    kind = state_type(annotation)
    kind.require_key()

    @settings(max_examples=40, deadline=None)
    @given(st.lists(strategy, max_size=6), st.binary(max_size=3), st.binary(max_size=3))
    def run(values: list[Any], before: bytes, after: bytes) -> None:
        for value in values:
            data = kind.encode_key(value)
            assert kind.decode_key(data) == value
            assert kind.decode_key_from(before + data + after, len(before)) == (value, len(before) + len(data))
            if kind.fixed_key_width is not None:
                assert len(data) == kind.fixed_key_width
        ordered = sorted(values, key=kind.encode_key)
        assert [rank(value) for value in ordered] == sorted(rank(value) for value in values)

    run()


def rank(value: Any) -> Any:
    """What keys are ordered by: None first, enums by name, records field by field."""
    if isinstance(value, Place):
        value = dataclasses.astuple(value)
    if isinstance(value, tuple):
        return tuple(rank(field) for field in value)
    if value is None:
        return (0,)
    return (1, value.name if isinstance(value, Colour) else value)


@each(KEYS)
def test_key_arrays_encode_and_decode_like_single_keys(case: str) -> None:
    annotation, strategy = KEYS[case]
    kind = state_type(annotation)

    @settings(max_examples=25, deadline=None)
    @given(st.lists(st.none() | strategy, max_size=6), st.integers(0, 2))
    def run(values: list[Any], skipped: int) -> None:
        part, rest = kind.to_arrow(values).slice(skipped), values[skipped:]
        encoded = kind.encode_key_array(part)
        assert encoded.to_pylist() == [None if value is None else kind.encode_key(value) for value in rest]
        assert kind.from_arrow(kind.decode_key_array(encoded)) == rest

    run()


@each(KEYS)
def test_keys_inside_longer_bytes_are_read_as_columns(case: str) -> None:
    annotation, strategy = KEYS[case]
    kind, text = state_type(annotation), state_type(str)

    @settings(max_examples=25, deadline=None)
    @given(st.lists(st.tuples(strategy, TEXT), max_size=6), st.integers(0, 2))
    def run(pairs: list[Any], skipped: int) -> None:
        rows = pa.array([b"\0\0ab" + kind.encode_key(key) + text.encode_key(rest) for key, rest in pairs], pa.binary())
        keys, offsets = kind.decode_keys_at(rows.slice(skipped), 4)
        texts, ends = text.decode_keys_at(rows.slice(skipped), offsets)
        assert list(zip(kind.from_arrow(keys), texts.to_pylist())) == pairs[skipped:]
        assert ends.tolist() == [len(row) for row in rows.to_pylist()[skipped:]]

    run()


@each(VALUES)
def test_a_type_survives_json_without_its_classes(case: str) -> None:
    annotation, strategy = VALUES[case]
    kind = state_type(annotation)
    plain = state_type_from_json(kind.to_json())
    assert plain == kind
    assert hash(plain) == hash(kind)
    assert plain.to_json() == kind.to_json()
    assert plain.arrow_type == kind.arrow_type

    @settings(max_examples=10, deadline=None)
    @given(strategy)
    def run(value: Any) -> None:
        data = kind.encode(value)
        assert plain.encode(plain.decode(data)) == data

    run()


@each(VALUES)
def test_a_type_can_be_sent_to_another_process(case: str) -> None:
    kind = state_type(VALUES[case][0])
    again = pickle.loads(pickle.dumps(kind))
    assert again == kind
    assert again.python_type is kind.python_type


@each(VALUES)
def test_a_copy_is_equal_and_shares_nothing_that_can_change(case: str) -> None:
    annotation, strategy = VALUES[case]
    kind = state_type(annotation)

    @settings(max_examples=10, deadline=None)
    @given(strategy)
    def run(value: Any) -> None:
        again = kind.copy(value)
        assert again == value
        assert (again is value) if kind.immutable or value is None else (again is not value)

    run()


def test_nested_copies_are_independent() -> None:
    kind = state_type(Person)
    person = Person("a", date(2020, 1, 1), Address("s"), ["x"], {"k": datetime(2020, 1, 1)})
    again = kind.copy(person)
    again.address.number = 9
    again.tags.append("y")
    again.seen.clear()
    assert person == Person("a", date(2020, 1, 1), Address("s"), ["x"], {"k": datetime(2020, 1, 1)})


def test_instants_come_back_in_utc_as_the_same_instant() -> None:
    kind = state_type(Zoned)
    there = datetime(2024, 5, 1, 12, 0, 0, 123456, timezone(timedelta(hours=5, minutes=45)))
    back = kind.decode(kind.encode(there))
    assert back == there
    assert back.tzinfo is UTC
    assert kind.encode_key(there) == kind.encode_key(there.astimezone(UTC))
    assert kind.arrow_type == pa.timestamp("us", "UTC")
    assert kind.from_arrow(kind.to_arrow([there])) == [there]


def test_nan_is_one_key_after_all_numbers_and_zero_has_no_sign() -> None:
    kind = state_type(float)
    negative_nan = math.copysign(math.nan, -1)
    assert kind.encode_key(math.nan) == kind.encode_key(negative_nan) > kind.encode_key(math.inf)
    assert kind.encode_key(-0.0) == kind.encode_key(0.0)
    column = kind.encode_key_array(pa.array([math.nan, negative_nan, -0.0, 0.0], pa.float64(), from_pandas=False))
    assert len(set(column.to_pylist())) == 2
    assert math.isnan(kind.decode(kind.encode(math.nan)))
    assert math.copysign(1, kind.decode(kind.encode(-0.0))) == -1


def test_an_integer_is_taken_for_a_float_and_comes_back_as_one() -> None:
    kind = state_type(float)
    kind.check(3)
    assert type(kind.decode(kind.encode(3))) is float
    assert state_type(tuple[float, int]).decode(state_type(tuple[float, int]).encode((3, 4))) == (3.0, 4)
    with pytest.raises(InvalidRequest, match="exact range"):
        kind.check(2**53 + 1)
    with pytest.raises(InvalidRequest, match="exact range"):
        kind.check(10**400)


@pytest.mark.parametrize(("annotation", "value", "named"), [
    (int, True, "bool"), (int, 1.0, "float"), (int, None, "NoneType"), (int, 2**63, "out of the range"),
    (int, -2**63 - 1, "out of the range"), (pa.int8(), 128, "8 bits"), (pa.uint8(), -1, "8 bits"), (float, "1", "str"),
    (float, True, "bool"), (pa.float32(), 0.1, "32-bit"), (bool, 1, "int"), (str, b"a", "bytes"), (str, "\ud800", "Unicode"),
    (bytes, "a", "str"), (bytes, bytearray(b"a"), "bytearray"), (date, datetime(2020, 1, 1), "datetime"),
    (datetime, date(2020, 1, 1), "date"), (datetime, datetime(2020, 1, 1, tzinfo=UTC), "Zoned"),
    (Zoned, datetime(2020, 1, 1), "without a zone"), (timedelta, 3, "int"), (Decimal, 1.5, "float"),
    (Annotated[Decimal, Digits(4, 2)], Decimal("1.234"), "digits"),
    (Annotated[Decimal, Digits(4, 2)], Decimal(100), "digits"),
    (Decimal, Decimal("NaN"), "number"), (uuid.UUID, "a", "str"), (Colour, "RED", "str"), (list[int], (1,), "tuple"),
    (list[int], [1, "a"], "str"), (dict[str, int], {1: 1}, "int"), (tuple[int, str], (1,), "1 fields instead of 2"),
    (Person, Address("a"), "Address"), (Point, (1, "a"), "tuple"), (Address, Address(1), "street"),
    (pa.timestamp("s"), datetime(2020, 1, 1, 0, 0, 0, 1), "finer"), (time, time(1, tzinfo=UTC), "zone"),
    (Pickled(set), [1], "list"), (pa.struct({"a": pa.int64()}), {"b": 1}, "other fields"),
])
def test_a_value_of_another_type_is_refused_and_named(annotation: Any, value: Any, named: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        state_type(annotation).check(value)
    assert named in str(caught.value)
    assert "expected" in caught.value.context


@pytest.mark.parametrize("annotation", [object, complex, set[int], list, dict, int | str, "int", None, frozenset[int],
                                        pa.null(), pa.timestamp("ns"), Any])
def test_an_annotation_without_a_codec_is_refused_with_what_to_use(annotation: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        state_type(annotation)
    assert caught.value.hint


def test_a_class_that_contains_itself_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="contains itself"):
        state_type(Tree)


@dataclasses.dataclass
class Tree:
    children: list[Tree]


@pytest.mark.parametrize("annotation", [list[int], dict[str, int], int | None, tuple[int, list[int]], Pickled(set), Address,
                                        tuple[int, ...], tuple[()]])
def test_lists_maps_none_and_changeable_records_are_refused_as_keys(annotation: Any) -> None:
    with pytest.raises(InvalidRequest, match="can't be a key"):
        state_type(annotation).require_key()


@pytest.mark.parametrize(("annotation", "data"), [
    (int, b"123"), (float, b""), (bool, b"\x02"), (str, b"\xff"), (date, b"\xff\xff\xff\x7f"),
    (datetime, b"\xff" * 7 + b"\x7f"),
    (Decimal, b"1"), (uuid.UUID, b"1"), (Colour, b"MAUVE"), (int | None, b"\x02"), (list[int], b"\xc1"),
    (list[int], b"\x91\xa1a"), (tuple[int, str], b"\x91\x01"), (Person, b""), (time, b"\xff" * 8),
    (dict[str, uuid.UUID], b"\x81\xa1a\xc4\x01a"), (list[date], b"\x91\xce\x7f\xff\xff\xff"), (pa.binary(2), b"a"),
])
def test_bytes_that_no_value_encodes_to_are_named_as_damage(annotation: Any, data: bytes) -> None:
    kind = state_type(annotation)
    with pytest.raises(CorruptData, match="stored bytes are no"):
        kind.decode(data)
    with pytest.raises(CorruptData):
        kind.from_arrow(kind.decode_array(pa.array([data], pa.binary())))


@each(VALUES)
def test_any_bytes_are_a_value_or_named_as_damage(case: str) -> None:
    annotation, strategy = VALUES[case]
    kind = state_type(annotation)
    if case == "pickled":
        return  # the job's own class is unpickled, which is what was asked for
    readers = [kind.decode, lambda data: kind.from_arrow(kind.decode_array(pa.array([data], pa.binary())))]
    if case in KEYS:
        readers += [kind.decode_key, lambda data: kind.from_arrow(kind.decode_key_array(pa.array([data], pa.binary()))),
                    lambda data: kind.from_arrow(kind.decode_keys_at(pa.array([data], pa.binary()))[0])]

    @settings(max_examples=30, deadline=None)
    @given(st.data())
    def run(draw: Any) -> None:
        whole = kind.encode(draw.draw(strategy))
        noise = draw.draw(st.binary(max_size=24))
        cut = draw.draw(st.integers(0, len(whole)))
        for data in (noise, whole[:cut], whole[:cut] + noise, whole[:cut] + noise + whole[cut:]):
            for read in readers:
                with suppress(CorruptData):
                    read(data)

    run()


@pytest.mark.parametrize(("annotation", "data"), [
    (int, b"123"), (str, b"abc"), (str, b"abc\0"), (str, b"a\0\x01"), (int, b"\0" * 9), (bool, b""), (uuid.UUID, b"1"),
    (tuple[int, str], b"\0" * 8), (Decimal, b"\0" * 15), (float, b"\0" * 7), (date, b"\0" * 3),
])
def test_damaged_keys_are_named(annotation: Any, data: bytes) -> None:
    kind = state_type(annotation)
    with pytest.raises(CorruptData):
        kind.decode_key(data)
    with pytest.raises(CorruptData):
        kind.decode_key_array(pa.array([data], pa.binary()))


def test_columns_are_cast_where_nothing_is_lost_and_refused_where_they_would_be_parsed() -> None:
    kind = state_type(int)
    assert kind.from_arrow(pa.array([1, 2], pa.int16())) == [1, 2]
    assert kind.from_arrow(pa.chunked_array([[1], [2]])) == [1, 2]
    assert kind.from_arrow(pa.chunked_array([], pa.int64())) == []
    assert state_type(str).from_arrow(pa.array(["a", "a"]).dictionary_encode()) == ["a", "a"]
    assert state_type(str).from_arrow(pa.array(["a"], pa.large_string())) == ["a"]
    assert state_type(float).from_arrow(pa.array([1])) == [1.0]
    assert state_type(int).from_arrow(pa.nulls(1)) == [None]
    for wrong in (pa.array(["1"]), pa.array([1.0]), pa.array([True]), pa.array([2**64 - 1], pa.uint64())):
        with pytest.raises(InvalidRequest) as caught:
            kind.conform(wrong)
        assert caught.value.context["expected"] == "int64"


def test_a_newer_codec_version_is_refused() -> None:
    with pytest.raises(IncompatibleState, match="codec version"):
        state_type_from_json({"codec_version": 99, "type": "int"})
    with pytest.raises(CorruptData):
        state_type_from_json({"codec_version": 1, "type": "unheard of"})


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return pytest.fail, ("unpickled",)


def test_a_pickled_type_read_from_json_never_unpickles() -> None:
    stored = pickle.dumps(Evil())
    kind = state_type_from_json(Pickled(Evil).to_json())
    assert kind.decode(stored) == stored
    assert kind.from_arrow(kind.decode_array(pa.array([stored]))) == [stored]
    inner = state_type_from_json(state_type(list[Pickled(Evil)]).to_json())  # type: ignore[misc]
    assert inner.decode(inner.encode([stored])) == [stored]


def test_an_init_does_not_run_again_on_decoding() -> None:
    kind = state_type(Checked)
    assert kind.decode(kind.encode(Checked(3))) == Checked(3)
    assert Checked.made == 2


@dataclasses.dataclass
class Checked:
    value: int
    made = 0

    def __post_init__(self) -> None:
        Checked.made += 1


def test_types_read_well() -> None:
    assert str(state_type(dict[str, list[int | None]])) == "dict[str, list[int | None]]"
    assert str(state_type(Address)) == "Address(street: str, number: int)"
    assert str(state_type(Decimal)) == "decimal(38, 18)"
    assert "tuple[int, ...]" in repr(state_type(tuple[int, ...]))


def test_columns_of_other_writers_are_taken() -> None:
    lists = pa.array([[1, 2]], pa.list_(pa.field("element", pa.int64(), nullable=False)))
    assert state_type(list[int]).from_arrow(lists) == [[1, 2]]
    assert state_type(list[int]).from_arrow(pa.array([[1]], pa.large_list(pa.int32()))) == [[1]]
    maps = pa.array([[("a", 1)]], pa.map_(pa.string(), pa.int32()))
    assert state_type(dict[str, int]).from_arrow(maps) == [{"a": 1}]
    structs = pa.array([{"street": "s", "number": 3}], pa.struct({"street": pa.large_string(), "number": pa.int16()}))
    assert state_type(Address).from_arrow(structs) == [Address("s", 3)]
    assert state_type(datetime).from_arrow(pa.array([datetime(2020, 1, 1)], pa.timestamp("ns"))) == [datetime(2020, 1, 1)]
    there = uuid.UUID(int=5)
    column = pa.array([there.bytes], pa.uuid())
    assert state_type(pa.uuid()).from_arrow(column) == state_type(uuid.UUID).from_arrow(column) == [there]


UserId = NewType("UserId", int)


def test_a_new_type_is_the_type_it_names() -> None:
    assert state_type(UserId) == state_type(int)


def test_an_instant_that_utc_can_not_show_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="9999"):
        state_type(Zoned).check(datetime(9999, 12, 31, 23, tzinfo=timezone(timedelta(hours=-5))))


def test_a_state_type_is_taken_as_it_is() -> None:
    kind: StateType = state_type(int)
    assert state_type(kind) is kind
