"""The C++ part of this backend: compiled on first use against the c10 headers of PyTorch."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import Any

import torch

from xmem.errors import MeasurementError
from xmem.native import Source, compile_library
from xmem.records import CATEGORIES

COUNTERS = 12
"""How many numbers `xmem_torch_counters` writes."""
HISTORY = 4096
"""How many points `xmem_torch_history` writes at most."""
LARGEST = 256
"""How many blocks a refusal has at most."""

ON_OOM = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64)


class Row(ctypes.Structure):
    """A block; see state.h."""

    _fields_ = tuple(
        (name, ctypes.c_int64)
        for name in ("segment", "address", "size", "bytes", "category", "birth")
    )


class Point(ctypes.Structure):
    """A moment; see history.h."""

    _fields_ = tuple((name, ctypes.c_int64) for name in ("event", "allocated", "reserved"))


class Refusal(ctypes.Structure):
    """A refused request; see state.h."""

    _fields_ = (
        *(
            (name, ctypes.c_int64)
            for name in (
                "requested",
                "allocated",
                "reserved",
                "limit",
                "largest_free",
                "birth",
                "in_backward",
                "count",
            )
        ),
        ("by_category", ctypes.c_int64 * len(CATEGORIES)),
        ("largest", Row * LARGEST),
    )


@functools.cache
def load(compiler: str) -> Any:
    """Return the loaded library.

    Raises:
        NativeBuildError: it does not compile.
    """
    root = Path(torch.__file__).parent
    here = Path(__file__).parent
    source = Source(
        path=here / "allocator.cpp",
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
        headers=tuple(sorted(here.glob("*.h"))),
    )
    library: Any = ctypes.CDLL(str(compile_library(source)))
    int32, int64 = ctypes.c_int, ctypes.c_int64
    pointer = ctypes.POINTER
    signatures: dict[str, tuple[Any, tuple[Any, ...]]] = {
        "install": (int32, ()),
        "displaced": (int32, ()),
        "uninstall": (int32, ()),
        "counters": (None, (pointer(int64),)),
        "reset_peak": (None, ()),
        "set_limit": (None, (int64,)),
        "configure": (None, (int32, *(int64,) * 6, int32)),
        "trim": (int64, ()),
        "preallocate": (int64, (int64,)),
        "blocks": (int64, (pointer(Row), int64)),
        "history": (int32, (pointer(Point),)),
        "refusal": (int64, (pointer(Refusal),)),
        "serial": (int64, ()),
        "set_on_oom": (None, (ctypes.c_void_p,)),
        "set_note": (None, (ctypes.c_char_p,)),
        "set_graph_task": (None, (ctypes.c_void_p,)),
        "check": (int32, ()),
        "tag": (int64, (pointer(ctypes.c_uint64), int64, int32, pointer(ctypes.c_uint8))),
        "tag_untagged": (None, (int32, int32)),
        "peak_by_category": (None, (pointer(int64),)),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(library, f"xmem_torch_{name}")
        function.restype, function.argtypes = result, arguments
    return library


_NO_LIMIT = -1
_MOST = 2**63 - 1


def number(size_bytes: int | None) -> int:
    """Return a size as the library takes it: none is -1. ctypes would cut off what is too large."""
    return _NO_LIMIT if size_bytes is None else min(size_bytes, _MOST)


def size_or_none(found: int) -> int | None:
    """Return a size that the library tells."""
    return None if found == _NO_LIMIT else found


def install(library: Any) -> None:
    """Let PyTorch take memory from our allocator.

    Raises:
        MeasurementError: another one has been set, with a higher priority.
    """
    if library.xmem_torch_install() < 0:
        raise MeasurementError(
            "another allocator has taken PyTorch's CPU memory with a higher priority than xmem's"
            " (c10::SetCPUAllocator, 100), so nothing can be counted or limited. Do not load what"
            " sets it"
        )


def graph_task_probe() -> int | None:
    """Return the address of what says which backward a thread runs, or None.

    `torch::autograd::get_current_graph_task_id` is exported, and not in c10.
    """
    path = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    try:
        function = ctypes.CDLL(str(path))["_ZN5torch8autograd25get_current_graph_task_idEv"]
    except (OSError, AttributeError):
        return None
    return ctypes.cast(function, ctypes.c_void_p).value
