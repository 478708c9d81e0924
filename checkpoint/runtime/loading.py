"""Loading a flow from a job file: `job.py:flow`, in this process or in a worker, without letting it shadow Holdfast."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from checkpoint.dataflow.graph import Dataflow
from statebackend.errors import HoldfastError, InvalidRequest, NotFound

OWN_PACKAGES = ("statebackend", "checkpoint", "savepoint", "spark_integration", "api", "benchmarks")


def split_reference(reference: str) -> tuple[Path, str]:
    """The file and the attribute of `job.py:flow`; the attribute is `flow` unless given."""
    name, colon, attribute = reference.rpartition(":")
    if not colon or attribute.endswith(".py") or "/" in attribute:
        name, attribute = reference, "flow"
    if not attribute.isidentifier():
        raise InvalidRequest("a job is named like job.py:flow", found=reference)
    path = Path(name)
    if not path.is_file():
        raise NotFound("there is no such job file", path=str(path), hint="name it like job.py:flow")
    return path.resolve(), attribute


def shadowed(path: Path) -> list[str]:
    """Modules beside a job file that have the name of a Holdfast package: imports of them would find ours."""
    return [name for name in OWN_PACKAGES
            if (path.parent / f"{name}.py").is_file() or (path.parent / name / "__init__.py").is_file()]


def load_flow(reference: str) -> Dataflow:
    """The flow that a job file defines: a Dataflow, or a function without arguments that makes one."""
    path, attribute = split_reference(reference)
    module = _load_module(path)
    if not hasattr(module, attribute):
        flows = [name for name, value in vars(module).items() if isinstance(value, Dataflow)]
        raise NotFound(f"the job file has no {attribute!r}", path=str(path),
                       hint=f"it has the flows: {', '.join(flows)}" if flows else "assign the Dataflow to a name in it")
    flow = getattr(module, attribute)
    if callable(flow) and not isinstance(flow, Dataflow):
        flow = flow()
    if not isinstance(flow, Dataflow):
        raise InvalidRequest(f"{attribute!r} in the job file is no Dataflow", path=str(path),
                             found=type(flow).__name__)
    return flow


def reference_of(flow: Dataflow) -> str | None:
    """The `file:attribute` under which other processes can load this very flow, where it is a global of its module."""
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None)
        if file is None or flow.origin is None or Path(file).resolve() != Path(flow.origin).resolve():
            continue
        for name, value in vars(module).items():
            if value is flow:
                return f"{Path(file).resolve()}:{name}"
    return None


def _load_module(path: Path) -> ModuleType:
    folder = str(path.parent)
    if folder not in sys.path:
        # At the end: a module of the job never takes the place of one of ours, or of a library.
        sys.path.append(folder)
    name = path.stem if path.stem not in sys.modules and path.stem not in OWN_PACKAGES else f"_holdfast_job_{path.stem}"
    known = sys.modules.get(name)
    if known is not None and getattr(known, "__file__", None) == str(path):
        return known
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise InvalidRequest("the job file can't be loaded as Python", path=str(path))
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except HoldfastError:
        del sys.modules[name]
        raise
    except Exception as error:
        del sys.modules[name]
        raise InvalidRequest(f"the job file fails when it is loaded: {type(error).__name__}: {error}",
                             path=str(path)) from error
    return module
