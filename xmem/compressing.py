"""Compressed activations: keep what backward will read in few bits.

Jianfei Chen et al., "ActNN: Reducing Training Memory Footprint via 2-Bit Activation Compressed
Training", ICML 2021; Xiaoxuan Liu et al., "GACT: Activation Compressed Training for Generic Network
Architectures", ICML 2022. The codec is `xmem.codec`.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from xmem.codec import DTYPES, Bits, check_bits
from xmem.errors import UsageError
from xmem.receipts import Receipt, issue
from xmem.saving import Candidate, Choice
from xmem.saving_together import in_force
from xmem.selection import Selection
from xmem.sizes import format_size, parse_size

if TYPE_CHECKING:
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
        selection = Selection(backend, skip, model)
        try:
            seed = operator.index(seed)
        except TypeError as error:
            raise UsageError(f"seed={seed!r}: give a whole number") from error
        self._backend = backend
        self._bits = bits
        self._min_bytes = parse_size(min_bytes)
        self._selection = selection
        self._seed = seed
        self._count = 0
        self._entered: ExitStack | None = None
        self.raw_bytes = 0
        self.packed_bytes = 0
        self.kept_bytes: dict[str, int] = {}
        self.layers: dict[str, int] = {}
        self.sizes: dict[str, tuple[int, int]] = {}

    def __enter__(self) -> Compression:
        if self._entered is not None:
            raise UsageError("this block of xmem.compress_activations has been entered already")
        with ExitStack() as entered:
            entered.enter_context(self.silent())
            self._entered = entered.pop_all()
        return self

    def __exit__(self, *error: Any) -> bool | None:
        entered, self._entered = self._entered, None
        assert entered is not None
        suppressed = entered.__exit__(*error)
        if error[0] is None:
            issue(self.receipt)
            bits = self._bits if isinstance(self._bits, Mapping) else {}
            named = [path for path, number in bits.items() if number != 32]
            self._selection.warn_of_missed("compress_activations", named)
        return bool(suppressed)

    @contextmanager
    def silent(self) -> Iterator[None]:
        """Compress inside the block, and tell nobody."""
        bits = self._bits if isinstance(self._bits, Mapping) else ()
        model = self._selection.model
        with in_force(self) as policy:
            block = self._backend.saved.saving(policy, model=model)
            self._selection.check_names(("bits", path) for path in bits)
            with block:
                yield

    def choose(self, candidate: Candidate) -> Choice:
        """See `xmem.saving.Policy`."""
        bits = self._bits_of(candidate.layer)
        skipped = self._selection.skips(candidate)
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
        self._selection.skips(candidate)
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

    def _bits_of(self, layer: str) -> int | None:
        if not isinstance(self._bits, Mapping):
            return self._bits
        bits = self._bits.get(layer, 32)
        return None if bits == 32 else bits
