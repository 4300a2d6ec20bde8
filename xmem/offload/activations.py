"""Offloaded activations: what backward will read leaves the device, and comes back before it.

Minsoo Rhu et al., "vDNN: Virtualized Deep Neural Networks for Scalable, Memory-Efficient Neural
Network Design", MICRO 2016; Olivier Beaumont et al., "Efficient Combination of Rematerialization
and Offloading for Training DNNs", NeurIPS 2021 (POFO).
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xmem.api import active
from xmem.errors import UsageError, XmemWarning
from xmem.offload.opening import opened
from xmem.receipts import Receipt, issue
from xmem.saving import Away, Candidate, Choice
from xmem.saving_together import in_force
from xmem.selection import Selection
from xmem.sizes import format_size, parse_size

if TYPE_CHECKING:
    from xmem.backend import Backend
    from xmem.offload.depot import Depot, To

MIN_BYTES = 64 << 10
"""Smaller tensors stay on the device."""


IN_FLIGHT_BYTES = 32 << 20
"""What may be on its way out at once."""


class Offloading:
    """A block that offloads; a policy of `xmem.saving`.

    Attributes:
        raw_bytes: what the tensors that left took on the device, all forward passes added up.
        away_bytes: what of them is in the depot: less where they were packed first.
        kept_bytes: what stays on the device, by reason.
        layers: the layers that offloaded tensors belong to.
    """

    sends_away = True

    def __init__(
        self,
        backend: Backend,
        depot: Depot,
        selection: Selection,
        *,
        min_bytes: int,
        prefetch_bytes: int,
    ) -> None:
        self._backend = backend
        self._selection = selection
        self._min_bytes = min_bytes
        self._away = Away(depot, prefetch_bytes, IN_FLIGHT_BYTES)
        self._entered: ExitStack | None = None
        self.raw_bytes = 0
        self.away_bytes = 0
        self.kept_bytes: dict[str, int] = {}
        self.layers: dict[str, None] = {}

    @property
    def depot(self) -> Depot:
        """Where bytes go."""
        return self._away.depot

    def __enter__(self) -> Offloading:
        if self._entered is not None:
            raise UsageError("this block of xmem.offload_activations has been entered already")
        with ExitStack() as entered:
            policy = entered.enter_context(in_force(self))
            block = self._backend.saved.saving(policy, model=self._selection.model)
            self._selection.check_names()
            entered.enter_context(block)
            self._entered = entered.pop_all()
        return self

    def __exit__(self, *error: Any) -> bool | None:
        entered, self._entered = self._entered, None
        assert entered is not None
        suppressed = entered.__exit__(*error)
        if error[0] is None:
            issue(self.receipt)
            self._selection.warn_of_missed("offload_activations")
        return bool(suppressed)

    def choose(self, candidate: Candidate) -> Choice:
        """See `xmem.saving.Policy`."""
        if candidate.nbytes < self._min_bytes:
            return Choice(None, reason=f"below {format_size(self._min_bytes)}")
        if self._selection.skips(candidate):
            return Choice(None, reason="skipped")
        return Choice(None, away=self._away)

    def packed(
        self,
        candidate: Candidate,
        packed_bytes: int,
        *,
        exact: bool = False,
        away_bytes: int = 0,
    ) -> None:
        """See `xmem.saving.Policy`."""
        self.raw_bytes += candidate.nbytes
        self.away_bytes += away_bytes
        self.layers[candidate.layer] = None

    def kept(self, candidate: Candidate, reason: str) -> None:
        """See `xmem.saving.Policy`."""
        self._selection.skips(candidate)
        self.kept_bytes[reason] = self.kept_bytes.get(reason, 0) + candidate.nbytes

    @property
    def receipt(self) -> Receipt:
        """What left, and what not and why."""
        kept = ", ".join(f"{reason} {format_size(n)}" for reason, n in self.kept_bytes.items())
        note = f"{format_size(self.away_bytes)} to {self._away.depot.to}"
        if kept and self.layers:
            note += f"; on the device stay: {kept}"
        elif kept:
            note = f"On the device stay: {kept}. Lower min_bytes, or name less in skip."
        elif not self.layers:
            note = "Run forward passes inside the block, where gradients are recorded."
        return Receipt(
            "offload_activations",
            self._backend.name,
            len(self.layers),
            tuple(self.layers),
            expected_saving_bytes=self.raw_bytes,
            note=note,
        )


_open: dict[tuple[int, str, str], Depot] = {}


def _depot(to: To, directory: str | Path | None) -> Depot:
    """Return a depot, the same in every step: a file that is there has its pages already.

    One that has failed is used no more, and a process that was forked has its own.
    """
    chosen = directory if directory is not None else os.environ.get("XMEM_OFFLOAD_DIR")
    key = (os.getpid(), to, str(chosen))
    failure = _open[key].failure if key in _open else None
    if failure is not None:
        warnings.warn(
            f"offload_activations begins anew, since the blocks before ended so: {failure}",
            XmemWarning,
            stacklevel=3,
        )
    if key not in _open or failure is not None:
        _open[key] = opened(to, directory, "offload_activations")
    return _open[key]


def offload_activations(
    to: To = "host",
    *,
    min_bytes: int | str = "64KiB",
    prefetch: int | str = "64MiB",
    skip: Sequence[Any] = (),
    model: Any = None,
    directory: str | Path | None = None,
) -> Offloading:
    """Let what forward passes in a block leave for backward leave the device until then.

    Use as `with xmem.offload_activations(to="disk"): loss = ...`; backward may run inside or after.
    Losses and gradients do not change. Parameters, the half copies that autocast makes of them,
    buffers and the data given to a model stay. Around checkpointed regions, their inputs leave.
    Inside or around `xmem.compress_activations`, packed bytes leave.

    Args:
        to: "host" or "disk". On a CPU "host" leaves the framework's pool but not the machine's
            memory, which is warned of.
        min_bytes: smaller tensors stay on the device.
        prefetch: how many bytes are read back before backward asks for them, at most; nor more than
            the largest tensor that left, or a sixteenth of all. They are on the device meanwhile.
            (Jittor: the system is told to read ahead; nothing is on the device before it is
            needed.)
        skip: what stays: tensors, or layers with all inside, by paths, as modules or by class.
        model: paths begin there, and are checked; otherwise at the outermost module that runs.
        directory: of the scratch file for "disk"; None: $XMEM_OFFLOAD_DIR, or the system's for
            temporary files.

    Returns:
        A block; `.receipt` says what left, and what not and why. Applied to nothing warns.

    Raises:
        UsageError: another `to`, or a path that leads nowhere in `model`.
        OffloadError: the directory is missing or cannot be written to; in forward or backward:
            the disk is full, or bytes do not come back. Nothing is lost when bytes cannot be
            stored: they stay on the device.
        CompositionError: on entering, or where a module is called, if it cannot work there.
    """
    backend = active()
    sizes = {"min_bytes": parse_size(min_bytes), "prefetch_bytes": parse_size(prefetch)}
    selection = Selection(backend, skip, model)
    return Offloading(backend, _depot(to, directory), selection, **sizes)
