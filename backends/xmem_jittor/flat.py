"""Tensors one after another in one buffer, copied by operations that compile once.

`jt.concat` of Jittor 1.3.11 makes a kernel for each number of tensors and set of shapes, and holds
all of them until the last is copied. Here each copy is an operation of its own: its place is data,
and the tensor's memory is free when it has run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jittor as jt

from xmem.distributed.counting import hold, release

_INTO = """
    #ifdef JIT_cuda
    cudaMemcpyAsync((char*){out} + (long long)data["at"], {value}->mem_ptr, {value}->size,
                    cudaMemcpyDeviceToDevice, 0);
    #else
    memcpy((char*){out} + (long long)data["at"], {value}->mem_ptr, {value}->size);
    #endif
"""
_FIRST = _INTO.format(out="out0->mem_ptr", value="in0")
_MORE = _INTO.format(out="in0->mem_ptr", value="in1")


def flattened(tensors: Sequence[Any]) -> Any:
    """Return tensors of one type one after another in a new one, (n,); no gradient flows."""
    count = sum(tensor.numel() for tensor in tensors)
    flat, at = None, 0
    with jt.flag_scope(no_grad=1):
        for tensor in tensors:
            value, data = tensor.detach().reshape((-1,)), {"at": at}
            if flat is None:
                flat = _code((count,), str(tensor.dtype), [value], _FIRST, data)
            else:
                flat = _in_place(flat, value, data)
            at += tensor.nbytes
    return flat


def count_buffer(size_bytes: int) -> None:
    """Count a buffer's bytes; executed, it is gone before the next one is made."""
    hold(size_bytes)
    release(size_bytes)


def _code(
    shape: Sequence[int], dtype: str, inputs: list[Any], source: str, data: dict[str, int]
) -> Any:
    return (
        jt.code(shape, dtype, inputs, data=data, cpu_src=source, cuda_src=source)
        .stop_fuse()
        .stop_grad()
    )


def _in_place(flat: Any, value: Any, data: dict[str, int]) -> Any:
    [found] = jt.code(
        inputs=[flat, value],
        outputs=[jt.wrap_var_addr(flat.var_ptr)],
        data=data,
        cpu_src=_MORE,
        cuda_src=_MORE,
    )
    return found.stop_fuse().stop_grad()
