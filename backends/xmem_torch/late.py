"""What backward will read stays until memory runs out: `on_oom="offload"` (PyTorch 2.13).

Relies on the saved-tensor hooks of the thread (`torch._C._autograd._push_saved_tensors_default_
hooks`) and on a storage's count of owners (`torch._C._storage_Use_Count`). The graph holds what it
saved through one alias for each storage. If that alias is the only owner, then no operation that
runs can be reading it, and letting it go frees the memory; what Python or another graph still
holds is passed over. What backward has been handed is an owner, too. So nothing needs to be known
of modules, parameters or inputs.

The pool calls `Late.make_room` in the thread whose request does not fit, without its lock. It runs
Python there, which is safe wherever garbage may be collected. A forked child moves nothing: the
scratch file is its parent's.

Limits: forward passes of the thread that called `configure` (backward may run in any); blocks of
other hooks inside (xmem's too) count instead.
"""

from __future__ import annotations

import _thread
import gc
import os
import sys
import threading
from collections.abc import Sequence
from weakref import WeakValueDictionary

import torch

from xmem.errors import CompositionError, OffloadError
from xmem.offload.adaptive import MIN_BYTES
from xmem.offload.depot import Depot
from xmem_torch.held import Place, Whole, place, recall
from xmem_torch.passes import top_hooks
from xmem_torch.tensors import size_bytes


class Noted(Whole):
    """The memory of saved tensors: on the device, or in a depot.

    Attributes:
        last: the number of the operation that saved it last; backward begins with the highest.
    """

    __slots__ = ("_alias", "_depot", "_number", "_stored", "last", "nbytes")

    def __init__(self, tensor: torch.Tensor, depot: Depot, last: int) -> None:
        super().__init__(None)
        self._alias: torch.Tensor | None = tensor.detach()
        self.nbytes = tensor.untyped_storage().nbytes()
        self._depot, self._number, self._stored = depot, depot.new_number(), False
        self.last = last

    @property
    def storage_key(self) -> int | None:
        """What tells its storage from others; None while it is away."""
        return None if self._alias is None else int(self._alias.untyped_storage()._cdata)

    def is_alone(self) -> bool:
        """Say whether letting go of the memory frees it."""
        return self._alias is not None and _owners(self._alias) == _ALONE

    def leave(self) -> None:
        """Give the memory up; what has been stored before is not written again.

        Raises:
            OffloadError: it cannot be stored; it stays.
        """
        assert self._alias is not None
        if not self._stored:
            storage = self._alias.untyped_storage()
            self._depot.put(self._number, storage.data_ptr(), self.nbytes)
            self._stored = True
        self._alias = None

    def come_back(self) -> None:
        """Take memory for it again.

        Raises:
            OffloadError: it cannot be read.
        """
        found = torch.empty(self.nbytes, dtype=torch.uint8)
        self._depot.get(self._number, found.data_ptr(), self.nbytes)
        self._alias = found

    def part(
        self, dtype: torch.dtype, offset: int, size: Sequence[int], stride: Sequence[int]
    ) -> torch.Tensor:
        """Return a tensor in the memory, an owner of its own."""
        assert self._alias is not None
        storage = self._alias.untyped_storage()
        return torch.empty(0, dtype=dtype).set_(storage, offset, tuple(size), tuple(stride))

    def __del__(self) -> None:
        if self._stored:
            self._depot.drop(self._number)


class LatePlace(Place):
    """One saved tensor, in the graph, whose memory may be away."""

    __slots__ = ("_dtype", "_late", "_offset")

    def __init__(self, tensor: torch.Tensor, noted: Noted, late: Late) -> None:
        super().__init__(tensor, noted, tensor.stride())
        self._dtype, self._offset, self._late = tensor.dtype, tensor.storage_offset(), late
        self.witness.data = _nothing(tensor.dtype)

    def tensor(self) -> torch.Tensor:
        """Return the tensor, brought back if need be; see `check`."""
        self.check()
        assert isinstance(self.held, Noted)
        with self._late.lock, torch.no_grad():
            if self.held.storage_key is None:
                self.held.come_back()
                self._late.note(self.held)
            return self.held.part(self._dtype, self._offset, self._size, self._stride)


class Late:
    """Notes what forward passes of a thread save, and moves it when memory runs out.

    Attributes:
        depot: where it goes; None: nothing is noted.
        lock: held while something moves.
    """

    def __init__(self) -> None:
        self.depot: Depot | None = None
        self.lock = threading.RLock()
        self.failure: OffloadError | None = None
        self._noted: WeakValueDictionary[int, Noted] = WeakValueDictionary()
        self._count = 0
        self._process = os.getpid()
        self._thread: threading.Thread | None = None

    def check(self, *, on: bool) -> None:
        """Refuse to begin or to end where that would disturb other hooks.

        Raises:
            CompositionError: with the reason.
        """
        if self._thread is not None and not self._thread.is_alive():
            self._thread = None  # its hooks have gone with it
        top = top_hooks()
        is_top = top is not None and top[0] == self._pack
        if self._thread is None and on and top is not None:
            raise CompositionError(
                'xmem.pool.configure(on_oom="offload") was called inside a block of saved-tensor'
                " hooks (xmem.compress_activations, xmem.offload_activations, a checkpointed"
                " region...). They nest: call it outside of the block."
            )
        if self._thread is not None and not on:
            if threading.current_thread() is not self._thread:
                raise CompositionError(
                    'on_oom="offload" is left in another thread than it was entered in; what'
                    " forward passes save is noted by thread. Call xmem.pool.configure there."
                )
            if not is_top:
                raise CompositionError(
                    'on_oom="offload" is left inside a block of saved-tensor hooks that was'
                    " entered after it. They nest: call xmem.pool.configure outside of the block."
                )

    def begin(self, depot: Depot) -> None:
        """Note from now on what is saved in this thread; see `check`."""
        if self.failure is not None or self._process != os.getpid():
            self._noted.clear()  # it would go to a depot that takes nothing
        self.depot, self.failure, self._process = depot, None, os.getpid()
        if self._thread is None:
            self._thread = threading.current_thread()
            torch._C._autograd._push_saved_tensors_default_hooks(self._pack, recall)

    def end(self) -> None:
        """Note nothing any more. What has left comes back when backward asks; see `check`."""
        if self._thread is not None:
            torch._C._autograd._pop_saved_tensors_default_hooks()
        self.depot = self._thread = None
        self._noted.clear()

    def note(self, noted: Noted) -> None:
        """Let something be moved that is on the device."""
        key = noted.storage_key
        if key is not None and self.depot is not None:
            self._noted[key] = noted

    def _pack(self, tensor: torch.Tensor) -> Place:
        depot = self.depot
        if depot is None or not _may_leave(tensor):
            return place(tensor, Whole(None))
        self._count += 1
        noted = self._noted.get(tensor.untyped_storage()._cdata)
        if noted is None:
            noted = Noted(tensor, depot, self._count)
            self.note(noted)
        noted.last = self._count
        return LatePlace(tensor, noted, self)

    def make_room(self, enough: int, better: int) -> int:
        """Move what backward needs last until so much is free.

        Args:
            enough: below that, garbage is collected, and what that lets go of moves, too.
            better: how much is to be moved.

        Returns:
            What has been freed.
        """
        if os.getpid() != self._process:
            return 0
        try:
            with self.lock:
                freed = self._move(better)
                if freed < enough:
                    gc.collect()
                    freed += self._move(better - freed)
        except KeyboardInterrupt:
            _thread.interrupt_main()  # nothing can be raised into the allocator that asks
            return 0
        return freed

    def _move(self, wanted: int) -> int:
        freed = 0
        for noted in sorted(self._noted.values(), key=lambda noted: noted.last):
            if freed >= wanted or self.failure is not None:
                break
            key = noted.storage_key
            if key is None or not noted.is_alone():
                continue
            try:
                noted.leave()
            except OffloadError as error:
                self.failure = error.with_traceback(None)  # its frames hold what is noted
                break
            self._noted.pop(key, None)
            freed += noted.nbytes
        return freed


def _may_leave(tensor: torch.Tensor) -> bool:
    """Say whether a tensor is worth noting. Who holds it is asked when memory runs out."""
    if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided:
        return False
    if tensor.device.type != "cpu" or tensor.is_neg() or tensor.is_conj():
        return False
    base = tensor if tensor._base is None else tensor._base
    if base.is_leaf and base.requires_grad:
        return False
    return tensor.numel() > 0 and size_bytes(tensor) >= MIN_BYTES


_empty: dict[torch.dtype, torch.Tensor] = {}


def _nothing(dtype: torch.dtype) -> torch.Tensor:
    if dtype not in _empty:
        _empty[dtype] = torch.empty(0, dtype=dtype)
    return _empty[dtype]


def _owners(tensor: torch.Tensor) -> tuple[int, int]:
    """Return how many own a tensor's storage, in C++ and in Python."""
    storage = tensor.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata), sys.getrefcount(storage)


_ALONE = _owners(torch.empty(1).detach())
"""Found by asking, since it counts who asks, too."""
