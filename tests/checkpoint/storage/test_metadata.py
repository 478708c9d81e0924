"""`_metadata`: what is written is read back, golden files stay readable, and every kind of damage is told apart."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from checkpoint.storage import ChannelStateEntry, CheckpointMetadata, OperatorEntry, SubtaskEntry
from statebackend.backend import KeyedHandle
from statebackend.descriptors import MapStateDescriptor, ValueStateDescriptor
from statebackend.errors import CorruptData, IncompatibleState, InvalidRequest
from statebackend.files import StateFile
from statebackend.keygroups import KeyGroupRange
from statebackend.schema import StateSchema
from statebackend.ttl import TtlConfig
from statebackend.types import state_type

GOLDEN = Path(__file__).parents[2] / "golden" / "v1" / "metadata" / "_metadata"


def file_of(path: str, data: bytes = b"", *, shared: bool = False, inline: bool = False) -> StateFile:
    return StateFile(path, len(data), xxhash.xxh3_128_hexdigest(data), shared, data if inline else None)


def example() -> CheckpointMetadata:
    """One of everything; the golden file holds exactly this."""
    schemas = (StateSchema.of(ValueStateDescriptor("total", int, default=0), 1),
               StateSchema.of(MapStateDescriptor("seen", str, float, ttl=TtlConfig("7d")), 2))
    key_type = state_type(str).to_json()
    subtasks = tuple(
        SubtaskEntry(index, keyed=(KeyedHandle(
            "entries", KeyGroupRange(64 * index, 64 * index + 63), 128, key_type, schemas,
            (file_of(f"shared/entries-{index}", b"base", shared=True),
             file_of(f"shared/delta-{index}", b"delta", shared=True, inline=True)),
            {"version": 1, "next_sequence": 7 + index}, 5),),
            operator=file_of("chk-5/operator", b"op", inline=True))
        for index in range(2))
    window = SubtaskEntry(
        0, in_flight=file_of("chk-5/in-flight", b"records"),
        input_channels=(ChannelStateEntry("clicks->count", 1, 0, file_of("chk-5/channel", b"c")),),
        output_channels=(ChannelStateEntry("count->out", 0, 2, file_of("chk-5/out", b"o")),))
    return CheckpointMetadata(
        "0123456789abcdef0123456789abcdef", "clicks", 5, 3, "checkpoint", "native", 1_700_000_000_000,
        1_700_000_000_250, True, 4,
        (OperatorEntry("count", "Count per user", 2, 128, subtasks), OperatorEntry("window", "Fenster ä", 1, 128, (window,)),
         OperatorEntry("out", "Out", 2, 128, (SubtaskEntry(1, finished=True),))),
        {"statistics": {"sync_ms": 3}, "offsets": [1, None, "x"]})


def test_what_is_written_is_read_back() -> None:
    assert CheckpointMetadata.from_bytes(example().to_bytes()) == example()


def test_the_golden_file_of_version_1_is_read() -> None:
    assert CheckpointMetadata.from_bytes(GOLDEN.read_bytes()) == example()


def test_version_1_is_still_written_byte_for_byte() -> None:
    assert example().to_bytes() == GOLDEN.read_bytes()


def test_it_is_json_that_anybody_can_read() -> None:
    data = json.loads(example().to_bytes())
    assert data["version"] == 1
    assert next(iter(data)) == "version"
    assert list(data)[-1] == "checksum"
    assert [operator["uid"] for operator in data["operators"]] == ["count", "window", "out"]
    count = data["operators"][0]
    assert [schema["name"] for schema in count["schemas"]] == ["total", "seen"]
    assert [subtask["keyed"][0]["schemas"] for subtask in count["subtasks"]] == [[0, 1], [0, 1]]
    assert count["subtasks"][1]["keyed"][0]["key_groups"] == [64, 127]


def test_schemas_are_stored_once_per_operator() -> None:
    wide = example().operators[0]
    wide = dataclasses.replace(wide, parallelism=100, subtasks=tuple(
        dataclasses.replace(wide.subtasks[0], index=index) for index in range(100)))
    assert dataclasses.replace(example(), operators=(wide,)).to_bytes().count(b'"state_id"') == 2


def test_the_summary_is_the_head() -> None:
    summary = CheckpointMetadata.summary(example().to_bytes())
    assert (summary.job_name, summary.checkpoint_id, summary.generation, summary.parent) == ("clicks", 5, 3, 4)


def test_sizes_tell_all_bytes_and_the_new_ones() -> None:
    assert example().full_size == 2 * (4 + 5) + 2 + 7 + 1 + 1
    assert example().new_size == 2 * 5 + 2 * 2 + 7 + 1 + 1
    assert set(example().stored_files()) == {"shared/entries-0", "shared/entries-1", "chk-5/in-flight",
                                             "chk-5/channel", "chk-5/out"}


def test_every_cut_is_noticed() -> None:
    data = example().to_bytes()
    for length in [*range(60), *range(60, len(data), 37), len(data) - 1]:
        with pytest.raises((CorruptData, InvalidRequest)) as caught:
            CheckpointMetadata.from_bytes(data[:length], path="the/path/_metadata")
        assert isinstance(caught.value, CorruptData)
        assert "the/path/_metadata" in str(caught.value)


@given(st.data())
def test_every_changed_byte_is_noticed(data: st.DataObject) -> None:
    good = example().to_bytes()
    position = data.draw(st.integers(0, len(good) - 1))
    bad = bytearray(good)
    bad[position] ^= data.draw(st.integers(1, 255))
    with pytest.raises((CorruptData, InvalidRequest, IncompatibleState)):
        CheckpointMetadata.from_bytes(bytes(bad))


def resealed(change: dict[str, Any]) -> bytes:
    """A file that was changed and given a right checksum: what another program might write."""
    data = json.loads(example().to_bytes())
    del data["checksum"]
    data.update(change)
    body = json.dumps(data, separators=(",", ":")).encode()[:-1]
    return body + b',"checksum":"' + xxhash.xxh3_128_hexdigest(body).encode() + b'"}'


def test_a_newer_version_is_named_with_the_way_out() -> None:
    with pytest.raises(IncompatibleState, match="newer release") as caught:
        CheckpointMetadata.from_bytes(resealed({"version": 2}))
    assert "upgrade" in str(caught.value)
    newer = json.dumps({"holdfast": True, "version": 99}).encode()
    with pytest.raises(IncompatibleState, match="99"):
        CheckpointMetadata.from_bytes(newer)
    with pytest.raises(CorruptData, match="never was"):
        CheckpointMetadata.from_bytes(resealed({"version": 0}))


@pytest.mark.parametrize("data", [b"\x49\x60\x67\x2d", b"[1,2]", b"{}", b'{"a":1}', b"PAR1", b'"x"', b"\xff\xfe"])
def test_other_files_are_not_ours(data: bytes) -> None:
    with pytest.raises(InvalidRequest, match="not the metadata"):
        CheckpointMetadata.from_bytes(data)


@pytest.mark.parametrize("change", [
    {"operators": 5}, {"operators": [{}]}, {"checkpoint_id": "x"}, {"kind": "other"},
    {"operators": [{"uid": "a", "name": "a", "parallelism": 200, "max_parallelism": 128}]},
    {"operators": [{"uid": "a", "name": "a", "parallelism": 1, "max_parallelism": 128}] * 2},
    {"operators": [{"uid": "a", "name": "a", "parallelism": 1, "max_parallelism": 128, "subtasks": [
        {"index": 0, "operator": {"path": "../../etc/passwd", "size": 1, "checksum": "0"}}]}]},
    {"operators": [{"uid": "a", "name": "a", "parallelism": 1, "max_parallelism": 128, "subtasks": [
        {"index": 0, "operator": {"path": "x", "size": 1, "checksum": "0", "inline": "%%%"}}]}]},
    {"operators": [{"uid": "a", "name": "a", "parallelism": 1, "max_parallelism": 128, "subtasks": [
        {"index": 0, "keyed": [{"format": "entries", "key_groups": [0, 1], "max_parallelism": 128, "key_type": 4,
                                "schemas": [9], "files": []}]}]}]},
])
def test_a_well_sealed_file_that_makes_no_sense_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises((CorruptData, InvalidRequest)):
        CheckpointMetadata.from_bytes(resealed(change), path="x/_metadata")


def test_a_field_of_a_later_release_is_ignored() -> None:
    assert CheckpointMetadata.from_bytes(resealed({"colour": "blue"})) == example()


def test_parallelism_beyond_the_max_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="max parallelism is lower"):
        OperatorEntry("a", "a", 129, 128)


def test_properties_that_are_no_json_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="not JSON"):
        dataclasses.replace(example(), properties={"x": object()}).to_bytes()
