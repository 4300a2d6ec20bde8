"""Parameters that are away on PyTorch, together with what else is done to a model."""

import pytest
import torch
from streamed import (
    WIDTH,
    Layer,
    away,
    bytes_of,
    check_gradients,
    held_bytes,
    loss_of,
    measured,
    pair,
    same,
    tokens,
)
from torch import nn
from torch.utils.checkpoint import checkpoint

import xmem
from xmem import CompositionError

pytestmark = pytest.mark.usefixtures("backend")


def adamw(model):
    return torch.optim.AdamW(model.parameters(), 1e-3)


def xmem_adamw(model):
    return xmem.optim.AdamW(model.parameters(), 1e-3, min_elements=1)


def sgd(model):
    return torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)


def trained(models, optimizers, *, inside, steps=20):
    """Train models side by side, holding their losses against each other."""
    if inside:
        for m, optimizer in zip(models, optimizers, strict=True):
            xmem.optimizer_in_backward(m, optimizer)
    for _ in range(steps):
        losses = [loss_of(m, tokens()) for m in models]
        for loss, optimizer in zip(losses, optimizers, strict=True):
            loss.backward()
            if not inside:
                optimizer.step()
                optimizer.zero_grad()
        assert losses[0].item() == losses[1].item()


@pytest.mark.parametrize("make", [adamw, sgd, xmem_adamw])
@pytest.mark.parametrize("prefetch", [0, "1MiB"])
def test_twenty_steps_in_backward_are_equal_bit_for_bit(make, prefetch):
    plain, model = pair()
    receipt = away(model, prefetch=prefetch)
    trained((plain, model), [make(plain), make(model)], inside=True)
    assert held_bytes(model) == 0
    receipt.undo()
    assert same(list(model.parameters()), list(plain.parameters()))


@pytest.mark.parametrize("order", ["states first", "parameters first"])
@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("make", [adamw, xmem_adamw])
def test_twenty_steps_with_streamed_states_are_equal_bit_for_bit(order, inside, make):
    plain, model = pair()
    optimizers = [make(plain), make(model)]
    applied = [
        lambda: xmem.offload_optimizer(optimizers[1], "disk", block="64KiB"),
        lambda: away(model),
    ]
    receipts = [apply() for apply in (applied if order == "states first" else applied[::-1])]
    trained((plain, model), optimizers, inside=inside)
    assert held_bytes(model) == 0
    for receipt in receipts:
        receipt.undo()
    assert same(list(model.parameters()), list(plain.parameters()))


def test_a_step_in_backward_holds_a_block_beside_what_a_plain_one_makes():
    plain, model = pair(layers=6, width=128)
    ids, block = tokens(), bytes_of(Layer(128))
    away(model)
    peaks = []
    for m in (plain, model):
        optimizer = adamw(m)
        xmem.optimizer_in_backward(m, optimizer)
        loss_of(m, ids).backward()
        peaks.append(measured(m, lambda m=m: loss_of(m, ids).backward(), optimizer)[0])
    print(peaks, block, bytes_of(model))
    # Above what is there before, which plain parameters are a part of and ours are not.
    assert peaks[1] <= peaks[0] + block + model.position.nbytes


def test_training_runs_within_less_than_the_parameters_take(backend):
    plain, model = pair(layers=12, width=128)
    ids = tokens(4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    before = backend.measure.counters().allocated_bytes
    away(model)
    xmem.optimizer_in_backward(model, optimizer)
    limit = before - bytes_of(model) // 2
    backend.measure.set_limit(limit)
    for _ in range(3):
        backend.measure.reset_peak()
        loss = loss_of(model, ids)
        loss.backward()
    print(limit, before, backend.measure.counters().peak_allocated_bytes)
    backend.measure.set_limit(None)
    xmem.optimizer_in_backward(plain, torch.optim.SGD(plain.parameters(), 0.1))
    for _ in range(3):
        expected = loss_of(plain, ids)
        expected.backward()
    assert loss.item() == expected.item()


class Inside(nn.Module):
    """A block whose own parameter is read in a region that no module is called for."""

    def __init__(self):
        super().__init__()
        self.scale, self.layer = nn.Parameter(torch.randn(WIDTH)), nn.Linear(WIDTH, WIDTH)

    def inner(self, x):
        return (self.layer(x) * self.scale).tanh()

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=False)


class Regions(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Inside() for _ in range(3))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


@pytest.mark.parametrize("blocks", [None, []])
@pytest.mark.parametrize("around", [False, True])
def test_regions_inside_blocks_find_their_parameters(blocks, around):
    plain, model = pair(Regions)
    away(model, blocks=blocks)
    x = torch.ones(3, WIDTH, requires_grad=True)
    check_gradients(plain, model, lambda m: xmem.checkpoint(m, x) if around else m(x))


def test_a_module_inside_several_blocks_comes_with_each():
    def make():
        model = Regions()
        model.blocks[1].layer = model.blocks[0].layer
        return model

    plain, model = pair(make)
    receipt = away(model)
    x = torch.ones(3, WIDTH, requires_grad=True)
    check_gradients(plain, model, lambda m: m(x))
    receipt.undo()
    assert type(model.blocks[0].layer) is nn.Linear
    assert same(list(model.parameters()), list(plain.parameters()))


def test_backward_hooks_of_modules_see_what_they_saw():
    plain, model = pair()
    seen = {}
    for m in (plain, model):
        seen[m] = []
        m.layers[1].register_full_backward_hook(lambda _, i, o, m=m: seen[m].append((*i, *o)))
    away(model)
    check_gradients(plain, model, lambda m: loss_of(m, tokens()))
    assert same(*(found[0] for found in seen.values()))


def test_a_plan_that_was_made_of_the_model_runs_it():
    plain, model = pair(layers=6)
    receipts = [away(model)]
    receipts.append(
        xmem.apply_checkpointing(model, xmem.plan(model, tokens(), loss_of, budget="100%"))
    )
    check_gradients(plain, model, lambda m: loss_of(m, tokens()))
    for receipt in receipts:
        receipt.undo()
    assert same(list(model.parameters()), list(plain.parameters()))


def test_compilers_fakes_and_masters_are_refused_and_nothing_changes():
    plain, model = pair()
    away(model)
    with pytest.raises(CompositionError, match=r"traced by torch\.compile"):
        torch.compile(model, backend="eager")(tokens())
    with pytest.raises(CompositionError, match="without memory"):
        xmem.predict(model, tokens(), loss_of)
    with pytest.raises(RuntimeError, match="this parameter is away"):
        xmem.cast_model(model, "bfloat16")
    check_gradients(plain, model, lambda m: loss_of(m, tokens()))
    xmem.apply_checkpointing(plain, xmem.plan(plain, tokens(), loss_of, budget="100%"))
    with pytest.raises(CompositionError, match="is planned"):
        away(plain)


def test_inference_mode_and_functional_calls_work():
    plain, model = pair()
    away(model, prefetch="1MiB")
    with torch.inference_mode():
        for _ in range(2):
            assert torch.equal(model(tokens()), plain(tokens()))
        assert same(list(model.state_dict().values()), list(plain.state_dict().values()))
    other = torch.randn_like(plain.head.weight)
    ours, theirs = (
        torch.func.functional_call(m, {"head.weight": other}, (tokens(),)) for m in (model, plain)
    )
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("frozen", [False, True])
def test_autocast_goes_together_with_it(frozen):
    plain, model = pair()
    for m in (plain, model):
        m.layers.requires_grad_(not frozen)
    away(model)

    def run(m):
        with torch.autocast("cpu", torch.bfloat16):
            return loss_of(m, tokens())

    check_gradients(plain, model, run)


@pytest.mark.parametrize("frozen", [False, True])
def test_compressed_activations_pack_the_same_and_no_parameters(frozen):
    plain, model = pair()
    for m in (plain, model):
        m.layers.requires_grad_(not frozen)
    away(model)
    packed = []
    for m in (plain, model):
        with (
            xmem.compress_activations(bits=8, min_bytes=1024) as block,
            torch.autocast("cpu", torch.bfloat16),
        ):
            loss = loss_of(m, tokens())
        loss.backward()
        packed.append((block.receipt.applied_to, block.receipt.note))
    assert packed[0] == packed[1]
    assert held_bytes(model) == 0
    for p, q in zip(plain.parameters(), model.parameters(), strict=True):
        if p.grad is not None:  # rounded at random, so not the same twice
            assert (p.grad - q.grad).norm() <= 0.05 * p.grad.norm()
