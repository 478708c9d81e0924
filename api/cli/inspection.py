"""What `savepoint inspect` shows: one document for machines, and the same as tables and bars for people."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from api.cli import output as out

if TYPE_CHECKING:
    from savepoint.opened import Savepoint

_BARS = "▁▂▃▄▅▆▇█"
_WIDTH = 64
_LARGEST = 16
_UNITS = (("d", 86_400_000), ("h", 3_600_000), ("m", 60_000), ("s", 1000), ("ms", 1))
SKEWED = 1.5
"""A subtask with so many times the average of rows is pointed at."""


def describe(opened: Savepoint, operator: str | None = None) -> dict[str, Any]:
    """Everything that the metadata tells of a savepoint."""
    metadata = opened.metadata
    infos = [info for info in opened.operators() if operator in (None, info.uid)]
    return {
        "path": opened.url, "kind": metadata.kind, "format": metadata.format, "job_id": metadata.job_id,
        "job_name": metadata.job_name, "checkpoint_id": metadata.checkpoint_id,
        "completed": metadata.completed_timestamp, "unaligned": metadata.unaligned, "bytes": metadata.full_size,
        "operators": [_operator(opened, info) for info in infos]}


def _operator(opened: Savepoint, info: Any) -> dict[str, Any]:
    states = []
    for state in info.states:
        item = {"name": state.name, "kind": state.kind, "value_type": state.value_type,
                "map_key_type": state.map_key_type, "namespace_type": state.namespace_type, "ttl_ms": state.ttl_ms,
                "rows": state.rows, "bytes": state.size}
        if state.key_type is not None:
            item["largest_keys"] = opened.largest_keys(info.uid, state.name)
        states.append(item)
    document = {"uid": info.uid, "name": info.name, "parallelism": info.parallelism,
                "max_parallelism": info.max_parallelism, "key_type": info.key_type, "bytes": info.stored,
                "states": states}
    if info.in_flight:
        document["in_flight"] = [{"edge": edge or None, "records": records} for edge, records in info.in_flight.items()]
    if info.key_type is not None:
        groups = opened.key_groups(info.uid)
        document["rows_by_key_group"] = groups.column("rows").to_pylist()
        document["subtasks"] = _subtasks(groups)
    return document


def _subtasks(groups: Any) -> list[dict[str, Any]]:
    totals: dict[int, dict[str, Any]] = {}
    for row in groups.to_pylist():
        item = totals.setdefault(row["subtask"], {"subtask": row["subtask"], "key_groups": 0, "rows": 0, "bytes": 0})
        item["key_groups"] += 1
        for name in ("rows", "bytes"):
            item[name] = None if row[name] is None or item[name] is None else item[name] + row[name]
    return list(totals.values())


def show_description(document: dict[str, Any]) -> None:
    """The document for people."""
    console = out.console()
    console.print(f"[bold]{document['path']}[/bold]  {document['format']} {document['kind']} of job "
                  f"{document['job_name']} ({document['job_id'][:8]}), checkpoint {document['checkpoint_id']}, "
                  f"{out.when(document['completed'])}, {out.size(document['bytes'])}")
    for operator in document["operators"]:
        key = f", key {operator['key_type']}" if operator["key_type"] else ""
        console.print(f"\n[bold]{operator['uid']}[/bold]  parallelism {operator['parallelism']} of "
                      f"{operator['max_parallelism']}{key}, {out.size(operator['bytes'])}")
        if operator["states"]:
            _show_states(operator)
        if operator.get("rows_by_key_group"):
            _show_spread(console, operator)
        _show_largest(console, operator)
        for item in operator.get("in_flight", ()):
            told = "records in flight, not counted in this format" if item["records"] is None else \
                f"{item['records']:,} records in flight on {item['edge']}"
            console.print(told, markup=False)


def _show_states(operator: dict[str, Any]) -> None:
    rows = [{"state": state["name"], "kind": state["kind"], "type": _type(state),
             "ttl": "" if state["ttl_ms"] is None else _duration(state["ttl_ms"]),
             "rows": state["rows"], "bytes": state["bytes"]} for state in operator["states"]]
    out.emit_rows(rows, out.Format.TABLE, name="state", human={"bytes": out.size, "rows": _count})


def _type(state: dict[str, Any]) -> str:
    if state["kind"] == "timer":
        return ""
    inner = state["value_type"] if state["map_key_type"] is None else f"{state['map_key_type']} -> {state['value_type']}"
    return inner if state["namespace_type"] is None else f"{inner} per {state['namespace_type']}"


def _duration(milliseconds: int) -> str:
    """In the largest unit that it is a whole number of, as one would type it."""
    unit, length = next((unit, length) for unit, length in _UNITS if milliseconds % length == 0)
    return f"{milliseconds // length}{unit}"


def _count(value: Any) -> str:
    return "not counted" if value is None else f"{value:,}"


def _show_spread(console: Any, operator: dict[str, Any]) -> None:
    counts = operator["rows_by_key_group"]
    if any(count is None for count in counts):
        console.print("rows by key group are not counted in this format; convert it to open to see them")
        return
    console.print(f"rows by key group  {spark_line(counts)}")
    subtasks = operator["subtasks"]
    average = sum(item["rows"] for item in subtasks) / max(1, len(subtasks))
    top = max(1, max(item["rows"] for item in subtasks))
    shown = subtasks if len(subtasks) <= _WIDTH else sorted(subtasks, key=lambda item: -item["rows"])[:_LARGEST]
    for item in shown:
        bar = "█" * round(30 * item["rows"] / top)
        skew = f"  [yellow]{item['rows'] / average:.1f}x the average[/yellow]" if average and \
            item["rows"] > SKEWED * average and len(subtasks) > 1 else ""
        console.print(f"  subtask {item['subtask']:>3}  {bar:<30} {item['rows']:>12,} rows  {out.size(item['bytes'])}{skew}")
    if len(shown) < len(subtasks):
        console.print(f"  the largest {len(shown)} of {len(subtasks):,} subtasks; -o json has all")


def spark_line(counts: list[int]) -> str:
    """Counts as one line of bars; neighbours are added up where there are more than fit."""
    step = -(-len(counts) // _WIDTH)
    sums = [sum(counts[begin:begin + step]) for begin in range(0, len(counts), step)]
    top = max(sums) or 1
    return "".join(_BARS[min(7, value * 7 // top)] for value in sums)


def _show_largest(console: Any, operator: dict[str, Any]) -> None:
    for state in operator["states"]:
        largest = state.get("largest_keys") or ()
        if not largest or (len(largest) > 1 and largest[0]["bytes"] == largest[-1]["bytes"]):
            continue
        shown = ", ".join(f"{item['key']!r} ({item['rows']:,} rows, {out.size(item['bytes'])})" for item in largest[:3])
        console.print(f"largest keys of {state['name']}: {shown}", markup=False)
