"""Softmax that keeps its output, while what a call leaves for backward is packed.

Jittor's own differentiates the maximum that it subtracts, and needs the very same input for it.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jittor as jt
from jittor import attention, nn

from xmem import casting
from xmem_jittor import derivatives, notices
from xmem_jittor.trial import note_kept, trying


class _Asked(threading.local):
    depth = 0


_asked = _Asked()
_lock = threading.Lock()
_blocks = 0
_undo: list[tuple[Any, str, Any]] = []


@contextmanager
def keeping_outputs() -> Iterator[None]:
    """Let this thread's softmax keep its output inside the block."""
    global _blocks
    with _lock:
        if not _blocks:
            _replace()
        _blocks += 1
    _asked.depth += 1
    try:
        yield
    finally:
        _asked.depth -= 1
        with _lock:
            _blocks -= 1
            if not _blocks:
                _restore()


def _replace() -> None:
    for owner, name, make in (
        (nn, "softmax", _softmax),
        (attention, "softmax", _softmax),
        (jt.Var, "softmax", _softmax),
        (nn.Softmax, "execute", _softmax_module),
    ):
        original = owner.__dict__.get(name)
        if original is not None:
            _undo.append((owner, name, original))
            setattr(owner, name, make(original))


def _restore() -> None:
    while _undo:
        owner, name, original = _undo.pop()
        setattr(owner, name, original)


class _Softmax(jt.Function):
    """Softmax that keeps its output.

    Args:
        operation: computes it.
        derivative: makes the input's gradient of the output's and the output.
    """

    def __init__(self, operation: Callable[[Any], Any], derivative: Callable[..., Any]) -> None:
        self.operation = operation
        self.derivative = derivative
        self.kept: Any = None

    def execute(self, x: Any) -> Any:
        """Run the operation."""
        output = self.operation(x.detach()).stop_fuse()
        self.kept = output.detach()
        note_kept([self.kept])
        return output

    def grad(self, gradient: Any) -> Any:
        """Differentiate, once: held on to, what is given back to it would stay in memory."""
        if self.kept is None:
            notices.refuse_unpacked_twice("softmax")
        kept = self.kept
        if not trying():
            self.kept = None
        return self.derivative(gradient, kept)


def _softmax(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def run(x: Any, dim: Any = None, log: bool = False) -> Any:
        plain = (
            not _asked.depth
            or jt.flags.no_grad
            or log
            or trying()
            or casting.current() is not None
            or str(x.dtype) != "float32"
            or x.is_stop_grad()
        )
        derivative = None if plain else derivatives.of("softmax", dim)
        if derivative is None:
            return original(x, dim, log)
        return _Softmax(lambda v: original(v, dim), derivative)(x)

    return run


def _softmax_module(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def execute(self: Any, x: Any) -> Any:
        if not _asked.depth:
            return original(self, x)
        return nn.softmax(x, *self.args, **self.kw)

    return execute
