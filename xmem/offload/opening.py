"""Open a depot for a technique, and say what going there does not save."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import TYPE_CHECKING

from xmem.api import active
from xmem.errors import XmemWarning
from xmem.leak_lines import stack_level
from xmem.offload.depot import Depot

if TYPE_CHECKING:
    from xmem.offload.depot import To


def opened(to: To, directory: str | Path | None, technique: str) -> Depot:
    """Return a new depot; warns where it does not take memory off the machine.

    Raises:
        UsageError: another `to`, or a directory for "host".
        OffloadError: the directory is missing or cannot be written to.
    """
    depot = Depot(to, directory=directory)
    warn_of_host(to, technique)
    if depot.in_memory:
        warnings.warn(
            f"{technique}(to='disk'): {str(depot.directory)!r} is memory (tmpfs), not a disk: the"
            " bytes leave the framework's pool and stay in the machine's memory. Give directory=,"
            " or set XMEM_OFFLOAD_DIR, to a directory on a disk.",
            XmemWarning,
            stacklevel=stack_level(),
        )
    return depot


def warn_of_host(to: To, technique: str) -> None:
    """Warn where going to the host does not take memory off the machine."""
    if to == "host" and active().device == "cpu":
        warnings.warn(
            f"{technique}(to='host'): on a CPU the device's memory is the host's. The bytes leave"
            " the framework's pool and count no more as allocated, and the process keeps them."
            " To take them out of memory, use to='disk'.",
            XmemWarning,
            stacklevel=stack_level(),
        )
