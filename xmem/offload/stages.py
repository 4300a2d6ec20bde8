"""Where what stages of a plan keep goes when it leaves the device."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from xmem.offload.depot import Depot
from xmem.saving import Away

if TYPE_CHECKING:
    from xmem.offload.depot import To


class Depots:
    """The depots of a model's plan, opened when one is first asked for.

    Closed when neither a plan nor anything that is stored needs them any more.

    Args:
        directory: of scratch files, see `Depot`.
    """

    def __init__(self, directory: str | Path | None = None) -> None:
        self._directory = directory
        self._open: dict[To, Away] = {}

    def away(self, to: To) -> Away:
        """Return where things go.

        Raises:
            UsageError: another `to`, or a directory for "host".
            OffloadError: the directory is missing or cannot be written to.
        """
        if to not in self._open:
            self._open[to] = Away(Depot(to, directory=self._directory))
        return self._open[to]
