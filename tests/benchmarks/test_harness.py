"""The harness: ratios within a round, no figure for a wrong answer, reasons for what can't run, versions of results."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks import report, results
from benchmarks.cli import FLOORS
from benchmarks.measure import Asked, Benchmark, CannotRun, WrongAnswer, run_benchmark
from benchmarks.registry import all_benchmarks, chosen
from statebackend.errors import IncompatibleState, NotFound


class Example(Benchmark):
    """An example that measures nothing."""

    name = "example"
    baseline = "base"
    asked = {"ours": Asked(1.5, 3.0)}

    def contenders(self) -> dict[str, Callable[[int], float]]:
        return {"base": lambda seed: float(seed), "ours": lambda seed: seed * 2.0, "wrong": self._wrong,
                "absent": self._absent}

    def _wrong(self, _seed: int) -> float:
        raise WrongAnswer("41 instead of 42")

    def _absent(self, _seed: int) -> float:
        raise CannotRun("it is not installed")


def document(tmp_path: Path) -> dict[str, object]:
    entry = results.entry(Example(quick=True), run_benchmark(Example(quick=True)))
    results.write(tmp_path / "results.json", "holdfast bench run example", 0.0, [entry], quick=True, complete=True)
    return results.read(tmp_path)


def test_ratios_are_taken_within_a_round() -> None:
    series = run_benchmark(Example(quick=True))
    assert len(set(series["base"].figures)) == len(series["base"].figures), "every round has a seed of its own"
    assert series["ours"].ratio == 2.0
    assert series["ours"].stable


def test_a_wrong_answer_is_no_figure_and_an_absent_peer_has_a_reason(tmp_path: Path) -> None:
    series = run_benchmark(Example(quick=True))
    assert (series["wrong"].figures, series["wrong"].failure) == ([], "WRONG ANSWER: 41 instead of 42")
    text = report.markdown(document(tmp_path))  # type: ignore[arg-type]
    assert "it is not installed" in text
    assert "| ours | 2k rows/s | 2x | ±0 % | 1.5x [3x] | floor held |" in text


def test_results_of_another_version_are_refused(tmp_path: Path) -> None:
    document(tmp_path)
    data = json.loads((tmp_path / "results.json").read_text())
    (tmp_path / "results.json").write_text(json.dumps({**data, "version": 99}))
    with pytest.raises(IncompatibleState, match="another version"):
        results.read(tmp_path)


def test_a_comparison_tells_slower_from_noise(tmp_path: Path) -> None:
    before = document(tmp_path)
    after = json.loads(json.dumps(before))
    after["benchmarks"][0]["contenders"][1]["ratio"] = 1.0
    (row,) = results.compare(before, after)
    assert (row["contender"], row["verdict"]) == ("ours", "slower")
    assert results.compare(before, before)[0]["verdict"] == "same"


def test_an_unknown_benchmark_is_answered_with_near_names() -> None:
    with pytest.raises(NotFound, match="memory-rmw-hot"):
        chosen(["memory-rmw-hott"])
    assert {one.name for one in chosen(["memory-rmw-*"])} == {"memory-rmw-uniform", "memory-rmw-hot", "memory-rmw-zipf"}


def test_every_benchmark_states_its_work_and_its_baseline() -> None:
    for one in all_benchmarks().values():
        assert len(one.statement()) > 20, one.name
        assert one.baseline


def test_the_guard_watches_benchmarks_that_exist() -> None:
    known = all_benchmarks()
    for name, floors in tomllib.loads(FLOORS.read_text()).items():
        assert name in known
        assert all(floor > 0 for floor in floors.values())


def test_the_report_needs_no_network(tmp_path: Path) -> None:
    page = report.html_page(document(tmp_path))  # type: ignore[arg-type]
    assert "<svg" in page
    assert "http://" not in page
    assert "https://" not in page
