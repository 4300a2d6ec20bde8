"""The memory pool on Jittor 1.3.11: our subclass of its SFRL pool (`native/pool.h`).

Differences: a limit is on live requested bytes, refused before anything is allocated. Jittor runs a
graph when a value is needed, so a refusal comes at a `sync`, and which tensor it was for is told by
a node of the graph. Where the system has no more, Jittor's pool gives its cache back and tries
again by itself; on a CPU it would then die of a segfault (`aligned_alloc`, unchecked), and with our
pool it raises a RuntimeError.
"""

from __future__ import annotations

import ctypes
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import groupby
from typing import Any

import jittor as jt

from xmem.errors import (
    CapabilityError,
    OutOfMemoryError,
    XmemWarning,
)
from xmem.offload.adaptive import Adaptive
from xmem.pooling import Block, Graph, OnOom, Owners, Point, PoolStats, Refusal, Segment, Setting
from xmem.process import process_bytes
from xmem.records import CATEGORIES
from xmem_jittor import flags, living, native, owners, pool_settings, ran_out, recovery
from xmem_jittor.late import late

_adaptive = Adaptive()  # one, as there is one pool
_REFUSAL_BLOCKS = 256
_BLOCK_NUMBERS = 6
_NO_SPILL = (
    "on_oom='spill' puts tensors into memory that a driver moves between GPU and host; on a CPU"
    " there is no such memory. Use on_oom='offload'."
)
_NO_OFFLOAD = (
    "on_oom='offload' moves tensors inside the request that does not fit. On a GPU kernels that"
    " were launched before still run then. Use xmem.offload_activations."
)


class Pool:
    """Control Jittor's pool through our subclass of it; see `xmem.pooling.Pool`."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._library = native.allocator()
        self._library.xmem_jittor_know_holders(id(jt.Var))
        self.gaps: Mapping[str, str] = (
            {"spill": _NO_SPILL} if device == "cpu" else {"on_oom=offload": _NO_OFFLOAD}
        )

    @property
    def settings(self) -> Mapping[str, Setting]:
        """The settings of Jittor's SFRL pool; see `pool_settings.py`."""
        return pool_settings.available(self._device)

    @property
    def elsewhere(self) -> Mapping[str, str]:
        """Settings that Jittor has on the other device only."""
        return pool_settings.elsewhere(self._device)

    def in_force(self) -> dict[str, Any]:
        """Return the settings as they are."""
        found = pool_settings.in_force(self._device)
        if self._device == "cpu":
            found |= _adaptive.settings
        return {**found, "on_oom": ran_out.policy()}

    def configure(self, values: Mapping[str, Any], on_oom: OnOom | None) -> None:
        """Put parsed values in force; what is in the pool already stays as it is."""
        flags.refuse_broken()
        pool_settings.check(values)
        if on_oom == "spill" and self._device == "cpu":
            raise CapabilityError(_NO_SPILL)
        if on_oom == "offload" and self._device != "cpu":
            raise CapabilityError(_NO_OFFLOAD)
        moves = (on_oom or ran_out.policy()) == "offload"
        prepared = _adaptive.prepare(values, on=moves)
        if moves:
            late().begin(_adaptive, prepared["away"].depot)
        else:
            late().end()
        _adaptive.put_in_force(**prepared)
        pool_settings.put_in_force(values, self._device)
        if on_oom is not None:
            ran_out.set_policy(on_oom, device=self._device)

    def stats(self) -> PoolStats:
        """Read the counters."""
        flags.refuse_broken()
        found = ran_out.counters()
        return PoolStats(
            allocated_bytes=found[0],
            peak_allocated_bytes=found[1],
            reserved_bytes=found[2],
            peak_reserved_bytes=found[3],
            process_bytes=process_bytes(),
            segment_count=found[4],
            allocation_count=found[6],
            free_count=found[7],
            largest_free_bytes=found[9],
            out_of_memory_count=found[ran_out.REFUSED],
            limit_bytes=None if found[ran_out.LIMIT] < 0 else found[ran_out.LIMIT],
            retry_count=ran_out.retries(),
            offloaded_bytes=_adaptive.moved_bytes if self._device == "cpu" else None,
        )

    def reset_peak(self) -> None:
        """Let the peaks start again from now."""
        self._library.xmem_jittor_reset_peak()

    def set_limit(self, limit_bytes: int | None) -> None:
        """Refuse allocations beyond a limit: a RuntimeError where the graph runs."""
        ran_out.set_limit(limit_bytes)

    def trim(self) -> int:
        """Give back every segment that no tensor lies in, also of the pool before `xmem.use`."""
        return int(self._library.xmem_jittor_trim())

    def preallocate(self, size_bytes: int) -> int:
        """Take one block and give it back, so that the pool cuts later requests from it."""
        taken = int(self._library.xmem_jittor_preallocate(min(size_bytes, ran_out.MOST)))
        if taken < 0:
            raise ran_out.JittorOutOfMemoryError(
                f"the system has no {size_bytes} bytes in one piece for Jittor's pool. Ask for less"
            )
        return taken

    def segments(self) -> Sequence[Segment]:
        """Return all that the pool holds; the pool before `xmem.use` is not ours to read."""
        rows = _rows(self._library.xmem_jittor_segments, _BLOCK_NUMBERS)
        found = []
        for address, held in groupby(rows, key=lambda row: row[0]):
            blocks = tuple(_block(row) for row in held)
            found.append(Segment(address, sum(block.size_bytes for block in blocks), blocks))
        return found

    def history(self) -> Sequence[Point]:
        """Return at most about 4096 points, each the highest of its part, and now."""
        return [Point(*row) for row in _rows(self._library.xmem_jittor_history, 3)]

    def refusal(self) -> Refusal | None:
        """Return the latest refused request; `birth` is the node that it was for."""
        numbers = (ctypes.c_longlong * 7)()
        categories = (ctypes.c_longlong * len(CATEGORIES))()
        blocks = (ctypes.c_longlong * (_REFUSAL_BLOCKS * _BLOCK_NUMBERS))()
        count = self._library.xmem_jittor_refusal(
            numbers, categories, len(CATEGORIES), _REFUSAL_BLOCKS, blocks
        )
        if count < 0:
            return None
        requested, allocated, reserved, limit, largest, node, in_backward = numbers
        return Refusal(
            requested_bytes=requested,
            allocated_bytes=allocated,
            reserved_bytes=reserved,
            limit_bytes=None if limit < 0 else limit,
            largest_free_bytes=largest,
            birth=node,
            by_category=dict(zip(CATEGORIES, categories, strict=True)),
            blocks=tuple(_block(row) for row in _split(blocks, count, _BLOCK_NUMBERS)),
            in_backward=None if in_backward < 0 else bool(in_backward),
        )

    def out_of_memory_type(self) -> type[OutOfMemoryError]:
        """Return a class that is a RuntimeError too, which is what Jittor raises."""
        return ran_out.JittorOutOfMemoryError

    def is_out_of_memory(self, error: BaseException) -> bool:
        """Judge by the pool's count of refusals; see `ran_out.py`."""
        return ran_out.is_out_of_memory(error)

    @contextmanager
    def watch(self, model: Any, optimizer: Any) -> Iterator[Owners]:
        """Follow modules and phases (`owners.py`), and what `recover` puts back.

        Runs updates that are still pending, which may run out of memory; see `recovery.py`.
        """
        if not recovery.is_following():  # an error of a block around this one may not be judged yet
            ran_out.settle()
        with recovery.following(model, optimizer), owners.watch(model, optimizer) as found:
            yield found

    def recover(self) -> None:
        """Let nothing stay of a step that failed.

        Parameters, buffers and optimizer states that are watched and whose update is pending are
        what they were before it. Those that were updated before memory ran out stay updated, with a
        warning: Jittor updates a parameter as soon as its gradient is there, and keeping all old
        values until the step is through would cost their bytes in every step.
        """
        jt.flags.node_order = 0  # 1 where an optimizer's step was left by an error
        found = recovery.put_back_all()
        recovery.drop_fetches()
        self._library.xmem_jittor_release_orphans()
        self._library.xmem_jittor_forget_expectations()
        self._library.xmem_jittor_forget_entries()
        ran_out.clear()
        ran_out.settle()
        if found.updated or found.lost:
            total = found.restored + found.updated + found.lost
            warnings.warn(
                f"memory ran out while the optimizer updated: {found.updated} of {total} tensors"
                f" (parameters, buffers, states) had been updated by then and stay so,"
                f" {found.restored} were put back, {found.lost} wait to be computed. Load a"
                " checkpoint if a step must be taken as a whole or not at all.",
                XmemWarning,
                stacklevel=2,
            )

    def live_tensors(self) -> Sequence[Any]:
        """List what Python holds; see `living.py`."""
        return living.live_tensors()

    def live_counts(self) -> dict[str, int]:
        """Count what is alive; see `living.py`."""
        return living.live_counts()

    def tensor_bytes(self, tensor: Any) -> int:
        """Size what lies behind a tensor; see `living.py`."""
        return living.tensor_bytes(tensor)

    def identity_of(self, tensor: Any) -> Any:
        """Tell a tensor from later ones; see `living.py`."""
        return living.identity_of(tensor)

    def on_step(self, call: Callable[[Any], None]) -> Callable[[], None]:
        """Follow the optimizers' steps; see `living.py`."""
        return living.on_step(call)

    def graph_of(self, tensor: Any) -> Graph | None:
        """Follow a tensor's graph; see `living.py`."""
        return living.graph_of(tensor)

    def parameter_names(self, model: Any, optimizer: Any) -> dict[int, str]:
        """Name what lies at an address; see `owners.py`."""
        return owners.parameter_names(model, optimizer)


def _block(row: Sequence[int]) -> Block:
    _, address, size, requested, category, node = row
    return Block(address, size, requested, CATEGORIES[category] if category >= 0 else None, node)


def _split(numbers: Any, count: int, width: int) -> list[tuple[int, ...]]:
    flat = numbers[: count * width]
    return [tuple(flat[i : i + width]) for i in range(0, len(flat), width)]


def _rows(read: Any, width: int) -> list[tuple[int, ...]]:
    """Read rows of numbers, of which there may be more by the time that there is room for them."""
    capacity = 1024
    while True:
        numbers = (ctypes.c_longlong * (capacity * width))()
        count = int(read(capacity, numbers))
        if count <= capacity:
            return _split(numbers, count, width)
        capacity = count + count // 8
