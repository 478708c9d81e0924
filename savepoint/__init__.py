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
    from savepoint.bootstrap import SavepointWriter as SavepointWriter
    from savepoint.convert import convert_savepoint as convert_savepoint
    from savepoint.diff import Comparison as Comparison
    from savepoint.diff import compare as compare
    from savepoint.edit import Edit as Edit
    from savepoint.manage import copy_savepoint as copy_savepoint
    from savepoint.manage import list_savepoints as list_savepoints
    from savepoint.manage import plan_disposal as plan_disposal
    from savepoint.opened import OperatorInfo as OperatorInfo
    from savepoint.opened import Savepoint as Savepoint
    from savepoint.opened import StateInfo as StateInfo
    from savepoint.opened import open_savepoint as open_savepoint
    from savepoint.rescale import plan_rescale as plan_rescale
    from savepoint.rescale import rescale_savepoint as rescale_savepoint
    from savepoint.transform import Transform as Transform
    from savepoint.verify import verify_savepoint as verify_savepoint

    open = open_savepoint

_HOME = {
    "bootstrap": ["SavepointWriter"],
    "convert": ["convert_savepoint"],
    "diff": ["Comparison", "compare"],
    "edit": ["Edit"],
    "manage": ["copy_savepoint", "list_savepoints", "plan_disposal"],
    "opened": ["OperatorInfo", "Savepoint", "StateInfo", "open_savepoint"],
    "rescale": ["plan_rescale", "rescale_savepoint"],
    "transform": ["Transform"],
    "verify": ["verify_savepoint"],
}
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}
_RENAMED = {"open": ("opened", "open_savepoint")}

__all__ = sorted([*_MODULE_OF, *_RENAMED])


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
