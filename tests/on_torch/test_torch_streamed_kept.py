"""Models whose parameters are away on PyTorch: saved, copied, converted, refused, kept whole."""

import copy
import gc
import io
import pickle
import threading
import weakref

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
    full_disk,  # noqa: F401
    held_bytes,
    loss_of,
    pair,
    same,
    tokens,
)
from torch import nn
from torch.nn.utils import parametrizations

import xmem
import xmem.distributed as xd
from xmem import CompositionError, OffloadError, UsageError

pytestmark = pytest.mark.usefixtures("backend")


def test_a_parameter_that_is_away_says_so_and_crashes_nothing():
    model = GPT(1)
    away(model)
    p = model.head.weight
    assert (p.numel(), tuple(p.shape), p.dtype) == (50 * WIDTH, (50, WIDTH), torch.float32)
    assert sum(p.numel() for p in model.parameters()) == sum(p.numel() for p in GPT(1).parameters())
    for read in (
        lambda: p.sum(),
        lambda: print(p),
        lambda: p.data.add_(1),
        lambda: p.tolist(),
        lambda: torch.save(p, io.BytesIO()),
        lambda: pickle.dumps(p),
        lambda: copy.deepcopy(p),
        lambda: nn.init.zeros_(p),
        lambda: p.detach().numpy()[0, 0],
    ):
        with pytest.raises(RuntimeError, match=r"this parameter is away \(xmem|out of bounds"):
            read()
    assert "Linear(in_features=64" in repr(model)


@pytest.mark.parametrize("tied", [False, True])
def test_state_dict_holds_the_values_and_load_state_dict_takes_them(tied):
    plain, model = pair(tied=tied)
    other = GPT(tied=tied)
    receipt = away(model)
    state = model.state_dict()
    assert list(state) == list(plain.state_dict())
    assert same(list(state.values()), list(plain.state_dict().values()))
    shared = state["token.weight"].data_ptr() == state["head.weight"].data_ptr()
    assert shared is tied
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    GPT(tied=tied).load_state_dict(torch.load(file))
    state["norm.weight"].add_(1)  # a copy, not the parameter
    assert same(list(model.state_dict().values()), list(plain.state_dict().values()))
    model.load_state_dict(other.state_dict())
    assert held_bytes(model) == 0
    check_gradients(other, model, lambda m: loss_of(m, tokens()))
    receipt.undo()
    assert same(list(model.parameters()), list(other.parameters()))


def test_a_full_state_is_taken_up():
    plain, model = pair()
    other = GPT()
    xd.init()
    away(model)
    try:
        state = xd.full_state(other)
        assert same(list(xd.full_state(model)["model"].values()), list(plain.state_dict().values()))
        xd.load_full_state(model, None, state)
    finally:
        xd.destroy()
    assert held_bytes(model) == 0
    assert same(list(model.state_dict().values()), list(other.state_dict().values()))


def test_states_that_cannot_be_are_refused_and_nothing_changes():
    plain, model = pair()
    away(model)
    with pytest.raises(UsageError, match="keep_vars=True"):
        model.state_dict(keep_vars=True)
    with pytest.raises(UsageError, match="assign=True"):
        model.load_state_dict(plain.state_dict(), assign=True)
    with pytest.raises(RuntimeError, match="size mismatch"):
        model.load_state_dict(GPT(width=32).state_dict())
    assert same(list(model.state_dict().values()), list(plain.state_dict().values()))


@pytest.mark.parametrize("way", ["deepcopy", "pickle", "torch.save"])
@pytest.mark.parametrize("checkpointed", [False, True])
def test_a_copy_is_a_plain_model_with_the_values(way, checkpointed):
    plain, model = pair(tied=True)
    if checkpointed:
        xmem.apply_checkpointing(model)
    receipt = away(model)
    if way == "deepcopy":
        made = copy.deepcopy(model)
    elif way == "pickle":
        made = pickle.loads(pickle.dumps(model))
    else:
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        made = torch.load(file, weights_only=False)
    assert type(made) is GPT
    assert type(made.layers[0]) is Layer
    assert held_bytes(made) == bytes_of(made) > held_bytes(model) == 0
    assert made.head.weight is made.token.weight
    receipt.undo()
    check_gradients_held(plain, made)
    with torch.no_grad():
        made.norm.weight.add_(1)
    assert same(list(model.parameters()), list(plain.parameters()))


def check_gradients_held(plain, made):
    losses = [loss_of(m, tokens()) for m in (plain, made)]
    for loss in losses:
        loss.backward()
    assert losses[0].item() == losses[1].item()
    assert same([p.grad for p in made.parameters()], [p.grad for p in plain.parameters()])


def test_conversion_is_refused_and_what_changes_nothing_is_not():
    plain, model = pair()
    away(model)
    for convert in (
        lambda: model.half(),
        lambda: model.layers.double(),
        lambda: model.to(torch.bfloat16),
        lambda: model.to("meta"),
        lambda: model.norm.half(),
        lambda: model.share_memory(),
    ):
        with pytest.raises(UsageError, match="cannot be converted or moved"):
            convert()
    assert model.to("cpu") is model
    assert model.float() is model
    assert model.eval().train().requires_grad_(True) is model
    assert same(list(model.state_dict().values()), list(plain.state_dict().values()))


def test_what_is_measured_away_counts_nothing():
    model = GPT()
    away(model)
    with xmem.measure(model=model) as m:
        m.mark("now")
    print(m.by_category)
    assert m.by_category["parameter"] == 0


def test_some_parameters_stay_and_the_receipt_says_why():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 8)
            self.register_buffer("view", self.layer.weight.detach()[0])
            self.shared = nn.Parameter(torch.ones(4).share_memory_())
            self.foreign = nn.Parameter(torch.from_numpy(torch.ones(5).numpy().copy()))
            self.empty = nn.Parameter(torch.ones(0, 3))
            self.transposed = nn.Parameter(torch.randn(6, 4).t())
            whole = torch.randn(10)
            self.left, self.right = nn.Parameter(whole[:6]), nn.Parameter(whole[4:])

        def forward(self):
            parts = [self.layer.weight, self.shared, self.foreign, self.empty]
            parts += [self.transposed * torch.arange(6.0), self.left, self.right]
            return sum(part.square().sum() for part in parts)

    plain, model = pair(Odd)
    receipt = away(model)
    assert "layer.weight: a buffer lies in the same memory" in receipt.note
    assert "shared: its memory is shared with other processes" in receipt.note
    assert "foreign: its memory is numpy's too" in receipt.note
    assert held_bytes(model) == 4 * (64 + 4 + 5)
    losses = [plain(), model()]
    for loss in losses:
        loss.backward()
    assert losses[0].item() == losses[1].item()
    assert same([p.grad for p in model.parameters()], [p.grad for p in plain.parameters()])
    receipt.undo()
    assert model.transposed.stride() == plain.transposed.stride()
    with torch.no_grad():
        model.left[5] = 7
    assert model.right[1] == 7


def test_nothing_to_offload_warns():
    with pytest.warns(xmem.XmemWarning, match="has no parameters"):
        assert away(nn.ReLU()).applied_to == 0


class Many(nn.Module):
    """Modules that read parameters in ways of their own."""

    def __init__(self):
        super().__init__()
        self.normed = parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))
        self.old = nn.utils.weight_norm(nn.Linear(WIDTH, WIDTH))
        self.recurrent = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.listed = nn.ParameterList([torch.ones(WIDTH), torch.ones(WIDTH)])
        self.encoder = nn.TransformerEncoderLayer(WIDTH, 4, batch_first=True, dropout=0.0)
        self.conv = nn.Sequential(nn.Conv1d(WIDTH, WIDTH, 3), nn.BatchNorm1d(WIDTH))

    def forward(self, x):
        x = self.recurrent(self.old(self.normed(x)))[0] * self.listed[0] + self.listed[1]
        return self.conv(self.encoder(x).transpose(1, 2)).square().mean()


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
@pytest.mark.parametrize("training", [True, False])
def test_modules_that_read_parameters_in_their_own_ways_work(training):
    plain, model = pair(Many)
    plain.train(training)
    model.train(training)
    away(model)
    x = torch.randn(2, 5, WIDTH)
    with torch.no_grad():
        assert plain(x).item() == model(x).item()
    check_gradients(plain, model, lambda m: m(x))


def test_a_change_in_forward_is_stored():
    class Renormed(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(20, 8, max_norm=1.0)
            self.weight = nn.Parameter(torch.zeros(8))

        def forward(self, ids):
            with torch.no_grad():
                self.weight += 1
            return self.table(ids).sum() + self.weight.sum()

    plain, model = pair(Renormed)
    receipt = away(model)
    for _ in range(3):
        assert plain(tokens() % 20).item() == model(tokens() % 20).item()
    receipt.undo()
    assert same(list(model.parameters()), list(plain.parameters()))


def test_a_parameter_that_is_given_other_memory_stays():
    model = GPT(1)
    receipt = away(model)
    new = torch.ones(WIDTH)
    model.norm.register_forward_pre_hook(lambda module, _: setattr(module.weight, "data", new))
    with pytest.warns(xmem.XmemWarning, match=r"given other memory"):
        model(tokens())
    assert torch.equal(model.norm.weight, new)
    receipt.undo()
    assert torch.equal(model.norm.weight, new)


def test_a_parameter_that_numpy_has_got_stays():
    plain, model = pair(layers=1)
    plain.head.weight.detach().numpy()
    assert "head.weight: its memory is numpy's too" in away(plain).note
    receipt, arrays = away(model), []
    model.norm.register_forward_hook(lambda m, *_: arrays.append(m.weight.detach().numpy()))
    with pytest.warns(xmem.XmemWarning, match=r"shares its memory with numpy"):
        model(tokens())
    model(tokens())
    with torch.no_grad():
        model.norm.weight.fill_(3)
    assert all((array == 3).all() for array in arrays)
    assert torch.equal(model.state_dict()["norm.weight"], model.norm.weight)
    assert held_bytes(model) == model.norm.weight.nbytes
    receipt.undo()
    assert torch.equal(model.head.weight, plain.state_dict()["head.weight"])
    assert (model.norm.weight == 3).all()


def test_a_change_in_place_between_forward_and_backward_is_refused_by_autograd():
    from xmem_torch.streamed_parameters import are_away, brought_in

    model = GPT(1)
    away(model)
    loss = loss_of(model, tokens())
    own = [model.head.weight]
    assert are_away(own)
    assert not are_away([nn.Parameter(torch.ones(1))])
    with brought_in(own), torch.no_grad():
        own[0].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_full_disk_changes_nothing(full_disk):  # noqa: F811
    plain, model = pair()
    with full_disk(most=bytes_of(model) // 2), pytest.raises(OffloadError):
        away(model)
    assert held_bytes(model) == bytes_of(model)
    assert type(model) is GPT
    check_gradients_held(plain, model)
    away(model)


def test_a_disk_that_fails_in_a_step_loses_nothing(full_disk):  # noqa: F811
    plain, model = pair()
    receipt = away(model)
    for m in (plain, model):
        xmem.optimizer_in_backward(m, torch.optim.SGD(m.parameters(), 0.1))
    with full_disk(most=0):
        loss_of(plain, tokens()).backward()
        with pytest.raises(OffloadError, match="Nothing is lost"):
            loss_of(model, tokens()).backward()
        assert held_bytes(model) > 0
        with torch.no_grad():
            model(tokens())
    receipt.undo()
    assert held_bytes(model) == bytes_of(model)


def test_bytes_that_do_not_come_back_raise(depot_of, monkeypatch):  # noqa: F811
    model = GPT(1)
    away(model)
    depot = depot_of(model)
    error = OffloadError(None, "gone", directory=None)
    monkeypatch.setattr(type(depot), "get", lambda *_: (_ for _ in ()).throw(error))
    with pytest.raises(OffloadError, match="gone"):
        model(tokens())
    assert held_bytes(model) == 0
    monkeypatch.undo()
    model(tokens())


def test_a_limit_that_a_layer_does_not_fit_in_raises_and_all_goes_on(backend):
    plain, model = pair()
    away(model)
    backend.measure.set_limit(backend.measure.counters().allocated_bytes + 1000)
    with pytest.raises(torch.OutOfMemoryError), torch.no_grad():
        model(tokens())
    backend.measure.set_limit(None)
    assert held_bytes(model) == 0
    check_gradients(plain, model, lambda m: loss_of(m, tokens()))


def test_compiled_planned_cast_and_lazy_models_are_refused():
    with pytest.raises(UsageError, match="lazy"):
        away(nn.Sequential(nn.LazyLinear(3)))
    with pytest.raises(CompositionError, match="compiled"):
        away(torch.compile(GPT(1)))
    with pytest.raises(UsageError, match="is no module"):
        away(3)
    with pytest.raises(UsageError, match="unknown module"):
        away(GPT(1), blocks=["layer.0"])
    with pytest.raises(UsageError, match="not in GPT"):
        away(GPT(1), blocks=[nn.Linear(1, 1)])
    model = GPT(1)
    with pytest.raises(CompositionError, match="lies inside"):
        away(model, blocks=["layers", model.layers[0]])
    with pytest.raises(CompositionError, match="listed twice"):
        away(model, blocks=["norm", model.norm])
    with pytest.raises(UsageError, match="give a list of modules"):
        away(model, blocks="norm")
    assert held_bytes(model) == bytes_of(model)


def test_the_depot_goes_with_the_model_or_with_its_last_parameter(depot_of):  # noqa: F811
    for keep in (False, True):
        model = GPT(1)
        receipt = away(model)
        depot = weakref.ref(depot_of(model))
        kept = list(model.parameters()) if keep else None
        del model, receipt
        gc.collect()
        assert (depot() is not None) is keep
        del kept
        gc.collect()
        assert depot() is None


def test_two_threads_run_one_model():
    plain, model = pair()
    away(model)
    with torch.no_grad():
        expected = plain(tokens())
    wrong = []

    def work():
        with torch.no_grad():
            for _ in range(10):
                if not torch.equal(model(tokens()), expected):
                    wrong.append(1)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert held_bytes(model) == 0
