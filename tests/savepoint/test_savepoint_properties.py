"""For random states of every type: what is written is what is read; rescaling keeps it; a diff is its patch."""

from __future__ import annotations

import datetime
import json
import math
import tempfile
import uuid
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import savepoint
from checkpoint.storage.metadata import CheckpointMetadata, OperatorEntry, SubtaskEntry
from checkpoint.storage.store import FileStore
from savepoint import Edit
from savepoint.diff import changes
from savepoint.values import to_plain
from statebackend import ListStateDescriptor, LocalFiles, MapStateDescriptor, ValueStateDescriptor, create_backend
from statebackend.types import StateType, state_type

UTC = datetime.UTC
moments = st.datetimes(datetime.datetime(1900, 1, 1), datetime.datetime(2200, 1, 1))
KEYS: dict[str, tuple[Any, st.SearchStrategy[Any]]] = {
    "int": (int, st.integers(-2**63, 2**63 - 1)),
    "small int": (pa.int16(), st.integers(-2**15, 2**15 - 1)),
    "str": (str, st.text(st.characters(exclude_categories=["Cs"]), max_size=12)),
    "bytes": (bytes, st.binary(max_size=8)),
    "bool": (bool, st.booleans()),
    "float": (float, st.floats(allow_nan=False)),
    "date": (datetime.date, st.dates(datetime.date(1900, 1, 1), datetime.date(2200, 1, 1))),
    "datetime": (datetime.datetime, moments),
    "uuid": (uuid.UUID, st.uuids()),
    "decimal": (Decimal, st.decimals(-10**6, 10**6, places=3)),
    "tuple": (tuple[str, int], st.tuples(st.text(st.characters(exclude_categories=["Cs"]), max_size=5),
                                         st.integers(-9, 9))),
}
VALUES: dict[str, tuple[Any, st.SearchStrategy[Any]]] = {
    **KEYS,
    "time": (datetime.time, st.times()),
    "timedelta": (datetime.timedelta, st.timedeltas(datetime.timedelta(-9999), datetime.timedelta(9999))),
    "optional": (int | None, st.none() | st.integers(-9, 9)),
    "list": (list[int], st.lists(st.integers(-9, 9), max_size=3)),
    "map": (dict[str, float], st.dictionaries(st.text("abc", max_size=2), st.floats(-1, 1), max_size=2)),
    "nested": (tuple[list[str], dict[str, int]],
               st.tuples(st.lists(st.text("xy", max_size=2), max_size=2),
                         st.dictionaries(st.text("ab", max_size=1), st.integers(0, 9), max_size=2))),
    "nan": (float, st.just(math.nan)),
}
QUICK = settings(max_examples=6, deadline=None, suppress_health_check=list(HealthCheck))


def take(folder: Path, key_type: Any, descriptor: Any, model: dict[Any, Any], max_parallelism: int) -> None:
    """A native savepoint of a filesystem backend that holds the model."""
    files = LocalFiles(folder)
    with create_backend("filesystem") as backend:
        keyed = backend.keyed(uid="op", key_type=key_type, max_parallelism=max_parallelism)
        state = keyed.state(descriptor)
        for key, value in model.items():
            keyed.set_current_key(key)
            if isinstance(descriptor, MapStateDescriptor):
                state.put_all(value)
            else:
                state.update(value)
        handle = keyed.snapshot(1, files).run()
    entry = OperatorEntry("op", "op", 1, max_parallelism, (SubtaskEntry(0, keyed=(handle,)),))
    metadata = CheckpointMetadata("0" * 32, "job", 1, kind="savepoint", operators=(entry,))
    FileStore.at(str(folder)).write("_metadata", metadata.to_bytes())


def plain(kind: StateType, value: Any) -> str:
    """A value as something that compares: NaN equals NaN, dicts ignore their order."""
    [again] = kind.from_arrow(kind.to_arrow([value]))
    return json.dumps(to_plain(again), sort_keys=True)


def contents(path: Path, key_type: Any, descriptor: Any) -> list[Any]:
    """Every entry of the state as text, sorted."""
    kind = state_type(key_type)
    with savepoint.open(path) as opened:
        table = opened.read("op", "s").read_all()
    keys = [json.dumps(to_plain(key)) for key in kind.from_arrow(table.column("key"))]
    name = "map_value" if "map_value" in table.column_names else "value"
    values = [json.dumps(to_plain(value), sort_keys=True)
              for value in descriptor.value_type.from_arrow(table.column(name))]
    suffix = table.column("map_key").to_pylist() if "map_key" in table.column_names else \
        table.column("list_index").to_pylist() if "list_index" in table.column_names else [None] * len(keys)
    return sorted(zip(keys, map(str, suffix), values))


def expected(model: dict[Any, Any], key_type: Any, descriptor: Any) -> list[Any]:
    kind, found = state_type(key_type), []
    for key, value in model.items():
        shown = plain(kind, key)
        if isinstance(descriptor, MapStateDescriptor):
            found += [(shown, str(inner), plain(descriptor.value_type, item)) for inner, item in value.items()]
        elif isinstance(descriptor, ListStateDescriptor):
            found += [(shown, str(index), plain(descriptor.value_type, item)) for index, item in enumerate(value)]
        else:
            found.append((shown, "None", plain(descriptor.value_type, value)))
    return sorted(found)


def round_trip(key_type: Any, descriptor: Any, model: dict[Any, Any], max_parallelism: int, new: int) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        take(folder / "native", key_type, descriptor, model, max_parallelism)
        savepoint.convert_savepoint(folder / "native", folder / "open")
        wanted = expected(model, key_type, descriptor)
        assert contents(folder / "native", key_type, descriptor) == wanted
        assert contents(folder / "open", key_type, descriptor) == wanted
        savepoint.rescale_savepoint(folder / "open", folder / "new", parallelism=min(3, new), max_parallelism=new)
        assert contents(folder / "new", key_type, descriptor) == wanted
        assert savepoint.verify_savepoint(folder / "new")
        assert not [state for state in savepoint.compare(folder / "native", folder / "new").states if not state.is_none]
        savepoint.convert_savepoint(folder / "new", folder / "back", format="native")
        assert contents(folder / "back", key_type, descriptor) == wanted


def equal_keys(kind: Any, model: dict[Any, Any]) -> dict[Any, Any]:
    """One entry for keys that are the same as stored (0.0 and -0.0, 1.0 and 1.00)."""
    known = state_type(kind)
    return {known.decode_key(known.encode_key(key)): value for key, value in model.items()}


@pytest.mark.parametrize("key", KEYS)
@QUICK
@given(data=st.data())
def test_values_under_keys_of_every_type_are_read_back(key: str, data: st.DataObject) -> None:
    key_type, keys = KEYS[key]
    model = equal_keys(key_type, data.draw(st.dictionaries(keys, st.integers(-9, 9), max_size=12)))
    round_trip(key_type, ValueStateDescriptor("s", int), model, data.draw(st.sampled_from([1, 7, 128])),
               data.draw(st.sampled_from([1, 10, 256])))


@pytest.mark.parametrize("value", VALUES)
@QUICK
@given(data=st.data())
def test_values_of_every_type_are_read_back(value: str, data: st.DataObject) -> None:
    value_type, values = VALUES[value]
    kind = data.draw(st.sampled_from(["value", "list", "map"]))
    if kind == "value":
        descriptor: Any = ValueStateDescriptor("s", value_type)
        model = data.draw(st.dictionaries(st.integers(0, 50), values, max_size=10))
    elif kind == "list":
        descriptor = ListStateDescriptor("s", value_type)
        model = data.draw(st.dictionaries(st.integers(0, 50), st.lists(values, min_size=1, max_size=4), max_size=6))
    else:
        descriptor = MapStateDescriptor("s", str, value_type)
        model = data.draw(st.dictionaries(st.integers(0, 50), st.dictionaries(st.text("abc", max_size=2), values, min_size=1,
                                                                              max_size=3), max_size=6))
    round_trip(int, descriptor, model, 16, 5)


@QUICK
@given(model=st.dictionaries(st.text("abcde", max_size=3), st.integers(), max_size=20).map(
    lambda model: {key: value % 2**62 for key, value in model.items()}),
    edits=st.dictionaries(st.text("abcde", max_size=3), st.none() | st.integers(-9, 9), max_size=8))
def test_the_diff_of_a_savepoint_and_its_edited_copy_is_the_patch(
        model: dict[str, int], edits: dict[str, int | None]) -> None:
    edits = {key: value for key, value in edits.items() if value is not None or key in model}
    if not edits:
        return
    patch = [{"op": "delete" if value is None else "set", "operator": "op", "state": "s", "key": key,
              **({} if value is None else {"value": value})} for key, value in edits.items()]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        take(folder / "native", str, ValueStateDescriptor("s", int), model, 16)
        with Edit(folder / "native", patch) as edit:
            edit.write(folder / "new")
        found = {row["key"]: (row["before"], row["after"]) for row in changes(folder / "native", folder / "new")}
    assert found == {key: (model.get(key), value) for key, value in edits.items() if model.get(key) != value}
