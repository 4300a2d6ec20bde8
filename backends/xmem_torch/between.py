"""The values between stages that a run holds, by themselves or with what a stage keeps."""

from __future__ import annotations

from collections.abc import Iterable

from xmem_torch.values import Value


class Between:
    """Value j is what stage j reads first, and what stage j-1 returns."""

    def __init__(self) -> None:
        self._alone: dict[int, Value] = {}
        self._outputs: dict[int, Value] = {}  # with what a stage keeps, by stage

    def get(self, j: int) -> Value | None:
        """Return a value; None where it is not held."""
        found = self._alone.get(j)
        return self._outputs.get(j - 1) if found is None else found

    def nearest(self, j: int) -> int:
        """Return the number of the last value before one that is held; -1 for none."""
        return max((k for k in range(j) if self.get(k) is not None), default=-1)

    def put(self, j: int, value: Value, *, keep: bool = False) -> None:
        """Hold a value, by itself or (keep) with what the stage keeps that has made it."""
        if keep:
            self._outputs[j - 1] = value
        else:
            self._alone[j] = value

    def drop(self, numbers: Iterable[int]) -> None:
        """Let go of values that are held by themselves."""
        for j in numbers:
            self._alone.pop(j, None)

    def drop_output(self, stage: int) -> None:
        """Let go of the value that goes with what a stage keeps."""
        self._outputs.pop(stage, None)

    def clear(self) -> None:
        """Let go of all."""
        self._alone.clear()
        self._outputs.clear()
