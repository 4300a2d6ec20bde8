"""Models cast to half precision on PyTorch, with float32 masters in the optimizer."""

import copy
import gc
import pickle

import pytest
import torch
from torch import nn

import xmem

BF16 = torch.bfloat16

OPTIMIZERS = {
    "sgd with momentum": lambda p: torch.optim.SGD(p, 1e-2, momentum=0.9),
    "fused adamw": lambda p: torch.optim.AdamW(p, 1e-3, fused=True),
    "adamw": lambda p: torch.optim.AdamW(p, 1e-3),
    "adagrad": lambda p: torch.optim.Adagrad(p, 1e-2),
}


def make(kind="fused adamw", width=32):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(width, width), nn.LayerNorm(width), nn.GELU(), nn.Linear(width, 1)
    )
    return model, OPTIMIZERS[kind](model.parameters())


def data(model, batch=64, width=32):
    torch.manual_seed(1)
    return torch.randn(batch, width).to(model[0].weight.dtype)


def backward(model, optimizer):
    loss = (model(data(model)).float() - 1).square().mean()
    xmem.backward(loss, optimizer)
    return loss.detach()


def train(model, optimizer, steps):
    losses = []
    for _ in range(steps):
        losses.append(float(backward(model, optimizer)))
        xmem.optimizer_step(optimizer)
        xmem.zero_grad(optimizer)
    return losses


def masters_of(optimizer):
    return [p for group in optimizer.param_groups for p in group["params"]]


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_training_with_masters_follows_float32(backend, kind):
    plain, cast = make(kind), make(kind)
    xmem.cast_model(cast[0], "bfloat16", optimizer=cast[1])
    expected, found = train(*plain, 40), train(*cast, 40)
    assert expected[-1] < 0.5 * expected[0]
    assert all(abs(a - b) <= 0.03 * expected[0] for a, b in zip(expected, found, strict=True))


def test_small_updates_are_lost_without_masters_and_add_up_with_them(backend):
    """At this rate an update is under half of the last place of every bfloat16 weight."""
    moved = {}
    for masters in (False, True):
        model, _ = make()
        for p in model.parameters():
            torch.nn.init.ones_(p)
        optimizer = torch.optim.SGD(model.parameters(), 1e-6)
        xmem.cast_model(model, "bfloat16", optimizer=optimizer if masters else None)
        for _ in range(3000):
            for p in masters_of(optimizer):
                p.grad = torch.ones_like(p)
            optimizer.step()
        moved[masters] = float((1 - model[0].weight.detach().float()).abs().max())
    assert moved[False] == 0
    assert moved[True] == pytest.approx(3e-3, abs=4e-3 / 2)  # one place is 2^-8


def test_the_parameters_are_the_masters_rounded_after_each_step(backend):
    model, optimizer = make()
    xmem.cast_model(model, "bfloat16", optimizer=optimizer)
    for _ in range(3):
        train(model, optimizer, 1)
        masters = masters_of(optimizer)
        assert all(m.dtype == torch.float32 for m in masters)
        for p, m in zip(model.parameters(), masters, strict=True):
            assert p.dtype == BF16
            assert torch.equal(p, m.to(BF16))
            assert not torch.equal(p.float(), m)


def test_the_masters_are_what_the_parameters_were_and_the_state_stays(backend):
    model, optimizer = make()
    train(model, optimizer, 3)
    before = [p.detach().clone() for p in model.parameters()]
    state = copy.deepcopy(optimizer.state_dict())
    parameters = list(model.parameters())
    xmem.cast_model(model, "bfloat16", optimizer=optimizer)
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
    for was, now in zip(before, masters_of(optimizer), strict=True):
        assert torch.equal(was, now)
    after = optimizer.state_dict()
    assert after["param_groups"] == state["param_groups"]
    for key, entry in state["state"].items():
        assert all(torch.equal(entry[name], after["state"][key][name]) for name in entry)


def test_undo_puts_everything_back_with_what_was_learnt(backend):
    model, optimizer = make()
    identities = list(model.parameters())
    receipt = xmem.cast_model(model, "bfloat16", optimizer=optimizer)
    train(model, optimizer, 5)
    backward(model, optimizer)
    masters = [m.detach().clone() for m in masters_of(optimizer)]
    gradients = [m.grad.clone() for m in masters_of(optimizer)]
    receipt.undo()
    receipt.undo()
    for p, before, m, g in zip(model.parameters(), identities, masters, gradients, strict=True):
        assert p is before
        assert p.dtype == torch.float32
        assert torch.equal(p, m)
        assert torch.equal(p.grad, g)
        assert not p._post_accumulate_grad_hooks
    assert all(a is b for a, b in zip(masters_of(optimizer), identities, strict=True))
    assert set(map(id, optimizer.state)) == set(map(id, identities))
    assert not model._forward_pre_hooks
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks
    xmem.clip_grad_norm_(model.parameters(), 1.0)
    xmem.zero_grad(optimizer)
    train(model, optimizer, 2)
    xmem.cast_model(model, "bfloat16", optimizer=optimizer)  # and again
    train(model, optimizer, 2)


def test_without_an_optimizer_undo_gives_float32(backend):
    model, _ = make()
    before = [p.detach().clone() for p in model.parameters()]
    receipt = xmem.cast_model(model, "bfloat16")
    assert {p.dtype for p in model.parameters()} == {BF16}
    receipt.undo()
    for p, was in zip(model.parameters(), before, strict=True):
        assert torch.equal(p, was.to(BF16).float())


def test_gradients_reach_the_masters_in_float32_and_add_up_there(backend):
    """A thousand and one, which bfloat16 cannot hold: it would stay a thousand."""
    model, optimizer = make()
    xmem.cast_model(model, "bfloat16", optimizer=optimizer)
    weight, master = model[3].bias, masters_of(optimizer)[-1]
    (weight * 1000).sum().backward()
    weight.sum().backward()
    assert weight.grad is None
    assert master.grad.dtype == torch.float32
    assert master.grad.item() == 1001.0
    found = backend.training.gradients(model, optimizer)
    assert found["3.bias"].item() == 1001.0
    xmem.zero_grad(optimizer)
    assert master.grad is None


@pytest.mark.parametrize("how", ["clip", "scaler", "accumulate", "checkpoint"])
def test_the_rest_of_the_loop_works_on_masters(backend, how):
    """Each against the same training in float32."""
    found = []
    for cast in (False, True):
        model, optimizer = make("sgd with momentum")
        if how == "checkpoint":
            xmem.apply_checkpointing(model, "every", blocks=[model[0], model[3]])
        if cast:
            xmem.cast_model(model, "bfloat16", optimizer=optimizer)
        scaler = xmem.GradScaler(1024.0, enabled=how == "scaler")
        for step in range(10):
            if how == "accumulate":
                with xmem.accumulate(4, optimizer):
                    for part in data(model).chunk(4):
                        loss = (model(part).float() - 1).square().mean()
                        xmem.backward(loss, optimizer)
                continue
            loss = (model(data(model)).float() - 1).square().mean()
            overflow = how == "scaler" and step in (0, 4)
            xmem.backward(scaler.scale(loss) * (float("inf") if overflow else 1.0), optimizer)
            if how == "clip":
                norm = xmem.clip_grad_norm_(optimizer, 0.1)
                assert float(norm) > 0.1
                clipped = torch.cat([p.grad.flatten() for p in masters_of(optimizer)]).norm()
                assert float(clipped) <= 0.1001
            before = [p.detach().clone() for p in masters_of(optimizer)]
            scaler.step(optimizer)
            scaler.update()
            same = all(map(torch.equal, before, masters_of(optimizer)))
            assert same == overflow
            xmem.zero_grad(optimizer)
        found.append(torch.cat([p.detach().flatten() for p in masters_of(optimizer)]))
    start = torch.cat([p.detach().flatten() for p in make()[0].parameters()])
    assert (found[1] - found[0]).norm() <= 0.05 * (found[0] - start).norm()


def test_an_optimizers_saved_state_is_taken_up_with_masters(backend):
    model, optimizer = make()
    xmem.cast_model(model, "bfloat16", optimizer=optimizer)
    train(model, optimizer, 3)
    weights, state = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    assert {w.dtype for w in weights.values()} == {BF16}
    other, its_optimizer = make()
    xmem.cast_model(other, "bfloat16", optimizer=its_optimizer)
    other.load_state_dict(weights)
    its_optimizer.load_state_dict(state)
    entries = its_optimizer.state_dict()["state"]
    assert {e["exp_avg"].dtype for e in entries.values()} == {torch.float32}
    train(other, its_optimizer, 1)
    train(model, optimizer, 1)
    for a, b in zip(other.parameters(), model.parameters(), strict=True):
        assert torch.allclose(a.float(), b.float(), rtol=0.02, atol=2e-3)


def test_who_changes_a_parameter_in_place_changes_its_master(backend):
    model, optimizer = make("sgd with momentum")
    xmem.cast_model(model, "bfloat16", optimizer=optimizer)
    train(model, optimizer, 1)
    with torch.no_grad():
        model[0].weight.fill_(3)
    for p in masters_of(optimizer):
        p.grad = torch.zeros_like(p)
        optimizer.state[p].clear()
    xmem.optimizer_step(optimizer)
    assert (model[0].weight == 3).all()
    assert (masters_of(optimizer)[0] == 3).all()


def test_clipping_parameters_that_have_masters_is_refused(backend):
    model, optimizer = make()
    xmem.cast_model(model, "bfloat16", optimizer=optimizer)
    backward(model, optimizer)
    with pytest.raises(xmem.UsageError, match="pass the optimizer to clip_grad_norm_"):
        xmem.clip_grad_norm_(model.parameters(), 1.0)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(16, 32)
        self.head = nn.Linear(32, 16, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids):
        return self.head(self.embedding(ids))


def test_tied_weights_stay_tied_and_have_one_master(backend):
    model = Tied()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    receipt = xmem.cast_model(model, "bfloat16", optimizer=optimizer)
    assert receipt.names == ("embedding.weight",)
    model(torch.arange(16)).float().square().mean().backward()
    xmem.optimizer_step(optimizer)
    assert model.head.weight is model.embedding.weight
    assert len(masters_of(optimizer)) == 1
    assert torch.equal(model.head.weight, masters_of(optimizer)[0].to(BF16))


def test_frozen_parameters_and_those_of_no_optimizer_are_cast_without_masters(backend):
    model, _ = make()
    model[0].requires_grad_(False)
    optimizer = torch.optim.SGD(model[3].parameters(), 0.1)
    frozen = model[0].weight.detach().to(BF16)
    xmem.cast_model(model, "bfloat16", optimizer=optimizer)
    assert {p.dtype for p in model.parameters()} == {BF16}
    train(model, optimizer, 2)
    assert len(masters_of(optimizer)) == 2
    assert torch.equal(model[0].weight, frozen)
    assert not model[0].weight.requires_grad


NORMS = {
    "BatchNorm1d": (lambda: nn.BatchNorm1d(8), (16, 8), True),
    "BatchNorm2d": (lambda: nn.BatchNorm2d(8), (4, 8, 6, 6), True),
    "BatchNorm3d": (lambda: nn.BatchNorm3d(8), (4, 8, 3, 3, 3), True),
    "BatchNorm2d without statistics": (
        lambda: nn.BatchNorm2d(8, track_running_stats=False), (4, 8, 6, 6), False,
    ),
    "InstanceNorm2d with statistics": (
        lambda: nn.InstanceNorm2d(8, affine=True, track_running_stats=True), (4, 8, 6, 6), True,
    ),
    "InstanceNorm2d": (lambda: nn.InstanceNorm2d(8, affine=True), (4, 8, 6, 6), False),
    "GroupNorm": (lambda: nn.GroupNorm(2, 8), (4, 8, 6, 6), False),
    "LayerNorm": (lambda: nn.LayerNorm(8), (4, 8), False),
}  # fmt: skip


@pytest.mark.parametrize("kind", NORMS)
@pytest.mark.parametrize("training", [True, False])
def test_normalisation_runs_on_half_inputs_and_keeps_its_statistics_in_float32(
    backend, kind, training
):
    make_norm, shape, stays = NORMS[kind]
    model = nn.Sequential(make_norm()).train(training)
    twin = copy.deepcopy(model)
    other = nn.Linear(2, 2)
    whole = nn.ModuleList([model, other])
    xmem.cast_model(whole, "bfloat16")
    x = torch.randn(shape) * 2 + 5
    found = model(x.to(BF16).requires_grad_())
    found.float().square().sum().backward()
    expected = twin(x.to(BF16).float())
    assert found.dtype == BF16
    assert torch.allclose(found.float(), expected, rtol=2e-2, atol=2e-2)
    assert {p.dtype for p in model.parameters()} <= {torch.float32 if stays else BF16}
    assert all(b.dtype in (torch.float32, torch.int64) for b in model.buffers())
    for a, b in zip(model.buffers(), twin.buffers(), strict=True):
        assert torch.allclose(a, b, rtol=1e-4)


class Buffered(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.wide = nn.Parameter(torch.ones(3, dtype=torch.float64), requires_grad=False)
        self.register_buffer("scale", torch.ones(8))
        self.register_buffer("hidden", torch.ones(8), persistent=False)
        self.register_buffer("count", torch.zeros(1, dtype=torch.int64))

    def forward(self, x):
        return self.layer(x) * self.scale + self.hidden


def test_buffers_are_cast_and_other_types_stay(backend):
    model = Buffered()
    scale = model.scale
    receipt = xmem.cast_model(model, "float16")
    assert receipt.names == ("layer.weight", "layer.bias", "scale", "hidden")
    assert model.scale is scale
    assert model.scale.dtype == model.hidden.dtype == torch.float16
    assert model.wide.dtype == torch.float64
    assert model.count.dtype == torch.int64
    assert model(torch.ones(2, 8).half()).dtype == torch.float16
    receipt.undo()
    assert model.scale.dtype == model.hidden.dtype == torch.float32


@pytest.mark.parametrize("masters", [False, True])
def test_the_bytes_are_what_the_receipt_says(backend, masters):
    model, optimizer = make(width=256)
    gc.collect()
    before = backend.measure.counters().allocated_bytes
    receipt = xmem.cast_model(model, "bfloat16", optimizer=optimizer if masters else None)
    gc.collect()
    freed = before - backend.measure.counters().allocated_bytes
    elements = sum(p.numel() for p in model.parameters())
    assert receipt.expected_saving_bytes == (-2 * elements if masters else 2 * elements)
    assert freed == receipt.expected_saving_bytes
    if masters:
        with xmem.measure(model=model, optimizer=optimizer) as m:
            pass
        assert m.by_category["parameter"] == 2 * elements
        assert m.by_category["optimizer"] == 4 * elements


def test_half_gradients_are_freed_one_by_one(backend):
    """Backward leaves the masters' gradients and nothing else."""
    model, optimizer = make(width=256)
    xmem.cast_model(model, "bfloat16", optimizer=optimizer)
    x = torch.randn(8, 256, dtype=BF16)
    model(x).float().sum().backward()
    xmem.zero_grad(optimizer)
    gc.collect()
    before = backend.measure.counters().allocated_bytes
    model(x).float().sum().backward()
    left = backend.measure.counters().allocated_bytes - before
    assert left == 4 * sum(p.numel() for p in model.parameters())


def half_already():
    model, optimizer = make()
    return model.bfloat16(), optimizer


def cast_already():
    model, optimizer = make()
    xmem.cast_model(model, "bfloat16", optimizer=optimizer)
    return model, optimizer


def of_another_model():
    return make()[0], make()[1]


def of_two_models():
    model, optimizer = make()
    optimizer.add_param_group({"params": list(nn.Linear(2, 2).parameters())})
    return model, optimizer


def lazy():
    model = nn.Sequential(nn.LazyLinear(4))
    return model, None


def no_optimizer():
    return make()[0], object()


REFUSED = {
    half_already: "'0.weight' is in bfloat16 already",
    cast_already: "'0.weight' is in bfloat16 already",
    of_another_model: "has 6 parameters that are not the model's",
    of_two_models: "has 2 parameters that are not the model's",
    lazy: "has no shape yet",
    no_optimizer: "object is no torch.optim.Optimizer",
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_cast_is_refused_and_nothing_changes(backend, case):
    model, optimizer = case()
    before = [(id(p), p.dtype) for p in model.parameters()]
    places = [] if not hasattr(optimizer, "state") else [id(p) for p in masters_of(optimizer)]
    with pytest.raises(xmem.UsageError, match=REFUSED[case]):
        xmem.cast_model(model, "bfloat16", optimizer=optimizer)
    assert [(id(p), p.dtype) for p in model.parameters()] == before
    if places:
        assert [id(p) for p in masters_of(optimizer)] == places


@pytest.fixture
def _process_group(tmp_path):
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1
    )
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("_process_group")
@pytest.mark.parametrize("wrapped", ["before", "after"])
def test_data_parallel_with_masters_is_refused_before_gradients_go_astray(backend, wrapped):
    model, optimizer = make()
    if wrapped == "before":
        parallel = nn.parallel.DistributedDataParallel(model)
        with pytest.raises(xmem.CompositionError, match="DistributedDataParallel"):
            xmem.cast_model(parallel, "bfloat16", optimizer=optimizer)
        assert model[0].weight.dtype == torch.float32
    else:
        xmem.cast_model(model, "bfloat16", optimizer=optimizer)
        parallel = nn.parallel.DistributedDataParallel(model)
        with pytest.raises(xmem.CompositionError, match="DistributedDataParallel"):
            parallel(data(model))


def test_gradients_that_are_there_move_to_the_masters(backend):
    model, optimizer = make()
    backward(model, optimizer)
    gradients = [p.grad.clone() for p in model.parameters()]
    xmem.cast_model(model, "bfloat16", optimizer=optimizer)
    assert all(p.grad is None for p in model.parameters())
    assert all(
        torch.equal(m.grad, g) for m, g in zip(masters_of(optimizer), gradients, strict=True)
    )


def with_frozen(kind="sgd with momentum"):
    model, optimizer = make(kind)
    model[0].requires_grad_(False)
    return model, optimizer


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_frozen_parameters_in_the_optimizer_stay_and_learn_once_they_are_unfrozen(backend, kind):
    model, optimizer = with_frozen(kind)
    receipt = xmem.cast_model(model, "bfloat16", optimizer=optimizer)
    assert [p.requires_grad for p in model.parameters()] == 2 * [False] + 4 * [True]
    before = model[0].weight.detach().clone()
    train(model, optimizer, 2)
    assert torch.equal(model[0].weight, before)
    model[0].requires_grad_(True)
    backward(model, optimizer)
    assert model[0].weight.grad is None
    assert masters_of(optimizer)[0].grad.dtype == torch.float32
    xmem.optimizer_step(optimizer)
    assert not torch.equal(masters_of(optimizer)[0].to(torch.float64), before.to(torch.float64))
    model[0].requires_grad_(False)
    receipt.undo()
    assert [p.requires_grad for p in model.parameters()] == 2 * [False] + 4 * [True]
    assert {p.dtype for p in model.parameters()} == {torch.float32}


FAILING = {
    "a hook of a parameter": (torch.Tensor, "register_post_accumulate_grad_hook"),
    "a hook of the step": (torch.optim.Optimizer, "register_step_post_hook"),
    "a hook of the state": (torch.optim.Optimizer, "register_load_state_dict_post_hook"),
    "a hook of the model": (nn.Module, "register_forward_pre_hook"),
    "memory for a copy": (torch.Tensor, "to"),
}


@pytest.mark.parametrize("what", FAILING)
@pytest.mark.parametrize("at", [0, 1, 3])
@pytest.mark.parametrize("masters", [True, False])
def test_what_fails_half_way_puts_everything_back(backend, monkeypatch, what, at, masters):
    model, optimizer = make()
    train(model, optimizer, 1)
    backward(model, optimizer)
    tensors = list(model.parameters())
    before = [(p.data_ptr(), p.detach().clone(), p.grad.clone()) for p in tensors]
    keys = [id(p) for p in optimizer.state]
    owner, name = FAILING[what]
    calls, real = [], getattr(owner, name)

    def failing(*args, **kwargs):
        calls.append(1)
        if len(calls) > at:
            raise MemoryError("no more")
        return real(*args, **kwargs)

    with monkeypatch.context() as patched:
        patched.setattr(owner, name, failing)
        try:
            xmem.cast_model(model, "bfloat16", optimizer=optimizer if masters else None)
        except MemoryError:
            pass
        else:
            return  # it is not called that often
    for p, held, (address, value, gradient) in zip(
        tensors, masters_of(optimizer), before, strict=True
    ):
        assert held is p
        assert p.data_ptr() == address
        assert torch.equal(p, value)
        assert torch.equal(p.grad, gradient)
        assert not p._post_accumulate_grad_hooks
    assert [id(p) for p in optimizer.state] == keys
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks
    assert not optimizer._optimizer_state_dict_post_hooks
    assert not optimizer._optimizer_load_state_dict_pre_hooks
    assert "add_param_group" not in optimizer.__dict__
    assert not model._forward_pre_hooks
    assert not any("zero_grad" in module.__dict__ for module in model.modules())
    xmem.cast_model(model, "bfloat16", optimizer=optimizer)  # as if nothing had been
    train(model, optimizer, 2)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_the_zero_grad_of_the_model_and_of_its_parts_clears_the_masters(backend, set_to_none):
    model, optimizer = make()
    receipt = xmem.cast_model(model, "bfloat16", optimizer=optimizer)
    cleared = (lambda g: g is None) if set_to_none else (lambda g: not g.any())
    backward(model, optimizer)
    model[0].zero_grad(set_to_none=set_to_none)
    assert [cleared(m.grad) for m in masters_of(optimizer)] == 2 * [True] + 4 * [False]
    model.zero_grad(set_to_none)
    assert all(cleared(m.grad) for m in masters_of(optimizer))
    backward(model, optimizer)
    receipt.undo()
    assert not any("zero_grad" in module.__dict__ for module in model.modules())
    assert all(p.grad.any() for p in model.parameters())
    model.zero_grad()
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("how", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_of_a_cast_model_clears_its_own_gradients_only(backend, how):
    model, optimizer = make()
    xmem.cast_model(model, "bfloat16", optimizer=optimizer)
    copied = how(model)
    backward(model, optimizer)
    copied(data(copied)).float().sum().backward()
    assert all(p.grad is not None for p in copied.parameters())
    copied.zero_grad()
    assert all(p.grad is None for p in copied.parameters())
    assert all(m.grad is not None for m in masters_of(optimizer))


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("first", ["model", "optimizer"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_run_that_is_resumed_goes_on_bit_for_bit(backend, tmp_path, kind, first, dtype):
    model, optimizer = make(kind)
    xmem.cast_model(model, dtype, optimizer=optimizer)
    train(model, optimizer, 2)
    saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(saved, tmp_path / "run.pt")
    saved = torch.load(tmp_path / "run.pt", weights_only=True)
    train(model, optimizer, 1)
    other = dict(zip(("model", "optimizer"), make(kind), strict=True))
    train(other["model"], other["optimizer"], 1)  # so that nothing is equal by chance
    xmem.cast_model(other["model"], dtype, optimizer=other["optimizer"])
    other[first].load_state_dict(saved[first])
    for name in {*other} - {first}:
        other[name].load_state_dict(saved[name])
    train(other["model"], other["optimizer"], 1)
    for a, b in zip(masters_of(other["optimizer"]), masters_of(optimizer), strict=True):
        assert torch.equal(a, b)
    for a, b in zip(other["model"].parameters(), model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_the_masters_in_a_state_take_no_memory_and_a_plain_optimizer_takes_the_state(backend):
    model, optimizer = make()
    xmem.cast_model(model, "bfloat16", optimizer=optimizer)
    train(model, optimizer, 1)
    state = optimizer.state_dict()
    for number, master in enumerate(masters_of(optimizer)):
        assert state["masters"][number].data_ptr() == master.data_ptr()
    plain, its_optimizer = make()
    its_optimizer.load_state_dict(state)
    plain.load_state_dict(model.state_dict())
    train(plain, its_optimizer, 1)
    assert "masters" not in its_optimizer.state_dict()
    optimizer.load_state_dict(its_optimizer.state_dict())
    train(model, optimizer, 1)


def test_loading_an_optimizer_alone_changes_no_weight(backend):
    """As without masters: the weights are the model's."""
    model, optimizer = make("sgd with momentum")
    xmem.cast_model(model, "bfloat16", optimizer=optimizer)
    state = copy.deepcopy(optimizer.state_dict())
    train(model, optimizer, 3)
    weights = [p.detach().clone() for p in model.parameters()]
    optimizer.load_state_dict(state)
    for p in masters_of(optimizer):
        p.grad = torch.zeros_like(p)
    xmem.optimizer_step(optimizer)
    assert all(torch.equal(a, b) for a, b in zip(weights, model.parameters(), strict=True))


@pytest.mark.parametrize("wrong", ["shape", "number"])
def test_the_state_of_another_model_is_refused_and_nothing_is_loaded(backend, wrong):
    model, optimizer = make()
    xmem.cast_model(model, "bfloat16", optimizer=optimizer)
    before = [m.detach().clone() for m in masters_of(optimizer)]
    other, its_optimizer = make(width=16)
    if wrong == "number":
        its_optimizer = torch.optim.AdamW(other[0].parameters())
    xmem.cast_model(other, "bfloat16", optimizer=its_optimizer)
    error = xmem.UsageError if wrong == "shape" else (ValueError, xmem.UsageError)
    with pytest.raises(error):
        optimizer.load_state_dict(its_optimizer.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(before, masters_of(optimizer), strict=True))


@pytest.mark.parametrize("form", ["tensor", "list", "generator", "named"])
def test_parameters_that_are_added_later_get_masters(backend, form):
    model, _ = make()
    optimizer = torch.optim.SGD(
        model[3].named_parameters() if form == "named" else model[3].parameters(), 0.1
    )
    receipt = xmem.cast_model(model, "bfloat16", optimizer=optimizer)
    weight = model[0].weight
    given = {
        "tensor": weight,
        "list": [weight, model[0].bias],
        "generator": model[0].parameters(),
        "named": list(model[0].named_parameters()),
    }[form]
    optimizer.add_param_group({"params": given, "lr": 0.5})
    master = optimizer.param_groups[1]["params"][0]
    assert optimizer.param_groups[1]["lr"] == 0.5
    assert master.dtype == torch.float32
    before = weight.detach().clone()
    backward(model, optimizer)
    assert weight.grad is None
    xmem.optimizer_step(optimizer)
    assert not torch.equal(weight, before)
    assert torch.equal(weight, master.to(BF16))
    learnt = master.detach().clone()
    receipt.undo()
    assert weight.dtype == torch.float32
    assert torch.equal(weight, learnt)
    assert optimizer.param_groups[1]["params"][0] is weight
    assert "add_param_group" not in optimizer.__dict__


def test_what_cannot_be_added_is_refused_and_nothing_changes(backend):
    model, optimizer = make()
    other = nn.Linear(4, 4).bfloat16()
    xmem.cast_model(model, "bfloat16", optimizer=optimizer)
    with pytest.raises(ValueError, match="more than one parameter group"):
        optimizer.add_param_group({"params": [model[0].weight]})
    with pytest.raises(xmem.UsageError, match="not of the model"):
        optimizer.add_param_group({"params": other.parameters()})
    with pytest.raises(TypeError, match="ordered"):
        optimizer.add_param_group({"params": {model[0].weight}})
    with pytest.raises(TypeError, match="must be a dict"):
        optimizer.add_param_group([model[0].weight])
    assert len(optimizer.param_groups) == 1
    optimizer.add_param_group({"params": nn.Linear(4, 4).parameters()})  # float32, as in PyTorch
    train(model, optimizer, 1)


def test_each_of_several_optimizers_holds_masters_of_its_own(backend):
    found = []
    for cast in (False, True):
        model, _ = make()
        optimizers = [
            torch.optim.SGD(model[:2].parameters(), 1e-2, momentum=0.9),
            torch.optim.SGD(model[3].parameters(), 1e-2),
        ]
        if cast:
            receipt = xmem.cast_model(model, "bfloat16", optimizer=optimizers)
            elements = sum(p.numel() for p in model.parameters())
            assert receipt.expected_saving_bytes == -2 * elements
        for _ in range(5):
            (model(data(model)).float() - 1).square().mean().backward()
            for optimizer in optimizers:
                xmem.optimizer_step(optimizer)
            model.zero_grad()
        if cast:
            with pytest.raises(xmem.UsageError, match="in another optimizer"):
                optimizers[0].add_param_group({"params": model[3].weight})
        masters = [m for optimizer in optimizers for m in masters_of(optimizer)]
        assert {m.dtype for m in masters} == {torch.float32}
        found.append(torch.cat([m.detach().flatten() for m in masters]))
        if cast:
            receipt.undo()
            for own, p in zip(
                [m for optimizer in optimizers for m in masters_of(optimizer)],
                model.parameters(),
                strict=True,
            ):
                assert own is p
    start = torch.cat([p.detach().flatten() for p in make()[0].parameters()])
    assert (found[1] - found[0]).norm() <= 0.05 * (found[0] - start).norm()


@pytest.mark.parametrize("wrong", ["none", "the same twice"])
def test_optimizers_that_cannot_share_a_model_are_refused(backend, wrong):
    model, optimizer = make()
    said, given = {
        "none": ("there are no optimizers", []),
        "the same twice": ("have the same parameter", (optimizer, optimizer)),
    }[wrong]
    with pytest.raises(xmem.UsageError, match=said):
        xmem.cast_model(model, "bfloat16", optimizer=given)
    assert model[0].weight.dtype == torch.float32
