"""Whether memory ran out, and what is done about it: one state, as there is one pool."""

from __future__ import annotations

import ctypes
import gc

import jittor as jt

from xmem.errors import MeasurementError, OutOfMemoryError
from xmem.pooling import OnOom
from xmem.sizes import parse_size
from xmem_jittor import flags, native
from xmem_jittor.late import late
from xmem_jittor.retrying import Retrying

REFUSED, LIMIT = 10, 11
MOST = 1 << 62  # the library counts in 64 bits
_NUMBERS = 12
# Refusals that have been told of.
_judged = 0


class JittorOutOfMemoryError(OutOfMemoryError, RuntimeError):
    """Jittor ran out of memory, for which it raises a RuntimeError."""


def counters() -> list[int]:
    """Read the pool's counters; see `xmem_jittor_pool_stats`.

    Raises:
        MeasurementError: Jittor allocates from another pool now.
    """
    values = (ctypes.c_longlong * _NUMBERS)()
    if not native.allocator().xmem_jittor_pool_stats(values):
        raise MeasurementError(
            "Jittor no longer allocates from the pool that xmem counts: one of its allocator"
            " flags (use_stat_allocator...) was changed since xmem.use()."
        )
    return list(values)


def set_limit(limit_bytes: int | str | None) -> None:
    """Refuse allocations beyond a limit: a RuntimeError that says "out of memory"."""
    limit = -1 if limit_bytes is None else min(parse_size(limit_bytes), MOST)
    native.allocator().xmem_jittor_set_limit(limit)


def is_out_of_memory(error: BaseException) -> bool:
    """Say whether the pool has refused since the last error that was asked about.

    Jittor raises a RuntimeError for everything, so the count decides. Asking again about one error
    gives the same answer.
    """
    if isinstance(error, (OutOfMemoryError, MemoryError)):
        return True
    known = getattr(error, "_xmem_is_out_of_memory", None)
    if isinstance(known, bool):
        return known
    found = isinstance(error, RuntimeError) and counters()[REFUSED] > _judged
    if found:
        settle()
    error._xmem_is_out_of_memory = found  # type: ignore[attr-defined]
    return found


def settle() -> None:
    """Let every refusal so far be told of: a later error needs one of its own."""
    global _judged
    _judged = counters()[REFUSED]


def clear() -> int:
    """Collect garbage and give the pool's cache back; not while a graph runs."""
    gc.collect()
    return int(native.allocator().xmem_jittor_trim())


_retrying = Retrying(is_out_of_memory, clear, late().failure)


def policy() -> OnOom:
    """Return the policy in force."""
    if flags.has("use_cuda_managed_allocator") and jt.flags.use_cuda_managed_allocator:
        return "spill"
    if late().is_on:
        return "offload"
    return "trim_and_retry" if _retrying.is_on else "raise"


def set_policy(on_oom: OnOom, *, device: str) -> None:
    """Put a policy in force that the device has."""
    if device != "cpu":
        limit = counters()[LIMIT]
        jt.flags.use_cuda_managed_allocator = int(on_oom == "spill")
        native.allocator().xmem_jittor_set_limit(limit)  # of the pool over that memory
        settle()  # which counts for itself
    if on_oom in ("trim_and_retry", "offload"):
        _retrying.start()
    else:
        _retrying.stop()


def retries() -> int:
    """Return how many executions have been taken up again."""
    return _retrying.retries
