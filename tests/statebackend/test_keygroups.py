"""Key groups: ranges, subtasks, and the same hash one key at a time and over columns."""

from __future__ import annotations

import math
import uuid
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from statebackend import (
    InvalidRequest,
    KeyGroupRange,
    default_max_parallelism,
    key_group_of,
    key_group_range,
    key_groups_of,
    subtask_of,
)
from statebackend.keygroups import key_grouper, key_hasher
from statebackend.types import state_type


@given(st.integers(1, 200), st.integers(1, 2000))
def test_the_ranges_of_all_subtasks_are_disjoint_and_cover_every_group(parallelism: int, extra: int) -> None:
    maximum = min(parallelism + extra, 32768)
    ranges = [key_group_range(index, parallelism, maximum) for index in range(parallelism)]
    assert [group for groups in ranges for group in groups] == list(range(maximum))
    for index, groups in enumerate(ranges):
        assert {subtask_of(group, parallelism, maximum) for group in groups} == {index}


@pytest.mark.parametrize(("parallelism", "expected"), [(1, 128), (85, 128), (86, 256), (128, 256), (200, 512),
                                                       (20_000, 32768), (32768, 32768)])
def test_default_max_parallelism_is_the_next_power_of_two_of_one_and_a_half(parallelism: int, expected: int) -> None:
    assert default_max_parallelism(parallelism) == expected


def test_a_range_includes_both_ends() -> None:
    groups = KeyGroupRange(3, 5)
    assert list(groups) == [3, 4, 5]
    assert len(groups) == 3
    assert 3 in groups
    assert np.int32(5) in groups
    assert 6 not in groups
    assert "3" not in groups
    assert groups.intersect(KeyGroupRange(5, 9)) == KeyGroupRange(5, 5)
    assert groups.intersect(KeyGroupRange(6, 9)) is None


@pytest.mark.parametrize(("first", "last"), [(-1, 3), (3, 2), (0, 32768), ("0", 1), (0.0, 1), (None, 1), (True, 3)])
def test_a_bad_range_is_refused(first: Any, last: Any) -> None:
    with pytest.raises(InvalidRequest):
        KeyGroupRange(first, last)


@pytest.mark.parametrize("maximum", [0, -1, 32769, 1.5, None, "128", True])
def test_a_max_parallelism_out_of_range_is_refused(maximum: Any) -> None:
    for call in (lambda: key_group_of(1, maximum), lambda: key_groups_of(pa.array([1]), maximum),
                 lambda: key_group_range(0, 1, maximum), lambda: subtask_of(0, 1, maximum)):
        with pytest.raises(InvalidRequest, match="max parallelism"):
            call()


def test_a_subtask_or_group_that_does_not_exist_is_refused() -> None:
    for call in (lambda: key_group_range(2, 2, 128), lambda: key_group_range(0, 129, 128), lambda: subtask_of(128, 2, 128),
                 lambda: default_max_parallelism(0)):
        with pytest.raises(InvalidRequest):
            call()


@pytest.mark.parametrize("key", [None, [1], {"a": 1}, {1}, object(), (1, [2]), ()])
def test_none_lists_and_maps_are_refused_as_keys(key: Any) -> None:
    with pytest.raises(InvalidRequest, match="can't be a key"):
        key_group_of(key, 128)


@pytest.mark.parametrize("array", [pa.array([[1]]), pa.array([[("a", 1)]], pa.map_(pa.string(), pa.int64())), pa.nulls(2),
                                   pa.array([1, None])])
def test_columns_of_lists_maps_and_nulls_are_refused_as_keys(array: pa.Array) -> None:
    with pytest.raises(InvalidRequest):
        key_groups_of(array, 128)


def test_a_key_of_another_type_than_declared_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="another type"):
        key_group_of("a", 128, int)


KNOWN = [
    (1, -7001672635703045582), (-1, 3858142552250413010), ("", -7444071767201028348), ("Spark", -4294468057691064905),
    ("ü", 7408949341365432148), (0.0, -5252525462095825812), (True, -6698625589789238999), (b"\0", -8959994473701255385),
]
"""Values that Spark SQL printed for xxhash64; test_keygroups_spark.py compares every type with a live Spark."""


def test_hashes_are_those_that_spark_prints() -> None:
    for key, expected in KNOWN:
        assert key_hasher(type(key))(key) == expected


def test_integers_hash_as_eight_bytes_whatever_their_width() -> None:
    widths = (pa.int8(), pa.int32(), pa.int64(), pa.uint64())
    groups = [key_groups_of(pa.array([5, 100], kind), 1000).tolist() for kind in widths]
    assert all(found == groups[0] for found in groups)
    assert groups[0] == [key_group_of(5, 1000), key_group_of(100, 1000)]


def test_zero_has_no_sign_and_nan_is_one_key() -> None:
    assert key_group_of(-0.0, 32768) == key_group_of(0.0, 32768)
    other_nan = np.array([0xFFF8000000000001], np.uint64).view(np.float64)
    assert key_groups_of(np.append(other_nan, math.nan), 32768).tolist() == [key_group_of(math.nan, 32768)] * 2


COLUMNS: dict[str, tuple[Any, st.SearchStrategy[Any]]] = {
    "int": (int, st.integers(-2**63, 2**63 - 1)),
    "int16": (pa.int16(), st.integers(-2**15, 2**15 - 1)),
    "float": (float, st.floats()),
    "float32": (pa.float32(), st.floats(width=32)),
    "bool": (bool, st.booleans()),
    "str": (str, st.text(st.characters(exclude_categories=["Cs"]), max_size=200)),
    "bytes": (bytes, st.binary(max_size=100)),
    "date": (date, st.dates()),
    "datetime": (datetime, st.datetimes()),
    "seconds": (pa.timestamp("s"), st.datetimes().map(lambda moment: moment.replace(microsecond=0))),
    "decimal": (Decimal, st.integers(-10**20 + 1, 10**20 - 1).map(Decimal)),
    "small decimal": (pa.decimal128(9, 2), st.integers(-10**6, 10**6).map(Decimal)),
    "uuid": (uuid.UUID, st.uuids()),
    "tuple": (tuple[str | None, int, bytes | None], st.tuples(
        st.none() | st.text(st.characters(exclude_categories=["Cs"]), max_size=50), st.integers(-2**63, 2**63 - 1),
        st.none() | st.binary(max_size=50))),
}


@pytest.mark.parametrize("case", list(COLUMNS))
def test_a_column_has_the_groups_of_its_keys(case: str) -> None:
    annotation, strategy = COLUMNS[case]
    kind = state_type(annotation)

    @settings(max_examples=40, deadline=None)
    @given(st.lists(strategy, max_size=12), st.sampled_from([1, 3, 100, 128, 32768]), st.integers(0, 2))
    def run(keys: list[Any], maximum: int, skipped: int) -> None:
        column = kind.to_arrow(keys)
        grouper = key_grouper(kind, maximum)
        expected = [grouper(key) for key in keys]
        assert expected == [key_group_of(key, maximum, kind) for key in keys]
        found = key_groups_of(column.slice(skipped), maximum)
        assert found.dtype == np.int32
        assert found.tolist() == expected[skipped:]
        chunks = pa.chunked_array([column.slice(0, skipped), column.slice(skipped)], column.type)
        assert key_groups_of(chunks, maximum).tolist() == expected

    run()


@pytest.mark.parametrize("length", [*range(70), 95, 96, 97, 127, 128, 1000])
def test_strings_of_every_length_hash_as_xxhash_does(length: int) -> None:
    texts = [bytes((7 * row + 3 * place) % 251 for place in range(length)) for row in range(40)]
    expected = [xxhash.xxh64_intdigest(text, 42) % 128 for text in texts]
    assert key_groups_of(pa.array(texts), 128).tolist() == expected
    mixed = [text[:row] for row, text in enumerate(texts)] * 3
    assert key_groups_of(pa.array(mixed, pa.large_binary()), 128).tolist() == \
        [xxhash.xxh64_intdigest(text, 42) % 128 for text in mixed]


def test_numpy_columns_and_dictionaries_are_taken() -> None:
    assert key_groups_of(np.array([1, -1], np.int32), 128).tolist() == [key_group_of(1, 128), key_group_of(-1, 128)]
    assert key_groups_of(np.array(["a", "ü"]), 128).tolist() == [key_group_of("a", 128), key_group_of("ü", 128)]
    assert key_groups_of(np.array([True, False]), 128).tolist() == [key_group_of(True, 128), key_group_of(False, 128)]
    assert key_groups_of(pa.array(["a", "b", "a"]).dictionary_encode(), 128).tolist() == \
        [key_group_of(key, 128) for key in "aba"]
    assert key_groups_of(pa.array([], pa.string()), 128).tolist() == []
    assert key_groups_of(np.array(["2024-01-01"], "datetime64[us]"), 128).tolist() == \
        [key_group_of(datetime(2024, 1, 1), 128)]


def test_columns_in_nanoseconds_and_of_uuids_are_taken() -> None:
    moment, span, name = datetime(2024, 1, 1, 0, 0, 0, 5), timedelta(seconds=3), uuid.UUID(int=7)
    assert key_groups_of(pa.array([moment], pa.timestamp("ns")), 128).tolist() == [key_group_of(moment, 128)]
    assert key_groups_of(pa.array([span], pa.duration("ns")), 128).tolist() == [key_group_of(span, 128)]
    assert key_groups_of(pa.array([name.bytes], pa.uuid()), 128).tolist() == [key_group_of(name, 128)]
    with pytest.raises(InvalidRequest):
        key_groups_of(pa.array([1], pa.timestamp("ns")), 128)


def test_a_moment_with_a_zone_hashes_as_its_instant() -> None:
    assert key_group_of(datetime(2024, 1, 1, tzinfo=UTC), 128) == key_group_of(datetime(2024, 1, 1), 128)
