"""Files for connectors: local paths and fsspec URLs alike, globs, and renames that can be repeated."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, BinaryIO, cast

from statebackend.errors import InvalidRequest, NotFound, Unavailable


def is_local(path: str) -> bool:
    return "://" not in path or path.startswith("file://")


def local_path(path: str) -> str:
    return os.path.abspath(path.removeprefix("file://"))


def filesystem(url: str) -> tuple[Any, str]:
    """The fsspec filesystem of a URL, and the path in it."""
    import fsspec

    try:
        found = fsspec.core.url_to_fs(url.replace("s3a://", "s3://", 1))
    except (ValueError, ImportError) as error:
        raise InvalidRequest(f"this URL can't be opened: {error}", path=url) from error
    return cast(tuple[Any, str], found)


def expand(patterns: Sequence[str]) -> list[str]:
    """The files that the patterns name, sorted; hidden ones (`.` first) left out. A folder means the files in it."""
    found: set[str] = set()
    for pattern in patterns:
        found.update(_expand_local(local_path(pattern)) if is_local(pattern) else _expand_remote(pattern))
    return sorted(path for path in found if not path.rsplit("/", 1)[-1].startswith((".", "_")))


def _expand_local(pattern: str) -> Iterable[str]:
    if os.path.isdir(pattern):
        pattern = os.path.join(glob.escape(pattern), "*")
    return (path for path in glob.glob(pattern, recursive=True) if os.path.isfile(path))


def _expand_remote(pattern: str) -> Iterable[str]:
    system, path = filesystem(pattern)
    system.invalidate_cache()
    try:
        if system.isdir(path):
            path = path.rstrip("/") + "/*"
        details = system.glob(path, detail=True)
    except OSError as error:
        raise Unavailable(f"a source's files can't be listed: {error}", path=pattern) from error
    return [system.unstrip_protocol(name) for name, info in details.items() if info.get("type") == "file"]


def open_for_reading(path: str) -> BinaryIO:
    try:
        if is_local(path):
            return open(local_path(path), "rb")
        system, inner = filesystem(path)
        return cast(BinaryIO, system.open(inner, "rb"))
    except FileNotFoundError as error:
        raise NotFound("a source's file is not there any more", path=path) from error
    except OSError as error:
        raise Unavailable(f"a source's file can't be opened: {error}", path=path) from error


def open_for_writing(path: str) -> BinaryIO:
    """A new file. Local folders are made."""
    try:
        if is_local(path):
            local = Path(local_path(path))
            local.parent.mkdir(parents=True, exist_ok=True)
            return open(local, "wb")
        system, inner = filesystem(path)
        return cast(BinaryIO, system.open(inner, "wb"))
    except OSError as error:
        raise Unavailable(f"a sink's file can't be written: {error}", path=path) from error


def make_durable(stream: BinaryIO, path: str) -> None:
    """Flush to the disk and close; for object stores, closing is what stores the object."""
    try:
        stream.flush()
        if is_local(path):
            os.fsync(stream.fileno())
        stream.close()
    except OSError as error:
        raise Unavailable(f"a sink's file can't be written: {error}", path=path) from error


def rename_once(source: str, target: str) -> bool:
    """Rename; nothing happens where it was done before. False: neither file is there.

    Both names are given by us, so neither is anyone else's.
    """
    try:
        return _rename_local(local_path(source), local_path(target)) if is_local(source) else \
            _rename_remote(source, target)
    except OSError as error:
        raise Unavailable(f"a sink's file can't be made visible: {error}", path=source) from error


def _rename_local(source: str, target: str) -> bool:
    try:
        os.replace(source, target)
    except FileNotFoundError:
        return os.path.exists(target)
    return True


def _rename_remote(source: str, target: str) -> bool:
    system, old = filesystem(source)
    _, new = filesystem(target)
    system.invalidate_cache()
    if system.exists(old):
        system.copy(old, new)
        system.rm_file(old)
        return True
    return bool(system.exists(new))


def remove_quietly(path: str) -> None:
    """Remove a file that may be gone already."""
    try:
        if is_local(path):
            os.unlink(local_path(path))
        else:
            system, inner = filesystem(path)
            system.rm_file(inner)
    except FileNotFoundError:
        pass
    except OSError as error:
        raise Unavailable(f"a file can't be removed: {error}", path=path) from error


def names_in(folder: str) -> list[str]:
    """The names of the files right in a folder, hidden ones included; empty where there is none."""
    if is_local(folder):
        local = local_path(folder)
        return sorted(entry.name for entry in os.scandir(local) if entry.is_file()) if os.path.isdir(local) else []
    system, inner = filesystem(folder)
    system.invalidate_cache()
    try:
        return sorted(str(info["name"]).rsplit("/", 1)[-1] for info in system.ls(inner, detail=True)
                      if info.get("type") == "file")
    except FileNotFoundError:
        return []


def join(folder: str, name: str) -> str:
    return f"{folder.rstrip('/')}/{name}"
