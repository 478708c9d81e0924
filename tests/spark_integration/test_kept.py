"""Value states held per chunk of rows behave as the backend's own do, and reach it once."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from spark_integration.kept import Chunk, Kept, can_keep, can_keep_keys
from statebackend import ManualClock, TtlConfig, ValueStateDescriptor, create_backend
from statebackend.errors import InvalidRequest
from statebackend.types import TupleType, state_type

BACKENDS = ["rocksdb", "filesystem"]
KEY = TupleType((state_type(str), state_type(int)))


def opened(name: str, folder: Path, key_type: Any = KEY) -> Any:
    options = {"directory": str(folder)} if name == "rocksdb" else {}
    backend = create_backend(name, **options)
    return backend, backend.keyed(uid="op", key_type=key_type, max_parallelism=128, clock=ManualClock(1000))


def step(state: Any, dice: random.Random, make: Any) -> Any:
    """One call of a function on its current key; what it saw."""
    what = dice.random()
    if what < 0.1:
        state.clear()
    elif what < 0.2:
        state.update(None)
    elif what < 0.6:
        state.update(make(dice))
    return state.value()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("descriptor", "make"), [
    (ValueStateDescriptor("n", int, default=7), lambda dice: dice.randrange(-2**40, 2**40)),
    (ValueStateDescriptor("n", tuple[int, str]), lambda dice: (dice.randrange(9), "x" * dice.randrange(5))),
    (ValueStateDescriptor("n", float, ttl=TtlConfig("1h")), lambda dice: dice.choice([1, 2.5])),
], ids=["int", "tuple", "float with TTL"])
def test_a_kept_state_tells_what_the_backend_would(backend: str, descriptor: Any, make: Any, tmp_path: Path) -> None:
    ours, keyed = opened(backend, tmp_path / "a")
    theirs, plain = opened(backend, tmp_path / "b")
    kept = Kept(keyed)
    state, other = kept.state(descriptor), plain.state(descriptor)
    dice, twin = random.Random(5), random.Random(5)
    for _ in range(4):
        rows = [(f"user-{dice.randrange(40)}", dice.randrange(3)) for _ in range(400)]
        for _ in rows:
            twin.randrange(40), twin.randrange(3)
        table = pa.table({"user": [row[0] for row in rows], "n": [row[1] for row in rows]})
        chunk = Chunk(table, ("user", "n"), KEY)
        kept.begin(chunk)
        for row, kept.cursor.slot in zip(rows, chunk.codes):
            keyed.set_current_key(row)
            plain.set_current_key(row)
            assert step(state, dice, make) == step(other, twin, make)
        kept.end()
        for row in set(rows):  # between chunks, as timers do
            keyed.set_current_key(row)
            plain.set_current_key(row)
            assert step(state, dice, make) == step(other, twin, make)
        assert sorted(state.stream_keys()) == sorted(other.stream_keys())
    ours.close()
    theirs.close()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_value_that_does_not_fit_is_named_with_its_key_and_record(backend: str, tmp_path: Path) -> None:
    backing, keyed = opened(backend, tmp_path, state_type(str))
    kept = Kept(keyed)
    wide, pair = kept.state(ValueStateDescriptor("wide", int)), kept.state(ValueStateDescriptor("pair", tuple[int, int]))
    rows = pa.table({"user": ["a", "b", "a", "b", "c"], "n": range(5)})
    for state, value in ((wide, 2**70), (pair, (1, "no"))):
        for act, n in ((kept.end, 3), (lambda: state.value_many(pa.array(["a"])), 1)):  # noqa: B023
            kept.begin(Chunk(rows, ("user",), state_type(str), ("user", "n")))
            keyed.set_current_key("b")
            kept.cursor.slot = 1
            state.update(value)
            with pytest.raises(InvalidRequest) as caught:
                act()
            context = caught.value.context
            assert (context["key"], context["state"]) == ("b", state.descriptor.name)
            assert context["record"] == repr({"user": "b", "n": n})
            state.begin(Chunk(rows.slice(0, 0), ("user",), state_type(str)))
    with pytest.raises(InvalidRequest, match="another type"):
        wide.update("text")
    backing.close()


def test_the_backend_sees_one_read_and_one_write_of_a_chunk(tmp_path: Path) -> None:
    backing, keyed = opened("filesystem", tmp_path, state_type(int))
    kept = Kept(keyed)
    state = kept.state(ValueStateDescriptor("n", int, default=0))
    calls: list[str] = []
    real = state._state

    class Counting:
        def __getattr__(self, name: str) -> Any:
            calls.append(name)
            return getattr(real, name)

    state._state = Counting()  # type: ignore[assignment]
    keys = [number % 500 for number in range(2000)]
    chunk = Chunk(pa.table({"k": keys}), ("k",), state_type(int))
    kept.begin(chunk)
    for key, kept.cursor.slot in zip(keys, chunk.codes):
        keyed.set_current_key(key)
        state.update(state.value() + 1)
    kept.end()
    assert (calls.count("get_values"), calls.count("put_values")) == (1, 1)
    assert len(calls) < 50, "besides a few single reads, before it is known that many will come"
    keyed.set_current_key(499)
    assert state.value() == 4
    backing.close()


def test_only_what_can_be_read_ahead_is_kept() -> None:
    assert can_keep(ValueStateDescriptor("n", int))
    assert not can_keep(ValueStateDescriptor("n", list[int])), "it can be changed in place"
    assert not can_keep(ValueStateDescriptor("n", int | None)), "None is a value there"
    assert not can_keep_keys(TupleType((state_type(int), state_type(float)))), "0.0 and -0.0 are one key"
