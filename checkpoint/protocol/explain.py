"""One line that tells a person why a checkpoint is not done: who has not acknowledged, and what each of them waits for."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from checkpoint.protocol.messages import StatusReport, SubtaskId

SHOWN = 4


def explain(checkpoint_id: int, missing: Collection[SubtaskId], total: int, triggered: Collection[SubtaskId],
            status: Mapping[SubtaskId, StatusReport]) -> str:
    """`missing` are the subtasks without acknowledgement, `triggered` those that the coordinator asked directly."""
    if not missing:
        return "all subtasks have acknowledged it, its metadata is not yet stored"
    waiting, silent, unreached = [], [], []
    for subtask in missing:
        text = _waits_for(checkpoint_id, subtask, status)
        if text is not None:
            waiting.append(text)
        elif subtask in triggered:
            silent.append(f"{subtask} has not answered the trigger{_own_pressure(subtask, status)}")
        else:
            unreached.append(subtask)
    parts = sorted(waiting) + sorted(silent)
    # Subtasks that no barrier has reached are mostly a consequence of the others, so they come last.
    parts += [f"{subtask} has not seen a barrier{_own_pressure(subtask, status)}"
              for subtask in sorted(unreached)[:SHOWN]]
    shown = "; ".join(parts[:SHOWN])
    more = len(missing) - min(SHOWN, len(parts))
    rest = f"; and {more} more" if more else ""
    return f"{len(missing)} of {total} subtasks have not acknowledged: {shown}{rest}"


def _waits_for(checkpoint_id: int, subtask: SubtaskId, status: Mapping[SubtaskId, StatusReport]) -> str | None:
    report = status.get(subtask)
    waiting = None if report is None else next((entry for entry in report.waiting
                                                if entry.checkpoint_id == checkpoint_id), None)
    if waiting is None:
        return None
    if not waiting.channel_count:
        return f"{subtask} has all barriers and is still writing its snapshot"
    channels = ", ".join(channel + _sender_pressure(channel, status) for channel in waiting.channels)
    hidden = waiting.channel_count - len(waiting.channels)
    noun = "channel" if waiting.channel_count == 1 else f"{waiting.channel_count} channels:"
    return f"{subtask} waits for the barrier on {noun} {channels}" + (f" and {hidden} more" if hidden > 0 else "")


def _sender_pressure(channel: str, status: Mapping[SubtaskId, StatusReport]) -> str:
    sender = channel.split(" -> ")[0]
    task, _, index = sender.rpartition("[")
    return _pressure(SubtaskId(task, int(index.rstrip("]"))), status)


def _own_pressure(subtask: SubtaskId, status: Mapping[SubtaskId, StatusReport]) -> str:
    report = status.get(subtask)
    return f" (back pressure {report.back_pressure:.0%})" if report is not None and report.back_pressure else ""


def _pressure(subtask: SubtaskId, status: Mapping[SubtaskId, StatusReport]) -> str:
    report = status.get(subtask)
    return f" (back pressure {report.back_pressure:.0%} at {subtask})" if report is not None else ""
