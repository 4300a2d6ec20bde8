"""Random numbers that a region draws twice the same.

Jittor 1.3.11 draws random numbers when a kernel runs, from a generator whose state nobody can
set back, and kernels run in another order the second time. Inside a region `jt.random`, the one
Python caller of Jittor's random operation, gives numbers that are a function of a seed and of an
element's place instead: the finaliser of MurmurHash3 (Austin Appleby, public domain) over a
counter, made of elementwise integer operations, which fuse with whatever reads them and take no
memory.
Normal numbers are two of these through the transform of Box and Muller (1958). Covered is whatever
goes through `jt.random`: dropout, rand, randn, normal, randint, bernoulli, initialisers. Whoever
calls `jt.ops.random` itself, or a `jt.random` that was imported by name earlier, is refused.

Seeds come from a stream of xmem's own, which starts anew whenever Jittor is seeded
(`jt.set_global_seed`, `jt.set_seed`), so neither Python's nor NumPy's stream is touched.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import jittor as jt

from xmem.errors import CompositionError
from xmem_jittor import native

NOT_REPLAYED = (
    "it draws from Jittor's own random operation, whose numbers cannot be drawn again:"
    " jt.ops.random, or a jt.random that was imported by name. Call jt.random, jt.rand or jt.randn"
    " instead, or pass preserve_rng=False if the second pass may draw others."
)
_STEPS = 1 << 24  # a float32 holds every multiple of 1/_STEPS in [0, 1)


class TooManyDraws(Exception):  # noqa: N818  no error of xmem's: the region makes one of it
    """The second pass draws more random tensors than the first."""


_sources: list[Callable[[], int]] = []
_plain: tuple[Any, Any] | None = None
_stream = random.Random()
_stream_of: int | None = None


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
def replayed(seeds: Sequence[int]) -> Iterator[list[int]]:
    """Draw inside the block what was drawn when the seeds were noted.

    Yields the seeds that have not been drawn yet, the next one last.

    Raises:
        TooManyDraws: there are no more.
    """
    remaining = list(reversed(seeds))

    def draw() -> int:
        if not remaining:
            raise TooManyDraws
        return remaining.pop()

    with _drawing(draw):
        yield remaining


@contextmanager
def aside() -> Iterator[None]:
    """Draw inside the block without leaving a trace in any stream."""
    numbers = random.Random(0)
    with _drawing(lambda: numbers.getrandbits(31)):
        yield


@contextmanager
def unmoved() -> Iterator[None]:
    """Put the stream of seeds back after the block."""
    _stream_is_current()
    state = _stream.getstate()
    try:
        yield
    finally:
        _stream.setstate(state)


def _fresh_seed() -> int:
    _stream_is_current()
    return _stream.getrandbits(31)


def _stream_is_current() -> None:
    """Let the stream start anew where Jittor has been seeded."""
    global _stream_of
    seeding = int(native.graph().xmem_jittor_seedings())
    if _stream_of != seeding:
        _stream.seed(jt.get_seed())
        _stream_of = seeding


@contextmanager
def _drawing(source: Callable[[], int]) -> Iterator[None]:
    global _plain
    if not _sources:
        _plain = jt.random, jt.ops.random
        jt.random = _random
        jt.ops.random = _refuse
    _sources.append(source)
    try:
        yield
    finally:
        _sources.pop()
        if not _sources and _plain is not None:
            jt.random, jt.ops.random = _plain


def _refuse(*_: Any, **__: Any) -> NoReturn:
    raise CompositionError(f"a checkpointed region cannot be recomputed: {NOT_REPLAYED}")


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
