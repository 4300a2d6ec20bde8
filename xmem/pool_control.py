"""`xmem.pool`: the framework's memory pool under one name on every backend."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xmem.errors import CapabilityError, UsageError, XmemWarning, unknown
from xmem.pooling import ON_OOM, OnOom, PoolStats, Setting
from xmem.sizes import parse_size

if TYPE_CHECKING:
    from xmem.pooling import Pool

_UNCHANGED: Any = object()


@dataclass(frozen=True)
class WarmUp:
    """What running a step did to the pool.

    Attributes:
        before: the pool before the first step.
        after: the pool after the last.
        first_seconds: of the first step.
        last_seconds: of the last.
        steps: how many were run.
    """

    before: PoolStats
    after: PoolStats
    first_seconds: float
    last_seconds: float
    steps: int


class PoolControl:
    """Reads and shapes the pool of the active backend; there is one, `xmem.pool`."""

    def stats(self) -> PoolStats:
        """Return the pool's counters: bytes allocated, reserved, their peaks, segments and more.

        Reads no tensor values. On a lazy framework (Jittor) the counters are those of what has
        been executed.

        Raises:
            NoActiveBackendError: `xmem.use()` has not been called.
        """
        return _pool().stats()

    @property
    def limit(self) -> int | None:
        """The bytes that live tensors may take at most, or None; set it with `configure`."""
        return _pool().stats().limit_bytes

    @property
    def settings(self) -> dict[str, Any]:
        """The settings in force, by name."""
        return _pool().in_force()

    def configure(
        self,
        *,
        limit: int | str | None = _UNCHANGED,
        on_oom: OnOom | None = None,
        **settings: Any,
    ) -> dict[str, Any]:
        """Change the pool; what is not named stays as it is.

        Args:
            limit: the bytes that live tensors may take at most, an int or text such as "8GiB";
                None takes the limit away. On CUDA with PyTorch it bounds what the pool reserves.
            on_oom: what becomes of a request that cannot be met: "raise"; "trim_and_retry": give
                the cache back, collect garbage, try once more; "spill": managed memory (CUDA);
                "offload": what forward passes leave for backward stays on the device until a
                request would pass the limit, and then leaves, what backward needs last first,
                until the request fits (`offload_to`, `offload_directory`). Results do not change.
            settings: the pool's own, which differ by framework and device; `docs/memory.md` lists
                them, and `xmem.pool.settings` shows those in force.

        Returns:
            The settings in force afterwards.

        Raises:
            UsageError: an unknown name or value, one that comes too late, or nothing to change.
            CapabilityError: the framework or the device does not have it, with the reason.
            OffloadError: `offload_directory` is missing or cannot be written to.
            CompositionError: "offload" begins or ends where that cannot work, with the reason.
        """
        if limit is _UNCHANGED and on_oom is None and not settings:
            raise UsageError(
                "configure() was given nothing to change. Give limit=, on_oom= or one of:"
                f" {', '.join(sorted(_pool().settings)) or 'no setting of its own'}."
            )
        pool = _pool()
        new_limit = limit if limit is _UNCHANGED or limit is None else parse_size(limit)
        if on_oom is not None and on_oom not in ON_OOM:
            raise UsageError(unknown("on_oom", on_oom, ON_OOM))
        values = {name: _setting(pool, name).parse(value) for name, value in settings.items()}
        if new_limit not in (_UNCHANGED, None) and "limit" in pool.gaps:
            raise CapabilityError(f"limit={limit!r} is not to be had here: {pool.gaps['limit']}")
        if values or on_oom is not None:
            pool.configure(values, on_oom)
        if new_limit is not _UNCHANGED:
            pool.set_limit(new_limit)
        in_force = pool.in_force()
        if in_force["on_oom"] == "offload":
            _warn_of_moving(pool, to_host=values.get("offload_to") == "host")
        return in_force

    def trim(self) -> int:
        """Give back to the system what no tensor holds.

        Returns:
            By how many bytes what the pool reserves fell.
        """
        return _pool().trim()

    def reset_peak(self) -> None:
        """Let peaks and the history start again from now.

        Raises:
            MeasurementError: a block of `xmem.measure` is open, which has the peak.
        """
        from xmem.meter import refuse_open_block

        refuse_open_block("xmem.pool.reset_peak()")
        _pool().reset_peak()

    def preallocate(self, size: int | str) -> int:
        """Have the pool hold free memory of a size, in one piece, before training cuts it up.

        Args:
            size: bytes, or text such as "2GiB".

        Returns:
            The bytes that the pool took anew; 0 where it held such a piece.

        Raises:
            OutOfMemoryError: neither system nor driver has so much.
            UsageError: the size is no size, or 0.
        """
        size_bytes = parse_size(size)
        if size_bytes == 0:
            raise UsageError("preallocate(0) would do nothing; give the bytes to hold")
        return _pool().preallocate(size_bytes)

    def warm_up(self, step: Callable[[], Any], *, steps: int = 2) -> WarmUp:
        """Run training steps, so that the pool has its shape and kernels are there.

        Args:
            step: runs one training step; its result is dropped. The steps are real ones: parameters
                change.
            steps: how many, at least 2: the first one makes the optimizer's state.

        Returns:
            The pool before and after, and the seconds of the first and the last step.
        """
        if not callable(step):
            raise UsageError(f"warm_up takes a function that runs a step, not {step!r}")
        if not isinstance(steps, int) or isinstance(steps, bool) or steps < 2:
            raise UsageError(f"steps={steps!r}; give a whole number, 2 or more")
        from xmem.api import active

        synchronize = active().measure.synchronize
        synchronize()
        before = _pool().stats()
        seconds = []
        for _ in range(steps):
            begin = time.perf_counter()
            step()
            synchronize()
            seconds.append(time.perf_counter() - begin)
        return WarmUp(before, _pool().stats(), seconds[0], seconds[-1], steps)

    def snapshot(self, path: str | Path, *, model: Any = None, optimizer: Any = None) -> Path:
        """Write what the pool holds, and its history, to a file.

        Args:
            path: "x.json": xmem's own, of bounded size, read by `xmem.snapshots.read_snapshot`;
                "x.pickle": opens in PyTorch's memory_viz.
            model: its parameters and buffers carry their names and categories in the file.
            optimizer: its states too.

        Returns:
            The path.

        Raises:
            UsageError: another suffix.
        """
        from xmem import snapshots
        from xmem.api import active

        names = None
        if model is not None or optimizer is not None:
            names = snapshots.claim(active(), model, optimizer)
        return snapshots.write(_pool(), Path(path), names=names)

    def __repr__(self) -> str:
        return "xmem.pool"


def _pool() -> Pool:
    from xmem.api import active

    return active().pool


def _setting(pool: Pool, name: str) -> Setting:
    if name in pool.settings:
        return pool.settings[name]
    if name in pool.elsewhere:
        raise CapabilityError(
            f"{name!r} is a setting of {pool.elsewhere[name]}. Here there are:"
            f" limit, on_oom{''.join(f', {known}' for known in sorted(pool.settings))}."
        )
    raise UsageError(unknown("pool setting", name, ("limit", "on_oom", *pool.settings)))


def _warn_of_moving(pool: Pool, *, to_host: bool) -> None:
    found = []
    if pool.stats().limit_bytes is None:
        found.append(
            'on_oom="offload" without a limit moves nothing before the system itself has no more'
            " memory. Give one: xmem.pool.configure(limit=...)"
        )
    if to_host:
        found.append(
            "offload_to='host': on a CPU the device's memory is the host's. What is moved leaves"
            " the framework's pool and counts no more as allocated, and the process keeps it. To"
            " take it out of memory, use offload_to='disk'."
        )
    for message in found:
        warnings.warn(message, XmemWarning, stacklevel=3)


pool = PoolControl()
