"""A block's forward on parameters that are gathered for it, on Jittor (1.3.11).

Parameters are sent around when the block's first input is there. The forward is taped as a
checkpointed region, which gathers again and computes again in backward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jittor as jt

from xmem.containers import fill, leaves, take_apart
from xmem.distributed.counting import note
from xmem.errors import CompositionError
from xmem.records import Recompute
from xmem_jittor import messages, ranks, shares
from xmem_jittor.graph import swapped
from xmem_jittor.segments import Segment, ambient, is_inside
from xmem_jittor.trial import trying

_OUTSIDE = float("nan")


def placeholder(dtype: str) -> Any:
    """Return what stands for a parameter on ranks that do not own it."""
    return jt.full((1,), _OUTSIDE, dtype).stop_fuse()


def whole(parameter: Any, share: shares.Share, *after: Any) -> Any:
    """Return all values of an owned parameter, on every rank; no gradient flows."""
    note("broadcast", share.size_bytes, ranks.size())
    mine = ranks.rank() == share.owner
    source = parameter.detach() if mine else None
    waits = list(after) if mine else [*after, parameter.detach()]
    return messages.broadcast(source, share.owner or 0, share.shape, share.dtype, after=waits)


class _Gather(jt.Function):
    """All values of a parameter; its gradient is averaged on the owner."""

    def __init__(self, share: shares.Share, after: Sequence[Any]) -> None:
        self.share = share
        self.after: Sequence[Any] = after

    def execute(self, parameter: Any) -> Any:
        """Gather."""
        self.held = tuple(parameter.shape), str(parameter.dtype)
        gathered = whole(parameter, self.share, *self.after)
        self.after = ()
        return gathered.stop_fuse()

    def grad(self, gradient: Any) -> Any:
        """Add up on the owner; elsewhere a zero that is there when that is done."""
        shape, dtype = self.held
        if trying():
            return jt.zeros(shape, dtype)
        size, owner = ranks.size(), self.share.owner or 0
        note("reduce", gradient.nbytes, size)
        found = messages.reduce(gradient.stop_fuse(), owner)
        if ranks.rank() == owner:
            return found * (1.0 / size)
        return messages.gate(jt.zeros(shape, dtype).stop_fuse(), found)


@dataclass(frozen=True)
class Whole:
    """A block's forward on its gathered parameters.

    Attributes:
        forward: the block's own, bound to it.
        parameters: the handles that the block reads.
    """

    forward: Callable[..., Any]
    parameters: tuple[Any, ...]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Gather when the first input is there, and run."""
        inputs = leaves((args, kwargs), jt.Var)
        after = [inputs[0].detach()] if inputs else []
        gathered = [self._gathered(p, after) for p in self.parameters]
        with swapped(self.parameters, gathered):
            held: list[Any] = []
            template = take_apart(self.forward(*args, **kwargs), jt.Var, held)
            own = {id(p) for p in self.parameters}
            held = [jt.wrap_var_addr(v.var_ptr) if id(v) in own else v for v in held]
        return fill(template, held)

    @staticmethod
    def _gathered(parameter: Any, after: Sequence[Any]) -> Any:
        share = shares.of(parameter)
        if share is None:
            raise CompositionError("a sharded block has been copied: shard the copy by itself")
        return _Gather(share, after)(parameter)


@dataclass(frozen=True)
class ShardedForward:
    """What a sharded block runs instead of its forward.

    Attributes:
        whole: the forward on gathered parameters.
        path: the block's.
    """

    whole: Whole
    path: str

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward as a region, which is gathered and computed again in backward."""
        now = ambient()
        if now is None or is_inside():  # of no gradients, or of a region that is computed again
            return self.whole(*args, **kwargs)
        return Segment(now).add(self.whole, args, kwargs, Recompute(name=self.path))
