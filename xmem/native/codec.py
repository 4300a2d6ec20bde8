"""The codec's library (`codec.cc`), compiled on first use for this machine's processor.

Its loops run on the OpenMP threads of whichever framework is loaded: the library names OpenMP's
functions without linking to one, and finds those that the process has already, so that a
framework's own number of threads holds.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import platform
from pathlib import Path
from typing import Any

from xmem.codec import DTYPES, STYLES
from xmem.native.build import Source, compile_library, find_compiler

_FOLDER = Path(__file__).parent
HEADERS = (_FOLDER / "codec.h",)
ARGUMENTS = (
    "-O3",
    "-std=c++17",
    "-shared",
    "-fPIC",
    "-march=native",
    "-mprefer-vector-width=512",
    # Every implementation rounds alike.
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fopenmp",
    "-nostdlib",
    "-Wno-unknown-pragmas",
)
_LINKED = ("-lc", "-lm", "-lgcc")


def open_library(name: str) -> Any:
    """Return a library of loops on threads, compiled for this machine's processor.

    Raises:
        NativeBuildError: there is no compiler, or it fails.
    """
    source = Source(
        path=_FOLDER / f"{name}.cc",
        headers=HEADERS,
        compiler=find_compiler() or "g++",
        arguments=ARGUMENTS,
        link_arguments=_LINKED,
        version=_processor(),
    )
    path = str(compile_library(source))
    if not hasattr(ctypes.CDLL(None), "GOMP_parallel"):
        ctypes.CDLL("libgomp.so.1", mode=ctypes.RTLD_GLOBAL)
    # Plain CDLL: calls let go of the interpreter's lock.
    return ctypes.CDLL(path)


def _processor() -> str:
    """Tell processors apart that run different instructions: the cache folder may be shared."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.machine() + platform.processor()
    told = [line for line in lines if line.startswith(("flags", "Features", "model name"))][:2]
    return hashlib.sha256("".join(told).encode()).hexdigest()


@functools.cache
def load() -> Any:
    """Return the codec's library, its functions declared.

    Raises:
        NativeBuildError: there is no compiler, or it fails.
    """
    library = open_library("codec")
    address, integer, count = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64
    library.xmem_codec_pack.argtypes = [
        address, integer, count, integer, integer, ctypes.c_uint32, address,
    ]  # fmt: skip
    library.xmem_codec_pack.restype = None
    library.xmem_codec_unpack.argtypes = [address, count, integer, integer, address]
    library.xmem_codec_unpack.restype = None
    return library


def pack(
    values: int, dtype: str, count: int, bits: int, seed: int, packed: int, style: str = "signs"
) -> None:
    """Pack memory into memory; both are addresses. See `xmem.codec.pack`."""
    load().xmem_codec_pack(
        values, DTYPES.index(dtype), count, bits, STYLES.index(style), seed & 0xFFFFFFFF, packed
    )


def unpack(packed: int, count: int, bits: int, dtype: str, values: int) -> None:
    """Unpack memory into memory; both are addresses. See `xmem.codec.unpack`."""
    load().xmem_codec_unpack(packed, count, bits, DTYPES.index(dtype), values)
