"""This rank's stage of a pipeline, on PyTorch: torch.distributed.pipelining (2.13).

PyTorch's stages and schedules (`pipeline_stages.py`). To learn what travels, PyTorch runs the first
micro-batch of each stage twice, the later stages' on uninitialised memory, so that running
statistics are updated once too often and with garbage: here that pass leaves no trace.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from xmem.distributed.counting import note, waited
from xmem.distributed.sending import buffer
from xmem.distributed.stage_errors import computing
from xmem.distributing import Schedule
from xmem.errors import CompositionError, UsageError
from xmem_torch import ranks
from xmem_torch.local_parts import is_sharded
from xmem_torch.recompute import aside
from xmem_torch.sharded_layers import ShardedLinear, hold

# Each kind of batch has buffers of its own: those of the whole batch, and of a smaller last one.
_KINDS = 2


class Run:
    """See `xmem.distributing.PipelineRun`."""

    def __init__(self, stage: Any, micro_batches: int, schedule: Schedule, loss_fn: Any) -> None:
        _refuse(stage)
        self.module = stage
        self._micro_batches = micro_batches
        self._schedule = schedule
        self._loss_fn = loss_fn
        self._made: OrderedDict[str, Any] = OrderedDict()
        if ranks.size() > 1:
            hold(stage)

    def step(self, inputs: Any, targets: Any, optimizer: Any, *, key: str) -> float | None:
        """Let PyTorch's schedule run; gradients add up in `.grad`."""
        if not torch.is_grad_enabled():
            raise UsageError("Pipeline.step trains: call it outside of torch.no_grad()")
        rank, last = ranks.rank(), ranks.size() - 1
        given = (inputs,) if rank == 0 else ()
        target = targets if rank == last else None
        schedule = self._scheduled(key, given, target)
        losses: list[torch.Tensor] = []
        stage, begun = schedule._stage, time.perf_counter()
        stage.computed_seconds = 0.0
        with buffer(stage.buffer_bytes()):
            schedule.step(*given, target=target, losses=losses, return_outputs=False)
        if last:
            waited(time.perf_counter() - begun - stage.computed_seconds)
        self._note(stage)
        if rank < last:
            return None
        return float(torch.stack([loss.detach().double().reshape(()) for loss in losses]).sum())

    def _loss(self, stage: Any, output: Any, target: Any) -> Any:
        with stage.timed(), computing():
            loss = self._loss_fn(output, target)
            if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
                found = tuple(loss.shape) if isinstance(loss, torch.Tensor) else loss
                raise UsageError(f"loss_fn returned {found}: give a mean, a tensor of one number")
            return loss / self._micro_batches

    def _scheduled(self, key: str, given: tuple[Any, ...], target: Any) -> Any:
        """Return a schedule that knows what travels."""
        if key in self._made:
            self._made.move_to_end(key)
            return self._made[key]
        while len(self._made) >= _KINDS:
            self._made.popitem(last=False)
        # Slow to import, and nobody who has no pipeline needs it.
        from xmem_torch.pipeline_stages import SCHEDULES, Stage

        stage = Stage(self.module, self._schedule, self._micro_batches)
        loss_fn = partial(self._loss, stage)
        schedule = SCHEDULES[self._schedule](
            stage, self._micro_batches, loss_fn=loss_fn, scale_grads=False
        )
        stage.has_backward = True
        parts = self._micro_batches
        with aside(self.module), _buffers_put_back(self.module):
            schedule._initialize_stage(
                tuple(tensor.chunk(parts)[0] for tensor in given),
                {},
                None if target is None else target.chunk(parts)[0],
            )
        self._check_output(stage)
        self._made[key] = schedule
        return schedule

    def _check_output(self, stage: Any) -> None:
        outputs = stage._stage_meta.outputs
        if stage.is_last or (len(outputs) == 1 and outputs[0].dtype.is_floating_point):
            return
        raise UsageError(
            f"stage {ranks.rank()} returns {len(outputs)} tensors of"
            f" {[str(meta.dtype) for meta in outputs]}: a stage hands on one tensor of floats."
            " Concatenate them, or cut the model elsewhere"
        )

    def _note(self, stage: Any) -> None:
        meta = stage._stage_meta
        outputs = () if stage.is_last else meta.outputs
        gradients = () if stage.is_first else meta.input_grads
        for sent in (*outputs, *gradients):
            if sent is not None:
                size_bytes = sent.shape.numel() * sent.dtype.itemsize
                for _ in range(self._micro_batches):
                    note("send", size_bytes, ranks.size())


@contextmanager
def _buffers_put_back(module: Any) -> Iterator[None]:
    """Let buffers be as before after the block, whatever a pass on made-up numbers makes of them.

    Running statistics that are left alone are multiplied by 1, and what is added is 0 times the
    batch's: no number, where the batch's are none.
    """
    before = [(buffer, buffer.clone()) for buffer in module.buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, copy in before:
                if not torch.equal(buffer, copy):
                    buffer.copy_(copy)


def _refuse(stage: Any) -> None:
    for module in stage.modules():
        if isinstance(module, DistributedDataParallel) or is_sharded(module):
            raise CompositionError(
                f"{type(module).__name__} averages gradients over ranks, and the ranks of a"
                " pipeline have different parameters. Give the plain stage"
            )
        if isinstance(module, ShardedLinear):
            raise CompositionError(
                "a stage has layers that are shared out over all ranks (tensor_parallel), and a"
                " pipeline has a stage on each rank. Use one of the two"
            )
