"""The codec on torch tensors: PyTorch's own operations give the bytes of the native kernels."""

import numpy as np
import pytest
import torch
from codec_values import CASES, stored, values
from hypothesis import given, settings
from hypothesis import strategies as st
from xmem_torch import codec, eager, exact

from xmem import codec as reference

as_integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def tensor_of(array, dtype):
    if dtype == "bfloat16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


@pytest.fixture
def _without_a_compiler(monkeypatch):
    monkeypatch.setattr(codec, "_compiled", lambda: False)


@settings(max_examples=120, deadline=None)
@given(**CASES, style=st.sampled_from(reference.STYLES))
def test_eager_operations_give_the_bytes_of_the_definition(
    kind, count, magnitude, dtype, bits, seed, style
):
    x = values(kind, count, magnitude, seed)
    style = "plain" if style == "floor" and (np.sign(x) < 0).any() else style
    array = stored(x, dtype)
    expected = reference.pack(array, bits, seed, style)
    tensor = tensor_of(array, dtype)
    packed = torch.empty(expected.size, dtype=torch.uint8)
    eager.pack(tensor, bits, seed, style, packed)
    assert np.array_equal(packed.numpy(), expected)
    assert torch.equal(codec.pack(tensor, bits, seed, style=style), packed)
    back = torch.empty(count, dtype=codec.DTYPES[dtype])
    eager.unpack(packed, bits, back)
    natively = codec.unpack(packed, count, bits, codec.DTYPES[dtype])
    kind = as_integers[back.element_size()]
    assert torch.equal(back.view(kind), natively.view(kind))


def test_eager_operations_work_piece_by_piece(backend):
    """What they need beside the result stays below 4 MiB, whatever the tensor's size."""
    x = torch.randn(3_000_001)
    packed = torch.empty(reference.packed_bytes(x.numel(), 8), dtype=torch.uint8)
    backend.measure.reset_peak()
    before = backend.measure.counters()
    eager.pack(x, 8, 1, "signs", packed)
    after = backend.measure.counters()
    scratch = after.peak_allocated_bytes - before.allocated_bytes
    print(f"{scratch} bytes beside {packed.numel()}")
    assert scratch < 4 << 20
    assert torch.equal(packed, codec.pack(x, 8, 1))


@pytest.mark.parametrize("compiler", [True, False])
@pytest.mark.parametrize("count", [1, 9, 256, 5000, (1 << 20) + 77])
def test_masks_and_integers_come_back(request, compiler, count):
    if not compiler:
        request.getfixturevalue("_without_a_compiler")
    mask = torch.rand(count) < 0.3
    assert torch.equal(exact.unpack_bits(exact.pack_bits(mask), count, torch.bool, 1), mask)
    for dtype in codec.DTYPES.values():
        noise = torch.empty(count, dtype=dtype).bernoulli_(0.9).div_(0.9)
        noise[0] = noise.max()
        pattern = exact.second_value(noise)
        packed = exact.pack_bits(noise)
        assert packed.numel() == -(-count // 8)
        assert torch.equal(exact.unpack_bits(packed, count, dtype, pattern), noise)
        noise[-1] = -3
        assert exact.second_value(noise) is None or count == 1
    for dtype, most, width in (
        (torch.int64, 200, 1),
        (torch.int64, 60_000, 2),
        (torch.int64, 2**31, 4),
        (torch.int32, 60_000, 2),
        (torch.int16, 200, 1),
    ):
        x = torch.randint(0, most, (count,)).to(dtype)
        x[0], x[-1] = 0, most - 1
        found = exact.offset_width(x)
        assert found == width or count in (1, (1 << 20) + 77)
        packed = exact.pack_offsets(x, found)
        assert torch.equal(exact.unpack_offsets(packed, count, found, dtype), x)
    wide = torch.tensor([-(2**63), 2**63 - 1])
    assert exact.offset_width(wide) is None


def test_both_ways_of_packing_integers_give_the_same_bytes(monkeypatch):
    x = torch.randint(-5000, 50_000, (10_007,))
    mask = torch.rand(10_007) < 0.5
    natively = exact.pack_offsets(x, 2), exact.pack_bits(mask)
    monkeypatch.setattr(codec, "_compiled", lambda: False)
    for a, b in zip((exact.pack_offsets(x, 2), exact.pack_bits(mask)), natively, strict=True):
        assert torch.equal(a, b)
