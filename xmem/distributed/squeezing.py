"""Sum tensors over ranks while fewer bits travel.

Adding up in few bits on the way, as a ring does, would round at every hop, and int8 codes cannot be
added at all. So each rank gets one part of the tensor from all others, decodes, adds in float32,
and gives the sum to all, encoded: an all-to-all and an all-gather, which send as much as a ring
does. What a rank adds of its own is exact. So a value is rounded twice in all, whatever the number
of ranks; halves that are not compressed, once.

Bytes to those of float32: 0.5 for halves; 0.2539 for int8, a byte an element and 4 for each 256.
Relative error, of normally distributed values that have nothing to do with each other on the ranks:
0.9 % for int8, 0.2 % for bf16 (`benchmarks/all_reduce.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from xmem.codec import packed_bytes
from xmem.distributed.sending import Call, Job, buffer
from xmem.distributing import Distributed, Op, World

if TYPE_CHECKING:
    from xmem.distributed.feedback import ErrorFeedback

HALVES = {"bf16": "bfloat16", "fp16": "float16"}


@dataclass(frozen=True)
class Squeeze:
    """How a part of a tensor travels.

    Attributes:
        name: "int8", "bfloat16" or "float16".
        pack: turns a flat tensor into one that is sent.
        unpack: turns one that was received into float32, given the number of elements.
        size_bytes: of what is sent, given the number of elements.
    """

    name: str
    pack: Callable[[Any], Any]
    unpack: Callable[[Any, int], Any]
    size_bytes: Callable[[int], int]


def squeeze_for(distributed: Distributed, name: str) -> Squeeze:
    """Return how tensors travel as "int8", "bfloat16" or "float16"."""
    if name == "int8":
        return Squeeze(
            name,
            lambda flat: distributed.encode(distributed.convert(flat, "float32")),
            distributed.decode,
            lambda count: packed_bytes(count, 8),
        )
    return Squeeze(
        name,
        lambda flat: distributed.convert(flat, name),
        lambda packed, count: distributed.convert(packed, "float32"),
        lambda count: 2 * count,
    )


def elements_at_once(bucket_bytes: int, item_bytes: int) -> int:
    """Return how many elements are squeezed in one piece, so that all its buffers fit a bucket.

    They are the piece itself in its own type, and at most 10 bytes an element, on two ranks, for
    what is packed, received, added up and lost.
    """
    return max(bucket_bytes // (item_bytes + 10), 1)


def parts_of(count: int, ranks: int) -> list[slice]:
    """Return one slice for each rank, all of one length, that cover a number of elements.

    Where the number cannot be divided, the last ones overlap: nothing has to be padded.
    """
    length = -(-count // ranks)
    starts = [min(rank * length, count - length) for rank in range(ranks)]
    return [slice(start, start + length) for start in starts]


@dataclass(frozen=True)
class Squeezer:
    """Sums flat tensors.

    Attributes:
        distributed: the backend's capability.
        world: the ranks.
        squeeze: how parts travel.
        op: "sum" or "mean".
        feedback: keeps what was lost, or None.
    """

    distributed: Distributed
    world: World
    squeeze: Squeeze
    op: Op
    feedback: ErrorFeedback | None = None

    def reduce(self, flat: Any, dtype: str, key: tuple[int, ...] = ()) -> Job:
        """Return a job that writes the sum into a flat tensor and returns it.

        Args:
            flat: (n,), any float type; written where the framework can.
            dtype: its type.
            key: what tells this tensor from others of the same error feedback.
        """
        count, ranks = int(flat.numel()), self.world.size
        parts = parts_of(count, ranks)
        length = parts[0].stop - parts[0].start
        with self._buffers(length):
            sending, own = self._packed(flat, parts, key)
            width = self.squeeze.size_bytes(length)
            received = (yield self._call("all_to_all", width * ranks, sending)).pop()
            del sending
            result = self._added(received, own, (*key, ranks))
            del received, own
            gathered = (yield self._call("all_gather", width * ranks, result)).pop()
            del result
            for rank, part in enumerate(parts):
                values = self.squeeze.unpack(gathered[rank], length)
                flat[part] = self.distributed.convert(values, dtype)
        return flat

    def _buffers(self, length: int) -> AbstractContextManager[None]:
        """Count the most that is there at once beside the flat tensor."""
        packed, wide = self.squeeze.size_bytes(length) * self.world.size, 4 * length
        return buffer(max(2 * packed + wide, packed + 3 * wide))

    def _packed(self, flat: Any, parts: list[slice], key: tuple[int, ...]) -> tuple[Any, Any]:
        """Return what the ranks get, (world_size, ...), and this rank's own part in float32."""
        rows, own = [], None
        for rank, part in enumerate(parts):
            values = flat[part]
            if self.feedback is not None:
                values = self.distributed.convert(values, "float32")
                values = self.feedback.add((*key, rank), values)
            packed = self.squeeze.pack(values)
            if rank == self.world.rank:
                own = self.distributed.flatten([self.distributed.convert(values, "float32")])
            elif self.feedback is not None:
                self._keep((*key, rank), values, packed, self.feedback)
            rows.append(packed)
        return self.distributed.flatten(rows).reshape(len(parts), -1), own

    def _added(self, received: Any, own: Any, key: tuple[int, ...]) -> Any:
        """Return the sum of this rank's part, packed."""
        total: Any = None
        for rank in range(self.world.size):
            at_home = rank == self.world.rank
            values = own if at_home else self.squeeze.unpack(received[rank], int(own.numel()))
            if total is None:
                total = values
            else:
                total += values
            del values
        if self.op == "mean":
            total /= self.world.size
        if self.feedback is None:
            return self.squeeze.pack(total)
        total = self.feedback.add(key, total)
        packed = self.squeeze.pack(total)
        self._keep(key, total, packed, self.feedback)
        return packed

    def _keep(
        self, key: tuple[int, ...], values: Any, packed: Any, feedback: ErrorFeedback
    ) -> None:
        """Keep what packing lost; computed here, since a lazy framework may not do so in time."""
        arrived = self.squeeze.unpack(packed, int(values.numel()))
        feedback.keep(key, self.distributed.flatten([values - arrived]))

    def _call(self, kind: str, size_bytes: int, tensor: Any) -> Call:
        start = getattr(self.distributed, kind)
        return Call(kind, size_bytes, self.world.size, lambda: start(tensor))
