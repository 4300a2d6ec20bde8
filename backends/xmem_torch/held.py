"""What the graph holds in the place of a saved tensor, and how it becomes the tensor again.

A hook that hands a tensor on takes autograd's check for changes in place with it (PyTorch 2.13,
`SavedVariable::unpack`), and one that hands on the very tensor lets a node hold its own output,
which is never freed. So a tensor that is kept is an alias without a graph, and every place notes
the version at which it was saved. The counter of versions is shared by all views of a tensor and
outlives its memory: a detached alias whose data is exchanged for an empty tensor's keeps it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from xmem_torch import codec, exact
from xmem_torch.away import Aside, OnDevice


class Whole:
    """A tensor that is kept as it is: the very memory."""

    __slots__ = ("__weakref__", "storage")

    def __init__(self, storage: StorageWeakRef | None) -> None:
        self.storage = storage


class Packed:
    """A tensor's elements in few bytes, or away, or both; shared by all that saved it.

    Attributes:
        storage: where they were, so that no other tensor is taken for this one.
        near: whether all that saved it did so in close sequence, so that backward will read it so.
    """

    __slots__ = ("__weakref__", "_buffer", "_count", "_dtype", "_how", "_last", "near", "storage")

    def __init__(
        self,
        storage: StorageWeakRef,
        buffer: torch.Tensor,
        flat: torch.Tensor,
        how: tuple[str, int],
    ) -> None:
        self.storage = storage
        self._buffer: torch.Tensor | Aside | OnDevice = buffer
        self._how: tuple[str, int] | None = how
        self._count, self._dtype = flat.numel(), flat.dtype
        self._last: int | None = None
        self.near = True

    def saved_as(self, number: int) -> None:
        """Note which of all saved tensors this is."""
        if self._last is not None:
            self.near = self.near and number - self._last <= _CLOSE
        self._last = number

    @property
    def nbytes(self) -> int:
        """What it takes, wherever that is."""
        return self._buffer.nbytes

    def send(self, send: Callable[[torch.Tensor], Aside | OnDevice | None]) -> bool:
        """Let what it takes leave the device; says whether it does."""
        assert isinstance(self._buffer, torch.Tensor)
        aside = send(self._buffer)
        if aside is not None:
            self._buffer = aside
        return aside is not None

    def unpacked(self) -> torch.Tensor:
        """Return the elements, flat."""
        buffer = self._buffer if isinstance(self._buffer, torch.Tensor) else self._buffer.tensor()
        if self._how is None:
            return buffer
        (kind, number), count, dtype = self._how, self._count, self._dtype
        if kind == "whole":
            return buffer
        if kind == "bits":
            return exact.unpack_bits(buffer, count, dtype, number)
        if kind == "offsets":
            return exact.unpack_offsets(buffer, count, number, dtype)
        return codec.unpack(buffer, count, number, dtype)

    def unpack_for_good(self) -> None:
        """Give the packed bytes up for the elements: they will be asked for again at once."""
        self._buffer, self._how = self.unpacked(), None


_CLOSE = 4


def packed_exactly(flat: torch.Tensor, storage: StorageWeakRef) -> Packed | None:
    """Return a tensor packed without loss; None where that is not possible, or saves nothing."""
    if flat.dtype is torch.bool:
        return Packed(storage, exact.pack_bits(flat), flat, ("bits", 1))
    if flat.is_floating_point():
        pattern = exact.second_value(flat)
        if pattern is None:
            return None
        return Packed(storage, exact.pack_bits(flat), flat, ("bits", pattern))
    width = exact.offset_width(flat)
    if width is None:
        return None
    return Packed(storage, exact.pack_offsets(flat, width), flat, ("offsets", width))


def unpacked_whole(flat: torch.Tensor, storage: StorageWeakRef) -> Packed:
    """Return a tensor that is not packed, to be sent away: its very memory until then."""
    flat = flat.contiguous()  # its bytes are taken from its address on
    return Packed(storage, flat, flat, ("whole", 0))


def packed_by_codec(flat: torch.Tensor, storage: StorageWeakRef, bits: int, seed: int) -> Packed:
    """Return a tensor packed in a number of bits an element."""
    return Packed(storage, codec.pack(flat, bits, seed), flat, ("codec", bits))


class Place:
    """One saved tensor, in the graph.

    Attributes:
        held: its elements, or what says that they are kept; at last the tensor itself.
        witness: the tensor itself where it is kept; else what shares its counter of versions.
        version: the version that was saved.
    """

    __slots__ = ("_size", "_stride", "held", "version", "witness")

    def __init__(
        self, tensor: torch.Tensor, held: Whole | Packed, stride: Sequence[int] = ()
    ) -> None:
        self.held: Whole | Packed | torch.Tensor = held
        self._size, self._stride, self.version = tensor.shape, stride, tensor._version
        self.witness = tensor.detach()
        if isinstance(held, Packed):
            self.witness.data = _nothing(tensor.dtype, tensor.device)

    def tensor(self) -> torch.Tensor:
        """Return the tensor, as backward wants it; see `check`."""
        self.check()
        if isinstance(self.held, Packed):
            return self.held.unpacked().as_strided(self._size, self._stride)
        return self.witness if isinstance(self.held, Whole) else self.held

    def check(self) -> None:
        """Raise if it has been changed in place since.

        Raises:
            RuntimeError: it has; the words are PyTorch's.
        """
        now = self.witness._version
        if now != self.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an"
                f" inplace operation: [{self.witness.type()} {list(self._size)}] is at version"
                f" {now}; expected version {self.version} instead. Hint: enable anomaly detection"
                " to find the operation that failed to compute its gradient, with"
                " torch.autograd.set_detect_anomaly(True)."
            )


def place(tensor: torch.Tensor, held: Whole | Packed, stride: Sequence[int] = ()) -> Place:
    """Return what the graph holds of a tensor.

    Args:
        tensor: what is saved.
        held: its elements, or what says that they are kept.
        stride: how it lies in what `held` unpacks.
    """
    return Place(tensor, held, stride)


def recall(place: Place) -> torch.Tensor:
    """Unpack; a hook.

    Where the backward that asks gives the graph up, packed bytes that no later operation needs are
    given up, too; those that the very next ones need are unpacked once for all of them. An
    operation may ask twice, so the place holds the tensor; its node lets go of it when it has run.
    """
    place.check()
    held = place.held
    if isinstance(held, Packed) and _graph_is_given_up():
        if sys.getrefcount(held) == _ALONE:
            place.held = place.tensor()
        elif held.near:
            held.unpack_for_good()
    return place.tensor()


_ALONE = 3  # the place, and two of the function that asks


def _graph_is_given_up() -> bool:
    inside: bool = torch._C._current_graph_task_id() != -1
    return inside and not torch._C._autograd._get_current_graph_task_keep_graph()


_empty: dict[Any, torch.Tensor] = {}


def _nothing(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    key = dtype, device
    if key not in _empty:
        _empty[key] = torch.empty(0, dtype=dtype, device=device)
    return _empty[key]
