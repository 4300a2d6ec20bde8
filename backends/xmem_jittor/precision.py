"""Half precision on Jittor 1.3.11: operations of `jittor.nn` replaced inside a `with` block.

Paulius Micikevicius et al., "Mixed Precision Training", ICLR 2018: compute in half, keep masters in
float32. Jittor's own levels (`auto_mixed_precision_level`) do not serve: 1 to 3 change nothing, and
4 to 6 fail on a CPU with oneDNN, whose matmul takes float32 only.

What an operation here keeps for backward is its input in half; the operation itself runs in float32
on a CPU (numbers rounded to half are multiplied by oneDNN, which has no half arithmetic there)
and in half on CUDA. Backward builds the operation again on what was kept and differentiates that;
of matmul and convolution only the gradients run then, since nothing reads their output.
Normalisations and losses run in float32. Parameters and their gradients stay float32.

Replaced are attributes of `jittor.nn`, `jittor.pool` and classes in them, so a function that user
code has imported by name (`from jittor.nn import relu`) is not. Outside of a block nothing is
replaced, and a recomputed region enters the block again that it was first run in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from xmem.errors import CapabilityError, UsageError, unknown
from xmem.operations import OPERATIONS
from xmem_jittor.operations import replacements
from xmem_jittor.regions import Region, in_force, switched

_BFLOAT16 = (
    "matmul and convolution in bfloat16 are off by 0.12 to 0.24 on a CPU in Jittor 1.3.11, which"
    " adds up in bfloat16. Use 'float16', or another backend."
)
# What a name of `xmem.operations` means where Jittor has no operation of its own for it.
_PARTS = {"attention": ("matmul", "softmax")}


_entered_regions = 0
_undo: list[tuple[Any, str, Any]] = []


class Precision:
    """Compute in half precision; see `xmem.protocols.Precision`."""

    def __init__(self) -> None:
        self.gaps: Mapping[str, str] = {"bfloat16": _BFLOAT16}

    def default_dtype(self) -> str:
        """Return float16, the only half type."""
        return "float16"

    def autocast(
        self, dtype: str, *, keep_fp32: Sequence[str] = (), enabled: bool = True
    ) -> AbstractContextManager[Any]:
        """Replace operations inside a block; gradients may be asked for after it."""
        if dtype == "auto":
            dtype = self.default_dtype()
        if dtype == "bfloat16":
            raise CapabilityError(f"Jittor offers no bfloat16: {_BFLOAT16}")
        if dtype != "float16":
            raise UsageError(unknown("dtype", dtype, ("auto", "bfloat16", "float16")))
        for name in keep_fp32:
            if name not in OPERATIONS:
                raise UsageError(unknown("operation in keep_fp32", name, OPERATIONS))
        kept = frozenset(part for name in keep_fp32 for part in _PARTS.get(name, (name,)))
        return _entered(Region(dtype, kept) if enabled else None)


def capture() -> Callable[[], AbstractContextManager[None]]:
    """Return what enters the precision that is in force now."""
    region = in_force()

    def again() -> AbstractContextManager[None]:
        return _entered(region)

    return again


@contextmanager
def _entered(region: Region | None) -> Iterator[None]:
    global _entered_regions
    if region is None:
        with switched(None):
            yield
        return
    if _entered_regions == 0:
        _replace()
    _entered_regions += 1
    try:
        with switched(region):
            yield
    finally:
        _entered_regions -= 1
        if _entered_regions == 0:
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
