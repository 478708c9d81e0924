"""Loads a function of the user's from `file.py:name`."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

from statebackend.errors import InvalidRequest, NotFound


def load_function(reference: str) -> Callable[..., Any]:
    """The function that `file.py:name` names; the file is run, as the user asked."""
    name, colon, attribute = reference.rpartition(":")
    if not colon or not attribute.isidentifier():
        raise InvalidRequest(f"{reference!r} names no function", hint="write it as FILE.py:FUNCTION")
    path = Path(name)
    if not path.is_file():
        raise NotFound("there is no such file", path=name)
    spec = importlib.util.spec_from_file_location(f"_holdfast_function_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise InvalidRequest("the file can't be loaded as Python", path=name)
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise InvalidRequest(f"the file fails when it is loaded: {type(error).__name__}: {error}", path=name) from error
    function = getattr(module, attribute, None)
    if not callable(function):
        raise NotFound(f"the file has no function {attribute!r}", path=name)
    return function  # type: ignore[no-any-return]
