"""Autocast: compute in half precision what is safe, and say what ran in which.

Paulius Micikevicius et al., "Mixed Precision Training", ICLR 2018.
"""

from __future__ import annotations

import functools
import inspect
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from xmem.casting import Casting, OperationLog, current
from xmem.errors import UsageError, XmemWarning, unknown
from xmem.layouts import KeyLayers, modules_of
from xmem.operations import OPERATIONS
from xmem.receipts import Receipt
from xmem.sizes import format_size

if TYPE_CHECKING:
    from xmem.backend import Backend

HALF_TYPES = {"bfloat16", "float16"}

Function = TypeVar("Function", bound=Callable[..., Any])


class Autocast:
    """An autocast block: a context manager, to be entered any number of times, and a decorator.

    Attributes:
        dtype: the half type in force inside, "float32" if it is disabled.
    """

    def __init__(
        self,
        backend: Backend,
        dtype: str,
        keep_fp32: Sequence[Any],
        *,
        model: Any,
        enabled: bool,
    ) -> None:
        if isinstance(keep_fp32, (str, type)):
            raise UsageError(f"keep_fp32={keep_fp32!r}: give a sequence, e.g. ('softmax',)")
        self._backend = backend
        dtype = backend.precision.check_dtype(dtype)
        self.dtype = dtype if enabled else "float32"
        self._operations = frozenset(k for k in keep_fp32 if k in OPERATIONS)
        others = [k for k in keep_fp32 if k not in OPERATIONS]
        self._modules = tuple(_modules(backend, others, model)) if others else ()
        self._log = OperationLog()

    def __enter__(self) -> Autocast:
        outer = current()
        log = OperationLog(outer.log if outer is not None else None)
        self._log = log
        casting = Casting(self.dtype, self._operations, self._modules, log, self._backend)
        if outer is not None and outer.enabled and casting.enabled:  # what it keeps stays kept
            others = [m for m in outer.modules if not any(m is own for own in self._modules)]
            casting = replace(
                casting,
                operations=casting.operations | outer.operations,
                modules=(*casting.modules, *others),
            )
        block = self._backend.precision.autocast(casting)
        block.__enter__()
        _entered.blocks = (*_blocks(), (block, log))
        return self

    def __exit__(self, *error: Any) -> bool | None:
        *blocks, (block, log) = _blocks()
        _entered.blocks = tuple(blocks)
        suppressed = block.__exit__(*error)
        if log.opaque and log.parent is not None:
            log.parent.opaque = True
        if self.dtype != "float32" and error[0] is None:
            _warn_of_nothing(self.dtype, log)
        return bool(suppressed)

    def __call__(self, function: Function) -> Function:
        """Decorate a function: each call runs in a block of its own.

        Raises:
            UsageError: a generator or a coroutine, whose body does not run in the call.
        """
        kinds = (
            inspect.isgeneratorfunction, inspect.iscoroutinefunction, inspect.isasyncgenfunction,
        )  # fmt: skip
        if any(kind(function) for kind in kinds):
            raise UsageError(
                f"{function!r} is a generator or a coroutine, and runs when its call has returned."
                " Enter xmem.autocast inside it"
            )

        def run(*args: Any, **kwargs: Any) -> Any:
            with self:
                return function(*args, **kwargs)

        if inspect.isroutine(function):  # a module is a callable too, and has no name
            functools.update_wrapper(run, function)
        return run  # type: ignore[return-value]

    @property
    def operations(self) -> dict[str, dict[str, int]]:
        """How often each operation ran in which type, in the block entered last.

        E.g. {"linear": {"bfloat16": 24}, "softmax": {"float32": 6}}. What a disabled block or a
        kept module computes is listed as float32; a recomputation is not listed again.
        """
        return self._log.operations

    @property
    def receipt(self) -> Receipt:
        """What the block entered last did, and what it should save of what backward reads.

        Bytes are added up over all forward passes inside it; what `xmem.operations` has no name for
        (dropout, additions) is not counted.
        """
        log = self._log
        names = [name for name, types in log.operations.items() if set(types) & HALF_TYPES]
        calls = sum(
            count
            for types in log.operations.values()
            for dtype, count in types.items()
            if dtype in HALF_TYPES
        )
        note = f"computed in {self.dtype}"
        if log.half_bytes > log.float32_bytes:
            half, weights = format_size(log.half_bytes), format_size(log.weight_bytes)
            note = (
                f"autocast raises what forward leaves for backward: {half}, {weights} of them"
                f" copies of weights, against {format_size(log.float32_bytes)} in float32. "
            )
            if log.weight_bytes >= log.half_bytes - log.float32_bytes:
                note += (
                    "It pays where activations are larger than weights: a larger batch, or no"
                    " autocast here"
                )
            else:
                note += (
                    "What stays in float32 beside operations in half keeps copies of its inputs, or"
                    " they of its results"
                )
        return Receipt(
            "autocast",
            self._backend.name,
            calls,
            tuple(names),
            expected_saving_bytes=log.float32_bytes - log.half_bytes,
            note=note,
        )


# One for all blocks: torch.compile traces through what reads it, but not through making one.
_entered = threading.local()


def _blocks() -> tuple[tuple[AbstractContextManager[Any], OperationLog], ...]:
    """Return the blocks that this thread is in, the innermost last, and what ran in them."""
    return getattr(_entered, "blocks", ())


def _warn_of_nothing(dtype: str, log: OperationLog) -> None:
    if log.opaque or any(set(types) & HALF_TYPES for types in log.operations.values()):
        return
    ran = ", ".join(log.operations) or "no operation that it knows"
    warnings.warn(
        f"autocast to {dtype} was applied to nothing: inside the block ran {ran}, and nothing of it"
        " in half precision. Run the model's forward pass inside the block.",
        XmemWarning,
        stacklevel=3,
    )


def _modules(backend: Backend, asked: Sequence[Any], model: Any) -> Iterator[Any]:
    """Yield the modules that `keep_fp32` names, by themselves, their types or their paths."""
    capability = backend.checkpoint
    everything = [] if model is None else list(modules_of(capability, model))
    for item in asked:
        if capability.is_module(item):
            yield item
            continue
        if model is None and (isinstance(item, type) or "." in str(item)):
            raise UsageError(
                f"keep_fp32 names {item!r}: pass model=, so that its modules can be found"
            )
        layers = (KeyLayers(types=(item,)), KeyLayers(names=(item,))) if model is not None else ()
        by_type = isinstance(item, type)
        found = [
            module
            for path, module in everything
            if any(layer.matches(path, module) for layer in layers[: 1 if by_type else 2])
        ]
        if not found:
            kinds = {type(module).__name__ for _, module in everything}
            valid = [*OPERATIONS, *sorted(kinds), *(path for path, _ in everything if path)]
            name = item.__name__ if by_type else item
            hint = "" if model is not None else " To name modules, pass model=."
            raise UsageError(unknown("operation or module in keep_fp32", name, valid) + hint)
        yield from found
