"""File references and the local folder that holds them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import xxhash

from statebackend import CorruptData, InvalidRequest, LocalFiles, NotFound, StateFile
from statebackend.files import relative_path, writing


@pytest.mark.parametrize("path", ["", "/etc/passwd", "../x", "a/../../x", "a/..", "..", "a\\b", "a\0b", "s3://bucket/x",
                                  "file:///x", ".", "a//../b", "./../x"])
def test_a_path_that_leaves_its_folder_is_refused(path: str) -> None:
    with pytest.raises(CorruptData):
        StateFile(path, 0, "")


@pytest.mark.parametrize("path", ["a", "shared/a-1.arrow", "chk-3/x..y", "a/b/c"])
def test_a_path_below_its_folder_is_taken_as_it_is(path: str) -> None:
    assert relative_path(path) == path


@pytest.mark.parametrize("file", [StateFile("a/b", 3, "ff"), StateFile("a", 0, "", shared=True),
                                  StateFile("a", 2, xxhash.xxh3_128_hexdigest(b"xy"), inline=b"xy")])
def test_a_reference_survives_json(file: StateFile) -> None:
    assert StateFile.from_json(file.to_json()) == file


@pytest.mark.parametrize("data", [{"path": "../x", "size": 1, "checksum": ""}, {"path": "x", "size": -1, "checksum": ""},
                                  {"path": "x", "checksum": ""}, {"path": "x", "size": "many", "checksum": ""},
                                  {"path": "x", "size": 1, "checksum": "", "inline": "?"}])
def test_a_damaged_reference_is_named(data: dict[str, Any]) -> None:
    with pytest.raises(CorruptData):
        StateFile.from_json(data)


def test_an_inline_file_is_verified() -> None:
    good = StateFile("a", 2, xxhash.xxh3_128_hexdigest(b"xy"), inline=b"xy")
    assert good.inline_verified() == b"xy"
    for bad in (StateFile("a", 3, good.checksum, inline=b"xy"), StateFile("a", 2, good.checksum, inline=b"xz"),
                StateFile("a", 2, good.checksum)):
        with pytest.raises(CorruptData):
            bad.inline_verified()


def test_a_writer_given_up_on_a_full_disk_leaves_nothing(tmp_path: Path) -> None:
    writer = LocalFiles(tmp_path / "store").create("part", shared=True)
    os.dup2(os.open("/dev/full", os.O_WRONLY), writer._stream.fileno())  # type: ignore[attr-defined]
    writer.write(b"buffered until the file is closed")
    writer.abort()
    assert not list((tmp_path / "store").iterdir())


def test_what_is_written_is_read_and_fetched(tmp_path: Path) -> None:
    files = LocalFiles(tmp_path / "store")
    with writing(files, "part", shared=True) as (writer, done):
        writer.write(b"hello ")
        writer.write(memoryview(b"world"))
    (file,) = done
    assert file.size == 11
    assert file.shared
    with files.open(file) as stream:
        assert stream.read() == b"hello world"
    files.fetch(file, tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == b"hello world"
    again = files.upload(tmp_path / "copy", "part", shared=False)
    assert again.path != file.path
    assert again.checksum == file.checksum


def test_fetching_over_an_existing_file_replaces_it(tmp_path: Path) -> None:
    files = LocalFiles(tmp_path / "store")
    with writing(files, "part", shared=True) as (writer, done):
        writer.write(b"new")
    target = tmp_path / "copy"
    target.write_bytes(b"something longer")
    files.fetch(done[0], target)
    assert target.read_bytes() == b"new"
    inline = StateFile("a", 2, xxhash.xxh3_128_hexdigest(b"xy"), inline=b"xy")
    files.fetch(inline, target)
    assert target.read_bytes() == b"xy"
    with files.open(done[0]) as stream:
        assert stream.read() == b"new"


def test_a_write_that_fails_leaves_nothing(tmp_path: Path) -> None:
    files = LocalFiles(tmp_path)
    with pytest.raises(OSError, match="full"), writing(files, "part", shared=True) as (writer, _):
        writer.write(b"x")
        raise OSError("full")
    assert list(tmp_path.iterdir()) == []


def test_a_missing_or_changed_file_is_named(tmp_path: Path) -> None:
    files = LocalFiles(tmp_path)
    with writing(files, "part", shared=True) as (writer, done):
        writer.write(b"hello")
    path = tmp_path / done[0].path
    for damaged in (b"hell", b"hellp", b"hello!"):
        path.write_bytes(damaged)
        for call in (lambda: files.open(done[0]), lambda: files.fetch(done[0], tmp_path / "copy")):
            with pytest.raises(CorruptData) as caught:
                call()
            assert done[0].path in str(caught.value)
    path.unlink()
    with pytest.raises(NotFound, match="missing"):
        files.open(done[0])


@pytest.mark.parametrize("hint", ["a/b", "../x", ".hidden", "", "a\\b", "a b", "ä"])
def test_a_hint_that_is_no_plain_name_is_refused(tmp_path: Path, hint: str) -> None:
    with pytest.raises(InvalidRequest):
        LocalFiles(tmp_path).create(hint, shared=True)


def test_an_aborted_or_finished_writer_may_be_aborted_again(tmp_path: Path) -> None:
    files = LocalFiles(tmp_path)
    writer = files.create("part", shared=True)
    writer.abort()
    writer.abort()
    writer = files.create("part", shared=True)
    writer.write(b"x")
    file = writer.finish()
    writer.abort()
    with files.open(file) as stream:
        assert stream.read() == b"x"
