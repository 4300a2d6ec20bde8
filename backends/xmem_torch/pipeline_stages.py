"""Stages of pipelines as torch.distributed.pipelining (2.13) runs them, with fewer buffers.

PyTorch keeps a buffer for every micro-batch's input and gradient all the time, 1F1B or not. Here
there are as many for inputs as micro-batches are alive at once (`schedules.most_alive`), and one
for gradients, which are used up before the next one comes.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from xmem.distributed.schedules import most_alive, order
from xmem.distributed.stage_errors import StageError, computing
from xmem_torch import ranks

SCHEDULES: dict[str, Any] = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}


class Stage(PipelineStage):
    """PyTorch's stage, with as many buffers as are in use at once.

    Attributes:
        computed_seconds: time that it has computed; what a step takes beside is communication.
    """

    def __init__(self, module: Any, schedule: str, micro_batches: int) -> None:
        super().__init__(module, ranks.rank(), ranks.size(), torch.device(ranks.device()))
        works = order(schedule, ranks.rank(), stages=ranks.size(), micro_batches=micro_batches)
        self._alive = most_alive(works)
        self.computed_seconds = 0.0

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Count the time of the block as computed."""
        begun = time.perf_counter()
        try:
            yield
        finally:
            self.computed_seconds += time.perf_counter() - begun

    def buffer_bytes(self) -> int:
        """Return the bytes of what inputs and gradients are received in."""
        tables = (self.args_recv_info, self.grad_recv_info)
        infos = [info for table in tables for several in table.values() for info in several]
        buffers = {id(info.buffer): info.buffer for info in infos if info.buffer is not None}
        return sum(buffer.nbytes for buffer in buffers.values())

    def forward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        """Compute a micro-batch, and let what the module raises be told from what gloo raises."""
        try:
            with self.timed():
                return super().forward_one_chunk(*args, **kwargs)
        except RuntimeError as error:  # PyTorch's own, around what the module has raised
            raise StageError(error.__cause__ or error) from error

    def backward_one_chunk(self, *args: Any, **kwargs: Any) -> None:
        """Compute a micro-batch's gradients, with the same distinction."""
        with self.timed(), computing():
            super().backward_one_chunk(*args, **kwargs)

    def _to_tensor(self, arg: Any) -> torch.Tensor:
        """Give stages that learn what travels zeros, not whatever lies in memory."""
        tensor: torch.Tensor = super()._to_tensor(arg)
        if not isinstance(arg, torch.Tensor):
            tensor.detach().zero_()
        return tensor

    def _setup_forward_recv_info(self, num_microbatches: int, has_backward: bool) -> None:
        super()._setup_forward_recv_info(self._alive, has_backward)
        # An input's buffer is written anew when its backward has ended; the orders are such.
        for number in range(self._alive, num_microbatches):
            self.args_recv_info[number] = self.args_recv_info[number % self._alive]

    def _setup_backward_recv_info(self, num_microbatches: int) -> None:
        super()._setup_backward_recv_info(1)
        self.chunks = num_microbatches
        for number in range(1, num_microbatches):
            self.grad_recv_info[number] = self.grad_recv_info[0]
