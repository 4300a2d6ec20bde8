"""Checkpointing on PyTorch: bytes, gradients, randomness, statistics, and the way back."""

import copy
import gc
import itertools
import pickle
import weakref

import pytest
import torch
from on_torch.gpt import GPT, forward_and_backward, peak_bytes
from torch import nn

import xmem


def loss_and_gradients(model, ids):
    model.zero_grad(set_to_none=True)
    torch.manual_seed(1)
    loss = forward_and_backward(model, ids, ids)
    return loss, [p.grad.clone() for p in model.parameters()]


def test_a_24_layer_gpt_takes_a_ninth_with_every_block_checkpointed(backend):
    """230 MiB against 25: a block keeps 20 times what it hands on. Forward and backward."""
    model = GPT(layers=24)
    ids = torch.randint(0, 1000, (8, 128))
    plain = peak_bytes(model, ids)
    receipt = xmem.apply_checkpointing(model, "every")
    assert receipt.applied_to == 24
    checkpointed = peak_bytes(model, ids)
    print(
        f"plain {plain} bytes, checkpointed {checkpointed} bytes, {plain / checkpointed:.2f}-fold"
    )
    assert plain >= 9 * checkpointed


def test_dropout_masks_are_replayed_and_gradients_are_bit_equal(backend):
    model = GPT(layers=3, dropout=0.3)
    ids = torch.randint(0, 1000, (4, 64))
    loss, gradients = loss_and_gradients(model, ids)
    receipt = xmem.apply_checkpointing(model, "every")
    loss_again, gradients_again = loss_and_gradients(model, ids)
    assert loss_again == loss
    for a, b in zip(gradients_again, gradients, strict=True):
        assert torch.equal(a, b)
    receipt.undo()
    assert loss_and_gradients(model, ids)[0] == loss


def test_without_replaying_randomness_the_gradients_differ(backend):
    """The flag does something: the test above could fail."""
    model = GPT(layers=3, dropout=0.3)
    ids = torch.randint(0, 1000, (4, 64))
    _, gradients = loss_and_gradients(model, ids)
    xmem.apply_checkpointing(model, "every", preserve_rng=False)
    _, gradients_again = loss_and_gradients(model, ids)
    pairs = zip(gradients_again, gradients, strict=True)
    assert not all(torch.equal(a, b) for a, b in pairs)


def conv_blocks():
    torch.manual_seed(3)
    return nn.Sequential(
        *[
            nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())
            for _ in range(3)
        ]
    )


@pytest.mark.parametrize("momentum", [0.1, None])
def test_batch_norm_statistics_are_updated_once(backend, momentum):
    x = torch.randn(8, 4, 8, 8)
    states = []
    for checkpointed in (False, True):
        model = conv_blocks()
        for block in model:
            block[1].momentum = momentum
        if checkpointed:
            xmem.apply_checkpointing(model, "every")
        for _ in range(2):
            model(x).square().mean().backward()
        states.append((dict(model.state_dict()), [p.grad for p in model.parameters()]))
        assert all(block[1].momentum == momentum for block in model)
    (plain, plain_gradients), (ours, our_gradients) = states
    assert plain.keys() == ours.keys()
    assert all(torch.equal(plain[k], ours[k]) for k in plain)
    assert all(torch.equal(a, b) for a, b in zip(plain_gradients, our_gradients, strict=True))


def test_state_dict_and_forward_are_as_before_after_undo(backend):
    model = conv_blocks()
    keys = list(model.state_dict())
    receipt = xmem.apply_checkpointing(model, "every")
    assert list(model.state_dict()) == keys
    assert all("forward" in block.__dict__ for block in model)
    receipt.undo()
    assert not any("forward" in block.__dict__ for block in model)
    receipt.undo()


def test_a_block_used_twice_is_wrapped_once(backend):
    shared = nn.Sequential(nn.Linear(8, 8), nn.GELU())
    model = nn.Sequential(shared, shared, nn.Sequential(nn.Linear(8, 8), nn.GELU()))
    receipt = xmem.apply_checkpointing(model, "every")
    assert receipt.applied_to == 2


def test_nested_inputs_outputs_and_keywords_pass_through(backend):
    layer = nn.Linear(8, 8)

    def function(pair, *, scale, flag):
        a, b = pair["a"], pair["b"][0]
        return {"sum": layer(a) * scale, "both": (layer(b), flag)}

    a = torch.randn(4, 8, requires_grad=True)
    b = torch.randn(4, 8, requires_grad=True)
    results = []
    for call in (function, lambda *p, **k: xmem.checkpoint(function, *p, **k)):
        a.grad = b.grad = layer.weight.grad = None
        out = call({"a": a, "b": [b]}, scale=3.0, flag="kept")
        assert out["both"][1] == "kept"
        (out["sum"].sum() + out["both"][0].square().sum()).backward()
        results.append((a.grad, b.grad, layer.weight.grad))
    for plain, ours in zip(*results, strict=True):
        assert torch.equal(plain, ours)


def test_without_gradients_it_is_a_plain_call(backend):
    calls = []
    with torch.no_grad():
        y = xmem.checkpoint(lambda x: calls.append(1) or x * 2, torch.ones(3, requires_grad=True))
    assert calls == [1]
    assert not y.requires_grad


@pytest.mark.parametrize("kept", ["linear", "gelu"])
def test_recomputation_keeps_the_same_operations_in_float32(backend, kept):
    block = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16))
    x = torch.randn(4, 16)
    gradients = []
    for call in (lambda f, x: f(x), xmem.checkpoint):
        block.zero_grad()
        with xmem.autocast("bfloat16", keep_fp32=(kept,)):
            loss = call(block, x).float().square().sum()
        loss.backward()
        gradients.append([p.grad for p in block.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_a_copy_of_a_checkpointed_model_runs_its_own_blocks(backend):
    """Averages of weights and teachers are copies; so are the models that are saved whole."""
    model = conv_blocks().eval()
    xmem.apply_checkpointing(model, "every")
    x = torch.randn(2, 4, 8, 8)
    expected = model(x)
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(copied(x), expected)
        with torch.no_grad():
            for p in copied.parameters():
                p.zero_()
        model.zero_grad(set_to_none=True)
        y = copied(x)
        assert not y.any()
        (y - 1).square().sum().backward()
        assert any(p.grad is not None for p in copied.parameters())
        assert all(p.grad is None for p in model.parameters())


def test_what_is_checkpointed_already_is_refused_and_nothing_changes(backend):
    model = conv_blocks()
    extra = nn.Sequential(nn.Conv2d(4, 4, 1))
    receipt = xmem.apply_checkpointing(model, "every", blocks=[model[1]])
    with pytest.raises(xmem.CompositionError, match="checkpointed or planned already"):
        xmem.apply_checkpointing(model, "every", blocks=[model[0], extra, model[1]])
    assert "forward" not in model[0].__dict__
    assert "forward" not in extra.__dict__
    receipt.undo()
    assert "forward" not in model[1].__dict__


@pytest.mark.parametrize(
    ("wrong", "said"), [("x", "unknown module 'x'"), (None, "is no module"), (3, "is no module")]
)
def test_a_block_that_is_no_module_is_named_before_anything_changes(backend, wrong, said):
    model = conv_blocks()
    with pytest.raises(xmem.UsageError, match=said):
        xmem.apply_checkpointing(model, "every", blocks=[model[0], wrong])
    assert "forward" not in model[0].__dict__


def test_an_observer_that_raises_leaves_nothing_wrapped(backend):
    from xmem import hookspecs

    seen = []

    class Raising:
        @hookspecs.hookimpl
        def xmem_applied(self, receipt):
            if receipt.names == ("0", "1", "2") and seen:
                raise OSError("mine")

    stop = xmem.observe(Raising(), name="raising")
    seen.append(1)
    model = conv_blocks()
    try:
        with pytest.raises(OSError, match="mine"):
            xmem.apply_checkpointing(model, "every")
    finally:
        stop()
    assert not any("forward" in block.__dict__ for block in model)


def test_recomputation_sees_the_autocast_of_the_first_pass(backend):
    layer = nn.Linear(16, 16)
    seen = []

    def function(x):
        seen.append(torch.is_autocast_enabled("cpu"))
        return layer(x).float().square().sum()

    with xmem.autocast("bfloat16"):
        loss = xmem.checkpoint(function, torch.randn(4, 16, requires_grad=True))
    loss.backward()
    assert seen == [True, True]


@pytest.mark.parametrize("place", ["list", "dict", "attribute"])
def test_a_tensor_that_a_region_keeps_aside_carries_its_gradient(backend, place):
    """On Jittor it cannot, and is refused or warned of."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.cache, self.named, self.last = nn.Linear(4, 4), [], {}, None

        def forward(self, x):
            hidden = self.layer(x)
            self.last = hidden.tanh()
            self.cache.append(self.last)
            self.named["last"] = self.last
            return hidden * 2

    torch.manual_seed(2)
    x, block = torch.randn(2, 4, requires_grad=True), Block()
    found = []
    for call in (lambda f, x: f(x), xmem.checkpoint):
        y = call(block, x)
        aside = {"list": block.cache[-1], "dict": block.named["last"], "attribute": block.last}
        loss = y.sum() + aside[place].square().sum()
        found.append(torch.autograd.grad(loss, [x, *block.layer.parameters()]))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def named(name, seen):
    """A replacement that notes its name when the module runs."""

    def wrap(forward):
        def call(*args):
            seen.append(name)
            return forward(*args)

        return call

    return wrap


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_replaced_forwards_are_given_back_in_any_order(backend, order, own):
    layer, seen = nn.Linear(2, 2), []
    if own:
        layer.forward = mine = named("own", seen)(layer.forward)
    replace = backend.checkpoint.replace_forward
    undos = [replace(layer, named(name, seen)) for name in range(3)]
    left = [*(["own"] if own else []), 0, 1, 2]
    for which in order:
        undos[which]()
        undos[which]()
        left.remove(which)
        seen.clear()
        layer(torch.ones(2))
        assert seen == left[::-1]
    assert layer.__dict__.get("forward") is (mine if own else None)
    assert not any("xmem" in name for name in layer.__dict__)
    undos = [replace(layer, named(name, seen)) for name in range(2)]  # and again
    undos[0]()
    undos.append(replace(layer, named(2, seen)))
    seen.clear()
    layer(torch.ones(2))
    assert seen == [2, 1, *(["own"] if own else [])]


@pytest.mark.parametrize("first", ["ours", "theirs"])
@pytest.mark.parametrize("above", [False, True])
def test_a_forward_that_somebody_else_has_set_since_stays_and_it_warns(backend, first, above):
    layer, seen = nn.Linear(2, 2), []
    replace = backend.checkpoint.replace_forward
    undo = replace(layer, named("ours", seen))
    before = layer.forward
    layer.forward = theirs = named("theirs", seen)(before)
    undo_above = replace(layer, named("above", seen)) if above else lambda: None
    if first == "theirs":
        undo_above()
        layer.forward = before
        undo()
        assert "forward" not in layer.__dict__
        return
    with pytest.warns(xmem.XmemWarning, match="forward of Linear has been set by something else"):
        undo()
    layer(torch.ones(2))
    assert seen == [*(["above"] if above else []), "theirs", "ours"]
    undo_above()
    assert layer.forward is theirs
    assert not any("xmem" in name for name in layer.__dict__)


@pytest.mark.parametrize("which", ["applied inside", "undone inside"])
@pytest.mark.parametrize("copied", [False, True])
def test_checkpointing_and_a_kept_module_begin_and_end_in_any_order(backend, which, copied):
    model = conv_blocks()
    calls = []
    model[0].register_forward_pre_hook(lambda *_: None)
    x = torch.randn(2, 4, 8, 8)

    def recomputed():
        calls.clear()
        hook = model[0][0].register_forward_pre_hook(lambda *_: calls.append(1))
        model(x).sum().backward()
        hook.remove()
        return len(calls) == 2

    receipt = None
    if which == "undone inside":
        receipt = xmem.apply_checkpointing(model, "every")
    with xmem.autocast("bfloat16", keep_fp32=(model[0],)):
        if receipt is None:
            receipt = xmem.apply_checkpointing(model, "every")
        else:
            receipt.undo()
        assert model[0](x).dtype == torch.float32
    assert recomputed() == (which == "applied inside")
    if copied and which == "applied inside":
        twin = copy.deepcopy(model)
        assert torch.equal(twin.eval()(x), model.eval()(x))
        model.train()
        undo = backend.checkpoint.replace_forward(twin[0], lambda forward: lambda x: x)
        assert twin[0](x) is x
        undo()
        assert twin[0].forward.forward.__self__ is twin[0]
    receipt.undo()
    assert not recomputed()
    assert not any(
        "forward" in name for m in model.modules() for name in vars(m) if "hook" not in name
    )


def test_a_module_that_is_wrapped_is_freed(backend):
    model = conv_blocks()
    xmem.apply_checkpointing(model, "every")
    gone = weakref.ref(model[0])
    del model
    gc.collect()
    assert gone() is None
