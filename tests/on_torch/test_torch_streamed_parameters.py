"""Parameters that are away until their layer runs, on PyTorch: forward, backward, steps."""

import gc

import pytest
import torch
from streamed import (
    GPT,
    WIDTH,
    Layer,
    away,
    bytes_of,
    check_gradients,
    depot_of,  # noqa: F401
    grads,
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
from xmem import CompositionError, UsageError
from xmem.offload.streaming import offload_parameters

pytestmark = pytest.mark.usefixtures("backend")


def test_inference_holds_one_block_and_gives_the_same_outputs(backend):
    plain, model = pair(layers=6, width=128)
    ids = tokens()
    total, block = bytes_of(model), bytes_of(model.layers[0])
    before = backend.measure.counters().allocated_bytes
    receipt = away(model)
    left = before - backend.measure.counters().allocated_bytes
    print(total, block, left)
    assert left == total
    assert held_bytes(model) == 0
    with torch.no_grad():
        for _ in range(2):
            peak, kinds = measured(plain, lambda: plain(ids))
            ours, our_kinds = measured(model, lambda: model(ids))
            # What the model itself holds, its positions, is there as long as it runs.
            print(peak, ours, kinds["parameter"], our_kinds["parameter"])
            assert our_kinds["parameter"] - kinds["parameter"] in (
                0,
                block + model.position.nbytes,
            )
            assert ours <= peak + block + model.position.nbytes
            assert torch.equal(model(ids), plain(ids))
    assert held_bytes(model) == 0
    assert receipt.applied_to == 10
    assert receipt.names[:3] == ("GPT", "token", "layers.0")
    assert receipt.expected_saving_bytes == total - block
    assert receipt.technique == "offload_parameters"


def test_inference_writes_nothing_and_reads_each_layer_once(depot_of):  # noqa: F811
    model = GPT()
    receipt = away(model)
    depot = depot_of(model)
    wrote, total = depot.stats.written_bytes, bytes_of(model)
    assert (wrote, depot.stats.read_bytes) == (total, 0)
    with torch.no_grad():
        for passes in (1, 2, 3):
            model(tokens())
            assert (depot.stats.written_bytes, depot.stats.read_bytes) == (wrote, passes * total)
    receipt.undo()
    assert depot.stats.stored_bytes == 0


@pytest.mark.parametrize("blocks", [None, [], ["layers.0", "layers.2", "token"]])
@pytest.mark.parametrize("prefetch", [0, "64KiB", "1GiB"])
def test_gradients_are_equal_whatever_the_blocks_and_the_prefetch(blocks, prefetch):
    plain, model = pair()
    away(model, blocks=blocks, prefetch=prefetch)
    for _ in range(3):
        check_gradients(plain, model, lambda m: loss_of(m, tokens()))
        plain.zero_grad()
        model.zero_grad()


def test_prefetch_is_bounded_by_bytes(backend):
    plain, model = pair(layers=6, width=128)
    ids, block = tokens(), bytes_of(Layer(128))
    for prefetch, most in ((0, 0), (block // 2, block // 2), (2 * block, 2 * block)):
        receipt = away(model, prefetch=prefetch)
        with torch.no_grad():
            rest = backend.measure.counters().allocated_bytes
            model(ids)
            model(ids)
            assert backend.measure.counters().allocated_bytes == rest
            peak, _ = measured(plain, lambda: plain(ids))
            ours, _ = measured(model, lambda: model(ids))
        print(prefetch, peak, ours, block)
        assert ours <= peak + block + model.position.nbytes + most
        if prefetch == 2 * block:
            assert ours > peak + 2 * block
        receipt.undo()


def test_a_plain_step_is_refused_before_anything_changes():
    plain, model = pair()
    optimizer = torch.optim.SGD([*model.parameters(), nn.Parameter(torch.ones(3))], 0.1)
    other = optimizer.param_groups[0]["params"][-1]
    receipt = away(model)
    loss_of(model, tokens()).backward()
    other.grad = torch.ones(3)
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    with pytest.raises(CompositionError, match=r"xmem\.offload_optimizer\(optimizer\), or xmem"):
        optimizer.step()
    with pytest.raises(CompositionError, match="parameters that are away"):
        optimizer.step(lambda: loss_of(model, tokens()))
    assert torch.equal(other, torch.ones(3))
    receipt.undo()
    assert same(list(model.parameters()), list(plain.parameters()))
    optimizer.step()
    loss_of(plain, tokens()).backward()
    assert torch.equal(nn.utils.clip_grad_norm_(plain.parameters(), 0.1), norm)
    torch.optim.SGD(plain.parameters(), 0.1).step()
    assert same(list(model.parameters()), list(plain.parameters()))


def test_the_watch_on_steps_ends_with_the_last_model():
    from xmem_torch import streamed_parameters

    receipts = [away(GPT(1)), away(GPT(1))]
    gc.collect()
    assert len(streamed_parameters._hooks) == 1
    receipts[0].undo()
    receipts[1].undo()
    assert streamed_parameters._hooks == []


class Odd(nn.Module):
    """A block that hands on tuples, dictionaries, attributes and views."""

    def __init__(self, how):
        super().__init__()
        self.how, self.first, self.second = how, nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        y, z = self.first(x).tanh() * self.scale, self.second(x)
        if self.how == "tuple":
            return y, (z.sum(), None)
        if self.how == "dict":
            return {"y": y, "rest": [z]}
        if self.how == "attribute":
            self.aux = z.square().mean()
            return y
        if self.how == "view":
            return self.second(y).view(-1, 2, WIDTH // 2).transpose(0, 1)
        return y + z


class Chain(nn.Module):
    def __init__(self, how="plain", count=3, calls=1):
        super().__init__()
        self.blocks = nn.ModuleList(Odd(how) for _ in range(count))
        self.how, self.calls = how, calls

    def forward(self, x):
        extra = 0
        for block in self.blocks:
            for _ in range(self.calls):
                y = block(x)
                if self.how == "tuple":
                    y, extra = y[0], extra + y[1][0]
                elif self.how == "dict":
                    y, extra = y["rest"][0], extra + y["y"].sum()
                elif self.how == "attribute":
                    extra = extra + block.aux
                elif self.how == "view":
                    y += 1
                    y = y.transpose(0, 1).reshape(-1, WIDTH)
                elif self.how == "recomputed":
                    y = checkpoint(block, x, use_reentrant=False)
                elif self.how == "reentrant":
                    y = checkpoint(block, x, use_reentrant=True)
                elif self.how == "unused":
                    y = block.first(x)
                x = y
        return x.square().mean() + extra


HOWS = [
    "plain", "tuple", "dict", "attribute", "view", "recomputed", "reentrant", "unused",
]  # fmt: skip


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("calls", [1, 2])
def test_gradients_are_equal_whatever_blocks_hand_on(how, calls):
    plain, model = pair(Chain, how=how, calls=calls)
    away(model)
    x = torch.randn(6, WIDTH)
    check_gradients(plain, model, lambda m: m(x.clone().requires_grad_(how == "reentrant")))


@pytest.mark.parametrize("frozen", ["inputs", "some", "first half", "weights"])
def test_gradients_are_equal_with_frozen_parameters(frozen):
    plain, model = pair()
    for m in (plain, model):
        for index, (name, p) in enumerate(m.named_parameters()):
            if frozen == "some":
                p.requires_grad_(index % 2 == 0)
            elif frozen == "first half":
                p.requires_grad_(index > 25)
            elif frozen == "weights":
                p.requires_grad_(name.startswith("token"))
    away(model)
    check_gradients(plain, model, lambda m: loss_of(m, tokens()))


@pytest.mark.parametrize("first", ["checkpointing", "offload"])
@pytest.mark.parametrize("layout", ["every", "sqrt"])
def test_recomputation_brings_parameters_whichever_is_applied_first(first, layout, depot_of):  # noqa: F811
    plain, model = pair(layers=4)
    receipts = []
    if first == "offload":
        receipts.append(away(model))
    receipts.append(xmem.apply_checkpointing(model, layout))
    if first == "checkpointing":
        receipts.append(away(model))
    held, depot = [], depot_of(model)
    last = model.layers[1].contract  # of a segment, where the layout makes two
    handle = last.register_forward_hook(lambda *_: held.append(held_bytes(model)))
    model(tokens())
    handle.remove()
    assert held == [model.position.nbytes + bytes_of(model.layers[1])]
    assert depot.stats.read_bytes == bytes_of(model)  # each layer once
    check_gradients(plain, model, lambda m: loss_of(m, tokens()))
    for receipt in receipts:  # in the order that they came, not the opposite
        receipt.undo()
    plain.zero_grad()
    model.zero_grad()
    assert "forward" not in vars(model.layers[0])
    assert type(model.layers[0]) is Layer
    loss_of(model, tokens()).backward()
    loss_of(plain, tokens()).backward()
    assert same(grads(model), grads(plain))


def test_a_tied_weight_is_read_where_it_is_and_where_it_is_not_held():
    class Reads(GPT):
        def forward(self, ids):
            x = self.token(ids) + self.position[: ids.shape[1]]
            for layer in self.layers:
                x = layer(x)
            return nn.functional.linear(self.norm(x), self.token.weight)

    for make, options in ((GPT, {"tied": True}), (Reads, {})):
        plain, model = pair(make, **options)
        receipt = away(model)
        check_gradients(plain, model, lambda m: loss_of(m, tokens()))
        for m in (plain, model):
            m.zero_grad(set_to_none=True)
            xmem.optimizer_in_backward(m, torch.optim.Adam(m.parameters()))
        for _ in range(3):
            losses = [loss_of(m, tokens()) for m in (plain, model)]
            for loss in losses:
                loss.backward()
            assert losses[0].item() == losses[1].item()
        receipt.undo()
        assert same(list(model.parameters()), list(plain.parameters()))


def test_parameters_that_are_handed_out_are_there_for_the_call_around():
    class Queries(nn.Module):
        def __init__(self):
            super().__init__()
            self.queries = nn.Parameter(torch.randn(4, WIDTH))

        def forward(self):
            return self.queries.expand(4, WIDTH)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.queries, self.layer = Queries(), nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            return (self.layer(x) @ self.queries().t()).sum()

    plain, model = pair(Model)
    away(model)
    check_gradients(plain, model, lambda m: m(torch.ones(3, WIDTH)))
    alone = Queries()
    away(alone)
    assert alone().sum().isfinite()  # there until the next call
    assert held_bytes(alone) == alone.queries.nbytes


def test_an_error_in_forward_or_backward_leaves_nothing_on_the_device():
    plain, model = pair()
    away(model, prefetch="1MiB")
    handle = model.layers[2].expand.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(tokens())
    assert held_bytes(model) == 0
    handle.remove()
    handle = model.layers[1].norm.weight.register_hook(lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        loss_of(model, tokens()).backward()
    handle.remove()
    model.zero_grad()
    check_gradients(plain, model, lambda m: loss_of(m, tokens()))


def test_second_derivatives_are_refused():
    model = GPT(1)
    away(model)
    with pytest.raises(CompositionError, match="create_graph=True"):
        torch.autograd.grad(loss_of(model, tokens()), list(model.parameters()), create_graph=True)


def test_a_graph_that_is_kept_is_run_again():
    plain, model = pair()
    away(model)
    losses = [loss_of(m, tokens()) for m in (plain, model)]
    for loss in losses:
        loss.backward(retain_graph=True)
        loss.backward()
    assert same(grads(model), grads(plain))
    assert held_bytes(model) == 0


def test_host_warns_on_a_cpu_and_works():
    plain, model = pair()
    with pytest.warns(xmem.XmemWarning, match="offload_parameters"):
        receipt = offload_parameters(model, "host")
    check_gradients(plain, model, lambda m: loss_of(m, tokens()))
    receipt.undo()
    assert same(list(model.parameters()), list(plain.parameters()))


def test_twice_is_refused_and_undo_twice_changes_nothing():
    model = GPT(1)
    parameters = list(model.parameters())
    receipt = away(model)
    with pytest.raises(UsageError, match="offloaded already"):
        away(model)
    receipt.undo()
    receipt.undo()
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    assert held_bytes(model) == bytes_of(model)
