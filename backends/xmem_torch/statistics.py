"""Running statistics in a second pass: left alone.

PyTorch 2.13 updates them again (pytorch#96136).
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

from torch.nn import SyncBatchNorm
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.modules.instancenorm import _InstanceNorm

# Layers whose statistics are left alone now, with how many blocks ask for it and what to put back.
_frozen: dict[Any, tuple[int, float | None, Any]] = {}
_threads: dict[int, int] = {}
_lock = threading.Lock()


def _freeze(module: Any) -> None:
    """Momentum 0 keeps the averages, and a missing counter is not counted up."""
    with _lock:
        count, momentum, counter = _frozen.get(
            module, (0, module.momentum, module.num_batches_tracked)
        )
        _frozen[module] = (count + 1, momentum, counter)
        module.momentum, module.num_batches_tracked = 0.0, None


def _thaw(module: Any) -> None:
    with _lock:
        count, momentum, counter = _frozen.pop(module)
        if count > 1:
            _frozen[module] = (count - 1, momentum, counter)
        else:
            module.momentum, module.num_batches_tracked = momentum, counter


def _updates(module: Any) -> bool:
    return isinstance(module, _NormBase) and module.training and module.track_running_stats


def _quiet(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a forward that updates nothing in the threads that ask for it."""

    @functools.wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() not in _threads or self in _frozen or not _updates(self):
            return original(self, *args, **kwargs)
        _freeze(self)
        try:
            return original(self, *args, **kwargs)
        finally:
            _thaw(self)

    return forward


_ORIGINALS = {kind: kind.forward for kind in (_BatchNorm, SyncBatchNorm, _InstanceNorm)}
_QUIET = {kind: _quiet(original) for kind, original in _ORIGINALS.items()}


def _put(forwards: dict[Any, Callable[..., Any]]) -> None:
    for kind, forward in forwards.items():
        kind.forward = forward


class statistics_untouched:  # noqa: N801  a context manager
    """Let no normalisation layer that this thread runs in the block update its statistics.

    Batch statistics are used all the same. Layers that are not known beforehand (in a list of the
    module's, say) are met in their class's forward, replaced while any thread is in such a block;
    PyTorch's hook for all modules would make every module's call slower, by 15 % of what a region
    costs in all.

    Args:
        modules: those that are known to run.
    """

    def __init__(self, modules: Sequence[Any]) -> None:
        self._known = [module for module in modules if module.training and _updates(module)]

    def __enter__(self) -> None:
        for module in self._known:
            _freeze(module)
        thread = threading.get_ident()
        with _lock:
            if not _threads:
                _put(_QUIET)
            _threads[thread] = _threads.get(thread, 0) + 1

    def __exit__(self, *error: object) -> None:
        thread = threading.get_ident()
        with _lock:
            _threads[thread] -= 1
            if not _threads[thread]:
                del _threads[thread]
            if not _threads:
                _put(_ORIGINALS)
        for module in self._known:
            _thaw(module)
