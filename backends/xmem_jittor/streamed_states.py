"""Optimizer states that live in a depot; a step streams them block by block (Jittor 1.3.11).

A state stays the tensor that it is (`moving.py`): its value is read where it lies, in the depot's
own memory or its file, mapped. A step updates the parameters of a block, executes that, and stores
the new states, before it asks for the next update; else a lazy graph would have all of them at
once. xmem's own optimizers update a state in its memory, which is the depot's then.

Relies on `jt.optim`'s groups, which hold states in lists beside "params". For the time of a block
they hold its parameters only. One whose states are larger than a block is stepped whole. Counters
(tensors of one element) stay.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary, ref

import jittor as jt

from xmem.codec import packed_bytes
from xmem.errors import CompositionError, OffloadError, UsageError
from xmem.offload import blocks
from xmem.offload.depot import Depot
from xmem.receipts import Receipt
from xmem.sizes import format_size
from xmem_jittor import few_bits, gradients, moving, sharded_optimizers, states, training
from xmem_jittor.streamed_parameters import brought_in, let_stream

Place = tuple[dict[str, Any], int]
"""A group, and a parameter's number in it."""

_KINDS: tuple[type, ...] = (
    jt.optim.Optimizer,
    jt.optim.SGD,
    jt.optim.RMSprop,
    jt.optim.Adam,
    jt.optim.AdamW,
    training.Adam,
)
_REPLACED = ("step", "load_state_dict")

_streamed: WeakKeyDictionary[Any, StreamedStates] = WeakKeyDictionary()


def offload(optimizer: Any, depot: Depot, *, block_bytes: int) -> Receipt:
    """See `xmem.offloading.Offload.offload_optimizer`."""
    _check(optimizer)
    streaming = StreamedStates(optimizer, depot, block_bytes)
    sizes = [streaming.size(place) for place in streaming.places()]
    try:
        streaming.put_away()
        streaming.raise_failure()
    except OffloadError:
        streaming.bring_back()
        raise
    streaming.begin()
    whole = [size for size in sizes if size > block_bytes]
    notes = []
    if not sum(sizes):
        notes.append(f"{type(optimizer).__name__} keeps no states with these options.")
    if whole:
        notes.append(
            f"The states of {len(whole)} parameters are larger than a block, and each is stepped"
            f" whole; the largest take {format_size(max(whole))} at once."
        )
    return Receipt(
        technique="offload_optimizer",
        backend="jittor",
        applied_to=sum(size > 0 for size in sizes),
        expected_saving_bytes=max(sum(sizes) - max(block_bytes, *whole, 0), 0),
        note=" ".join(notes),
        _undo=streaming.end,
    )


def is_streamed(optimizer: Any) -> bool:
    """Say whether an optimizer's states are in a depot."""
    return optimizer in _streamed


class StreamedStates:
    """What makes an optimizer step block by block.

    Args:
        optimizer: changed in place.
        depot: where states go.
        block_bytes: of new states on the device at once.
    """

    def __init__(self, optimizer: Any, depot: Depot, block_bytes: int) -> None:
        # Weak: the optimizer holds this object, by the methods it gets.
        self._optimizer: Callable[[], Any] = ref(optimizer)
        self._depot = depot
        self._store = moving.store_of(depot)
        self._block_bytes = block_bytes
        self._failure: OffloadError | None = None
        self._told = False

    def __deepcopy__(self, memo: dict[int, Any]) -> StreamedStates:
        """Let a copy of the optimizer step plainly: its states are on the device."""
        twin = memo.get(id(self._optimizer()))
        copied = copy.copy(self)
        copied._optimizer = self._optimizer if twin is None else ref(twin)
        return copied

    def begin(self) -> None:
        """Step by blocks from now on."""
        optimizer = self._optimizer()
        for name in _REPLACED:
            setattr(optimizer, name, getattr(self, name))
        _streamed[optimizer] = self
        let_stream(optimizer)

    def end(self) -> None:
        """Bring states back, and let the optimizer step as before."""
        optimizer = self._optimizer()
        if optimizer is None or _streamed.get(optimizer) is not self:
            return
        self.bring_back()
        del _streamed[optimizer]
        let_stream(optimizer, streams=False)
        for name in _REPLACED:
            if vars(optimizer).get(name) == getattr(self, name):
                del vars(optimizer)[name]

    def step(self, loss: Any = None, retain_graph: bool = False) -> None:
        """Compute gradients of a loss, if one is given, and update block by block.

        Raises:
            OffloadError: some states could not be stored. They are on the device, all parameters
                have been stepped, and the next steps go on without storing.
        """
        optimizer = self._optimizer()
        own = type(optimizer).step
        if _streamed.get(optimizer) is not self:  # undone, and wrapped before that
            own(optimizer, loss, retain_graph)
            return
        if loss is not None:
            optimizer.backward(loss, retain_graph)
        if isinstance(optimizer, few_bits.Optimizer):
            self._step_in_order(optimizer)
        else:
            self._step_in_blocks(optimizer)
        self.raise_failure()

    def _step_in_blocks(self, optimizer: Any) -> None:
        """Let the optimizer's own step see some parameters at a time."""
        updates = getattr(optimizer, "updates", None)
        places = list(self.places())
        sizes = [self.size(place) for place in places]
        for numbers in blocks.grouped(sizes, self._block_bytes):
            block = [places[i] for i in numbers]
            if updates is not None:
                optimizer.updates = updates  # of `training.Adam`: one for all blocks
            with brought_in([group["params"][i] for group, i in block]):
                with _restricted(optimizer, block):
                    type(optimizer).step(optimizer)
                self._finish(block)

    def _step_in_order(self, optimizer: Any) -> None:
        """Execute and store whenever updates of a block have been asked for."""
        block: list[Place] = []
        own = type(optimizer)._update

        def finish() -> None:
            with brought_in([group["params"][i] for group, i in block]):
                self._finish(block)
            for group, i in block:
                group["grads"][i] = None  # such a step drops them
            block.clear()

        def update(group: dict[str, Any], i: int, *rest: Any) -> None:
            own(optimizer, group, i, *rest)
            block.append((group, i))
            if sum(self.size(place) for place in block) >= self._block_bytes:
                finish()

        def post_step() -> None:
            try:
                finish()
            finally:
                type(optimizer).post_step(optimizer)

        optimizer._update, optimizer.post_step = update, post_step
        try:
            type(optimizer).step(optimizer)
        except BaseException:
            gradients.forget(optimizer)  # some have gone
            raise
        finally:
            del optimizer._update, optimizer.post_step

    def _finish(self, block: Sequence[Place]) -> None:
        """Execute updates, and let the new states go."""
        held = [state for place in block for state in self._states(place)]
        # Parameters alone, as the next backward does it: what is asked for decides what is fused.
        jt.sync([group["params"][i] for group, i in block])
        jt.sync(held)
        for state in held:
            self._send(state)

    def _send(self, state: Any) -> None:
        if self._failure is not None or moving.is_away(state):
            return
        try:
            moving.send(state, self._depot, self._store)
        except OffloadError as error:
            self._failure = error

    def put_away(self) -> None:
        """Let all states go; those that cannot be stored stay."""
        self._finish(list(self.places()))

    def bring_back(self) -> None:
        """Have all states on the device."""
        for place in self.places():
            for state in self._states(place):
                moving.bring_back(state, self._depot)

    def raise_failure(self) -> None:
        """Raise once if something could not be stored; see `step`."""
        if self._failure is not None and not self._told:
            self._told = True
            raise self._failure

    def load_state_dict(self, state: Any) -> None:
        """Take up states, and let them go.

        Raises:
            OffloadError: they cannot be stored; they are loaded, and on the device.
        """
        optimizer = self._optimizer()
        type(optimizer).load_state_dict(optimizer, state)
        if _streamed.get(optimizer) is self:
            self.put_away()
            self.raise_failure()

    def places(self) -> Iterator[Place]:
        """Yield all parameters' places."""
        for group in self._optimizer().param_groups:
            for i in range(len(group["params"])):
                yield group, i

    def size(self, place: Place) -> int:
        """Return the bytes of a parameter's states, also of those that are still to be made."""
        optimizer, (group, i) = self._optimizer(), place
        held = self._states(place)
        if held or not isinstance(optimizer, few_bits.Optimizer) or group["steps"][i]:
            return sum(int(state.nbytes) for state in held)
        p, option = group["params"][i], {**vars(optimizer), **group}
        if option.get("beta1", 0) is None or not option.get("momentum", 1):
            return 0
        bits = states.bits_for(p, optimizer.state_bits, optimizer.min_elements)
        each = 4 * p.numel() if bits == 32 else packed_bytes(p.numel(), bits)
        return each * len(optimizer.moments)

    def _states(self, place: Place) -> list[Any]:
        group, i = place
        names = sharded_optimizers.state_names(self._optimizer(), group)
        held = [group[name][i] for name in names]
        return [state for state in held if isinstance(state, jt.Var) and state.numel() > 1]


@contextmanager
def _restricted(optimizer: Any, block: Sequence[Place]) -> Iterator[None]:
    """Let groups hold some parameters, their gradients and states only."""
    whole = []
    for group in optimizer.param_groups:
        names = ["params", "grads", *sharded_optimizers.state_names(optimizer, group)]
        held = {name: group[name] for name in names}
        own = [i for of, i in block if of is group]
        group.update({name: [values[i] for i in own] for name, values in held.items()})
        whole.append((group, held))
    try:
        yield
    finally:
        for group, held in whole:
            group.update(held)


def _check(optimizer: Any) -> None:
    kind = type(optimizer)
    if not isinstance(optimizer, jt.optim.Optimizer):
        raise UsageError(f"{kind.__name__} is no optimizer of Jittor")
    if is_streamed(optimizer):
        raise UsageError("the optimizer's states are offloaded already; undo that receipt first")
    if kind not in _KINDS and not isinstance(optimizer, few_bits.Optimizer):
        known = ", ".join(f"{k.__module__}.{k.__qualname__}" for k in _KINDS)
        raise UsageError(
            f"offload_optimizer does not know where {kind.__module__}.{kind.__qualname__} keeps its"
            f" states, or it looks at all parameters at once; it knows {known} and xmem.optim's"
        )
    if "step" in vars(optimizer):
        raise CompositionError(
            "the optimizer's step has been replaced on the instance (by xmem.cast_model or"
            " shard_optimizer), and would not step by blocks: offload it before that"
        )
