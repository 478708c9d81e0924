"""What rocksdict does that its names do not say. A release that changes one of these is noticed here.

The wrapper in store.py avoids each; if a test fails after an upgrade, read the change and simplify the wrapper.
"""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import rocksdict

from statebackend.rocksdb.store import Store


@pytest.fixture
def database(tmp_path: Path) -> Any:
    database = rocksdict.Rdict(str(tmp_path / "raw"), rocksdict.Options(raw_mode=True))
    for number in range(1000):
        database[b"%03d" % number] = b"old"
    yield database
    database.close()


def test_the_version_is_the_one_whose_traps_are_known() -> None:
    from importlib.metadata import version

    assert version("rocksdict") == "0.3.29"


def test_a_lower_bound_sets_the_upper_one(database: Any) -> None:
    options = rocksdict.ReadOptions()
    bound = b"600"
    options.set_iterate_lower_bound(bound)
    assert list(database.keys(from_key=b"500", read_opt=options))[-1] == b"599"


def test_iterating_a_snapshot_ignores_the_snapshot(database: Any) -> None:
    snapshot = database.snapshot()
    for number in range(500):
        database[b"%03d" % number] = b"new"
    assert snapshot[b"000"] == b"old"
    assert dict(snapshot.items())[b"000"] == b"new"
    del snapshot


def test_an_iterator_is_a_true_view_of_its_moment(database: Any) -> None:
    items = database.items()
    for number in range(1000):
        database[b"%03d" % number] = b"new"
    database.flush()
    assert {value for _, value in items} == {b"old"}


def test_disabling_the_write_ahead_log_is_a_property() -> None:
    options = rocksdict.WriteOptions()
    with pytest.raises(TypeError):
        options.disable_wal(True)
    options.disable_wal = True


def test_tables_of_a_live_database_can_not_be_ingested(database: Any, tmp_path: Path) -> None:
    database.flush()
    rocksdict.Checkpoint(database).create_checkpoint(str(tmp_path / "copy"))
    other = rocksdict.Rdict(str(tmp_path / "other"), rocksdict.Options(raw_mode=True))
    with pytest.raises(Exception, match="External file version not found"):
        other.ingest_external_file([str(path) for path in (tmp_path / "copy").glob("*.sst")])
    other.close()


def test_an_open_iterator_keeps_the_folder_locked(tmp_path: Path) -> None:
    database = rocksdict.Rdict(str(tmp_path / "held"), rocksdict.Options(raw_mode=True))
    database[b"a"] = b"1"
    iterator = database.items()
    database.close()
    with pytest.raises(Exception, match="lock"):
        rocksdict.Rdict(str(tmp_path / "held"), rocksdict.Options(raw_mode=True))
    del iterator


def test_an_iteration_ends_silently_at_a_damaged_block(tmp_path: Path) -> None:
    path = tmp_path / "damaged"
    database = rocksdict.Rdict(str(path), rocksdict.Options(raw_mode=True))
    for number in range(5000):
        database[b"%05d" % number] = bytes([number % 251]) * 50
    database.flush()
    database.compact_range(None, None)
    database.close()
    table = max(path.glob("*.sst"), key=lambda file: file.stat().st_size)
    data = bytearray(table.read_bytes())
    middle = len(data) // 2
    data[middle:middle + 200] = bytes(200)
    table.write_bytes(bytes(data))
    database = rocksdict.Rdict(str(path), rocksdict.Options(raw_mode=True))
    assert len(list(database.items())) < 5000
    database.close()
    del database


def test_our_bounded_scans_are_right_when_nothing_else_holds_the_bound(tmp_path: Path) -> None:
    store = Store(tmp_path / "db")
    store.write([(b"%05d" % number, b"v") for number in range(2000)])

    def scan(last: int) -> Any:
        return iter(store.scan(b"00000", bytes(b"%05d" % last)))

    for last in range(100, 110):
        rows = scan(last)
        gc.collect()
        _ = [bytes([number % 256]) * 5 for number in range(1000)]
        assert sum(1 for _ in rows) == last
    store.close()
