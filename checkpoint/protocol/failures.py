"""Why a checkpoint came to nothing: each reason with a message and whether it counts against the tolerated failures."""

from __future__ import annotations

from enum import Enum, StrEnum


class FailureReason(Enum):
    """`counts`: the job gets one step closer to failing. The others are nobody's fault or somebody's wish."""

    EXPIRED = ("expired before all subtasks acknowledged it", True)
    DECLINED = ("was declined by a subtask", True)
    PUBLISH_FAILED = ("could not be published", True)
    CONTRADICTION = ("was acknowledged twice with different content", True)
    SUBSUMED = ("was overtaken by a newer one that completed first", False)
    SUBTASK_FAILED = ("was given up because a subtask failed", False)
    CANCELLED = ("was given up because the job is cancelled", False)
    STOPPED = ("was given up because the job stops", False)
    FENCED = ("was refused: a newer run of this job has taken over", False)

    def __init__(self, message: str, counts: bool) -> None:
        self.message, self.counts = message, counts


class AckOutcome(StrEnum):
    """What became of an acknowledgement; all but ACCEPTED are only counted."""

    ACCEPTED = "accepted"
    DUPLICATE = "duplicate"
    LATE = "late"
    UNKNOWN_CHECKPOINT = "unknown_checkpoint"
    UNKNOWN_SUBTASK = "unknown_subtask"
    STALE_ATTEMPT = "stale_attempt"
    CONTRADICTORY = "contradictory"
