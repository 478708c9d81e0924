"""Where a setting comes from: flag, then HOLDFAST_* environment, then settings file, then default."""

from __future__ import annotations

import os
from collections.abc import Iterator, MutableMapping
from pathlib import Path
from typing import Any, NamedTuple

from statebackend.errors import InvalidRequest, NotFound


class Setting(NamedTuple):
    """A value that several commands share. Commands name `env` as the envvar of their option of the same name."""

    name: str
    default: Any
    help: str
    secret: bool = False

    @property
    def env(self) -> str:
        return f"HOLDFAST_{self.name.upper()}"


SETTINGS = (
    Setting("output", None, "output format; table on a terminal and jsonl in a pipe unless set"),
    Setting("quiet", False, "no progress and no notes on stderr"),
    Setting("checkpoint_dir", None, "where `run` keeps checkpoints, and `checkpoint list` looks"),
    Setting("checkpoint_interval", "1s", "time between checkpoints"),
    Setting("backend", "filesystem", "state backend of `run`"),
    Setting("runtime", "threads", "runtime of `run`"),
    Setting("parallelism", None, "parallelism of operators that do not set their own"),
    Setting("service", None, "URL of the service that `run` reports to"),
    Setting("host", "127.0.0.1", "address that `serve` listens on"),
    Setting("port", 8081, "port that `serve` listens on"),
    Setting("root", None, "folders of checkpoints and savepoints that `serve` shows"),
    Setting("token_file", None, "file with the tokens of `serve`"),
)
_NAMES = {setting.name for setting in SETTINGS}
FILES = ("holdfast.toml", "~/.config/holdfast/config.toml")
"""Where the settings file is looked for, first match, unless HOLDFAST_CONFIG names one."""


class Resolved(NamedTuple):
    """A setting in force. `origin` is "environment HOLDFAST_X", "file PATH" or "default"."""

    name: str
    value: Any
    origin: str
    help: str


def config_file() -> Path | None:
    """The settings file in force, if there is one. One that is named must exist."""
    named = os.environ.get("HOLDFAST_CONFIG")
    if named:
        if not Path(named).is_file():
            raise NotFound("the settings file is not there", path=named, hint="check --config or HOLDFAST_CONFIG")
        return Path(named)
    candidates = (Path(name).expanduser() for name in FILES)
    return next((path for path in candidates if path.is_file()), None)


def file_values() -> dict[str, Any]:
    """What the settings file says; names that are no settings are refused, because they are typing errors."""
    path = config_file()
    if path is None:
        return {}
    import tomllib

    try:
        values = tomllib.loads(path.read_text())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"the settings file can't be read: {error}", path=str(path)) from error
    values = {name.replace("-", "_"): value for name, value in values.items()}
    unknown = sorted(set(values) - _NAMES)
    if unknown:
        raise InvalidRequest(f"the settings file sets {unknown[0]!r}, which is no setting", path=str(path),
                             hint=f"settings are {', '.join(sorted(_NAMES))}")
    return values


def resolve() -> list[Resolved]:
    """Every setting with its value and where it comes from."""
    values, path = file_values(), config_file()
    found = []
    for setting in SETTINGS:
        if os.environ.get(setting.env):
            value, origin = os.environ[setting.env], f"environment {setting.env}"
        elif setting.name in values:
            value, origin = values[setting.name], f"file {path}"
        else:
            value, origin = setting.default, "default"
        found.append(Resolved(setting.name, value, origin, setting.help))
    return found


def quiet() -> bool:
    """Whether notes and progress are switched off."""
    asked = os.environ.get("HOLDFAST_QUIET") or str(file_values().get("quiet", ""))
    return asked.lower() in ("1", "true", "yes")


_COMMANDS = frozenset(("run", "restore", "serve"))
_GROUPS = frozenset(("savepoint", "checkpoint", "spark", "bench", "config"))
_VERBS = frozenset((
    "show", "list", "inspect", "read", "query", "diff", "edit", "transform", "rescale", "convert", "check", "verify",
    "copy", "dispose", "bootstrap", "gc", "probe", "run", "compare", "guard", "peers", "savepoint", "restore", "pack",
    "import"))


class _Everywhere(MutableMapping[str, Any]):
    """The file's values as the defaults of every command: a look-up of a command gives the same values again.

    `depth` tells groups from commands, because a command may have an option that is called like another command.
    """

    def __init__(self, values: dict[str, Any], depth: str = "root") -> None:
        self._values, self._depth = values, depth

    def __getitem__(self, name: str) -> Any:
        if self._depth == "root" and name in _COMMANDS | _GROUPS:
            return _Everywhere(self._values, "group" if name in _GROUPS else "command")
        if self._depth == "group" and name in _VERBS:
            return _Everywhere(self._values, "command")
        return self._values[name]

    def __setitem__(self, name: str, value: Any) -> None:
        self._values[name] = value

    def __delitem__(self, name: str) -> None:
        del self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


def default_map() -> MutableMapping[str, Any]:
    """Defaults for the command tree, from the settings file."""
    return _Everywhere(file_values())
