"""Table files read without RocksDB: the same rows as RocksDB gives, and RocksDB where they can't be read."""

from __future__ import annotations

import random
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from statebackend.entries import merge_entries
from statebackend.errors import CorruptData
from statebackend.keygroups import KeyGroupRange
from statebackend.rocksdb import format as rocksdb_format
from statebackend.rocksdb import tables
from statebackend.rocksdb.format import stored_layers
from statebackend.rocksdb.snapshot import part_batches
from statebackend.rocksdb.store import Store, write_table
from statebackend.rocksdb.tables import TableFile, Unreadable, open_tables

ALL = KeyGroupRange(0, 32_766)
Rows = list[tuple[bytes, bytes]]


def rows_of(batches: Any) -> Rows:
    return [(row["key"], row["value"]) for batch in batches for row in batch.to_pylist()]


def directly(directory: Path, key_groups: KeyGroupRange = ALL) -> Rows:
    with stored_layers(directory, key_groups) as layers:
        return rows_of(merge_entries(layers))


def by_rocksdb_itself(directory: Path) -> Rows:
    store = Store(directory, read_only=True, create=False)
    try:
        return list(store.scan(b"", None))
    finally:
        store.close()


def by_rocksdb(directory: Path, key_groups: KeyGroupRange = ALL) -> Rows:
    return rows_of(part_batches(directory, key_groups))


@pytest.fixture
def no_fallback(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_arguments: Any) -> Any:
        raise AssertionError("the tables were read through RocksDB")
    monkeypatch.setattr(rocksdb_format, "part_batches", refuse)


def key(number: int, shape: int) -> bytes:
    """One of a few hundred keys, so that they repeat: of one width, of many, with long common beginnings, very long."""
    group = (number % 7 * 300).to_bytes(2, "big")
    return group + [number.to_bytes(11, "big"), b"k" * (number % 40) + bytes([number % 251]),
                    b"customer/" + str(number).encode() + b"/total", bytes([number % 251]) * (number % 3 * 300 + 1)][shape]


def value(number: int, shape: int) -> bytes:
    return [number.to_bytes(8, "little"), b"", b"v" * (number % 300),
            random.Random(number).randbytes(number % 5 * 3000)][shape]


OPERATIONS = st.lists(st.tuples(st.sampled_from(["put", "put", "put", "delete", "flush", "compact", "compact some"]),
                                st.integers(0, 400), st.integers(1, 200)), min_size=1, max_size=25)


@settings(max_examples=40, deadline=None)
@given(OPERATIONS, st.integers(0, 3), st.integers(0, 3), st.booleans(), st.integers(0, 1800), st.integers(0, 1800))
def test_tables_give_what_rocksdb_gives(tmp_path_factory: pytest.TempPathFactory, operations: list[tuple[str, int, int]],
                                        keys: int, values: int, mixed: bool, low: int, span: int) -> None:
    directory = tmp_path_factory.mktemp("tables") / "db"
    store = Store(directory, l0_trigger=3)
    store.set_options({"target_file_size_base": "20000", "max_bytes_for_level_base": "40000"})
    for written, (what, first, count) in enumerate(operations):
        shape = (keys + written) % 4 if mixed else keys
        if what == "put":
            store.write([(key(number, shape), value(number + written, values)) for number in range(first, first + count)])
        elif what == "delete":
            store.write([(key(number, shape), None) for number in range(first, first + count, 3)])
        elif what == "flush":
            store.flush()
        else:
            store.compact(None, key(first, shape) if what == "compact some" else None)
    store.flush()
    store.close()
    tables = open_tables([path for _, path in _tables(directory)])  # none of these may need RocksDB
    for table in tables:
        table.close()
    assert directly(directory) == by_rocksdb(directory)
    cut = KeyGroupRange(low, low + span)
    assert directly(directory, cut) == by_rocksdb(directory, cut)


def _tables(directory: Path) -> list[tuple[int, Path]]:
    store = Store(directory, read_only=True, create=False)
    try:
        return store.tables()
    finally:
        store.close()


@pytest.mark.usefixtures("no_fallback")
def test_the_newest_of_several_levels_wins(tmp_path: Path) -> None:
    store = Store(tmp_path / "db", l0_trigger=50)
    keys = [b"\0\1" + number.to_bytes(4, "big") for number in range(3000)]
    store.write([(name, b"old") for name in keys])
    store.compact()
    store.write([(name, b"newer") for name in keys[::2]])
    store.flush()
    store.write([(name, b"newest") for name in keys[::6]] + [(name, None) for name in keys[1::6]])
    store.flush()
    store.close()
    assert len({level for level, _ in _tables(tmp_path / "db")}) == 2
    expected = dict.fromkeys(keys, b"old") | dict.fromkeys(keys[::2], b"newer") | dict.fromkeys(keys[::6], b"newest")
    assert directly(tmp_path / "db") == sorted((name, held) for name, held in expected.items() if name not in keys[1::6])


@pytest.mark.usefixtures("no_fallback")
def test_of_two_levels_below_the_first_the_upper_is_newer(tmp_path: Path) -> None:
    noise = random.Random(1)
    store = Store(tmp_path / "db", l0_trigger=2)
    store.set_options({"max_bytes_for_level_base": "100000", "target_file_size_base": "50000"})
    keys = [b"\0\1" + number.to_bytes(4, "big") for number in range(3000)]
    store.write([(name, noise.randbytes(400)) for name in keys])
    store.compact()
    for _ in range(4):
        store.write([(name, b"new") for name in keys[::10]] + [(name, None) for name in keys[5::10]])
        store.flush()
    deadline = time.monotonic() + 60
    while len({level for level, _ in store.tables() if level}) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    store.close()
    assert len({level for level, _ in _tables(tmp_path / "db") if level}) == 2
    found = directly(tmp_path / "db")
    assert found == by_rocksdb_itself(tmp_path / "db")
    assert [held for name, held in found if name in keys[::10]] == [b"new"] * 300


@pytest.mark.parametrize("size", [1, 900])
def test_of_several_versions_in_one_table_the_newest_counts(tmp_path: Path, size: int) -> None:
    store = Store(tmp_path / "db")
    held = []
    for version in range(30):
        store.write([(b"\0\1a", b"%02d" % version * size), (b"\0\1b", b"%d" % version)])
        held.append(store._database.snapshot())  # so that the versions stay
    store.write([(b"\0\1b", None)])
    store.flush()
    held.clear()
    store.close()
    if size == 1:
        [table] = open_tables([path for _, path in _tables(tmp_path / "db")])
        assert table._entries == 61
        table.close()
    else:
        with pytest.raises(Unreadable, match="user"):  # the versions of a key are in several blocks: left to RocksDB
            open_tables([path for _, path in _tables(tmp_path / "db")])
    assert directly(tmp_path / "db") == [(b"\0\1a", b"29" * size)]


def test_range_deletes_are_left_to_rocksdb(tmp_path: Path) -> None:
    store = Store(tmp_path / "db")
    store.write([(b"\0" + bytes([number]) + b"k", b"v") for number in range(100)])
    store.delete_range(b"\0\x0a", b"\0\x5a")
    store.flush()
    store.close()
    with pytest.raises(Unreadable, match="range-deletions"):
        open_tables([path for _, path in _tables(tmp_path / "db")])
    assert [name[1] for name, _ in directly(tmp_path / "db")] == [*range(10), *range(90, 100)]


def test_ingested_tables_are_left_to_rocksdb(tmp_path: Path) -> None:
    store = Store(tmp_path / "db")
    store.write([(b"\0\1a", b"before"), (b"\0\1b", b"before")])
    store.flush()
    write_table(tmp_path / "more.sst", [(b"\0\1b", b"after"), (b"\0\1c", b"after")])
    store.ingest([tmp_path / "more.sst"])
    store.close()
    assert directly(tmp_path / "db") == [(b"\0\1a", b"before"), (b"\0\1b", b"after"), (b"\0\1c", b"after")]


def one_table(directory: Path, rows: int = 5000) -> Path:
    store = Store(directory)
    store.write([(b"\0\1" + number.to_bytes(4, "big"), number.to_bytes(8, "big")) for number in range(rows)])
    store.flush()
    [(_, path)] = store.tables()
    store.close()
    return path


@pytest.mark.parametrize("place", [10, 5000, 40_000])
def test_a_damaged_block_is_named_and_no_row_of_it_is_given(tmp_path: Path, place: int) -> None:
    path = one_table(tmp_path / "db")
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.unlink()
    path.write_bytes(bytes(data))
    with pytest.raises(CorruptData, match=path.name):
        directly(tmp_path / "db")


def test_a_block_that_says_to_be_longer_than_lz4_can_make_it_is_named_before_room_is_made(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = one_table(tmp_path / "db")
    table = TableFile(path)
    offset, size = int(table._offsets[0]), int(table._sizes[0])
    table.close()
    data = bytearray(path.read_bytes())
    assert data[offset + size] == 4, "the block is compressed by LZ4"

    data[offset:offset + 5] = b"\xff\xff\xff\xff\x0f"
    checksum = (xxhash.xxh3_64_intdigest(data[offset:offset + size]) ^ 4 * 0x6B9083D9) & 0xFFFFFFFF
    data[offset + size + 1:offset + size + 5] = checksum.to_bytes(4, "little")
    path.unlink()
    path.write_bytes(data)
    codec = tables._CODEC

    def decompress(block: Any, length: int) -> Any:
        assert length < 2**20, "room would be made"
        return codec.decompress(block, length)

    monkeypatch.setattr(tables, "_CODEC", SimpleNamespace(decompress=decompress))
    with pytest.raises(CorruptData, match="longer than it can be") as caught:
        directly(tmp_path / "db")
    assert caught.value.context["path"] == str(path)
    assert caught.value.context["found"] == 2**32 - 1


@pytest.mark.parametrize("left", [0, 52, 53, 2000])
def test_a_table_cut_short_is_damage_or_no_table(tmp_path: Path, left: int) -> None:
    path = one_table(tmp_path / "db")
    cut = tmp_path / "cut.sst"
    cut.write_bytes(path.read_bytes()[:left])
    with pytest.raises((CorruptData, Unreadable)):
        TableFile(cut)


def test_places_that_a_damaged_footer_names_are_not_gone_to(tmp_path: Path) -> None:
    path = one_table(tmp_path / "db")
    data = bytearray(path.read_bytes())
    data[-52:-16] = (b"\xff" * 8 + b"\x3f") * 4  # the footer has no checksum
    damaged = tmp_path / "damaged.sst"
    damaged.write_bytes(data)
    with pytest.raises(CorruptData, match=r"damaged\.sst"):
        TableFile(damaged)


def test_an_empty_database_has_no_rows(tmp_path: Path) -> None:
    Store(tmp_path / "db").close()
    assert directly(tmp_path / "db") == []
    assert pa.Table.from_batches(part_batches(tmp_path / "db", ALL), pa.schema([])).num_rows == 0
