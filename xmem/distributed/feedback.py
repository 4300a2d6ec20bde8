"""What compression lost is kept, and added the next time.

After Frank Seide et al., "1-Bit Stochastic Gradient Descent" (Interspeech 2014), and Hanlin Tang et
al., "DoubleSqueeze" (ICML 2019), who keep both losses: of what a rank sends, and of the sum that it
sends back.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from xmem.distributing import Kind
from xmem.errors import UsageError


class ErrorFeedback:
    """The losses of one list of tensors; make one, and give it to every `all_reduce` of that list.

    Takes 4 bytes for each element that is sent. Losses that are not finite, as those of gradients
    that overflowed, are forgotten.
    """

    def __init__(self) -> None:
        self._lost: dict[tuple[int, ...], Any] = {}
        self._made_for: object = None
        self._what = ""

    @property
    def size_bytes(self) -> int:
        """Return the bytes that it takes."""
        return sum(4 * int(lost.numel()) for lost in self._lost.values())

    def reset(self) -> None:
        """Forget everything, also for which tensors it was made."""
        self._lost.clear()
        self._made_for = None

    def check(self, kinds: Sequence[Kind], *settings: object) -> None:
        """Refuse other tensors, or other settings, than those it was first used with.

        Raises:
            UsageError: says what it was made for.
        """
        made_for = (tuple((kind.dtype, kind.shape) for kind in kinds), settings)
        if self._made_for not in (None, made_for):
            raise UsageError(
                f"error_feedback keeps what was lost of {self._what}, and this call is another:"
                f" {_described(kinds, settings)}. Use one ErrorFeedback for each list of tensors,"
                " or reset() it"
            )

    def bind(self, kinds: Sequence[Kind], *settings: object) -> None:
        """Keep it for these tensors and settings from now on."""
        self._made_for = (tuple((kind.dtype, kind.shape) for kind in kinds), settings)
        self._what = _described(kinds, settings)

    def add(self, key: tuple[int, ...], values: Any) -> Any:
        """Return float32 values with what was lost of them the last time."""
        lost = self._lost.pop(key, None)
        return values if lost is None else values + lost

    def keep(self, key: tuple[int, ...], lost: Any) -> None:
        """Keep the difference between values and what arrived of them, computed."""
        if math.isfinite(float(lost.sum().item())):
            self._lost[key] = lost


def _described(kinds: Sequence[Kind], settings: Sequence[object]) -> str:
    first = f"{kinds[0].dtype} {kinds[0].shape}" if kinds else "nothing"
    return f"{len(kinds)} tensors, the first {first}, with {', '.join(map(str, settings))}"
