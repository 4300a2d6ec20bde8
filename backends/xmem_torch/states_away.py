"""A state that lives in a depot: what stands for it in `optimizer.state` (PyTorch 2.13).

Its parts are stored by themselves, so that a step may bring some elements only. What could not be
stored stays on the device, in its part, and nothing else notices.

On CUDA a part is copied through pinned memory, in the stream that the step runs in; there is no GPU
on which this has been run.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from xmem.errors import OffloadError
from xmem.native import depot as native
from xmem.offload.depot import Depot


class Part:
    """Some elements of a state, one after the other in memory.

    Attributes:
        held: the elements, flat, while they are not stored.
    """

    __slots__ = ("_depot", "_number", "count", "held", "is_stored")

    def __init__(self, depot: Depot, count: int) -> None:
        self.count = count
        self.held: torch.Tensor | None = None
        self.is_stored = False
        self._depot = depot
        self._number = depot.new_number()

    @property
    def is_there(self) -> bool:
        """Say whether there are elements yet."""
        return self.is_stored or self.held is not None

    def store(self) -> None:
        """Write what is held, and let go of it.

        Raises:
            OffloadError: it cannot be stored; it stays held.
        """
        if self.held is None:
            return
        found = self.held.detach().cpu().contiguous()
        self._depot.put(self._number, found.data_ptr(), found.nbytes)
        self.held, self.is_stored = None, True

    def load(self, like: Away) -> torch.Tensor:
        """Return the elements, flat; they stay stored.

        Raises:
            OffloadError: they cannot be read.
        """
        if self.held is not None:
            return self.held
        on_cpu = like.device.type == "cpu"
        found = torch.empty(self.count, dtype=like.dtype, pin_memory=not on_cpu)
        self._depot.get(self._number, found.data_ptr(), found.nbytes)
        return found if on_cpu else found.to(like.device)

    def mapped(self, like: Away) -> torch.Tensor | None:
        """Return the elements where they are stored: changes need no writing. None: they are not.

        The memory is unmapped when nothing refers to it any more.
        """
        if self.held is not None:
            return None
        nbytes = self.count * like.dtype.itemsize
        address = native.load().xmem_depot_map(self._depot.address, self._number)
        if not address:
            return None
        memory = (ctypes.c_char * nbytes).from_address(address)
        weakref.finalize(memory, _unmap, self._depot, nbytes, address)
        return torch.frombuffer(memory, dtype=like.dtype)

    def zeros(self, like: Away) -> torch.Tensor:
        """Store zeros, and return them where they are stored: see `mapped`.

        Raises:
            OffloadError: they cannot be stored.
        """
        zeros = np.zeros(self.count * like.dtype.itemsize, np.uint8)  # pages that are never touched
        self._depot.put(self._number, zeros.ctypes.data, zeros.nbytes)
        self.is_stored = True
        found = self.mapped(like)
        return torch.from_numpy(zeros).view(like.dtype) if found is None else found

    def __del__(self) -> None:
        self._depot.drop(self._number)


class Away:
    """Stands for a state.

    Attributes:
        shape, stride, dtype, device: the state's.
        bounds: where parts begin, and the end, in elements in the order of memory.
        parts: each between two of the bounds.
    """

    def __init__(self, like: torch.Tensor, depot: Depot, bounds: Sequence[int]) -> None:
        self.shape, self.dtype, self.device = like.shape, like.dtype, like.device
        self.stride = like.stride() if is_dense(like) else _contiguous(like.shape)
        self.bounds = tuple(bounds)
        sizes = zip(self.bounds, self.bounds[1:], strict=False)
        self.parts = [Part(depot, stop - start) for start, stop in sizes]

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"{name!r} of a state that is away (xmem.offload_optimizer): optimizer.state_dict() has"
            " the values; undo() of the receipt brings them back"
        )

    def __repr__(self) -> str:
        size = f"shape={tuple(self.shape)}, {self.dtype}, parts={len(self.parts)}"
        return f"Away({size}; optimizer.state_dict() holds the values)"

    @property
    def nbytes(self) -> int:
        """Of the state."""
        return self.bounds[-1] * self.dtype.itemsize

    def part_at(self, start: int) -> Part:
        """Return the part that begins there."""
        return self.parts[self.bounds.index(start)]

    def is_for(self, value: torch.Tensor) -> bool:
        """Say whether a new value is of the same kind."""
        kind = self.shape, self.dtype, self.device
        return kind == (value.shape, value.dtype, value.device)

    def hold(self, value: torch.Tensor) -> None:
        """Take a new value; it is on the device until `store`."""
        if value.stride() != self.stride:
            laid_out = self.shaped(
                torch.empty(self.bounds[-1], dtype=self.dtype, device=self.device)
            )
            value = laid_out.copy_(value)
        # A part that is held must not keep the others in memory.
        whole = len(self.parts) == 1
        flat = flattened(value)
        for part, start, stop in zip(self.parts, self.bounds, self.bounds[1:], strict=False):
            part.held = flat if whole else flat[start:stop].clone()

    def store(self) -> None:
        """Write all that is held.

        Raises:
            OffloadError: some could not be stored, and stays held.
        """
        failure = None
        for part in self.parts:
            try:
                part.store()
            except OffloadError as error:
                failure = failure or error
        if failure is not None:
            raise failure

    def load(self) -> torch.Tensor:
        """Return the state.

        Raises:
            OffloadError: it cannot be read.
        """
        if len(self.parts) == 1:
            return self.shaped(self.parts[0].load(self))
        flat = torch.empty(self.bounds[-1], dtype=self.dtype, device=self.device)
        for part, start, stop in zip(self.parts, self.bounds, self.bounds[1:], strict=False):
            flat[start:stop] = part.load(self)
        return self.shaped(flat)

    def shaped(self, flat: torch.Tensor) -> torch.Tensor:
        """Return a flat tensor as the state is laid out."""
        return flat.as_strided(self.shape, self.stride)


def is_dense(tensor: torch.Tensor) -> bool:
    """Say whether elements lie without gaps, in any order of the axes."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def flattened(tensor: torch.Tensor) -> torch.Tensor:
    """Return a dense tensor's elements in the order of its memory, without a copy."""
    return tensor.detach().as_strided((tensor.numel(),), (1,))


def _unmap(depot: Depot, nbytes: int, address: int) -> None:
    native.load().xmem_depot_unmap(depot.address, nbytes, address)


def _contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    found = [1]
    for size in reversed(shape[1:]):
        found.insert(0, found[0] * size)
    return tuple(found[: len(shape)])
