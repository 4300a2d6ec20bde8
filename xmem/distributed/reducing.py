"""How lists of tensors are combined: in buckets, whole or in few bits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from xmem.distributed.arguments import FLOATS, Given
from xmem.distributed.buckets import Bucket, buckets_by_type
from xmem.distributed.feedback import ErrorFeedback
from xmem.distributed.sending import Call, Job, buffer
from xmem.distributed.squeezing import HALVES, Squeezer, elements_at_once, squeeze_for
from xmem.distributed.world import current, joined
from xmem.distributing import Compression, Distributed, Kind, Op, World


@dataclass
class Plan:
    """Results in the making: jobs fill them in."""

    given: Given
    kinds: tuple[Kind, ...]
    in_place: bool
    sends_again: bool = False

    def __post_init__(self) -> None:
        self._distributed: Distributed = joined()
        self._world: World = current()
        self._results: list[Any] = list(self.given.tensors)  # tensors without elements stay

    def finish(self, _: Sequence[Any]) -> Any:
        """Return what was asked for."""
        return self._results if self.given.is_list else self._results[0]

    def reductions(
        self,
        op: Op,
        bucket_bytes: int,
        compress: Compression | None,
        feedback: ErrorFeedback | None,
    ) -> list[Job]:
        """Return the jobs of an all-reduce; made when they are run."""
        jobs = []
        for number, (bucket, name) in enumerate(self._buckets(op, bucket_bytes, compress)):
            if name is None or self._world.size == 1:
                jobs.append(self._sent_whole(bucket, self._reduced(op)))
                continue
            self.sends_again = True
            squeeze = squeeze_for(self._distributed, name)
            losing = feedback if name != bucket.dtype else None
            squeezer = Squeezer(self._distributed, self._world, squeeze, op, losing)
            at_once = elements_at_once(bucket_bytes, FLOATS[bucket.dtype])
            jobs.append(self._squeezed(bucket, squeezer, at_once, number))
        return jobs

    def broadcasts(self, source: int, bucket_bytes: int) -> list[Job]:
        """Return the jobs of a broadcast."""
        distributed, ranks = self._distributed, self._world.size

        def call(flat: Any, size_bytes: int) -> Call:
            start = distributed.broadcast
            return Call("broadcast", size_bytes, ranks, lambda: start(flat, source))

        found = buckets_by_type(self.kinds, bucket_bytes)
        return [self._sent_whole(bucket, call) for bucket in found]

    def _reduced(self, op: Op) -> Callable[[Any, int], Call]:
        distributed, ranks = self._distributed, self._world.size
        return lambda flat, size_bytes: Call(
            "all_reduce", size_bytes, ranks, lambda: distributed.all_reduce(flat, op)
        )

    def _buckets(
        self, op: Op, bucket_bytes: int, compress: Compression | None
    ) -> list[tuple[Bucket, str | None]]:
        """Return buckets and what they travel as; those that are squeezed are smaller."""
        found = []
        for dtype in dict.fromkeys(kind.dtype for kind in self.kinds):
            name = _travels_as(dtype, op, compress)
            limit = bucket_bytes
            if name is not None:
                limit = elements_at_once(bucket_bytes, FLOATS[dtype]) * FLOATS[dtype]
            own = [kind if kind.dtype == dtype else Kind(dtype, (), 0) for kind in self.kinds]
            found += [(bucket, name) for bucket in buckets_by_type(own, limit)]
        return found

    def _sent_whole(self, bucket: Bucket, call: Callable[[Any, int], Call]) -> Job:
        """Send a bucket in one call, as it is."""
        tensors = [self.given.tensors[number] for number in bucket.numbers]
        copies = not (self.in_place and len(tensors) == 1)
        with buffer(bucket.size_bytes if copies else 0):
            flat = self._distributed.flatten(tensors) if copies else tensors[0]
            sent = call(flat, bucket.size_bytes)
            del flat
            result = (yield sent).pop()
            del sent
            self._put(
                bucket, tensors, self._distributed.split(result, tensors) if copies else [result]
            )

    def _squeezed(self, bucket: Bucket, squeezer: Squeezer, at_once: int, number: int) -> Job:
        """Send a bucket in few bits; a tensor that is larger goes in pieces."""
        tensors = [self.given.tensors[number] for number in bucket.numbers]
        copies = not (self.in_place and len(tensors) == 1)
        with buffer(bucket.size_bytes if copies else 0):
            flat = self._distributed.flatten(tensors) if copies else _flat(tensors[0])
            count = bucket.size_bytes // FLOATS[bucket.dtype]
            if count <= at_once:
                flat = yield from squeezer.reduce(flat, bucket.dtype, (number, 0))
            else:
                for piece, start in enumerate(range(0, count, at_once)):
                    part = slice(start, min(start + at_once, count))
                    key = (number, piece)
                    flat[part] = yield from squeezer.reduce(flat[part], bucket.dtype, key)
            self._put(bucket, tensors, self._distributed.split(flat, tensors))

    def _put(self, bucket: Bucket, tensors: Sequence[Any], values: Sequence[Any]) -> None:
        for number, tensor, value in zip(bucket.numbers, tensors, values, strict=True):
            if self.in_place:
                self._distributed.assign(tensor, value)
            else:
                self._results[number] = value


def added_in_float32(
    distributed: Distributed, world: World, tensor: Any, kind: Kind, op: Op
) -> Job:
    """Scatter a sum of halves."""
    with buffer(kind.size_bytes):
        sent = Call(
            "all_to_all", kind.size_bytes, world.size, lambda: distributed.all_to_all(tensor)
        )
        received = (yield sent).pop()
        total = distributed.convert(received[0], "float32")
        for rank in range(1, world.size):
            total = total + distributed.convert(received[rank], "float32")
        return distributed.convert(total / world.size if op == "mean" else total, kind.dtype)


def simple(kind: str, size_bytes: int, start: Callable[[], Any]) -> Job:
    """Return a job of one call."""
    result = yield Call(kind, size_bytes, current().size, start)
    return result.pop()


def _travels_as(dtype: str, op: Op, compress: Compression | None) -> str | None:
    """Return what a type is squeezed into, or None: it is sent whole."""
    if dtype not in FLOATS:
        return None
    halves = dtype in HALVES.values()
    if op == "max":
        return None
    if compress == "int8":
        return "int8"
    if halves:
        return dtype
    return None if compress is None else HALVES[compress]


def _flat(tensor: Any) -> Any:
    """Return a tensor's own memory as (n,), where the framework can."""
    return tensor.detach().reshape(-1)
