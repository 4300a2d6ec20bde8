"""One try: build the step of a batch size, run it under a limit, say what it took."""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

import msgspec

from xmem.errors import OutOfMemoryError

if TYPE_CHECKING:
    from xmem.backend import Backend

_log = logging.getLogger("xmem")

MakeStep = Callable[[int], Callable[[], Any]]

MORE_STEPS = 2
"""So many steps beyond those asked for, until one leaves as many bytes as it found."""


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """What a try is to do.

    Attributes:
        size: the batch size.
        steps: how many steps at least.
        limit_bytes: allocations beyond it are refused; None for no limit.
        for_inference: keep nothing for backward.
        seconds: no step is begun after so many, or None.
    """

    size: int
    steps: int
    limit_bytes: int | None
    for_inference: bool
    seconds: float | None


class Outcome(msgspec.Struct, frozen=True, kw_only=True, tag="outcome"):
    """How a try went.

    Attributes:
        ended: "completed"; "refused": memory ran out; "died": its process was ended; "late": time
            was up.
        peak_bytes: the most that was allocated, where it completed.
        static_bytes: what was allocated before its last step, where it completed.
        left_bytes: what stays of it when all that it made has been dropped.
        steps: those that were begun.
        seconds: all of it took.
        reason: why it did not complete, for people.
    """

    ended: Literal["completed", "refused", "died", "late"]
    peak_bytes: int | None
    static_bytes: int | None
    left_bytes: int
    steps: int
    seconds: float
    reason: str = ""


class Trials(Protocol):
    """Where tries are run."""

    def free_bytes(self) -> int | None:
        """Return what a step could take of the device's memory now, or None if unknown."""

    def attempt(self, asked: Asked) -> Outcome:
        """Run a try.

        Raises:
            Exception: whatever the step raised that was not for want of memory.
        """

    def close(self) -> None:
        """End whatever was started for the tries."""


class OwnTrials:
    """Tries in this process: nothing has to be sent anywhere, and a crash is a crash."""

    def __init__(self, backend: Backend, make_step: MakeStep) -> None:
        self._backend = backend
        self._make_step = make_step

    def free_bytes(self) -> int | None:
        """Ask the driver."""
        return free_bytes(self._backend)

    def attempt(self, asked: Asked) -> Outcome:
        """Run it here."""
        try:
            return attempt(self._backend, self._make_step, asked)
        except Exception as error:
            name_size(error, asked.size)
            raise

    def close(self) -> None:
        """Nothing was started."""


@dataclass
class _Progress:
    """How far a try has come; known also when it fails."""

    steps: int = 0
    peak_bytes: int = 0
    static_bytes: int = 0
    late: bool = False


def attempt(
    backend: Backend,
    make_step: MakeStep,
    asked: Asked,
    on_step: Callable[[int], None] = lambda _: None,
) -> Outcome:
    """Run a try in this process; when it is over nothing stays of it.

    Args:
        backend: the one in use.
        make_step: returns the step of a batch size.
        asked: what to do.
        on_step: is told before each step how many it makes.

    Raises:
        Exception: whatever the step raised that was not for want of memory.
    """
    meter = backend.measure
    _settle(backend)
    before = meter.counters()
    limit_before = backend.pool.stats().limit_bytes if backend.offers("pool") else None
    begun = time.perf_counter()
    progress, refusal = _Progress(), ""
    try:
        if asked.limit_bytes is not None:
            meter.set_limit(asked.limit_bytes)
        try:
            _run(backend, make_step, asked, progress, on_step)
        except Exception as error:
            if not _ran_out(backend, error, before.out_of_memory_count):
                raise
            refusal = _reason(backend, error)  # and not the error: its frames hold the step
    finally:
        if asked.limit_bytes is not None:
            meter.set_limit(limit_before)
    if not refusal and asked.limit_bytes is not None and progress.peak_bytes > asked.limit_bytes:
        refusal = f"the peak was {progress.peak_bytes} bytes, and nothing refused them"
    _settle(backend, failed=bool(refusal))
    completed = not refusal and not progress.late
    return Outcome(
        ended="late" if progress.late else "completed" if completed else "refused",
        peak_bytes=progress.peak_bytes if completed else None,
        static_bytes=progress.static_bytes if completed else None,
        left_bytes=max(meter.counters().allocated_bytes - before.allocated_bytes, 0),
        steps=progress.steps,
        seconds=time.perf_counter() - begun,
        reason=refusal,
    )


def _run(
    backend: Backend,
    make_step: MakeStep,
    asked: Asked,
    progress: _Progress,
    on_step: Callable[[int], None],
) -> None:
    """Run steps until one leaves as many bytes as it found: states are there, it is any step.

    What a step returns is held until all has been executed: on a lazy framework a result that
    nobody holds is never computed.
    """
    meter = backend.measure
    begun = time.perf_counter()

    def note_peak() -> int:
        meter.synchronize()
        now = meter.counters()
        progress.peak_bytes = max(progress.peak_bytes, now.peak_allocated_bytes or 0)
        meter.reset_peak()
        return now.allocated_bytes

    context: Callable[[], AbstractContextManager[Any]] = (
        backend.training.no_grad if asked.for_inference else nullcontext
    )
    meter.reset_peak()
    step = make_step(asked.size)
    found = note_peak()
    for number in range(1, asked.steps + MORE_STEPS + 1):
        if asked.seconds is not None and time.perf_counter() - begun >= asked.seconds:
            progress.late = True
            return
        progress.steps, progress.static_bytes = number, found
        on_step(number)
        with context():
            held = step()
            meter.synchronize()
        del held
        left = note_peak()
        if number >= asked.steps and left <= found:
            return
        found = left


def _settle(backend: Backend, *, failed: bool = False) -> None:
    """Let nothing stay of what nobody holds: cycles; after a failure pending work and the cache."""
    gc.collect()
    if failed and backend.offers("pool"):
        backend.pool.recover()
        backend.pool.trim()
    backend.measure.synchronize()


def _ran_out(backend: Backend, error: BaseException, refused_before: int | None) -> bool:
    """Say whether memory ran out, in this error or one that led to it.

    That a request was refused is not enough: the step may have lived with that, and failed later.
    """
    chain = _chain(error)
    if any(isinstance(e, (MemoryError, OutOfMemoryError)) for e in chain):
        return True
    if backend.offers("pool"):
        return any(map(backend.pool.is_out_of_memory, chain))
    refused = backend.measure.counters().out_of_memory_count
    rose = refused is not None and refused_before is not None and refused > refused_before
    return rose and any(isinstance(e, RuntimeError) for e in chain)


def _chain(error: BaseException) -> list[BaseException]:
    found: list[BaseException] = []
    following: BaseException | None = error
    while following is not None and following not in found:
        found.append(following)
        following = following.__cause__ or following.__context__
    return found


def name_size(error: Exception, size: int) -> None:
    """Note at which size a step failed; notes are shown from Python 3.11 on, the log always."""
    said = f"xmem.find_batch_size was trying batch size {size}"
    error.__dict__["__notes__"] = [*getattr(error, "__notes__", ()), said]
    _log.error("find_batch_size: batch size %d failed: %s: %s", size, type(error).__name__, error)


def _reason(backend: Backend, error: BaseException) -> str:
    refusal = backend.pool.refusal() if backend.offers("pool") else None
    if refusal is not None:
        return (
            f"{refusal.requested_bytes} bytes were asked for when {refusal.allocated_bytes} were"
            " allocated"
        )
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[-1] if lines else ''}"


def available_bytes(backend: Backend) -> int | None:
    """Return what tensors on a CPU could take before the system ends processes, or None."""
    if backend.device != "cpu":
        return None
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    found = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    return found[0] + backend.measure.counters().allocated_bytes if found else None


def free_bytes(backend: Backend) -> int | None:
    """Return what a step could take of the device's memory now, or None where it is unknown.

    That is what is free on the device and what the framework's pool holds of it already.
    """
    if backend.device == "cpu":
        return None
    from xmem.device_memory import free_device_bytes

    free = free_device_bytes()
    if free is None:
        return None
    now = backend.measure.counters()
    return free + max(now.reserved_bytes or 0, now.allocated_bytes)
