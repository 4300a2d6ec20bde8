"""The average of gradients over ranks, in buckets, as operations of Jittor's lazy graph.

Gradients are copied one after another into a bucket, each in an operation of its own that is the
last to read it, so its memory goes at once: beside the gradients there is one bucket at most. The
last parameters' gradients come first. All of it has an early place in the order of execution
(`jt.flags.node_order` of Jittor 1.3.11), so a bucket is sent when its last gradient is there, not
at the end of backward.

Compressed to 8 bits, each rank sends every other the part that this one adds up, packed, and gets
the sums packed (Tim Dettmers, "8-Bit Approximations for Parallelism in Deep Learning", ICLR 2016);
what packing has lost is kept and added to the next gradients (Frank Seide et al., Interspeech
2014), which takes 4 bytes an element.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import jittor as jt

from xmem.codec import BLOCK
from xmem.distributed.counting import note
from xmem.distributing import Reduction
from xmem_jittor import codec, halves, messages, ranks, shares
from xmem_jittor.flat import count_buffer, flattened
from xmem_jittor.message_nodes import to_bfloat16, view

_HALVES = {"bf16": "bfloat16", "fp16": "float16"}
DEFAULT = Reduction(25 << 20, None, error_feedback=False)


class Averaging:
    """Averages one optimizer's gradients.

    Args:
        reduction: how.

    Attributes:
        apart: how many blocks of `no_sync` are open.
        pending: the optimizer's gradients hold what has not been averaged.
    """

    def __init__(self, reduction: Reduction) -> None:
        self.reduction = reduction
        self.apart = 0
        self.pending = False
        self._lost: dict[tuple[int, ...], Any] = {}

    def average(self, gradients: Sequence[Any]) -> list[Any]:
        """Return the averages, in the gradients' own types."""
        size = ranks.size()
        if size == 1 or not gradients:
            return list(gradients)
        found: list[Any] = [None] * len(gradients)
        with jt.flag_scope(node_order=1):
            for numbers in self._buckets(gradients):
                parts = self._reduced([gradients[i] for i in numbers], tuple(numbers), size)
                for i, value in zip(numbers, parts, strict=True):
                    found[i] = value
        return found

    def _buckets(self, gradients: Sequence[Any]) -> list[list[int]]:
        """Return which gradients go together, the last first; of one type each."""
        buckets: list[list[int]] = []
        open_for: dict[str, tuple[list[int], int]] = {}
        for i in reversed(range(len(gradients))):
            dtype, size = str(gradients[i].dtype), gradients[i].nbytes
            bucket, filled = open_for.get(dtype, ([], 0))
            if not bucket or filled + size > self.reduction.bucket_bytes:
                bucket, filled = [], 0
                buckets.append(bucket)
            bucket.append(i)
            open_for[dtype] = bucket, filled + size
        return buckets

    def _reduced(self, gradients: list[Any], key: tuple[int, ...], size: int) -> list[Any]:
        compress = self.reduction.compress
        is_float = str(gradients[0].dtype) == "float32"
        if compress == "int8" and is_float:
            flat = self._in_8_bits(flattened(gradients), key, size)
        elif compress in _HALVES and is_float:
            flat = _in_half(flattened(gradients), _HALVES[compress], size)
        elif len(gradients) == 1:
            note("all_reduce", gradients[0].nbytes, size)
            return [messages.all_reduce(gradients[0], "mean").stop_grad()]
        else:
            flat = flattened(gradients)
            note("all_reduce", flat.nbytes, size)
            count_buffer(flat.nbytes)
            flat = messages.all_reduce(flat, "mean")
        place, parts = 0, []
        for gradient in gradients:
            parts.append(view(flat, gradient.shape, place))
            place += gradient.numel()
        return parts

    def _in_8_bits(self, flat: Any, key: tuple[int, ...], size: int) -> Any:
        count = flat.numel()
        each = math.ceil(count / size / BLOCK) * BLOCK
        lost = self._lost.get(key)
        if lost is not None:
            flat = (flat + lost).stop_fuse()
        padded = jt.zeros((each * size - count,), "float32")
        rows = flat if each * size == count else flattened([flat, padded])
        packed = [codec.pack(view(rows, (each,), each * r), 8, 0, "plain") for r in range(size)]
        sent = flattened(packed).reshape((size, -1))
        if self.reduction.error_feedback:
            back = flattened([codec.unpack(p, (each,), 8) for p in packed])
            left = (flat - view(back, (count,), 0)).stop_fuse()
            # What is not finite is told once, not kept for ever.
            self._lost[key] = jt.ternary(jt.isfinite(left), left, jt.zeros_like(left)).stop_grad()
        # The gradients, what packing has made of them, and both halves of the copy into one.
        kept = rows.nbytes if self.reduction.error_feedback else 0
        count_buffer(rows.nbytes + kept + 2 * sent.nbytes)
        note("all_to_all", sent.nbytes, size)
        received = messages.all_to_all(sent)
        width = received.shape[1]
        total = jt.zeros((each,), "float32")
        for r in range(size):
            share = codec.unpack(view(received, (width,), width * r), (each,), 8)
            total = (total + share).stop_fuse()
        mean = codec.pack((total * (1.0 / size)).stop_fuse(), 8, 0, "plain")
        note("all_gather", mean.nbytes * size, size)
        gathered = messages.all_gather(mean)
        shares = [
            codec.unpack(view(gathered, (width,), width * r), (each,), 8) for r in range(size)
        ]
        return view(flattened(shares), (count,))


def _in_half(flat: Any, dtype: str, size: int) -> Any:
    """Return the average of what the ranks send in half, added up in half.

    Divided first: a sum of float16 could overflow.
    """
    count_buffer(2 * flat.nbytes)  # as they are, and divided
    sent = _to_half((flat * (1.0 / size)).stop_fuse(), dtype)
    note("all_reduce", sent.nbytes, size)
    return halves.to_float32(messages.all_reduce(sent, "sum")).stop_fuse()


def _to_half(flat: Any, dtype: str) -> Any:
    if dtype == "bfloat16" and not jt.flags.use_cuda:
        return to_bfloat16(flat)  # Jittor's own cast on a CPU cuts the rest off
    return halves.to_half(flat, dtype)


_averaged: WeakKeyDictionary[Any, Averaging] = WeakKeyDictionary()


def register(optimizer: Any, averaging: Averaging) -> None:
    """Note what averages an optimizer's gradients."""
    _averaged[optimizer] = averaging


def known(optimizer: Any) -> Averaging | None:
    """Return what has been noted."""
    return _averaged.get(optimizer)


def averaging_of(optimizer: Any) -> Averaging | None:
    """Return what averages an optimizer's gradients, if that is not Jittor's to do."""
    found = known(optimizer)
    if found is None and shares.kinds(p for g in optimizer.param_groups for p in g["params"]):
        found = _averaged[optimizer] = Averaging(DEFAULT)
    return found
