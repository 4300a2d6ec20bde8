"""The C++ part of this backend: compiled on first use against the c10 headers of PyTorch."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import Any

import torch

from xmem.native import Source, compile_library


@functools.cache
def load(compiler: str) -> Any:
    """Return the loaded library.

    Raises:
        NativeBuildError: it does not compile.
    """
    root = Path(torch.__file__).parent
    source = Source(
        path=Path(__file__).with_name("allocator.cpp"),
        compiler=compiler,
        arguments=(
            "-O2",
            "-std=c++20",
            "-shared",
            "-fPIC",
            f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}",
            f"-I{root / 'include'}",
        ),
        link_arguments=(f"-L{root / 'lib'}", "-lc10"),
        version=str(torch.__version__),
    )
    library: Any = ctypes.CDLL(str(compile_library(source)))
    int64 = ctypes.c_int64
    library.xmem_torch_counters.argtypes = [ctypes.POINTER(int64)]
    library.xmem_torch_counters.restype = None
    library.xmem_torch_set_limit.argtypes = [int64]
    library.xmem_torch_set_limit.restype = None
    library.xmem_torch_tag.argtypes = [
        ctypes.POINTER(ctypes.c_uint64),
        int64,
        ctypes.c_int,
        ctypes.POINTER(ctypes.c_uint8),
    ]
    library.xmem_torch_tag.restype = int64
    library.xmem_torch_tag_untagged.argtypes = [ctypes.c_int, ctypes.c_int]
    library.xmem_torch_peak_by_category.argtypes = [ctypes.POINTER(int64)]
    return library
