"""In-flight records of an unaligned checkpoint, dealt out to the subtasks that a restored job has."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from checkpoint.runtime.contracts import InFlight, Partitioner, Records


@dataclass(frozen=True)
class EdgeShape:
    """An edge of the restored job: who receives, how many they are now, and how many they were at the checkpoint."""

    task: str
    partitioner: Partitioner
    parallelism: int
    old_parallelism: int


def redistribute_in_flight(stored: Iterable[InFlight],
                           edges: Mapping[str, EdgeShape]) -> dict[tuple[str, int], tuple[InFlight, ...]]:
    """What each (task, subtask index) has to process before new input.

    Records of one old channel keep their order: first what its receiver had queued, then what its sender had. Where the
    receiving parallelism is unchanged every receiver gets its own back; otherwise, and where the state was re-cut since
    (keys may be in other groups then), the partitioner decides. Records on
    edges that the job no longer has are left out; the caller refuses the restore unless dropping state is allowed.
    """
    ordered = sorted(stored, key=lambda part: (part.edge, part.receiver, part.sender, part.output))
    result: dict[tuple[str, int], list[InFlight]] = defaultdict(list)
    for part in ordered:
        shape = edges.get(part.edge)
        if shape is None:
            continue
        for receiver, batches in _receivers(part, shape).items():
            result[shape.task, receiver].append(
                InFlight(part.edge, part.sender, receiver, tuple(batches), part.output))
    return {subtask: tuple(parts) for subtask, parts in result.items()}


def _receivers(part: InFlight, shape: EdgeShape) -> dict[int, list[Records]]:
    if not part.receivers and shape.parallelism == shape.old_parallelism:
        return {part.receiver: list(part.batches)}
    if shape.partitioner.broadcast:
        # A new subtask takes the broadcast state of old subtask (i mod old), so it takes that one's records as well.
        layouts = part.receivers or (shape.old_parallelism,)
        return {new: list(part.batches) for new in range(shape.parallelism) if _origin(new, layouts) == part.receiver}
    routed: dict[int, list[Records]] = defaultdict(list)
    for batch in part.batches:
        for receiver, records in shape.partitioner.reroute(batch, (part.sender, part.receiver), shape.parallelism):
            if len(records):
                routed[receiver].append(records)
    return routed


def _origin(subtask: int, layouts: Sequence[int]) -> int:
    """The subtask at the checkpoint whose broadcast state a subtask of the restored job has, through every re-cut."""
    for parallelism in reversed(layouts):
        subtask %= parallelism
    return subtask
