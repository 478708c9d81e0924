"""What every store promises, on local files, in memory and on an S3 server."""

from __future__ import annotations

import gc
import io
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import xxhash

from checkpoint.storage import FileStore, RetryPolicy, Transfer
from statebackend.errors import Closed, Conflict, CorruptData, HoldfastError, InvalidRequest, NotFound
from statebackend.files import StateFile


def file_of(path: str, data: bytes) -> StateFile:
    return StateFile(path, len(data), xxhash.xxh3_128_hexdigest(data))


def test_a_file_reads_back_as_written(store: FileStore) -> None:
    store.write("a/b/c", b"content")
    assert store.read("a/b/c") == b"content"
    assert store.size("a/b/c") == 7
    assert store.exists("a/b/c")
    assert store.read_range("a/b/c", 2, 5) == b"nte"


def test_an_empty_file_is_a_file(store: FileStore) -> None:
    store.write("empty", b"")
    assert store.read("empty") == b""
    assert [info.size for info in store.list()] == [0]


def test_a_missing_file_is_not_found_and_named(store: FileStore) -> None:
    for call in (store.read, store.size, store.open):
        with pytest.raises(NotFound, match="absent"):
            call("folder/absent")
    assert not store.exists("folder/absent")
    assert store.list("folder") == []
    assert store.folders("folder") == []


def test_a_folder_is_no_file(store: FileStore) -> None:
    store.write("folder/file", b"x")
    assert not store.exists("folder")
    with pytest.raises(NotFound):
        store.read("folder")


def test_create_refuses_what_exists_and_changes_nothing(store: FileStore) -> None:
    store.create("claim", b"first")
    with pytest.raises(Conflict, match="claim"):
        store.create("claim", b"second")
    with pytest.raises(Conflict):
        store.create("claim", b"first")
    assert store.read("claim") == b"first"


def test_of_many_creators_in_threads_one_wins(store: FileStore) -> None:
    barrier = threading.Barrier(8)

    def attempt(number: int) -> bool:
        barrier.wait()
        try:
            store.create("raced", str(number).encode())
        except Conflict:
            return False
        return True

    with ThreadPoolExecutor(8) as pool:
        won = list(pool.map(attempt, range(8)))
    assert won.count(True) == 1
    assert store.read("raced") == str(won.index(True)).encode()


def test_listing_is_recursive_and_relative(store: FileStore) -> None:
    for path in ("x/1", "x/y/2", "xx/3", "4"):
        store.write(path, b"12")
    assert [info.path for info in store.list()] == ["4", "x/1", "x/y/2", "xx/3"]
    assert [(info.path, info.size) for info in store.list("x")] == [("x/1", 2), ("x/y/2", 2)]
    assert store.folders() == ["x", "xx"]
    assert [info.path for info in store.child("x").list()] == ["1", "y/2"]
    assert store.child("x").child("y").read("2") == b"12"
    assert abs(store.list("xx")[0].modified_ms - time.time() * 1000) < 60_000


def test_deleting_what_is_gone_is_no_error(store: FileStore) -> None:
    store.write("a", b"x")
    store.delete(["a", "never"])
    store.delete([])
    assert not store.exists("a")


def test_a_tree_is_deleted_and_its_neighbour_is_not(store: FileStore) -> None:
    store.write("job/chk-1/a", b"x")
    store.write("job/chk-10/a", b"x")
    store.delete_tree("job/chk-1")
    store.delete_tree("job/chk-1")
    assert [info.path for info in store.list()] == ["job/chk-10/a"]
    with pytest.raises(InvalidRequest, match="root"):
        store.delete_tree("")


def test_paths_can_not_leave_the_store(store: FileStore) -> None:
    for path in ("../x", "a/../../x", "a\\b", "s3://other/x"):
        with pytest.raises(CorruptData, match="outside"):
            store.read(path)


@pytest.mark.parametrize("size", [0, 1, 1 << 20, (8 << 20) + 17, 20 << 20])
def test_a_stream_is_stored_with_its_checksum(store: FileStore, size: int) -> None:
    data = os.urandom(size)
    with store.writer("streamed", shared=True) as writer:
        for start in range(0, size, 700_001):
            writer.write(data[start:start + 700_001])
        assert not store.exists("streamed")
        file = writer.finish()
    assert file == StateFile("streamed", size, xxhash.xxh3_128_hexdigest(data), True)
    assert store.read("streamed") == data
    store.verify("streamed", file)
    with pytest.raises(Closed):
        writer.write(b"x")


def test_a_stream_given_up_leaves_nothing(store: FileStore) -> None:
    with pytest.raises(RuntimeError, match="mine"), store.writer("given-up") as writer:
        writer.write(b"x" * (18 << 20))
        raise RuntimeError("mine")
    writer.abort()
    assert store.list(temporary=True) == []
    assert store.abandoned_uploads(int(time.time() * 1000) + 60_000) == []


def test_a_reader_seeks(store: FileStore) -> None:
    data = os.urandom(3 << 20)
    store.write("seekable", data)
    with store.open("seekable") as stream:
        assert stream.seekable()
        stream.seek(-5, io.SEEK_END)
        assert stream.read() == data[-5:]
        stream.seek(1000)
        assert stream.read(50) == data[1000:1050]
        assert stream.tell() == 1050
        stream.seek(0)
        assert stream.read() == data


def test_upload_and_download_keep_the_bytes(store: FileStore, tmp_path: Path) -> None:
    data = os.urandom((17 << 20) + 3)
    local = tmp_path / "local"
    local.write_bytes(data)
    file = store.upload(local, "uploaded")
    store.download("uploaded", tmp_path / "copy", file)
    assert (tmp_path / "copy").read_bytes() == data
    assert store.link_or_copy("uploaded", tmp_path / "linked", file) == (store.protocol == "file")
    assert (tmp_path / "linked").read_bytes() == data


def test_a_damaged_file_is_named_and_no_copy_is_left(store: FileStore, tmp_path: Path) -> None:
    store.write("folder/damaged", b"other bytes")
    with pytest.raises(CorruptData, match="folder/damaged"):
        store.download("folder/damaged", tmp_path / "copy", file_of("folder/damaged", b"right bytes"))
    with pytest.raises(CorruptData, match="size"):
        store.download("folder/damaged", tmp_path / "copy", file_of("folder/damaged", b"longer than that"))
    with pytest.raises(CorruptData, match="folder/damaged"):
        store.verify("folder/damaged", file_of("folder/damaged", b"right bytes"))
    with pytest.raises(NotFound):
        store.download("absent", tmp_path / "copy", file_of("absent", b""))
    assert [path for path in tmp_path.iterdir() if "copy" in path.name] == []


def test_a_linked_upload_is_the_same_file(tmp_path: Path) -> None:
    (tmp_path / "table.sst").write_bytes(b"immutable")
    with FileStore.at(tmp_path / "store") as store:
        file = store.upload(tmp_path / "table.sst", "shared/table", link=True)
        stored = store.local_path("shared/table")
    assert file == file_of("shared/table", b"immutable")
    assert stored is not None
    assert stored.samefile(tmp_path / "table.sst")


def test_many_files_move_in_parallel_with_progress(store: FileStore, tmp_path: Path) -> None:
    locals_ = []
    for number in range(12):
        path = tmp_path / str(number)
        path.write_bytes(os.urandom(100_000 + number))
        locals_.append(path)
    seen = []
    files = Transfer(store, on_progress=seen.append).upload([(path, f"up/{path.name}") for path in locals_])
    assert seen[-1].files_done == seen[-1].files == 12
    assert seen[-1].bytes_done == seen[-1].bytes == sum(file.size for file in files)
    back = tmp_path / "back"
    back.mkdir()
    Transfer(store).download([(file, back / file.path.rpartition("/")[2]) for file in files])
    assert all((back / path.name).read_bytes() == path.read_bytes() for path in locals_)


def test_a_cancelled_transfer_leaves_nothing(store: FileStore, tmp_path: Path) -> None:
    paths = []
    for number in range(6):
        paths.append(tmp_path / str(number))
        paths[-1].write_bytes(os.urandom(3 << 20))
    transfer = Transfer(store, on_progress=lambda progress: transfer.cancel() if progress.bytes_done else None)
    with pytest.raises(Conflict, match="cancelled"):
        transfer.upload([(path, f"up/{path.name}") for path in paths])
    assert store.list(temporary=True) == []


def test_the_probe_finds_a_good_store_good_and_leaves_nothing(store: FileStore) -> None:
    report = store.probe()
    assert report.ok, [check for check in report.checks if not check.ok]
    assert report.fenced
    report.require()
    assert store.list(temporary=True) == []


def test_a_store_travels_by_pickle(store: FileStore) -> None:
    store.write("sub/file", b"x")
    with pickle.loads(pickle.dumps(store.child("sub"))) as copy:
        assert copy.read("file") == b"x"


def test_a_store_that_nobody_closes_does_not_complain(store_url: str) -> None:
    FileStore.at(store_url).write("x", b"1")
    gc.collect()


def test_a_closed_store_says_so(store_url: str) -> None:
    store = FileStore.at(store_url)
    store.close()
    store.close()
    with pytest.raises(Closed):
        store.read("x")


@pytest.mark.parametrize("root", ["taken", "taken/below"])
def test_a_file_in_the_place_of_a_folder_is_told_as_that(root: str, tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("a file")
    with FileStore.at(str(tmp_path / root)) as store, pytest.raises(InvalidRequest, match="stands where a folder has to be"):
        store.write("name", b"data")
    assert (tmp_path / "taken").read_text() == "a file"


def test_a_store_without_conditional_create_is_refused_unless_told(tmp_path: Path) -> None:
    with FileStore.at(f"dir::file://{tmp_path}") as store:
        assert not store.fenced
        with pytest.raises(InvalidRequest, match="unfenced"):
            store.create("claim", b"x")
        report = store.probe()
        assert [check.name for check in report.checks if not check.ok] == ["conditional create", "one winner"]
        with pytest.raises(InvalidRequest, match="unfenced"):
            report.require()
        report.require(unfenced=True)
    with FileStore.at(f"dir::file://{tmp_path}", unfenced=True) as store:
        store.create("claim", b"x")
        with pytest.raises(Conflict):
            store.create("claim", b"y")
        store.write("folder/file", b"z")
        with store.writer("folder/stream") as writer:
            writer.write(b"abc")
        assert [info.path for info in store.list()] == ["claim", "folder/file", "folder/stream"]


def test_an_unknown_protocol_is_an_invalid_request() -> None:
    with pytest.raises(InvalidRequest, match="nosuch"):
        FileStore.at("nosuch://host/x")
    with pytest.raises(InvalidRequest, match="bucket"):
        FileStore.at("s3://")


def test_s3a_means_s3(s3_root: str) -> None:
    with FileStore.at(s3_root) as store:
        store.write("x", b"1")
    with FileStore.at(s3_root.replace("s3://", "s3a://")) as store:
        assert store.read("x") == b"1"


def test_a_missing_bucket_is_named(s3_root: str) -> None:
    with FileStore.at("s3://no-such-bucket-here/x") as store, pytest.raises(NotFound, match="no-such-bucket-here"):
        store.write("a", b"")


def test_secrets_are_in_no_message(s3_server: str) -> None:
    with FileStore.at("s3://user:hunter22@bucket/x?sig=verysecret", key="AKIAEXAMPLE", secret="s3cr3t-value",
                      endpoint_url=s3_server.replace("http://", "http://boss:hunter22@"),
                      retry=RetryPolicy(attempts=1)) as store:
        shown = repr(store) + store.url + store.url_of("y")
        try:
            store.read("y")
        except HoldfastError as error:
            shown += str(error) + repr(error) + repr(error.__cause__)
    for secret in ("hunter22", "verysecret", "s3cr3t-value", "AKIAEXAMPLE"):
        assert secret not in shown


def test_memory_is_bounded_whatever_the_size(s3_root: str, tmp_path: Path) -> None:
    """120 MiB go through a process that may hold far less."""
    code = """
import resource, sys
from checkpoint.storage import FileStore
store = FileStore.at(sys.argv[1])
store.write("warm", b"up")
store.read("warm")
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
with store.writer("big") as writer:
    for _ in range(120):
        writer.write(bytes(1 << 20))
    file = writer.finish()
store.download("big", sys.argv[2], file)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10)
store.close()
"""
    run = subprocess.run([sys.executable, "-c", code, s3_root, str(tmp_path / "big")], capture_output=True, text=True,
                         check=True, timeout=120)
    assert int(run.stdout) < 100
    assert (tmp_path / "big").stat().st_size == 120 << 20


@pytest.mark.crash
def test_a_kill_in_the_middle_of_a_write_leaves_nothing_that_looks_whole(store_url: str) -> None:
    if store_url.startswith("memory"):
        pytest.skip("memory does not outlive its process")
    code = """
import sys
from checkpoint.storage import FileStore
store = FileStore.at(sys.argv[1])
writer = store.writer("chk-1/big")
for number in range(20):
    writer.write(bytes(1 << 20))
    if number == 17:
        print("writing", flush=True)
import time
time.sleep(60)
"""
    with subprocess.Popen([sys.executable, "-c", code, store_url], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "writing\n"
        process.send_signal(signal.SIGKILL)
    with FileStore.at(store_url) as store:
        assert store.list() == []
        assert not store.exists("chk-1/big")
