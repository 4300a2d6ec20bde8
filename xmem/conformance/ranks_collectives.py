"""What ranks find out about collectives: values for each type and operation, and refusals."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

import xmem
import xmem.distributed as xd

if TYPE_CHECKING:
    from xmem.conformance.ranks_program import Findings

FLOATS = ("float32", "float64", "float16", "bfloat16")
INTEGERS = ("int64", "int32", "int16", "int8", "uint8")
COUNT = 6
MANY = 2048


def run(findings: Findings) -> None:
    """Find all of it."""
    here = Collectives(findings)
    for dtype in (*FLOATS, *INTEGERS):
        for op in ("sum", "max", *(("mean",) if dtype in FLOATS else ())):
            findings.find(f"all_reduce {dtype} {op}", partial(here.reduced, dtype, op), dtype)
    findings.find("all_reduce of large int64", here.large_integers, "int64")
    findings.find("all_reduce of a list", here.of_a_list)
    findings.find("all_reduce in place", here.in_place)
    findings.find("all_reduce later", here.later)
    for name in ("broadcast", "all_gather", "reduce_scatter", "all_to_all"):
        findings.find(name, getattr(here, name), name)
    for compression in ("bf16", "fp16", "int8"):
        findings.find(
            f"compressed {compression}", partial(here.compressed, compression), compression
        )
    findings.find("sent bytes", here.sent)
    for what in ("shape", "dtype", "op", "call", "count"):
        findings.find(f"mismatch of {what}", partial(here.mismatch, what))


class Collectives:
    """The calls; every rank has values of its own, small integers, so that sums are exact."""

    def __init__(self, findings: Findings) -> None:
        self._backend = findings.backend
        self._rank, self._world = findings.here.rank, findings.here.size

    def tensor(self, count: int = COUNT, dtype: str = "float32", rank: int | None = None) -> Any:
        """Return (count,): 1, 2, ... times the rank's number from 1."""
        values = np.arange(1, count + 1, dtype=np.float32) * (self._number(rank))
        return self._backend.distributed.convert(self._backend.models.tensor(values), dtype)

    def _number(self, rank: int | None = None) -> int:
        return 1 + (self._rank if rank is None else rank)

    def values(self, tensor: Any) -> list[float]:
        """Read a tensor, flat."""
        flat = tensor.reshape(-1)
        item = self._backend.models.item
        return [item(flat[i]) for i in range(int(np.prod(tensor.shape)))]

    def reduced(self, dtype: str, op: Any) -> list[Any]:
        """Return the type and the values of an all-reduce."""
        tensor = self.tensor(dtype=dtype)
        result = xd.all_reduce(tensor, op)
        found = self._backend.distributed.describe(result).dtype
        wide = self._backend.distributed.convert(result, "float64" if "int" in dtype else "float32")
        kept = self._backend.distributed.convert(tensor, "float32")
        return [found, self.values(wide), self.values(kept)]

    def large_integers(self) -> list[float]:
        """Return sums that no float32 holds: 2^40 + 1 and so on."""
        values = np.array([2**40 + 1, -(2**40) - 3], dtype=np.int64) * self._number()
        found = xd.all_reduce(self._backend.models.tensor(values))
        low = self._backend.distributed.convert(found, "float64")
        return self.values(low)

    def of_a_list(self) -> list[Any]:
        """Return lists of several types in buckets of 64 bytes."""
        counts, dtypes = (3, 40, 1, 5), ("float32", "float32", "int32", "float32")
        tensors = [self.tensor(n, d) for n, d in zip(counts, dtypes, strict=True)]
        xd.traffic(reset=True)
        found = xd.all_reduce(tensors, bucket=64)
        held = xd.traffic().buffer_bytes
        convert = self._backend.distributed.convert
        return [[self.values(convert(t, "float32")) for t in found], held]

    def in_place(self) -> list[Any]:
        """Return what was given, after it was written into."""
        tensors = [self.tensor(), self.tensor(2)]
        xd.all_reduce(tensors, in_place=True)
        return [self.values(t) for t in tensors]

    def later(self) -> list[Any]:
        """Return the results of two calls that were waited for in the other order."""
        first = xd.all_reduce(self.tensor(), async_=True)
        second = xd.all_reduce(self.tensor(), "max", async_=True)
        last = self.values(second.wait())
        return [self.values(first.wait()), last, self.values(first.wait())]

    def broadcast(self) -> list[float]:
        """Return rank 1's values."""
        return self.values(xd.broadcast(self.tensor(), source=1))

    def all_gather(self) -> list[Any]:
        """Return all ranks' values, with the shape."""
        found = xd.all_gather(self.tensor(2))
        return [list(found.shape), self.values(found)]

    def reduce_scatter(self) -> list[Any]:
        """Return this rank's part of the sum."""
        found = xd.reduce_scatter(self.tensor(2 * self._world).reshape(self._world, 2))
        return [list(found.shape), self.values(found)]

    def all_to_all(self) -> list[Any]:
        """Return what every rank had for this one."""
        found = xd.all_to_all(self.tensor(2 * self._world).reshape(self._world, 2))
        return [list(found.shape), self.values(found)]

    def _normal(self, rank: int) -> Any:
        return np.random.default_rng(rank).standard_normal(MANY).astype(np.float32)

    def compressed(self, compress: Any) -> list[float]:
        """Return the relative error of a sum in few bits, and bytes sent over float32's."""
        tensor = self._backend.models.tensor(self._normal(self._rank))
        xd.traffic(reset=True)
        result = xd.all_reduce(tensor, compress=compress)
        sent = sum(xd.traffic(reset=True).sent_bytes.values())
        xd.all_reduce(tensor)
        whole = sum(xd.traffic().sent_bytes.values())
        found = np.array(self.values(result))
        expected = np.sum([self._normal(r).astype(np.float64) for r in range(self._world)], 0)
        error = float(np.linalg.norm(found - expected) / np.linalg.norm(expected))
        return [error, sent / whole]

    def sent(self) -> dict[str, int]:
        """Return the bytes that 1,200 float32 numbers cost, by kind of call."""
        xd.traffic(reset=True)
        xd.all_reduce(self.tensor(1200))
        return xd.traffic().sent_bytes

    def mismatch(self, what: str) -> list[str]:
        """Return the error of a call that the last rank makes differently, and the next result."""
        odd = self._rank == self._world - 1
        calls: dict[str, Callable[[], Any]] = {
            "shape": lambda: xd.all_reduce(self.tensor(COUNT + odd)),
            "dtype": lambda: xd.all_reduce(self.tensor(dtype="float64" if odd else "float32")),
            "op": lambda: xd.all_reduce(self.tensor(), "max" if odd else "sum"),
            "call": lambda: xd.all_gather(self.tensor()) if odd else xd.all_reduce(self.tensor()),
            "count": lambda: xd.all_reduce([self.tensor()] * (2 + odd)),
        }
        try:
            calls[what]()
        except xmem.DistributedError as error:
            told = [type(error).__name__, str(error)]
        else:
            told = ["nothing", ""]
        return [*told, str(self.values(xd.all_reduce(self.tensor())))]
