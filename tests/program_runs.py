"""Runs of random programs: what goes in, what is left, and how two of them differ."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from program_models import VOCABULARY, Builder
from programs import Program

import xmem


def numbers(program: Program) -> tuple[Any, Any]:
    """Return the input and what the output is weighted with."""
    source = np.random.default_rng(11)
    shape = program.batch, program.width
    weights = source.standard_normal(shape).astype(np.float32)
    if program.front in ("embedding", "region"):
        return source.integers(0, VOCABULARY, program.batch), weights
    return source.standard_normal(shape).astype(np.float32), weights


def apply(model: Any, program: Program) -> None:
    """Checkpoint the blocks as the program's layout says."""
    if isinstance(program.layout, tuple):
        segments = [[f"blocks.{i}" for i in segment] for segment in program.layout]
        xmem.apply_checkpointing(model, segments)
    elif program.layout is not None:
        chosen = [model.blocks[i] for i in program.chosen]
        xmem.apply_checkpointing(model, program.layout, blocks=chosen)


@dataclass
class Outcome:
    """What a run has left; arrays are NumPy's.

    Attributes:
        builder: what built the model.
        losses: of each pass.
        outputs: of each pass.
        gradients: of parameters by path, and of "input"; None for none.
        buffers: running statistics by path.
    """

    builder: Builder
    losses: list[Any] = field(default_factory=list)
    outputs: list[Any] = field(default_factory=list)
    gradients: dict[str, Any] = field(default_factory=dict)
    buffers: dict[str, Any] = field(default_factory=dict)

    @property
    def calls(self) -> dict[str, int]:
        """How often each chain has run, by path."""
        return {path: count for path, [count] in self.builder.calls.items()}


def differences(
    program: Program, plain: Outcome, ours: Outcome, same: Callable[[Any, Any, float], bool]
) -> list[str]:
    """Say how a checkpointed run differs from a plain one.

    Args:
        program: what ran.
        plain: the run without regions.
        ours: the run with regions.
        same: compares two arrays, given the size of what they may be small differences of.
    """
    said = []
    known = [g for g in plain.gradients.values() if g is not None]
    largest = max((float(np.abs(g).max()) for g in known), default=0.0)
    for index, (a, b) in enumerate(zip(plain.outputs, ours.outputs, strict=True)):
        if not same(a, b, 0.0):
            said.append(f"output {index}: off by {np.abs(a - b).max():.3g}")
        if not same(plain.losses[index], ours.losses[index], float(np.abs(a).sum())):
            said.append(f"loss {index}: {plain.losses[index]} and {ours.losses[index]}")
    for what, scale in (("gradients", largest), ("buffers", 0.0)):
        left, right = getattr(plain, what), getattr(ours, what)
        assert left.keys() == right.keys()
        for path, a in left.items():
            b = right[path]
            if a is None and b is None:
                continue
            if a is None or b is None:
                said.append(f"{what} {path}: {a} and {b}")
            elif not same(a, b, scale):
                off = np.abs(np.asarray(a - b, np.float64)).max()
                said.append(f"{what} {path}: off by {off:.3g}, largest gradient {largest:.3g}")
    for run in (plain, ours):
        said += [f"{f} got a gradient" for f in run.builder.frozen if run.gradients[f] is not None]
    return said + list(_miscounted(program, plain, ours))


def _miscounted(program: Program, plain: Outcome, ours: Outcome) -> Iterator[str]:
    """Yield where a region has not run once more in backward.

    A region may be spared where no gradient flows; it is known to flow through a region that is
    called once where a parameter of its own gets some, one that is in no region inside it: a region
    that only calls another one with a tensor of its closure keeps nothing itself.
    """
    nested = plain.builder.regions
    flowing = {
        max(
            (path for path in nested if name.startswith((f"{path}.", f"{path}:"))),
            key=len,
            default="",
        )
        for name, gradient in plain.gradients.items()
        if gradient is not None and gradient.any()
    }
    for path in nested:
        once = plain.calls[path]
        found = ours.calls[path]
        flows = path in flowing and once == program.passes and not nested[path]
        if found < once * (2 if flows else 1) or (found > 2 * once and not nested[path]):
            said = f"{2 * once}" if flows else f"{once} to {2 * once}"
            yield f"region {path} ran {found} times, not {said}"
