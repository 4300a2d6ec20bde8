"""Pieces: the memory of parameters that comes and goes, each one storage (PyTorch 2.13).

A piece is on the device while somebody holds it. What has not changed since it came is not written
again; that is known by autograd's counters of versions, which a write through `.data` does not
move: such a write while a layer runs is lost.
"""

from __future__ import annotations

import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from xmem import api
from xmem.errors import OffloadError, XmemWarning
from xmem.offload.depot import Depot
from xmem_torch import streamed_copies as copies
from xmem_torch.tensors import version as version_of

lock = threading.RLock()
"""Guards who holds what; calls of one model may come from several threads."""

_pieces: Any = WeakTensorKeyDictionary()


class Piece:
    """One storage, and the parameters that lie in it.

    Attributes:
        storage: what the parameters and all their views refer to.
        nbytes: what it takes on the device.
        here: whether it is there.
        held: how many hold it there.
        spare: its memory while it is not, where it was read ahead or not given up yet.
        pending: what will be its `spare`.
        ahead: whether it is to become a `spare` when nobody holds it any more.
    """

    def __init__(self, storage: Any, parameters: Sequence[Any], depot: Depot) -> None:
        self.storage = storage
        self.nbytes: int = storage.nbytes()
        self.here = True
        self.held = 0
        self.spare: Any = None
        self.pending: Future[Any] | None = None
        self.ahead = False
        self._device = storage.device
        self._depot = depot
        self._number = depot.new_number()
        self._parameters = [weakref.ref(p) for p in parameters]
        self._versions: list[int] = []
        self._changed = False
        self._stored = 0
        self._copy: tuple[weakref.ref[Any], int, int] | None = None

    def begin(self) -> None:
        """Write it for the first time; it stays until `leave`."""
        copies.store(self.storage, self._depot, self._number)
        self._versions = self._read_versions()

    def register(self) -> None:
        """Let `piece_of` find it."""
        for p in self.parameters():
            _pieces[p] = self

    def parameters(self) -> list[Any]:
        """Return the parameters that live and still lie in it."""
        alive = (reference() for reference in self._parameters)
        return [p for p in alive if p is not None and self._is_of(p)]

    def take(self) -> None:
        """Hold it on the device.

        Raises:
            OffloadError: its bytes do not come back.
        """
        with lock:
            if not self.here:
                self._come()
            self.held += 1

    def give(self, *, changed: bool = False) -> None:
        """Hold it no more; when nobody does, it leaves.

        Raises:
            OffloadError: it was to be stored and could not be; it stays.
        """
        with lock:
            self._changed = self._changed or changed
            self.held -= 1
            if self.held == 0:
                self.leave()

    def leave(self) -> None:
        """Store what has changed, and give the memory up."""
        if not self.here or not self._check_parameters():
            return
        if self._changed or self._versions != self._read_versions():
            failed_before = self._depot.failure is not None
            self._changed = True
            try:
                copies.store(self.storage, self._depot, self._number)
            except OffloadError:
                if failed_before:  # it has been said
                    return
                raise
            self._changed = False
            self._stored += 1
        out = copies.emptied(self.storage)
        self.here = False
        self.spare = out if self.ahead else None

    def read_ahead(self) -> Any:
        """Return its memory, read now; for a thread of its own."""
        return copies.filled(self.nbytes, self._device, self._depot, self._number)

    def forget_ahead(self) -> None:
        """Give memory up that was read ahead."""
        self.ahead, self.spare, self.pending = False, None, None

    def back_for_good(self) -> None:
        """Have it on the device, where it stays; nothing finds it any more."""
        with lock:
            self.take()
            for p in self.parameters():
                _pieces.pop(p, None)
            self._depot.drop(self._number)

    def values_of(self, parameter: Any) -> Any:
        """Return a tensor with a parameter's values in memory of its own.

        What is asked for again while that lives and nobody has changed either lies in the same
        memory, as in a `state_dict` of a parameter under two names.
        """
        with lock:
            reference, stored, version = self._copy or (None, 0, 0)
            known = reference() if reference and stored == self._stored else None
            if self.here:
                storage = copies.copied(self.storage)
            elif known is not None and version_of(known) == version:
                storage = known.untyped_storage()
            else:
                storage = self.read_ahead()
            values = torch.empty(0, dtype=parameter.dtype, device=self._device)
            values.set_(storage, parameter.storage_offset(), parameter.shape, parameter.stride())
            if not self.here:
                self._copy = weakref.ref(values), self._stored, version_of(values)
            return values

    def _come(self) -> None:
        spare, pending = self.spare, self.pending
        self.spare = self.pending = None
        if pending is not None:
            try:
                spare = pending.result()
            except Exception:  # noqa: BLE001  what is wrong is said by the next try
                spare = None
        copies.fill(self.storage, self.read_ahead() if spare is None else spare)
        self.here, self._changed = True, False
        self._versions = self._read_versions()
        api.active().measure.tag("parameter", self.parameters())

    def _read_versions(self) -> list[int]:
        return [-1 if p is None else p._version for p in (ref() for ref in self._parameters)]

    def _is_of(self, parameter: Any) -> bool:
        same: bool = parameter.untyped_storage()._cdata == self.storage._cdata
        return same

    def _check_parameters(self) -> bool:
        """Let go of parameters whose memory is not ours alone now; False if none is left."""
        shared = not self.storage.resizable()  # numpy() was called
        for reference in self._parameters:
            p = reference()
            if p is None or (self._is_of(p) and not shared) or _pieces.pop(p, None) is None:
                continue
            how = (
                "shares its memory with numpy" if shared else "was given other memory (.data = ...)"
            )
            warnings.warn(
                f"a parameter of shape {tuple(p.shape)} {how} since xmem.offload_parameters: it"
                " stays on the device from now on",
                XmemWarning,
                stacklevel=2,
            )
        return bool(self.parameters()) and not shared


def piece_of(parameter: Any) -> Piece | None:
    """Return the piece of a parameter, if it has one."""
    if not _pieces:
        return None
    found: Piece | None = _pieces.get(parameter)
    return found


def pieces_of(parameters: Iterable[Any]) -> list[Piece]:
    """Return the pieces of parameters, each once; others have none."""
    found = (piece_of(p) for p in parameters)
    return list(dict.fromkeys(piece for piece in found if piece is not None))


def take_all(pieces: Sequence[Piece]) -> None:
    """Hold pieces: all of them, or none if one does not come."""
    taken: list[Piece] = []
    try:
        for piece in pieces:
            piece.take()
            taken.append(piece)
    except BaseException:
        give_all(taken)
        raise


def give_all(pieces: Iterable[Piece], *, changed: bool = False) -> None:
    """Hold pieces no more; an error is raised when all have been given."""
    first: OffloadError | None = None
    for piece in pieces:
        try:
            piece.give(changed=changed)
        except OffloadError as error:
            first = first or error
    if first is not None:
        raise first


def raise_behind(error: OffloadError) -> None:
    """Raise at the end of the backward that runs, which goes on till then; now where none does.

    Raises:
        OffloadError: it.
    """
    if torch._C._current_graph_task_id() == -1:
        raise error

    def late() -> None:
        raise error

    torch.autograd.Variable._execution_engine.queue_callback(late)


@contextmanager
def holding(
    parameters: Sequence[Any], failed: Callable[[OffloadError], None] = raise_behind
) -> Iterator[None]:
    """Have parameters on the device inside the block; they are stored behind it.

    Args:
        parameters: others than those that are away do no harm.
        failed: is told when they could not be stored; they stay on the device.
    """
    pieces = pieces_of(parameters)
    take_all(pieces)
    try:
        yield
    finally:
        try:
            give_all(pieces, changed=True)
        except OffloadError as error:
            failed(error)
