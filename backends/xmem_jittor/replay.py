"""Random numbers that a region draws twice the same.

Jittor 1.3.11 draws random numbers when a kernel runs, from a generator whose state nobody can
set back, and kernels run in another order the second time. Inside a region `jt.random`, the one
Python caller of Jittor's random operation, gives numbers that are a function of a seed and of an
element's place instead: the finaliser of MurmurHash3 (Austin Appleby, public domain) over a
counter,
made of elementwise integer operations, which fuse with whatever reads them and take no memory.
Normal numbers are two of these through the transform of Box and Muller (1958). Covered is whatever
goes through `jt.random`: dropout, rand, randn, normal, randint, bernoulli, initialisers. Not
covered: `jt.ops.random` itself and NumPy.

Seeds come from Python's `random`, which `jt.set_global_seed` seeds.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jittor as jt

from xmem.errors import RecomputeMismatchError

_STEPS = 1 << 24  # a float32 holds every multiple of 1/_STEPS in [0, 1)

_sources: list[Callable[[], int]] = []
_plain_random: Any = None


@contextmanager
def recorded() -> Iterator[list[int]]:
    """Draw with seeds inside the block; yields the list that they are noted in.

    Inside a region that replays, the seeds are that region's.
    """
    draw = _sources[-1] if _sources else _fresh_seed
    seeds: list[int] = []

    def note() -> int:
        seeds.append(draw())
        return seeds[-1]

    with _drawing(note):
        yield seeds


@contextmanager
def replayed(seeds: Sequence[int]) -> Iterator[None]:
    """Draw inside the block what was drawn when the seeds were noted."""
    remaining = iter(seeds)

    def draw() -> int:
        seed = next(remaining, None)
        if seed is None:
            raise RecomputeMismatchError(
                f"the recomputation of a checkpointed region draws more random tensors than the"
                f" first pass, which drew {len(seeds)}. What it does must not depend on state that"
                " changes between forward and backward."
            )
        return seed

    with _drawing(draw):
        yield


def _fresh_seed() -> int:
    return random.getrandbits(31)


@contextmanager
def _drawing(source: Callable[[], int]) -> Iterator[None]:
    global _plain_random
    if not _sources:
        _plain_random = jt.random
        jt.random = _random
    _sources.append(source)
    try:
        yield
    finally:
        _sources.pop()
        if not _sources:
            jt.random = _plain_random


def _random(shape: Sequence[int], dtype: Any = "float32", type: str = "uniform") -> Any:
    """Stand in for `jt.random`, which gives float32 whatever dtype it is asked for."""
    sizes = [int(size) for size in shape]
    uniform = _uniform(sizes, _sources[-1]())
    if type == "normal":
        # Half a step keeps the logarithm finite.
        radius = jt.sqrt(-2.0 * jt.log(uniform + 0.5 / _STEPS))
        uniform = radius * jt.cos((2 * math.pi) * _uniform(sizes, _sources[-1]()))
    return uniform.stop_grad()


def _uniform(sizes: Sequence[int], seed: int) -> Any:
    place, stride = None, 1
    for axis in reversed(range(len(sizes))):
        along = jt.index(sizes, axis) * jt.int32(stride)
        place = along if place is None else place + along
        stride *= sizes[axis]
    if place is None:
        place = jt.zeros((1,), dtype="int32")
    # The seed is data, not part of a kernel's source: one kernel for all seeds.
    mixed = place * jt.int32(-1640531527) + jt.array([seed], dtype="int32")
    mixed = (mixed ^ _shifted(mixed, 16)) * jt.int32(-2048144789)
    mixed = (mixed ^ _shifted(mixed, 13)) * jt.int32(-1028477387)
    mixed = mixed ^ _shifted(mixed, 16)
    return _shifted(mixed, 8).float32() * (1.0 / _STEPS)


def _shifted(bits: Any, count: int) -> Any:
    """Shift right without copying the sign, which int32 would."""
    return (bits >> count) & ((1 << (32 - count)) - 1)
