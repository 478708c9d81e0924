"""A flow on its way from the driver to its own executors: cloudpickle, as Spark ships functions. No data travels like this.

The job file and the modules beside it go by value, for executors do not have them; everything else must be installed there.
"""

from __future__ import annotations

import contextlib
import io
import pickle
import sys
import sysconfig
import threading
from collections import ChainMap
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from checkpoint.dataflow.graph import Dataflow
from checkpoint.runtime.loading import OWN_PACKAGES
from statebackend.errors import HoldfastError, IncompatibleState, InvalidRequest


def pack_flow(flow: Dataflow) -> bytes:
    """The flow as bytes. Locks arrive open: nothing runs yet that could hold them."""
    from pyspark.cloudpickle import CloudPickler

    class FlowPickler(CloudPickler):  # type: ignore[misc]
        dispatch_table = ChainMap({type(threading.Lock()): _fresh_lock, type(threading.RLock()): _fresh_rlock},
                                  CloudPickler.dispatch_table)

    stream = io.BytesIO()
    with _by_value(flow.origin):
        try:
            FlowPickler(stream).dump(flow)
        except HoldfastError:
            raise
        except Exception as error:
            raise InvalidRequest(f"the flow can't be sent to executors: {type(error).__name__}: {error}", flow=flow.name,
                                 hint="make connections, sessions and files in open(), not when the flow is built"
                                 ) from error
    return stream.getvalue()


def unpack_flow(data: bytes) -> Dataflow:
    """In the executor. Only what this run's driver has put into its own tasks is ever given to this."""
    try:
        flow = pickle.loads(data)
    except ImportError as error:
        raise IncompatibleState(f"an executor lacks what the flow needs: {error}", python=sys.executable,
                                hint="install it there, or ship it with --py-files or --archives (holdfast spark pack)"
                                ) from error
    assert isinstance(flow, Dataflow)
    return flow


def folder_of(flow: Dataflow) -> str | None:
    """Where the job file lies: executors that see it can import from there late."""
    return str(Path(flow.origin).resolve().parent) if flow.origin is not None else None


@contextlib.contextmanager
def _by_value(origin: str | None) -> Iterator[None]:
    from pyspark import cloudpickle

    registered: list[ModuleType] = []
    known = set(cloudpickle.list_registry_pickle_by_value())
    for module in _modules_beside(origin):
        if module.__name__ not in known:
            cloudpickle.register_pickle_by_value(module)
            registered.append(module)
    try:
        yield
    finally:
        for module in registered:
            cloudpickle.unregister_pickle_by_value(module)


def _modules_beside(origin: str | None) -> list[ModuleType]:
    """The module that built the flow, and those in its folder or below that are neither installed nor ours."""
    if origin is None:
        return []
    path = Path(origin).resolve()
    installed = {Path(place).resolve() for place in (sysconfig.get_path("purelib"), sysconfig.get_path("platlib"),
                                                     sysconfig.get_path("stdlib"))}
    found = []
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if file is None or name.partition(".")[0] in OWN_PACKAGES or name == "__main__" or module.__name__ != name:
            continue
        place = Path(file).resolve()
        if place == path or (path.parent in place.parents and not installed & set(place.parents)):
            found.append(module)
    return found


def _fresh_lock(_lock: Any) -> Any:
    return threading.Lock, ()


def _fresh_rlock(_lock: Any) -> Any:
    return threading.RLock, ()
