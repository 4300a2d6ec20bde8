"""Libraries that several processes need: messages in the graph, and MPI."""

from __future__ import annotations

import ctypes
import shlex
import subprocess
from functools import lru_cache

import jittor as jt

from xmem.native import Source, compile_library
from xmem_jittor.native.loading import FOLDER, Numbers, load


@lru_cache(maxsize=1)
def message() -> ctypes.PyDLL:
    """Return the library of `message.cc`, its functions declared."""
    library = load("message", ["mpi_reduce"])
    number, many, integer = ctypes.c_longlong, Numbers, ctypes.c_int
    library.xmem_jittor_message.argtypes = [
        ctypes.c_void_p, many, many, integer, integer, integer, integer, number, many, integer,
        ctypes.c_char_p, integer, many,
    ]  # fmt: skip
    library.xmem_jittor_split.argtypes = [number, many, integer, many]
    library.xmem_jittor_message.restype = library.xmem_jittor_split.restype = None
    library.xmem_jittor_message_taken.restype = None
    return library


_MPI_HEADERS = ("mpi_calls", "mpi_pairs", "mpi_reduce", "mpi_roll", "mpi_state", "mpi_together")


@lru_cache(maxsize=1)
def mpi() -> ctypes.PyDLL:
    """Return the library of `mpi.cc`, its functions declared; inside mpirun only."""
    wrapper = jt.compile_extern.mpicc_path
    source = Source(
        path=FOLDER / "mpi.cc",
        headers=tuple(FOLDER / f"{name}.h" for name in _MPI_HEADERS),
        compiler=jt.compiler.cc_path,
        arguments=(
            "-std=c++17", "-O3", "-fPIC", "-shared", "-DOMPI_SKIP_MPICXX",
            *_shown(wrapper, "compile"),
        ),
        link_arguments=_shown(wrapper, "link"),
    )  # fmt: skip
    library = ctypes.PyDLL(str(compile_library(source)))
    number, many, integer = ctypes.c_longlong, Numbers, ctypes.c_int
    library.xmem_mpi_start.argtypes = [ctypes.c_double, number, many]
    library.xmem_mpi_watch.argtypes = [ctypes.c_void_p]
    library.xmem_mpi_exchange.argtypes = [
        ctypes.c_char_p, number, ctypes.c_char_p, many, number,
    ]  # fmt: skip
    library.xmem_mpi_failure.argtypes = [many, many, integer, ctypes.c_char_p, integer]
    library.xmem_mpi_interruption.restype = ctypes.py_object
    library.xmem_mpi_spent.restype = ctypes.c_double
    for name in ("watch", "run", "stop", "abort"):
        getattr(library, f"xmem_mpi_{name}").restype = None
    return library


def _shown(wrapper: str, what: str) -> tuple[str, ...]:
    """Return the arguments that MPI's compiler wrapper adds."""
    ran = subprocess.run(
        [*shlex.split(wrapper), f"--showme:{what}"], capture_output=True, text=True, check=True
    )
    return tuple(shlex.split(ran.stdout))
