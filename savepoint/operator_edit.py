"""Edits of operator state: elements of lists, entries of broadcast maps.

    {"op": "set", "operator": "source", "state": "offsets", "subtask": 0, "index": 1, "value": 17}
    {"op": "add", "operator": "source", "state": "offsets", "value": 23}              at the end, of subtask 0 unless told
    {"op": "remove", "operator": "source", "state": "offsets", "value": 23}           one element like it, wherever it is
    {"op": "delete", "operator": "source", "state": "offsets", "subtask": 0, "index": 1}
    {"op": "set", "operator": "rules", "state": "limits", "map_key": "eu", "value": 5}
    {"op": "delete", "operator": "rules", "state": "limits", "map_key": "eu"}

`set` without `index` takes the whole list of a subtask, without `map_key` the whole map. A broadcast map is changed in every
subtask: all hold the same. Rows that `diff` prints are operations too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from savepoint.format import ELEMENT_INDEX, MAP_KEY, SUBTASK
from savepoint.operators import operator_types
from savepoint.values import from_plain, plain_value
from statebackend.errors import InvalidRequest
from statebackend.operator_state import Distribution, OperatorStatePart

if TYPE_CHECKING:
    from savepoint.opened import Savepoint

_LIST_FIELDS = {"op", "operator", "state", SUBTASK, ELEMENT_INDEX, "value"}
_MAP_FIELDS = {"op", "operator", "state", MAP_KEY, "value"}


@dataclass(frozen=True)
class OperatorOperation:
    """One checked operation; values are encoded. `value` is a list of elements or of pairs where all are meant."""

    op: str
    uid: str
    state: str
    subtask: int | None = None
    index: int | None = None
    map_key: bytes | None = None
    value: Any = None


@dataclass
class EditedOperator:
    """The operator state of every subtask after an edit, and the plan's rows."""

    parts: list[tuple[int, tuple[OperatorStatePart, ...]]]
    plan: list[dict[str, Any]] = field(default_factory=list)


def operator_operation(savepoint: Savepoint, raw: Mapping[str, Any]) -> OperatorOperation:
    """The operation with encoded values; one that does not fit the state is refused."""
    uid, state = str(raw["operator"]), str(raw["state"])
    part = next(part for _, parts in savepoint.operator_parts(uid) for part in parts if part.name == state)
    broadcast = part.distribution is Distribution.BROADCAST
    raw = _from_diff(raw, broadcast)
    fields = _MAP_FIELDS if broadcast else _LIST_FIELDS
    unknown = sorted(set(raw) - fields)
    if unknown:
        raise InvalidRequest(f"an operation on this state has no field {unknown[0]!r}", state=state,
                             hint=f"fields are {', '.join(sorted(fields))}")
    op, known = str(raw.get("op")), ("set", "delete") if broadcast else ("set", "delete", "add", "remove")
    if op not in known:
        raise InvalidRequest(f"there is no operation {op!r} on this state", state=state, hint=f"op is {' or '.join(known)}")
    if op != "delete" and "value" not in raw:
        raise InvalidRequest("an operation lacks 'value'", state=state)
    map_key_type, value_type = operator_types(part)
    if map_key_type is not None:
        key = map_key_type.encode_key(from_plain(raw[MAP_KEY], map_key_type)) if MAP_KEY in raw else None
        return OperatorOperation(op, uid, state, map_key=key, value=_map_value(raw, key, map_key_type, value_type))
    index = _number(raw, ELEMENT_INDEX, state)
    whole = op == "set" and index is None
    if whole and not isinstance(raw["value"], list):
        raise InvalidRequest("a list is set to an array", state=state, hint="or name one element with index")
    values = raw.get("value") if whole else [raw.get("value")]
    encoded = None if op == "delete" else [value_type.encode(from_plain(value, value_type)) for value in values or ()]
    return OperatorOperation(op, uid, state, _number(raw, SUBTASK, state), index,
                             value=encoded if whole or encoded is None else encoded[0])


def _from_diff(raw: Mapping[str, Any], broadcast: bool) -> Mapping[str, Any]:
    if "change" not in raw:
        return raw
    kept = {name: value for name, value in raw.items() if name not in ("change", "before", "after")}
    if broadcast:
        return {**kept, **({"op": "delete"} if raw["change"] == "removed" else {"op": "set", "value": raw.get("after")})}
    removed = raw["change"] == "removed"
    return {**kept, "op": "remove" if removed else "add", "value": raw.get("before" if removed else "after")}


def _map_value(raw: Mapping[str, Any], key: bytes | None, map_key_type: Any, value_type: Any) -> Any:
    if raw["op"] == "delete":
        return None
    if key is not None:
        return value_type.encode(from_plain(raw["value"], value_type))
    value = raw["value"]
    if not isinstance(value, (dict, list)):
        raise InvalidRequest("a map is set to an object, or to an array of [key, value]", state=raw["state"])
    pairs = value.items() if isinstance(value, dict) else value
    return [(map_key_type.encode_key(from_plain(item_key, map_key_type)), value_type.encode(from_plain(item, value_type)))
            for item_key, item in pairs]


def _number(raw: Mapping[str, Any], name: str, state: str) -> int | None:
    number = raw.get(name)
    if number is None:
        return None
    if isinstance(number, bool) or not isinstance(number, int) or number < 0:
        raise InvalidRequest(f"{name} is a number from 0", state=state, found=number)
    return number


def edited_parts(savepoint: Savepoint, operations: Sequence[OperatorOperation]) -> dict[str, EditedOperator]:
    """The operator state of each operator that the operations touch, after them."""
    found: dict[str, EditedOperator] = {}
    for item in operations:
        edited = found.setdefault(item.uid, EditedOperator(list(savepoint.operator_parts(item.uid))))
        held = {index: part for index, parts in edited.parts for part in parts if part.name == item.state}
        sample = next(iter(held.values()))
        change = _change_map if sample.distribution is Distribution.BROADCAST else _change_list
        changed = change(item, held, edited.plan)
        edited.parts = [(index, tuple(changed.get(index, part) if part.name == item.state else part for part in parts))
                        for index, parts in edited.parts]
    return found


def _change_map(item: OperatorOperation, held: dict[int, OperatorStatePart],
                plan: list[dict[str, Any]]) -> dict[int, OperatorStatePart]:
    first = next(iter(held.values()))
    before, after = dict(first.pairs), dict(first.pairs)
    if item.map_key is None:
        after = dict(item.value or ())
    elif item.op == "set":
        after[item.map_key] = item.value
    elif after.pop(item.map_key, None) is None:
        raise InvalidRequest("the entry that is to be deleted is not there", state=item.state)
    map_key_type, value_type = operator_types(first)
    assert map_key_type is not None
    for key in dict.fromkeys([*before, *after]):
        if before.get(key) != after.get(key):
            shown = plain_value(map_key_type.decode_key(key), map_key_type)
            plan.append(_row(item, {MAP_KEY: shown}, before.get(key), after.get(key), value_type))
    if item.map_key is None:
        return {index: replace(part, pairs=tuple(sorted(after.items()))) for index, part in held.items()}
    changed = {}
    for index, part in held.items():
        pairs = {key: value for key, value in part.pairs if key != item.map_key}
        pairs |= {item.map_key: item.value} if item.op == "set" else {}
        changed[index] = replace(part, pairs=tuple(sorted(pairs.items())))
    return changed


def _change_list(item: OperatorOperation, held: dict[int, OperatorStatePart],
                 plan: list[dict[str, Any]]) -> dict[int, OperatorStatePart]:
    subtask = _subtask(item, held)
    part = held[subtask]
    elements, value_type = list(part.elements), operator_types(part)[1]
    place: dict[str, Any] = {SUBTASK: subtask}
    if item.op in ("set", "delete") and item.index is None:
        wanted = list(item.value or ())
        for index in range(max(len(elements), len(wanted))):
            old, new = (side[index] if index < len(side) else None for side in (elements, wanted))
            if old != new:
                plan.append(_row(item, {**place, ELEMENT_INDEX: index}, old, new, value_type))
        return {subtask: replace(part, elements=tuple(wanted))}
    index = _index(item, elements)
    old = elements[index] if index < len(elements) and item.op != "add" else None
    elements[index:index + (item.op != "add")] = [item.value] if item.op in ("set", "add") else []
    new = item.value if item.op in ("set", "add") else None
    if old != new:
        plan.append(_row(item, {**place, ELEMENT_INDEX: index}, old, new, value_type))
    return {subtask: replace(part, elements=tuple(elements))}


def _subtask(item: OperatorOperation, held: Mapping[int, OperatorStatePart]) -> int:
    if item.subtask is not None:
        if item.subtask not in held:
            raise InvalidRequest("the subtask does not hold this state", state=item.state, expected=sorted(held),
                                 found=item.subtask)
        return item.subtask
    if item.op == "remove":
        found = next((index for index, part in held.items() if item.value in part.elements), None)
        if found is None:
            raise InvalidRequest("the element that is to be removed is not there", state=item.state)
        return found
    if item.op != "add" and len(held) > 1:
        raise InvalidRequest("several subtasks hold this list", state=item.state, expected=sorted(held),
                             hint="name one with subtask")
    return min(held)


def _index(item: OperatorOperation, elements: Sequence[bytes]) -> int:
    if item.op == "add":
        return len(elements)
    if item.op == "remove":
        if item.value not in elements:
            raise InvalidRequest("the element that is to be removed is not there", state=item.state)
        return elements.index(item.value)
    assert item.index is not None
    if item.index >= len(elements):
        raise InvalidRequest("the list has no such element", state=item.state, expected=f"0..{len(elements) - 1}",
                             found=item.index, hint="use op add to append one")
    return item.index


def _row(item: OperatorOperation, place: Mapping[str, Any], old: bytes | None, new: bytes | None,
         value_type: Any) -> dict[str, Any]:
    shown = [None if value is None else plain_value(value_type.decode(value), value_type) for value in (old, new)]
    change = "added" if old is None else "removed" if new is None else "changed"
    return {"operator": item.uid, "state": item.state, "change": change, **place, "before": shown[0], "after": shown[1]}
