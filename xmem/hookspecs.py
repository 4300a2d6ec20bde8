"""The pluggy contract of a backend.

A backend is one light module that a distribution names in the entry-point group `xmem`:

    [project.entry-points.xmem]
    mine = "mine_xmem.plugin"

The module implements `xmem_framework`, `xmem_open` and one hook per capability it offers. Another
distribution may add or replace single capabilities of an existing backend under an entry point
`mine:anything`. Each capability hook is called once, by `xmem.use()`; no hot call goes through
pluggy afterwards.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pluggy

if TYPE_CHECKING:
    from xmem.distributing import Distributed
    from xmem.offloading import Offload
    from xmem.playing import Plans
    from xmem.pooling import Pool
    from xmem.protocols import (
        Checkpoint,
        Framework,
        Measure,
        Models,
        Precision,
        Session,
        Training,
    )
    from xmem.quantizing import Quantize
    from xmem.saving import Saved

hookspec = pluggy.HookspecMarker("xmem")
hookimpl = pluggy.HookimplMarker("xmem")


class BackendSpec:
    """Hooks of a backend; the first answer counts."""

    @hookspec(firstresult=True)
    def xmem_framework(self) -> Framework | None:
        """Say which framework this backend drives. Must not import it."""

    @hookspec(firstresult=True)
    def xmem_open(self, device: str) -> Session | None:
        """Prepare the environment, import the framework and choose the device.

        Args:
            device: "auto", "cpu" or "cuda".

        Raises:
            BackendUnavailableError: the device is not there.
        """

    @hookspec(firstresult=True)
    def xmem_measure(self, session: Session) -> Measure | None:
        """Count bytes exactly."""

    @hookspec(firstresult=True)
    def xmem_checkpoint(self, session: Session) -> Checkpoint | None:
        """Recompute instead of keeping."""

    @hookspec(firstresult=True)
    def xmem_precision(self, session: Session) -> Precision | None:
        """Compute in half precision."""

    @hookspec(firstresult=True)
    def xmem_training(self, session: Session) -> Training | None:
        """Run the steps of a training loop under one name."""

    @hookspec(firstresult=True)
    def xmem_models(self, session: Session) -> Models | None:
        """Build the conformance workloads in the framework."""

    @hookspec(firstresult=True)
    def xmem_plans(self, session: Session) -> Plans | None:
        """Play plans: any schedule of a chain of stages."""

    @hookspec(firstresult=True)
    def xmem_pool(self, session: Session) -> Pool | None:
        """Control the framework's memory pool."""

    @hookspec(firstresult=True)
    def xmem_saved(self, session: Session) -> Saved | None:
        """Decide what happens to what backward will read."""

    @hookspec(firstresult=True)
    def xmem_quantize(self, session: Session) -> Quantize | None:
        """Keep optimizer states or weights in few bits."""

    @hookspec(firstresult=True)
    def xmem_distributed(self, session: Session) -> Distributed | None:
        """Reduce, gather and shard across processes."""

    @hookspec(firstresult=True)
    def xmem_offload(self, session: Session) -> Offload | None:
        """Keep optimizer states and parameters away from the device."""


class ObserverSpec:
    """Hooks for people who watch; everyone who registers is called.

    They are historic: who registers late is told what has happened before.
    """

    @hookspec(historic=True)
    def xmem_applied(self, receipt: Any) -> None:
        """Say that a technique was applied; gets its `xmem.receipts.Receipt`."""

    @hookspec(historic=True)
    def xmem_result(self, result: Any) -> None:
        """Say that a case of the matrix ended; gets its `xmem.report.model.Result`."""

    @hookspec(historic=True)
    def xmem_oom(self, diagnosis: Any) -> None:
        """Say that memory ran out; gets the diagnosis."""
