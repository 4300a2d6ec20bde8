"""The checker: plays a schedule on a chain and counts its seconds and its bytes.

It shares nothing with the solver but the chain and the operations, so that a mistake in one shows
in the other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NoReturn

from xmem.errors import InvalidScheduleError
from xmem.planner.chain import Chain, Option
from xmem.planner.schedule import Op, parse_ops


def simulate(chain: Chain, ops: Iterable[Op] | str) -> tuple[float, int]:
    """Play a schedule.

    Args:
        chain: what it is a schedule of.
        ops: its operations, or their text.

    Returns:
        Its seconds, and the most bytes that are held at one time, the batch included.

    Raises:
        InvalidScheduleError: an operation reads what is not there, makes or drops a value twice,
            or comes out of order; or work is left undone. It names the operation and the reason.
    """
    world = play(chain, ops)
    return world.total_seconds, world.peak_bytes


def play(chain: Chain, ops: Iterable[Op] | str) -> World:
    """Play a schedule and return what the world is like after it; see `simulate`."""
    world = World(chain)
    for number, op in enumerate(parse_ops(ops) if isinstance(ops, str) else ops):
        world.run(op, number)
    if world.gradient != 0:
        done = "the loss" if world.gradient is None else f"backward of stage {world.gradient - 1}"
        raise InvalidScheduleError(f"the schedule ends, and {done} has not been run")
    return world


@dataclass(frozen=True)
class Instant:
    """What an operation held, while it ran.

    Attributes:
        name: of the operation.
        begin_seconds: when it began.
        end_seconds: when it ended.
        before_bytes: held when it began.
        peak_bytes: the most held until it ended.
    """

    name: str
    begin_seconds: float
    end_seconds: float
    before_bytes: int
    peak_bytes: int


@dataclass
class World:
    """What is held between two operations.

    Attributes:
        chain: what is being run.
        values: the j whose a_j stands by itself.
        kept: for each stage whose activations are held, the number of their option.
        gradient: the j whose delta_j is alive; None before the loss.
        skip_gradients: by stage, bytes of the gradient that skips have brought to its output.
        held_bytes: of all of these.
        peak_bytes: the most so far, at the worst instants inside operations too.
        seconds: of each operation so far.
    """

    chain: Chain
    values: set[int] = field(default_factory=lambda: {0})
    kept: dict[int, int] = field(default_factory=dict)
    gradient: int | None = None
    skip_gradients: dict[int, int] = field(default_factory=dict)
    held_bytes: int = 0
    peak_bytes: int = 0
    seconds: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.held_bytes = self.peak_bytes = self.chain.value_bytes[0]

    def run(self, op: Op, number: int) -> None:
        """Do one operation, the number-th of its schedule."""

        def refuse(reason: str) -> NoReturn:
            raise InvalidScheduleError(f"operation {number}, {op}: {reason}")

        stages = len(self.chain.stages)
        if not 0 <= op.index < stages + (op.code == "Da"):
            refuse(f"the chain has {stages} stages")
        action = {
            "N": self._forward,
            "G": self._forward_kept,
            "L": self._loss,
            "B": self._backward,
            "Da": self._drop_value,
            "Ds": self._drop_kept,
        }.get(op.code)
        if action is None:
            refuse(f"there is no operation {op.code!r}")
        action(op, refuse)

    @property
    def total_seconds(self) -> float:
        """Seconds of all operations so far, added up exactly: their order does not matter."""
        return math.fsum(self.seconds)

    def held(self) -> list[str]:
        """Name what is held beside the batch and the last gradient."""
        return [f"a_{j}" for j in sorted(self.values - {0})] + [f"abar_{i}" for i in self.kept]

    def _peak(self, more: int) -> None:
        self.peak_bytes = max(self.peak_bytes, self.held_bytes + more)

    def _need_value(self, j: int, refuse: Callable[[str], NoReturn]) -> None:
        if j not in self.values and j - 1 not in self.kept:
            refuse(f"a_{j} is not there")

    def _need_inputs(self, i: int, refuse: Callable[[str], NoReturn]) -> None:
        self._need_value(i, refuse)
        for skip in self.chain.skips:
            if skip.target == i:
                self._need_value(skip.source + 1, refuse)

    def _option(self, i: int, k: int) -> Option:
        return self.chain.stages[i].options[k]

    def _forward(self, op: Op, refuse: Callable[[str], NoReturn]) -> None:
        self._need_inputs(op.index, refuse)
        if op.index + 1 in self.values:
            refuse(f"a_{op.index + 1} is there already")
        stage, made = self.chain.stages[op.index], self.chain.value_bytes[op.index + 1]
        self._peak(made + stage.temporary_bytes)
        self.values.add(op.index + 1)
        self.held_bytes += made
        self.seconds.append(stage.forward_seconds)

    def _forward_kept(self, op: Op, refuse: Callable[[str], NoReturn]) -> None:
        self._need_inputs(op.index, refuse)
        if op.index in self.kept:
            refuse(f"stage {op.index} is kept already")
        count = len(self.chain.stages[op.index].options)
        if not 0 <= op.option < count:
            refuse(f"stage {op.index} has {count} option(s)")
        option = self._option(op.index, op.option)
        self._peak(option.kept_bytes + option.forward_extra_bytes)
        self.kept[op.index] = op.option
        self.held_bytes += option.kept_bytes
        self.seconds.append(option.forward_seconds)

    def _loss(self, op: Op, refuse: Callable[[str], NoReturn]) -> None:
        last = len(self.chain.stages)
        if self.gradient is not None:
            refuse("the loss has been run")
        self._need_value(last, refuse)
        self.gradient = last
        self.held_bytes += self.chain.value_bytes[last]
        self._peak(0)

    def _backward(self, op: Op, refuse: Callable[[str], NoReturn]) -> None:
        i = op.index
        if self.gradient != i + 1:
            refuse(f"the gradient of a_{i + 1} is not there")
        if i not in self.kept:
            refuse(f"stage {i} is not kept")
        self._need_inputs(i, refuse)
        option = self._option(i, self.kept[i])
        self._peak(option.backward_extra_bytes)
        del self.kept[i]
        self.gradient = i
        sizes = self.chain.value_bytes
        self.held_bytes += sizes[i] - sizes[i + 1] - option.kept_bytes
        self._pass_skip_gradients(i)
        self.seconds.append(option.backward_seconds)

    def _pass_skip_gradients(self, i: int) -> None:
        """Add the gradients that B(i) gives to skips; the one of a_i is now part of delta_i."""
        for skip in self.chain.skips:
            if skip.target == i:
                before = self.skip_gradients.get(skip.source, 0)
                self.skip_gradients[skip.source] = max(before, skip.size_bytes)
                self.held_bytes += max(skip.size_bytes - before, 0)
        self.held_bytes -= self.skip_gradients.pop(i - 1, 0)

    def _drop_value(self, op: Op, refuse: Callable[[str], NoReturn]) -> None:
        if op.index == 0:
            refuse("the batch is held all step")
        if op.index not in self.values:
            refuse(f"a_{op.index} is not there")
        self.values.remove(op.index)
        self.held_bytes -= self.chain.value_bytes[op.index]

    def _drop_kept(self, op: Op, refuse: Callable[[str], NoReturn]) -> None:
        if op.index not in self.kept:
            refuse(f"stage {op.index} is not kept")
        self.held_bytes -= self._option(op.index, self.kept.pop(op.index)).kept_bytes
