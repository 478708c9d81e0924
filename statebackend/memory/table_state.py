"""What the five kinds share: the current slot, namespaces, checks that name state and key, clean-up, batches."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar

import pyarrow as pa

from statebackend.descriptors import StateDescriptor
from statebackend.errors import InvalidRequest
from statebackend.memory.batch_state import Batches
from statebackend.memory.expiry import Expiry
from statebackend.memory.forms import KeyForm, incoming, outgoing
from statebackend.memory.layers import Layer, Layers
from statebackend.schema import StateSchema
from statebackend.state import State

if TYPE_CHECKING:
    from statebackend.memory.keyed import MemoryKeyed


class TableState(Layers, State):
    """A state held as a layered table.

    Its entries are under the key, or under (key, namespace) where the state was registered with a namespace type.
    What is stored under a slot is the kind's own affair; with TTL, values are (value, expires_at) pairs.
    """

    __slots__ = ("expiry", "keyed")
    mergeable: ClassVar[bool] = True

    def __init__(self, keyed: MemoryKeyed, descriptor: StateDescriptor, schema: StateSchema) -> None:
        super().__init__()
        self.keyed = keyed
        self.descriptor = descriptor
        self.schema = schema
        self.name = descriptor.name
        self.value_type = descriptor.value_type
        self.named = schema.namespace_type is not None
        self.namespace_form = KeyForm(schema.namespace_type) if schema.namespace_type is not None else None
        self.namespace: Any = None
        self.expiry = None if descriptor.ttl is None else Expiry(descriptor.ttl, keyed.clock, keyed.watermark_now)
        self._incoming = incoming(descriptor.value_type, keyed.max_value_bytes)
        self._outgoing = outgoing(descriptor.value_type)
        self.batches: Batches | None = None

    # -- slots and namespaces

    def slot(self) -> Any:
        """Where the current key and namespace have their entry."""
        return (self.keyed.key, self.namespace) if self.named else self.keyed.key

    def slot_in(self, namespace: Any) -> Any:
        """Where the current key has its entry in a held namespace."""
        return (self.keyed.key, namespace) if self.named else self.keyed.key

    def hold_namespace(self, namespace: Any) -> Any:
        if namespace is None:
            return None
        if self.namespace_form is None:
            raise InvalidRequest("a state without a namespace type has the default namespace only", state=self.name,
                                 found=repr(namespace), hint="register it with namespace_type=...")
        try:
            return self.namespace_form.hold(namespace)
        except InvalidRequest as error:
            raise self.named_error(error, namespace=repr(namespace)) from error

    def give_namespace(self, held: Any) -> Any:
        return None if held is None or self.namespace_form is None else self.namespace_form.give(held)

    def set_current_namespace(self, namespace: Any) -> None:
        self.namespace = self.hold_namespace(namespace)

    def stream_keys(self, namespace: Any = None) -> Iterator[Any]:
        held = self.hold_namespace(namespace)
        give = self.keyed.form.give
        for slot in self.slots():
            if self.named:
                if slot[1] != held or not self.is_live(slot):
                    continue
                yield give(slot[0])
            elif self.is_live(slot):
                yield give(slot)

    def namespaces(self) -> Iterator[Any]:
        key = self.keyed.key
        hash(key)  # refuses the absence of a current key
        if not self.named:
            if self.is_live(key):
                yield None
            return
        for slot in self.slots():
            if slot[0] == key and self.is_live(slot):
                yield self.give_namespace(slot[1])

    @abstractmethod
    def is_live(self, slot: Any) -> bool:
        """Whether a slot has an entry that has not expired."""

    # -- removal

    def clear(self) -> None:
        self.remove(self.slot())

    def clear_many(self, keys: pa.Array) -> None:
        column = None if self.batches is None else self.batches.keys(keys)
        if column is not None and self.batches is not None and self.batches.remove(column):
            return
        with self.batch(keys) as held:
            for slot in self.slots_of(held):
                self.remove(slot)

    def merge_namespaces(self, target: Any, sources: Iterable[Any]) -> None:
        if not self.mergeable:
            raise InvalidRequest("value states can't be merged", state=self.name,
                                 hint="use a reducing, aggregating, list or map state in merging windows")
        into = self.hold_namespace(target)
        held = [self.hold_namespace(source) for source in sources]
        slots = [self.slot_in(source) for source in dict.fromkeys(held) if source != into]
        self.merge_slots(self.slot_in(into), slots)

    def merge_slots(self, target: Any, sources: list[Any]) -> None:
        raise NotImplementedError

    # -- values in and out

    def accept(self, value: Any) -> Any:
        """The value as it will be stored; what does not fit is refused, naming state and key."""
        try:
            return self._incoming(value)
        except InvalidRequest as error:
            raise self.named_error(error) from error

    def named_error(self, error: InvalidRequest, **more: Any) -> InvalidRequest:
        context = {"state": self.name, "key": self.keyed.shown_key(), **error.context, **more}
        return InvalidRequest(error.message, hint=error.hint, **context)

    # -- clean-up

    def touched(self) -> None:
        """Clean-up on access; called by each access of a state with TTL."""
        expiry = self.expiry
        if expiry is not None and expiry.incremental:
            now = expiry.now()
            if now >= expiry.due:
                expiry.clean(self.slots, self.examine, expiry.incremental, now)

    def sweep(self, limit: int) -> int:
        expiry = self.expiry
        if expiry is None or not expiry.background:
            return 0
        return expiry.clean(self.slots, self.examine, limit, expiry.now())

    @abstractmethod
    def examine(self, slot: Any, now: int) -> tuple[int, int, int]:
        """Remove what has expired under a slot: entries looked at, entries removed, the earliest expiry left."""

    # -- batches

    def slots_of(self, held: list[Any]) -> Iterable[Any]:
        if not self.named:
            return held
        namespace = self.namespace
        return [(key, namespace) for key in held]

    def held_keys(self, keys: Any) -> list[Any]:
        """The keys of a batch as dicts hold them; nulls and other types are refused."""
        try:
            return self.keyed.form.held(keys)
        except InvalidRequest as error:
            raise InvalidRequest(error.message, hint=error.hint, state=self.name, **error.context) from error

    @contextmanager
    def batch(self, keys: Any) -> Iterator[list[Any]]:
        """The keys of a batch as held in dicts; if the block raises, all it changed is undone."""
        held = self.held_keys(keys)
        self.keyed.require_held_keys(self.keyed.key_type.conform(keys), self.name)
        before, frozen, current = self.delta, self.frozen, self.keyed.key
        before.get(None)  # a closed table refuses
        self.frozen, self.delta = (before, *frozen), Layer(self)
        try:
            yield held
        except BaseException:
            self.delta, self.frozen = before, frozen
            raise
        finally:
            self.keyed.key = current
        self._keep(before)
        self.frozen = frozen

    def _keep(self, before: Layer) -> None:
        """Add what a batch changed to the layer that was active before it."""
        changed = self.delta
        for slot in changed.removed:
            before.pop(slot, None)
            before.removed.add(slot)
        self.merge_layer(before, changed)
        self.delta = before

    def merge_layer(self, before: Layer, changed: Layer) -> None:
        before.update(changed)

    def values_of(self, values: Any, rows: int, kind: Any = None) -> list[Any]:
        """The Python values of a batch's value column, checked for length."""
        kind = kind or self.value_type
        try:
            column = kind.from_arrow(values)
        except InvalidRequest as error:
            raise InvalidRequest(error.message, hint=error.hint, state=self.name, **error.context) from error
        if len(column) != rows:
            raise InvalidRequest("keys and values of a batch differ in length", state=self.name, keys=rows,
                                 values=len(column))
        if kind is self.value_type:
            self.require_small(values, column)
        return list(column)

    def require_small(self, values: Any, column: Iterable[Any]) -> None:
        """Refuse values above the limit; a column that is small as a whole is not looked through."""
        kind, limit = self.value_type, self.keyed.max_value_bytes
        if kind.fixed_value_width is not None or 8 * getattr(values, "nbytes", limit) <= limit:
            return
        for row, value in enumerate(column):
            if value is not None and (size := len(kind.encode(value))) > limit:
                raise InvalidRequest("a value is larger than the limit", state=self.name, row=row, found=size,
                                     expected=limit, hint="store it in parts, or raise max_value_bytes")
