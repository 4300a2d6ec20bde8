"""Text to learn from that is always at hand: xmem's own sources, which are half prose."""

from __future__ import annotations

import functools
from importlib import resources
from typing import Any

import numpy as np

CHARACTERS = 96
"""Printable ASCII and the end of a line; the ids are in the order of their codes."""


@functools.cache
def corpus() -> np.ndarray[Any, np.dtype[np.int32]]:
    """Return the ids of all characters, one file after the other, in the order of their names."""
    files = sorted(
        (f for f in resources.files("xmem").iterdir() if f.name.endswith(".py")),
        key=lambda f: f.name,
    )
    text = "\n".join(f.read_text(encoding="utf-8") for f in files)
    codes = np.frombuffer(text.encode("ascii", errors="ignore"), np.uint8)
    printable = codes[(codes >= 32) & (codes < 127) | (codes == 10)].astype(np.int32)
    return np.where(printable == 10, 0, printable - 31).astype(np.int32)
