"""The second pass on PyTorch does what the first did, or says by name that it cannot."""

import gc
import random
import threading
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils.parametrizations import spectral_norm

import xmem


def both(function, *inputs, parameters=(), **options):
    """Return the gradients of inputs and parameters, without and with a region."""
    targets = [t for t in (*inputs, *parameters) if t.requires_grad]
    found = []
    for call in (function, lambda *args: xmem.checkpoint(function, *args, **options)):
        seeds(5)
        output = call(*inputs)
        found.append(torch.autograd.grad(output.square().sum(), targets))
    return found


def seeds(number):
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number)


def equal(found):
    return all(torch.equal(a, b) for a, b in zip(*found, strict=True))


class Noisy(nn.Module):
    """Draws a mask from a stream of the host."""

    def __init__(self, kind):
        super().__init__()
        self.layer = nn.Linear(32, 32)
        self.kind = kind
        self.python = random.Random(3)
        self.numpy = np.random.default_rng(3)
        self.legacy = np.random.RandomState(3)
        self.torch = torch.Generator().manual_seed(3)

    def forward(self, x):
        mask = {
            "random": lambda: [random.random() for _ in range(32)],
            "numpy": lambda: np.random.rand(32),
            "numpy normal": lambda: [np.random.randn() for _ in range(31)] + [1.0],
            "held random": lambda: [self.python.random() for _ in range(32)],
            "held generator": lambda: self.numpy.random(32),
            "held RandomState": lambda: self.legacy.rand(32),
            "held torch.Generator": lambda: torch.rand(32, generator=self.torch),
        }[self.kind]()
        return self.layer(x) * torch.as_tensor(mask, dtype=torch.float32)


STREAMS = [
    "random",
    "numpy",
    "numpy normal",
    "held random",
    "held generator",
    "held RandomState",
    "held torch.Generator",
]


@pytest.mark.parametrize("kind", STREAMS)
def test_random_numbers_of_every_stream_are_drawn_again_the_same(backend, kind):
    """y = layer(x) * mask: the bias's gradient of the sum is batch * mask, exactly."""
    block, x = Noisy(kind), torch.randn(4, 32)
    y = xmem.checkpoint(block, x)
    before = draw_of_each(block)
    y.sum().backward()
    assert draw_of_each(block) != before  # the streams went on from where they were
    mask = (y / block.layer(x)).detach()[0]
    assert mask.std() > 0.1
    torch.testing.assert_close(block.layer.bias.grad, 4 * mask, rtol=1e-4, atol=1e-5)


def draw_of_each(block):
    return [
        random.random(),
        np.random.rand(),
        block.python.random(),
        block.numpy.random(),
        block.legacy.rand(),
        torch.rand(1, generator=block.torch).item(),
    ]


@pytest.mark.parametrize("kind", STREAMS)
def test_streams_stand_after_backward_where_they_stood_before_it(backend, kind):
    found = []
    for wrapped in (False, True):
        torch.manual_seed(0)
        block, x = Noisy(kind), torch.randn(4, 32)
        seeds(1)
        y = xmem.checkpoint(block, x) if wrapped else block(x)
        y.sum().backward()
        found.append((block.layer.weight.grad, draw_of_each(block)))
    assert torch.equal(found[0][0], found[1][0])
    assert found[0][1] == found[1][1]


@pytest.mark.parametrize("kind", STREAMS)
def test_without_preserve_rng_a_check_of_values_finds_new_numbers(backend, kind):
    block, x = Noisy(kind), torch.randn(4, 32)
    y = xmem.checkpoint(block, x, preserve_rng=False, check_values=True)
    with pytest.raises(xmem.RecomputeMismatchError, match=r"Noisy.*other values") as caught:
        y.sum().backward()
    assert caught.value.module == "Noisy"
    assert caught.value.cause == "randomness"


def test_a_stream_that_cannot_be_seen_is_found_by_a_check_of_values(backend):
    hidden = {"deep": type("Holder", (), {})()}
    hidden["deep"].stream = np.random.default_rng(1)
    layer, x = nn.Linear(32, 32), torch.randn(4, 32)

    def function(x):
        return layer(x) * torch.as_tensor(hidden["deep"].stream.random(32), dtype=torch.float32)

    with pytest.raises(xmem.RecomputeMismatchError, match="other values"):
        xmem.checkpoint(function, x, check_values=True).sum().backward()


def test_a_check_of_values_passes_what_is_the_same(backend):
    block = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.GELU(), nn.Dropout(0.5))
    x = torch.randn(16, 8, requires_grad=True)
    assert equal(both(block, x, parameters=block.parameters(), check_values=True))


class Unsteady(nn.Module):
    """Does something else each second time."""

    def __init__(self, how):
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.second = nn.Linear(8, 8)
        self.how = how
        self.calls = 0
        self.cache = None

    def forward(self, x):
        self.calls += 1
        again = self.calls % 2 == 0
        if self.how == "fewer" and again:
            return self.first(x)
        if self.how == "shape" and again:
            x = x[:2]
        if self.how == "dtype" and again:
            with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False):
                return self.second(self.first(x).square()).float()
        if self.how == "cache":
            if self.cache is None:
                self.cache = self.first(x).square()
            return self.second(self.cache.detach() + x)
        return self.second(self.first(x).square())


@pytest.mark.parametrize(
    ("how", "said", "cause"),
    [
        ("fewer", r"saves \d tensors for backward, the first pass \d", "cache"),
        ("shape", r"was \(4, 8\) float32 and is \(2, 8\) float32", "cache"),
        ("dtype", r"float32 and is \(.*\) bfloat16", "autocast"),
        ("cache", r"saves \d tensors for backward|and is", "cache"),
    ],
)
def test_a_recomputation_that_differs_is_named_with_its_likely_cause(backend, how, said, cause):
    model = nn.ModuleList([Unsteady(how)])
    xmem.apply_checkpointing(model, ["0"])
    loss = model[0](torch.randn(4, 8, requires_grad=True)).square().sum()
    with pytest.raises(xmem.RecomputeMismatchError, match=said) as caught:
        loss.backward()
    assert caught.value.module == "0"
    assert caught.value.cause == cause
    assert "recomputation of '0' differs" in str(caught.value)


def test_training_goes_on_after_a_mismatch(backend):
    block, x = Unsteady("fewer"), torch.randn(4, 8)
    with pytest.raises(xmem.RecomputeMismatchError):
        xmem.checkpoint(block, x).sum().backward()
    block.how = "steady"
    assert equal(both(block, x, parameters=block.parameters()))


@pytest.mark.parametrize("evaluating", [False, True])
def test_modes_flipped_between_forward_and_backward_change_nothing(backend, evaluating):
    block = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 8))
    block.train(not evaluating)
    x = torch.randn(16, 8)
    found = []
    for wrapped in (False, True):
        block.zero_grad(set_to_none=True)
        torch.manual_seed(1)
        y = xmem.checkpoint(block, x) if wrapped else block(x)
        block.train(evaluating)
        y.square().sum().backward()
        assert all(m.training == evaluating for m in block.modules())
        block.train(not evaluating)
        found.append([p.grad for p in block.parameters()])
    assert equal(found)


@pytest.mark.parametrize("where", ["module", "closure"])
def test_a_parameter_stepped_before_backward_raises(backend, where):
    layer, x = nn.Linear(8, 8), torch.randn(4, 8, requires_grad=True)
    function = layer if where == "module" else (lambda x: functional.linear(x, layer.weight))
    y = xmem.checkpoint(lambda x: function(x).square(), x)
    with torch.no_grad():
        layer.weight.mul_(2)
    with pytest.raises(xmem.RecomputeMismatchError, match=r"weight.*changed in place") as caught:
        y.sum().backward()
    assert caught.value.cause == "in_place"


def test_a_parameter_that_the_region_does_not_read_may_be_stepped(backend):
    """Alternating optimizers: the module holds both, the region reads one."""
    both_layers = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
    y = xmem.checkpoint(lambda x: both_layers[0](x), torch.randn(4, 8))
    with torch.no_grad():
        both_layers[1].weight.mul_(2)
    y.sum().backward()
    assert both_layers[0].weight.grad is not None


def test_an_input_changed_before_backward_raises(backend):
    layer, x = nn.Linear(8, 8), torch.randn(4, 8)
    y = xmem.checkpoint(lambda pair: layer(pair["x"]), {"x": x})
    x.mul_(2)
    with pytest.raises(xmem.RecomputeMismatchError, match="input tensor 0") as caught:
        y.sum().backward()
    assert caught.value.cause == "in_place"


def test_a_region_that_changes_its_input_in_place_is_refused_at_once(backend):
    block = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(8, 8))
    with pytest.raises(xmem.CompositionError, match=r"Sequential changes its input tensor 0"):
        xmem.checkpoint(block, torch.randn(4, 8))


def test_an_output_changed_in_place_gives_the_gradients_of_a_plain_call(backend):
    layer, x = nn.Linear(8, 8), torch.randn(4, 8, requires_grad=True)
    found = []
    for call in (layer, lambda x: xmem.checkpoint(layer, x)):
        found.append(torch.autograd.grad(call(x).relu_().square().sum(), [x, layer.weight]))
    assert equal(found)


def test_a_buffer_changed_before_backward_raises_where_it_is_read(backend):
    block, x = nn.Linear(8, 8), torch.randn(4, 8)
    block.register_buffer("scale", torch.ones(()))
    block.forward = lambda x: nn.Linear.forward(block, x) * block.scale
    y = xmem.checkpoint(block, x)
    block.scale.mul_(3)
    with pytest.raises(xmem.RecomputeMismatchError, match="'scale' of Linear"):
        y.sum().backward()


class Counting(nn.Module):
    """Writes its buffers in place and by rebinding, and reads them."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.register_buffer("steps", torch.zeros(()))
        self.register_buffer("average", torch.zeros(8))

    def forward(self, x):
        y = self.layer(x) * (1 + self.steps) + self.average
        self.steps += 1
        self.average = 0.9 * self.average + 0.1 * y.detach().mean(0)
        return y


@pytest.mark.parametrize("make", [Counting, lambda: spectral_norm(nn.Linear(8, 8))])
def test_buffers_that_forward_writes_are_written_once_and_read_as_they_were(backend, make):
    x = torch.randn(4, 8)
    found = []
    for wrapped in (False, True):
        torch.manual_seed(0)
        block = make()
        for _ in range(3):
            y = xmem.checkpoint(block, x) if wrapped else block(x)
            y.square().sum().backward()
        found.append([*block.buffers(), *(p.grad for p in block.parameters())])
    assert equal(found)


def test_a_kept_graph_may_go_backward_twice(backend):
    block = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5))
    x = torch.randn(4, 8)
    found = []
    for call in (block, lambda x: xmem.checkpoint(block, x)):
        block.zero_grad(set_to_none=True)
        torch.manual_seed(0)
        loss = call(x).square().sum()
        loss.backward(retain_graph=True)
        loss.backward()
        found.append([p.grad for p in block.parameters()])
    assert equal(found)


def test_second_derivatives_are_those_of_a_plain_call(backend):
    block = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    x = torch.randn(4, 8, requires_grad=True)
    found = []
    for call in (block, lambda x: xmem.checkpoint(block, x)):
        [g] = torch.autograd.grad(call(x).square().sum(), [x], create_graph=True)
        penalty = (g.norm(dim=1) - 1).square().sum()
        found.append(torch.autograd.grad(penalty, list(block.parameters())[:3]))
    for plain, ours in zip(*found, strict=True):
        assert torch.equal(plain, ours)


def test_a_region_in_a_region_and_its_randomness(backend):
    layer, x = nn.Linear(8, 8), torch.randn(4, 8, requires_grad=True)

    def inner(x):
        return functional.dropout(layer(x), 0.5) * random.random()

    def outer(call):
        return lambda x: functional.dropout(call(call(x)), 0.5) * np.random.rand()

    plain, _ = both(outer(inner), x, parameters=[layer.weight])
    _, nested = both(outer(lambda x: xmem.checkpoint(inner, x)), x, parameters=[layer.weight])
    assert equal([plain, nested])


@pytest.mark.parametrize(
    "block",
    [
        nn.RReLU(),
        nn.Sequential(nn.Linear(8, 8), nn.RReLU()),
        nn.Sequential(nn.Linear(8, 8), nn.RReLU(), nn.Flatten(0), nn.Unflatten(0, (4, 8))),
        nn.Sequential(nn.RReLU(), nn.Linear(8, 8)),
    ],
)
def test_rrelu_draws_the_same_noise_also_at_the_end_of_a_region(backend, block):
    x = torch.randn(4, 8, requires_grad=True)
    assert equal(both(block, x, parameters=block.parameters()))
    assert equal(both(lambda x: functional.rrelu(block(x), training=True), x))


@pytest.mark.parametrize(
    "block",
    [
        nn.LSTM(8, 8, num_layers=2, dropout=0.5),
        nn.TransformerEncoderLayer(8, 2, dropout=0.3),
        nn.Sequential(nn.AlphaDropout(0.5), nn.FeatureAlphaDropout(0.5)),
    ],
)
def test_modules_of_pytorch_that_draw_draw_the_same(backend, block):
    x = torch.randn(4, 3, 8, requires_grad=True)

    def function(x):
        y = block(x)
        return y[0] if isinstance(y, tuple) else y

    assert equal(both(function, x, parameters=block.parameters()))


def test_a_hundred_steps_leave_the_allocated_bytes_where_they_were(backend):
    """Without the garbage collector: regions are freed as soon as their graph is."""
    model = nn.Sequential(*[Noisy(kind) for kind in STREAMS])
    xmem.apply_checkpointing(model, "every", blocks=list(model))
    optimizer = torch.optim.Adam(model.parameters())
    x = torch.randn(16, 32)

    def step():
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    step()
    step()
    gc.collect()
    gc.disable()
    try:
        before = backend.measure.counters().allocated_bytes
        for _ in range(100):
            step()
        after = backend.measure.counters().allocated_bytes
    finally:
        gc.enable()
    assert after == before


def test_what_a_call_costs_is_counted_and_leaves_no_trace(backend):
    block = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.BatchNorm1d(256), nn.Dropout(0.5))
    x = torch.randn(128, 64)
    seeds(1)
    expected = (torch.rand(1), random.random(), np.random.rand())
    state = {k: v.clone() for k, v in block.state_dict().items()}
    seeds(1)
    cost = backend.checkpoint.cost(block, (x,), {})
    assert (torch.rand(1), random.random(), np.random.rand()) == expected
    assert all(torch.equal(state[k], v) for k, v in block.state_dict().items())
    # Linear's output for GELU, GELU's for BatchNorm, two statistics, the scaled mask
    activation = 128 * 256 * 4
    masks = (activation, activation // 4)
    assert cost.saved_bytes in [2 * activation + 2 * 256 * 4 + mask for mask in masks]
    assert cost.forward_seconds > 0
    # GELU keeps its input, which is there anyway
    assert backend.checkpoint.cost(nn.GELU(), (x,), {}).saved_bytes == 0


@pytest.mark.parametrize("layout", ["every", 2])
def test_parameters_given_by_functional_call_are_those_of_the_second_pass(backend, layout):
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)])
    x, found = torch.randn(4, 8), []
    for wrapped in (False, True):
        if wrapped:
            xmem.apply_checkpointing(model, layout)
        given = {n: (p.detach() * 1.5).requires_grad_() for n, p in model.named_parameters()}
        y = torch.func.functional_call(model, given, (x,))
        found.append(torch.autograd.grad(y.square().sum(), list(given.values())))
    assert equal(found)


def test_a_weight_that_a_hook_sets_before_each_call_is_that_of_the_call(backend):
    x, found = torch.randn(4, 8), []
    for wrapped in (False, True):
        torch.manual_seed(0)
        block = nn.utils.spectral_norm(nn.Linear(8, 8))
        if wrapped:
            xmem.apply_checkpointing(nn.Sequential(block), [block])
        first, second = block(x).tanh(), block(2 * x).tanh()
        (first.sum() + second.sum()).backward()
        found.append([p.grad for p in block.parameters()])
    assert equal(found)


def test_state_that_a_module_keeps_in_an_attribute_is_read_as_it_was(backend):
    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 8)
            self.state = torch.zeros(4, 8)

        def forward(self, x):
            self.state = torch.tanh(self.layer(x + self.state))
            return self.state

    x, found = torch.randn(4, 8), []
    for wrapped in (False, True):
        torch.manual_seed(0)
        block = Recurrent()
        outputs = [xmem.checkpoint(block, x) if wrapped else block(x) for _ in range(3)]
        sum(y.square().sum() for y in outputs).backward()
        assert block.state is outputs[-1]
        found.append([p.grad for p in block.parameters()])
    assert equal(found)


def test_a_buffer_that_is_written_in_training_only_after_a_first_call_in_eval(backend):
    x, found = torch.randn(4, 8), []
    for wrapped in (False, True):
        torch.manual_seed(0)
        block = Counting()
        block.register_buffer("large", torch.ones(4, 8).repeat(1, 100))
        forward = block.forward

        def call(x, block=block, forward=forward):
            y = forward(x * block.large[:, :8])
            if block.training:
                block.large.mul_(0.5)
            return y

        block.forward = call
        run = partial(xmem.checkpoint, block) if wrapped else block
        for mode in (False, True, True):
            run_mode = block.train(mode)
            run(x).square().sum().backward()
            assert run_mode is block
        found.append([*block.buffers(), *(p.grad for p in block.parameters())])
    assert equal(found)


def test_models_in_two_threads_keep_their_statistics(backend):
    def block():
        return nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Dropout(0.3))

    models = [nn.Sequential(block(), block()) for _ in range(2)]
    for model in models:
        xmem.apply_checkpointing(model)

    def train(model):
        for _ in range(60):
            model(torch.randn(8, 16)).sum().backward()

    threads = [threading.Thread(target=train, args=(model,)) for model in models]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    norms = [m for model in models for m in model.modules() if isinstance(m, nn.BatchNorm1d)]
    assert [(norm.momentum, int(norm.num_batches_tracked)) for norm in norms] == [(0.1, 60)] * 4


def test_a_check_of_values_takes_conjugated_and_sparse_tensors(backend):
    z = torch.randn(3, 4, dtype=torch.complex64, requires_grad=True)
    assert equal(both(lambda z: (z * z.conj()).real.sin(), z, check_values=True))
    ones, weight = torch.eye(4).to_sparse(), torch.randn(4, 4, requires_grad=True)
    call = lambda w: torch.sparse.mm(ones, w).sin()  # noqa: E731
    assert equal(both(call, weight, check_values=True))


def test_a_tensor_of_the_closure_may_be_made_in_inference_mode(backend):
    with torch.inference_mode():
        x = torch.randn(4, 8)
    shift = torch.zeros(8, requires_grad=True)
    assert equal(both(lambda: torch.sin(shift + 0) + x, parameters=(shift,)))
