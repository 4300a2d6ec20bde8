"""A backend without a framework that counts the bytes it is told of, and enforces a limit.

`take` and `give` stand for tensors; steps of tests call them, in this process or another.
"""

import os
from contextlib import nullcontext

from xmem.hookspecs import hookimpl
from xmem.protocols import Counters, Framework, Session


class Measure:
    gaps = {}  # noqa: RUF012
    source = "allocator"

    def __init__(self):
        self.allocated = self.peak = self.refused = 0
        self.limit = None

    def take(self, size_bytes):
        if self.limit is not None and self.allocated + size_bytes > self.limit:
            self.refused += 1
            raise RuntimeError(f"cannot have {size_bytes} bytes")
        self.allocated += size_bytes
        self.peak = max(self.peak, self.allocated)

    def give(self, size_bytes):
        self.allocated -= size_bytes

    def synchronize(self):
        pass

    def counters(self):
        return Counters(self.allocated, self.peak, None, None, 0, self.refused)

    def reset_peak(self):
        self.peak = self.allocated

    def set_limit(self, limit_bytes):
        self.limit = limit_bytes

    def settings(self):
        found = {"threads": os.environ.get("OMP_NUM_THREADS", "3")}
        if os.environ.get("XMEM_FITTING_FLAG"):
            found["flag"] = str(os.getpid())
        return found


class Training:
    gaps = {}  # noqa: RUF012

    def __init__(self):
        self.without_gradients = 0

    def no_grad(self):
        self.without_gradients += 1
        return nullcontext()


MEASURE = Measure()
TRAINING = Training()


class Holding:
    """Bytes that are allocated as long as this is alive."""

    def __init__(self, size_bytes):
        MEASURE.take(size_bytes)
        self.size_bytes = size_bytes

    def __del__(self):
        if hasattr(self, "size_bytes"):
            MEASURE.give(self.size_bytes)


@hookimpl
def xmem_framework():
    return Framework("numpy", "numpy", "pip install numpy")


@hookimpl
def xmem_open(device):
    return Session("1.0", "cpu")


@hookimpl
def xmem_measure(session):
    return MEASURE


@hookimpl
def xmem_training(session):
    return TRAINING
