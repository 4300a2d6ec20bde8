"""The block in force that packs what backward will read: its decisions, and what it has packed."""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import jittor as jt

from xmem.codec import BLOCK
from xmem.layouts import modules_of
from xmem.offload.adaptive import Adaptive
from xmem.saving import Candidate, Choice, Policy
from xmem_jittor import codec, native
from xmem_jittor.away import Stored
from xmem_jittor.late import Stays
from xmem_jittor.remaking import Remade


@dataclass(eq=False)
class Packed:
    """A tensor in few bits, or in a depot, or both.

    Attributes:
        data: the bytes, one tensor; where they are in a depot, what is there when they are.
        shape: of the tensor.
        dtype: of the tensor.
        bits: 8, 4 or 2; 1 for truth values; None where it is not packed.
        away: the bytes in a depot.
    """

    data: list[Any]
    shape: tuple[int, ...]
    dtype: str
    bits: int | None
    away: Stored | None = None

    def unpacked(self) -> Any:
        """Return the tensor, as it comes back."""
        data = self.data[0] if self.away is None else self.away.loaded()
        if self.bits is None:
            return data
        if self.bits == 1:
            return codec.unpack_bits(data, self.shape)
        return codec.unpack(data, self.shape, self.bits, self.dtype)


@dataclass(eq=False)
class Origin:
    """Which memory a tensor that was handed out has; an attribute of its handle.

    Attributes:
        number: of the tensor that the memory was made for.
        tensor: the number of the tensor, which changes when its handle gets another one.
    """

    number: int
    tensor: int


def known_origin(var: Any) -> Origin | None:
    """Return what a handle says of its tensor's memory."""
    known = getattr(var, "_xmem_origin", None)
    return known if isinstance(known, Origin) and known.tensor == var.id else None


def origin_of(var: Any) -> int:
    """Return a number that is equal for tensors that share memory."""
    known = known_origin(var)
    return known.number if known else int(native.saving().xmem_jittor_origin(var.var_ptr))


@dataclass(eq=False)
class Running:
    """A module that runs, or has run.

    Attributes:
        path: its path.
        module: it.
        first: the newest node before it ran.
        last: the newest node after it ran.
    """

    path: str
    module: Any
    first: int
    last: int | None = None

    def made(self, node: int) -> bool:
        """Say whether a node was made while it ran."""
        return self.first < node and (self.last is None or node <= self.last)


class Block:
    """A `with` block that packs.

    Args:
        policy: what is done with which tensor.
        model: names layers; None: the outermost module that runs does.
        capability: knows the modules of a model.

    Attributes:
        everywhere: nobody has entered it around a model: it steps aside where it cannot work.
    """

    def __init__(self, policy: Policy, model: Any, capability: Any) -> None:
        self.policy = policy
        self.capability = capability
        self.everywhere = isinstance(policy, Adaptive)
        self.running: list[Running] = []
        self.noted: list[Running] | None = None  # while a unit runs
        self._names: dict[int, str] = {}
        self._named = model is not None
        self._packed: weakref.WeakValueDictionary[int, Packed] = weakref.WeakValueDictionary()
        self._remade: weakref.WeakValueDictionary[int, Remade] = weakref.WeakValueDictionary()
        self._kept: set[int] = set()
        if model is not None:
            self._name(model)

    def _name(self, model: Any) -> None:
        for path, module in reversed([("", model), *modules_of(self.capability, model)]):
            self._names[id(module)] = path

    @contextmanager
    def runs(self, module: Any, node: int) -> Iterator[Running]:
        """Note inside the block that a module runs."""
        if self.everywhere and not self.running:
            self._kept.clear()  # or it would grow with every step
        if not self._named and not self.running:
            self._names = {}
            self._name(module)
        entry = Running(self._path_of(module), module, node)
        self.running.append(entry)
        if self.noted is not None:
            self.noted.append(entry)
        try:
            yield entry
        finally:
            self.running.pop()

    def _path_of(self, module: Any) -> str:
        """Return the path of a module; of one that is not the model's, that of what calls it."""
        path = self._names.get(id(module))
        if path is not None:
            return path
        return self.running[-1].path if self.running else ""

    def remake(self, origin: int, remade: Remade) -> None:
        """Note that a tensor may be made of what is packed already, as long as that is held."""
        self._remade[origin] = remade

    def keep(
        self, var: Any, origin: int, layer: str, module: Any, *, compared: bool = False
    ) -> Packed | Remade | Stays | None:
        """Pack a tensor, once; None where it is kept as it is.

        Args:
            var: the tensor.
            origin: the number of its memory.
            layer: the path of what reads it.
            module: what reads it.
            compared: backward compares it with others, so that it must come back bit for bit.
        """
        found = self._packed.get(origin)
        if found is not None or origin in self._kept:
            return found
        candidate = described(var, layer, module)
        choice = self.policy.choose(candidate)
        if compared:
            choice = replace(choice, bits=None, exact=False, reason="compared in backward")
        bits = choice.bits
        if math.prod(candidate.shape) < BLOCK and bits is not None:
            bits, choice = None, replace(choice, reason="below a block of the codec")
        if bits is None and candidate.dtype == "bool" and choice.exact:
            bits = 1
        if bits is None and choice.away is None:
            self._kept.add(origin)
            self.policy.kept(candidate, choice.reason)
            return None
        remade = None if compared else self._remade.get(origin)
        if remade is not None:
            self.policy.packed(candidate, 0)
            return remade
        if choice.away is not None and choice.away.when_needed:
            if bits is None:
                self.policy.packed(candidate, candidate.nbytes, exact=True)
                return Stays(var, choice.away.depot)
            choice = replace(choice, away=None)  # packed bytes stay
        packed = _packed(var, bits, choice)
        device_bytes = 0 if packed.away else int(packed.data[0].nbytes)
        away_bytes = packed.away.nbytes if packed.away else 0
        exact = bits is None or bits == 1
        self.policy.packed(candidate, device_bytes, exact=exact, away_bytes=away_bytes)
        self._packed[origin] = packed
        return packed

    def left(self, var: Any, origin: int, layer: str, module: Any, reason: str) -> None:
        """Note, once, that a tensor is kept as it is."""
        if origin not in self._kept:
            self._kept.add(origin)
            self.policy.kept(described(var, layer, module), reason)


def _packed(var: Any, bits: int | None, choice: Choice) -> Packed:
    shape, dtype = tuple(int(size) for size in var.shape), str(var.dtype)
    data = var
    if bits is not None:
        data = codec.pack_bits(var) if bits == 1 else codec.pack(var, bits, choice.seed)
    if choice.away is None:
        return Packed([data], shape, dtype, bits)
    stored = Stored(data, choice.away)
    return Packed([stored.done], shape, dtype, bits, stored)


def described(var: Any, layer: str, module: Any) -> Candidate:
    """Return what a policy is asked about."""
    shape = tuple(int(size) for size in var.shape)
    return Candidate(layer, str(var.dtype), shape, int(var.nbytes), module, var)


class _Blocks(threading.local):
    def __init__(self) -> None:
        self.entered: list[Block] = []


_blocks = _Blocks()


def current() -> Block | None:
    """Return the innermost block that this thread has entered."""
    return _blocks.entered[-1] if _blocks.entered else None


@contextmanager
def in_force(block: Block) -> Iterator[None]:
    """Let a block count inside the `with`."""
    _blocks.entered.append(block)
    try:
        yield
    finally:
        _blocks.entered.remove(block)


def packs() -> Block | None:
    """Return the block if gradients are recorded now."""
    return None if jt.flags.no_grad else current()
