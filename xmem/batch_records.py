"""What `xmem.find_batch_size` returns: a number that knows how it was found."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from xmem.sizes import format_size

LimitedBy = Literal["budget", "maximum", "time"]


@dataclass(frozen=True)
class Try:
    """A batch size that was tried.

    Attributes:
        size: the batch size.
        how: "verified": it was run under the limit; "refused": under the limit it ran out of
            memory, or its process died; "measured": it was run without a limit; "stopped": time
            was up.
        fits: it was run to its end within the limit.
        peak_bytes: the most that was allocated, where it ran to its end.
        predicted_bytes: what was expected before, or None.
        steps: the steps that were begun.
        seconds: all of it took.
        reason: why it did not run to its end, for people.
    """

    size: int
    how: Literal["verified", "refused", "measured", "stopped"]
    fits: bool
    peak_bytes: int | None
    predicted_bytes: int | None
    steps: int
    seconds: float
    reason: str = ""

    def __str__(self) -> str:
        said = f"batch size {self.size} {'fits' if self.fits else 'does not fit'}"
        if self.how == "stopped":
            said = f"batch size {self.size} was not through when time was up"
        if self.peak_bytes is not None:
            said += f": peak {format_size(self.peak_bytes)}"
        said += f" ({self.how}, {self.steps} steps, {self.seconds:.1f} s)"
        return f"{said}: {self.reason}" if self.reason else said


class BatchSize(int):
    """A batch size that was run within the budget: an int that knows how it was found.

    Attributes:
        size: the number itself.
        peak_bytes: the most that a step of this size allocated.
        budget_bytes: the budget.
        limit_bytes: what steps were held to: the budget without the margin.
        tries: all that was run, in order.
        full_steps: how many steps that were, of all sizes, those that failed included.
        predicted: where the search first expected the largest size, or None if it never did.
        limited_by: why it is not larger: "budget", "maximum" (the one given), or "time": the search
            was ended, and a larger one may fit.
    """

    size: int
    peak_bytes: int
    budget_bytes: int
    limit_bytes: int
    tries: tuple[Try, ...]
    full_steps: int
    predicted: int | None
    limited_by: LimitedBy

    def __new__(
        cls,
        size: int,
        *,
        budget_bytes: int,
        limit_bytes: int,
        tries: tuple[Try, ...],
        predicted: int | None,
        limited_by: LimitedBy,
    ) -> BatchSize:
        """Take the number, and how it was found."""
        made = super().__new__(cls, size)
        peaks = [t.peak_bytes for t in tries if t.size == size and t.fits]
        made.__dict__.update(
            size=size,
            peak_bytes=peaks[-1],
            budget_bytes=budget_bytes,
            limit_bytes=limit_bytes,
            tries=tries,
            full_steps=sum(t.steps for t in tries),
            predicted=predicted,
            limited_by=limited_by,
        )
        return made

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"a BatchSize is not changed ({name}={value!r})")

    def __reduce__(self) -> tuple[Any, ...]:
        names = ("budget_bytes", "limit_bytes", "tries", "predicted", "limited_by")
        return _rebuilt, (int(self), {name: getattr(self, name) for name in names})

    def __repr__(self) -> str:
        return (
            f"BatchSize({int(self)}, peak {format_size(self.peak_bytes)} of"
            f" {format_size(self.limit_bytes)}, limited by {self.limited_by}, {self.full_steps}"
            f" steps in {len(self.tries)} tries)"
        )

    __str__ = int.__repr__


def _rebuilt(size: int, fields: dict[str, Any]) -> BatchSize:
    return BatchSize(size, **fields)
