"""Steps that are run aside leave nothing behind on whatever takes part in them."""

import functools

import pytest
import torch
from planned import FOUR, KEPT, WIDTH, Chained, Line, Mlp, batch, equal, four, mean_square
from torch import nn
from torch.utils.checkpoint import checkpoint
from xmem_torch.tensors import bytes_of, size_bytes

import xmem


class Criterion(nn.Module):
    def __init__(self):
        super().__init__()
        self.line, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(6)
        self.drawn = torch.Generator().manual_seed(3)

    def forward(self, y):
        return self.norm(self.line(y)).square().mean() + torch.rand(1, generator=self.drawn).sum()


def hidden(model, x, criterion):
    """Hide the criterion from the graph of the loss."""
    return checkpoint(criterion, model(x), use_reentrant=True)


def closed(criterion, how):
    if how == "closure":
        return lambda m, b: criterion(m(b))
    if how == "hidden":
        return lambda m, b: hidden(m, b, criterion)
    return functools.partial(lambda m, b, criterion: criterion(m(b)), criterion=criterion)


@pytest.mark.parametrize("ops", [None, FOUR])
@pytest.mark.parametrize("how", ["closure", "partial", "hidden"])
@pytest.mark.parametrize("had", [True, False])
def test_a_criterion_is_left_as_it_was(backend, ops, how, had):
    torch.manual_seed(1)
    criterion, model = Criterion(), Chained(backend.plans, four(), ops)
    loss_fn = closed(criterion, how)
    gradients = [torch.ones_like(p) if had else None for p in criterion.parameters()]
    for parameter, gradient in zip(criterion.parameters(), gradients, strict=True):
        parameter.grad = gradient
    state = {n: t.clone() for n, t in criterion.state_dict().items()}
    numbers = criterion.drawn.get_state()
    steps = [backend.plans.step(model, batch(), loss_fn) for _ in range(2)]
    backend.plans.forward_aside(model, batch(), loss_fn)
    assert all(
        p.grad is gradient for p, gradient in zip(criterion.parameters(), gradients, strict=True)
    )
    assert all(torch.equal(t, state[n]) for n, t in criterion.state_dict().items())
    assert torch.equal(criterion.drawn.get_state(), numbers)
    assert not had or all((p.grad == 1).all() for p in criterion.parameters())
    assert len({step.gradient_bytes for step in steps}) == 1
    expected = [*model.parameters(), *(criterion.parameters() if how != "hidden" else ())]
    assert steps[0].gradient_bytes == sum(p.nbytes for p in expected)


@pytest.mark.parametrize("ops", [None, FOUR, KEPT])
@pytest.mark.parametrize("had", [True, False])
def test_a_batch_and_a_bare_parameter_are_left_as_they_were(backend, ops, had):
    x, bare = batch().requires_grad_(), nn.Parameter(torch.ones(3))
    for tensor in (x, bare):
        tensor.grad = torch.ones_like(tensor) if had else None
    before = [tensor.grad for tensor in (x, bare)]
    model = Chained(backend.plans, four(), ops)
    step = backend.plans.step(model, x, lambda m, b: mean_square(m, b) + bare.sum())
    assert [tensor.grad is was for tensor, was in zip((x, bare), before, strict=True)] == [True] * 2
    assert not had or bool((x.grad == 1).all())
    # That of the batch is none of a parameter.
    assert step.gradient_bytes == sum(p.nbytes for p in (*model.parameters(), bare))


@pytest.mark.parametrize("ops", [None, FOUR])
def test_an_optimizer_in_backward_does_not_run_in_a_step_aside(backend, ops):
    torch.manual_seed(1)
    model, criterion = Chained(backend.plans, four(), ops), Criterion()
    ran = []

    def update(parameter):
        ran.append(parameter)
        with torch.no_grad():
            parameter.sub_(parameter.grad)
        parameter.grad = None

    everything = [*model.parameters(), *criterion.parameters()]
    handles = [p.register_post_accumulate_grad_hook(update) for p in everything]
    before = [p.detach().clone() for p in everything]
    loss_fn = closed(criterion, "closure")
    backend.plans.step(model, batch(), loss_fn)
    assert ran == []
    assert equal(before, [p.detach() for p in everything])
    loss_fn(model, batch()).backward()
    assert len(ran) == len(everything)
    for handle in handles:  # they still belong to the hooks that were put back
        handle.remove()
    loss_fn(model, batch()).backward()
    assert len(ran) == len(everything)


def test_hooks_are_put_back_if_the_step_fails(backend):
    model, ran = Chained(backend.plans, [Line()], None), []
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(ran.append)

    def fails(m, b):
        raise ArithmeticError

    with pytest.raises(ArithmeticError):
        backend.plans.step(model, batch(), fails)
    mean_square(model, batch()).backward()
    assert len(ran) == 2


def test_masters_get_their_gradients_beside_a_hook_that_does_not_run(backend):
    torch.manual_seed(1)
    model, ran = Chained(backend.plans, [Line(), Mlp()], None), []
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    xmem.cast_model(model, "bfloat16", optimizer=optimizer)
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(ran.append)
    step = backend.plans.step(model, batch().bfloat16(), mean_square, gradients=True)
    assert ran == []
    assert len(step.gradients) == len(list(model.parameters()))


SPARSE = {
    "coo": lambda t: t.to_sparse(),
    "coo, not coalesced": lambda t: torch.sparse_coo_tensor([[0, 0], [1, 1]], [1.0, 2.0], (8, 8)),
    "csr": lambda t: t.to_sparse_csr(),
    "csc": lambda t: t.to_sparse_csc(),
    "bsr": lambda t: t.to_sparse_bsr((2, 2)),
    "bsc": lambda t: t.to_sparse_bsc((2, 2)),
}


@pytest.mark.parametrize("kind", SPARSE)
@pytest.mark.filterwarnings("ignore:Sparse")
def test_indices_and_values_of_a_sparse_tensor_are_counted(backend, kind):
    dense = torch.eye(8)
    dense[0, 1] = 2
    before_bytes = backend.measure.counters().allocated_bytes
    tensor = SPARSE[kind](dense)
    grown = backend.measure.counters().allocated_bytes - before_bytes
    found = bytes_of([tensor, tensor])
    # Storages of indices may be larger than what is in them.
    assert 0 < size_bytes(tensor) <= found <= grown
    assert found == backend.plans.bytes_of([tensor])
    assert bytes_of([tensor, dense]) == found + dense.nbytes


def test_a_tensor_of_another_layout_is_counted():
    assert size_bytes(torch.ones(4).to_mkldnn()) == bytes_of([torch.ones(4).to_mkldnn()]) == 16


def test_a_sparse_gradient_is_counted(backend):
    torch.manual_seed(1)
    table = nn.Embedding(50, WIDTH, sparse=True)
    chain = Chained(backend.plans, [table, Mlp(), Line()], "G0.0 G1.0 G2.0 L B2 B1 B0", traced=True)
    ids = torch.randint(0, 50, (3, 6))
    step = backend.plans.step(chain, ids, mean_square, gradients=True)
    mean_square(chain, ids).backward()
    gradient = table.weight.grad
    sparse = gradient._indices().nbytes + gradient._values().nbytes
    others = [p for p in chain.parameters() if p is not table.weight]
    assert step.gradient_bytes == sparse + sum(p.nbytes for p in others)
    assert (step.gradients["stages.0.weight"] == gradient.to_dense().numpy()).all()


def test_a_model_with_sparse_gradients_and_one_with_a_sparse_batch_are_planned():
    xmem.use("torch", device="cpu")
    torch.manual_seed(1)

    class Dense(nn.Sequential):
        def forward(self, x):
            return super().forward(x.to_dense())

    table = nn.Sequential(nn.Embedding(50, WIDTH, sparse=True), Mlp(), Mlp(), Mlp())
    for model, x in ((table, torch.randint(0, 50, (8, 10))), (Dense(Mlp(), Mlp()), batch())):
        x = x.to_sparse() if isinstance(model, Dense) else x
        profile = xmem.profile(model, x, mean_square, repeats=1)
        assert profile.batch_bytes == bytes_of([x])
