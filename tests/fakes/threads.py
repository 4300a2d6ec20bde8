"""Ranks that are threads of one process, with tensors of NumPy."""

import threading
import weakref

import numpy as np

from xmem import codec
from xmem.distributed import arguments, collectives, reducing, signatures
from xmem.distributing import Kind, World
from xmem.errors import UsageError

LIMIT_SECONDS = 20


class Tensor(np.ndarray):
    """What a framework's tensor has besides NumPy's methods."""

    def numel(self):
        return self.size

    def detach(self):
        return self


def tensor(values, dtype="float32"):
    return np.array(values, dtype).view(Tensor)


class Done:
    def __init__(self, result):
        self._result = result

    def wait(self):
        return self._result


class Threads:
    """The backend's capability, the same object for all ranks; `sent` are the calls of rank 0."""

    def __init__(self, size):
        self.size = size
        self.sent = []
        self.buffers = 0
        self.most_buffers = 0
        self._place = threading.local()
        self._barrier = threading.Barrier(size, timeout=LIMIT_SECONDS)
        self._slots = [None] * size

    def world(self):
        return World(self._place.rank, self.size, self._place.rank, self.size, "threads")

    def run(self, program, *arguments):
        """Run a program on every rank; returns what each returned or raised."""
        results = [None] * self.size

        def work(rank):
            self._place.rank = rank
            try:
                results[rank] = program(rank, *arguments)
            except Exception as error:  # noqa: BLE001  a test looks at it
                results[rank] = error

        threads = [threading.Thread(target=work, args=(rank,)) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LIMIT_SECONDS)
        return results

    def exchange(self, payload):
        self._barrier.wait()
        self._slots[self._place.rank] = payload
        self._barrier.wait()
        found = list(self._slots)
        self._barrier.wait()
        return found

    def describe(self, value):
        if not isinstance(value, Tensor):
            raise UsageError(f"{type(value).__name__} is not a tensor")
        return Kind(str(value.dtype), value.shape, value.nbytes)

    def flatten(self, tensors):
        flat = np.concatenate([value.reshape(-1) for value in tensors]).view(Tensor)
        if self._place.rank == 0:
            self.buffers += 1
            self.most_buffers = max(self.most_buffers, self.buffers)
            weakref.finalize(flat, self._freed)
        return flat

    def _freed(self):
        self.buffers -= 1

    def split(self, flat, like):
        ends = np.cumsum([value.size for value in like])[:-1]
        return [p.reshape(v.shape) for p, v in zip(np.split(flat, ends), like, strict=True)]

    def assign(self, value, new):
        value[...] = new

    def convert(self, value, dtype):
        return value.astype(dtype, copy=False)

    def encode(self, flat):
        return codec.pack(flat, 8, 0, "nearest").view(Tensor)

    def decode(self, packed, count):
        return codec.unpack(np.asarray(packed), count, 8).view(Tensor)

    def all_reduce(self, value, op):
        rows = self._all("all_reduce", value)
        found = rows[0]
        for row in rows[1:]:  # one hop after another, as a ring does, in the tensor's own type
            found = np.maximum(found, row) if op == "max" else found + row
        found = found / self.size if op == "mean" else found
        return Done(np.asarray(found, value.dtype).view(Tensor))

    def broadcast(self, value, source):
        return Done(self._all("broadcast", value)[source])

    def all_gather(self, value):
        return Done(np.stack(self._all("all_gather", value)).view(Tensor))

    def reduce_scatter(self, value, op):
        return Done(self.all_reduce(value, op).wait()[self._place.rank])

    def all_to_all(self, value):
        rows = self._all("all_to_all", value)
        return Done(np.stack([row[self._place.rank] for row in rows]).view(Tensor))

    def _all(self, kind, value):
        if self._place.rank == 0:
            self.sent.append((kind, value.nbytes))
        return [np.array(row).view(Tensor) for row in self.exchange(np.array(value))]


def put_in_place(monkeypatch, threads):
    """Let xmem's calls go to the threads."""
    for module in (arguments, collectives, reducing, signatures):
        monkeypatch.setattr(module, "joined", lambda: threads)
    for module in (arguments, collectives, reducing):
        monkeypatch.setattr(module, "current", threads.world)
