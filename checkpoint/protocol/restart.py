"""Restart strategies as pure decisions, and the regions that fail together.

A strategy is asked after each failure, with the time and a random source passed in, and answers Restart(delay) or
GiveUp(reason). It remembers only what it was told.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from random import Random
from typing import Any, TypeVar

from statebackend.durations import duration_ms
from statebackend.errors import InvalidRequest

Node = TypeVar("Node", bound=Hashable)


@dataclass(frozen=True)
class Restart:
    """Start again after this delay."""

    delay_ms: int


@dataclass(frozen=True)
class GiveUp:
    """Let the job fail."""

    reason: str


Decision = Restart | GiveUp


class RestartStrategy(ABC):
    """Decides about one job. Belongs to one thread."""

    @abstractmethod
    def on_failure(self, now_ms: int, random: Random) -> Decision: ...


class NoRestart(RestartStrategy):
    """The first failure is the last."""

    def on_failure(self, now_ms: int, random: Random) -> Decision:
        return GiveUp("restarts are switched off")


class FixedDelay(RestartStrategy):
    """Restart `attempts` times in all, each after `delay`."""

    def __init__(self, attempts: int = 1, delay: str | int = "1s") -> None:
        _require(attempts >= 0, "attempts", attempts)
        self._attempts, self._delay_ms = attempts, duration_ms(delay)
        self._used = 0

    def on_failure(self, now_ms: int, random: Random) -> Decision:
        if self._used >= self._attempts:
            return GiveUp(f"all {self._attempts} restarts are used up")
        self._used += 1
        return Restart(self._delay_ms)


class FailureRate(RestartStrategy):
    """Restart as long as there are at most `failures` failures per `interval`."""

    def __init__(self, failures: int = 1, interval: str | int = "1m", delay: str | int = "1s") -> None:
        _require(failures >= 1, "failures", failures)
        self._failures, self._interval_ms, self._delay_ms = failures, duration_ms(interval), duration_ms(delay)
        self._recent: deque[int] = deque(maxlen=failures + 1)

    def on_failure(self, now_ms: int, random: Random) -> Decision:
        # A clock that was set back would make old failures look like future ones; they count as happening now.
        self._recent = deque((min(at, now_ms) for at in self._recent), maxlen=self._failures + 1)
        self._recent.append(now_ms)
        if len(self._recent) > self._failures and now_ms - self._recent[0] <= self._interval_ms:
            return GiveUp(f"more than {self._failures} failures within {self._interval_ms / 1000:g} s")
        return Restart(self._delay_ms)


class ExponentialDelay(RestartStrategy):
    """Restart after a delay that grows with each failure, up to `maximum`, and starts anew after a quiet time.

    `jitter` moves each delay by up to that share of it, so that many jobs do not restart in step.
    """

    def __init__(self, initial: str | int = "1s", multiplier: float = 1.5, maximum: str | int = "1m",
                 jitter: float = 0.1, reset_after: str | int = "1h", attempts: int | None = None) -> None:
        _require(multiplier >= 1, "multiplier", multiplier)
        _require(0 <= jitter <= 1, "jitter", jitter)
        self._initial_ms, self._maximum_ms = duration_ms(initial), duration_ms(maximum)
        _require(0 < self._initial_ms <= self._maximum_ms, "initial", initial)
        self._multiplier, self._jitter, self._reset_ms = multiplier, jitter, duration_ms(reset_after)
        self._attempts = attempts
        self._delay_ms = float(self._initial_ms)
        self._used = 0
        self._last: int | None = None

    def on_failure(self, now_ms: int, random: Random) -> Decision:
        if self._last is not None and now_ms - self._last >= self._reset_ms + self._delay_ms:
            self._delay_ms, self._used = float(self._initial_ms), 0
        self._last = now_ms
        if self._attempts is not None and self._used >= self._attempts:
            return GiveUp(f"all {self._attempts} restarts are used up")
        self._used += 1
        delay = self._delay_ms * (1 + self._jitter * random.uniform(-1, 1))
        self._delay_ms = min(self._delay_ms * self._multiplier, self._maximum_ms)
        return Restart(min(round(delay), self._maximum_ms))


SAME_FAILURES = 3
"""Restarts after one and the same failure, without progress, that the default strategy tries."""

_CHANGING = re.compile(r"\b[0-9a-f]{8,}\b|[0-9]+")


class RepeatedFailures:
    """Counts how often one failure comes back with no checkpoint completed in between.

    Two failures are one and the same if they are of one type and their messages differ at most in numbers and random
    ids: "checkpoint 7 could not be published" and "checkpoint 8 could not be published" are.
    """

    def __init__(self) -> None:
        self._last: tuple[type, str, int] | None = None
        self._repeats = 0

    def on_failure(self, error: BaseException, reached: int) -> GiveUp | None:
        """`reached` is the newest completed checkpoint. None: try again."""
        seen = (type(error), _CHANGING.sub("#", str(error)), reached)
        self._repeats = self._repeats + 1 if seen == self._last else 0
        self._last = seen
        if self._repeats < SAME_FAILURES:
            return None
        return GiveUp(f"the same failure came {SAME_FAILURES + 1} times with no checkpoint completed in between")


def default_strategy(checkpointing: bool) -> RestartStrategy:
    """What a job gets that says nothing: exponential delay if there are checkpoints to return to, none otherwise."""
    return ExponentialDelay() if checkpointing else NoRestart()


_STRATEGIES: dict[str, type[RestartStrategy]] = {
    "none": NoRestart, "fixed-delay": FixedDelay, "failure-rate": FailureRate, "exponential-delay": ExponentialDelay}


def restart_strategy(name: str | None, *, checkpointing: bool, **options: Any) -> RestartStrategy:
    """A strategy by name (`none`, `fixed-delay`, `failure-rate`, `exponential-delay`); None gives the default."""
    if name is None:
        return default_strategy(checkpointing)
    if name not in _STRATEGIES:
        raise InvalidRequest(f"there is no restart strategy {name!r}", hint=f"use one of {', '.join(_STRATEGIES)}")
    try:
        return _STRATEGIES[name](**options)
    except TypeError as error:
        raise InvalidRequest(f"the {name} restart strategy does not take these options: {error}") from error


def regions(nodes: Iterable[Node], edges: Iterable[tuple[Node, Node]]) -> list[frozenset[Node]]:
    """The pipelined regions: what is connected by channels, in whatever direction, fails and restarts together.

    Nodes may be subtasks (with their channels) or tasks (with their edges). Near-linear in nodes and edges.
    """
    parent = {node: node for node in nodes}

    def root(node: Node) -> Node:
        while parent[node] != node:
            parent[node] = parent[parent[node]]
            node = parent[node]
        return node

    for left, right in edges:
        parent[root(left)] = root(right)
    members: dict[Node, set[Node]] = {}
    for node in parent:
        members.setdefault(root(node), set()).add(node)
    return [frozenset(group) for group in members.values()]


def region_of(failed: Node, all_regions: Iterable[frozenset[Node]]) -> frozenset[Node]:
    """The region that restarts when this node fails."""
    return next(region for region in all_regions if failed in region)


def _require(condition: bool, setting: str, found: Any) -> None:
    if not condition:
        raise InvalidRequest(f"the restart strategy's {setting} is out of range", setting=setting, found=found)
