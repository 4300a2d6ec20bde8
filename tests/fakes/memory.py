"""A backend whose memory is a ledger: enough of one for what guards and diagnoses ask."""

from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import SimpleNamespace

from xmem.errors import OutOfMemoryError
from xmem.pooling import Block, PoolStats, Refusal, Segment
from xmem.records import Counters, Tagged
from xmem.trail import Trail, TrailOwners


class FakeError(RuntimeError):
    """The framework's own error."""


class FakeOutOfMemoryError(OutOfMemoryError, FakeError):
    """xmem's, which is the framework's too."""


@dataclass
class FakeMemory:
    """A pool, a meter and a trainer in one; tensors are addresses."""

    limit: int = 1000
    blocks: dict = field(default_factory=dict)
    owned_by: dict = field(default_factory=dict)
    names: dict = field(default_factory=dict)
    birth: int = 0
    refused: int = 0
    last: Refusal | None = None
    done: list = field(default_factory=list)
    gaps: dict = field(default_factory=dict)
    late: BaseException | None = None
    trail: Trail | None = None

    def allocate(self, size, category="temporary"):
        self.birth += 1
        if self.allocated + size > self.limit:
            self.refused += 1
            by_category = {}
            for block in self.blocks.values():
                by_category[block.category] = (
                    by_category.get(block.category, 0) + block.requested_bytes
                )
            live = tuple(sorted(self.blocks.values(), key=lambda b: -b.requested_bytes))
            self.last = Refusal(
                size, self.allocated, 2000, self.limit, 64, self.birth, by_category, live
            )
            raise FakeError(f"no {size} bytes")
        address = 4096 * self.birth
        self.blocks[address] = Block(address, size + 16, size, category, self.birth)
        return address

    @property
    def allocated(self):
        return sum(block.requested_bytes for block in self.blocks.values())

    # a pool
    def stats(self):
        return PoolStats(
            self.allocated, None, 2000, None, 5000, None, None, None, 64, self.refused, self.limit
        )

    def segments(self):
        return [Segment(a, b.size_bytes, (b,)) for a, b in sorted(self.blocks.items())]

    def refusal(self):
        return self.last

    def out_of_memory_type(self):
        return FakeOutOfMemoryError

    def is_out_of_memory(self, error):
        return type(error) in (FakeError, MemoryError)

    def tensor_bytes(self, tensor):
        return self.blocks[tensor].requested_bytes

    def in_force(self):
        return {"strategy": "ledger"}

    def parameter_names(self, model, optimizer):
        return self.names

    @contextmanager
    def watch(self, model, optimizer):
        self.trail = Trail(self.birth)
        owners = TrailOwners(self.trail, lambda: self.names, dict)
        owners.finish = self._finish
        try:
            yield owners
        finally:
            self.done.append("watched")

    def _finish(self):
        self.done.append("finished")
        if self.late is not None:
            raise self.late

    def recover(self):
        self.done.append("recovered")

    # a meter
    def counters(self):
        return Counters(self.allocated, None, None, None, None, self.refused)

    def owned(self, model, optimizer, inputs):
        return self.owned_by

    def tag(self, category, tensors):
        for address in tensors:
            self.blocks[address] = replace(self.blocks[address], category=category)
        return Tagged(0, 0, 0)

    def settings(self):
        return {"threads": "1"}

    # a trainer
    def zero_grad(self, optimizer):
        self.done.append("gradients dropped")


def fake_backend(memory):
    """Return a backend that has only what guards ask for."""
    return SimpleNamespace(
        name="fake",
        device="cpu",
        framework_version="1.0",
        pool=memory,
        measure=memory,
        training=memory,
        quantize=SimpleNamespace(gaps={"optimizer_in_backward": "no"}),
        offers=lambda capability: False,
    )
