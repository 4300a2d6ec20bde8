"""Compressed activations with all else: recomputation, plans, compilers, transforms, threads."""

import functools

import pytest
import torch
from on_torch.compressed import cnn, error, mlp, saved_by, step
from on_torch.gpt import GPT, peak_bytes
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint as torch_checkpoint
from xmem_torch.passes import top_hooks

import xmem
from xmem.errors import CompositionError, UsageError


def test_the_inputs_of_checkpointed_blocks_are_compressed(backend):
    """Hooks around regions see what regions keep: 12 blocks, each its input."""
    model = GPT(layers=12, dropout=0.0)
    ids = torch.randint(0, 1000, (8, 128))
    xmem.apply_checkpointing(model, "every")
    plain = peak_bytes(model, ids)
    with xmem.compress_activations(8) as block:
        compressed = peak_bytes(model, ids)
    print(f"checkpointed {plain} bytes, its inputs compressed {compressed} bytes")
    inputs = 12 * 8 * 128 * 128 * 4
    assert block.raw_bytes >= 2 * inputs  # of two steps
    assert compressed < plain - 0.6 * inputs


@pytest.mark.parametrize("how", ["xmem", "torch", "reentrant", "layout"])
def test_gradients_of_checkpointed_models_are_off_by_the_rounding(backend, how):
    model, x = mlp()
    model = nn.Sequential(*(model[i : i + 2] for i in range(0, len(model), 2)))
    loss, exact, _ = step(model, x)

    class Regions(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, x):
            for part in self.inner:
                if how == "xmem":
                    x = xmem.checkpoint(part, x)
                else:
                    x = torch_checkpoint(part, x, use_reentrant=how == "reentrant")
            return x

    if how == "layout":
        xmem.apply_checkpointing(model, [["0", "1"], ["2", "3"]])
    else:
        model = Regions(model)
    x.requires_grad_(how == "reentrant")
    loss_again, gradients, block = step(model, x, bits=8)
    assert loss_again == loss
    together, _ = error(gradients, exact)
    assert 0 < together < 0.01
    assert block.raw_bytes >= 256 * 256 * 4


@pytest.mark.parametrize("how", ["xmem", "torch"])
def test_a_block_inside_a_checkpointed_function_is_refused(backend, how):
    """Its hooks would take the place of recomputation's, and switch that off in silence."""
    model, x = mlp()

    def function(x):
        with xmem.compress_activations(8):
            return model(x)

    region = xmem.checkpoint
    if how == "torch":
        region = functools.partial(torch_checkpoint, use_reentrant=False)
    with pytest.raises(CompositionError, match="inside a checkpointed function"):
        region(function, x)
    assert top_hooks() is None


def test_a_planned_model_is_refused_before_it_runs(backend):
    model = GPT(layers=4, dropout=0.0)
    ids = torch.randint(0, 1000, (4, 64))

    def loss_fn(model, ids):
        return functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())

    plan = xmem.plan(model, ids, loss_fn, budget="60%", verify=False)
    receipt = plan.apply(model)
    with pytest.raises(CompositionError, match="planned"), xmem.compress_activations():
        model(ids)
    with pytest.raises(CompositionError, match="planned"), xmem.compress_activations(model=model):
        pytest.fail("it was entered")
    assert top_hooks() is None
    receipt.undo()
    with xmem.compress_activations():
        model(ids)


def test_compiled_modules_and_functions_are_refused(backend):
    model, x = mlp()
    compiled = torch.compile(model, backend="aot_eager")
    with pytest.raises(CompositionError, match=r"torch\.compile"), xmem.compress_activations():
        compiled(x)
    model[0].compile(backend="aot_eager")
    with pytest.raises(CompositionError, match="'0' is compiled"), xmem.compress_activations():
        model(x)
    function = torch.compile(lambda a: (a.sin() * a.exp()).sum(), backend="aot_eager")
    with pytest.raises(CompositionError, match=r"torch\.compile"), xmem.compress_activations():
        function(torch.randn(200, 200, requires_grad=True))
    torch._dynamo.reset()


def test_a_module_compiled_in_place_is_refused(backend):
    model, x = mlp()
    model.compile(backend="aot_eager")
    with pytest.raises(CompositionError, match="is compiled"), xmem.compress_activations():
        model(x)
    torch._dynamo.reset()


def test_a_block_inside_a_transform_is_refused(backend):
    def function(x):
        with xmem.compress_activations(8):
            return (x * x).sum()

    with pytest.raises(CompositionError, match=r"torch\.func"):
        torch.func.grad(function)(torch.randn(10))


def test_a_model_that_is_no_module_is_refused_by_name(backend):
    with pytest.raises(UsageError, match="'net'"), xmem.compress_activations(model="net"):
        pytest.fail("it was entered")


@pytest.mark.parametrize("call", ["module", "functional", "torch"])
def test_the_noise_of_rrelu_is_kept(backend, call):
    """It is saved before it is drawn (pytorch#193671); a copy of it is a copy of nothing."""
    x = torch.randn(200, 200)
    layer = nn.RReLU()

    def run(t):
        if call == "module":
            return layer(t)
        if call == "functional":
            return functional.rrelu(t, training=True)
        return torch.rrelu(t, training=True)

    gradients = []
    for compressed in (False, True):
        leaf = x.clone().requires_grad_(True)
        torch.manual_seed(2)
        if compressed:
            with xmem.compress_activations() as block:
                result = run(leaf * 1) + leaf.sin() * leaf.cos()
        else:
            result = run(leaf * 1) + leaf.sin() * leaf.cos()
        result.sum().backward()
        gradients.append(leaf.grad)
    assert "RReLU" in block.kept_bytes
    assert (gradients[0] - gradients[1]).abs().max() < 0.05


def test_blocks_nest_and_the_innermost_counts(backend):
    model, x = mlp(layers=2)
    with xmem.compress_activations(8, model=model) as outer:
        hidden = model[:2](x)
        with xmem.compress_activations(4, model=model) as inner:
            model[2:](hidden)
    assert outer.layers == {"1": 8}
    assert inner.layers == {"2": 4, "3": 4}


def test_backward_may_run_twice_and_inside_the_block(backend):
    model, x = mlp()
    model.zero_grad()
    with xmem.compress_activations(8):
        loss = model(x).square().mean()
        first = torch.autograd.grad(loss, model[0].weight, retain_graph=True)[0]
        second = torch.autograd.grad(loss, model[0].weight, retain_graph=True)[0]
    third = torch.autograd.grad(loss, model[0].weight)[0]
    assert torch.equal(first, second)
    assert torch.equal(first, third)
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_gradients_of_gradients_are_off_by_the_rounding(backend):
    def penalty(bits):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(128, 256), nn.Tanh(), nn.Linear(256, 256), nn.Tanh())
        x = torch.randn(256, 128, requires_grad=True)
        if bits:
            with xmem.compress_activations(bits):
                y = model(x).square().sum()
                [gradient] = torch.autograd.grad(y, x, create_graph=True)
        else:
            y = model(x).square().sum()
            [gradient] = torch.autograd.grad(y, x, create_graph=True)
        gradient.square().sum().backward()
        return [p.grad for p in model.parameters()]

    exact, found = penalty(None), penalty(8)
    together, _ = error(found, exact)
    assert 0 < together < 0.05


def test_a_custom_function_may_ask_for_what_it_saved_twice(backend):
    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, scale):
            y = x * scale
            ctx.save_for_backward(x, y)
            return x * y

        @staticmethod
        def backward(ctx, gradient):
            x, y = ctx.saved_tensors
            again, _ = ctx.saved_tensors
            assert torch.equal(x, again)
            return gradient * 2 * y, None

    leaf = torch.randn(200, 200, requires_grad=True)
    block, result = saved_by(lambda: Square.apply(leaf * 1, 3.0))
    assert block.raw_bytes == 2 * leaf.nbytes
    result.sum().backward()
    assert (leaf.grad - 6 * leaf).norm() < 0.02 * leaf.grad.norm()


def test_accumulated_gradients_are_off_by_the_rounding(backend):
    model, x = cnn()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    exact = []
    for bits in (None, 8):
        model.zero_grad(set_to_none=True)
        torch.manual_seed(1)
        with xmem.accumulate(steps=2):
            for part in x.chunk(2):
                if bits:
                    with xmem.compress_activations(bits):
                        loss = model(part).square().mean()
                else:
                    loss = model(part).square().mean()
                xmem.backward(loss, optimizer)
        exact.append([p.grad.clone() for p in model.parameters()])
    assert 0 < error(exact[1], exact[0])[0] < 0.01


def test_without_a_compiler_gradients_are_bit_equal_to_those_with_one(backend, monkeypatch):
    from xmem_torch import codec

    from xmem.compressing import Compression

    model, x = cnn()

    def gradients():
        model.zero_grad(set_to_none=True)
        torch.manual_seed(1)
        with Compression(xmem.active(), 8, 0, (), None, 5):
            loss = model(x).square().mean()
        loss.backward()
        return [p.grad.clone() for p in model.parameters()]

    natively = gradients()
    monkeypatch.setattr(codec, "_compiled", lambda: False)
    for a, b in zip(gradients(), natively, strict=True):
        assert torch.equal(a, b)


def test_sparse_tensors_and_subclasses_are_kept_and_named(backend):
    class Tagged(torch.Tensor):
        pass

    dense = torch.randn(300, 300, requires_grad=True)
    sparse = torch.eye(300).to_sparse()
    tagged = torch.randn(300, 300).as_subclass(Tagged)
    block, out = saved_by(lambda: torch.sparse.mm(sparse, dense.exp()) + (dense * tagged))
    assert {"sparse_coo", "Tagged"} <= set(block.kept_bytes)
    out.sum().backward()
    assert torch.isfinite(dense.grad).all()


def test_modules_of_another_thread_do_not_name_layers(backend):
    import threading

    model, x = mlp(layers=2)
    other, _ = mlp(layers=2)

    class Calls(nn.Module):
        def forward(self, x):
            thread = threading.Thread(target=other, args=(x.detach(),))
            thread.start()
            thread.join()
            return x.sin()

    with xmem.compress_activations() as block:
        nn.Sequential(model[:2], Calls())(x)
    assert list(block.layers) == ["0.1"]
