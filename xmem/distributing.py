"""The contract of backends that train in several processes, one per rank.

`xmem.distributed` checks arguments, compares what the ranks ask for, cuts lists of tensors into
buckets, compresses, counts bytes and explains failures; a backend moves tensors and shards modules
by the framework's own means. Every method but the describing ones is collective: all ranks call it,
in one order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

if TYPE_CHECKING:
    from xmem.distributed.roll import Roll
    from xmem.receipts import Receipt

Op = Literal["sum", "mean", "max"]
Compression = Literal["bf16", "fp16", "int8"]
Dim = Literal["out", "in"]
Schedule = Literal["1f1b", "gpipe"]


@dataclass(frozen=True)
class World:
    """The place of this process among its peers.

    Attributes:
        rank: its number, from 0.
        size: how many ranks there are.
        local_rank: its number among those on this host.
        local_size: how many ranks there are on this host.
        engine: what carries the bytes: "gloo", "nccl" or "mpi"; "none" for one process alone.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    engine: str


@dataclass(frozen=True)
class Kind:
    """What a tensor is, as far as ranks must agree.

    Attributes:
        dtype: "float32", "bfloat16", "int64"...
        shape: its sizes.
        size_bytes: its bytes.
    """

    dtype: str
    shape: tuple[int, ...]
    size_bytes: int


@dataclass(frozen=True)
class Reduction:
    """How gradients are averaged over ranks.

    Attributes:
        bucket_bytes: the most that is sent in one call, in bytes; a larger gradient goes alone.
        compress: what travels instead of the gradients' own type, or None.
        error_feedback: what compression lost is added to the next gradients.
        unused_parameters: some parameters take no part in some steps.
    """

    bucket_bytes: int
    compress: Compression | None
    error_feedback: bool
    unused_parameters: bool = False


class Pending(Protocol):
    """A communication under way."""

    def wait(self) -> Any:
        """Wait for it and return its result; a second call returns the same."""


class PipelineRun(Protocol):
    """This rank's part of a pipeline; made by `Distributed.pipeline`."""

    module: Any

    def step(self, inputs: Any, targets: Any, optimizer: Any, *, key: str) -> float | None:
        """Run all micro-batches forward and backward; see `xmem.distributed.Pipeline.step`.

        Args:
            inputs: the whole batch; only the first rank's is read.
            targets: the whole batch's targets; only the last rank's are read.
            optimizer: of this rank's stage.
            key: what tells kinds of batches apart, the same on every rank.

        Returns:
            The mean loss on the last rank; None on the others.
        """


@runtime_checkable
class Distributed(Protocol):
    """Reduce, gather and shard over ranks: hook `xmem_distributed`."""

    gaps: Mapping[str, str]

    @property
    def failures(self) -> tuple[type[BaseException], ...]:
        """The framework's types of error for a communication that failed."""

    # The group.

    def start(self, engine: str, timeout_seconds: float) -> World:
        """Join the ranks that the launcher has started.

        Without a launcher this process is the only rank, engine "none".

        Args:
            engine: "auto", or an engine's name.
            timeout_seconds: the longest wait for other ranks, here and in every later call.

        Raises:
            UsageError: there is no such engine here.
            CollectiveTimeoutError: ranks did not come; it names them where that can be known.
        """

    def stop(self) -> None:
        """Leave; all ranks are there. Afterwards `start` may be called again."""

    def abort(self) -> None:
        """Tear communication down without the others; never waits."""

    def exchange(self, payload: bytes) -> list[bytes]:
        """Give every rank a few bytes of every rank's, by rank.

        This is how ranks compare what they are about to do; at most 64 KiB a rank.
        """

    def watch(self, roll: Roll) -> None:
        """Let whatever waits for other ranks look at the roll for those that are gone."""

    # Tensors.

    def describe(self, tensor: Any) -> Kind:
        """Say what a tensor is.

        Raises:
            UsageError: it is not a tensor of this framework, or not on this backend's device.
        """

    def flatten(self, tensors: Sequence[Any]) -> Any:
        """Copy tensors of one type one after another into a new one, (n,)."""

    def split(self, flat: Any, like: Sequence[Any]) -> list[Any]:
        """Return parts of a flat tensor in the shapes of others; views where that can be."""

    def assign(self, tensor: Any, value: Any) -> None:
        """Write values into a tensor in place, converting their type; no gradient is recorded."""

    def convert(self, tensor: Any, dtype: str) -> Any:
        """Return a tensor in another type, rounded to nearest; itself if it has it already."""

    def encode(self, flat: Any) -> Any:
        """Pack a flat float32 tensor in 8 bits, to nearest, as one uint8 tensor (n,).

        By `xmem.codec.pack(flat, 8, 0, "nearest")`: rounding at random would be off by 1.3 % after
        the two times that a sum is packed, instead of 0.9 %.
        """

    def decode(self, packed: Any, count: int) -> Any:
        """Unpack what `encode` packed: (count,) float32."""

    def all_reduce(self, tensor: Any, op: Op) -> Pending:
        """Combine one tensor over ranks, in place or not: the result is what `wait` returns."""

    def broadcast(self, tensor: Any, source: int) -> Pending:
        """Give every rank the source's values, into a tensor of the same shape."""

    def all_gather(self, tensor: Any) -> Pending:
        """Give every rank all tensors: (...) -> (world_size, ...)."""

    def reduce_scatter(self, tensor: Any, op: Op) -> Pending:
        """Combine over ranks and leave each its part: (world_size, ...) -> (...)."""

    def all_to_all(self, tensor: Any) -> Pending:
        """Send part j to rank j: (world_size, ...) -> (world_size, ...), by sender."""

    # Training.

    def data_parallel(self, model: Any, optimizer: Any, reduction: Reduction) -> Any:
        """Return the model to call; gradients of the optimizer are averaged, exactly once."""

    def no_sync(self, model: Any) -> AbstractContextManager[Any]:
        """Add gradients up on this rank only, inside the block.

        Raises:
            UsageError: the model is not data-parallel.
        """

    def shard_optimizer(self, optimizer: Any) -> Any:
        """Return an optimizer that keeps the states of this rank's share of the parameters."""

    def shard_model(self, model: Any, blocks: Sequence[Any]) -> Receipt:
        """Keep a share of each block's parameters; gather them around its passes. In place."""

    def shard_linear(self, layer: Any, dim: Dim) -> Any:
        """Return a linear layer that keeps this rank's part of the weight."""

    def tensor_parallel(self, model: Any, plan: Mapping[str, Dim]) -> Receipt:
        """Shard the linear layers that a plan names by path. In place."""

    def pipeline(
        self, stage: Any, micro_batches: int, schedule: Schedule, loss_fn: Any
    ) -> PipelineRun:
        """Return what runs this rank's stage in a schedule.

        Args:
            stage: this rank's module.
            micro_batches: how many parts a batch is cut into.
            schedule: see `xmem.distributed.schedules`.
            loss_fn: loss of output and target, a mean over its batch; the last stage calls it.
        """

    # States.

    def full_state(self, model: Any, optimizer: Any) -> dict[str, Any] | None:
        """Return {"model": ..., "optimizer": ...} as one process would have it, on rank 0.

        The optimizer may be None. Other ranks take part and get None.
        """

    def load_full_state(self, model: Any, optimizer: Any, state: Mapping[str, Any] | None) -> None:
        """Take up what `full_state` gave, in any world; only rank 0's state is read."""

    def save_file(self, state: Mapping[str, Any], path: str) -> None:
        """Write a full state in the framework's own file format; not collective."""

    def load_file(self, path: str) -> dict[str, Any]:
        """Read such a file; not collective."""
