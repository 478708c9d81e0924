"""What each background operation does with the savepoint library, and how a killed one is recognised afterwards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from checkpoint.storage import FileStore
from checkpoint.storage.urls import split_url
from statebackend.errors import HoldfastError

Progress = Callable[[int, int], None]


def run(kind: str, arguments: dict[str, Any], progress: Progress) -> dict[str, Any]:
    """Run one operation to its end."""
    return _OPERATIONS[kind](arguments, progress)


def finished_already(kind: str, arguments: dict[str, Any]) -> bool:
    """Whether an operation that a killed service left behind had done its work: its destination is published."""
    if kind == "dispose":
        return not _published(str(arguments["source"]))
    return "destination" in arguments and _published(str(arguments["destination"]))


def nothing_there(kind: str, arguments: dict[str, Any]) -> bool:
    """Whether what is found after an operation can only be its own work: now its destination is empty, its source there."""
    if kind == "dispose":
        return _published(str(arguments["source"]))
    if "destination" not in arguments:
        return True
    with FileStore.at(str(arguments["destination"])) as store:
        return not store.list("", temporary=True)


def result_of(kind: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """The result of an operation that had finished when the service died."""
    return {"path": arguments["destination"]} if "destination" in arguments else {"message": "done"}


def remove_partial(arguments: dict[str, Any]) -> None:
    """Remove what a killed operation left of its destination; a published one is never touched."""
    destination = arguments.get("destination")
    if destination is None or _published(str(destination)):
        return
    parent, name = split_url(str(destination))
    with FileStore.at(parent) as store:
        store.delete_tree(name)


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


def _rescale(arguments: dict[str, Any], progress: Progress) -> dict[str, Any]:
    from savepoint.rescale import rescale_savepoint

    rescale_savepoint(arguments["source"], arguments["destination"], parallelism=arguments.get("parallelism"),
                      max_parallelism=arguments.get("max_parallelism"), progress=progress)
    return {"path": arguments["destination"]}


def _copy(arguments: dict[str, Any], progress: Progress) -> dict[str, Any]:
    from savepoint.manage import copy_savepoint

    copy_savepoint(arguments["source"], arguments["destination"], progress=progress)
    return {"path": arguments["destination"]}


def _edit(arguments: dict[str, Any], progress: Progress) -> dict[str, Any]:
    from savepoint.edit import Edit

    with Edit(arguments["source"], [patch_operation(change) for change in arguments["changes"]]) as edit:
        changed = len(edit.plan())
        edit.write(arguments["destination"], progress=progress)
    return {"path": arguments["destination"], "changed": changed}


def _verify(arguments: dict[str, Any], progress: Progress) -> dict[str, Any]:
    from savepoint.verify import verify_savepoint

    found = verify_savepoint(arguments["source"], progress=progress)
    problems = [{name: value for name, value in vars(problem).items() if value is not None} for problem in found.problems]
    message = f"{len(problems)} problems" if problems else f"{found.files} files and {found.rows} rows are as they should be"
    return {"ok": bool(found), "files": found.files, "bytes": found.size, "rows": found.rows, "problems": problems,
            "message": message}


def _dispose(arguments: dict[str, Any], _progress: Progress) -> dict[str, Any]:
    from savepoint.manage import plan_disposal

    disposal = plan_disposal(arguments["source"])
    disposal.apply()
    return {"message": f"{disposal.files} files removed", "bytes": disposal.size}


def patch_operation(change: dict[str, Any]) -> dict[str, Any]:
    """A change of a request as an operation of a patch: what was not given is left out."""
    sets = change["op"] == "set"
    return {name: value for name, value in change.items() if value is not None or (name == "value" and sets)}


_OPERATIONS: dict[str, Callable[[dict[str, Any], Progress], dict[str, Any]]] = {
    "convert": _convert, "rescale": _rescale, "copy": _copy, "edit": _edit, "verify": _verify, "dispose": _dispose}
