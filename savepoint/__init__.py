"""The savepoint toolkit: open, read, query, compare, edit, transform, rescale, convert and verify savepoints.

    import savepoint
    with savepoint.open("s3://bucket/sp") as sp:
        sp.to_pandas("count", "total", where="value > 10")

Works on files and needs no running job. Names are imported on first use, so that importing the package is cheap.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from savepoint.opened import OperatorInfo, Savepoint, StateInfo
    from savepoint.opened import open_savepoint as open

_HOME = {
    "opened": ["OperatorInfo", "Savepoint", "StateInfo"],
}
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}
_RENAMED = {"open": ("opened", "open_savepoint")}

__all__ = sorted([*_MODULE_OF, *_RENAMED])  # noqa: PLE0605


def __getattr__(name: str) -> Any:
    if name in _RENAMED:
        module, attribute = _RENAMED[name]
    elif name in _MODULE_OF:
        module, attribute = _MODULE_OF[name], name
    else:
        raise AttributeError(f"module 'savepoint' has no attribute {name!r}")
    value = getattr(import_module(f"savepoint.{module}"), attribute)
    globals()[name] = value
    return value
