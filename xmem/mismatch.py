"""What to say when a recomputation differs from the first pass, and how values are compared."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from xmem.errors import RecomputeMismatchError

CAUSES = {
    "autocast": (
        "the precision in force was another one. Enter autocast around the whole forward pass, and"
        " not by a flag that changes between forward and backward."
    ),
    "randomness": (
        "random numbers that the second pass draws anew. Use preserve_rng=True, and draw from the"
        " framework, from Python's random, from NumPy, or from a generator that the function or"
        " its module holds."
    ),
    "in_place": (
        "a parameter or an input was changed between forward and backward. Step the optimizer after"
        " backward, and clone what you change in place."
    ),
    "mode": (
        "something that depends on training or eval mode, changed between forward and backward."
        " Switch modes after backward."
    ),
    "cache": (
        "something that the function keeps between its calls: a cache, a counter, a list that it"
        " fills. Switch the cache off in training, or keep it outside of the region."
    ),
}
"""Why a second pass may differ, and what to do."""

SAMPLED_VALUES = 4096
_RELATIVE_TOLERANCE = 1e-3  # of the sample's norm: far above rounding, far below other data


def mismatch(name: str, what: str, cause: str) -> RecomputeMismatchError:
    """Return the error for a recomputation that differs.

    Args:
        name: what was recomputed.
        what: the difference, as a sentence without its full stop.
        cause: a key of `CAUSES`.
    """
    return RecomputeMismatchError(
        f"the recomputation of {name!r} differs from its first pass: {what}."
        f" Likely cause: {CAUSES[cause]}",
        module=name,
        cause=cause,
    )


def function_name(function: Callable[..., Any]) -> str:
    """Return what to call a function that was given no name."""
    owner = getattr(function, "__self__", None)
    if owner is not None and not isinstance(owner, type):
        return type(owner).__name__
    name = getattr(function, "__qualname__", None)
    return str(name) if name is not None else type(function).__name__


def sample_step(count: int) -> int:
    """Return the distance between the sampled ones of so many values; odd, so that it wanders."""
    return max(1, count // SAMPLED_VALUES) | 1


def differs(first: Any, second: Any) -> bool:
    """Say whether two samples, NumPy arrays of one shape, are of different values."""
    import numpy as np

    if first.shape != second.shape:
        return True
    a, b = first.astype(np.float64), second.astype(np.float64)
    finite = np.isfinite(a)
    if not np.array_equal(finite, np.isfinite(b)):
        return True
    distance = float(np.linalg.norm(a[finite] - b[finite]))
    return distance > _RELATIVE_TOLERANCE * float(np.linalg.norm(a[finite]))


@contextmanager
def as_they_were(flags: Sequence[tuple[Any, Any]], attribute: str) -> Iterator[None]:
    """Give modules their training flags of the first pass inside the block.

    Args:
        flags: (module, the flag's value in the first pass).
        attribute: the flag's name.
    """
    changed = [
        (module, was, now) for module, was in flags if (now := getattr(module, attribute)) != was
    ]
    for module, was, _ in changed:
        setattr(module, attribute, was)
    try:
        yield
    finally:
        for module, _, now in changed:
            setattr(module, attribute, now)
