"""Compressed activations: keep what backward will read in few bits.

Jianfei Chen et al., "ActNN: Reducing Training Memory Footprint via 2-Bit Activation Compressed
Training", ICML 2021; Xiaoxuan Liu et al., "GACT: Activation Compressed Training for Generic Network
Architectures", ICML 2022. The codec is `xmem.codec`.
"""

from __future__ import annotations

import itertools
import math
import operator
import warnings
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from xmem.codec import DTYPES, Bits, check_bits
from xmem.errors import UsageError, XmemWarning, unknown
from xmem.layouts import modules_of
from xmem.receipts import Receipt, issue
from xmem.saving import Candidate, Choice
from xmem.sizes import format_size, parse_size

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from xmem.backend import Backend

MIN_BYTES = 64 << 10
"""Smaller tensors are kept as they are."""

# Not the codec's own step from element to element: tensors would share its numbers, shifted by one.
_SPREAD = 0xC2B2AE3D
_seeds = itertools.count(1)


def next_seed() -> int:
    """Return another seed of roundings, 32 bits: the same in every run of a program."""
    return next(_seeds) * _SPREAD & 0xFFFFFFFF


_blocks = itertools.count()


def compress(backend: Backend, bits: Any, *, seed: int | None, **asked: Any) -> Compression:
    """Return a block; without a seed it rounds otherwise than all before.

    With the same numbers in each step, what rounds up would do so for ever.
    """
    if seed is None:
        seed = next(_blocks) * 0x85EBCA6B & 0xFFFFFFFF
    return Compression(backend, bits, seed=seed, **asked)


class Compression:
    """A block that compresses; a policy of `xmem.saving`.

    Attributes:
        raw_bytes: what the packed tensors would have taken, all forward passes added up.
        packed_bytes: what they take.
        kept_bytes: what stays uncompressed, by reason.
        layers: the layers that compressed tensors belong to, with their bits.
        sizes: of each such layer the elements that were compressed, and the bytes they take raw.
    """

    def __init__(
        self,
        backend: Backend,
        bits: Bits | Mapping[str, int],
        min_bytes: int | str,
        skip: Sequence[Any],
        model: Any,
        seed: int,
    ) -> None:
        if isinstance(bits, Mapping):
            for value in bits.values():
                if value != 32:
                    check_bits(value)
        else:
            check_bits(bits)
        if isinstance(skip, (str, type)) or not isinstance(skip, (Sequence, Set)):
            raise UsageError(f"skip is {_shown(skip)}: give a sequence, e.g. ('head',)")
        try:
            seed = operator.index(seed)
        except TypeError as error:
            raise UsageError(f"seed={seed!r}: give a whole number") from error
        self._backend = backend
        self._bits = bits
        self._min_bytes = parse_size(min_bytes)
        self._skip = tuple(skip)
        self._model = model
        self._inside = [self._modules_inside(item) for item in self._skip]
        self._seed = seed
        self._count = 0
        self._block: AbstractContextManager[Any] | None = None
        self._met: set[str] = set()
        self._skipping: set[int] = set()
        self.raw_bytes = 0
        self.packed_bytes = 0
        self.kept_bytes: dict[str, int] = {}
        self.layers: dict[str, int] = {}
        self.sizes: dict[str, tuple[int, int]] = {}

    def __enter__(self) -> Compression:
        if self._block is not None:
            raise UsageError("this block of xmem.compress_activations has been entered already")
        block = self._backend.saved.saving(self, model=self._model)
        self._check_names()
        block.__enter__()
        self._block = block
        return self

    def __exit__(self, *error: Any) -> bool | None:
        block, self._block = self._block, None
        assert block is not None
        suppressed = block.__exit__(*error)
        if error[0] is None:
            issue(self.receipt)
            if self._met:
                self._warn_of_names()
        return bool(suppressed)

    @contextmanager
    def silent(self) -> Iterator[None]:
        """Compress inside the block, and tell nobody."""
        block = self._backend.saved.saving(self, model=self._model)
        self._check_names()
        with block:
            yield

    def choose(self, candidate: Candidate) -> Choice:
        """See `xmem.saving.Policy`."""
        bits = self._bits_of(candidate.layer)
        skipped = self._is_skipped(candidate)
        if candidate.nbytes < self._min_bytes:
            return Choice(None, reason=f"below {format_size(self._min_bytes)}")
        if skipped:
            return Choice(None, reason="skipped")
        if candidate.dtype not in DTYPES:
            return Choice(None, reason=candidate.dtype, exact=True)
        if bits is None:
            return Choice(None, reason="skipped", exact=True)
        self._count += 1
        seed = (self._seed + self._count * _SPREAD) & 0xFFFFFFFF
        return Choice(bits, seed=seed, exact=True)

    def packed(
        self,
        candidate: Candidate,
        packed_bytes: int,
        *,
        exact: bool = False,
        away_bytes: int = 0,
    ) -> None:
        """See `xmem.saving.Policy`."""
        self.raw_bytes += candidate.nbytes
        self.packed_bytes += packed_bytes
        self.layers[candidate.layer] = self._bits_of(candidate.layer) or 32
        if exact:
            return
        elements, raw = self.sizes.get(candidate.layer, (0, 0))
        elements += math.prod(candidate.shape)
        self.sizes[candidate.layer] = elements, raw + candidate.nbytes

    def kept(self, candidate: Candidate, reason: str) -> None:
        """See `xmem.saving.Policy`."""
        self._is_skipped(candidate)
        self.kept_bytes[reason] = self.kept_bytes.get(reason, 0) + candidate.nbytes

    @property
    def receipt(self) -> Receipt:
        """What was compressed, and what was not and why."""
        kept = ", ".join(f"{reason} {format_size(n)}" for reason, n in self.kept_bytes.items())
        note = f"{format_size(self.raw_bytes)} in {format_size(self.packed_bytes)}"
        if kept and self.layers:
            note += f"; kept as they are: {kept}"
        elif kept:
            note = f"Kept as they are: {kept}. Lower min_bytes, or name less in skip."
        elif not self.layers:
            note = "Run forward passes inside the block, where gradients are recorded."
        return Receipt(
            "compress_activations",
            self._backend.name,
            len(self.layers),
            tuple(self.layers),
            expected_saving_bytes=self.raw_bytes - self.packed_bytes,
            note=note,
        )

    def _names(self) -> Iterator[tuple[str, Any]]:
        """Yield the paths that were given, with the argument that they were given in."""
        if isinstance(self._bits, Mapping):
            yield from (("bits", path) for path in self._bits)
        yield from (("skip", item) for item in self._skip if isinstance(item, str))

    def _check_names(self) -> None:
        """Refuse paths that lead nowhere in the model, where it is known."""
        named, capability = list(self._names()), self._backend.checkpoint
        if not named or not capability.is_module(self._model):
            return
        paths = {"", *(path for path, _ in modules_of(capability, self._model))}
        for argument, path in named:
            if path not in paths:
                raise UsageError(unknown(f"layer in {argument}", path, paths - {""}))

    def _warn_of_names(self) -> None:
        """Warn of layers that were named, and of which nothing is saved for backward."""
        bits = self._bits if isinstance(self._bits, Mapping) else {}
        missed: list[Any] = [p for p, n in bits.items() if n != 32 and p not in self._met]
        missed += [s for n, s in enumerate(self._skip) if n not in self._skipping]
        if missed:
            valid = unknown("layer", missed[0], self._met).partition("Valid: ")[2]
            warnings.warn(
                f"compress_activations: of {', '.join(map(_shown, missed))} nothing was saved for"
                " backward, so to name it in bits or skip changes nothing. What several layers save"
                " is the first one's, and bits are a layer's own, not of those inside. Layers that"
                f" something was saved of: {valid}",
                XmemWarning,
                stacklevel=3,
            )

    def _bits_of(self, layer: str) -> int | None:
        if not isinstance(self._bits, Mapping):
            return self._bits
        bits = self._bits.get(layer, 32)
        return None if bits == 32 else bits

    def _is_skipped(self, candidate: Candidate) -> bool:
        """Say whether a tensor is in `skip`, and note by which of its items, and its layer."""
        self._met.add(candidate.layer)
        found = [n for n, item in enumerate(self._skip) if self._holds(n, item, candidate)]
        self._skipping.update(found)
        return bool(found)

    def _holds(self, number: int, item: Any, candidate: Candidate) -> bool:
        """Say whether an item of `skip` is or holds what a candidate belongs to."""
        if item is candidate.tensor or id(candidate.module) in self._inside[number]:
            return True
        if isinstance(item, type):
            return isinstance(candidate.module, item)
        path = candidate.layer
        return isinstance(item, str) and (path == item or path.startswith(f"{item}."))

    def _modules_inside(self, item: Any) -> set[int]:
        """Return the ids of a module and of all inside it; of those of a class in the model."""
        capability = self._backend.checkpoint
        roots = [item] if capability.is_module(item) else []
        if isinstance(item, type) and capability.is_module(self._model):
            everything = (m for _, m in modules_of(capability, self._model))
            roots = [m for m in everything if isinstance(m, item)]
        return {
            id(m) for root in roots for m in (root, *(m for _, m in modules_of(capability, root)))
        }


def _shown(item: Any) -> str:
    if isinstance(item, type):
        return item.__name__
    return repr(item) if isinstance(item, (str, int)) else f"a {type(item).__name__}"
