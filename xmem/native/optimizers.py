"""The library of update rules (`optimizers.cc`), compiled on first use; addresses in, nothing out.

Its header comment has the meaning of every argument; `xmem/optim_rules.py` computes them.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import numpy as np

from xmem.native.codec import open_library
from xmem.optim_rules import RULES

NUMBERS = ("beta1", "beta2", "eps", "keep", "l2", "rate", "root")

TASK = np.dtype(
    [
        ("parameter", np.uint64),
        ("gradient", np.uint64),
        ("first", np.uint64),
        ("second", np.uint64),
        ("count", np.int64),
        *((name, np.float64) for name in NUMBERS),
        ("seed", np.uint32),
        ("dtype", np.int32),
        ("bits", np.int32),
        ("flags", np.int32),
    ]
)
"""What `xmem_optim_many` reads of a tensor: the struct `Task`."""


@functools.cache
def load() -> Any:
    """Return the library, its functions declared.

    Raises:
        NativeBuildError: there is no compiler, or it fails.
    """
    library = open_library("optimizers")
    address, integer, count = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64
    seed, number = ctypes.c_uint32, ctypes.c_double
    library.xmem_optim_step.argtypes = [
        integer, address, address, integer, count, address, address, integer, seed, integer,
        *[number] * len(NUMBERS),
    ]  # fmt: skip
    library.xmem_optim_many.argtypes = [integer, address, count]
    library.xmem_optim_adafactor.argtypes = [
        address, address, integer, count, count, address, address, address, integer, seed,
        integer, *[number] * 7,
    ]  # fmt: skip
    for function in (
        library.xmem_optim_step,
        library.xmem_optim_many,
        library.xmem_optim_adafactor,
    ):
        function.restype = None
    return library


def step_many(rule: str, tasks: np.ndarray[Any, Any], count: int) -> None:
    """Step the first tensors of a table of `TASK`."""
    load().xmem_optim_many(RULES.index(rule), tasks.ctypes.data, count)
