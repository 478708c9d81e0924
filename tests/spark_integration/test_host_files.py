"""Copies of state files on a host: found by content, never trusted unseen, bounded, and shared between processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import xxhash

from spark_integration import host_files
from spark_integration.host_files import ABANDONED_S, UNUSED_S, HostFiles, WarmFiles, linkable
from statebackend.errors import CorruptData, NotFound
from statebackend.files import LocalFiles, StateFile, writing


class Storage(LocalFiles):
    """Storage that counts what is read from it."""

    reads = 0

    def open(self, file: StateFile) -> Any:
        self.reads += 1
        return super().open(file)

    def fetch(self, file: StateFile, local: Path) -> None:
        self.reads += 1
        super().fetch(file, local)


@pytest.fixture
def storage(tmp_path: Path) -> Storage:
    return Storage(tmp_path / "storage")


def worker(storage: Storage, tmp_path: Path, limit: int = 1 << 20) -> WarmFiles:
    """What a worker process has: the storage, and the folder of its host."""
    host = HostFiles.at(tmp_path / "host", limit)
    assert host is not None
    return WarmFiles(storage, host)


def copies(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "host").iterdir())


def stored(files: Any, data: bytes) -> StateFile:
    with writing(files, "delta", shared=True) as (writer, done):
        writer.write(data[:5])
        writer.write(data[5:])
    return done[0]


def contents(files: Any, file: StateFile) -> bytes:
    with files.open(file) as stream:
        return bytes(stream.read())


def local_file(tmp_path: Path, data: bytes) -> Path:
    path = tmp_path / "000012.sst"
    path.write_bytes(data)
    return path


def test_what_one_worker_stored_another_reads_here(storage: Storage, tmp_path: Path) -> None:
    first, second = worker(storage, tmp_path), worker(storage, tmp_path)
    files = [stored(first, b"written"), first.upload(local_file(tmp_path, b"uploaded"), "table", shared=True)]
    assert [contents(second, file) for file in files] == [b"written", b"uploaded"]
    second.fetch(files[1], tmp_path / "placed")
    assert (tmp_path / "placed").read_bytes() == b"uploaded"
    assert (storage.reads, second.found, second.warm) == (0, 3, True)


def test_what_one_worker_read_another_need_not(storage: Storage, tmp_path: Path) -> None:
    files = [stored(storage, b"opened"), stored(storage, b"fetched"), stored(storage, b"large" * 10)]
    first, second = worker(storage, tmp_path), worker(storage, tmp_path)
    for one in (first, second):
        assert contents(one, files[0]) == b"opened"
        one.fetch(files[1], tmp_path / f"placed-{id(one)}")
    assert (first.read, first.warm) == (2, False)
    assert (storage.reads, second.read, second.warm) == (2, 0, True)


@pytest.mark.parametrize("whole", [True, False])
def test_what_there_is_no_room_for_here_is_read_from_storage(whole: bool, storage: Storage, tmp_path: Path,
                                                             monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_files, "_WHOLE_BYTES", 100 if whole else 1)
    file, warm = stored(storage, b"content"), worker(storage, tmp_path)
    (tmp_path / "host").rmdir()
    (tmp_path / "host").touch()  # nothing can be written there
    assert contents(warm, file) == b"content"
    warm.bring([file, stored(storage, b"another")])
    assert warm.read == 1


class Together(Storage):
    """Storage whose answers come only while several are asked for at once."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.meeting = threading.Barrier(4, timeout=20)

    def fetch(self, file: StateFile, local: Path) -> None:
        self.meeting.wait()
        super().fetch(file, local)


def test_what_is_missing_is_brought_several_files_at_once(tmp_path: Path) -> None:
    storage = Together(tmp_path / "storage")
    files = [stored(storage, b"number %d" % n) for n in range(9)]
    warm = worker(storage, tmp_path)
    contents(warm, files[0])
    warm.bring(files)
    assert (storage.reads, warm.read, warm.warm) == (9, 9, False)
    assert [contents(warm, file) for file in files] == [b"number %d" % n for n in range(9)]
    assert storage.reads == 9


def test_what_can_not_be_brought_is_told_to_its_reader(storage: Storage, tmp_path: Path) -> None:
    files = [stored(storage, b"number %d" % n) for n in range(3)]
    (storage.directory / files[1].path).unlink()
    warm = worker(storage, tmp_path)
    warm.bring(files)
    assert [contents(warm, files[n]) for n in (0, 2)] == [b"number 0", b"number 2"]
    with pytest.raises(NotFound):
        warm.open(files[1])


@pytest.mark.parametrize("harm", ["flip", "cut", "empty"])
def test_a_damaged_copy_is_removed_and_read_from_storage(harm: str, storage: Storage, tmp_path: Path) -> None:
    file = stored(worker(storage, tmp_path), b"something that was stored")
    (copy,) = copies(tmp_path)
    data = copy.read_bytes()
    copy.unlink()
    copy.write_bytes({"flip": b"S" + data[1:], "cut": data[:-1], "empty": b""}[harm])
    warm = worker(storage, tmp_path)
    warm.fetch(file, tmp_path / "placed")
    assert (tmp_path / "placed").read_bytes() == contents(warm, file) == data
    assert (storage.reads, warm.read, warm.found) == (1, 1, 1), "and it is kept again"


def test_what_is_damaged_or_gone_in_storage_is_still_an_error(storage: Storage, tmp_path: Path) -> None:
    file = stored(storage, b"something that was stored")
    path = storage.directory / file.path
    path.write_bytes(b"S" + path.read_bytes()[1:])
    warm = worker(storage, tmp_path)
    with pytest.raises(CorruptData):
        warm.open(file)
    path.unlink()
    with pytest.raises(NotFound):
        warm.fetch(file, tmp_path / "placed")
    assert copies(tmp_path) == []


def test_the_longest_unused_copies_go_when_there_are_too_many(storage: Storage, tmp_path: Path) -> None:
    warm = worker(storage, tmp_path, limit=100_000)
    files = [stored(warm, bytes([n]) * 10_000) for n in range(30)]
    held = sum(copy.stat().st_size for copy in copies(tmp_path))
    assert 50_000 <= held <= 110_000
    assert contents(warm, files[-1]) == bytes([29]) * 10_000
    assert warm.found == 1
    contents(warm, files[0])
    assert warm.read == 1


def test_a_copy_in_use_outlives_one_that_is_not(storage: Storage, tmp_path: Path) -> None:
    warm = worker(storage, tmp_path, limit=100_000)
    used, unused = stored(warm, b"u" * 10_000), stored(warm, b"n" * 10_000)
    for age, file in ((300, used), (200, unused)):
        path = tmp_path / "host" / f"{file.checksum}-{file.size}"
        os.utime(path, (time.time() - age,) * 2)
    for n in range(9):
        stored(warm, bytes([n]) * 10_000)
        if n == 6:
            contents(warm, used)
    contents(warm, used)
    contents(warm, unused)
    assert (warm.found, warm.read) == (2, 1)


def test_a_file_larger_than_the_limit_is_not_kept(storage: Storage, tmp_path: Path) -> None:
    warm = worker(storage, tmp_path, limit=100)
    file = stored(warm, b"x" * 101)
    warm.upload(local_file(tmp_path, b"y" * 101), "table", shared=True)
    assert contents(warm, file) == b"x" * 101
    assert copies(tmp_path) == []


def test_an_aborted_file_leaves_no_copy(storage: Storage, tmp_path: Path) -> None:
    warm = worker(storage, tmp_path)
    with pytest.raises(ZeroDivisionError), writing(warm, "delta", shared=True) as (writer, _):
        writer.write(b"half")
        raise ZeroDivisionError
    assert copies(tmp_path) == []


def test_names_tell_nothing_and_the_folder_is_ours_alone(storage: Storage, tmp_path: Path) -> None:
    file = stored(worker(storage, tmp_path), b"secret")
    assert [copy.name for copy in copies(tmp_path)] == [f"{xxhash.xxh3_128_hexdigest(b'secret')}-6"]
    assert file.path not in copies(tmp_path)[0].name
    assert (tmp_path / "host").stat().st_mode & 0o777 == 0o700
    (tmp_path / "open").mkdir(mode=0o755)
    (tmp_path / "link").symlink_to(tmp_path / "host")
    assert [HostFiles.at(tmp_path / name, 100) for name in ("open", "link")] == [None, None]
    assert HostFiles.at(tmp_path / "none", 0) is None
    assert not (tmp_path / "none").exists()


def test_a_checksum_that_is_none_names_no_file(storage: Storage, tmp_path: Path) -> None:
    with pytest.raises(CorruptData, match="checksum that is none"):
        worker(storage, tmp_path).open(StateFile("a", 1, "../../etc/passwd"))


def test_without_a_folder_everything_still_works(storage: Storage, tmp_path: Path) -> None:
    warm = worker(storage, tmp_path)
    (tmp_path / "host").rmdir()
    file = stored(warm, b"written")
    assert contents(warm, file) == b"written"
    warm.fetch(file, tmp_path / "placed")
    assert warm.upload(tmp_path / "placed", "table", shared=True).size == 7
    assert (warm.found, warm.read) == (0, 2)


def test_what_nobody_uses_or_finished_goes_with_time(storage: Storage, tmp_path: Path,
                                                     monkeypatch: pytest.MonkeyPatch) -> None:
    warm = worker(storage, tmp_path)
    file = stored(warm, b"once")
    (tmp_path / "host" / ".4242-left").write_bytes(b"half a copy of a process that died")
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + ABANDONED_S + 1)
    warm._host.make_room()
    assert [copy.name for copy in copies(tmp_path)] == [f"{file.checksum}-4"]
    monkeypatch.setattr(time, "time", lambda: now + UNUSED_S + 1)
    warm._host.make_room()
    assert copies(tmp_path) == []


COPYING = """
import itertools, sys
from pathlib import Path
from spark_integration.host_files import HostFiles, WarmFiles
from statebackend.files import LocalFiles, writing
warm = WarmFiles(LocalFiles(sys.argv[1]), HostFiles.at(Path(sys.argv[2]), 1 << 28))
for number in itertools.count():
    with writing(warm, "delta", shared=True) as (writer, done):
        for part in range(20):
            writer.write(number.to_bytes(4, "big") * 1_000)
    file = done[0]
    print(file.path, file.size, file.checksum, flush=True)
"""


def test_a_process_killed_while_it_copies_leaves_nothing_that_is_trusted(storage: Storage, tmp_path: Path) -> None:
    """Two processes copy side by side; one is killed. All that was stored reads right, from here or from storage."""
    runs = [subprocess.Popen([sys.executable, "-c", COPYING, str(storage.directory), str(tmp_path / "host")],
                             stdout=subprocess.PIPE, text=True) for _ in range(2)]
    lines = [[run.stdout.readline().split() for _ in range(8)] for run in runs if run.stdout is not None]
    for run in runs:
        run.send_signal(signal.SIGKILL)
        run.communicate()
    warm = worker(storage, tmp_path, limit=1 << 28)
    for path, size, checksum in (line for some in lines for line in some):
        file = StateFile(path, int(size), checksum)
        with warm.open(file) as stream:
            data = stream.read()
        assert xxhash.xxh3_128_hexdigest(data) == checksum
    assert warm.found + warm.read == 16
    assert warm.found > 0


def test_a_hard_link_needs_one_filesystem(tmp_path: Path) -> None:
    assert linkable(tmp_path / "not" / "yet", tmp_path)
    assert not linkable(Path("/proc/self"), tmp_path)
