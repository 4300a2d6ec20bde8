"""The host's streams of random numbers, set back for a second pass.

A framework replays its own generators; a function may draw from Python's `random`, from NumPy's
global stream and from generators of its own besides (pytorch#193671: NumPy's randomness in a
checkpointed function gives silently wrong gradients). NumPy is looked at only where it has been
imported already.
"""

from __future__ import annotations

import ctypes
import random
import struct
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

State = Any
Access = tuple[Callable[[Any], State], Callable[[Any, State], None]]
"""How to read and how to set the state of a stream, given the stream."""

_MT19937_BYTES = 625 * 4  # 624 words and a position: what NumPy's global stream usually is


def _read_numpy(generator: Any) -> State:
    return generator.bit_generator.state


def _set_numpy(generator: Any, state: State) -> None:
    generator.bit_generator.state = state


def stream_kinds() -> dict[type, Access]:
    """Return the kinds of generators that a function may hold, and how to set them back."""
    kinds: dict[type, Access] = {
        random.Random: (random.Random.getstate, random.Random.setstate),
    }
    module = sys.modules.get("numpy.random")
    if module is not None:
        kinds[module.Generator] = (_read_numpy, _set_numpy)
        kinds[module.RandomState] = (
            lambda stream: stream.get_state(legacy=False),
            lambda stream, state: stream.set_state(state),
        )
    return kinds


class _Watched:
    """A Mersenne Twister that all share. Its state is slow to read, so its bytes tell first.

    Args:
        address: of its 624 words and its position in memory.
        read: returns its state.
        in_store: says whether a state has a second normal number in store, which a draw may take
            without moving the words.
    """

    def __init__(
        self, address: int, read: Callable[[], State], in_store: Callable[[State], bool]
    ) -> None:
        self._address = address
        self._read = read
        self._in_store = in_store
        self._known: tuple[bytes, State] | None = None

    def read(self) -> State:
        found = ctypes.string_at(self._address, _MT19937_BYTES)
        if self._known is not None and self._known[0] == found:
            return self._known[1]
        state = self._read()
        self._known = None if self._in_store(state) else (found, state)
        return state


def _python_reader() -> Callable[[], State]:
    """Return what reads the state of Python's global stream."""
    generator: Any = random._inst
    address = id(generator) + object.__basicsize__
    index, *words = struct.unpack("i624I", ctypes.string_at(address, _MT19937_BYTES))
    if (*words, index) != random.getstate()[1]:  # another layout than CPython's
        return random.getstate
    watched = _Watched(address, random.getstate, lambda state: state[2] is not None)

    def current() -> State:
        return watched.read() if generator.gauss_next is None else random.getstate()

    return current


def _numpy_reader() -> Callable[[], State] | None:
    """Return what reads the state of NumPy's global stream; None where nobody has imported it."""
    module = sys.modules.get("numpy.random")
    if module is None:
        return None

    def read() -> State:
        return module.get_state(legacy=False)

    generator = module.mtrand._rand._bit_generator
    if type(generator).__name__ != "MT19937":
        return read
    address = generator.ctypes.state_address
    watched = _Watched(address, read, lambda state: bool(state["has_gauss"]))

    def current() -> State:
        now = module.mtrand._rand._bit_generator
        return watched.read() if now is generator else read()

    return current


_read_python = _python_reader()
_read_global_numpy: Callable[[], State] | None = None


def _global_numpy() -> Callable[[], State] | None:
    global _read_global_numpy
    if _read_global_numpy is None:
        _read_global_numpy = _numpy_reader()
    return _read_global_numpy


class Streams:
    """Where the streams stood when a first pass began, and which of them it drew from.

    Args:
        held: generators that the function holds, of the kinds in `kinds`.
        kinds: how to read and set each kind.
    """

    def __init__(
        self, held: Sequence[Any] = (), kinds: Mapping[type, Access] | None = None
    ) -> None:
        self._held = [(stream, *_access(stream, kinds or {})) for stream in held]
        self._numpy = _global_numpy()
        self._python: State = _read_python()
        self._others = self._read_others()
        self._drawn: list[bool] | None = None

    def _read_others(self) -> list[State]:
        states = [read(stream) for stream, read, _ in self._held]
        return [*states, None if self._numpy is None else self._numpy()]

    def first_pass_ended(self) -> None:
        """Note what has been drawn from; the states of the other streams are let go."""
        self._drawn = self._moved()
        if not any(self._drawn):
            self._others = []

    def _moved(self) -> list[bool]:
        others = self._read_others()
        moved = [not _same(a, b) for a, b in zip(self._others, others, strict=True)]
        python = _read_python()
        return [python is not self._python and python != self._python, *moved]

    @property
    def drawn(self) -> bool:
        """Whether the first pass drew from any of them."""
        return bool(self._drawn) and any(self._drawn or ())

    @contextmanager
    def replayed(self) -> Iterator[None]:
        """Let the block draw what the first pass drew, and put the streams back after it."""
        if not self.drawn:
            yield
            return
        python, others = _read_python(), self._read_others()
        self._set(self._python, self._others)
        try:
            yield
        finally:
            self._set(python, others)

    def rewind(self) -> None:
        """Put the streams back to where they stood; for use without `first_pass_ended`."""
        self._set(self._python, self._others)

    def _set(self, python: State, others: Sequence[State]) -> None:
        random.setstate(python)
        for (stream, _, write), state in zip(self._held, others, strict=False):
            write(stream, state)
        if self._numpy is not None:
            sys.modules["numpy.random"].set_state(others[-1])


def _access(stream: Any, kinds: Mapping[type, Access]) -> Access:
    return next(access for kind, access in kinds.items() if isinstance(stream, kind))


def _same(a: State, b: State) -> bool:
    """Compare states: nested dictionaries and tuples with arrays in them."""
    if a is b:
        return True
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    equal = a == b
    return bool(equal.all()) if hasattr(equal, "all") else bool(equal)
