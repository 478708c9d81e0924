"""One archive of what executors lack: our packages and the libraries they need, native code included."""

from __future__ import annotations

import os
import tarfile
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, files, version
from pathlib import Path
from typing import Any

from statebackend.errors import Conflict, NotFound

OURS = ("statebackend", "checkpoint", "savepoint", "spark_integration")
LIBRARIES = ("rocksdict", "pyarrow", "xxhash", "msgspec", "fsspec", "numpy")


def pack(destination: str | os.PathLike[str]) -> dict[str, Any]:
    """Write the archive; it unpacks to a folder for PYTHONPATH. Same platform and Python on the executors."""
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
            for library in LIBRARIES:
                versions[library] = version(library)
                for name, path in _files_of(library):
                    archive.add(path, name)
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)
    return {"archive": str(target), "bytes": target.stat().st_size, "libraries": versions}


def _files_of(library: str) -> Iterator[tuple[str, Path]]:
    try:
        listed = files(library) or []
    except PackageNotFoundError:
        raise NotFound(f"{library} is not installed here, so it can't be packed") from None
    for file in listed:
        path = Path(str(file.locate()))
        if path.is_file() and ".." not in file.parts and "__pycache__" not in file.parts and path.suffix != ".pyc" and \
                "tests" not in file.parts and "include" not in file.parts:
            yield str(file), path
