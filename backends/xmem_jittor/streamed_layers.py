"""A layer whose parameters come before it runs and go after, on Jittor (1.3.11)."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jittor as jt

from xmem.containers import leaves
from xmem.offload.depot import Depot
from xmem_jittor import moving
from xmem_jittor.calls import running
from xmem_jittor.graph import newest_node
from xmem_jittor.segments import is_inside


class StreamedModel:
    """A model's parameters in a depot.

    Args:
        depot: the depot.
        prefetch_bytes: of the layers that come next, what the system is told to read ahead.

    Attributes:
        depot: see above.
        layers: the parameters of each layer, in order.
        holder: what Jittor's methods are replaced for (`methods.py`), until the end.
    """

    def __init__(self, depot: Depot, prefetch_bytes: int) -> None:
        self.depot = depot
        self._store = moving.store_of(depot)
        self._prefetch_bytes = prefetch_bytes
        self.layers: list[tuple[Any, ...]] = []
        self.holder: object | None = _Holder()

    @property
    def active(self) -> bool:
        """Whether layers' parameters come and go."""
        return self.holder is not None

    def end(self) -> None:
        """Let them do so no more."""
        self.holder = None

    def send(self, parameter: Any) -> None:
        """Move a parameter to the depot, unless it is there or nothing is stored any more."""
        if moving.is_away(parameter) or self.depot.failure is not None:
            return
        moving.send(parameter, self.depot, self._store)

    def send_changed(self, parameters: Sequence[Any]) -> None:
        """Store parameters that have been given other values since they were."""
        if is_inside():
            return  # their handles hold views of what they were
        changed = [p for p in parameters if not moving.is_away(p)]
        if not changed or self.depot.failure is not None:
            return
        if not running():
            jt.sync(changed, False, False)
        for parameter in changed:
            if moving.is_computed(parameter):
                self.send(parameter)

    def ahead(self, index: int, step: int) -> list[Any]:
        """Return the parameters that come next, as many as are read ahead."""
        found: list[Any] = []
        left = self._prefetch_bytes
        index += step
        while left > 0 and 0 <= index < len(self.layers):
            for parameter in self.layers[index]:
                left -= parameter.nbytes
                if left >= 0:
                    found.append(parameter)
            index += step
        return found


class _Holder:
    """Something that can be gone."""


class StreamedForward:
    """What a layer runs instead of its forward.

    Args:
        forward: the layer's own, bound to it.
        streaming: of its model.
        index: which layer it is.
    """

    def __init__(self, forward: Callable[..., Any], streaming: StreamedModel, index: int) -> None:
        self.forward = forward
        self._streaming = streaming
        self._index = index

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward between the coming and the going of its parameters."""
        streaming = self._streaming
        if not streaming.active:
            return self.forward(*args, **kwargs)
        parameters = streaming.layers[self._index]
        streaming.send_changed(parameters)
        newest = newest_node()
        given = list({id(v): v for v in leaves((args, kwargs), jt.Var)}.values())
        back = any(v.dtype.is_float() and not v.is_stop_grad() for v in given)
        ahead = streaming.ahead(self._index, 1)
        with _holding(given, [moving.coming(v, parameters, ahead=ahead) for v in given]):
            result = self.forward(*args, **kwargs)
        if given:
            behind = streaming.ahead(self._index, -1)
            for v in {id(v): v for v in _leaves(result) if v.id > newest}.values():
                v.swap(moving.going(v, parameters, back=back, ahead=behind))
        return result

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Give a copy of the model the plain forward: its parameters are on the device."""
        return copy.deepcopy(self.forward, memo)

    def __reduce__(self) -> Any:
        """Be pickled as the plain forward."""
        return _same, (self.forward,)


def _same(value: Any) -> Any:
    return value


def _leaves(result: Any) -> list[Any]:
    found = leaves(result, jt.Var)
    return found or leaves(getattr(result, "__dict__", None), jt.Var)


@contextmanager
def _holding(handles: Sequence[Any], others: Sequence[Any]) -> Iterator[None]:
    """Let handles hold other tensors inside the block, unless they are assigned to there.

    So containers that are given to a layer stay the objects they are.
    """
    held = []
    for handle, other in zip(handles, others, strict=True):
        address = other.var_ptr
        handle.swap(other)
        held.append((handle, other, address))
    try:
        yield
    finally:
        for handle, other, address in held:
            if handle.var_ptr == address:
                handle.swap(other)
