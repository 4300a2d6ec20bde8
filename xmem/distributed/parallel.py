"""Split one model over ranks: layers by columns and rows, or stages one after another."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from xmem import casting, in_backward, scaling
from xmem.api import active
from xmem.distributed import schedules
from xmem.distributed.failing import communicating
from xmem.distributed.layer_plans import check_dim
from xmem.distributed.signatures import Asked, agree
from xmem.distributed.stage_errors import StageError
from xmem.distributed.training import check_module, issue_on, kinds_in, refuse_accumulation
from xmem.distributed.world import current, joined
from xmem.distributing import Dim, PipelineRun, Schedule, World
from xmem.errors import CollectiveMismatchError, CompositionError, DistributedError, UsageError
from xmem.receipts import Receipt

_STEP = "Pipeline.step"
_UNSCALED = (
    "Pipeline.step computes gradients of the loss as it is, on every stage, and a GradScaler would"
    " divide them by its scale. Step without one, in bfloat16 (xmem.autocast) or float32"
)


def shard_linear(layer: Any, *, dim: Dim) -> Any:
    """Return a linear layer of which each rank keeps a part.

    Args:
        layer: a linear layer, of the same sizes on every rank; the parts are of rank 0's values.
        dim: "out": each rank computes a part of the outputs, (..., out / world_size); "in": each
            takes a part of the inputs, (..., in / world_size), and the results are added up.
            A pair of "out" and "in" with an elementwise function between needs one all-reduce a
            pass (Mohammad Shoeybi et al., "Megatron-LM", 2019).

    Raises:
        UsageError: the sizes do not divide, or it is no linear layer.
        CollectiveMismatchError: the ranks have other layers, or ask for other parts.
    """
    current()

    def check() -> Asked:
        check_dim(dim)
        check_module(layer)
        return Asked("shard_linear", (("dim", dim),), kinds_in(layer))

    agree("shard_linear", check)
    with communicating("shard_linear"):
        return joined().shard_linear(layer, dim)


def tensor_parallel(model: Any, plan: Mapping[str, Dim]) -> Any:
    """Shard linear layers of a model in place; returns the model.

    Every rank is given the same batch and computes the same loss; make the optimizer afterwards, of
    the model's parameters. All ranks get rank 0's parameters, and their random numbers go on from
    rank 0's, so that dropout outside of the parts is the same on all. An "out" layer that no "in"
    layer follows is allowed: its output then is this rank's part, (..., out / world_size).

    Args:
        model: of the same sizes on every rank.
        plan: paths of linear layers, or patterns ("blocks.*.up"), to "out" or "in".

    Raises:
        UsageError: a path that matches nothing, with the nearest; sizes that do not divide.
        CollectiveMismatchError: the ranks have other models or plans.
    """
    world = current()

    def check() -> Asked:
        refuse_accumulation("tensor_parallel")
        if not isinstance(plan, Mapping):
            raise UsageError(f"{plan!r} is no plan: give a dict of paths, with 'out' or 'in'")
        check_module(model)
        settings = tuple((str(path), dim) for path, dim in plan.items())
        return Asked("tensor_parallel", settings, kinds_in(model))

    agree("tensor_parallel", check)
    with communicating("tensor_parallel"):
        receipt = joined().tensor_parallel(model, plan)
    issue_on(world.size, replace(receipt, technique="tensor_parallel", backend=active().name))
    return model


class Pipeline:
    """A model whose stages lie on ranks, one each; made by `pipeline`.

    Attributes:
        module: this rank's stage.
        stage: its number; the rank.
        micro_batches: how many parts a batch is cut into.
        most_alive: how many of them this stage keeps at most between forward and backward.
    """

    def __init__(self, run: PipelineRun, world: World, schedule: str, micro_batches: int) -> None:
        self.module: Any = run.module
        self.stage = world.rank
        self.micro_batches = micro_batches
        works = schedules.order(
            schedule, world.rank, stages=world.size, micro_batches=micro_batches
        )
        self.most_alive = schedules.most_alive(works)
        self._run = run
        self._world = world

    def step(self, inputs: Any, targets: Any, optimizer: Any) -> float:
        """Run one batch through all stages forward and backward.

        Leaves gradients for `xmem.optimizer_step(optimizer)` or the optimizer's own step; those of
        several calls add up until they are zeroed, as backward's do. They are of the loss as it is:
        a GradScaler refuses the optimizer. The sizes of what a stage hands on may differ from batch
        to batch.

        Args:
            inputs: the whole batch, (batch, ...); the first rank reads it.
            targets: the whole batch's targets, (batch, ...); the last rank reads them.
            optimizer: of this rank's stage.

        Returns:
            The mean loss, on every rank.

        Raises:
            UsageError: the batch cannot be cut into equal micro-batches, or is no tensor.
            CompositionError: the optimizer steps in backward, or this is inside xmem.accumulate.
            CollectiveMismatchError: some ranks are under autocast, and others not.
        """
        try:
            with communicating(_STEP):
                key = self._meet(inputs, targets, optimizer)
                scaling.refuse(optimizer, _UNSCALED)
                loss = self._run.step(inputs, targets, optimizer, key=key)
                mine = b"" if loss is None else float(loss).hex().encode()
                losses = joined().exchange(mine)
        except StageError as error:
            raise error.raised from None
        return float.fromhex(losses[-1].decode())

    def _meet(self, inputs: Any, targets: Any, optimizer: Any) -> str:
        """Let the ranks check the batch together; returns what tells its kind from others."""
        mine: dict[str, Any] = {"what": _STEP, "error": ""}
        error: Exception | None = None
        try:
            mine |= self._described(inputs, targets, optimizer)
        except Exception as raised:  # noqa: BLE001  raised again, when the others know of it
            error = raised
            mine["error"] = f"{type(raised).__name__}: {raised}"[:2000]
        found = [_read(raw) for raw in joined().exchange(json.dumps(mine).encode())]
        if error is not None:
            raise error
        for rank, other in enumerate(found):
            if other["error"]:
                raise DistributedError(
                    f"{other['what']} failed on rank {rank}: {other['error']}", ranks=(rank,)
                )
            if other["what"] != _STEP:
                raise CollectiveMismatchError(
                    f"this rank calls {_STEP}, and rank {rank} {other['what']}: all ranks make the"
                    " same calls in one order",
                    ranks=(rank,),
                )
        first, last = found[0], found[-1]
        differing = [rank for rank, other in enumerate(found) if other["half"] != first["half"]]
        if differing:
            raise CollectiveMismatchError(
                f"Pipeline.step: rank 0 computes in {first['half'] or 'float32'}, and ranks"
                f" {differing} do not: enter xmem.autocast on all ranks, or on none",
                ranks=differing,
            )
        self._check_batch(first["inputs"], last["targets"])
        return json.dumps([first["inputs"], last["targets"], first["half"]])

    def _described(self, inputs: Any, targets: Any, optimizer: Any) -> dict[str, Any]:
        refuse_accumulation(_STEP, "a pipeline accumulates its micro-batches by itself")
        if not getattr(optimizer, "param_groups", None):
            raise UsageError(
                f"{type(optimizer).__name__} is no optimizer: give the optimizer of this rank's"
                " stage (Pipeline.module)"
            )
        if in_backward.steps_in_backward(optimizer):
            raise CompositionError(
                "optimizer_in_backward steps in the backward of every micro-batch, and the next"
                " ones would see other weights. Undo its receipt first"
            )
        rank, last = self._world.rank, self._world.size - 1
        now = casting.current()
        return {
            "inputs": _kind(inputs, "inputs") if rank == 0 else None,
            "targets": _kind(targets, "targets") if rank == last else None,
            "half": now.dtype if now is not None and now.enabled else "",
        }

    def _check_batch(self, inputs: tuple[str, list[int]], targets: tuple[str, list[int]]) -> None:
        sizes = []
        for name, (_, shape) in (("inputs", inputs), ("targets", targets)):
            if not shape:
                raise UsageError(f"{name} is a scalar: give the whole batch, (batch, ...)")
            sizes.append(shape[0])
        if sizes[0] != sizes[1]:
            raise UsageError(
                f"inputs have a batch of {sizes[0]}, and targets one of {sizes[1]}: give the whole"
                " batch of both"
            )
        if not sizes[0] or sizes[0] % self.micro_batches:
            raise UsageError(
                f"a batch of {sizes[0]} cannot be cut into {self.micro_batches} equal"
                " micro-batches. Give a multiple, e.g. leave out the rest of the data"
            )


def pipeline(
    stages: Sequence[Any],
    *,
    micro_batches: int,
    loss_fn: Callable[[Any, Any], Any],
    schedule: Schedule = "1f1b",
) -> Pipeline:
    """Put the stages of a model on ranks, one each, and run micro-batches through them.

    A stage takes one tensor and returns one, of any shape and float type. Give functions that build
    the stages where the whole model is large: modules that are listed take their memory on every
    rank as long as the list lives.

    Args:
        stages: one module per rank, or functions that build one: only this rank's is called.
        micro_batches: how many equal parts a batch is cut into.
        loss_fn: loss of output and target, a mean.
        schedule: "gpipe" (all forward, then all backward: Yanping Huang et al., NeurIPS 2019) or
            "1f1b" (a stage keeps at most as many micro-batches as stages follow, and its own:
            Deepak Narayanan et al., "PipeDream", SOSP 2019, without its stale weights).

    Raises:
        UsageError: another number of stages than ranks, or what `schedules.check` refuses.
        CollectiveMismatchError: the ranks ask for different things.
    """
    world = current()
    built: list[Any] = []

    def check() -> Asked:
        refuse_accumulation("pipeline")
        if not isinstance(stages, Sequence) or len(stages) != world.size:
            count = len(stages) if isinstance(stages, Sequence) else 0
            raise UsageError(
                f"{count} stages for {world.size} ranks: give a list with one module for each rank,"
                " or functions that build them"
            )
        schedules.check(schedule, stages=len(stages), micro_batches=micro_batches)
        if not callable(loss_fn):
            raise UsageError(f"loss_fn={loss_fn!r}: give a function of output and target")
        built.append(_stage(stages[world.rank], world.rank))
        return Asked("pipeline", (("micro_batches", micro_batches), ("schedule", schedule)))

    agree("pipeline", check)
    with communicating("pipeline"):
        run = joined().pipeline(built[0], micro_batches, schedule, loss_fn)
    made = Pipeline(run, world, schedule, micro_batches)
    note = (
        f"Stage {world.rank} of {world.size}, {schedule}, {micro_batches} micro-batches, at most"
        f" {made.most_alive} alive here."
    )
    issue_on(world.size, Receipt("pipeline", active().name, 1, note=note))
    return made


def _stage(stage: Any, rank: int) -> Any:
    """Return a module, built if need be."""
    is_module = active().checkpoint.is_module
    if not is_module(stage) and callable(stage):
        stage = stage()
    if not is_module(stage):
        raise UsageError(
            f"stages[{rank}] is a {type(stage).__name__}: give a module of the active backend, or a"
            " function that builds one"
        )
    return stage


def _kind(tensor: Any, name: str) -> tuple[str, list[int]]:
    try:
        kind = joined().describe(tensor)
    except UsageError as error:
        raise UsageError(f"{name}: {error}") from error
    return kind.dtype, list(kind.shape)


def _read(raw: bytes) -> dict[str, Any]:
    """Return an answer; other calls that ranks meet at send only their name."""
    try:
        return {"what": "", "error": "", "half": "", **json.loads(raw)}
    except (ValueError, TypeError):
        return {"what": raw.decode("utf-8", "replace")[:80], "error": "", "half": ""}
