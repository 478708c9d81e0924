"""What each background operation does with the savepoint library, and how a killed one is recognised afterwards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from checkpoint.storage import FileStore
from statebackend.errors import HoldfastError, InvalidRequest

Progress = Callable[[int, int], None]


def run(kind: str, arguments: dict[str, Any], progress: Progress) -> dict[str, Any]:
    """Run one operation to its end."""
    return _OPERATIONS[kind](arguments, progress)


def finished_already(kind: str, arguments: dict[str, Any]) -> bool:
    """Whether an operation that a killed service left behind had done its work: its destination is published."""
    if kind == "dispose":
        return not _published(str(arguments["source"]))
    return "destination" in arguments and _published(str(arguments["destination"]))


def result_of(kind: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """The result of an operation that had finished when the service died."""
    return {"path": arguments["destination"]} if "destination" in arguments else {"message": "done"}


def remove_partial(arguments: dict[str, Any]) -> None:
    """Remove what a killed operation left of its destination; a published one is never touched."""
    destination = arguments.get("destination")
    if destination is None or _published(str(destination)):
        return
    with FileStore.at(str(destination)) as store:
        store.delete_tree("")


def _published(url: str) -> bool:
    try:
        with FileStore.at(url) as store:
            return store.exists("_metadata")
    except HoldfastError:
        return False


def _convert(arguments: dict[str, Any], progress: Progress) -> dict[str, Any]:
    from savepoint.convert import convert_savepoint

    convert_savepoint(arguments["source"], arguments["destination"], format=arguments.get("format", "open"),
                      progress=progress)
    return {"path": arguments["destination"]}


def _unknown(arguments: dict[str, Any], progress: Progress) -> dict[str, Any]:
    raise InvalidRequest("this operation is not known")


_OPERATIONS: dict[str, Callable[[dict[str, Any], Progress], dict[str, Any]]] = {"convert": _convert}
