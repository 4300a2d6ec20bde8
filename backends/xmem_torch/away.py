"""A tensor's bytes outside of the device until backward asks for them (PyTorch 2.13).

On a CPU a thread writes them to the depot from the tensor's own memory, which is kept until it has,
and reads them back into memory of PyTorch. On CUDA they are copied to pinned memory on a stream of
their own, and the tensor is kept until the copy is done, which an event tells; what goes to "host"
stays in that memory. Nothing of CUDA has been run.

What changes in place between saving and backward is found by its counter of versions, which never
goes back (`held.py`); so is what changes while it is being written.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import lru_cache
from typing import Any

import torch

from xmem.offload.transfers import Line, transfers_of
from xmem.saving import Away


class Senders:
    """Sends what one block saves, by where it goes."""

    def __init__(self) -> None:
        self._lines: dict[int, tuple[Away, Line]] = {}

    def send(self, flat: torch.Tensor, away: Away) -> Aside | OnDevice | None:
        """Return a tensor's elements away; None where nothing is stored any more.

        Args:
            flat: the elements, in one piece.
            away: where they go.

        Raises:
            OffloadError: something that was sent before could not be stored.
        """
        transfers = transfers_of(away.depot)
        transfers.raise_failure()
        if transfers.has_failed:
            return None
        _, line = self._lines.setdefault(id(away), (away, Line(away.prefetch_bytes)))
        return Aside(flat, away, line) if flat.device.type == "cpu" else OnDevice(flat, away, line)

    def raise_failure(self) -> None:
        """Raise what could not be stored by now, if nobody has been told.

        Raises:
            OffloadError: something could not.
        """
        for away, _ in self._lines.values():
            transfers_of(away.depot).raise_failure()


class Aside:
    """The elements of a tensor on a CPU, in a depot for as long as this is there.

    Attributes:
        nbytes: what they take.
    """

    def __init__(
        self,
        flat: torch.Tensor,
        away: Away,
        line: Line,
        ready: Callable[[], object] | None = None,
        *,
        pinned: bool = False,
    ) -> None:
        self.nbytes: int = flat.nbytes
        self._count, self._dtype, self._pinned = flat.numel(), flat.dtype, pinned
        self._transfers = transfers_of(away.depot)
        self._line = line
        self._read: Future[torch.Tensor] | None = None
        self._ahead = False
        self._sent = self._transfers.send(
            flat, flat.data_ptr(), flat.nbytes, limit=away.in_flight_bytes, ready=ready
        )
        self._place = line.add(self)
        gone = weakref.finalize(self, self._sent.abandon, away.depot)
        gone.atexit = False

    def tensor(self) -> torch.Tensor:
        """Return the elements, flat; read anew where they were asked for before.

        Raises:
            OffloadError: they do not come back, or others could not be stored.
        """
        self._transfers.raise_failure()
        source, read = self._sent.source, self._read
        self._line.read_before(self._place)
        self._read = None
        if self._ahead:
            self._ahead = False
            self._line.taken(self.nbytes)
        if source is not None:
            return source
        return self._fetch() if read is None else read.result()

    def begin_reading(self) -> bool:
        """See `xmem.offload.transfers.Readable`."""
        if self._read is not None or self._sent.source is not None:
            return False
        self._read, self._ahead = self._transfers.read(self._fetch), True
        return True

    def __del__(self) -> None:
        if self._ahead:
            self._line.taken(self.nbytes)

    def _fetch(self) -> torch.Tensor:
        flat = torch.empty(self._count, dtype=self._dtype, pin_memory=self._pinned)
        self._transfers.depot.get(self._sent.number, flat.data_ptr(), flat.nbytes)
        return flat


class OnDevice:
    """The elements of a tensor on a GPU, in pinned memory or a depot.

    Attributes:
        nbytes: what they take.
    """

    def __init__(self, flat: torch.Tensor, away: Away, line: Line) -> None:
        self.nbytes: int = flat.nbytes
        self._device, self._line = flat.device, line
        self._read: tuple[torch.Tensor, Any] | None = None
        self._ahead = False
        side = _side_stream(flat.device)
        side.wait_stream(torch.cuda.current_stream(flat.device))
        with torch.cuda.stream(side):
            pinned = torch.empty(flat.numel(), dtype=flat.dtype, pin_memory=True)
            pinned.copy_(flat, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record(side)
        _keep_until(self._copied, flat, away.in_flight_bytes)
        self._host: torch.Tensor | Aside = pinned
        if away.depot.to == "disk":
            lone = Line(0)  # read ahead from here, with the copy to the device
            self._host = Aside(pinned, away, lone, self._copied.synchronize, pinned=True)
        self._place = line.add(self)

    def tensor(self) -> torch.Tensor:
        """Return the elements, flat, on the device; see `Aside.tensor`."""
        if self._read is None:
            self._load()
        self._line.read_before(self._place)
        assert self._read is not None
        (flat, event), self._read = self._read, None
        current = torch.cuda.current_stream(self._device)
        current.wait_event(event)
        flat.record_stream(current)  # made on the side stream, and read on this one
        if self._ahead:
            self._ahead = False
            self._line.taken(self.nbytes)
        return flat

    def begin_reading(self) -> bool:
        """See `xmem.offload.transfers.Readable`."""
        if self._read is not None:
            return False
        self._load()
        self._ahead = True
        return True

    def __del__(self) -> None:
        if self._ahead:
            self._line.taken(self.nbytes)

    def _load(self) -> None:
        host = self._host if isinstance(self._host, torch.Tensor) else self._host.tensor()
        side = _side_stream(self._device)
        with torch.cuda.stream(side):
            side.wait_event(self._copied)
            flat = host.to(self._device, non_blocking=True)
            event = torch.cuda.Event()
            event.record(side)
        self._read = flat, event


@lru_cache(maxsize=8)
def _side_stream(device: torch.device) -> Any:
    return torch.cuda.Stream(device)


_leaving: deque[tuple[Any, torch.Tensor]] = deque()


def _keep_until(event: Any, source: torch.Tensor, limit: int) -> None:
    """Keep a tensor until its copy is done; waits where more than a number of bytes are kept."""
    _leaving.append((event, source))
    while _leaving and _leaving[0][0].query():
        _leaving.popleft()
    while len(_leaving) > 1 and sum(kept.nbytes for _, kept in _leaving) > limit:
        _leaving.popleft()[0].synchronize()
