"""A fourth backend, written by a user, is chosen by its name through an entry point."""

from __future__ import annotations

from importlib.metadata import EntryPoint
from typing import Any

import pytest

import statebackend.backend
from statebackend import InvalidRequest, ValueStateDescriptor, backend_names, create_backend
from statebackend.memory import MemoryBackend


class NamedBackend(MemoryBackend):
    name = "named"

    def __init__(self, *, colour: str) -> None:
        super().__init__()
        self.colour = colour


@pytest.fixture(autouse=True)
def plugged(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = EntryPoint("named", f"{__name__}:NamedBackend", "holdfast.backends")
    monkeypatch.setattr(EntryPoint, "load", lambda self: NamedBackend)
    monkeypatch.setattr(statebackend.backend, "entry_points",
                        lambda *, group: [entry] if group == "holdfast.backends" else [])


def test_a_backend_of_a_plug_in_is_listed_and_made_with_its_options() -> None:
    assert backend_names() == ["filesystem", "memory", "named", "rocksdb"]
    with create_backend("named", colour="red") as backend:
        assert isinstance(backend, NamedBackend)
        assert backend.colour == "red"
        count: Any = backend.keyed(uid="u", key_type=str).state(ValueStateDescriptor("count", int, default=0))
        assert count.descriptor.name == "count"


def test_wrong_options_and_names_are_refused_with_what_there_is() -> None:
    with pytest.raises(InvalidRequest, match="named backend"):
        create_backend("named", size=3)
    with pytest.raises(InvalidRequest, match="filesystem, memory, named, rocksdb"):
        create_backend("other")
