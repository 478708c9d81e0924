"""Names as people type them: `operator.state`, `operator.state:key=value`, types and key groups."""

from __future__ import annotations

import json
from difflib import get_close_matches
from typing import Any

from savepoint.format import KEY, MAP_KEY, VALUE
from savepoint.opened import Savepoint
from savepoint.values import plain_text
from statebackend.descriptors import StateKind
from statebackend.errors import InvalidRequest, NotFound
from statebackend.keygroups import KeyGroupRange
from statebackend.types import StateType, state_type


def split_name(savepoint: Savepoint, text: str) -> tuple[str, str]:
    """Operator and state of `operator.state`; either may hold dots, so what the savepoint has decides."""
    if "." not in text:
        names = sorted(savepoint.state_names())
        near = [name for name in names if text in name.split(".")] or get_close_matches(text, names, n=3, cutoff=0.3)
        raise InvalidRequest(f"{text!r} names no state; write it as OPERATOR.STATE",
                             hint=f"did you mean {' or '.join(map(repr, near[:3]))}?" if near else None)
    uids = {entry.uid for entry in savepoint.metadata.operators}
    cuts = [index for index, letter in enumerate(text) if letter == "."]
    known = [(text[:cut], text[cut + 1:]) for cut in cuts if text[:cut] in uids]
    for uid, state in known:
        if any(info.name == state for info in savepoint.states(uid)):
            return uid, state
    uid, state = known[0] if known else (text[:cuts[0]], text[cuts[0] + 1:])
    savepoint.entry(uid)
    savepoint.schema(uid, state)
    raise NotFound(f"operator {uid!r} has no state {state!r}", path=savepoint.url)


def parse_assignment(savepoint: Savepoint, text: str) -> dict[str, Any]:
    """The patch operation of `operator.state:key=value`; key and value may be JSON.

    The key of a broadcast state is a map key, that of an operator list `subtask/index`; the value of a timer its time.
    """
    name, key, rest = _name_and_key(text)
    if not rest.startswith("="):
        raise InvalidRequest(f"{text!r} sets nothing", hint="write it as OPERATOR.STATE:KEY=VALUE")
    uid, state = split_name(savepoint, name)
    return {"op": "set", "operator": uid, "state": state, **_entry_named(savepoint, uid, state, key),
            "value": _value_named(savepoint, uid, state, rest[1:])}


def parse_target(savepoint: Savepoint, text: str) -> dict[str, Any]:
    """The patch operation that deletes `operator.state:key`."""
    name, key, rest = _name_and_key(text + "=")
    if rest != "=":
        raise InvalidRequest(f"{text!r} names no key", hint="write it as OPERATOR.STATE:KEY")
    uid, state = split_name(savepoint, name)
    return {"op": "delete", "operator": uid, "state": state, **_entry_named(savepoint, uid, state, key)}


def _entry_named(savepoint: Savepoint, uid: str, state: str, key: str) -> dict[str, Any]:
    types = savepoint.column_types(uid, state)
    if KEY in types:
        return {"key": plain_text(key, types[KEY])}
    if MAP_KEY in types:
        return {"map_key": plain_text(key, types[MAP_KEY])}
    subtask, slash, index = key.partition("/")
    if not (subtask.isdigit() and slash and index.isdigit()):
        raise InvalidRequest(f"{key!r} names no element of a list", state=state,
                             hint="write it as SUBTASK/INDEX, such as 0/2")
    return {"subtask": int(subtask), "index": int(index)}


def _value_named(savepoint: Savepoint, uid: str, state: str, text: str) -> Any:
    """JSON where the type takes it; the whole of a list or map can only be JSON."""
    info = next(info for info in savepoint.states(uid) if info.name == state)
    if info.kind in (StateKind.LIST, StateKind.MAP, StateKind.TIMER):
        return _json_or_text(text)
    return plain_text(text, savepoint.column_types(uid, state)[VALUE])


def _name_and_key(text: str) -> tuple[str, str, str]:
    name, colon, rest = text.partition(":")
    if not colon:
        raise InvalidRequest(f"{text!r} names no key", hint="write it as OPERATOR.STATE:KEY")
    if rest[:1] in ('"', "[", "{"):
        try:
            _, end = json.JSONDecoder().raw_decode(rest)
        except ValueError as error:
            raise InvalidRequest(f"the key in {text!r} is no JSON: {error}") from error
        return name, rest[:end], rest[end:]
    key, _, value = rest.partition("=")
    return name, key, f"={value}" if "=" in rest else ""


def _json_or_text(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def parse_key_groups(text: str) -> KeyGroupRange:
    """`7`, or `0-31` with both ends."""
    first, _, last = text.partition("-")
    try:
        return KeyGroupRange(int(first), int(last or first))
    except ValueError as error:
        raise InvalidRequest(f"{text!r} is no key group", hint="write it as 7 or 0-31") from error


def parse_type(text: str) -> StateType:
    """A state type by name: int, float, str, bytes, bool, date, datetime, decimal, uuid, or an Arrow type such as
    int32 or timestamp[ms]."""
    import datetime
    import decimal
    import uuid

    import pyarrow as pa

    plain: dict[str, Any] = {"int": int, "float": float, "str": str, "bytes": bytes, "bool": bool, "date": datetime.date,
                             "datetime": datetime.datetime, "time": datetime.time, "timedelta": datetime.timedelta,
                             "decimal": decimal.Decimal, "uuid": uuid.UUID}
    if text in plain:
        return state_type(plain[text])
    try:
        return state_type(pa.type_for_alias(text))
    except ValueError as error:
        raise InvalidRequest(f"there is no type {text!r}", hint=f"use {', '.join(plain)} or an Arrow type") from error
