"""Several processes on Jittor: MPI, through a module of ours (1.3.11)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from xmem.distributing import Dim, Kind, Op, Pending, Reduction, Schedule, World
from xmem_jittor import (
    communication,
    data_parallel,
    full_states,
    pipelines,
    ranks,
    sharded_layers,
    sharded_models,
    sharded_optimizers,
)

if TYPE_CHECKING:
    from xmem.distributed.roll import Roll
    from xmem.receipts import Receipt


class Distributed:
    """Communicates and shards; see `xmem.distributing.Distributed`."""

    failures: tuple[type[BaseException], ...] = ranks.FAILURES

    def __init__(self, device: str) -> None:
        self._device = device
        self.gaps: Mapping[str, str] = ranks.gaps(device)

    def start(self, engine: str, timeout_seconds: float) -> World:
        """See `ranks`."""
        return ranks.start(engine, timeout_seconds, self._device)

    def stop(self) -> None:
        """See `ranks`."""
        ranks.stop()

    def abort(self) -> None:
        """See `ranks`."""
        ranks.abort()

    def exchange(self, payload: bytes) -> list[bytes]:
        """See `ranks`."""
        return ranks.exchange(payload)

    def watch(self, roll: Roll) -> None:
        """See `ranks`."""
        ranks.watch(roll)

    def describe(self, tensor: Any) -> Kind:
        """See `communication`."""
        return communication.describe(tensor)

    def flatten(self, tensors: Sequence[Any]) -> Any:
        """See `communication`."""
        return communication.flatten(tensors)

    def split(self, flat: Any, like: Sequence[Any]) -> list[Any]:
        """See `communication`."""
        return communication.split(flat, like)

    def assign(self, tensor: Any, value: Any) -> None:
        """See `communication`."""
        communication.assign(tensor, value)

    def convert(self, tensor: Any, dtype: str) -> Any:
        """See `communication`."""
        return communication.convert(tensor, dtype)

    def encode(self, flat: Any) -> Any:
        """See `communication`."""
        return communication.encode(flat)

    def decode(self, packed: Any, count: int) -> Any:
        """See `communication`."""
        return communication.decode(packed, count)

    def all_reduce(self, tensor: Any, op: Op) -> Pending:
        """See `communication`."""
        return communication.all_reduce(tensor, op)

    def broadcast(self, tensor: Any, source: int) -> Pending:
        """See `communication`."""
        return communication.broadcast(tensor, source)

    def all_gather(self, tensor: Any) -> Pending:
        """See `communication`."""
        return communication.all_gather(tensor)

    def reduce_scatter(self, tensor: Any, op: Op) -> Pending:
        """See `communication`."""
        return communication.reduce_scatter(tensor, op)

    def all_to_all(self, tensor: Any) -> Pending:
        """See `communication`."""
        return communication.all_to_all(tensor)

    def data_parallel(self, model: Any, optimizer: Any, reduction: Reduction) -> Any:
        """See `data_parallel`."""
        return data_parallel.wrap(model, optimizer, reduction)

    def no_sync(self, model: Any) -> AbstractContextManager[Any]:
        """See `data_parallel`."""
        return data_parallel.no_sync(model)

    def shard_optimizer(self, optimizer: Any) -> Any:
        """See `sharded_optimizers`."""
        return sharded_optimizers.shard(optimizer)

    def shard_model(self, model: Any, blocks: Sequence[Any]) -> Receipt:
        """See `sharded_models`."""
        return sharded_models.shard(model, blocks)

    def shard_linear(self, layer: Any, dim: Dim) -> Any:
        """See `sharded_layers`."""
        return sharded_layers.shard_linear(layer, dim)

    def tensor_parallel(self, model: Any, plan: Mapping[str, Dim]) -> Receipt:
        """See `sharded_layers`."""
        return sharded_layers.shard(model, plan)

    def pipeline(
        self, stage: Any, micro_batches: int, schedule: Schedule, loss_fn: Any
    ) -> pipelines.Run:
        """See `pipelines`."""
        return pipelines.Run(stage, micro_batches, schedule, loss_fn)

    def full_state(self, model: Any, optimizer: Any) -> dict[str, Any] | None:
        """See `full_states`."""
        return full_states.gather(model, optimizer)

    def load_full_state(self, model: Any, optimizer: Any, state: Mapping[str, Any] | None) -> None:
        """See `full_states`."""
        full_states.scatter(model, optimizer, state)

    def save_file(self, state: Mapping[str, Any], path: str) -> None:
        """See `full_states`."""
        full_states.save_file(state, path)

    def load_file(self, path: str) -> dict[str, Any]:
        """See `full_states`."""
        return full_states.load_file(path)
