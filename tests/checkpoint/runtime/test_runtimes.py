"""Runtimes by name: two are built in, others are found where packages register them."""

from __future__ import annotations

import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from checkpoint import CollectionSource, CollectSink, Dataflow, run
from checkpoint.runtime import runtimes
from checkpoint.runtime.runtimes import Threads, runtime_of
from statebackend import InvalidRequest


def test_a_name_that_nobody_registered_is_refused_with_those_there_are() -> None:
    with pytest.raises(InvalidRequest, match="threads or processes"):
        runtime_of("mainframe")


def test_the_names_in_our_own_metadata_lead_to_runtimes(monkeypatch: pytest.MonkeyPatch) -> None:
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())
    registered = project["project"]["entry-points"]["holdfast.runtimes"]
    entries = [EntryPoint(name, value, "holdfast.runtimes") for name, value in registered.items()]
    monkeypatch.setattr(runtimes, "entry_points", lambda group: entries if group == "holdfast.runtimes" else [])
    assert list(registered) == ["spark"]
    assert runtime_of("spark").name == "spark"


def test_a_runtime_may_be_given_as_it_is() -> None:
    sink = CollectSink()
    flow = Dataflow("given")
    flow.source(CollectionSource([1, 2]), uid="s").sink(sink, uid="o")
    assert run(flow, runtime=Threads()).state == "FINISHED"
    assert sorted(sink.results) == [1, 2]
