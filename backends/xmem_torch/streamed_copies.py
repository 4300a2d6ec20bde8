"""Bytes between storages and a depot, and storages that refuse to be read (PyTorch 2.13).

Memory comes and goes by an exchange of what two storages hold (`native/away.cpp`), so that
parameters, their views and what autograd saved of them stay the objects that they are, with their
counters of versions. Not by `storage.resize_`: it takes memory from the allocator of the storage's
birth, which nothing may count, and an empty storage is read at address 0. Not by `.data`: what
autograd has saved would keep the memory.

On CUDA bytes go through pinned memory on a stream of their own; no test has run that.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import Any

import torch

from xmem.native.build import Source, compile_library, find_compiler
from xmem.offload.depot import Depot

_WORDS = (
    b"this parameter is away (xmem.offload_parameters): it is on the device only while its layer"
    b" runs. state_dict() gives its values; undo() of the receipt brings it back"
)


@functools.cache
def load() -> Any:
    """Return the library.

    Raises:
        NativeBuildError: there is no compiler, or it fails.
    """
    root = Path(torch.__file__).parent
    source = Source(
        path=Path(__file__).parent / "native" / "away.cpp",
        compiler=find_compiler() or "g++",
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
    library.xmem_torch_refuse_access.argtypes = [ctypes.c_void_p, ctypes.c_char_p]
    library.xmem_torch_exchange.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    for function in (library.xmem_torch_refuse_access, library.xmem_torch_exchange):
        function.restype = None
    return library


def emptied(storage: Any) -> Any:
    """Take a storage's memory away, and return it as another; readers are told from now on."""
    out = torch.UntypedStorage(0, device=storage.device)
    load().xmem_torch_exchange(storage._cdata, out._cdata)
    load().xmem_torch_refuse_access(storage._cdata, _WORDS)
    return out


def fill(storage: Any, source: Any) -> None:
    """Give an emptied storage the memory of another one, which is left empty."""
    load().xmem_torch_exchange(storage._cdata, source._cdata)


def store(storage: Any, depot: Depot, number: int) -> None:
    """Write a storage's bytes to a depot.

    Raises:
        OffloadError: there is no room, or writing fails.
    """
    if storage.device.type == "cpu":
        depot.put(number, storage.data_ptr(), storage.nbytes())
        return
    staging = _pinned(storage.nbytes())
    _copy(staging, _flat(storage))
    depot.put(number, staging.data_ptr(), staging.nbytes)


def filled(nbytes: int, device: Any, depot: Depot, number: int) -> Any:
    """Return a new storage with bytes from a depot.

    Raises:
        OffloadError: reading fails.
    """
    made = _new(nbytes, device)
    if made.device.type == "cpu":
        depot.get(number, made.data_ptr(), nbytes)
        return made
    staging = _pinned(nbytes)
    depot.get(number, staging.data_ptr(), nbytes)
    _copy(_flat(made), staging)
    return made


def copied(storage: Any) -> Any:
    """Return a new storage with the same bytes."""
    made = _new(storage.nbytes(), storage.device)
    _flat(made).copy_(_flat(storage))
    return made


def _new(nbytes: int, device: Any) -> Any:
    """Return a storage from the allocator that counts; `UntypedStorage` asks PyTorch's own."""
    return torch.empty(nbytes, dtype=torch.uint8, device=device).untyped_storage()


def _flat(storage: Any) -> Any:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _pinned(nbytes: int) -> Any:
    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)


def _copy(target: Any, source: Any) -> None:
    """Copy on a stream of its own, behind what has been asked for, and wait for that alone."""
    device = target.device if target.is_cuda else source.device
    side = _side(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        target.copy_(source, non_blocking=True)
        done = side.record_event()
    done.synchronize()


@functools.cache
def _side(device: Any) -> Any:
    return torch.cuda.Stream(device)
