"""Entry files: written, cut, merged and damaged. The model is a dict to which operations are applied in order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from statebackend import CorruptData, IncompatibleState, KeyGroupRange, LocalFiles
from statebackend.entries import (
    OP_DELETE,
    OP_DELETE_PREFIX,
    OP_PUT,
    EntryFileWriter,
    entry_batch,
    key_groups_of_entries,
    merge_entries,
    pack_sequence,
    pack_time,
    prefix_of,
    read_entries,
    unpack_time,
    write_entries,
)

GROUPS = st.integers(0, 3)
TAILS = st.binary(max_size=3) | st.sampled_from([b"\xff", b"\xff\xff", b"a", b"ab", b"abc", b"a\xff", b"\x00"])
OPERATIONS = st.lists(st.tuples(GROUPS, TAILS, st.sampled_from([OP_PUT, OP_PUT, OP_DELETE, OP_DELETE_PREFIX])), max_size=25)
Layer = list[tuple[int, bytes, int]]


def apply(model: dict[bytes, bytes], key: bytes, value: bytes | None, op: int) -> None:
    if op == OP_PUT:
        model[key] = value or b""
    elif op == OP_DELETE:
        model.pop(key, None)
    else:
        for other in [other for other in model if other.startswith(key)]:
            del model[other]


def batches_of(layer: Layer, number: int, rows: int) -> tuple[list[pa.RecordBatch], list[tuple[bytes, bytes, int]]]:
    """A layer as batches sorted by key group (only), in the order in which things happened within a group."""
    happened = [(group.to_bytes(2, "big") + tail, f"{number}/{at}".encode(), op)
                for at, (group, tail, op) in enumerate(layer)]
    ordered = sorted(happened, key=lambda entry: entry[0][:2])
    batches = []
    for begin in range(0, len(ordered), rows):
        keys, values, ops = zip(*ordered[begin:begin + rows])
        put = [value if op == OP_PUT else None for value, op in zip(values, ops)]
        batches.append(entry_batch(list(keys), put, list(ops)))
    return batches, ordered


def contents(batches: Any) -> list[tuple[bytes, bytes]]:
    return [(row["key"], row["value"]) for batch in batches for row in batch.to_pylist()]


@settings(max_examples=150, deadline=None)
@given(st.lists(OPERATIONS, max_size=4), st.integers(1, 7))
def test_merged_layers_are_what_a_dict_would_hold(layers: list[Layer], rows: int) -> None:
    model: dict[bytes, bytes] = {}
    sources = []
    for number, layer in enumerate(layers):
        batches, ordered = batches_of(layer, number, rows)
        sources.append(batches)
        for key, value, op in ordered:
            apply(model, key, value, op)
    merged = list(merge_entries(sources))
    assert contents(merged) == sorted(model.items())
    assert all(op == OP_PUT for batch in merged for op in batch.column("op").to_pylist())


@settings(max_examples=150, deadline=None)
@given(st.lists(OPERATIONS, min_size=2, max_size=4), st.integers(1, 7), st.integers(0, 3))
def test_upper_layers_can_be_merged_first_with_their_deletes_kept(layers: list[Layer], rows: int, at: int) -> None:
    sources = [batches_of(layer, number, rows)[0] for number, layer in enumerate(layers)]
    lower, upper = sources[:at], sources[at:]
    folded = list(merge_entries(upper, keep_deletes=True))
    assert contents(merge_entries([*lower, folded])) == contents(merge_entries(sources))


def test_a_put_of_a_deleted_prefix_itself_does_not_hide_the_delete() -> None:
    older = [entry_batch([b"\0\0a", b"\0\0ab"], [b"1", b"2"])]
    newer = [entry_batch([b"\0\0a", b"\0\0a"], [None, b"3"], [OP_DELETE_PREFIX, OP_PUT])]
    folded = list(merge_entries([newer], keep_deletes=True))
    assert contents(merge_entries([older, folded])) == [(b"\0\0a", b"3")]


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 65535), TAILS, st.binary(max_size=5)), max_size=30), st.integers(0, 65535),
       st.integers(0, 32767), st.sampled_from([None, "lz4", "zstd"]))
def test_a_file_gives_back_what_was_written_cut_to_a_range(tmp_path_factory: pytest.TempPathFactory, entries: list[Any],
                                                           low: int, span: int, compression: str | None) -> None:
    files = LocalFiles(tmp_path_factory.mktemp("entries"))
    ordered = sorted((group.to_bytes(2, "big") + tail, value) for group, tail, value in entries)
    batches = [entry_batch([key], [value]) for key, value in ordered]
    file = write_entries(files, "delta", batches, shared=True, compression=compression)
    assert contents(read_entries(files, file)) == ordered
    groups = KeyGroupRange(min(low, 32767), min(low + span, 32767))
    wanted = [(key, value) for key, value in ordered if int.from_bytes(key[:2], "big") in groups]
    assert contents(read_entries(files, file, groups)) == wanted


def test_key_groups_of_sliced_columns() -> None:
    keys = pa.array([prefix_of(group, 7) for group in (0, 1, 300, 65535)])
    assert key_groups_of_entries(keys).tolist() == [0, 1, 300, 65535]
    assert key_groups_of_entries(keys.slice(2)).tolist() == [300, 65535]
    assert key_groups_of_entries(keys.slice(4)).tolist() == []


@given(st.integers(-2**63, 2**63 - 1), st.integers(-2**63, 2**63 - 1))
def test_times_sort_as_their_bytes(left: int, right: int) -> None:
    assert unpack_time(pack_time(left)) == left
    assert unpack_time(b"ab" + pack_time(right), 2) == right
    assert (left < right) == (pack_time(left) < pack_time(right))


def test_sequences_sort_as_their_bytes() -> None:
    assert pack_sequence(255) < pack_sequence(256) < pack_sequence(2**64 - 1)


def test_a_file_that_was_cut_short_or_changed_is_named(tmp_path: Path) -> None:
    files = LocalFiles(tmp_path)
    file = write_entries(files, "delta", [entry_batch([b"\0\0a" * 50], [b"value" * 50])], shared=False)
    path = tmp_path / file.path
    whole = path.read_bytes()
    for damaged in (whole[:-1], whole[:20], b"", whole[:60] + bytes([whole[60] ^ 1]) + whole[61:]):
        path.write_bytes(damaged)
        with pytest.raises(CorruptData) as caught:
            list(read_entries(files, file))
        assert file.path in str(caught.value)


class Unverified(LocalFiles):
    """A source that verifies in the background, so that damage reaches the reader."""

    def open(self, file: Any) -> Any:
        return open(self.directory / file.path, "rb")


def test_damage_that_reaches_the_reader_is_never_another_error(tmp_path: Path) -> None:
    files = Unverified(tmp_path)
    file = write_entries(files, "delta", [entry_batch([b"\0\0" + bytes([n]) for n in range(100)], [b"value"] * 100)],
                         shared=False)
    path = tmp_path / file.path
    whole = path.read_bytes()
    for cut in range(0, len(whole), 97):
        path.write_bytes(whole[:cut])
        with pytest.raises(CorruptData):
            list(read_entries(files, file))


def test_a_file_of_a_newer_version_is_refused(tmp_path: Path) -> None:
    files = LocalFiles(tmp_path)
    schema = pa.schema([("key", pa.binary()), ("value", pa.binary()), ("op", pa.uint8())],
                       metadata={"holdfast.version": "99"})
    writer = files.create("delta", shared=False)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, schema):
        pass
    writer.write(sink.getvalue().to_pybytes())
    with pytest.raises(IncompatibleState, match="99"):
        list(read_entries(files, writer.finish()))


def test_a_write_that_fails_leaves_nothing_behind(tmp_path: Path) -> None:
    def failing() -> Any:
        yield entry_batch([b"\0\0a"], [b"1"])
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        write_entries(LocalFiles(tmp_path), "delta", failing(), shared=False)
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_visible_before_finish(tmp_path: Path) -> None:
    writer = EntryFileWriter(LocalFiles(tmp_path), "delta", shared=True)
    writer.write(entry_batch([b"\0\0a"], [b"1"]))
    assert [path.name for path in tmp_path.iterdir() if not path.name.startswith(".")] == []
    assert writer.rows == 1
    file = writer.finish()
    assert file.shared
    assert [path.name for path in tmp_path.iterdir()] == [file.path]
