"""Storage URLs: which store a URL names, and how to show it without the credentials it may carry."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from typing import Any

from statebackend.errors import InvalidRequest

_SECRET_NAME = re.compile(r"key|secret|token|passw|credential|sas|auth", re.IGNORECASE)
_URL_IN_TEXT = re.compile(r"\b[a-zA-Z][a-zA-Z0-9+.-]*://[^\s'\"<>]+")
_USERINFO = re.compile(r"(://)[^/@\s]+@")


def protocol_of(url: str) -> str:
    """The protocol of a URL: `file` for plain paths, the outermost one of a chain (`a::b://`)."""
    first, chained, _ = url.partition("::")
    if chained and "/" not in first:
        return first.lower()
    if "://" not in url:
        return "file"
    return url.split("://", 1)[0].lower()


def local_path_of(url: str) -> str:
    """The absolute path that a `file://` URL or a plain path names."""
    path = url.split("://", 1)[1] if "://" in url else url
    if not path:
        raise InvalidRequest("a storage URL names no folder", found=url)
    return os.path.abspath(os.path.expanduser(path))


def redacted(url: str) -> str:
    """The URL without user, password and query, which may carry credentials. Plain paths stay as they are."""
    if "://" not in url:
        return url
    if "::" in url:
        return "::".join(redacted(part) for part in url.split("::"))
    scheme, rest = url.split("://", 1)
    if scheme in ("file", "local"):
        return url
    host, slash, path = rest.split("?", 1)[0].partition("/")
    return f"{scheme}://{host.rpartition('@')[2]}{slash}{path}"


def join_url(url: str, path: str) -> str:
    """A path below a storage URL."""
    return f"{url.rstrip('/')}/{path.lstrip('/')}" if path else url


def split_url(url: str) -> tuple[str, str]:
    """The parent URL and the last name of a URL."""
    parent, _, name = url.rstrip("/").rpartition("/")
    return parent, name


def scrubber(options: Mapping[str, Any]) -> Callable[[str], str]:
    """A function that removes from a text every secret among the options, and the user and query of every URL."""
    secrets = sorted(set(_secret_values(options)), key=len, reverse=True)

    def scrub(text: str) -> str:
        for secret in secrets:
            text = text.replace(secret, "***")
        text = _URL_IN_TEXT.sub(lambda match: match[0].split("?", 1)[0], text)
        return _USERINFO.sub(r"\1***@", text)

    return scrub


def _secret_values(options: Mapping[str, Any]) -> list[str]:
    found: list[str] = []
    for name, value in options.items():
        if isinstance(value, Mapping):
            found.extend(_secret_values(value))
        elif isinstance(value, str) and len(value) >= 4 and _SECRET_NAME.search(name):
            found.append(value)
    return found
