"""Operations of ours in Jittor's lazy graph: they wait, share memory, copy, or call a function.

They are made by `native/message.cc`. `jt.code` compiles a kernel for every combination of types and
dimensions; of these none is compiled. They have no gradient.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from typing import Any

import jittor as jt

from xmem.errors import UsageError
from xmem_jittor import native

NEW, SHARED, TAKEN = range(3)
"""Where a result lies: in new memory; in that of the first input, with its value; or there if
nothing else reads that any more when it runs, and else in new memory."""

NONE, FIRST, ALL = range(3)
"""Which inputs are read: none; the first one, by the function; all, copied one after another."""

Numbers = ctypes.c_longlong * 7
"""What an operation's function gets."""


def gate(x: Any, *after: Any) -> Any:
    """Return x, without a copy, not before others are computed."""
    return operation([x, *after], x.shape, str(x.dtype), memory=SHARED)[0]


def view(x: Any, shape: Sequence[int], first: int = 0) -> Any:
    """Return a part of x, without a copy: a shape's elements from a number on, of x in a row."""
    if not 0 <= first <= x.numel() - math.prod(shape):
        raise UsageError(
            f"a tensor of {x.numel()} elements has no part of {tuple(shape)} from element {first}"
        )
    offset = first * x.nbytes // max(x.numel(), 1)
    return operation([x], shape, str(x.dtype), memory=SHARED, offset=offset)[0]


def views(flat: Any, like: Sequence[Any]) -> list[Any]:
    """Return parts of a flat tensor in the shapes of others, without a copy."""
    library = native.message()
    found, count = native.addresses(like)
    outputs = (ctypes.c_longlong * max(count, 1))()
    library.xmem_jittor_split(flat.var_ptr, found, count, outputs)
    return _handles(outputs[:count])


def joined(tensors: Sequence[Any]) -> Any:
    """Return tensors of one type one after another, in new memory, (n,)."""
    types = {str(tensor.dtype) for tensor in tensors}
    if len(types) != 1:
        raise UsageError(f"tensors of {', '.join(sorted(types)) or 'no'} type cannot be joined")
    if jt.flags.use_cuda:
        with jt.flag_scope(no_grad=1):
            return jt.concat([tensor.detach().reshape((-1,)) for tensor in tensors])
    count = sum(tensor.numel() for tensor in tensors)
    return operation(tensors, (count,), types.pop(), reads=ALL)[0]


def to_bfloat16(x: Any) -> Any:
    """Return a float32 tensor in bfloat16, rounded to nearest, on a CPU."""
    function = native.address_of(native.message().xmem_jittor_to_bfloat16)
    numbers = Numbers(x.numel())
    return operation([x], x.shape, "bfloat16", function=function, numbers=numbers, reads=FIRST)[0]


def operation(
    inputs: Sequence[Any],
    shape: Sequence[int],
    dtype: str,
    *,
    function: int | None = None,
    numbers: Any = None,
    reads: int = NONE,
    memory: int = NEW,
    handles: int = 0,
    offset: int = 0,
    with_token: bool = False,
) -> list[Any]:
    """Return the outputs of an operation: its result, and a token where one is asked for.

    Args:
        inputs: what it waits for.
        shape: of the result.
        dtype: of the result.
        function: the address of what it calls.
        numbers: what the function gets.
        reads: which inputs are read.
        memory: where the result lies.
        handles: how many handles on the first input do not count as readers.
        offset: where in the first input's memory the result begins, in bytes.
        with_token: make a token.
    """
    library = native.message()
    found, count = native.addresses(inputs)
    outputs = (ctypes.c_longlong * 2)()
    sizes = (ctypes.c_longlong * max(len(shape), 1))(*(shape or (1,)))
    library.xmem_jittor_message(
        function, numbers, found, count, reads, memory, handles, offset, sizes,
        max(len(shape), 1), dtype.encode(), with_token, outputs,
    )  # fmt: skip
    return _handles(outputs[: 1 + with_token])


def _handles(addresses: Sequence[int]) -> list[Any]:
    """Return handles on tensors that have just been made."""
    try:
        return [jt.wrap_var_addr(address) for address in addresses]
    finally:
        native.message().xmem_jittor_message_taken()
