"""What happens to what forward leaves for backward: the contract between policies and backends.

A backend has one mechanism (`saved.py` in each) that finds what backward will read. A policy says
for each such tensor what is to be done with it. Compression (`xmem.compressing`) and offload
(`xmem.offload.activations`) are such policies, and both together one that asks both.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    from xmem.offload.depot import Depot


@dataclass(frozen=True)
class Candidate:
    """A tensor that backward will read and that belongs to no parameter or buffer.

    Attributes:
        layer: the path of the innermost module that runs, "" outside of all.
        dtype: its type, e.g. "float32", "bool", "int64".
        shape: its shape.
        nbytes: its size in bytes.
        module: the module itself, where there is one.
        tensor: the tensor, for policies that are asked for particular ones.
    """

    layer: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    module: Any = None
    tensor: Any = None


@dataclass(frozen=True, eq=False)
class Away:
    """Where the bytes of saved tensors go, and how.

    Attributes:
        depot: holds them. On CUDA a backend may keep what goes to "host" in pinned memory of its
            framework instead.
        prefetch_bytes: how much is read back before backward asks for it, at most; 0: nothing.
        in_flight_bytes: how much may be on its way out at once, at most: so much stays on the
            device meanwhile.
        when_needed: it stays until memory runs out (`on_oom="offload"`), and leaves only then.
    """

    depot: Depot
    prefetch_bytes: int = 0
    in_flight_bytes: int = 32 << 20
    when_needed: bool = False


@dataclass(frozen=True)
class Choice:
    """What is to be done with a tensor.

    Attributes:
        bits: 8, 4 or 2: packed by `xmem.codec`; None: kept as it is.
        seed: of the rounding.
        reason: why it is kept, a few words.
        exact: what loses nothing is tried before: masks as bits, integers as offsets
            (`xmem.exact`). A backend may leave out what its framework has no such tensors for.
        away: where its bytes go, packed or as they are; None: they stay on the device.
    """

    bits: int | None
    seed: int = 0
    reason: str = ""
    exact: bool = False
    away: Away | None = None


class Policy(Protocol):
    """Says what is done with saved tensors, and is told what was done."""

    def choose(self, candidate: Candidate) -> Choice:
        """Say what is to be done with a tensor. Called once for tensors that share memory."""

    def packed(
        self,
        candidate: Candidate,
        packed_bytes: int,
        *,
        exact: bool = False,
        away_bytes: int = 0,
    ) -> None:
        """Note what became of a tensor.

        Args:
            candidate: the tensor.
            packed_bytes: what it takes on the device from now on; 0 where all of it leaves.
            exact: it was packed without loss, or not packed.
            away_bytes: what of it leaves the device.
        """

    def kept(self, candidate: Candidate, reason: str) -> None:
        """Note that a tensor was kept as it is, and why."""


@runtime_checkable
class Saved(Protocol):
    """Decide what happens to what backward will read: hook `xmem_saved`."""

    gaps: Mapping[str, str]

    def saving(self, policy: Policy, *, model: Any) -> AbstractContextManager[Any]:
        """Treat what forward passes inside a `with` block leave for backward as a policy says.

        Backward may run inside the block or after it. Losses do not change; gradients change by the
        codec's rounding only. A tensor changed in place between forward and backward raises as it
        does without. Blocks nest: the innermost counts. Everything is undone at the end.

        Args:
            policy: what is done.
            model: names layers by their paths in it; None: paths begin at the outermost module
                that runs.

        Raises:
            CompositionError: the block cannot work where it is entered, with the reason.
        """
