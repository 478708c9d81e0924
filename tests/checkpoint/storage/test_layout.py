"""Paths and ids, URLs and what is shown of them."""

from __future__ import annotations

import pytest

import checkpoint.storage as public
from checkpoint.storage import CheckpointMetadata, JobId, JobStorage, layout
from checkpoint.storage.urls import protocol_of, redacted, scrubber
from statebackend.errors import InvalidRequest


def test_job_ids_are_32_random_hex_digits() -> None:
    assert len(JobId.random()) == 32
    assert JobId.random() != JobId.random()
    for bad in ("", "x" * 32, "0" * 31, "0" * 33, "../" + "0" * 29, "A" * 32):
        with pytest.raises(InvalidRequest):
            JobId(bad)


def test_checkpoint_folders_are_read_back() -> None:
    assert layout.checkpoint_folder(17) == "chk-17"
    assert layout.checkpoint_of_folder("chk-17") == 17
    for other in ("chk-", "chk-0", "chk-01", "chk-1x", "shared", "xchk-1"):
        assert layout.checkpoint_of_folder(other) is None


def test_generation_files_are_told_from_their_bases() -> None:
    assert layout.generation_of(layout.generation_file(12)) == 12
    assert layout.generation_of(layout.generation_base_file(12)) is None
    assert layout.base_generation_of(layout.generation_base_file(12)) == 12
    assert layout.base_generation_of(layout.generation_file(12)) is None


def test_savepoints_are_named_after_their_job() -> None:
    job = JobId.random()
    assert layout.is_savepoint_folder(layout.new_savepoint_folder(job))
    assert layout.new_savepoint_folder(job).startswith(f"savepoint-{job[:6]}-")


def test_private_files_name_their_generation() -> None:
    path = layout.private_file("chk-1", "a uid-g9-" + "0" * 32, 3, "hint", 12)
    assert layout.is_private_file_of(path, 12)
    assert not layout.is_private_file_of(path, 9)


@pytest.mark.parametrize(("url", "protocol", "shown"), [
    ("/a/b", "file", "/a/b"), ("/odd::name/b", "file", "/odd::name/b"),
    ("file:///a/b?c", "file", "file:///a/b?c"), ("s3://bucket/x", "s3", "s3://bucket/x"),
    ("s3://key:secret@bucket/x?sig=1", "s3", "s3://bucket/x"), ("memory://a", "memory", "memory://a"),
    ("ftp://u:p@h:21/x", "ftp", "ftp://h:21/x"), ("dir::file:///x", "dir", "dir::file:///x"),
    ("simplecache::s3://k:s@b/x", "simplecache", "simplecache::s3://b/x"),
])
def test_urls_are_shown_without_credentials(url: str, protocol: str, shown: str) -> None:
    assert protocol_of(url) == protocol
    assert redacted(url) == shown


def test_secrets_are_scrubbed_from_texts() -> None:
    scrub = scrubber({"key": "AKIA1234", "client_kwargs": {"aws_session_token": "tok-en"}, "anon": False,
                      "endpoint_url": "http://host"})
    text = scrub("AKIA1234 at https://u:p@host/x?Signature=abc said tok-en")
    assert text == "*** at https://***@host/x said ***"


def test_every_public_name_is_there() -> None:
    assert sorted(public.__all__) == public.__all__
    assert set(public.__all__) == set(public._MODULE_OF)
    assert all(getattr(public, name) is not None for name in public.__all__)


def test_options_of_a_remote_root_are_not_forced_on_a_local_savepoint(s3_root: str, s3_server: str, tmp_path: object,
                                                                     monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ENDPOINT_URL")
    with JobStorage(s3_root, JobId.random(), endpoint_url=s3_server) as storage:
        storage.claim_generation()
        folder = storage.new_savepoint_folder(str(tmp_path))
        file = storage.savepoint_target(folder, "x", 0).put("x", b"x")
        assert file.inline == b"x"
        url = storage.publish(CheckpointMetadata(storage.job_id, "flow", 1, kind="savepoint"), folder=folder)
        assert storage.load(url).is_savepoint
