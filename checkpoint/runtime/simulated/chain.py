"""The operators of a simulated job: small, with state in dictionaries, on the contract that real chains fulfil."""

from __future__ import annotations

from collections import defaultdict
from random import Random
from typing import Any

from checkpoint.runtime.contracts import (
    MAX_WATERMARK,
    MIN_WATERMARK,
    ChainOutput,
    CheckpointOptions,
    InFlight,
    OperatorChain,
    OperatorSnapshot,
    Partitioner,
    Records,
    SourceStatus,
    SubtaskRestore,
)
from checkpoint.runtime.simulated.scenario import MAX_PARALLELISM, WINDOW, SimTask, Value, key_group, key_of
from checkpoint.runtime.simulated.storage import SimState, SimTarget, TransactionLog
from statebackend.files import SnapshotSource, SnapshotTarget, StateFile

Emission = tuple[Value, int | None]


def redistribute_state(old: list[SimState], parallelism: int) -> list[SimState]:
    """Keyed state by key group, lists dealt out, broadcast copies by index: the rules of real state."""
    new = [SimState() for _ in range(parallelism)]
    for state in old:
        for key, value in state.keyed.items():
            new[key_group(key[0]) * parallelism // MAX_PARALLELISM].keyed[key] = value
    if len(old) == parallelism:
        for state, own in zip(new, old):
            state.splits, state.transactions = list(own.splits), list(own.transactions)
    else:
        for index, split in enumerate(split for state in old for split in state.splits):
            new[index % parallelism].splits.append(split)
        for index, transaction in enumerate(entry for state in old for entry in state.transactions):
            new[index % parallelism].transactions.append(transaction)
    for index, state in enumerate(new):
        state.rules = dict(old[index % len(old)].rules)
    return new


class SimChain(OperatorChain):
    """One simulated operator. `problem` is set when it sees what exactly-once must rule out."""

    def __init__(self, task: SimTask, index: int, parallelism: int, outputs: int, state: SimState,
                 log: TransactionLog, random: Random, attempt: int) -> None:
        self.uids, self.is_source = (task.name,), task.kind == "source"
        self.problem: str | None = None
        self._task, self._index, self._parallelism, self._outputs = task, index, parallelism, outputs
        self._state, self._log, self._random, self._attempt = state, log, random, attempt
        self._watermark = MIN_WATERMARK
        self._buffer: list[Value] = []
        self._out: ChainOutput | None = None
        self._serial = 0

    def open(self, output: ChainOutput, restore: SubtaskRestore | None) -> None:
        self._out = output
        for _, transaction in self._state.transactions:
            self._log.commit(transaction)
        self._state.transactions.clear()

    def process(self, input_index: int, records: Records) -> None:
        timestamps: list[int | None] = records.timestamps or [None] * len(records)
        kind, emitted = self._task.kind, list[Emission]()
        for value, at in zip(records.values, timestamps):
            if kind == "map":
                emitted.append(((self._task.name, value), at))
            elif kind == "sink":
                self._buffer.append(value)
            elif kind == "count":
                self._count(value, at, emitted)
            elif kind == "window":
                self._window(value, at, emitted)
            elif self._task.inputs[input_index].exchange == "broadcast":
                self._state.rules[value] = self._state.rules.get(value, 0) + 1
            else:
                emitted.append((value, at))
        self._emit(emitted)

    def _count(self, value: Value, at: int | None, emitted: list[Emission]) -> None:
        key, keyed = key_of(value), self._state.keyed
        keyed[key, "count"] = count = keyed.get((key, "count"), 0) + 1
        keyed[key, "total"] = keyed.get((key, "total"), 0) + 1
        emitted += [(value, at), ((self._task.name, key, count), None)]

    def _window(self, value: Value, at: int | None, emitted: list[Emission]) -> None:
        if at is None:
            emitted.append((value, None))
            return
        if at <= self._watermark:
            self.problem = f"{value} came late: its timestamp is {at}, the watermark {self._watermark}"
        window, key = at // WINDOW, key_of(value)
        self._state.keyed[key, window] = self._state.keyed.get((key, window), 0) + 1

    def process_watermark(self, watermark: int) -> None:
        assert watermark > self._watermark or watermark == MAX_WATERMARK, "the watermark went back"
        assert self._out is not None
        self._watermark = watermark
        if self._task.kind == "window":
            due = [key for key in self._state.keyed if key[1] * WINDOW + WINDOW - 1 <= watermark]
            self._emit([((self._task.name, "window", key, window, self._state.keyed.pop((key, window))),
                         window * WINDOW + WINDOW - 1) for key, window in due])
        self._out.emit_watermark(watermark)

    def poll(self, limit: int) -> SourceStatus:
        assert self._out is not None
        open_splits = [index for index, (_, offset, length) in enumerate(self._state.splits) if offset < length]
        if not open_splits:
            return SourceStatus.ENDED
        if self._random.random() < 0.1:
            return SourceStatus.IDLE
        place = self._random.choice(open_splits)
        split, offset, length = self._state.splits[place]
        end = min(length, offset + self._random.randint(1, 3))
        self._state.splits[place] = (split, end, length)
        self._emit([((self._task.name, split, number), number * 10) for number in range(offset, end)])
        behind = [offset * 10 for _, offset, length in self._state.splits if offset < length]
        watermark = min(behind, default=0) - 1
        if watermark > self._watermark:
            self._watermark = watermark
            self._out.emit_watermark(watermark)
        return SourceStatus.MORE

    def advance_processing_time(self, now_ms: int) -> int | None:
        return None

    def end_input(self, input_index: int) -> None:
        """Nothing here depends on the end of one input alone."""

    def finish(self, drain: bool) -> None:
        keyed, name = self._state.keyed, self._task.name
        if self._task.kind == "count":
            totals = [key for key in keyed if key[1] == "total"]
            self._emit([((name, "total", key[0], keyed.pop(key)), None) for key in totals])
        elif self._task.kind == "rules" and self._owns(0) and (0, "told") not in keyed:
            # One subtask speaks for all: the one that holds the (otherwise unused) key 0 of this operator.
            keyed[0, "told"] = 1
            self._emit([((name, "rule", rule, times), None) for rule, times in self._state.rules.items()])

    def _owns(self, key: int) -> bool:
        return self._index == key_group(key) * self._parallelism // MAX_PARALLELISM

    @property
    def rules(self) -> dict[Value, int]:
        """This subtask's copy of the broadcast state."""
        return self._state.rules

    def snapshot(self, checkpoint_id: int, options: CheckpointOptions, target: SnapshotTarget) -> SimPending:
        assert isinstance(target, SimTarget)
        if self._task.kind == "sink":
            self._serial += 1
            transaction = f"{self._task.name}[{self._index}]-{self._attempt}-{checkpoint_id}-{self._serial}"
            self._log.prepare(transaction, self._buffer)
            self._buffer = []
            self._state.transactions.append((checkpoint_id, transaction))
        return SimPending(self._task.name, self._state.copy(), target)

    def checkpoint_completed(self, checkpoint_id: int) -> None:
        for entry in [entry for entry in self._state.transactions if entry[0] <= checkpoint_id]:
            self._log.commit(entry[1])
            self._state.transactions.remove(entry)

    def checkpoint_aborted(self, checkpoint_id: int) -> None:
        """What was prepared for it is committed by the next checkpoint that completes."""

    def close(self) -> None:
        self._out = None

    def _emit(self, emitted: list[Emission]) -> None:
        assert self._out is not None
        if emitted:
            values, timestamps = [value for value, _ in emitted], [at for _, at in emitted]
            for edge in range(self._outputs):
                self._out.emit(edge, Records(values, timestamps))


class SimPending:
    """The asynchronous part: storing a copy of the state, which storage may refuse."""

    def __init__(self, uid: str, state: SimState, target: SimTarget) -> None:
        self._uid, self._state, self._target = uid, state, target

    def run(self) -> tuple[OperatorSnapshot, ...]:
        return (OperatorSnapshot(self._uid, operator=self._target.store(self._uid, self._state)),)

    def cancel(self) -> None:
        """Storing is one step, so there is nothing to interrupt."""


class SimCodec:
    """Channel state as it is, in the simulated store."""

    def write(self, in_flight: Any, target: SnapshotTarget) -> StateFile:
        assert isinstance(target, SimTarget)
        kept = [InFlight(part.edge, part.sender, part.receiver, tuple(
            Records(list(batch.values), list(batch.timestamps or ())) for batch in part.batches), part.output)
                for part in in_flight]
        return target.store("in-flight", kept)

    def read(self, file: StateFile, source: SnapshotSource) -> list[InFlight]:
        raise NotImplementedError("the simulated cluster reads its store itself")


class HashPartitioner(Partitioner):
    def split(self, records: Records, channels: int) -> list[tuple[int, Records]]:
        return _by_channel(records, [key_group(key_of(value)) * channels // MAX_PARALLELISM for value in records.values])

    def reroute(self, records: Records, old_channel: tuple[int, int],
                new_parallelism: int) -> list[tuple[int, Records]]:
        return self.split(records, new_parallelism)


class RebalancePartitioner(Partitioner):
    """Round robin, also for forward edges, which have one channel."""

    def __init__(self) -> None:
        self._next = 0

    def split(self, records: Records, channels: int) -> list[tuple[int, Records]]:
        start = self._next
        self._next = (start + len(records)) % channels
        return _by_channel(records, [(start + place) % channels for place in range(len(records))])

    def reroute(self, records: Records, old_channel: tuple[int, int],
                new_parallelism: int) -> list[tuple[int, Records]]:
        return [(old_channel[1] % new_parallelism, records)]


class BroadcastPartitioner(Partitioner):
    broadcast = True

    def split(self, records: Records, channels: int) -> list[tuple[int, Records]]:
        return [(channel, records) for channel in range(channels)]

    def reroute(self, records: Records, old_channel: tuple[int, int],
                new_parallelism: int) -> list[tuple[int, Records]]:
        raise NotImplementedError("broadcast edges follow the broadcast state")


def partitioner(exchange: str) -> Partitioner:
    return {"hash": HashPartitioner, "broadcast": BroadcastPartitioner}.get(exchange, RebalancePartitioner)()


def _by_channel(records: Records, channels: list[int]) -> list[tuple[int, Records]]:
    timestamps = records.timestamps or [None] * len(records)
    parts: dict[int, Records] = defaultdict(lambda: Records([], []))
    for channel, value, at in zip(channels, records.values, timestamps):
        parts[channel].values.append(value)
        parts[channel].timestamps.append(at)  # type: ignore[union-attr]
    return list(parts.items())
