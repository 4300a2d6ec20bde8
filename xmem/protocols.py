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
    Cast,
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

    from xmem.casting import Casting
    from xmem.workloads.spec import Layer

__all__ = [
    "CATEGORIES",
    "Cast",
    "Category",
    "Checkpoint",
    "Cost",
    "Counters",
    "Framework",
    "Measure",
    "Models",
    "Precision",
    "Recompute",
    "Scaler",
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

    def check_dtype(self, dtype: str) -> str:
        """Return the half type that a name means: "auto" is what this device computes best.

        Raises:
            UsageError: there is no such type.
            CapabilityError: this backend does not offer it, with the reason.
        """

    def autocast(self, casting: Casting) -> AbstractContextManager[Any]:
        """Compute what is safe in a half type inside a `with` block.

        Enters `xmem.casting.in_force(casting)`, tells `casting` what runs (`Casting.note`), and has
        recomputed regions enter `casting.again()`. A casting that is not enabled makes a region of
        plain precision, also inside another block. Nothing is left behind after the block.
        """

    def raised(self, value: Any) -> Any:
        """Return a half tensor in float32, as part of the graph; all else as it is."""

    def make_scaler(
        self,
        *,
        init_scale: float,
        growth_factor: float,
        backoff_factor: float,
        growth_interval: int,
        enabled: bool,
    ) -> Scaler:
        """Return what `xmem.GradScaler` delegates to."""

    def cast_model(self, model: Any, dtype: str, optimizer: Any) -> Cast:
        """Turn parameters and buffers into a half type; running statistics stay float32.

        Args:
            model: the module; nothing of it is changed if an error is raised.
            dtype: the half type.
            optimizer: gets float32 masters of the model's parameters, from what these were before,
                in their places, with its state kept; or None. Its gradients are the masters', in
                float32, as soon as backward has made them. After each step the parameters are
                the masters, rounded.

        Raises:
            UsageError: the model is in half precision already, or the optimizer's parameters are
                not the model's.
        """


class Scaler(Protocol):
    """What scales losses on a backend; the checks of order are in `xmem.GradScaler`."""

    def scale(self, loss: Any) -> Any:
        """Return the loss times the scale."""

    def unscale_(self, optimizer: Any) -> None:
        """Divide the optimizer's gradients by the scale, and note whether all are finite."""

    def step(self, optimizer: Any) -> Any:
        """Unscale if that has not been done, and step if all gradients are finite.

        Else no parameter, no state and no count of steps changes.
        """

    def update(self, new_scale: float | None) -> None:
        """Set a new scale, or let it back off or grow."""

    def forget(self, optimizer: Any) -> None:
        """Take the optimizer's next gradients for scaled ones: those it had are gone."""

    def get_scale(self) -> float:
        """Return the scale."""

    def state_dict(self) -> dict[str, Any]:
        """Return the scale, factors, interval and count of finite steps, as PyTorch names them."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up what `state_dict` gave."""


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

    def optimizer_step(self, optimizer: Any) -> Any:
        """Update the parameters from the gradients that `backward` left.

        Raises:
            UsageError: there are no gradients.
        """

    def zero_grad(self, optimizer: Any) -> None:
        """Forget the gradients and give their memory back."""

    def clip_grad_norm_(self, target: Any, max_norm: float, *, norm_type: float) -> Any:
        """Scale gradients by min(1, max_norm / (norm + 1e-6)); returns the norm before, a scalar.

        Args:
            target: the optimizer; parameters too, where gradients belong to those.
            max_norm: the largest norm, above 0.
            norm_type: the p of the norm, above 0; infinity for the largest value.

        Raises:
            UsageError: there are no gradients.
        """

    def finish_micro_batch(self, optimizer: Any) -> None:
        """Have nothing left of a micro-batch but gradients (a lazy framework computes them)."""

    def unreduced(self, model: Any) -> AbstractContextManager[Any]:
        """Let a data-parallel model not reduce gradients inside the block.

        Raises:
            UsageError: the model is not data-parallel.
        """

    def no_grad(self) -> AbstractContextManager[None]:
        """Keep nothing for backward inside the block."""

    def evaluating(self, model: Any) -> AbstractContextManager[int]:
        """Put all modules of a model into evaluation mode inside the block; gives their number.

        Afterwards each has its own training flag again, and each parameter wants gradients as it
        did.
        """

    def value(self, loss: Any) -> float:
        """Return a scalar's value; this waits for it and holds nothing."""

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
