"""Mixed precision on PyTorch: torch.autocast (2.13), and a mode for what it leaves in half.

The weight-cast cache is off: it holds a half copy of every weight until the block ends, breaks
budgets under checkpointing, and its absence costs nothing measurable (160 against 162 ms).
float16 on a CPU runs 12 times slower than float32; "auto" is bfloat16 there. Autocast on a CPU
leaves softmax and normalisations in half, where CUDA's does not; `operations.py` makes both alike.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch.overrides import _get_current_function_mode_stack

from xmem.casting import Casting, current
from xmem.casting import in_force as casting_in_force
from xmem.deferred import settled
from xmem.errors import UsageError, unknown
from xmem.records import Cast
from xmem_torch.cast import cast_model
from xmem_torch.operations import Operations, raised
from xmem_torch.scaling import Scaler

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
_DEVICES = ("cpu", "cuda")


class Precision:
    """Half precision; see `xmem.protocols.Precision`."""

    gaps: Mapping[str, str] = {}

    def __init__(self, device: str) -> None:
        self._device = device

    def check_dtype(self, dtype: str) -> str:
        """bfloat16 where the device computes in it, else float16."""
        if dtype == "auto":
            without = self._device == "cuda" and not torch.cuda.is_bf16_supported()
            return "float16" if without else "bfloat16"
        if dtype not in _DTYPES:
            raise UsageError(unknown("dtype", dtype, ("auto", *_DTYPES)))
        return dtype

    @contextmanager
    def autocast(self, casting: Casting) -> Iterator[None]:
        """Enter torch.autocast with its cache off, and the mode."""
        half = _DTYPES.get(casting.dtype)
        with (
            torch.autocast(self._device, half, enabled=casting.enabled, cache_enabled=False),
            entered(casting),
        ):
            yield

    def raised(self, value: Any) -> Any:
        """Tensors in lists too; what a block of a segment will return is read."""
        return raised(settled(value))

    def make_scaler(
        self,
        *,
        init_scale: float,
        growth_factor: float,
        backoff_factor: float,
        growth_interval: int,
        enabled: bool,
    ) -> Scaler:
        """torch.amp.GradScaler for the device."""
        return Scaler(
            self._device,
            init_scale=init_scale,
            growth_factor=growth_factor,
            backoff_factor=backoff_factor,
            growth_interval=growth_interval,
            enabled=enabled,
        )

    def cast_model(self, model: Any, dtype: str, optimizer: Any) -> Cast:
        """Change `data`, so that parameters stay the same objects; see `cast.py`."""
        return cast_model(model, _DTYPES[dtype], optimizer)


@contextmanager
def entered(casting: Casting | None) -> Iterator[None]:
    """Put a casting in force in this thread; one mode is enough, which asks for it."""
    with ExitStack() as stack:
        stack.enter_context(casting_in_force(casting))
        modes = _get_current_function_mode_stack()
        if casting is not None and not any(isinstance(mode, Operations) for mode in modes):
            stack.enter_context(Operations())
        yield


def capture() -> Casting | None:
    """Return the casting in force as recomputations enter it; autocast follows by itself."""
    casting = current()
    return None if casting is None else casting.again()


def in_force() -> Hashable:
    """Return autocast's state here and what tells castings apart."""
    casting = current()
    devices = [d for d in _DEVICES if torch.is_autocast_enabled(d)]
    return (
        tuple((d, torch.get_autocast_dtype(d)) for d in devices),
        None if casting is None else casting.key,
    )


def again() -> Callable[[], AbstractContextManager[Any]]:
    """Return what enters the precision that is in force now, and recording of gradients."""
    states = [(d, torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in _DEVICES]
    casting = current()
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
            if current() is not casting:
                stack.enter_context(entered(casting))
            yield

    return enter
