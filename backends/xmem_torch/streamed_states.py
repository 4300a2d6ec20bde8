"""Optimizer states that live in a depot; a step streams them block by block (PyTorch 2.13).

The optimizer gets a class of its own, derived from the one it has and of the same name, so that
`isinstance`, schedulers, scalers and hooks on steps see what they know. Relies on
`Optimizer.profile_hook_step`, which runs the hooks around a step, and on states that are made by
parameter in `Optimizer.state`, where `states_away.Away` stands for a tensor. Counters (tensors of
one element) stay. Copies and pickles are of the plain optimizer, with all states.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from xmem.errors import CompositionError, OffloadError, UsageError
from xmem.offload.depot import Depot
from xmem.receipts import Receipt
from xmem.sizes import format_size
from xmem_torch import few_bits, states
from xmem_torch.local_parts import is_spread
from xmem_torch.states_away import Away
from xmem_torch.states_blocks import places_of
from xmem_torch.states_streaming import Streaming

_STREAMING = "_xmem_streaming"


class _Streamed:
    """What a streamed optimizer does otherwise; mixed into its class."""

    def state_dict(self: Any) -> dict[str, Any]:
        """Return the states themselves: they all come in for it."""
        away = self.state
        self.state = _all_in(away)
        try:
            found: dict[str, Any] = super().state_dict()  # type: ignore[misc]
        finally:
            self.state = away
        return found

    def load_state_dict(self: Any, state_dict: dict[str, Any]) -> None:
        """Take up states, and let them go.

        Raises:
            OffloadError: they cannot be stored; they are loaded, and on the device.
        """
        super().load_state_dict(state_dict)  # type: ignore[misc]
        streaming_of(self).put_away(self)

    def __copy__(self: Any) -> Any:
        """Return one that shares states, as PyTorch's own copy does."""
        found = object.__new__(type(self))
        found.__dict__.update(self.__dict__)
        return found

    def __reduce_ex__(self: Any, protocol: Any) -> Any:
        """Copy and pickle as the plain optimizer."""
        state = {**self.__getstate__(), "state": _all_in(self.state)}
        return _blank, (streaming_of(self).kind,), state


def offload(optimizer: Any, depot: Depot, *, block_bytes: int) -> Receipt:
    """See `xmem.offloading.Offload.offload_optimizer`."""
    _check(optimizer)
    streaming = Streaming(type(optimizer), depot, block_bytes)
    sizes = [streaming.blocks.size(optimizer, place) for place in places_of(optimizer)]
    _begin(optimizer, streaming)
    try:
        streaming.put_away(optimizer)
    except OffloadError:
        _end(optimizer)
        raise
    whole = streaming.blocks.too_large(optimizer)
    notes = []
    if not sum(sizes):
        notes.append(f"{streaming.kind.__name__} keeps no states with these options.")
    if whole:
        notes.append(
            f"The states of {len(whole)} parameters are larger than a block and cannot be stepped"
            f" in parts; the largest take {format_size(max(whole))} at once."
        )

    def undo() -> None:
        # Another one with the same depot is there once the optimizer has been quantized.
        if is_streamed(optimizer) and streaming_of(optimizer).depot is depot:
            _end(optimizer)
            depot.close()

    return Receipt(
        technique="offload_optimizer",
        backend="torch",
        applied_to=sum(size > 0 for size in sizes),
        expected_saving_bytes=max(sum(sizes) - max(block_bytes, *whole, 0), 0),
        note=" ".join(notes),
        _undo=undo,
    )


def is_streamed(optimizer: Any) -> bool:
    """Say whether an optimizer's states are in a depot."""
    return isinstance(optimizer, _Streamed)


def streaming_of(optimizer: Any) -> Streaming:
    """Return where a streamed optimizer's states are."""
    found: Streaming = vars(optimizer)[_STREAMING]
    return found


@contextmanager
def brought_back(optimizer: Any) -> Iterator[None]:
    """Have an optimizer be the plain one, with all states, for the time of a block."""
    if not is_streamed(optimizer):
        yield
        return
    streaming = streaming_of(optimizer)
    _end(optimizer)
    try:
        yield
    finally:
        following = Streaming(type(optimizer), streaming.depot, streaming.block_bytes)
        _begin(optimizer, following)
        following.put_away(optimizer)


def _blank(kind: type) -> Any:
    return object.__new__(kind)


def _all_in(state: Any) -> Any:
    found: Any = defaultdict(dict)
    for key, values in state.items():
        found[key] = values
        if isinstance(values, dict):
            found[key] = {k: v.load() if isinstance(v, Away) else v for k, v in values.items()}
    return found


def _begin(optimizer: Any, streaming: Streaming) -> None:
    vars(optimizer)[_STREAMING] = streaming
    _become(optimizer, _streamed(streaming.kind))


def _end(optimizer: Any) -> None:
    streaming = streaming_of(optimizer)
    found = {key: _all_in({key: values})[key] for key, values in optimizer.state.items()}
    optimizer.state.update(found)
    del vars(optimizer)[_STREAMING]
    _become(optimizer, streaming.kind)


def _become(optimizer: Any, kind: type) -> None:
    from xmem_torch.conversion import wrap_for_scheduler

    optimizer.__class__ = kind
    if vars(optimizer).pop("step", None) is not None:
        wrap_for_scheduler(optimizer)


@functools.cache
def _streamed(kind: type) -> type:
    """Return the class of streamed optimizers of a kind."""

    def update(self: Any, found: Sequence[few_bits.Place]) -> None:
        streaming_of(self).step(self, found)

    @torch.no_grad()
    def step(self: Any, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        streaming_of(self).step(self, [p for p in places_of(self) if p[1].grad is not None])
        return loss

    def held(self: Any, group: Any, p: Any, name: str) -> torch.Tensor:
        state = self.state[p]
        if state.get(name) is None:
            bits = states.bits_for(p, group["state_bits"], group["min_elements"])
            like = states.empty(torch.empty(p.shape, device="meta"), bits)
            state[name] = streaming_of(self).made(p, name, like)
        found: torch.Tensor = state[name]
        return found

    own: dict[str, Any] = {"__module__": kind.__module__, "__doc__": kind.__doc__}
    if issubclass(kind, few_bits.Optimizer):
        own.update(update=update, held=held, step=_saying(kind.step))
    else:
        own["step"] = _saying(torch.optim.Optimizer.profile_hook_step(step))
    return type(kind.__name__, (_Streamed, kind), own)


def _saying(hooked: Any) -> Any:
    """Return a step that says what could not be stored when the hooks behind it have run, too."""
    hooked.hooked = True  # for PyTorch, which would hook it anew

    @functools.wraps(hooked)
    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        loss = hooked(self, *args, **kwargs)
        streaming_of(self).raise_failure()
        return loss

    return step


def _check(optimizer: Any) -> None:
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UsageError(f"{type(optimizer).__name__} is no optimizer of PyTorch")
    if is_streamed(optimizer):
        raise UsageError("the optimizer's states are offloaded already; undo that receipt first")
    kind = type(optimizer)
    plain = f"{kind.__module__}.".startswith("torch.optim.")
    known = plain or isinstance(optimizer, few_bits.Optimizer)
    if not known or kind is torch.optim.LBFGS:
        raise UsageError(
            f"{kind.__module__}.{kind.__name__} may look at all parameters at once; torch.optim's"
            " optimizers (but LBFGS) and those of xmem.optim can be streamed block by block"
        )
    for _, p, _ in places_of(optimizer):
        if torch.nn.parameter.is_lazy(p):
            raise UsageError("a parameter of the optimizer has no size yet: run the model once")
        if is_spread(p):
            raise CompositionError(
                "the optimizer's parameters are spread over ranks (xmem.distributed.shard_model),"
                " and each rank has its part of their states only: leave offload_optimizer out"
            )
    if any(group.get("differentiable") for group in optimizer.param_groups):
        raise CompositionError(
            "differentiable=True: autograd goes through the states of earlier steps, which must"
            " stay on the device. Make the optimizer without it"
        )
    step = vars(optimizer).get("step")
    if step is not None and not getattr(step, "_wrapped_by_lr_sched", False):
        raise CompositionError(
            "the optimizer's step has been replaced on the instance, which would step by states"
            " that are away: offload it before it is wrapped"
        )
