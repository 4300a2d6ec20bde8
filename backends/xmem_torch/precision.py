"""Mixed precision on PyTorch: torch.autocast (2.13).

The weight-cast cache is off: it holds a half copy of every weight until the block ends, breaks
budgets under checkpointing, and its absence costs nothing measurable (160 against 162 ms).
float16 on a CPU runs 12 times slower than float32; "auto" is bfloat16 there.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from xmem.errors import UsageError, unknown
from xmem.operations import OPERATIONS

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
_DEVICES = ("cpu", "cuda")
_FUNCTIONS: Mapping[str, frozenset[str]] = {
    "linear": frozenset({"linear"}),
    "matmul": frozenset({"matmul", "__matmul__", "mm", "bmm", "addmm", "einsum"}),
    "conv": frozenset({"conv1d", "conv2d", "conv3d"}),
    "conv_transpose": frozenset({"conv_transpose1d", "conv_transpose2d", "conv_transpose3d"}),
    "attention": frozenset({"scaled_dot_product_attention", "multi_head_attention_forward"}),
    "gelu": frozenset({"gelu"}),
    "relu": frozenset({"relu", "relu_"}),
    "softmax": frozenset({"softmax", "log_softmax"}),
    "layer_norm": frozenset({"layer_norm"}),
    "batch_norm": frozenset({"batch_norm"}),
    "group_norm": frozenset({"group_norm"}),
}


class Precision:
    """Half precision; see `xmem.protocols.Precision`."""

    gaps: Mapping[str, str] = {}

    def __init__(self, device: str) -> None:
        self._device = device

    def default_dtype(self) -> str:
        """Return bfloat16 where the device computes in it, else float16."""
        if self._device == "cuda" and not torch.cuda.is_bf16_supported():
            return "float16"
        return "bfloat16"

    def autocast(
        self, dtype: str, *, keep_fp32: Sequence[str] = (), enabled: bool = True
    ) -> AbstractContextManager[Any]:
        """Enter torch.autocast with its cache off."""
        if dtype == "auto":
            dtype = self.default_dtype()
        if dtype not in _DTYPES:
            raise UsageError(unknown("dtype", dtype, ("auto", *_DTYPES)))
        for name in keep_fp32:
            if name not in OPERATIONS:
                raise UsageError(unknown("operation in keep_fp32", name, OPERATIONS))
        return self._enter(_DTYPES[dtype], keep_fp32, enabled=enabled)

    @contextmanager
    def _enter(
        self, dtype: torch.dtype, keep_fp32: Sequence[str], *, enabled: bool
    ) -> Iterator[None]:
        kept = frozenset().union(*(_FUNCTIONS[name] for name in keep_fp32))
        with torch.autocast(self._device, dtype=dtype, enabled=enabled, cache_enabled=False):
            if not (kept and enabled):
                yield
                return
            with _KeepFloat32(self._device, kept):
                yield


_modes = threading.local()


def capture() -> Callable[[], AbstractContextManager[Any]] | None:
    """Return what enters the kept operations in force, if any; autocast follows by itself."""
    inner = getattr(_modes, "innermost", None)
    return None if inner is None else inner.again


def in_force() -> Hashable:
    """Return autocast's state here and the operations that are kept in float32."""
    inner = getattr(_modes, "innermost", None)
    devices = [d for d in _DEVICES if torch.is_autocast_enabled(d)]
    return (
        tuple((d, torch.get_autocast_dtype(d)) for d in devices),
        None if inner is None else inner.names,
    )


def again() -> Callable[[], AbstractContextManager[Any]]:
    """Return what enters the precision that is in force now, and recording of gradients."""
    states = [(d, torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in _DEVICES]
    inner = getattr(_modes, "innermost", None)
    key = in_force()

    @contextmanager
    def enter() -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(torch.inference_mode(mode=False))
            stack.enter_context(torch.enable_grad())
            if in_force() != key:
                for device, enabled, dtype in states:
                    if enabled or torch.is_autocast_enabled(device):
                        stack.enter_context(
                            torch.autocast(
                                device, dtype=dtype, enabled=enabled, cache_enabled=False
                            )
                        )
                names = frozenset() if inner is None else inner.names
                if inner is not None or getattr(_modes, "innermost", None) is not None:
                    device = "cpu" if inner is None else inner.device
                    stack.enter_context(_KeepFloat32(device, names))
            yield

    return enter


class _KeepFloat32(TorchFunctionMode):
    """Runs the named functions in float32 inside an autocast region.

    A mode does not see what a function of PyTorch calls inside itself, so multi-head attention is
    one operation here, "attention".
    """

    def __init__(self, device: str, names: frozenset[str]) -> None:
        super().__init__()
        self.device = device
        self.names = names
        self._outer: _KeepFloat32 | None = None

    def again(self) -> _KeepFloat32:
        """Return the same mode anew, for a recomputation."""
        return _KeepFloat32(self.device, self.names)

    def __enter__(self) -> Any:
        self._outer = getattr(_modes, "innermost", None)
        _modes.innermost = self
        return super().__enter__()

    def __exit__(self, *error: object) -> None:
        _modes.innermost = self._outer
        super().__exit__(*error)

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        innermost = getattr(_modes, "innermost", None) is self
        if not innermost or getattr(function, "__name__", "") not in self.names:
            return function(*args, **kwargs)
        with torch.autocast(self.device, enabled=False):
            return function(*map(_float32, args), **{k: _float32(v) for k, v in kwargs.items()})


def _float32(value: Any) -> Any:
    half = isinstance(value, torch.Tensor) and value.dtype in _DTYPES.values()
    return value.float() if half else value
