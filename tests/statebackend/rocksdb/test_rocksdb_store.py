"""The wrapper of one database: what it keeps, how it closes, what it refuses."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from unittest.mock import Mock

import pytest

from statebackend import Closed, Conflict, CorruptData, InvalidRequest, NotFound, create_backend
from statebackend.rocksdb.store import SharedMemory, Store, shared_memory, write_table


def test_written_rows_are_read_one_by_one_in_bulk_and_in_order(tmp_path: Path) -> None:
    store = Store(tmp_path / "db")
    store.write([(b"%04d" % number, b"%d" % number) for number in range(2500)])
    store.write([(b"0001", None)])
    assert store.get(b"0002") == b"2"
    assert store.get(b"0001") is None
    assert store.get_many([b"0000", b"0001", b"2499"]) == [b"0", None, b"2499"]
    assert [key for key, _ in store.scan(b"0000", b"0003")] == [b"0000", b"0002"]
    assert len(list(store.scan(b"0000", None, keys_only=True))) == 2499
    store.close()


def test_nothing_is_written_to_the_write_ahead_log(tmp_path: Path) -> None:
    store = Store(tmp_path / "db")
    store.write([(b"%04d" % number, b"x" * 100) for number in range(1000)])
    store.delete_range(b"0000", b"0100")
    assert sum(path.stat().st_size for path in (tmp_path / "db").glob("*.log")) == 0
    store.close()


def test_close_releases_the_folder_even_with_open_scans(tmp_path: Path) -> None:
    store = Store(tmp_path / "db")
    store.write([(b"a", b"1"), (b"b", b"2")])
    scan = store.scan(b"", None)
    rows = iter(store.scan(b"", None))
    next(rows)
    store.close()
    store.close()
    again = Store(tmp_path / "db")
    assert again.get(b"a") == b"1"
    again.close()
    with pytest.raises(Closed):
        scan.take(1)


def test_a_close_that_fails_is_told_and_releases_everything(
        tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As on a full disk, where RocksDB can't write its last buffers."""
    backend = create_backend("rocksdb", directory=str(tmp_path / "db"))
    keyed = backend.keyed(uid="count", key_type=int)
    database = Mock(wraps=keyed._engine.parts.only._database)  # type: ignore[attr-defined]
    database.close.side_effect = Exception("IO error: No space left on device: While appending to file")
    keyed._engine.parts.only._database = database  # type: ignore[attr-defined]
    backend.close()
    assert "No space left" in caplog.text
    assert [path.name for path in (tmp_path / "db").iterdir() if path.is_dir()] == []
    create_backend("rocksdb", directory=str(tmp_path / "db")).close()


def test_use_after_close_is_refused(tmp_path: Path) -> None:
    store = Store(tmp_path / "db")
    store.close()
    for use in (lambda: store.get(b"a"), lambda: store.get_many([b"a"]), lambda: store.write([(b"a", b"b")]),
                lambda: store.scan(b"", None), store.flush, store.compact, store.live_bytes):
        with pytest.raises(Closed):
            use()


def test_a_checkpoint_holds_what_was_never_flushed(tmp_path: Path) -> None:
    store = Store(tmp_path / "db")
    store.write([(b"a", b"1")])
    store.checkpoint(tmp_path / "copy")
    store.write([(b"a", b"2")])
    copy = Store(tmp_path / "copy", read_only=True)
    assert copy.get(b"a") == b"1"
    copy.close()
    store.close()


def test_range_deletes_hide_at_once_and_compaction_frees_the_space(tmp_path: Path) -> None:
    store = Store(tmp_path / "db")
    store.write([(b"%06d" % number, os.urandom(100)) for number in range(20_000)])
    store.flush()
    before = store.table_bytes()
    store.delete_range(b"000000", b"019000")
    assert sum(1 for _ in store.scan(b"", None)) == 1000
    store.flush()
    store.compact()
    assert store.table_bytes() < before / 10
    store.close()


def test_tables_written_aside_are_taken_in(tmp_path: Path) -> None:
    store = Store(tmp_path / "db")
    assert write_table(tmp_path / "new.sst", [(b"a", b"1"), (b"b", b"2")]) == 2
    store.ingest([tmp_path / "new.sst"])
    assert store.get(b"b") == b"2"
    store.close()


def test_a_forked_child_is_refused_and_the_parent_goes_on(tmp_path: Path) -> None:
    store = Store(tmp_path / "db")
    store.write([(b"a", b"1")])
    scan = store.scan(b"", None)
    pid = os.fork()
    if pid == 0:  # pragma: no cover
        code = 1
        try:
            store.get(b"a")
        except Conflict as error:
            code = 0 if "fork" in str(error) else 2
        except BaseException:
            code = 3
        os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert store.get(b"a") == b"1"
    assert len(scan.take(5)) == 1
    store.close()


@pytest.mark.crash
def test_a_second_process_is_refused_with_the_way_out(tmp_path: Path) -> None:
    store = Store(tmp_path / "db")
    script = (f"from pathlib import Path\nfrom statebackend import Conflict\nfrom statebackend.rocksdb.store import Store\n"
              f"try:\n    Store(Path({str(tmp_path / 'db')!r}))\nexcept Conflict as error:\n    print(error)\n")
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert "in use" in result.stdout
    assert "folder of its own" in result.stdout
    store.close()


def test_a_missing_database_and_wrong_types_are_named(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="no RocksDB database"):
        Store(tmp_path / "nothing", create=False)
    store = Store(tmp_path / "db")
    with pytest.raises(InvalidRequest):
        store.write([("text", b"x")])  # type: ignore[list-item]
    store.close()


def test_a_damaged_table_is_corrupt_data(tmp_path: Path) -> None:
    store = Store(tmp_path / "db")
    store.write([(b"%06d" % number, os.urandom(50)) for number in range(5000)])
    store.flush()
    store.close()
    table = next((tmp_path / "db").glob("*.sst"))
    data = bytearray(table.read_bytes())
    for position in range(1000, 1200):
        data[position] ^= 0xFF
    table.write_bytes(bytes(data))
    store = Store(tmp_path / "db")
    with pytest.raises(CorruptData):
        list(store.scan(b"", None))
    store.close()


def settled_usage(memory: SharedMemory, bound: float, seconds: float = 60) -> int:
    """The bytes in use once flushes, which run in the background, have brought them below the bound, or at the end."""
    deadline = time.monotonic() + seconds
    while memory.usage > bound and time.monotonic() < deadline:
        time.sleep(0.05)
    return memory.usage


def test_all_databases_share_one_memory_and_its_limit(tmp_path: Path) -> None:
    limit = shared_memory().limit
    try:
        memory = shared_memory(16 << 20)
        stores = [Store(tmp_path / str(number)) for number in range(3)]
        for round in range(8):
            for store in stores:
                store.write([(b"%02d%06d" % (round, number), os.urandom(200)) for number in range(10_000)])
                assert memory.usage <= 2 * (16 << 20), "not even while a flush is on its way"
                for _ in store.scan(b"", None):
                    pass
                assert memory.usage <= 2 * (16 << 20)
            assert settled_usage(memory, 1.25 * (16 << 20)) <= 1.25 * (16 << 20)
        assert sum(store.table_bytes() for store in stores) > 1.5 * (16 << 20)
        for store in stores:
            store.close()
    finally:
        shared_memory(limit)
