"""The codec of `xmem.codec` as lazy operations; on a CPU through its kernels there.

What differs from call to call (seeds, sizes, addresses of functions) goes to the operations through
`data`, so there is one compiled kernel for all. The CUDA kernels are `native/codec.cuh`. Gradients
do not flow through these operations. Truth values are packed too, eight to a byte.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import jittor as jt

from xmem.codec import DTYPES, STYLES, Style, packed_bytes
from xmem.native import codec
from xmem_jittor import native

_PACK = """((void (*)(const void*, int, long long, int, int, unsigned, void*))(size_t)data["pack"])(
    in0->mem_ptr, (int)data["dtype"], (long long)in0->num, (int)data["bits"], (int)data["style"],
    (unsigned)(long long)data["seed"], out0->mem_ptr);"""
_UNPACK = """((void (*)(const void*, long long, int, int, void*))(size_t)data["unpack"])(
    in0->mem_ptr, (long long)out0->num, (int)data["bits"], (int)data["dtype"], out0->mem_ptr);"""
_PACK_BITS = """((void (*)(const void*, long long, void*))(size_t)data["pack"])(
    in0->mem_ptr, (long long)in0->num, out0->mem_ptr);"""
_UNPACK_BITS = """((void (*)(const void*, long long, void*))(size_t)data["unpack"])(
    in0->mem_ptr, (long long)out0->num, out0->mem_ptr);"""
_PACK_CUDA = """xmem::pack<<<xmem::blocks_of(in0->num), xmem::BLOCK>>>(
    in0->mem_ptr, (int)data["dtype"], in0->num, (int)data["bits"], (int)data["style"],
    (uint32_t)(long long)data["seed"], (uint8_t*)out0->mem_ptr);"""
_UNPACK_CUDA = """xmem::unpack<<<xmem::blocks_of(out0->num), xmem::BLOCK>>>(
    (const uint8_t*)in0->mem_ptr, out0->num, (int)data["bits"], (int)data["dtype"],
    out0->mem_ptr);"""
_PACK_BITS_CUDA = """xmem::pack_bits<<<((in0->num + 7) / 8 + 255) / 256, 256>>>(
    (const uint8_t*)in0->mem_ptr, in0->num, (uint8_t*)out0->mem_ptr);"""
_UNPACK_BITS_CUDA = """xmem::unpack_bits<<<(out0->num + 255) / 256, 256>>>(
    (const uint8_t*)in0->mem_ptr, out0->num, (uint8_t*)out0->mem_ptr);"""


def pack(x: Any, bits: int, seed: int, style: Style = "signs") -> Any:
    """Return a flat uint8 tensor; see `xmem.codec.pack`."""
    data = {
        "dtype": DTYPES.index(str(x.dtype)),
        "bits": bits,
        "style": STYLES.index(style),
        "seed": seed & 0xFFFFFFFF,
        "pack": _address("xmem_codec_pack"),
    }
    return _operation((packed_bytes(x.numel(), bits),), "uint8", x, data, _PACK, _PACK_CUDA)


def unpack(packed: Any, shape: Sequence[int], bits: int, dtype: str = "float32") -> Any:
    """Return what was packed, in its shape; see `xmem.codec.unpack`."""
    data = {
        "dtype": DTYPES.index(dtype),
        "bits": bits,
        "unpack": _address("xmem_codec_unpack"),
    }
    return _operation(shape, dtype, packed, data, _UNPACK, _UNPACK_CUDA)


def pack_bits(x: Any) -> Any:
    """Return a flat uint8 tensor with an eighth of the bytes of one of truth values."""
    data = {"pack": native.address_of(native.saving().xmem_jittor_pack_bits)}
    return _operation((-(-x.numel() // 8),), "uint8", x, data, _PACK_BITS, _PACK_BITS_CUDA)


def unpack_bits(packed: Any, shape: Sequence[int]) -> Any:
    """Return truth values."""
    data = {"unpack": native.address_of(native.saving().xmem_jittor_unpack_bits)}
    return _operation(shape, "bool", packed, data, _UNPACK_BITS, _UNPACK_BITS_CUDA)


def bits_bytes(shape: Sequence[int]) -> int:
    """Return the bytes that truth values take when packed."""
    return -(-math.prod(shape) // 8)


def _operation(
    shape: Sequence[int], dtype: str, x: Any, data: dict[str, int], cpu: str, cuda: str
) -> Any:
    """Return the output of an operation that is fused with nothing."""
    with jt.flag_scope(no_grad=1):
        return jt.code(
            tuple(shape),
            dtype,
            [x],
            data=data,
            cpu_src=cpu,
            cuda_header=_device_header(),
            cuda_src=cuda,
        ).stop_fuse()


def _address(name: str) -> int:
    return native.address_of(getattr(codec.load(), name))


@lru_cache(maxsize=1)
def _device_header() -> str:
    return (Path(__file__).parent / "native" / "codec.cuh").read_text(encoding="utf-8")
