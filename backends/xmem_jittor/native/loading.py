"""Compiling and loading: with Jittor's own compiler and flags, beside Jittor's core."""

from __future__ import annotations

import ctypes
import shlex
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jittor as jt

from xmem.native import Source, compile_library

FOLDER = Path(__file__).parent
Numbers = ctypes.POINTER(ctypes.c_longlong)


def load(name: str, headers: Iterable[str] = ()) -> ctypes.PyDLL:
    """Return the library of a source file of this folder and its headers here."""
    source = Source(
        path=FOLDER / f"{name}.cc",
        headers=tuple(FOLDER / f"{header}.h" for header in headers),
        compiler=jt.compiler.cc_path,
        arguments=_arguments(),
        version=jt.__version__,
    )
    # PyDLL keeps the interpreter's lock: Jittor's graph belongs to whoever holds it.
    return ctypes.PyDLL(str(compile_library(source)))


def _arguments() -> tuple[str, ...]:
    flags = shlex.split(jt.compiler.cc_flags + jt.compiler.opt_flags)
    # Libraries: the core is loaded already and the compiler adds its own. The machine's own
    # instructions gain nothing here, and a cache folder may be shared among machines.
    left_out = ("-l", "-L", "-march=", "-fdiagnostics-color")
    return tuple(flag for flag in flags if not flag.startswith(left_out))


def address_of(function: Any) -> int:
    """Return the address of a function of a library, for operations to call it.

    It goes to them through `data`, so one kernel serves all processes.
    """
    return int(ctypes.cast(function, ctypes.c_void_p).value or 0)


def addresses(tensors: Iterable[Any]) -> tuple[Any, int]:
    """Return the addresses of tensors as a C array, with its length."""
    found = [tensor.var_ptr for tensor in tensors]
    return (ctypes.c_longlong * max(len(found), 1))(*found), len(found)
