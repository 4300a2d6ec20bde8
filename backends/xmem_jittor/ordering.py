"""Edges in Jittor's lazy graph that carry no data, and notes of bytes while it runs.

Jittor runs operations in the order in which they were made, as far as their inputs are there, and
fuses those that can be. What must wait for something reads it, in an operation that does nothing.
Operations at the end of control edges of Jittor's own (`_add_dependency`) are pulled into fused
kernels, which do not compile then.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import jittor as jt

_NOTHING = "(void)0;"
_NOTE = '((void (*)(long long))(size_t)data["note"])((long long)data["which"]);'


def after(var: Any, other: Any) -> Any:
    """Return a tensor, in the same memory, that is there when another one is."""
    with jt.flag_scope(no_grad=1):  # or the other one would live as long as gradients of this may
        var = var.detach()  # or jt.grad would take it off its graph
        return jt.code(
            inputs=[var, other.detach()],
            outputs=[_handle(var)],
            cpu_src=_NOTHING,
            cuda_src=_NOTHING,
        )[0]


def after_all(var: Any, others: Sequence[Any]) -> Any:
    """Return a tensor, in the same memory, that is there when all others are."""
    if not others:
        return var
    with jt.flag_scope(no_grad=1):
        found = var.detach().reshape((-1,))
        for other in others:
            found = after(found, other.reshape((-1,)))  # flat: one kernel for all shapes
        return found.reshape(var.shape)


def noting(var: Any, note: int, which: int, *others: Any) -> Any:
    """Return a tensor in the same memory; an operation makes a note when it is reached.

    Args:
        var: the tensor.
        note: the address of a function that takes a number (`native.address_of`).
        which: the number.
        others: tensors that are waited for, too.
    """
    with jt.flag_scope(no_grad=1):
        [noted] = jt.code(
            inputs=[var, *others],
            outputs=[_handle(var)],
            data={"note": note, "which": which},
            cpu_src=_NOTE,
            cuda_src=f"cudaDeviceSynchronize(); {_NOTE}",
        )
        return noted.stop_fuse()


def calling(before: Any, source: str, data: Mapping[str, int], *tensors: Any) -> Any:
    """Return a tensor in the memory of another one; an operation runs C++ when it is reached.

    Args:
        before: the other one, `in0` in the source.
        source: what is run.
        data: numbers that the source reads, e.g. addresses of functions (`native.address_of`).
        tensors: `in1` and so on.
    """
    with jt.flag_scope(no_grad=1):
        return jt.code(
            inputs=[before, *tensors],
            outputs=[_handle(before)],
            data=dict(data),
            cpu_src=source,
            cuda_src=source,
        )[0].stop_fuse()


def _handle(var: Any) -> Any:
    """Return a handle that `jt.code` may give another tensor: it assigns to its outputs."""
    return jt.wrap_var_addr(var.var_ptr)


@lru_cache(maxsize=1)
def anchor() -> Any:
    """Return a tensor that is there; operations that only do something share its memory."""
    return jt.zeros((1,), dtype="int32").sync()
