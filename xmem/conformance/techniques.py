"""The techniques of the matrix: how each changes a training step.

A technique is a neutral function of the backend and what it is to be applied to; it returns what to
enter around the forward pass, and what it was applied to.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import xmem
from xmem.errors import UsageError, unknown

if TYPE_CHECKING:
    from xmem.backend import Backend


@dataclass(frozen=True)
class Applied:
    """A technique in force.

    Attributes:
        forward_context: made anew for every forward pass.
        applied_to: from the receipt, or None.
        dtype: the half type in use, or None.
    """

    forward_context: Callable[[], AbstractContextManager[Any]] = nullcontext
    applied_to: int | None = None
    dtype: str | None = None


@dataclass(frozen=True)
class Target:
    """What a technique is applied to.

    Attributes:
        model: the model.
        blocks: the modules that its declaration calls blocks.
        batch: inputs and targets.
        loss_fn: makes the loss of the model and the batch.
    """

    model: Any
    blocks: Sequence[Any]
    batch: tuple[Any, Any]
    loss_fn: Callable[[Any, Any], Any]


@dataclass(frozen=True)
class Technique:
    """What the matrix knows of a technique.

    Attributes:
        name: its name on the command line.
        capabilities: what a backend must offer for it.
        loss_tolerance: how far losses may be from the same backend's baseline, relative.
        gradient_tolerance: how far gradients may be, relative in the L2 norm over all of them.
        apply: puts it in force.
        several_ranks: whether it trains on several ranks; see `xmem.conformance.sharded`.
    """

    name: str
    capabilities: tuple[str, ...]
    loss_tolerance: float
    gradient_tolerance: float
    apply: Callable[[Backend, Target], Applied]
    several_ranks: bool = False


def _baseline(backend: Backend, target: Target) -> Applied:
    return Applied()


def _checkpoint(backend: Backend, target: Target) -> Applied:
    receipt = xmem.apply_checkpointing(target.model, "every", blocks=target.blocks)
    return Applied(applied_to=receipt.applied_to)


def _plan(backend: Backend, target: Target) -> Applied:
    from xmem.planning import least_bytes, whole_bytes

    profile = xmem.profile(target.model, target.batch, target.loss_fn)
    least = least_bytes(profile)
    budget = int(least + _PLAN_SHARE * (whole_bytes(profile) - least))
    receipt = xmem.plan(profile, budget=budget).apply(target.model)
    return Applied(applied_to=receipt.applied_to)


def _autocast(backend: Backend, target: Target) -> Applied:
    dtype = backend.precision.check_dtype("auto")
    return Applied(forward_context=lambda: xmem.autocast(dtype), dtype=dtype)


def _compress(backend: Backend, target: Target) -> Applied:
    model = target.model  # and not the target, which holds the first batch
    return Applied(forward_context=lambda: xmem.compress_activations(bits=8, model=model))


def _offload(backend: Backend, target: Target) -> Applied:
    model = target.model
    return Applied(forward_context=lambda: xmem.offload_activations("disk", model=model))


_PLAN_SHARE = 0.1
"""The budget of a plan: the least, and this share of the way to what keeps everything."""

TECHNIQUES: dict[str, Technique] = {
    t.name: t
    for t in (
        Technique("baseline", (), 0.0, 0.0, _baseline),
        Technique("checkpoint", ("checkpoint",), 1e-6, 1e-5, _checkpoint),
        Technique("plan", ("checkpoint", "plans"), 1e-6, 1e-5, _plan),
        Technique("autocast", ("precision",), 2e-2, 1e-1, _autocast),
        Technique("compress", ("saved",), 1e-2, 2e-2, _compress),
        Technique("offload", ("saved",), 1e-6, 1e-5, _offload),
    )
}
"""What one process does; all of them are run where none is named."""

DISTRIBUTED_TECHNIQUES: dict[str, Technique] = {
    name: Technique(name, ("distributed",), 1e-5, 1e-5, _baseline, several_ranks=True)
    for name in ("data_parallel", "zero1", "zero3", "tensor_parallel", "pipeline")
}
"""What several ranks do; they are run where they are named, or where a number of ranks is."""


def known_technique(name: str) -> Technique | None:
    """Return a technique by name, or None: a report may have some that are unknown here."""
    return TECHNIQUES.get(name) or DISTRIBUTED_TECHNIQUES.get(name)


def technique(name: str) -> Technique:
    """Return a technique by name.

    Raises:
        UsageError: there is none of this name.
    """
    found = known_technique(name)
    if found is None:
        raise UsageError(unknown("technique", name, {**TECHNIQUES, **DISTRIBUTED_TECHNIQUES}))
    return found
