"""The allocator flags of Jittor 1.3.11 that give silently wrong results, or that hide bytes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jittor as jt

from xmem.errors import MeasurementError

WRONG = (
    "an allocator that cannot share memory between views: its results are silently wrong, and"
    " xmem does not count it"
)
HIDDEN = (
    "Jittor's statistics under its pool, which replace the pool that xmem counts and tell less than"
    " xmem.pool.stats()"
)

# Each hands out memory that views cannot share, and reshape then reads what nobody wrote.
BROKEN: Mapping[str, Mapping[int, str]] = {
    "use_sfrl_allocator": {0: WRONG},
    "use_nfef_allocator": {1: WRONG},
    "use_stat_allocator": {2: WRONG},
}
# What else xmem cannot work with.
UNCOUNTED: Mapping[str, Mapping[int, str]] = {"use_stat_allocator": {1: HIDDEN}}
WORKING = {"use_sfrl_allocator": 1, "use_nfef_allocator": 0, "use_stat_allocator": 0}


def has(name: str) -> bool:
    """Say whether this Jittor has a flag."""
    return hasattr(jt.flags, name)


def reason(name: str, value: Any) -> str | None:
    """Return why a flag must not have a value, or None if it may."""
    return BROKEN.get(name, {}).get(value) or UNCOUNTED.get(name, {}).get(value)


def refuse_broken() -> None:
    """Refuse to go on where a flag gives wrong results, wherever it was set.

    Raises:
        MeasurementError: with the flag and its remedy.
    """
    for name in BROKEN:
        value = getattr(jt.flags, name) if has(name) else None
        why = BROKEN[name].get(value) if isinstance(value, int) else None
        if why is not None:
            raise MeasurementError(
                f"Jittor runs with {name}={value}, {why}. Set {name}={WORKING[name]}."
            )
