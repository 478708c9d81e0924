"""Bytes that version 1 wrote: every later release reads them as they are. The files under tests/golden/v1 never change."""

from __future__ import annotations

import enum
import json
import math
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import pyarrow as pa
import pytest

from statebackend import KeyGroupRange, OperatorStateStore
from statebackend.descriptors import ListStateDescriptor, MapStateDescriptor, ValueStateDescriptor
from statebackend.entries import OP_DELETE, OP_DELETE_PREFIX, OP_PUT, merge_entries, read_entries
from statebackend.errors import InvalidRequest
from statebackend.files import LocalFiles, StateFile
from statebackend.operator_state import OperatorStateSnapshot
from statebackend.schema import StateSchema
from statebackend.ttl import TtlConfig
from statebackend.types import Digits, Zoned, state_type, state_type_from_json

GOLDEN = Path(__file__).parent.parent / "golden" / "v1"


class Colour(enum.Enum):
    RED = 1
    BLUE = 2


class Point(NamedTuple):
    x: int
    y: int | None


@dataclass
class Event:
    user: str
    at: datetime
    amount: Decimal
    tags: list[str] = field(default_factory=list)
    where: Point | None = None
    kind: Colour = Colour.RED


EVENT = Event("ü", datetime(2024, 2, 29, 12, 30, 0, 5), Decimal("1.5"), ["a", "b"], Point(1, None), Colour.BLUE)
CASES: dict[str, tuple[Any, list[Any]]] = {
    "int": (int, [0, 1, -1, 2**63 - 1, -2**63]),
    "int32": (pa.int32(), [0, -1, 2**31 - 1]),
    "uint64": (pa.uint64(), [0, 2**64 - 1]),
    "float": (float, [0.0, -1.5, math.inf, -math.inf]),
    "float32": (pa.float32(), [1.5]),
    "bool": (bool, [True, False]),
    "str": (str, ["", "a", "a\0b", "ü漢😀"]),
    "bytes": (bytes, [b"", b"\0\xff", b"abc"]),
    "bytes of 2": (pa.binary(2), [b"\0a"]),
    "date": (date, [date(1970, 1, 1), date(1969, 12, 31), date(2024, 2, 29)]),
    "datetime": (datetime, [datetime(1970, 1, 1), datetime(2024, 2, 29, 1, 2, 3, 4)]),
    "datetime in s": (pa.timestamp("s"), [datetime(2024, 2, 29, 1, 2, 3)]),
    "zoned": (Zoned, [datetime(2024, 2, 29, 1, 2, 3, 4, UTC)]),
    "time": (time, [time(23, 59, 59, 999999)]),
    "timedelta": (timedelta, [timedelta(days=-1, microseconds=1)]),
    "decimal": (Decimal, [Decimal(0), Decimal("-1.5"), Decimal("12345678901234567890.000000000000000001")]),
    "decimal(9, 2)": (Annotated[Decimal, Digits(9, 2)], [Decimal("1234567.89"), Decimal("-0.01")]),
    "uuid": (uuid.UUID, [uuid.UUID("6ba7b810-9dad-11d1-80b4-00c04fd430c8")]),
    "enum": (Colour, [Colour.RED]),
    "optional": (int | None, [None, 5]),
    "list": (list[int], [[], [1, -1, 300, 2**40]]),
    "list of optional": (list[str | None], [["a", None]]),
    "map": (dict[str, float], [{}, {"a": 1.5}]),
    "map by tuple": (dict[tuple[int, str], bool], [{(1, "a"): True}]),
    "tuple": (tuple[int, str | None], [(1, "a"), (-1, None)]),
    "tuple of any length": (tuple[int, ...], [(1, 2)]),
    "named tuple": (Point, [Point(1, 2), Point(1, None)]),
    "dataclass": (Event, [EVENT]),
    "struct": (pa.struct({"a": pa.int64(), "b": pa.list_(pa.string())}),
               [{"a": 1, "b": ["x", None]}, {"a": None, "b": None}]),
}
SCHEMAS = [
    StateSchema.of(ValueStateDescriptor("total", int, ttl=TtlConfig("7d")), 100),
    StateSchema.of(ListStateDescriptor("events", Event), 101),
    StateSchema.of(MapStateDescriptor("seen", str, datetime), 102, tuple[int, int]),
]
ENTRIES = [(b"\0\x01\0\x64a\0\0\0", b"one", OP_PUT), (b"\0\x01\0\x64b\0\0\0", None, OP_DELETE),
           (b"\0\x02\0\x65a\0\0\0", None, OP_DELETE_PREFIX), (b"\0\x02\0\x65a\0\0\0" + bytes(8), b"two", OP_PUT)]


def golden_codecs() -> dict[str, Any]:
    """What the golden file holds: for each type its JSON, and for each value its bytes, its key bytes and its hash."""
    return {name: {"type": state_type(annotation).to_json(),
                   "values": [described(state_type(annotation), value) for value in values]}
            for name, (annotation, values) in CASES.items()}


def described(kind: Any, value: Any) -> dict[str, Any]:
    found = {"value": kind.encode(value).hex()}
    try:
        kind.require_key()
    except InvalidRequest:
        return found
    return {**found, "key": kind.encode_key(value).hex(), "hash": kind.hash_key(value)}


def load(name: str) -> Any:
    return json.loads((GOLDEN / name).read_text())


@pytest.mark.parametrize("case", list(CASES))
def test_codecs_write_and_read_the_golden_bytes(case: str) -> None:
    annotation, values = CASES[case]
    golden = load("codecs.json")[case]
    kind = state_type(annotation)
    assert kind.to_json() == golden["type"] or kind == state_type_from_json(golden["type"])
    plain = state_type_from_json(golden["type"])
    for value, stored in zip(values, golden["values"], strict=True):
        assert described(kind, value) == stored
        data = bytes.fromhex(stored["value"])
        assert kind.decode(data) == value
        assert plain.encode(plain.decode(data)) == data
        if "key" in stored:
            key = bytes.fromhex(stored["key"])
            assert kind.decode_key(key) == value
            assert plain.encode_key(plain.decode_key(key)) == key


def test_no_golden_case_is_forgotten() -> None:
    assert set(load("codecs.json")) <= set(CASES)


def test_golden_schemas_are_read() -> None:
    stored = [StateSchema.from_json(schema) for schema in load("schemas.json")]
    assert stored == SCHEMAS
    assert [schema.ttl for schema in stored] == [schema.ttl for schema in SCHEMAS]


def golden_file(name: str) -> StateFile:
    return StateFile.from_json(load("files.json")[name])


def test_golden_entry_files_are_read() -> None:
    files = LocalFiles(GOLDEN)
    found = [(row["key"], row["value"], row["op"]) for batch in read_entries(files, golden_file("entries.arrow"))
             for row in batch.to_pylist()]
    assert found == ENTRIES
    cut = list(read_entries(files, golden_file("entries.arrow"), KeyGroupRange(2, 5)))
    assert sum(batch.num_rows for batch in cut) == 2
    merged = [row["value"] for batch in merge_entries([read_entries(files, golden_file("entries.arrow"))])
              for row in batch.to_pylist()]
    assert merged == [b"one", b"two"]


def operator_store() -> OperatorStateStore:
    store = OperatorStateStore("op")
    store.list_state(ListStateDescriptor("offsets", int)).add_all([1, 2])
    store.union_list_state(ListStateDescriptor("files", Event)).add(EVENT)
    store.broadcast_state(MapStateDescriptor("rules", str, float)).put("a", 1.5)
    return store


def test_golden_operator_state_is_read() -> None:
    snapshot = OperatorStateSnapshot.from_bytes((GOLDEN / "operator_state.bin").read_bytes())
    store = OperatorStateStore("op", snapshot.parts)
    readers: list[Callable[[], Any]] = [
        lambda: store.list_state(ListStateDescriptor("offsets", int)).get(),
        lambda: store.union_list_state(ListStateDescriptor("files", Event)).get(),
        lambda: dict(store.broadcast_state(MapStateDescriptor("rules", str, float)).entries())]
    assert [read() for read in readers] == [[1, 2], [EVENT], {"a": 1.5}]


def test_every_type_has_its_place_in_the_grammar() -> None:
    grammar = (GOLDEN.parent.parent.parent / "docs" / "formats" / "codecs.md").read_text()
    for case in load("codecs.json").values():
        assert f"| `{case['type']['type']}` |" in grammar
