"""Offloaded activations: what backward will read leaves the device, and comes back before it.

Minsoo Rhu et al., "vDNN: Virtualized Deep Neural Networks for Scalable, Memory-Efficient Neural
Network Design", MICRO 2016; Olivier Beaumont et al., "Efficient Combination of Rematerialization
and Offloading for Training DNNs", NeurIPS 2021 (POFO).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from xmem.offload.depot import To

MIN_BYTES = 64 << 10
"""Smaller tensors stay on the device."""


class Offloading:
    """A block that offloads; a policy of `xmem.saving`.

    Attributes:
        away_bytes: what left the device, all forward passes added up.
        raw_bytes: what those tensors took on the device.
        kept_bytes: what stays on the device, by reason.
        layers: the layers that offloaded tensors belong to.
    """


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
        prefetch: how many bytes are read back before backward asks for them, at most. They are on
            the device meanwhile. (Jittor: the system is told to read ahead; nothing is on the
            device before it is needed.)
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
    raise NotImplementedError
