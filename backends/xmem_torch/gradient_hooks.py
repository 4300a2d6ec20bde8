"""How data parallelism sends a bucket of gradients: a hook of DistributedDataParallel (2.13).

The hook is given a bucket's gradients as one flat tensor, which they are views of, and returns a
future of it. PyTorch's own hook for bfloat16 refuses gloo, and none packs in 8 bits: compressed
gradients go through `xmem.distributed.squeezing`, one piece after another, so that its buffers are
bounded. Each call is counted in `xmem.distributed.traffic`.

On a CPU the ranks are waited for at the end of backward, by a callback of the engine, and not in
the future: PyTorch turns whatever is raised there into a RuntimeError without a type. So backward
itself raises what names a rank that is gone, and the time that it waits is known.

PyTorch reads the annotations of a hook, which have to be types and not text.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from xmem.distributed.counting import hold, note, release
from xmem.distributed.feedback import ErrorFeedback
from xmem.distributed.sending import Started
from xmem.distributed.squeezing import HALVES, Squeezer, elements_at_once, squeeze_for
from xmem.distributed.world import current, joined
from xmem.distributing import Reduction
from xmem_torch import ranks
from xmem_torch.communication import counted
from xmem_torch.grad_buckets import GradBuckets

_DOING = "the average of gradients"


@dataclass
class Averaging:
    """What a model's hook keeps between steps.

    Attributes:
        reduction: how gradients travel.
        ranks: how many there are.
        reduced: buckets have been averaged since the optimizer's last step, and nothing was added.
        expected: there has been a forward pass whose backward averages.
        learning: buckets are shown, with no gradients in them.
        buckets: what they lie in.
        feedback: what compression lost.
        keys: what tells buckets from others, by their first parameters.
        under_way: calls that have begun, with the bytes of their buckets.
    """

    reduction: Reduction
    ranks: int
    reduced: bool = False
    expected: bool = False
    learning: bool = False
    buckets: GradBuckets = field(default_factory=GradBuckets)
    feedback: ErrorFeedback = field(default_factory=ErrorFeedback)
    keys: dict[int, int] = field(default_factory=dict)
    under_way: list[tuple[Any, int]] = field(default_factory=list)

    def key_of(self, parameters: list[torch.Tensor]) -> int:
        """Return what tells a bucket from others.

        PyTorch makes its buckets anew after the first step; what was lost in the old ones is
        forgotten then.
        """
        key = hash(tuple(map(id, parameters)))
        if self.keys.get(id(parameters[0]), key) != key:
            self.feedback.reset()
            self.keys.clear()
        self.keys[id(parameters[0])] = key
        return key

    def arrived(self) -> None:
        """Note a gradient: where no average is expected it is added up on this rank alone."""
        if not (self.expected or self.learning):
            self.reduced = False

    def begin(self, buffer: torch.Tensor) -> None:
        """Begin to add a bucket up, until `finish`."""
        with counted(_DOING):
            self.under_way.append((dist.all_reduce(buffer, async_op=True), buffer.nbytes))
            hold(buffer.nbytes)

    def finish(self) -> None:
        """Wait for what is under way, at the end of backward."""
        self.expected = False
        works, self.under_way = self.under_way, []
        if not works:
            return
        try:
            with counted(_DOING):
                for work, _ in works:
                    ranks.wait(work)
        finally:
            release(sum(size_bytes for _, size_bytes in works))


def average(state: Averaging, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket over ranks."""
    buffer, parameters = bucket.buffer(), bucket.parameters()
    state.buckets.filled(buffer, parameters)
    if state.learning:
        return _done(buffer)
    state.reduced = True
    # For each bucket: a backward that fails does not come to its callbacks.
    torch.autograd.Variable._execution_engine.queue_callback(state.finish)
    compress = state.reduction.compress
    if compress == "int8" or (compress is not None and buffer.itemsize > 2):
        _squeezed(state, buffer, state.key_of(parameters))
        return _done(buffer)
    note("all_reduce", buffer.nbytes, state.ranks)
    buffer.div_(state.ranks)
    if buffer.is_cpu:
        state.begin(buffer)
        return _done(buffer)
    work = dist.all_reduce(buffer, async_op=True)
    return work.get_future().then(_first)


def _done(buffer: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(buffer)
    return done


def _first(future: Any) -> torch.Tensor:
    tensors: list[torch.Tensor] = future.value()  # raises what it failed with
    return tensors[0]


def _squeezed(state: Averaging, buffer: torch.Tensor, key: int) -> None:
    """Average in place, in few bits."""
    compress = state.reduction.compress or ""
    keeps = compress == "int8" and state.reduction.error_feedback
    squeezer = Squeezer(
        joined(),
        current(),
        squeeze_for(joined(), HALVES.get(compress, compress)),
        "mean",
        state.feedback if keeps else None,
    )
    dtype = str(buffer.dtype).removeprefix("torch.")
    step = elements_at_once(state.reduction.bucket_bytes, buffer.itemsize)
    for number, piece in enumerate(buffer.split(step)):
        job = squeezer.reduce(piece, dtype, (key, number))
        Started(job, f"the average of gradients ({compress})").finish()
