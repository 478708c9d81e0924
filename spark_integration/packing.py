"""One archive of what executors lack: our packages and the libraries they need, native code included."""

from __future__ import annotations

import os
import re
import tarfile
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, files, requires, version
from pathlib import Path
from typing import Any

from statebackend.errors import Conflict, NotFound

OURS = ("statebackend", "checkpoint", "savepoint", "spark_integration")
LIBRARIES = ("rocksdict", "pyarrow", "xxhash", "msgspec", "fsspec", "numpy")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def pack(destination: str | os.PathLike[str], extra: Sequence[str] = ()) -> dict[str, Any]:
    """Write the archive; it unpacks to a folder for PYTHONPATH. Same platform and Python on the executors.

    `extra` names further distributions, such as s3fs; what they need goes with them.
    """
    target = Path(destination)
    if target.exists():
        raise Conflict("the archive exists already", path=str(target), hint="remove it or choose another name")
    temporary = target.with_name(f".{target.name}.tmp")
    versions = {}
    try:
        with tarfile.open(temporary, "w:gz", compresslevel=3) as archive:
            for package in OURS:
                folder = Path(__import__(package).__file__ or "").parent
                for path in sorted(folder.rglob("*")):
                    if path.is_file() and "__pycache__" not in path.parts:
                        archive.add(path, f"{package}/{path.relative_to(folder)}")
            for library in _with_needs([*LIBRARIES, *extra]):
                versions[library] = version(library)
                for name, path in _files_of(library):
                    archive.add(path, name)
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)
    return {"archive": str(target), "bytes": target.stat().st_size, "libraries": versions}


def _with_needs(libraries: Sequence[str]) -> list[str]:
    """The distributions and those they need, without those of extras; what is not installed is needed elsewhere."""
    found: dict[str, None] = {}
    waiting = [*libraries]
    while waiting:
        library = waiting.pop(0)
        if library in found:
            continue
        found[library] = None
        for line in _requirements(library):
            name = _NAME.match(line)
            if name is not None and "extra ==" not in line and _is_installed(name[0]):
                waiting.append(name[0].lower())
    return list(found)


def _requirements(library: str) -> list[str]:
    try:
        return requires(library) or []
    except PackageNotFoundError:
        raise NotFound(f"{library} is not installed here, so it can't be packed") from None


def _is_installed(library: str) -> bool:
    try:
        return bool(version(library))
    except PackageNotFoundError:
        return False


def _files_of(library: str) -> Iterator[tuple[str, Path]]:
    for file in files(library) or []:
        path = Path(str(file.locate()))
        if path.is_file() and ".." not in file.parts and "__pycache__" not in file.parts and path.suffix != ".pyc" and \
                "tests" not in file.parts and "include" not in file.parts:
            yield str(file), path
