"""Half precision on Jittor 1.3.11: operations of `jittor.nn` replaced inside a `with` block.

Paulius Micikevicius et al., "Mixed Precision Training", ICLR 2018: compute in half, keep masters in
float32. Jittor's own levels (`auto_mixed_precision_level`) do not serve: 1 to 3 change nothing, and
4 to 6 fail on a CPU with oneDNN, whose matmul takes float32 only, and lose small gradients.

What an operation here keeps for backward is its input in half, once for all that keep the same;
the operation itself runs in float32 on a CPU (oneDNN has no half arithmetic there) and in half on
CUDA. Backward builds the operation again on what was kept and differentiates that; of matmul and
convolution only the gradients run then, since nothing reads their output. Where the output tells
the derivative (ReLU, softmax), it is kept instead, since the next operation keeps it anyway.
Weights are not kept, for they live anyway: on CUDA they are rounded whenever they are used, on a
CPU they are used as they are. Softmax, normalisations and losses compute in float32 and keep in
half what comes in half. What leaves half's range, as sums and powers do, is given in float32.
Parameters and their gradients stay float32, and on a CPU all gradients do.

Replaced are attributes of `jittor`, `jittor.nn`, `jittor.attention`, `jittor.pool` and classes in
them, so a function that user code has imported by name (`from jittor.nn import relu`) is not.
Replaced they are as long as any thread is in a block, but act in that thread only; outside of
blocks nothing is, and a recomputed region enters the block again that it was first run in.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

from xmem.casting import Casting, current, in_force
from xmem.errors import CapabilityError, UsageError, unknown
from xmem_jittor import regions
from xmem_jittor.operations import replacements

if TYPE_CHECKING:
    from xmem.protocols import Scaler
    from xmem.records import Cast

_BFLOAT16 = (
    "matmul and convolution in bfloat16 are off by 0.12 to 0.24 on a CPU in Jittor 1.3.11, which"
    " adds up in bfloat16. Use 'float16', or another backend."
)


class Precision:
    """Compute in half precision; see `xmem.protocols.Precision`."""

    def __init__(self) -> None:
        self.gaps: Mapping[str, str] = {"bfloat16": _BFLOAT16}

    def check_dtype(self, dtype: str) -> str:
        """Return float16, the only half type."""
        if dtype == "bfloat16":
            raise CapabilityError(f"Jittor offers no bfloat16: {_BFLOAT16}")
        if dtype not in ("auto", "float16"):
            raise UsageError(unknown("dtype", dtype, ("auto", "bfloat16", "float16")))
        return "float16"

    def autocast(self, casting: Casting) -> AbstractContextManager[Any]:
        """Replace operations inside a block; gradients may be asked for after it."""
        return _entered(casting)

    def raised(self, value: Any) -> Any:
        """Return a half tensor in float32, and its gradient too on a CPU."""
        return regions.raised(value)

    def make_scaler(
        self,
        *,
        init_scale: float,
        growth_factor: float,
        backoff_factor: float,
        growth_interval: int,
        enabled: bool,
    ) -> Scaler:
        """Return one that works on the optimizer's gradients."""
        from xmem_jittor import scaling

        scaler: Scaler = scaling.Scaler(
            init_scale=init_scale,
            growth_factor=growth_factor,
            backoff_factor=backoff_factor,
            growth_interval=growth_interval,
            enabled=enabled,
        )
        return scaler

    def cast_model(self, model: Any, dtype: str, optimizer: Any) -> Cast:
        """Cast a model; see `masters.py`."""
        from xmem_jittor import masters

        cast: Cast = masters.cast_model(model, dtype, optimizer)
        return cast


def capture() -> Callable[[], AbstractContextManager[None]]:
    """Return what enters the precision that is in force now."""
    casting = current()

    def again() -> AbstractContextManager[None]:
        return in_force(None) if casting is None else _entered(casting.again())

    return again


_lock = threading.Lock()
_entered_blocks = 0
_undo: list[tuple[Any, str, Any]] = []


@contextmanager
def _entered(casting: Casting) -> Iterator[None]:
    global _entered_blocks
    with _lock:
        if not _entered_blocks:
            _replace()
        _entered_blocks += 1
    try:
        with in_force(casting):
            yield
    finally:
        with _lock:
            _entered_blocks -= 1
            if not _entered_blocks:
                _restore()


def _replace() -> None:
    try:
        for operation, owner, name, make in replacements():
            original = owner.__dict__[name]
            _undo.append((owner, name, original))
            setattr(owner, name, make(operation, original))
    except BaseException:
        _restore()
        raise


def _restore() -> None:
    while _undo:
        owner, name, original = _undo.pop()
        setattr(owner, name, original)
