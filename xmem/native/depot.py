"""The library of depots (`depot.cc`), compiled on first use. See `xmem.offload.depot`."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import Any

from xmem.native.build import Source, compile_library, find_compiler

FAILED_BEFORE, SHORT, UNKNOWN, OTHER_SIZE, CLOSED = -1, -2, -3, -4, -5
"""What the library returns beside an errno; see `depot.cc`."""


@functools.cache
def load() -> Any:
    """Return the library, its functions declared; calls let go of the interpreter's lock.

    Raises:
        NativeBuildError: there is no compiler, or it fails.
    """
    folder = Path(__file__).parent
    source = Source(
        path=folder / "depot.cc",
        compiler=find_compiler() or "g++",
        arguments=("-O2", "-std=c++17", "-shared", "-fPIC"),
        headers=(folder / "depot_room.h",),
    )
    library = ctypes.CDLL(str(compile_library(source)))
    depot, number, integer = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
    for name, result, arguments in (
        ("open", depot, [integer, number]),
        ("close", None, [depot]),
        ("put", integer, [depot, number, ctypes.c_void_p, number]),
        ("get", integer, [depot, number, ctypes.c_void_p, number]),
        ("drop", None, [depot, number]),
        ("will_need", None, [depot, number]),
        ("has", integer, [depot, number]),
        ("in_memory", integer, [depot]),
        ("map", ctypes.c_void_p, [depot, number]),
        ("unmap", None, [depot, number, ctypes.c_void_p]),
        ("counters", None, [depot, ctypes.POINTER(number)]),
    ):
        function = getattr(library, f"xmem_depot_{name}")
        function.restype, function.argtypes = result, arguments
    return library
