"""The solver in C++ (`xmem/native/planner.cc`), compiled on first use, and when to use it."""

from __future__ import annotations

import ctypes
import functools
import itertools
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from xmem import native
from xmem.errors import NativeBuildError, UsageError, XmemWarning, unknown
from xmem.native.build import find_compiler
from xmem.planner.fronts import Engine, Front, PythonEngine
from xmem.planner.problem import Problem
from xmem.planner.schedule import Code, Op

KERNELS = ("auto", "native")

_CODES: tuple[Code, ...] = ("N", "G", "L", "B", "Da")
_SMALL = 40
"""Up to so many stages of one option plain Python needs 0.1 s, and compiling some seconds, once."""


def open_engine(problem: Problem, kernel: str | None) -> Engine:
    """Return what solves a problem.

    Args:
        problem: the stages and the budget.
        kernel: "native": C++; None: plain Python; "auto": C++ if it is loaded or if the chain is
            long, and Python where there is no compiler. The plans are the same.

    Raises:
        NativeBuildError: C++ was asked for, and does not compile.
        UsageError: there is no such kernel.
    """
    if kernel is None:
        return PythonEngine(problem)
    if kernel not in KERNELS:
        raise UsageError(unknown("kernel", kernel, KERNELS) + " Or None: plain Python.")
    fronts = problem.n * problem.n * max(map(len, problem.options))
    small = fronts <= _SMALL * _SMALL and not load.cache_info().currsize
    if kernel == "auto" and (small or not _compiles()):
        return PythonEngine(problem)
    return NativeEngine(problem)


@functools.cache
def _compiles() -> bool:
    try:
        load()
    except NativeBuildError as error:
        warnings.warn(
            f"the planner runs in plain Python, about 50 times slower: {error}",
            XmemWarning,
            stacklevel=5,
        )
        return False
    return True


@functools.cache
def load() -> Any:
    """Return the loaded library.

    Raises:
        NativeBuildError: there is no compiler, or it fails.
    """
    folder = Path(native.__file__).parent
    source = native.Source(
        path=folder / "planner.cc",
        headers=tuple(folder / f"planner_{part}.h" for part in ("problem", "bands", "fronts")),
        compiler=find_compiler() or "g++",
        # No -march: the cache may be shared by machines. No contraction: it rounds otherwise
        # than Python, and both must return the same plan.
        arguments=("-O3", "-std=c++17", "-shared", "-fPIC", "-ffp-contract=off"),
    )
    library: Any = ctypes.CDLL(str(native.compile_library(source)))
    pointer, size, real, number = ctypes.c_void_p, ctypes.c_int64, ctypes.c_double, ctypes.c_int
    signatures: dict[str, tuple[Any, tuple[Any, ...]]] = {
        "open": (pointer, (number, size, number, *[pointer] * 11)),
        "close": (None, (pointer,)),
        "least_excess": (real, (pointer,)),
        "least_bytes": (size, (pointer,)),
        "solve": (real, (pointer, real, real, size, pointer)),
        "front": (size, (pointer, pointer, pointer)),
        "ops": (size, (pointer, pointer)),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(library, f"xmem_planner_{name}")
        function.restype, function.argtypes = result, arguments
    return library


class NativeEngine:
    """See `Engine`. The C++ side is freed with this object."""

    patience = 2

    def __init__(self, problem: Problem) -> None:
        self._library = load()
        choices = list(itertools.chain(*problem.options))
        starts = [0, *itertools.accumulate(map(len, problem.options))]
        abar, tf, tb, f, excess = zip(*choices, strict=True)
        self._handle = self._library.xmem_planner_open(
            problem.n,
            problem.cap,
            problem.keeps,
            _array(ctypes.c_int64, problem.a),
            _array(ctypes.c_int64, problem.tng),
            _array(ctypes.c_double, problem.fng),
            _array(ctypes.c_int32, starts),
            *(_array(ctypes.c_int64, row) for row in (abar, tf, tb)),
            *(_array(ctypes.c_double, row) for row in (f, excess)),
            *(_array(ctypes.c_int64, row) for row in (problem.before_loss, problem.after_loss)),
        )
        if not self._handle:
            raise MemoryError("the planner")

    def __del__(self) -> None:
        if getattr(self, "_handle", None):
            self._library.xmem_planner_close(self._handle)

    def least_excess(self) -> float:
        """See `Engine`."""
        return float(self._library.xmem_planner_least_excess(self._handle))

    def least_bytes(self) -> int:
        """See `Engine`."""
        return int(_given(self._library.xmem_planner_least_bytes(self._handle)))

    def solve(self, most: float, *, thinning: float, whole: int) -> tuple[float, bool]:
        """See `Engine`."""
        thinned = ctypes.c_int32()
        least = self._library.xmem_planner_solve(
            self._handle, most, thinning, whole, ctypes.byref(thinned)
        )
        return float(_given(least)), bool(thinned.value)

    def front(self) -> Front:
        """See `Engine`."""
        read = self._library.xmem_planner_front
        count = read(self._handle, None, None)
        sizes, excess = (ctypes.c_int64 * count)(), (ctypes.c_double * count)()
        read(self._handle, sizes, excess)
        return list(sizes), list(excess)

    def ops(self) -> list[Op]:
        """See `Engine`."""
        read = self._library.xmem_planner_ops
        numbers = (ctypes.c_int32 * (3 * read(self._handle, None)))()
        read(self._handle, numbers)
        rows = zip(numbers[0::3], numbers[1::3], numbers[2::3], strict=True)
        return [Op(_CODES[code], index, option) for code, index, option in rows]


def _array(kind: Any, values: Sequence[float]) -> Any:
    return (kind * len(values))(*values)


def _given(value: Any) -> Any:
    if value < 0:
        raise MemoryError("the planner")
    return value
