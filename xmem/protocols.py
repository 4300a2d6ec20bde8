"""What a backend offers: one Protocol per capability, each method documented here once.

A backend implements as many of these as it can, hands them out from its pluggy hooks
(`xmem.hookspecs`), and says of the rest why they are missing. A capability object may carry
`gaps`, a mapping from a feature ("bfloat16") to the reason why this framework lacks it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from xmem.records import (
    CATEGORIES,
    Category,
    Cost,
    Counters,
    Framework,
    Recompute,
    Session,
    Tagged,
)

if TYPE_CHECKING:
    import numpy as np

    from xmem.workloads.spec import Layer

__all__ = [
    "CATEGORIES",
    "Category",
    "Checkpoint",
    "Cost",
    "Counters",
    "Framework",
    "Measure",
    "Models",
    "Precision",
    "Recompute",
    "Session",
    "Tagged",
    "Training",
]


@runtime_checkable
class Measure(Protocol):
    """Count bytes exactly: hook `xmem_measure`."""

    gaps: Mapping[str, str]

    @property
    def source(self) -> str:
        """How bytes are counted: "allocator", "profiler" or "cuda"."""

    def synchronize(self) -> None:
        """Wait until all work that was asked for has been executed."""

    def counters(self) -> Counters:
        """Read the counters. Reads no tensor values."""

    def reset_peak(self) -> None:
        """Let the peaks start again from what is allocated now."""

    def set_limit(self, limit_bytes: int | None) -> None:
        """Refuse allocations beyond a number of live bytes; None takes the limit away.

        A refused request raises the framework's own out-of-memory error, and the framework
        stays usable.

        Raises:
            UsageError: the limit is negative.
        """

    def owned(self, model: Any, optimizer: Any, inputs: Any) -> Mapping[Category, Sequence[Any]]:
        """Return the tensors that model, optimizer and inputs own, by category.

        Reads no values and allocates nothing. Each argument may be None; `model` and `inputs`
        may be nested sequences and mappings.
        """

    def tag(self, category: Category, tensors: Iterable[Any]) -> Tagged:
        """Give the allocations behind tensors a category, also at the last peak.

        An allocation that was alive at the last peak moves in the peak's breakdown too, so a
        gradient may be tagged after backward has passed the peak.
        """

    def tag_untagged(self, category: Category) -> None:
        """Give every live allocation that nobody has claimed a category."""

    def peak_by_category(self) -> dict[Category, int] | None:
        """Return bytes by category at the instant of the peak; they sum to the peak.

        None where the source cannot tell.
        """

    def watch(
        self, model: Any, optimizer: Any, record: Callable[[str], None]
    ) -> AbstractContextManager[None]:
        """Follow forward, backward and optimizer steps inside a `with` block.

        Marks what forward left for backward as activations, and tags gradients as they come.
        Calls `record(phase)` with "backward", "backward_end", "optimizer_end" at the boundaries
        that the framework shows. Everything is undone at the end of the block.
        """

    def settings(self) -> dict[str, str]:
        """Return the framework's flags that change memory or time (threads, allocator...)."""


@runtime_checkable
class Checkpoint(Protocol):
    """Recompute instead of keeping: hook `xmem_checkpoint`."""

    gaps: Mapping[str, str]

    def checkpoint(
        self,
        function: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        how: Recompute,
    ) -> Any:
        """Call a function, keep only its inputs, and call it again in backward.

        The second call sees what the first saw: parameters, random numbers, precision, training
        flags. Running statistics are updated once. Without gradients this is a plain call.

        Args:
            function: a module or any callable; it may read parameters and tensors around it.
            args: its inputs; tensors, containers of tensors and plain values.
            kwargs: its keyword inputs.
            how: what is replayed and checked.

        Raises:
            RecomputeMismatchError: in backward, if the second call does not do what the first did.
            CompositionError: the function cannot be recomputed, with the reason.
        """

    def checkpoint_block(
        self,
        function: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        how: Recompute,
        *,
        ends: bool,
    ) -> Any:
        """Call a block of a segment; the blocks of a segment are one region.

        A block continues the region that its inputs come from, if that has not ended and runs
        under the same precision; else it begins one. Whatever else reads what it returns gets the
        value and its gradient; `xmem.deferred` has a way to do this.

        Args:
            function: the block's own forward.
            args: its inputs.
            kwargs: its keyword inputs.
            how: what is replayed and checked.
            ends: it is the last block of its segment.
        """

    def obstacle(self, module: Any) -> str | None:
        """Return why a module cannot be recomputed as part of a region, or None."""

    def cost(
        self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Cost:
        """Measure what a call keeps for backward and how long it takes.

        Changes nothing: random streams, running statistics and gradients stay as they are.
        """

    def is_module(self, value: Any) -> bool:
        """Say whether a value is a module of this framework."""

    def children(self, module: Any) -> Sequence[tuple[str, Any]]:
        """Return the direct submodules with their names, in order."""

    def is_container(self, module: Any) -> bool:
        """Say whether a module is a list of modules (Sequential, ModuleList)."""

    def replace_forward(
        self, module: Any, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]
    ) -> Callable[[], None]:
        """Let a module run `wrap(forward)` instead of its forward; returns the undo."""


@runtime_checkable
class Precision(Protocol):
    """Compute in half precision, keep masters in float32: hook `xmem_precision`."""

    gaps: Mapping[str, str]

    def default_dtype(self) -> str:
        """Return what "auto" means here: the half type this device computes best."""

    def autocast(
        self, dtype: str, *, keep_fp32: Sequence[str] = (), enabled: bool = True
    ) -> AbstractContextManager[Any]:
        """Run what is safe in a half type inside a `with` block.

        Args:
            dtype: "auto", "bfloat16" or "float16".
            keep_fp32: names of operations to leave in float32.
            enabled: False makes a region of plain precision, also inside another block.
        """


@runtime_checkable
class Training(Protocol):
    """The steps of a training loop under one name: hook `xmem_training`."""

    gaps: Mapping[str, str]

    def make_optimizer(self, name: str, model: Any, *, learning_rate: float) -> Any:
        """Return the framework's optimizer with the update rule that `name` fixes.

        "sgd": p -= lr g. "adam": Kingma and Ba (ICLR 2015), betas 0.9 and 0.999, eps 1e-8, in the
        form p -= lr (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps).
        """

    def backward(self, loss: Any, optimizer: Any) -> None:
        """Compute the gradients of a scalar loss for the optimizer's parameters."""

    def optimizer_step(self, optimizer: Any) -> None:
        """Update the parameters from the gradients that `backward` left."""

    def zero_grad(self, optimizer: Any) -> None:
        """Forget the gradients and give their memory back."""

    def gradients(self, model: Any, optimizer: Any) -> dict[str, np.ndarray[Any, Any]]:
        """Return the gradients by parameter name, as float32 arrays."""


@runtime_checkable
class Models(Protocol):
    """Build the conformance workloads in the framework: hook `xmem_models`."""

    gaps: Mapping[str, str]

    def build(self, spec: Layer, weights: Mapping[str, np.ndarray[Any, Any]]) -> Any:
        """Return a module in training mode, on the backend's device, from a declaration.

        Args:
            spec: the declaration; parameter names are the paths of its layers.
            weights: every parameter by name, float32, in PyTorch's layouts: Linear
                (out, in), Conv (out, in, *kernel), ConvTranspose (in, out, *kernel).
        """

    def blocks(self, model: Any) -> list[Any]:
        """Return the modules that a `Block` of the declaration became, in order."""

    def tensor(self, array: np.ndarray[Any, Any]) -> Any:
        """Return a tensor on the backend's device.

        float32 stays float32; integers become the type that the framework takes as ids.
        """

    def loss(self, kind: str, output: Any, target: Any) -> Any:
        """Return the scalar loss.

        Args:
            kind: "mse", or "cross_entropy" over the class axis: the last one of an output
                with as many axes as the target plus one where `kind` is "cross_entropy", and
                axis 1 where it is "cross_entropy_channels".
            output: what the model returned.
            target: (batch, ...) classes, or the same shape as the output for "mse".
        """

    def item(self, loss: Any) -> float:
        """Return a scalar's value; this waits for it."""
