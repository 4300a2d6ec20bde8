"""Compressed activations on PyTorch: losses, gradients, bytes, what is packed and what is not."""

import gc
import warnings

import pytest
import torch
from on_torch.compressed import cnn, error, mlp, saved_by, step
from on_torch.gpt import GPT, forward_and_backward
from torch import nn
from torch.nn import functional
from torch.nn.modules import module as modules
from xmem_torch.passes import top_hooks

import xmem
from xmem.errors import XmemWarning


@pytest.mark.parametrize("make", [mlp, cnn])
@pytest.mark.parametrize(("bits", "bound"), [(8, 0.01), (4, 0.16), (2, 1.5)])
def test_losses_are_bit_equal_and_gradients_are_off_by_the_rounding(backend, make, bits, bound):
    """16 times the levels, a 16th of the error; see benchmarks/compress.py for larger models."""
    model, x = make()
    loss, exact, _ = step(model, x)
    loss_again, gradients, block = step(model, x, bits=bits)
    assert loss_again == loss
    together, worst = error(gradients, exact)
    print(f"{bits} bits: {together:.4f}, worst {worst:.4f}")
    assert 0 < together < bound
    assert block.packed_bytes < block.raw_bytes / (3.5 if bits == 8 else 6)


def test_the_error_of_the_mean_falls_as_that_of_unbiased_rounding_does(backend):
    model, x = mlp()
    _, exact, _ = step(model, x)
    draws = [step(model, x, bits=4)[1] for _ in range(16)]
    single = error(draws[0], exact)[0]
    mean = [sum(tensors) / len(draws) for tensors in zip(*draws, strict=True)]
    averaged = error(mean, exact)[0]
    print(f"one draw {single:.4f}, mean of 16 {averaged:.4f}")
    assert averaged < single / 2.5


def test_a_gpt_holds_less_than_half(backend):
    """8 layers, 8 bits: 0.37 of the plain peak, gradients there already."""
    model = GPT(layers=8, dropout=0.0)
    ids = torch.randint(0, 1000, (8, 128))
    peaks = []
    for bits in (None, 8, 4):

        def run(bits=bits):
            if bits is None:
                return forward_and_backward(model, ids, ids)
            with xmem.compress_activations(bits=bits):
                return forward_and_backward(model, ids, ids)

        run()
        gc.collect()
        with xmem.measure(model=model, inputs=ids) as m:
            run()
        peaks.append(m.peak_above_static_bytes)
    print(f"plain, 8 and 4 bits: {peaks} bytes")
    assert peaks[1] < 0.51 * peaks[0]
    assert peaks[2] < 0.42 * peaks[0]


def test_a_tensor_that_several_save_is_packed_once(backend):
    """A ReLU's result is saved by it and by the next layer."""
    model, x = mlp(layers=4)
    _, _, block = step(model, x, bits=8)
    assert block.raw_bytes == 4 * 256 * 256 * 4


def test_views_of_one_memory_are_packed_once(backend):
    x = torch.randn(64, 64, requires_grad=True) * 1
    block, _ = saved_by(lambda: x.exp() + x.view(-1).cos().sum() + x.t().sin().sum())
    [exponential, packed] = [64 * 64 * 4] * 2
    assert block.raw_bytes == exponential + packed


def test_a_tensor_that_is_changed_in_place_in_between_is_packed_anew(backend):
    x = torch.randn(64, 64, requires_grad=True) * 1
    with torch.no_grad():
        y = x * 1

    def run():
        first = x * y
        y.add_(1)
        return first, x * y

    block, (_, second) = saved_by(run)
    assert block.raw_bytes == 2 * 64 * 64 * 4
    [gradient] = torch.autograd.grad(second.sum(), x, retain_graph=True)
    assert (gradient - y).abs().max() < 0.05


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.randn(6, 5, 4, 3),
        lambda: torch.randn(6, 5, 4, 3).permute(2, 0, 3, 1),
        lambda: torch.randn(6, 5, 4, 3).to(memory_format=torch.channels_last),
        lambda: torch.randn(3, 1, 4, 1).expand(3, 5, 4, 7),
        lambda: torch.randn(40).unfold(0, 8, 2),
        lambda: torch.randn(20)[4:16].view(3, 4),
        lambda: torch.randn(1, 7, 1).as_strided((1, 7, 1), (50, 1, 3)),
        lambda: torch.randn(()),
    ],
)
def test_tensors_come_back_with_the_strides_they_had(backend, make):
    plain = make()
    x = plain.requires_grad_(True) if plain.is_leaf else plain
    y = torch.ones_like(plain, requires_grad=True)
    with xmem.compress_activations(8, min_bytes=0):
        result = y * x.detach()
    saved = result.grad_fn._saved_other
    assert saved.shape == x.shape
    assert [s for s, n in zip(saved.stride(), saved.shape, strict=True) if n > 1] == [
        s for s, n in zip(x.stride(), x.shape, strict=True) if n > 1
    ]
    assert (saved - x).abs().max() <= x.abs().max() / 127 * 1.01


def test_parts_of_a_joint_projection_are_packed_without_their_gaps(backend):
    joint = torch.randn(2, 16, 3, 4, 8, requires_grad=True) * 1
    q, k, v = joint.permute(2, 0, 3, 1, 4)
    assert not q.is_contiguous()
    block, out = saved_by(functional.scaled_dot_product_attention, q, k, v)
    others = out.numel() * 4 + 2 * 4 * 16 * 4  # the result, and a sum for each of its rows
    assert block.raw_bytes == 3 * q.numel() * 4 + others
    del joint, q, k, v
    out.sum().backward()


def test_dropout_noise_masks_and_places_of_maxima_are_exact(backend):
    x = torch.randn(4, 8, 32, 32)
    for operation, share in (
        (lambda t: functional.dropout(t, 0.25), 32),
        (lambda t: t.masked_fill(t.detach() > 0, 2.0), 8),
        (lambda t: functional.max_pool2d(t, 2), 3.9),
    ):
        leaf = x.clone().requires_grad_(True)
        torch.manual_seed(3)
        block, result = saved_by(operation, leaf)
        result.sum().backward()
        plain = x.clone().requires_grad_(True)
        torch.manual_seed(3)
        operation(plain).sum().backward()
        assert torch.equal(leaf.grad, plain.grad)
        assert block.raw_bytes >= share * block.packed_bytes > 0


def test_parameters_buffers_and_the_batch_stay_as_they_are(backend):
    model, x = mlp()
    with xmem.compress_activations(8, min_bytes=0) as block:
        model(x)
    assert block.kept_bytes == {"input": x.nbytes}
    frozen = nn.Linear(64, 64).requires_grad_(False)
    free = torch.randn(64, 64, requires_grad=True)
    with pytest.warns(XmemWarning, match="applied to nothing"):
        block, _ = saved_by(lambda: (frozen(free), torch.mm(free, free)))
    assert not block.raw_bytes


def test_layers_are_named_by_their_paths(backend):
    model, x = mlp(layers=2)
    _, _, block = step(model, x, bits=8)
    assert list(block.layers) == ["1", "3"]  # of the modules that saved first
    outer = nn.ModuleDict({"inner": model})
    with xmem.compress_activations(8, model=outer) as block:
        model(x)
    assert list(block.layers) == ["inner.1", "inner.3"]


def test_bits_and_skips_go_by_layer(backend):
    model, x = mlp(layers=3)
    _, _, block = step(model, x, bits={"1": 8, "3": 4})
    assert block.layers == {"1": 8, "3": 4}
    _, _, block = step(model, x, bits=8, skip=("1", model[3]))
    assert list(block.layers) == ["5"]
    with pytest.warns(XmemWarning, match="skipped"):
        step(model, x, bits=8, skip=(nn.ReLU,))


def test_the_receipt_says_what_was_packed_and_what_not_and_why(backend):
    model, x = mlp()
    _, _, block = step(model, x, bits=8)
    receipt = block.receipt
    assert receipt.applied_to == len(block.layers) == 4
    assert receipt.expected_saving_bytes == block.raw_bytes - block.packed_bytes
    assert "1.00 MiB in 260.00 KiB" in receipt.note
    assert "input 256.00 KiB" in receipt.note
    double = torch.randn(200, 200, dtype=torch.float64, requires_grad=True)
    with (
        pytest.warns(XmemWarning, match="float64 312.50 KiB"),
        xmem.compress_activations(),
    ):
        (double * 1).exp()


def test_everything_is_undone_at_the_end_also_after_an_error(backend):
    model, x = mlp()

    class Broken(nn.Module):
        def forward(self, x):
            raise KeyError("broken")

    broken = nn.Sequential(model, Broken())
    with xmem.compress_activations() as block:
        assert top_hooks() is not None
        with pytest.raises(KeyError):
            broken(x)
        model(x)
    assert next(iter(block.layers)) == "0.1"
    assert "1" in block.layers  # paths begin at the outermost module that runs, which is this one
    with pytest.raises(KeyError), xmem.compress_activations():
        broken(x)
    assert top_hooks() is None
    assert not modules._global_forward_hooks
    assert not modules._global_forward_pre_hooks
    assert not modules._global_forward_hooks_always_called


@pytest.mark.parametrize("min_bytes", [1024, "1GiB"], ids=["packed", "kept"])
@pytest.mark.filterwarnings("ignore:compress_activations was applied to nothing")
def test_no_bytes_stay_behind_over_50_steps_without_the_collector(backend, min_bytes):
    """A hook that hands on the very tensor lets a node hold its output for ever."""
    model, x = cnn(width=4)
    step(model, x, bits=8, min_bytes=min_bytes)
    gc.collect()
    gc.disable()
    try:
        allocated = set()
        for _ in range(50):
            step(model, x, bits=8, min_bytes=min_bytes)
            model.zero_grad(set_to_none=True)
            with xmem.compress_activations(min_bytes=min_bytes):
                model(x)  # and no backward, which would let go of everything
            allocated.add(backend.measure.counters().allocated_bytes)
    finally:
        gc.enable()
    assert len(allocated) == 1, allocated


def test_random_streams_are_untouched(backend):
    model, x = mlp()
    torch.manual_seed(5)
    before = torch.get_rng_state()
    with xmem.compress_activations():
        loss = model(x).sum()
    loss.backward()
    assert torch.equal(torch.get_rng_state(), before)


def test_each_block_rounds_anew(backend):
    """What rounds up would do so in every step otherwise."""
    model, x = mlp()
    one, other = (step(model, x, bits=4)[1] for _ in range(2))
    assert not torch.equal(one[-2], other[-2])
    one, other = (step(model, x, bits=4, seed=7)[1] for _ in range(2))
    assert torch.equal(one[-2], other[-2])


def test_half_precision_is_packed_from_half(backend):
    model, x = mlp()
    with xmem.autocast("bfloat16"):
        _, exact, _ = step(model, x)
        _, gradients, block = step(model, x, bits=8)
    assert block.raw_bytes <= 4 * 256 * 256 * 2 + 4 * 256 * 256 * 2  # results, and cast weights
    assert error(gradients, exact)[0] < 0.02


def test_a_pass_without_gradients_warns_that_nothing_was_saved(backend):
    model, x = mlp()
    with (
        pytest.warns(XmemWarning, match="applied to nothing"),
        xmem.compress_activations(),
        torch.no_grad(),
    ):
        model(x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(model, x, bits=8)
