"""Only configured roots can be reached, whatever a path, symlink or URL in a request says."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from urllib.parse import unquote, urlsplit

from statebackend.errors import InvalidRequest, NotFound


@dataclass(frozen=True)
class Place:
    """A path below a root, as the URL that the library opens and as the relative path that users see."""

    root: str
    relative: str
    url: str


class Roots:
    """The folders that the service may touch. Local ones are compared after symlinks are resolved."""

    def __init__(self, urls: tuple[str, ...]) -> None:
        self.urls = tuple(_normal(url) for url in urls)

    def place(self, path: str) -> Place:
        """A path of a request: relative to the first root, absolute, or a URL; always below a root."""
        if "\0" in path or any(ord(letter) < 32 for letter in path):
            raise InvalidRequest("a path holds control characters")
        if any(len(part.encode("utf-8", "surrogatepass")) > 255 for part in path.split("/")) or len(path) > 3000:
            raise InvalidRequest("a path or a name in it is too long")
        text = _without_file_scheme(path)
        if "://" not in text and not text.startswith("/"):
            text = f"{self.urls[0].rstrip('/')}/{text}"
        parts = PurePosixPath(text.split("://", 1)[-1]).parts
        if ".." in parts:
            raise InvalidRequest("a path must not climb with `..`", path=path)
        for root in self.urls:
            found = _below_remote(root, text) if "://" in root else _below_local(root, text)
            if found is not None:
                return found
        raise NotFound("this path is below none of the service's roots", path=path, hint="GET /api/roots lists them")


def _normal(url: str) -> str:
    url = _without_file_scheme(url)
    return url.rstrip("/") if "://" in url else str(Path(url).resolve())


def _without_file_scheme(path: str) -> str:
    if path.startswith("file:"):
        return unquote(urlsplit(path).path) or "/"
    return path


def _below_local(root: str, text: str) -> Place | None:
    if "://" in text:
        return None
    resolved = os.path.realpath(text)
    if resolved != root and not resolved.startswith(root.rstrip("/") + "/"):
        return None
    return Place(root, os.path.relpath(resolved, root), resolved)


def _below_remote(root: str, text: str) -> Place | None:
    aliases = (root, root.replace("s3a://", "s3://"), root.replace("s3://", "s3a://"))
    text = text.rstrip("/")
    for alias in aliases:
        if text == alias or text.startswith(alias + "/"):
            relative = text[len(alias):].strip("/")
            return Place(root, relative or ".", f"{root}/{relative}".rstrip("/"))
    return None
