"""Which precision is in force in a thread, which modules stay in float32, and what ran.

Backends compute; what all of them need to know is kept here.
"""

from __future__ import annotations

import functools
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from xmem.containers import rebuilt

if TYPE_CHECKING:
    from xmem.backend import Backend


class OperationLog:
    """What ran inside an autocast block, blocks inside it included.

    Args:
        parent: the log of the block around it; it is told everything too.

    Attributes:
        half_bytes: what the calls leave for backward in half precision.
        weight_bytes: of these, the copies of weights.
        float32_bytes: what they would leave in float32.
        opaque: something runs whose operations cannot be seen (compiled code), or only after the
            block (segments that wait).
    """

    def __init__(self, parent: OperationLog | None = None) -> None:
        self.parent = parent
        self.half_bytes = 0
        self.weight_bytes = 0
        self.float32_bytes = 0
        self.opaque = False
        self._counts: Counter[tuple[str, str]] = Counter()

    def note(
        self,
        operation: str,
        dtype: str,
        *,
        half_bytes: int = 0,
        weight_bytes: int = 0,
        float32_bytes: int = 0,
    ) -> None:
        """Note one call.

        Args:
            operation: one of `xmem.operations`.
            dtype: the type that it computes in, e.g. "bfloat16".
            half_bytes: what it leaves for backward in half precision, copies of weights included.
            weight_bytes: of these, the copies of weights.
            float32_bytes: what it would leave in float32, as far as no call before has left it.
        """
        self._counts[operation, dtype] += 1
        self.half_bytes += half_bytes
        self.weight_bytes += weight_bytes
        self.float32_bytes += float32_bytes
        if self.parent is not None:
            self.parent.note(
                operation,
                dtype,
                half_bytes=half_bytes,
                weight_bytes=weight_bytes,
                float32_bytes=float32_bytes,
            )

    @property
    def operations(self) -> dict[str, dict[str, int]]:
        """The calls of each operation by the type it ran in."""
        found: dict[str, dict[str, int]] = {}
        for (operation, dtype), count in sorted(self._counts.items()):
            found.setdefault(operation, {})[dtype] = count
        return found


@dataclass(frozen=True, eq=False)
class Casting:
    """A precision that is in force.

    Attributes:
        dtype: the half type, "bfloat16" or "float16"; "float32" in a block that is disabled.
        operations: those that stay in float32.
        modules: those that stay in float32 with all that is inside them.
        log: is told what runs; None in a recomputation, which is no further call.
        backend: computes; needed where there are modules.
    """

    dtype: str
    operations: frozenset[str] = frozenset()
    modules: tuple[Any, ...] = ()
    log: OperationLog | None = None
    backend: Backend | None = None

    @property
    def enabled(self) -> bool:
        """Whether anything is computed in half precision."""
        return self.dtype != "float32"

    @property
    def key(self) -> tuple[Any, ...]:
        """What is equal for castings that compute alike."""
        return (self.dtype, self.operations, tuple(map(id, self.modules)))

    def note(self, operation: str, dtype: str, **sizes: int) -> None:
        """Tell the log, if there is one; see `OperationLog.note`."""
        if self.log is not None:
            self.log.note(operation, dtype, **sizes)

    def again(self) -> Casting:
        """Return the same for a recomputation."""
        return replace(self, log=None)


# Thread-local as PyTorch's autocast is: another thread enters a block of its own.
_state = threading.local()


def current() -> Casting | None:
    """Return the casting in force in this thread; None outside of any block."""
    return getattr(_state, "casting", None)


@contextmanager
def in_force(casting: Casting | None) -> Iterator[None]:
    """Put a casting in force in this thread, inside the block. Backends enter it."""
    before = current()
    with ExitStack() as stack:
        if casting is not None and casting.modules and casting.backend is not None:
            stack.enter_context(_modules_kept(casting.modules, casting.backend))
        _state.casting = casting
        try:
            yield
        finally:
            _state.casting = before


@dataclass
class _KeptForward:
    """What a module runs whose calls may have to stay in float32."""

    module: Any
    backend: Backend
    forward: Callable[..., Any]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        casting = current()
        if casting is None or not any(m is self.module for m in casting.modules):
            return self.forward(*args, **kwargs)
        precision = self.backend.precision
        plain = Casting("float32", log=casting.log)

        def raised(value: Any) -> Any:
            value = precision.raised(value)
            return rebuilt(value, raised)

        with precision.autocast(plain):
            return self.forward(*map(raised, args), **{k: raised(v) for k, v in kwargs.items()})


@dataclass
class _Replaced:
    """A forward that is replaced while blocks ask for it."""

    count: int = 0
    undo: Callable[[], None] = field(default=lambda: None)


_replaced: dict[int, _Replaced] = {}
_lock = threading.Lock()


@contextmanager
def _modules_kept(modules: Sequence[Any], backend: Backend) -> Iterator[None]:
    """Let modules run their forwards through `_KeptForward` inside the block."""
    with _lock:
        for module in modules:
            held = _replaced.setdefault(id(module), _Replaced())
            held.count += 1
            if held.count == 1:
                wrap = functools.partial(_KeptForward, module, backend)
                held.undo = backend.checkpoint.replace_forward(module, wrap)
    try:
        yield
    finally:
        with _lock:
            for module in reversed(modules):
                held = _replaced[id(module)]
                held.count -= 1
                if not held.count:
                    _replaced.pop(id(module)).undo()
