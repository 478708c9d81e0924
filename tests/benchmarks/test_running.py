"""Runs of the suite: growth and its exponent, room said beforehand, Ctrl-C and failures that lose nothing, reports."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks import charts, peers, report, results, running
from benchmarks.growth import run_growth
from benchmarks.measure import Asked, Benchmark, CannotRun, Growth, exponent, run_benchmark
from statebackend.errors import IncompatibleState, InvalidRequest, NotFound, Unavailable


class Quadratic(Benchmark):
    """A cost that grows with the square of its input."""

    name = "quadratic"
    unit = "ms"
    baseline = "limit of 1 ms"
    higher_is_better = False
    asked = {"ours": Asked(1.0, 2.0)}
    rounds = (2, 2)
    items = 10
    growth: Growth | None = Growth("items", (10, 100, 1000), quick_share=1.0)

    def contenders(self) -> dict[str, Callable[[int], float]]:
        return {"limit of 1 ms": lambda _seed: 1.0, "ours": lambda _seed: self.items**2 * 0.02}


class Interrupted(Quadratic):
    """A run that somebody ends in its second round."""

    name = "interrupted"

    def contenders(self) -> dict[str, Callable[[int], float]]:
        def ours(seed: int) -> float:
            if seed > 1_000:
                raise KeyboardInterrupt
            return 4.0
        return {"limit of 1 ms": lambda _seed: 1.0, "ours": ours}


class Unprepared(Quadratic):
    """A benchmark whose set-up fails."""

    name = "unprepared"

    def setup(self) -> None:
        raise OSError("no such device")

    def teardown(self) -> None:
        raise AssertionError("nothing was set up")


class Huge(Quadratic):
    """A benchmark for another machine."""

    name = "huge"
    memory_gib = 1e6


def run_in(folder: Path, *kinds: type[Benchmark]) -> dict[str, object]:
    return running.run_all(list(kinds), quick=True, growth=True, out=folder, show=False)


def test_the_exponent_is_the_slope_of_the_logarithms() -> None:
    assert exponent([1, 10, 100], [5, 5, 5]) == pytest.approx(0.0)
    assert exponent([1, 10, 100], [2, 20, 200]) == pytest.approx(1.0)
    assert exponent([10], [3]) is None
    assert exponent([1, 10], [0, 3]) is None


def test_growth_sets_the_size_and_leaves_limits_out() -> None:
    grown = run_growth(Quadratic, quick=True)
    assert grown is not None
    assert grown["sizes"] == [10, 100, 1000]
    (curve,) = grown["contenders"]
    assert (curve["name"], curve["figures"]) == ("ours", [2.0, 200.0, 20_000.0])
    assert curve["exponent"] == pytest.approx(2.0)


def test_growth_of_a_rate_is_that_of_the_time_per_row() -> None:
    class Rate(Quadratic):
        """A rate that halves with twice the input."""

        unit = "rows/s"
        higher_is_better = True

        def contenders(self) -> dict[str, Callable[[int], float]]:
            return {"ours": lambda _seed: 1e6 / self.items}
    grown = run_growth(Rate, quick=True)
    assert grown is not None
    assert grown["cost"] == "seconds per row"
    assert grown["contenders"][0]["exponent"] == pytest.approx(1.0)


def test_growth_is_in_json_table_markdown_and_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    document = run_in(tmp_path, Quadratic)
    assert json.loads((tmp_path / "results.json").read_text())["benchmarks"][0]["growth"]["of"] == "items"
    from rich.console import Console

    report.print_table(document["benchmarks"][0], Console(width=160))  # type: ignore[index]
    assert "n^2.00" in capsys.readouterr().out
    assert "n^2.00" in (tmp_path / "report.md").read_text()
    page = (tmp_path / "report.html").read_text()
    assert "<polyline" in page
    assert "n^2.00" in page


def test_the_worst_round_counts_where_a_limit_may_never_be_broken() -> None:
    class Stalls(Quadratic):
        """One round of three is bad."""

        worst_counts = True
        rounds = (3, 3)

        def contenders(self) -> dict[str, Callable[[int], float]]:
            return {"limit of 1 ms": lambda _seed: 1.0, "ours": lambda seed: 4.0 if seed == 1_001 else 0.5}
    ours = run_benchmark(Stalls(quick=False))["ours"]
    assert ours.ratio == 0.25
    assert ours.typical == 2.0, "the guard is not broken by one bad round"


def test_an_interruption_keeps_what_was_measured_and_marks_it(tmp_path: Path) -> None:
    document = run_in(tmp_path, Quadratic, Interrupted, Quadratic)
    whole, partial = document["benchmarks"]  # type: ignore[misc]
    assert document["complete"] is False
    assert (whole["name"], whole["partial"]) == ("quadratic", False)
    assert (partial["name"], partial["partial"]) == ("interrupted", True)
    assert [one["figures"] for one in partial["contenders"]] == [[1.0], [4.0]]
    assert "interrupted: partial results" in (tmp_path / "report.html").read_text()
    assert "fewer rounds than it takes" in (tmp_path / "report.md").read_text()


def test_a_benchmark_that_can_not_be_set_up_is_reported_and_the_run_goes_on(tmp_path: Path) -> None:
    failed, whole = run_in(tmp_path, Unprepared, Quadratic)["benchmarks"]  # type: ignore[misc]
    assert failed["contenders"][0]["failure"] == "failed: OSError: no such device"
    assert whole["contenders"][1]["ratio"] == 0.5


def test_too_little_memory_or_disk_is_said_before_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Unavailable, match=r"huge needs 1e\+06 GiB of memory"):
        running.require_room([Quadratic, Huge], quick=False)
    monkeypatch.setattr(running, "free_disk_gib", lambda _folder: 0.2)
    monkeypatch.setattr(running, "free_memory_gib", lambda: None)
    with pytest.raises(Unavailable, match=r"quadratic needs 0\.5 GiB of disk, 0\.2 GiB are free"):
        running.require_room([Quadratic], quick=False)
    running.require_room([Quadratic], quick=True)


def test_a_peer_that_is_missing_is_named_with_the_command_that_installs_it(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_PEERS", str(tmp_path))
    with pytest.raises(CannotRun, match="flink is not installed; `holdfast bench peers pyflink`"):
        peers.ask("flink", 1, 1)


def test_the_reason_of_a_peer_that_failed_is_its_error_and_not_the_end_of_a_stack_trace() -> None:
    trace = "Caused by: java.lang.IllegalStateException: no slot\n\tat java.base/Thread.run(Thread.java:840)\n\t... 4 more\n"
    assert peers.reason(trace) == "Caused by: java.lang.IllegalStateException: no slot"
    assert peers.reason("Traceback (most recent call last):\n  File x\nValueError: odd\n") == "ValueError: odd"
    assert peers.reason("") == "no message"


def test_results_of_the_version_before_are_refused(tmp_path: Path) -> None:
    run_in(tmp_path, Quadratic)
    data = json.loads((tmp_path / "results.json").read_text())
    (tmp_path / "results.json").write_text(json.dumps({**data, "version": results.RESULTS_VERSION - 1}))
    with pytest.raises(IncompatibleState, match="another version"):
        results.read(tmp_path)


def test_of_runs_taken_together_the_newest_figures_stand(tmp_path: Path) -> None:
    first = run_in(tmp_path, Quadratic)
    second = json.loads(json.dumps(first))
    second.update(started=first["started"] + 60, complete=False)  # type: ignore[operator]
    second["benchmarks"][0]["contenders"][1]["ratio"] = 7.0
    for order in ([first, second], [second, first]):
        together = results.merged(order)
        assert together["benchmarks"][0]["contenders"][1]["ratio"] == 7.0
        assert together["complete"] is False


def test_the_page_has_the_gap_to_what_was_asked_losses_and_what_was_not_measured(tmp_path: Path) -> None:
    text = report.documentation(run_in(tmp_path, Quadratic))  # type: ignore[arg-type]
    assert "| quadratic | ours | 1x [2x] | 0.5x | below floor by 50 % |" in text
    assert "- **quadratic**, ours: 0.5 where 1 was asked (below floor by 50 %)." in text
    assert "| memory-rmw-uniform | holdfast | 0.55x [0.7x] | not measured in this run |" in text


def test_the_main_chart_is_drawn_from_results_and_refuses_what_it_can_not_write(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    document = run_in(tmp_path, Quadratic)
    with pytest.raises(NotFound, match="main chart"):
        charts.main_chart(document)  # type: ignore[arg-type]
    one = document["benchmarks"][0]  # type: ignore[index]
    one.update(name="memory-fold-int")
    one["contenders"][1].update(name="holdfast", ratio=12.5)
    picture = charts.main_chart(document)  # type: ignore[arg-type]
    assert "12.50x" in charts.save(picture, tmp_path / "chart.svg").read_text()
    with pytest.raises(InvalidRequest, match=r"\.png or an \.svg"):
        charts.save(picture, tmp_path / "chart.gif")
    monkeypatch.setattr(charts, "BROWSERS", ())
    with pytest.raises(Unavailable, match="the SVG was written instead"):
        charts.save(picture, tmp_path / "other.png")
    assert (tmp_path / "other.svg").is_file()
