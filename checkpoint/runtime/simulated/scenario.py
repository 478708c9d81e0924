"""What one seed plays: a random topology, settings and faults, and the output that it must commit."""

from __future__ import annotations

import zlib
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from random import Random
from typing import Any

from checkpoint.protocol.messages import JobPlan, TaskPlan
from checkpoint.protocol.settings import CheckpointSettings

MAX_PARALLELISM = 16
KEYS = 5
WINDOW = 50
Value = tuple[Any, ...]


@dataclass(frozen=True)
class SimEdge:
    """From a task, by `hash`, `rebalance`, `forward` or `broadcast`."""

    source: str
    exchange: str

    def id(self, target: str, index: int) -> str:
        return f"{self.source}->{target}#{index}"


@dataclass(frozen=True)
class SimTask:
    """`kind`: source, map, count, window, rules (keyed with a broadcast side) or sink."""

    name: str
    kind: str
    inputs: tuple[SimEdge, ...] = ()


@dataclass(frozen=True)
class Faults:
    """Chances of what goes wrong, and how often the job dies. All zero is a run with no fault."""

    crashes: int = 0
    lose: float = 0.0
    delay: float = 0.0
    upload: float = 0.0
    publish: float = 0.0
    clock_jumps: int = 0


@dataclass(frozen=True)
class Scenario:
    seed: int
    tasks: tuple[SimTask, ...]
    parallelism: Mapping[str, int]
    splits: Mapping[str, tuple[int, ...]]
    settings: CheckpointSettings
    faults: Faults
    credit: int
    queue_limit: int
    slow: frozenset[tuple[str, str]] = frozenset()
    requests: tuple[tuple[int, str], ...] = ()
    description: str = field(default="", compare=False)

    def task(self, name: str) -> SimTask:
        return next(task for task in self.tasks if task.name == name)

    def plan(self, parallelism: Mapping[str, int]) -> JobPlan:
        return JobPlan(tuple(TaskPlan(task.name, parallelism[task.name],
                                      tuple(dict.fromkeys(edge.source for edge in task.inputs)), (task.name,))
                             for task in self.tasks))

    def outputs_of(self, name: str) -> list[tuple[SimTask, int, SimEdge]]:
        """The edges that leave a task, in graph order: (receiving task, its input index, edge)."""
        return [(task, index, edge) for task in self.tasks for index, edge in enumerate(task.inputs)
                if edge.source == name]

    def rescaled(self, random: Random, parallelism: Mapping[str, int]) -> dict[str, int]:
        """Another parallelism; tasks that are connected by forward edges stay together."""
        new = dict(parallelism)
        for task in self.tasks:
            forward = next((edge for edge in task.inputs if edge.exchange == "forward"), None)
            if forward is not None:
                new[task.name] = new[forward.source]
            elif random.random() < 0.5:
                new[task.name] = random.randint(1, 3)
        return new


def key_of(value: Value) -> int:
    return zlib.crc32(repr(value).encode()) % KEYS


def key_group(key: Any) -> int:
    return zlib.crc32(repr(key).encode()) % MAX_PARALLELISM


def make_scenario(seed: int) -> Scenario:
    """Everything that a seed decides before the run."""
    random = Random(seed)
    settings = _settings(random)
    tasks, parallelism = _topology(random, keyed=settings.exactly_once)
    splits = {task.name: tuple(random.randint(0, 40) for _ in range(random.randint(1, 4)))
              for task in tasks if task.kind == "source"}
    faults = _faults(random)
    edges = [(edge.source, task.name) for task in tasks for edge in task.inputs]
    slow = frozenset(edge for edge in edges if random.random() < 0.15)
    requests = tuple((random.randint(1, 150), random.choice(("checkpoint", "savepoint", "stop", "drain")))
                     for _ in range(random.choice((0, 0, 0, 1, 1, 2))))
    return Scenario(seed, tasks, parallelism, splits, settings, faults, random.randint(1, 4), random.randint(1, 4),
                    slow, requests, _describe(tasks, parallelism, settings, faults, requests))


def _settings(random: Random) -> CheckpointSettings:
    mode = random.choice(("aligned", "aligned", "unaligned", "unaligned", "timeout", "timeout", "at_least_once"))
    concurrent = random.choice((1, 1, 2, 3)) if mode in ("aligned", "at_least_once") else 1
    # Timeouts leave time for an aligned barrier on slow channels: a job in which no checkpoint can ever complete, and
    # none may fail, restarts for ever and proves nothing.
    return CheckpointSettings(
        interval=random.choice((5, 10, 20)), timeout=random.choice((300, 600, 2000)), max_concurrent=concurrent,
        min_pause=random.choice((0, 5)) if concurrent == 1 else 0, tolerable_failures=random.choice((0, 1, 5, 100)),
        exactly_once=mode != "at_least_once", unaligned=mode in ("unaligned", "timeout"),
        aligned_timeout=random.choice((1, 5, 20)) if mode == "timeout" else None, retained=random.randint(1, 3),
        savepoint_dir="savepoints")


def _faults(random: Random) -> Faults:
    if random.random() < 0.1:
        return Faults()
    return Faults(crashes=random.choice((0, 1, 1, 2, 3)), lose=random.choice((0.0, 0.0, 0.02, 0.1)),
                  delay=random.choice((0.0, 0.05, 0.2)), upload=random.choice((0.0, 0.0, 0.02)),
                  publish=random.choice((0.0, 0.0, 0.1, 0.3)), clock_jumps=random.choice((0, 0, 0, 1)))


def _topology(random: Random, keyed: bool) -> tuple[tuple[SimTask, ...], dict[str, int]]:
    tasks = [SimTask(f"s{index}", "source") for index in range(random.randint(1, 2))]
    parallelism = {task.name: random.randint(1, 3) for task in tasks}
    unread = [task.name for task in tasks]
    for index in range(random.randint(1, 3)):
        name = f"m{index}"
        kind = random.choice(("map", "map", "count", "count", "window", "rules") if keyed else ("map", "union"))
        first = unread.pop(random.randrange(len(unread)))
        others = [task.name for task in tasks if task.name != first]
        inputs = [SimEdge(first, "hash" if kind in ("count", "window", "rules") else "rebalance")]
        parallelism[name] = random.randint(1, 3)
        if kind == "rules" and others:
            side = random.choice(others)
            inputs.append(SimEdge(side, "broadcast"))
            unread = [unread_name for unread_name in unread if unread_name != side]
        elif others and random.random() < 0.4:
            side = random.choice(others)
            inputs.append(SimEdge(side, inputs[0].exchange))
            unread = [unread_name for unread_name in unread if unread_name != side]
        elif kind == "map" and random.random() < 0.4:
            inputs, parallelism[name] = [SimEdge(first, "forward")], parallelism[first]
        kind = "map" if kind == "union" or (kind == "rules" and len(inputs) == 1) else kind
        tasks.append(SimTask(name, kind, tuple(inputs)))
        unread.append(name)
    for index, name in enumerate(unread):
        tasks.append(SimTask(f"k{index}", "sink", (SimEdge(name, "rebalance"),)))
        parallelism[f"k{index}"] = random.randint(1, 3)
    return tuple(tasks), parallelism


def _describe(tasks: tuple[SimTask, ...], parallelism: Mapping[str, int], settings: CheckpointSettings,
              faults: Faults, requests: tuple[tuple[int, str], ...]) -> str:
    lines = [f"  {task.name} ({task.kind} x{parallelism[task.name]})"
             + "".join(f" <-{edge.exchange}- {edge.source}" for edge in task.inputs) for task in tasks]
    mode = "unaligned" if settings.unaligned else "aligned" if settings.exactly_once else "at least once"
    lines.append(f"  {mode}, aligned timeout {settings.aligned_timeout_ms}, interval {settings.interval_ms}, timeout "
                 f"{settings.timeout_ms}, {settings.max_concurrent} concurrent, {settings.tolerable_failures} tolerated")
    lines.append(f"  {faults}, requests {requests}")
    return "\n".join(lines)


# -- the output that a run with no fault commits -------------------------------------------------------------------------

def source_records(name: str, splits: tuple[int, ...]) -> list[tuple[Value, int]]:
    """All records of a source with their timestamps."""
    return [((name, split, offset), offset * 10) for split, length in enumerate(splits) for offset in range(length)]


def expected_output(scenario: Scenario) -> tuple[Counter[Value], dict[str, dict[Value, int]]]:
    """What sinks must have committed, and what every copy of a broadcast state must hold, without any streaming."""
    produced: dict[str, list[tuple[Value, int | None]]] = {}
    committed: Counter[Value] = Counter()
    rules: dict[str, dict[Value, int]] = {}
    for task in scenario.tasks:
        inputs = [produced[edge.source] for edge in task.inputs]
        if task.kind == "source":
            produced[task.name] = list(source_records(task.name, scenario.splits[task.name]))
        elif task.kind == "sink":
            committed.update(value for records in inputs for value, _ in records)
        else:
            produced[task.name] = _apply(task, inputs)
        if task.kind == "rules":
            rules[task.name] = dict(Counter(value for value, _ in inputs[1]))
    return committed, rules


def _apply(task: SimTask, inputs: list[list[tuple[Value, int | None]]]) -> list[tuple[Value, int | None]]:
    main = [record for edge, records in zip(task.inputs, inputs) if edge.exchange != "broadcast" for record in records]
    if task.kind == "map":
        return [((task.name, value), at) for value, at in main]
    if task.kind == "count":
        return _count(task.name, main)
    if task.kind == "window":
        return _window(task.name, main)
    rules = Counter(value for edge, records in zip(task.inputs, inputs) if edge.exchange == "broadcast"
                    for value, _ in records)
    return [*main, *(((task.name, "rule", rule, times), None) for rule, times in rules.items())]


def _count(name: str, main: list[tuple[Value, int | None]]) -> list[tuple[Value, int | None]]:
    counts: Counter[int] = Counter()
    result: list[tuple[Value, int | None]] = []
    for value, at in main:
        key = key_of(value)
        counts[key] += 1
        result += [(value, at), ((name, key, counts[key]), None)]
    return result + [((name, "total", key, total), None) for key, total in counts.items()]


def _window(name: str, main: list[tuple[Value, int | None]]) -> list[tuple[Value, int | None]]:
    windows: dict[tuple[int, int], int] = defaultdict(int)
    result: list[tuple[Value, int | None]] = []
    for value, at in main:
        if at is None:
            result.append((value, None))
        else:
            windows[key_of(value), at // WINDOW] += 1
    return result + [((name, "window", key, window, count), window * WINDOW + WINDOW - 1)
                     for (key, window), count in windows.items()]
