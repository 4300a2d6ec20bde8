"""What a case of one process and one of several ranks have in common: steps, and figures."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from xmem.meter import Measurement

WARM_UP_STEPS = 2
MEASURED_STEPS = 3


def told_losses(losses: Iterable[float]) -> tuple[float | None, ...]:
    """Return losses as a result holds them: None where one is not finite."""
    return tuple(loss if math.isfinite(loss) else None for loss in losses)


def told_categories(measurement: Measurement) -> dict[str, int] | None:
    """Return the categories of a peak that have bytes; None where they are not known."""
    if measurement.by_category is None:
        return None
    return {name: size for name, size in measurement.by_category.items() if size}
