"""Several micro-batches for one update: the gradients of a large batch in the memory of a small."""

from __future__ import annotations

import threading
import weakref
from contextlib import AbstractContextManager, ExitStack
from typing import TYPE_CHECKING, Any

from xmem import in_backward
from xmem.errors import CompositionError, UsageError

if TYPE_CHECKING:
    from xmem.backend import Backend
    from xmem.scaling import GradScaler

# Thread-local, so that a thread of a user's own training is not counted in.
_state = threading.local()


def current() -> Accumulation | None:
    """Return the accumulation that `backward` is called in, in this thread."""
    return getattr(_state, "accumulation", None)


def check(what: str) -> None:
    """Refuse a function between micro-batches; see `Accumulation.check`."""
    accumulation = current()
    if accumulation is not None:
        accumulation.check(what)


_unscaled: list[weakref.ref[Any]] = []


def mark_unscaled(optimizer: Any, *, unscaled: bool) -> None:
    """Note whether a scaler has unscaled the gradients that an optimizer has now."""
    _unscaled[:] = [held for held in _unscaled if held() is not None and held() is not optimizer]
    if unscaled:
        _unscaled.append(weakref.ref(optimizer))


def check_scale(optimizer: Any) -> None:
    """Refuse to add gradients to others that are of another scale.

    Raises:
        UsageError: a scaler has unscaled those that are there.
    """
    if any(held() is optimizer for held in _unscaled):
        raise UsageError(
            "backward after unscale_: gradients of a scaled loss would be added to unscaled ones."
            " Call scaler.step(optimizer) and scaler.update() first"
        )


class Accumulation:
    """A block in which each `xmem.backward` adds a share of the gradient; see `xmem.accumulate`.

    Attributes:
        steps: how many micro-batches there are.
        done: how many have been added.
    """

    def __init__(
        self,
        backend: Backend,
        steps: int,
        optimizer: Any,
        *,
        model: Any,
        scaler: GradScaler | None,
    ) -> None:
        if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
            raise UsageError(f"steps={steps!r}: give the number of micro-batches, from 1")
        if scaler is not None and optimizer is None:
            raise UsageError("scaler= needs optimizer=, which it steps at the end of the block")
        self.steps = steps
        self.done = 0
        self._backend = backend
        self._optimizer = optimizer
        self._model = model
        self._scaler = scaler
        self._apart = ExitStack()
        self._seen: list[Any] = []

    @property
    def is_last(self) -> bool:
        """Whether the micro-batch under way is the last one."""
        return self.done >= self.steps - 1

    def __enter__(self) -> Accumulation:
        if current() is not None:
            raise CompositionError(
                "accumulate inside accumulate: one block counts the micro-batches of one update."
                " Leave the outer block first"
            )
        self.done = 0
        self._seen.clear()
        if self._model is not None and self.steps > 1:
            apart: AbstractContextManager[Any] = self._backend.training.unreduced(self._model)
            self._apart.enter_context(apart)
        _state.accumulation = self
        return self

    def backward(self, loss: Any, optimizer: Any) -> None:
        """Add the gradients of a micro-batch's mean loss, divided by the number of micro-batches.

        Raises:
            UsageError: there are more micro-batches than `steps`.
            CompositionError: the optimizer steps in backward.
        """
        in_backward.check("accumulate", optimizer)
        if self.done == self.steps:
            raise UsageError(
                f"accumulate(steps={self.steps}) has had its {self.steps} micro-batches; one more"
                " would weigh too much. Give the right number of steps"
            )
        if not any(optimizer is seen for seen in self._seen):
            self._seen.append(optimizer)
        training = self._backend.training
        training.backward(loss / self.steps if self.steps > 1 else loss, optimizer)
        training.finish_micro_batch(optimizer)
        self.done += 1
        if self.is_last:
            self._apart.close()  # the last one is reduced over all processes

    def check(self, what: str) -> None:
        """Refuse what takes a part of the gradients for the whole.

        Args:
            what: the function's name.

        Raises:
            UsageError: some micro-batches have been added, and some are missing.
        """
        if 0 < self.done < self.steps:
            raise UsageError(
                f"{what} was called after {self.done} of {self.steps} micro-batches. Call it once,"
                " after the block of accumulate"
            )

    def check_step(self) -> None:
        """Refuse an update from a part of the micro-batches, or a second one.

        Raises:
            UsageError: some are missing, or the block steps the optimizer itself.
        """
        if self.done < self.steps:
            raise UsageError(
                f"the optimizer was to step after {self.done} of {self.steps} micro-batches. Step"
                " once, after the block of accumulate"
            )
        if self._optimizer is not None:
            raise UsageError(
                "accumulate(steps, optimizer) steps the optimizer at the end of its block; leave"
                " this step out, or give accumulate no optimizer"
            )

    def __exit__(self, *error: Any) -> None:
        self._apart.close()
        _state.accumulation = None
        if error[0] is None and self.done == self.steps:
            if self._optimizer is not None:
                self._step()
            return
        for optimizer in self._seen:  # a part of the gradients is of no use to anyone
            self._backend.training.zero_grad(optimizer)
        if error[0] is None:
            raise UsageError(
                f"accumulate(steps={self.steps}) has had {self.done} micro-batches, so that their"
                " gradients weigh too little. Give the number there is, for the remainder of a"
                " data set too"
            )

    def _step(self) -> None:
        training = self._backend.training
        if self._scaler is None:
            training.optimizer_step(self._optimizer)
        else:
            self._scaler.step(self._optimizer)
            self._scaler.update()
        training.zero_grad(self._optimizer)
