"""The contract of backends that control the framework's memory pool, and what they tell of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

from xmem.errors import OutOfMemoryError
from xmem.records import Category

OnOom = Literal["raise", "trim_and_retry", "spill", "offload"]
ON_OOM: tuple[OnOom, ...] = ("raise", "trim_and_retry", "spill", "offload")
"""What becomes of a request that cannot be met: an error; the cache is given back, garbage is
collected and the request is tried once more; it is put into memory that the driver moves between
device and host (managed memory); what backward needs last leaves the device until it fits."""

PhaseName = Literal["forward", "backward", "optimizer", "outside"]


@dataclass(frozen=True)
class PoolStats:
    """A pool at one instant, in bytes; what it cannot tell is None.

    Attributes:
        allocated_bytes: requested by live tensors now.
        peak_allocated_bytes: the highest since `reset_peak`.
        reserved_bytes: held from the system or driver.
        peak_reserved_bytes: the highest since `reset_peak`.
        process_bytes: resident now, of the whole process (host), or None.
        segment_count: pieces of memory that the pool holds.
        allocation_count: allocations since `xmem.use`.
        free_count: frees since `xmem.use`.
        largest_free_bytes: the largest request that the pool can meet from what it holds.
        out_of_memory_count: requests refused since `xmem.use`.
        limit_bytes: allocations beyond it are refused, or None.
        retry_count: requests that had to be tried again after the cache was given back.
        offloaded_bytes: what `on_oom="offload"` has moved away since `xmem.use`; what has left
            more than once counts once. None where the pool cannot move anything.
    """

    allocated_bytes: int
    peak_allocated_bytes: int | None
    reserved_bytes: int | None
    peak_reserved_bytes: int | None
    process_bytes: int | None
    segment_count: int | None
    allocation_count: int | None
    free_count: int | None
    largest_free_bytes: int | None
    out_of_memory_count: int | None
    limit_bytes: int | None
    retry_count: int | None = None
    offloaded_bytes: int | None = None

    @property
    def fragmentation(self) -> float | None:
        """The share of what is reserved that no tensor asked for: 1 - allocated / reserved."""
        if self.reserved_bytes is None:
            return None
        return 1 - self.allocated_bytes / self.reserved_bytes if self.reserved_bytes else 0.0


@dataclass(frozen=True)
class Block:
    """A piece of a segment.

    Attributes:
        address: where it begins.
        size_bytes: what it takes in the segment.
        requested_bytes: what the tensor asked for; 0 where it is free.
        category: of a live block, else None.
        birth: grows with every allocation (PyTorch) or node of the graph (Jittor): the number of
            the moment it was made, or asked for; 0 where it is free.
    """

    address: int
    size_bytes: int
    requested_bytes: int
    category: Category | None
    birth: int


@dataclass(frozen=True)
class Segment:
    """A piece of memory that the pool holds from the system or driver.

    Attributes:
        address: where it begins.
        size_bytes: its size.
        blocks: what it is cut into, by address; live ones and free ones.
    """

    address: int
    size_bytes: int
    blocks: tuple[Block, ...]


@dataclass(frozen=True)
class Point:
    """The pool at a moment of its history.

    Attributes:
        event: the number of allocations and frees until then.
        allocated_bytes: then.
        reserved_bytes: then.
    """

    event: int
    allocated_bytes: int
    reserved_bytes: int


@dataclass(frozen=True)
class Refusal:
    """A request that was refused, as it was at that instant.

    Attributes:
        requested_bytes: what was asked for.
        allocated_bytes: requested by live tensors then.
        reserved_bytes: held by the pool then, or None.
        limit_bytes: the limit that it would have passed; None where system or driver had no more.
        largest_free_bytes: the largest free piece of the pool then, or None.
        birth: of what it was for; see `Block`.
        by_category: live bytes by category then, or None where the source cannot tell.
        blocks: the largest live blocks then, largest first, at most 256.
        in_backward: it was asked for by a thread that runs backward, where the backend can tell.
    """

    requested_bytes: int
    allocated_bytes: int
    reserved_bytes: int | None
    limit_bytes: int | None
    largest_free_bytes: int | None
    birth: int
    by_category: Mapping[Category, int] | None
    blocks: tuple[Block, ...]
    in_backward: bool | None = None


@dataclass(frozen=True)
class Setting:
    """A setting of the pool that `xmem.pool.configure` takes.

    Attributes:
        name: as `configure` takes it.
        parse: checks a value and returns it as the backend takes it; raises UsageError.
        meaning: a line for people.
        applies: when it can be set: at any time; until the pool is in use; or only before the
            framework starts.
    """

    name: str
    parse: Callable[[Any], Any]
    meaning: str
    applies: Literal["any time", "before use", "before start"] = "any time"


@dataclass(frozen=True)
class Graph:
    """The autograd graph (on a lazy framework also the pending work) that a tensor keeps alive.

    Attributes:
        root: the number of the operation that made the tensor; grows with every operation.
        operations: the numbers of all that it keeps alive, `root` included; of a very large graph
            those that were found first.
        is_pending: nothing of it has been computed yet; False where nothing is lazy.
    """

    root: int
    operations: frozenset[int]
    is_pending: bool


@runtime_checkable
class Pool(Protocol):
    """Control the framework's memory pool: hook `xmem_pool`."""

    gaps: Mapping[str, str]

    @property
    def settings(self) -> Mapping[str, Setting]:
        """The settings of this pool, on this device, by name; without `limit` and `on_oom`."""

    @property
    def elsewhere(self) -> Mapping[str, str]:
        """Names that are settings of this framework on another device, with where they are."""

    def in_force(self) -> dict[str, Any]:
        """Return the settings as they are, `on_oom` included."""

    def configure(self, values: Mapping[str, Any], on_oom: OnOom | None) -> None:
        """Put parsed values in force; all or none.

        Raises:
            CapabilityError: the policy or a value is not to be had here, with the reason.
            UsageError: values that contradict each other, or that come too late.
        """

    def stats(self) -> PoolStats:
        """Read the counters. Reads no tensor values."""

    def reset_peak(self) -> None:
        """Let the peaks start again from now."""

    def set_limit(self, limit_bytes: int | None) -> None:
        """Refuse allocations beyond it; see `Measure.set_limit`."""

    def trim(self) -> int:
        """Give back what no tensor holds; returns by how many bytes `reserved_bytes` fell."""

    def preallocate(self, size_bytes: int) -> int:
        """Have the pool hold free memory of a size, in one piece; returns what it took anew."""

    def segments(self) -> Sequence[Segment]:
        """Return all that the pool holds, by address."""

    def history(self) -> Sequence[Point]:
        """Return the pool's history since `reset_peak`, down-sampled, its peak always in it."""

    def refusal(self) -> Refusal | None:
        """Return the latest refused request, or None."""

    def out_of_memory_type(self) -> type[OutOfMemoryError]:
        """Return the class of xmem's error that is the framework's own out-of-memory error too."""

    def is_out_of_memory(self, error: BaseException) -> bool:
        """Say whether an error means that memory ran out; by type or by count, not by text."""

    def watch(self, model: Any, optimizer: Any) -> AbstractContextManager[Owners]:
        """Follow which module makes what, and the phases of a step, inside the block.

        Cheap: no value is read, and nothing is waited for. `model` and `optimizer` may be None.
        Where updates of theirs are pending they run first, so that the block's are told from them.

        Raises:
            OutOfMemoryError: there is no memory for those; they stay pending, nothing is lost.
        """

    def recover(self) -> None:
        """Let nothing stay of a step that failed: pending work, garbage, marks, the cache."""

    def live_tensors(self) -> Sequence[Any]:
        """Return the tensors that Python objects hold (and their gradients), each once."""

    def live_counts(self) -> dict[str, int]:
        """Return what is alive, by kind, cheaply.

        That is "tensors", on Jittor also "held_vars", "live_vars" and "live_ops".
        """

    def tensor_bytes(self, tensor: Any) -> int:
        """Return what the memory behind a tensor takes; 0 where it has none yet."""

    def graph_of(self, tensor: Any) -> Graph | None:
        """Return what a tensor keeps alive behind it, or None where that is nothing.

        Tensors that both are results of one operation are of one graph, and those of which one
        led to the other. Leaves are in none: parameters are behind all graphs.
        """

    def identity_of(self, tensor: Any) -> Any:
        """Return what tells a tensor from one that takes its place later; holds nothing.

        Equal (`==`) as long as it is the same tensor with the same value behind it.
        """

    def on_step(self, call: Callable[[Any], None]) -> Callable[[], None]:
        """Have every optimizer of this framework call with itself after each step; returns the end.

        The native loops' steps count too, as do steps that `xmem.optimizer_step` makes.
        """

    def parameter_names(self, model: Any, optimizer: Any) -> dict[int, str]:
        """Name what lies at an address.

        Names are paths of parameters and buffers, or "gradient of", "optimizer state of" or
        "float32 master of" such a path.
        """


class Owners(Protocol):
    """What `Pool.watch` saw."""

    def owner_of(self, block: Block) -> str:
        """Return who made a block: "encoder.3.attention", "optimizer state of w", "made before"."""

    def phase_of(self, refusal: Refusal) -> PhaseName:
        """Return the phase of a step in which a request was refused."""

    def phase_at(self, birth: int) -> PhaseName | None:
        """Return the phase in which something was born; None: before the block."""

    def module_of(self, refusal: Refusal) -> str:
        """Return the path of the module that a request was made in; "" where it is not known."""

    @property
    def phases(self) -> frozenset[PhaseName]:
        """The phases that have begun inside the block."""

    @property
    def in_force(self) -> frozenset[str]:
        """Techniques that were in force when modules were called: "autocast" and the like."""

    def make_whole(self) -> None:
        """Let updates wait for all gradients from here on, where they would not."""

    def finish(self) -> None:
        """Run what the block has asked for and has not run; may run out of memory."""

    def may_be_updated(self, refusal: Refusal | None) -> bool:
        """Say whether some parameters or states may have been updated when it was refused."""

    def forget(self) -> None:
        """Let go of what was seen."""
