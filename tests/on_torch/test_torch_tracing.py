"""Tracing on PyTorch: a forward in stages is the forward, and lets go of what it can."""

import copy
import pickle
import random
import weakref

import pytest
import torch
from on_torch.gpt import GPT
from torch import nn
from torch.nn import functional
from xmem_torch.tracing import traced

import xmem


def plainly(index, function, args, kwargs):
    return function(*args, **kwargs)


def gradients(model, run, *args, **kwargs):
    """Return what a forward gives and its gradients, from one seed."""
    torch.manual_seed(0)
    model.zero_grad()
    inputs = [a for a in args if torch.is_tensor(a) and a.requires_grad]
    for a in inputs:
        a.grad = None
    output = run(*args, **kwargs)
    leaves = [t for t in xmem.containers.leaves(output, torch.Tensor) if t.requires_grad]
    sum(t.square().sum() for t in leaves).backward()
    return output, [t.grad for t in (*model.parameters(), *inputs)]


def same(a, b):
    assert type(a) is type(b)
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    return a == b


def check(model, *args, names=None, **kwargs):
    """Hold a model's stages to the model itself."""
    stages = traced(model)
    assert stages is not None
    assert len(set(stages.names)) == len(stages.names)
    assert traced(model).names == stages.names == traced(copy.deepcopy(model)).names
    if names is not None:
        assert list(stages.names) == names
    called = []

    def call(index, function, args, kwargs):
        called.append(index)
        output = function(*args, **kwargs)
        if index < len(stages.names) - 1:
            assert isinstance(output, torch.Tensor), stages.names[index]
            own = {t.untyped_storage().data_ptr() for t in args if torch.is_tensor(t)}
            assert output.untyped_storage().data_ptr() not in own, stages.names[index]
            assert output.requires_grad, stages.names[index]
        return output

    run = stages.forward(call)
    assert same(
        gradients(model, stages.forward(call), *args, **kwargs),
        gradients(model, model, *args, **kwargs),
    )
    assert called == list(range(len(stages.names)))
    # Nothing is kept for a second call, and none is missing.
    assert same(gradients(model, run, *args, **kwargs), gradients(model, model, *args, **kwargs))
    return stages


class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.conv1 = nn.Conv2d(width, width, 3, padding=1)
        self.norm = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1)

    def forward(self, x):
        if x.shape[1] > 1000:  # what a graph cannot hold
            return x
        return self.relu(x + self.conv2(self.relu(self.norm(self.conv1(x)))))


class ResNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3, padding=1)
        self.bn1 = nn.BatchNorm2d(8)
        self.relu = nn.ReLU(inplace=True)
        self.layer1 = nn.Sequential(Residual(8), Residual(8))
        self.layer2 = nn.Sequential(nn.Conv2d(8, 16, 2, 2), Residual(16), Residual(16))
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(16, 5)

    def forward(self, x):
        x = self.relu(self.bn1(self.conv1(x)))
        x = self.avgpool(self.layer2(self.layer1(x)))
        return self.fc(torch.flatten(x, 1))


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.down1 = Residual(4)
        self.pool = nn.MaxPool2d(2)
        self.widen = nn.Conv2d(4, 8, 1)
        self.down2 = Residual(8)
        self.up = nn.ConvTranspose2d(8, 4, 2, 2)
        self.fuse = nn.Conv2d(8, 4, 1)
        self.head = nn.Conv2d(4, 2, 1)

    def forward(self, x):
        skip = self.down1(x)
        y = self.up(self.down2(self.widen(self.pool(skip))))
        y = torch.cat([skip, y[..., : skip.shape[2], : skip.shape[3]]], dim=1)
        return self.head(functional.relu(self.fuse(y)))


class NanoGPT(nn.Module):
    """Positions by arange, residuals in the outer forward, dropout as a function, two outputs."""

    def __init__(self, tied=False):
        super().__init__()
        self.token = nn.Embedding(50, 16)
        self.position = nn.Embedding(12, 16)
        self.register_buffer("scale", torch.tensor(0.5))
        self.attention = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))
        self.norm = nn.ModuleList(nn.LayerNorm(16) for _ in range(2))
        self.head = nn.Linear(16, 50, bias=False)
        if tied:
            self.head.weight = self.token.weight

    def forward(self, ids, targets=None, *, label_smoothing: float = 0.0):
        batch, length = ids.shape
        where = torch.arange(length, device=ids.device)
        x = self.token(ids) + self.position(where) * self.scale
        x = functional.dropout(x, 0.1, self.training)
        for norm, mix in zip(self.norm, self.attention, strict=True):
            x = x + mix(norm(x)).view(batch, length, -1)
        logits = self.head(x)
        if targets is None:
            return {"logits": logits, "loss": None}
        loss = functional.cross_entropy(
            logits.view(-1, logits.size(-1)), targets.view(-1), label_smoothing=label_smoothing
        )
        return {"logits": logits, "loss": loss}


def test_a_chain_has_a_stage_for_each_module(backend):
    model = nn.Sequential(nn.Flatten(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
    check(model, torch.randn(3, 2, 4), names=["1", "2", "3"])


def test_a_resnet_has_its_blocks_and_glue_goes_with_the_next_module(backend):
    names = [
        *("conv1", "bn1", "layer1.0", "layer1.1", "layer2.0", "layer2.1", "layer2.2"),
        *("avgpool", "fc"),
    ]
    model = ResNet()
    check(model, torch.randn(4, 3, 8, 8), names=names)
    check(model.eval(), torch.randn(4, 3, 8, 8, requires_grad=True), names=names)


def test_a_gpt_with_a_loop_over_its_layers(backend):
    names = ["token", *(f"layers.{i}" for i in range(4)), "norm", "head"]
    check(GPT(layers=4), torch.randint(0, 1000, (2, 8)), names=names)


def test_a_unet_reads_its_skips(backend):
    stages = check(
        UNet(),
        torch.randn(2, 3, 8, 8)[:, :1].expand(2, 4, 8, 8).contiguous(),
        names=["down1", "pool", "widen", "down2", "up", "fuse", "head"],
    )
    seen = []
    run = stages.forward(lambda i, f, args, kwargs: seen.append(len(args)) or f(*args))
    run(torch.randn(2, 4, 8, 8))
    assert seen[stages.names.index("fuse")] >= 2


@pytest.mark.parametrize("tied", [False, True])
def test_residuals_positions_and_what_else_a_forward_does_between_modules(backend, tied):
    model = NanoGPT(tied)
    ids = torch.randint(0, 50, (2, 12))
    stages = check(model, ids)
    assert [n for n in stages.names if "." in n] == [
        *("norm.0", "attention.0", "norm.1", "attention.1")
    ]
    check(model.eval(), ids)


def test_arguments_are_those_of_the_model(backend):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x, scale=2.0, *, shift=None, **more):
            x = self.first(x) * scale
            if shift is not None:
                x = x + shift
            for value in more.values():
                x = x + value
            return self.second(x)

    model, x = Net(), torch.randn(3, 4, requires_grad=True)
    check(model, x, names=["first", "second"])
    check(model, x, 3.0)
    check(model, x=x, scale=torch.tensor(4.0))
    check(model, x, shift=torch.ones(4), names=["first", "second"])
    check(model, x, 0.5, shift=1.0, third=torch.ones(4), fourth=2)
    run = traced(model).forward(plainly)
    with pytest.raises(TypeError, match="missing a required argument"):
        run()
    with pytest.raises(TypeError, match="multiple values"):
        run(x, x=x)


def test_a_call_that_takes_other_stages_is_refused(backend):
    model = NanoGPT()
    ids = torch.randint(0, 50, (2, 12))
    run = traced(model).forward(plainly)
    assert torch.equal(run(ids)["logits"][:, :0], model(ids)["logits"][:, :0])
    with pytest.raises(xmem.CompositionError, match="another path with these arguments"):
        run(ids, ids)

    class Choosing(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x, n=1):
            for _ in range(n):
                x = self.layer(x)
            return x

    model = Choosing()
    check(model, torch.randn(2, 4))
    with pytest.raises(xmem.CompositionError, match="cannot be traced"):
        traced(model).forward(plainly)(torch.randn(2, 4), 2)


def test_the_training_mode_is_that_of_the_call(backend):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            x = self.first(x)
            return self.second(functional.dropout(x, 0.5, self.training))

    model, x = Net(), torch.randn(3, 4)
    run = traced(model).forward(plainly)
    for mode in (True, False, True):
        model.train(mode)
        assert same(gradients(model, run, x), gradients(model, model, x))


@pytest.mark.parametrize(
    "returning",
    [
        lambda a, b: (a, b),
        lambda a, b: {"b": b, "a": a, "none": None},
        lambda a, b: [b[:, 0], a, (b,)],
        lambda a, b: b.view(-1),
        lambda a, b: (a, a),
        lambda a, b: (b, b.shape[0], 3, "text"),
    ],
)
def test_the_returned_structure_is_the_models(backend, returning):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            a = self.first(x)
            return returning(a, self.second(a))

    model = Net()
    check(model, torch.randn(3, 4), names=["first", "second"])


def test_tuples_and_shared_modules_between_stages(backend):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm = nn.LSTM(4, 4)
            self.mix = nn.Linear(4, 4)

        def forward(self, x):
            x, (hidden, _) = self.lstm(self.mix(x))
            left, right = self.mix(x).chunk(2, dim=-1)
            n = left.size(-1)
            return self.mix(torch.cat([right, left * n], -1)) + hidden

    check(Net(), torch.randn(3, 4, 4))
    model = nn.Sequential(*[nn.Linear(4, 4)] * 3)
    check(model, torch.randn(3, 4), names=["0", "0#2", "0#3"])


def test_functions_that_change_a_tensor_stay_with_what_made_it(backend):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            y = self.first(x)
            y.add_(1)
            y = functional.relu(y, inplace=True)
            z = self.second(y * 2)
            z[:, 0].mul_(2)
            return z.tanh_()

    check(Net(), torch.randn(3, 4), names=["first", "second"])


class Deciding(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)


def data_dependent(self, x):
    x = self.first(x)
    return self.second(x) if x.sum() > 0 else x


def star_args(self, *xs):
    for x in xs:
        x = self.first(x)
    return x


def iterating(self, x):
    return sum(self.first(row) for row in x)


def counting(self, x):
    return self.first(x)[: len(x)]


def in_a_mode(self, x):
    with torch.no_grad():
        x = self.first(x)
    return self.second(x)


def in_autocast(self, x):
    with torch.autocast("cpu", torch.bfloat16):
        x = self.first(x)
    return self.second(x.float())


def in_a_region(self, x):
    return self.second(torch.utils.checkpoint.checkpoint(self.first, x, use_reentrant=False))


def a_constant(self, x):
    return self.second(self.first(x) + torch.from_numpy(self.noise))


def random_depth(self, x):
    x = self.first(x)
    return self.second(x) if random.random() < 0.5 else x


def keeping(self, x):
    self.kept = self.first(x)
    self.seen.append(self.kept)
    return self.second(self.kept)


def changing_its_input(self, x):
    y = self.first(x)
    x.add_(1)
    return self.second(x + y)


def setting(self, x):
    x = self.first(x)
    x[:, 0] = 0
    return self.second(x)


def failing(self, x):
    raise KeyError(x)


@pytest.mark.parametrize(
    "forward",
    [
        *(data_dependent, star_args, iterating, counting, in_a_mode, in_autocast, in_a_region),
        *(a_constant, random_depth, keeping, changing_its_input, setting, failing),
    ],
)
def test_a_forward_that_a_graph_cannot_hold_is_none_and_leaves_no_trace(backend, forward):
    model = type("Net", (Deciding,), {"forward": forward})()
    model.seen, model.noise = [], torch.zeros(4).numpy()
    before, state = dict(vars(model)), random.getstate()
    assert traced(model) is None
    assert vars(model) == before
    assert model.seen == []
    assert random.getstate() == state


def test_a_wrapper_that_cannot_be_traced_is_one_stage(backend):
    class Encoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(Residual(4) for _ in range(2))

        def forward(self, x):
            y = self.blocks[0](x) * 2
            return self.blocks[1](y) if y.sum() > 0 else y

    model = nn.Sequential(nn.Conv2d(4, 4, 1), Encoder(), nn.Conv2d(4, 4, 1))
    check(model, torch.randn(2, 4, 8, 8), names=["0", "1", "2"])


def test_a_model_that_only_wraps_another_gives_way_to_it(backend):
    class Wrapper(nn.Module):
        def __init__(self):
            super().__init__()
            self.module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))

        def forward(self, *args):
            return self.module(*args)

    model = Wrapper()
    assert traced(model).module is model.module


def test_values_are_let_go_before_their_last_reader_is_done(backend):
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    made, alive = [], []

    def call(index, function, args, kwargs):
        output = function(*args, **kwargs)
        del args
        made.append(weakref.ref(output))
        alive.append([r() is not None for r in made])
        return output

    with torch.no_grad():
        traced(model).forward(call)(torch.randn(2, 4))
    assert [sum(now) for now in alive[1:]] == [2, 2, 2]
    assert not any(r() is not None for r in made)


def test_a_copy_and_a_pickle_run_their_own_modules(backend):
    model, x = ResNet().eval(), torch.randn(2, 3, 8, 8)
    model.stages = traced(model)
    expected = model(x)
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        run = copied.stages.forward(plainly)
        assert torch.equal(run(x), expected)
        with torch.no_grad():
            copied.fc.weight.zero_()
            copied.fc.bias.zero_()
        assert not run(x).any()
        assert torch.equal(model.stages.forward(plainly)(x), expected)
