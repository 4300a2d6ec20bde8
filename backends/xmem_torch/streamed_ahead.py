"""Read what comes next before it is needed, in a thread of its own (PyTorch 2.13).

What comes next is what came next the last time, after the same two layers.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any
from weakref import finalize

from xmem_torch.streamed_pieces import Piece, lock

if TYPE_CHECKING:
    from xmem_torch.streamed_calls import StreamedLayer

_Arrival = tuple[str, "StreamedLayer"]


class Ahead:
    """Keeps some bytes of what comes next in memory.

    Args:
        budget: how many bytes, at most.
    """

    def __init__(self, budget: int) -> None:
        self._budget = budget
        self._next: dict[tuple[_Arrival | None, _Arrival], _Arrival] = {}
        self._last: tuple[_Arrival | None, _Arrival] | None = None
        self._wanted: list[Piece] = []
        self._pool: ThreadPoolExecutor | None = None
        self._process = 0

    def arrives(self, phase: str, layer: StreamedLayer) -> None:
        """Note that a layer is needed now, and read what will be next."""
        if not self._budget:
            return
        arrival = phase, layer
        with lock:
            if self._last is not None:
                self._next[self._last] = arrival
            self._last = (self._last[1] if self._last else None), arrival
            self._want(self._expected(self._last, layer))

    def clear(self) -> None:
        """Give up what was read ahead: a pass has ended."""
        with lock:
            self._last = None
            self._want([])

    def _expected(
        self, last: tuple[_Arrival | None, _Arrival], layer: StreamedLayer
    ) -> list[Piece]:
        """Return pieces of what comes next, as far as they fit in."""
        found: dict[Piece, None] = {}
        left, seen = self._budget, set()
        while last in self._next and last not in seen:
            seen.add(last)
            following = self._next[last]
            last = last[1], following
            for piece in following[1].pieces:
                if piece in found or (piece.here and piece not in layer.pieces):
                    continue
                if piece.nbytes > left:
                    return list(found)
                found[piece] = None
                left -= piece.nbytes
        return list(found)

    def _want(self, pieces: list[Piece]) -> None:
        wanted = set(pieces)
        for piece in self._wanted:
            if piece not in wanted:
                piece.forget_ahead()
        for piece in pieces:
            piece.ahead = True
            if not piece.here and piece.spare is None and piece.pending is None:
                piece.pending = self._threads().submit(piece.read_ahead)
        self._wanted = pieces

    def _threads(self) -> Any:
        if self._pool is None or self._process != os.getpid():  # a fork has no threads
            self._pool, self._process = ThreadPoolExecutor(1, "xmem-offload"), os.getpid()
            finalize(self, self._pool.shutdown, wait=False)
        return self._pool
