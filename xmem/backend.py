"""The frozen Backend that `xmem.use()` returns, and what stands in for a missing capability."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from xmem.errors import CapabilityError

if TYPE_CHECKING:
    from xmem.distributing import Distributed
    from xmem.offloading import Offload
    from xmem.playing import Plans
    from xmem.pooling import Pool
    from xmem.protocols import Checkpoint, Measure, Models, Precision, Training
    from xmem.quantizing import Quantize
    from xmem.saving import Saved

CAPABILITIES: tuple[str, ...] = (
    "measure",
    "checkpoint",
    "precision",
    "training",
    "models",
    "plans",
    "pool",
    "saved",
    "quantize",
    "distributed",
    "offload",
)


class MissingCapability:
    """Stands where a backend offers nothing: every use of it raises, with the remedy."""

    __slots__ = ("_backend", "_capability", "_offered_by")

    def __init__(self, backend: str, capability: str, offered_by: tuple[str, ...]) -> None:
        object.__setattr__(self, "_backend", backend)
        object.__setattr__(self, "_capability", capability)
        object.__setattr__(self, "_offered_by", offered_by)

    def __bool__(self) -> bool:
        return False

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        offered = ", ".join(self._offered_by) or "nothing"
        raise CapabilityError(
            f"backend {self._backend!r} does not offer {self._capability!r} (asked for"
            f" {name!r}). It offers: {offered}. Use another backend (xmem.backends() lists them),"
            f" or install a distribution that adds the hook xmem_{self._capability} to it."
        )


@dataclass(frozen=True)
class Backend:
    """A framework in use, with its capabilities bound.

    Attributes:
        name: the entry point's name, e.g. "torch".
        device: "cpu" or "cuda".
        framework_version: the framework's own version.
        distribution: the distribution that the backend comes from, with its version.
        capabilities: the names of what it offers.
    """

    name: str
    device: str
    framework_version: str
    distribution: str
    capabilities: tuple[str, ...]
    measure: Measure
    checkpoint: Checkpoint
    precision: Precision
    training: Training
    models: Models
    plans: Plans
    pool: Pool
    saved: Saved
    quantize: Quantize
    distributed: Distributed
    offload: Offload

    def offers(self, capability: str) -> bool:
        """Say whether a capability is there."""
        return capability in self.capabilities
