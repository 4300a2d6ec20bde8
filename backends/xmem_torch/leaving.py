"""What a stage of a plan saves for backward, in a depot until then (PyTorch 2.13).

A thread writes one tensor while the stage computes on to the next; there it is waited for, and the
tensor's memory is given up. So exactly one tensor is on its way at a time, none when the stage has
ended, and a step's peak is the same every time. Backward reads a tensor when it asks for it.

On a GPU bytes pass through a copy in the host's memory that is waited for; none of it has been run.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from xmem.offload.depot import Depot
from xmem.saving import Away
from xmem_torch.lying import lie
from xmem_torch.tensors import version


class Elements:
    """A tensor's elements in a depot, for as long as this is there."""

    __slots__ = ("__weakref__", "_count", "_depot", "_device", "_dtype", "_number")

    def __init__(self, flat: torch.Tensor, depot: Depot, number: int, device: torch.device) -> None:
        self._count, self._dtype, self._device = flat.numel(), flat.dtype, device
        self._depot, self._number = depot, number
        weakref.finalize(self, depot.drop, number).atexit = False

    def read(self) -> torch.Tensor:
        """Return the elements, flat."""
        flat = torch.empty(self._count, dtype=self._dtype)
        self._depot.get(self._number, flat.data_ptr(), flat.nbytes)
        return flat.to(self._device)


class Absent:
    """One saved tensor that is in a depot.

    Attributes:
        witness: shares its counter of versions; has no memory.
        version: the version that was saved.
    """

    __slots__ = ("_elements", "_size", "_stride", "version", "witness")

    def __init__(self, tensor: torch.Tensor, elements: Elements, stride: Sequence[int]) -> None:
        self._elements, self._size, self._stride = elements, tensor.shape, stride
        self.version = version(tensor)
        self.witness = tensor.detach()
        self.witness.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)

    def tensor(self) -> torch.Tensor:
        """Return the tensor, read back.

        Raises:
            OffloadError: it does not come back.
        """
        return self._elements.read().as_strided(self._size, self._stride)


class Leaving:
    """Sends away what one pass of a stage saves.

    Args:
        away: where to.
    """

    def __init__(self, away: Away) -> None:
        self._depot = away.depot
        self._thread = ThreadPoolExecutor(1)
        self._on_its_way: tuple[Future[None], torch.Tensor] | None = None
        # While a storage is referred to, its address is no other one's.
        self._known: dict[tuple[Any, ...], tuple[Elements, StorageWeakRef]] = {}

    def __del__(self) -> None:
        self._thread.shutdown()  # a pass that fails may have memory that is being written

    def left(self, tensor: torch.Tensor) -> Absent:
        """Send a tensor away, once for all that have its memory.

        Raises:
            OffloadError: the one before could not be stored; nothing is from then on.
        """
        lies = lie(tensor)
        storage = StorageWeakRef(tensor.untyped_storage())
        key = (storage.cdata, lies.key, tensor.dtype, version(tensor))
        if key not in self._known:
            self._known[key] = self._send(lies.flat(tensor).contiguous()), storage
        return Absent(tensor, self._known[key][0], lies.stride)

    def ended(self) -> None:
        """Wait for the last one."""
        self._arrived()
        self._known.clear()
        self._thread.shutdown()

    def _send(self, flat: torch.Tensor) -> Elements:
        self._arrived()
        device, number = flat.device, self._depot.new_number()
        flat = flat.cpu()
        # By address: the thread must hold no tensor, or its memory would go at some moment.
        sent = self._thread.submit(self._depot.put, number, flat.data_ptr(), flat.nbytes)
        self._on_its_way = sent, flat
        return Elements(flat, self._depot, number, device)

    def _arrived(self) -> None:
        """Wait for what is on its way, and hold its memory no longer."""
        if self._on_its_way is not None:
            sent, _ = self._on_its_way
            try:
                sent.result()
            finally:
                self._on_its_way = None
