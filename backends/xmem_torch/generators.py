"""PyTorch's own random numbers (2.13), for a second pass.

States are kept as bytes: tensors would count among what training holds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch.utils._python_dispatch import _disable_current_modes


class Generators:
    """Where the default generators stand.

    Args:
        tensors: their devices have generators of their own.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        devices = {t.device.index for t in tensors if t.device.type == "cuda"}
        if torch.cuda.is_initialized():
            devices.add(torch.cuda.current_device())
        self._devices = sorted(devices)
        self._before: list[bytes] | None = self._read()

    def _read(self) -> list[bytes]:
        with _disable_current_modes():  # a step that is followed on fake tensors has real states
            states = [torch.get_rng_state(), *map(torch.cuda.get_rng_state, self._devices)]
            return [state.numpy().tobytes() for state in states]

    def _set(self, states: list[bytes]) -> None:
        with _disable_current_modes():
            # NumPy's memory: what a tensor of PyTorch's own takes would be counted.
            first, *others = (torch.frombuffer(bytearray(s), dtype=torch.uint8) for s in states)
            torch.set_rng_state(first)
            for device, state in zip(self._devices, others, strict=True):
                torch.cuda.set_rng_state(state, device)

    def first_pass_ended(self) -> None:
        """Let go of the states if nothing has been drawn."""
        if self._before == self._read():
            self._before = None

    @contextmanager
    def replayed(self) -> Iterator[None]:
        """Let the block draw what the first pass drew, and put the generators back after it."""
        if self._before is None:
            yield
            return
        now = self._read()
        self._set(self._before)
        try:
            yield
        finally:
            self._set(now)
