"""What backward will read stays until memory runs out: `on_oom="offload"` (Jittor 1.3.11).

The pool itself moves (`native/late.h`), inside the request that does not fit: nothing of Python may
run there, and an execution need not fail. Which tensors may leave, and between which operations,
is found as for compression (`packing.py`): in the place of packing an operation notes them, and in
the place of unpacking one takes them back. What has not left then costs nothing but the note.

Limits: those of `saved.py`; on a GPU memory cannot be copied where the pool is asked for it.
"""

from __future__ import annotations

import ctypes
from contextlib import ExitStack
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

import jittor as jt

from xmem.errors import OffloadError
from xmem.native import depot as depots
from xmem.offload.adaptive import Adaptive
from xmem.offload.depot import Depot
from xmem_jittor import native, offload_errors
from xmem_jittor.ordering import after, anchor, calling

_CALL = """((void (*)(void*, void*, int))(size_t)data["call"])(in0, in1, (int)data["depot"]);"""


@dataclass(frozen=True, eq=False)
class Noted:
    """A tensor that may have no memory.

    Attributes:
        views: it and the tensors that share its memory.
        done: the ticket of the note; there when nothing reads the tensor before backward.
    """

    views: list[Any]
    done: Any


@dataclass(eq=False)
class Stays:
    """A tensor that stays until memory runs out.

    Attributes:
        var: it.
        depot: where it goes.
        noted: from when it may leave.
    """

    var: Any
    depot: Depot
    noted: Noted | None = None

    data: ClassVar[tuple[Any, ...]] = ()
    """Nothing has to be there before it may leave."""

    def note_alone(self) -> None:
        """Let it leave as soon as nothing else holds its memory: operations hold what they read."""
        self.var = self.var.detach()
        self.noted = note_views([self.var], anchor(), self.depot)

    def unpacked(self) -> Any:
        """Return the tensor, as it is there again."""
        assert self.noted is not None
        return after(self.var, take_back(self.noted))


def note_views(views: list[Any], done: Any, depot: Depot) -> Noted:
    """Let tensors that share memory leave when it runs out, from where the graph gets here.

    Args:
        views: the tensors.
        done: there when nothing reads them before backward any more.
        depot: where they go.
    """
    with jt.flag_scope(no_grad=1):
        ticket = jt.code((1,), "int32", [done], cpu_src="(void)0;", cuda_src="(void)0;").stop_fuse()
    data = {"call": _address("note"), "depot": _late.index_of(depot)}
    for view in views:
        ticket = calling(ticket, _CALL, data, view)
    return Noted(views, ticket)


def take_back(noted: Noted) -> Any:
    """Let what has left come back; returns what its readers wait for."""
    done = noted.done
    for view in noted.views:  # the first one takes all back, and all are there until then
        done = calling(done, _CALL, {"call": _address("back"), "depot": 0}, view)
    return done


class Late:
    """What is noted, and where it goes: one, as there is one pool."""

    def __init__(self) -> None:
        self._depots: dict[int, Depot] = {}  # by index, for as long as something may lie there
        self._block: ExitStack | None = None

    @property
    def is_on(self) -> bool:
        """Whether anything is noted."""
        return self._block is not None

    def begin(self, adaptive: Adaptive, depot: Depot) -> None:
        """Note from now on what is saved in this thread."""
        from xmem_jittor.saved import Saved

        library = native.allocator()
        functions = depots.load()
        library.xmem_jittor_late_calls(
            *(native.address_of(getattr(functions, f"xmem_depot_{n}")) for n in _CALLS)
        )
        self.index_of(depot)
        offload_errors.tell_of(depot)
        library.xmem_jittor_late_allow(1)
        if self._block is None:
            with ExitStack() as stack:
                stack.enter_context(Saved("cpu").saving(adaptive, model=None))
                self._block = stack.pop_all()
        self._close_unused(depot)

    def end(self) -> None:
        """Note nothing any more. What has left comes back when backward asks."""
        if self._block is None:
            return
        self._block.close()
        self._block = None
        native.allocator().xmem_jittor_late_allow(0)
        self._close_unused(None)

    def index_of(self, depot: Depot) -> int:
        """Return the number that the pool knows a depot by."""
        for index, known in self._depots.items():
            if known is depot:
                return index
        index = int(native.allocator().xmem_jittor_late_depot(depot.address, 0))
        self._depots[index] = depot
        return index

    def failure(self) -> OffloadError | None:
        """Return why nothing can be moved any more, if so."""
        found = (ctypes.c_longlong * 4)()
        native.allocator().xmem_jittor_late_stats(found)
        for depot in self._depots.values() if found[3] else ():
            if depot.failure is not None:
                return depot.failure
        return None

    def _close_unused(self, current: Depot | None) -> None:
        library = native.allocator()
        for index, depot in list(self._depots.items()):
            if depot is not current and not library.xmem_jittor_late_users(index):
                library.xmem_jittor_late_depot(0, index)
                del self._depots[index]


_CALLS = ("put", "get", "drop")
_late = Late()


def late() -> Late:
    """Return the one there is."""
    return _late


@lru_cache(maxsize=2)
def _address(name: str) -> int:
    return native.address_of(getattr(native.allocator(), f"xmem_jittor_late_{name}"))
