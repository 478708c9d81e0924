"""What snapshots of the memory and filesystem backends store: caps, deltas that fit the change, chains that end."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from statebackend import (
    AggregatingStateDescriptor,
    InvalidRequest,
    ListStateDescriptor,
    LocalFiles,
    MapStateDescriptor,
    ReducingStateDescriptor,
    ValueStateDescriptor,
    create_backend,
)
from statebackend.entries import read_entries
from statebackend.memory import snapshot as snapshot_module


@pytest.fixture
def files(tmp_path: Path) -> LocalFiles:
    return LocalFiles(tmp_path)


@pytest.fixture
def keyed() -> Any:
    backend = create_backend("filesystem")
    yield backend.keyed(uid="u", key_type=int)
    backend.close()


def _checkpoint(keyed: Any, number: int, files: LocalFiles) -> Any:
    handle = keyed.snapshot(number, files).run()
    keyed.checkpoint_completed(number)
    return handle


def _rows(files: LocalFiles, file: Any) -> int:
    return sum(batch.num_rows for batch in read_entries(files, file))


def test_a_state_larger_than_the_cap_is_refused_by_name(files: LocalFiles) -> None:
    with create_backend("memory", max_state_size="4KiB") as backend:
        keyed = backend.keyed(uid="u", key_type=int)
        small, large = keyed.state(ValueStateDescriptor("small", int)), keyed.state(ValueStateDescriptor("large", str))
        keyed.set_current_key(1)
        small.update(1)
        large.update("x" * 3000)
        keyed.snapshot(1, files).run()
        keyed.set_current_key(2)
        large.update("x" * 3000)
        with pytest.raises(InvalidRequest, match=r"large.*max_state_size"):
            keyed.snapshot(2, files).run()
        assert large.value() == "x" * 3000
        large.clear()
        keyed.snapshot(3, files).run()


def test_memory_snapshots_are_full_and_their_files_not_shared(files: LocalFiles) -> None:
    with create_backend("memory") as backend:
        keyed = backend.keyed(uid="u", key_type=int)
        value = keyed.state(ValueStateDescriptor("v", int))
        for key in range(100):
            keyed.set_current_key(key)
            value.update(key)
        _checkpoint(keyed, 1, files)
        handle = _checkpoint(keyed, 2, files)
        assert [_rows(files, file) for file in handle.files] == [100]
        assert not any(file.shared for file in handle.files)


def test_a_delta_holds_the_changed_entries_only(keyed: Any, files: LocalFiles) -> None:
    value, big = keyed.state(ValueStateDescriptor("v", int)), keyed.state(MapStateDescriptor("m", int, int))
    events = keyed.state(ListStateDescriptor("l", int))
    for key in range(1000):
        keyed.set_current_key(key)
        value.update(key)
    big.put_all({number: number for number in range(5000)})
    events.add_all([1, 2, 3])
    first = _checkpoint(keyed, 1, files)
    assert _rows(files, first.files[0]) == 6003
    big.put(77, 0)
    big.remove(78)
    keyed.set_current_key(5)
    value.update(0)
    keyed.set_current_key(6)
    value.clear()
    second = _checkpoint(keyed, 2, files)
    assert second.files[0] == first.files[0]
    assert _rows(files, second.files[1]) == 4
    assert second.new_bytes == second.files[1].size
    assert all(file.shared for file in second.files)
    third = _checkpoint(keyed, 3, files)
    assert (third.files, third.new_bytes) == (second.files, 0)


@pytest.mark.parametrize("descriptor", [
    ReducingStateDescriptor("s", int, "sum"), AggregatingStateDescriptor("s", int, "avg"), ValueStateDescriptor("s", float)])
def test_a_delta_of_columns_holds_the_changed_entries_only(keyed: Any, files: LocalFiles, descriptor: Any) -> None:
    state = keyed.state(descriptor)
    write = getattr(state, "add_many", None) or state.update_many
    write(pa.array(range(1000)), pa.array(range(1000)))
    first = _checkpoint(keyed, 1, files)
    assert _rows(files, first.files[0]) == 1000
    write(pa.array([5, 6, 5]), pa.array([1, 2, 3]))
    state.clear_many(pa.array([7]))
    keyed.set_current_key(8)
    state.clear()
    second = _checkpoint(keyed, 2, files)
    assert _rows(files, second.files[1]) == 4
    write(pa.array([8]), pa.array([1]))
    third = _checkpoint(keyed, 3, files)
    assert _rows(files, third.files[2]) == 1


def test_deltas_that_outgrow_the_base_are_replaced_by_a_new_one(keyed: Any, files: LocalFiles) -> None:
    value = keyed.state(ValueStateDescriptor("v", bytes))
    lengths = []
    for number in range(12):
        for key in range(20):
            keyed.set_current_key(key)
            value.update(bytes([number, key]) * 500)
        lengths.append(len(_checkpoint(keyed, number, files).files))
    assert max(lengths) <= 4
    assert lengths.count(1) >= 3


def test_a_chain_never_has_too_many_files(keyed: Any, files: LocalFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot_module, "MAX_FILES", 5)
    value = keyed.state(ValueStateDescriptor("v", int))
    for key in range(2000):
        keyed.set_current_key(key)
        value.update(key)
    for number in range(12):
        keyed.set_current_key(number)
        value.update(-1)
        assert len(_checkpoint(keyed, number, files).files) <= 5


def test_snapshots_that_are_never_confirmed_do_not_pile_up(keyed: Any, files: LocalFiles) -> None:
    value = keyed.state(ValueStateDescriptor("v", int))
    for number in range(80):
        keyed.set_current_key(number)
        value.update(number)
        keyed.snapshot(number, files).run()
    assert len(keyed._epochs) <= 33
    assert len(value.frozen) <= 2
    assert [value.value_many(pa.array([0, 79])).to_pylist()] == [[0, 79]]


def test_a_snapshot_that_is_confirmed_after_its_changes_were_forgotten_is_not_built_upon(
        keyed: Any, files: LocalFiles) -> None:
    value = keyed.state(ValueStateDescriptor("v", int))
    late = keyed.snapshot(1000, files)
    for number in range(40):
        keyed.set_current_key(number)
        value.update(number)
        keyed.snapshot(number, files).run()
    late.run()
    keyed.checkpoint_completed(1000)
    handle = keyed.snapshot(1001, files).run()
    assert sum(_rows(files, file) for file in handle.files) >= 40


def test_the_owner_reads_right_while_layers_are_folded(keyed: Any, files: LocalFiles) -> None:
    value = keyed.state(ValueStateDescriptor("v", int))
    for key in range(20_000):
        keyed.set_current_key(key)
        value.update(0)
    _checkpoint(keyed, 0, files)
    for number in range(1, 4):
        for key in range(0, 20_000, 2):
            keyed.set_current_key(key)
            value.update(number)
        pending = keyed.snapshot(number, files)
        writer = threading.Thread(target=pending.run)
        writer.start()
        while writer.is_alive():
            for key in range(0, 20_000, 997):
                keyed.set_current_key(key)
                assert value.value() == (0 if key % 2 else number)
        writer.join()
        keyed.checkpoint_completed(number)
