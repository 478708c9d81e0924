"""Every benchmark by name; modules are imported when they are needed."""

from __future__ import annotations

from difflib import get_close_matches
from importlib import import_module

from benchmarks.measure import Benchmark
from statebackend.errors import NotFound

MODULES = ("state_access", "state_batch", "state_kinds", "state_sizes", "state_timers", "state_snapshots",
           "state_foreground", "state_restore", "dataflow_latency", "dataflow_recovery",
           "dataflow_throughput", "savepoint_files", "spark_streaming", "service_load", "service_reads",
           "coordinator_scale")


def all_benchmarks() -> dict[str, type[Benchmark]]:
    """All benchmarks that can be imported here."""
    found: dict[str, type[Benchmark]] = {}
    for module in MODULES:
        try:
            loaded = import_module(f"benchmarks.{module}")
        except ModuleNotFoundError as error:
            if error.name is not None and error.name.split(".")[0] in ("benchmarks", "pyspark", "httpx"):
                continue
            raise
        for value in vars(loaded).values():
            if isinstance(value, type) and issubclass(value, Benchmark) and hasattr(value, "name"):
                found[value.name] = value
    return found


def chosen(names: list[str]) -> list[type[Benchmark]]:
    """The benchmarks named (a prefix with `*` takes several); all without extra needs where none is named."""
    known = all_benchmarks()
    if not names:
        return [one for one in known.values() if not one.needs]
    picked: list[type[Benchmark]] = []
    for name in names:
        matching = [one for key, one in known.items() if key == name or (name.endswith("*") and key.startswith(name[:-1]))]
        if not matching:
            near = get_close_matches(name, known, n=3)
            raise NotFound(f"there is no benchmark {name!r}",
                           hint=f"nearest: {', '.join(near)}" if near else "`holdfast bench list` names them")
        picked += [one for one in matching if one not in picked]
    return picked
