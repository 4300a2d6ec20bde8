"""Half precision (being written)."""
from __future__ import annotations
from contextlib import nullcontext
from typing import Any
from collections.abc import Callable
def capture() -> Callable[[], Any]:
    return nullcontext
