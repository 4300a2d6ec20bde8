"""Autocast on PyTorch: what runs in half, what stays, what it saves, and that nothing is left."""

import gc
import threading
import warnings
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from on_torch.gpt import GPT
from torch import nn
from torch.nn import functional

import xmem
from xmem.sizes import format_size

X = torch.arange(64.0).reshape(8, 8) / 64
IDS = torch.arange(8)
IMAGE = torch.ones(2, 4, 8, 8)
ONES = torch.ones(8)


def half(tensor):
    return tensor.bfloat16()


HALF = {
    "linear": lambda: functional.linear(X, X),
    "matmul @": lambda: X @ X,
    "matmul mm": lambda: torch.mm(X, X),
    "matmul bmm": lambda: torch.bmm(X[None], X[None]),
    "matmul addmm": lambda: torch.addmm(X, X, X),
    "matmul baddbmm": lambda: torch.baddbmm(X[None], X[None], X[None]),
    "matmul einsum": lambda: torch.einsum("ij,jk->ik", X, X),
    "matmul in a list": lambda: torch.einsum("ij,jk->ik", [X, X]),
    "conv": lambda: functional.conv2d(IMAGE, torch.ones(4, 4, 3, 3)),
    "conv 1d": lambda: functional.conv1d(IMAGE[0], torch.ones(4, 8, 3)),
    "conv_transpose": lambda: functional.conv_transpose2d(IMAGE, torch.ones(4, 4, 3, 3)),
    "attention": lambda: functional.scaled_dot_product_attention(IMAGE, IMAGE, IMAGE),
    "attention module": lambda: nn.MultiheadAttention(8, 2)(X[None], X[None], X[None])[0],
}
FOLLOWING = {
    "gelu": lambda x: functional.gelu(x),
    "relu": lambda x: functional.relu(x),
    "silu": lambda x: functional.silu(x),
    "pool": lambda x: functional.max_pool1d(x[None], 2),
    "pool average": lambda x: functional.avg_pool1d(x[None], 2),
    "pool adaptive": lambda x: functional.adaptive_avg_pool1d(x[None], 2),
}
FLOAT32 = {
    "softmax": lambda x: functional.softmax(x, -1),
    "softmax method": lambda x: x.softmax(-1),
    "softmax log": lambda x: functional.log_softmax(x, -1),
    "layer_norm": lambda x: functional.layer_norm(x, (8,), ONES, ONES),
    "layer_norm rms": lambda x: functional.rms_norm(x, (8,), ONES),
    "group_norm": lambda x: functional.group_norm(x, 2, ONES, ONES),
    "loss cross_entropy": lambda x: functional.cross_entropy(x, IDS),
    "loss nll": lambda x: functional.nll_loss(x, IDS),
    "loss mse": lambda x: functional.mse_loss(x, x),
    "loss l1": lambda x: functional.l1_loss(x, x),
    "loss smooth l1": lambda x: functional.smooth_l1_loss(x, x),
    "loss huber": lambda x: functional.huber_loss(x, x),
    "loss binary": lambda x: functional.binary_cross_entropy(x, x),
    "loss binary of logits": lambda x: functional.binary_cross_entropy_with_logits(x, x),
    "loss divergence": lambda x: functional.kl_div(x, x),
}


@pytest.mark.parametrize("case", HALF)
def test_products_run_in_half_and_are_listed(backend, case):
    with xmem.autocast("bfloat16") as ac:
        assert HALF[case]().dtype == torch.bfloat16
    assert ac.operations[case.split()[0]] == {"bfloat16": 1}


@pytest.mark.parametrize("case", FOLLOWING)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_elementwise_operations_follow_their_input_and_are_listed(backend, case, dtype):
    with xmem.autocast("bfloat16") as ac:
        _ = X @ X
        assert FOLLOWING[case](X.to(dtype)).dtype == dtype
    assert ac.operations[case.split()[0]] == {str(dtype).removeprefix("torch."): 1}


@pytest.mark.parametrize("case", FLOAT32)
def test_what_loses_in_half_is_computed_in_float32_from_half_inputs(backend, case):
    function = FLOAT32[case]
    with xmem.autocast("bfloat16") as ac:
        x = X @ X / 8
        assert x.dtype == torch.bfloat16
        found = function(x)
    assert found.dtype == torch.float32
    assert torch.equal(found, function(x.float()))
    assert ac.operations[case.split()[0]] == {"float32": 1}


@pytest.mark.parametrize("norm", ["batch_norm", "instance_norm"])
def test_norms_with_statistics_compute_in_float32_inside_and_keep_half(backend, norm):
    layer = {"batch_norm": nn.BatchNorm2d, "instance_norm": nn.InstanceNorm2d}[norm]
    layer = layer(4, affine=True, track_running_stats=True)
    exact = type(layer)(4, affine=True, track_running_stats=True)
    x = torch.randn(8, 4, 16, 16).bfloat16() * 3 + 100
    with xmem.autocast("bfloat16") as ac:
        _ = X @ X
        found = layer(x)
    assert found.dtype == torch.bfloat16
    assert ac.operations[norm] == {"float32": 1}
    assert torch.allclose(found.float(), exact(x.float()), atol=2e-2)
    assert torch.allclose(layer.running_var, exact.running_var, rtol=1e-4)
    assert layer.running_mean.dtype == torch.float32


@pytest.mark.parametrize("case", [*HALF, *FOLLOWING])
def test_a_named_operation_stays_in_float32_and_takes_half_inputs(backend, case):
    name = case.split()[0]
    with xmem.autocast("bfloat16", keep_fp32=(name,)) as ac:
        if case in HALF:
            assert HALF[case]().dtype == torch.float32
        else:
            assert FOLLOWING[case](half(X)).dtype == torch.float32
        other = X @ X if name != "matmul" else functional.linear(X, X)
        assert other.dtype == torch.bfloat16
    assert set(ac.operations[name]) == {"float32"}


def test_an_operation_in_place_changes_its_input_also_where_it_is_named(backend):
    with xmem.autocast("bfloat16", keep_fp32=("relu",)):
        x = -(X @ X)
        functional.relu_(x)
        assert not x.any()
        y = -(X @ X)
        nn.ReLU(inplace=True)(y)
        assert not y.any()


def test_the_block_computes_as_torch_autocast_does_where_that_keeps_to_float32(backend):
    """Models whose norms and softmax get float32 anyway: to the last bit."""
    model, ids = GPT(layers=2, dropout=0.0), torch.randint(0, 1000, (2, 32))
    found = []
    for block in (
        partial(torch.autocast, "cpu", dtype=torch.bfloat16, cache_enabled=False),
        partial(xmem.autocast, "bfloat16"),
    ):
        model.zero_grad()
        with block():
            loss = functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
        loss.backward()
        found.append([loss.detach(), *(p.grad for p in model.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def dtypes():
    return functional.linear(X, X).dtype, functional.softmax(half(X), -1).dtype


PLAIN = (torch.float32, torch.bfloat16)
INSIDE = (torch.bfloat16, torch.float32)


def modes():
    return len(torch.overrides._get_current_function_mode_stack())


@pytest.mark.parametrize("how", ["nested", "disabled inside", "error", "decorator", "again"])
def test_nothing_is_left_behind(backend, how):
    ac = xmem.autocast("bfloat16")
    if how == "nested":
        with ac:
            with xmem.autocast("float16", keep_fp32=("linear",)):
                assert dtypes() == (torch.float32, torch.float32)
                assert (X @ X).dtype == torch.float16
            assert dtypes() == INSIDE
    elif how == "disabled inside":
        with ac:
            with xmem.autocast(enabled=False):
                assert dtypes() == PLAIN
            assert dtypes() == INSIDE
    elif how == "error":
        with pytest.raises(KeyError), ac:
            raise KeyError
    elif how == "decorator":
        assert ac(dtypes)() == INSIDE
    else:
        for _ in range(2):
            with ac:
                assert dtypes() == INSIDE
    assert dtypes() == PLAIN
    assert modes() == 0
    from xmem import casting

    assert casting.current() is None


def test_half_is_float16_where_asked_for(backend):
    with xmem.autocast("float16"):
        assert (X @ X).dtype == torch.float16


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dtype": "bf16"}, "unknown dtype 'bf16'.*auto, bfloat16, float16"),
        ({"keep_fp32": ("liner",)}, "Did you mean 'linear'"),
    ],
)
def test_unknown_names_are_refused_before_the_block(backend, arguments, message):
    with pytest.raises(xmem.UsageError, match=message):
        xmem.autocast(**arguments)


def test_threads_enter_blocks_of_their_own(backend):
    found, inside, leave = {}, threading.Event(), threading.Event()

    def work():
        found["before"] = dtypes()
        with xmem.autocast("float16") as ac:
            inside.set()
            assert leave.wait(10)
            found["inside"] = (X @ X).dtype
            found["operations"] = ac.operations
        found["after"] = dtypes()

    with xmem.autocast("bfloat16") as ac:
        thread = threading.Thread(target=work)
        thread.start()
        assert inside.wait(10)
        assert (X @ X).dtype == torch.bfloat16
        leave.set()
        thread.join()
        assert (X @ X).dtype == torch.bfloat16
    assert ac.operations == {"matmul": {"bfloat16": 2}}
    assert found["operations"] == {"matmul": {"float16": 1}}
    assert found["inside"] == torch.float16
    assert found["before"] == found["after"] == PLAIN


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.block = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))
        self.last = nn.Linear(8, 8)

    def forward(self, x):
        return self.last(self.block(self.first(x)))


KEPT = {
    "module": lambda net: (net.block,),
    "path": lambda net: ("block",),
    "type": lambda net: (nn.Sequential,),
    "name of a type": lambda net: ("Sequential",),
}


@pytest.mark.parametrize("how", KEPT)
def test_a_module_that_is_kept_computes_in_float32_with_all_inside(backend, how):
    net = Net()
    seen = {}
    for name, module in net.named_modules():
        module.register_forward_hook(lambda m, i, o, name=name: seen.update({name: o.dtype}))
    with xmem.autocast("bfloat16", keep_fp32=KEPT[how](net), model=net) as ac:
        net(X)
    assert seen["block.0"] == seen["block.2"] == seen["block"] == torch.float32
    assert seen["first"] == seen["last"] == torch.bfloat16
    assert ac.operations["linear"] == {"bfloat16": 2, "float32": 2}
    assert all("forward" not in module.__dict__ for module in net.modules())


@pytest.mark.parametrize("where", ["outside", "inside", "in a thread"])
@pytest.mark.parametrize("layout", ["region", "every", 2])
@pytest.mark.parametrize("keep", [(), ("linear",), ("block",), ("after",)])
def test_a_recomputation_computes_as_the_first_pass_did(backend, where, layout, keep):
    """Backward is called outside the block, or inside it and inside another one."""
    found, logs = [], []
    for recomputed in (False, True):
        torch.manual_seed(0)
        net = nn.ModuleDict({"block": Net(), "after": Net()})
        if recomputed and layout != "region":
            xmem.apply_checkpointing(net, layout, blocks=[net["block"], net["after"]])
        calls = []
        layer = net["after"].first  # recomputation may stop before the last one
        layer.register_forward_hook(lambda m, i, o, c=calls: c.append(o.dtype))
        with xmem.autocast("bfloat16", keep_fp32=keep, model=net) as ac:
            x = X.clone().requires_grad_()
            if recomputed and layout == "region":
                y = xmem.checkpoint(lambda x, n=net: n["after"](n["block"](x)), x)
            else:
                y = net["after"](net["block"](x))
            loss = functional.softmax(y, -1).square().sum()
            if where == "inside":
                with xmem.autocast(enabled=False):
                    loss.backward()
        if where == "outside":
            loss.backward()
        elif where == "in a thread":
            thread = threading.Thread(target=loss.backward)
            thread.start()
            thread.join()
        assert len(set(calls)) == 1
        assert len(calls) == 1 + recomputed
        found.append([loss.detach(), x.grad, *(p.grad for p in net.parameters())])
        logs.append(ac.operations)
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert logs[0] == logs[1]


def test_a_region_from_outside_is_recomputed_in_float32_inside_a_block(backend):
    net, x = Net(), X.clone().requires_grad_()
    seen, found = [], []
    net.first.register_forward_hook(lambda m, i, o: seen.append(o.dtype))
    for run in (lambda f, x: f(x), xmem.checkpoint):
        loss = run(net, x).square().sum()
        with xmem.autocast("bfloat16") as ac:
            _ = X @ X
            found.append(torch.autograd.grad(loss, x)[0])
        assert ac.operations == {"matmul": {"bfloat16": 1}}
    assert seen == [torch.float32] * 3
    assert torch.equal(*found)


def test_blocks_that_wait_run_in_the_block_they_were_called_in(backend):
    """A segment's first block is read after the autocast block; no warning of nothing either."""
    net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    expected = functional.linear(half(X), half(net[0].weight), half(net[0].bias))
    xmem.apply_checkpointing(net, 2, blocks=list(net))
    with warnings.catch_warnings():
        warnings.simplefilter("error", xmem.XmemWarning)
        with xmem.autocast("bfloat16"):
            waiting = net[0](X)
    y = waiting + 0
    assert y.dtype == torch.bfloat16
    assert torch.equal(y, expected)


@pytest.mark.parametrize("what", ["nothing", "float32 only", "disabled inside", "half", "lstm"])
def test_a_block_that_computes_nothing_in_half_warns(backend, what):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with xmem.autocast("bfloat16"):
            if what == "float32 only":
                functional.softmax(X, -1)
            elif what == "disabled inside":
                with xmem.autocast(enabled=False):
                    _ = X @ X
            elif what == "half":
                _ = X @ X
            elif what == "lstm":
                nn.LSTM(8, 8)(X)
    said = [str(w.message) for w in caught if isinstance(w.message, xmem.XmemWarning)]
    assert bool(said) == (what not in ("half", "lstm")), said


def test_functions_of_functions_run_in_the_block(backend):
    """torch.func and vmap hand their own kinds of tensors to operations."""
    weight = torch.randn(8, 8)

    def loss(w):
        return functional.softmax(functional.linear(X, w), -1).square().sum()

    with xmem.autocast("bfloat16") as ac:
        gradient = torch.func.grad(loss)(weight)
        mapped = torch.vmap(lambda x: functional.linear(x, weight))(X)
    assert gradient.dtype == torch.float32
    assert mapped.dtype == torch.bfloat16
    assert ac.operations["linear"] == {"bfloat16": 2}


def test_weights_are_not_cached_in_half(backend):
    """The cast of a weight is freed at once; PyTorch's cache keeps it until the block ends."""
    layer = torch.nn.Linear(512, 512)
    x = torch.randn(2, 512)
    with torch.no_grad(), xmem.autocast():
        layer(x)
        before = backend.measure.counters().allocated_bytes
        layer(x)
        assert backend.measure.counters().allocated_bytes == before


def step_peak(model, loss_of, block, layout=None):
    """Return how far a step raises the peak above what is there before it, and its block."""
    if layout is not None:
        xmem.apply_checkpointing(model, layout)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for measured in (False, True):
        gc.collect()
        with xmem.measure(model=model, optimizer=optimizer) as m:
            with block() as ac:
                loss = loss_of(model)
            loss.backward()
            del loss
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        if measured:
            return m.peak_above_static_bytes, ac
    return None


def gpt():
    torch.manual_seed(0)
    return GPT(layers=8, dropout=0.0)


def language_loss(model):
    ids = torch.arange(8 * 128).reshape(8, 128) % 1000
    return functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())


BF16 = partial(xmem.autocast, "bfloat16")


def test_the_8_layer_gpt_keeps_at_most_0_7_of_float32_and_gradients_within_1_percent(backend):
    """notes/torch.md, section 7: 77.0 and 52.0 MiB, error 0.5 %."""
    plain, _ = step_peak(gpt(), language_loss, nullcontext)
    half, ac = step_peak(gpt(), language_loss, BF16)
    print(plain, half, ac.receipt)
    assert half <= 0.70 * plain, (half, plain)
    gradients = []
    for block in (nullcontext, BF16):
        model = gpt()
        with block():
            loss = language_loss(model)
        loss.backward()
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    error = (gradients[1] - gradients[0]).norm() / gradients[0].norm()
    assert error <= 0.01, error


def test_the_8_layer_gpt_in_half_and_in_regions_takes_at_most_17_mib(backend):
    peak, _ = step_peak(gpt(), language_loss, BF16, "every")
    assert peak <= 17 * 2**20, peak


def activations(model):
    x = torch.ones(4096, 64)
    return model(x).float().square().mean()


def weights(model):
    return model(torch.ones(4, 512)).float().square().mean()


def chain(layer, norm, activation=nn.GELU, depth=6):
    return nn.Sequential(*[nn.Sequential(layer(), norm(), activation()) for _ in range(depth)])


CASES = {
    "gpt": (gpt, language_loss, 1),
    "wide batch": (lambda: chain(lambda: nn.Linear(64, 64), nn.Identity), activations, 1),
    "heavy weights": (lambda: chain(lambda: nn.Linear(512, 512), nn.Identity), weights, -1),
    "batch norm": (
        lambda: chain(lambda: nn.Conv2d(16, 16, 3), lambda: nn.BatchNorm2d(16)),
        lambda model: model(torch.ones(16, 16, 32, 32)).float().square().mean(),
        1,
    ),
    "group norm": (
        lambda: chain(lambda: nn.Conv2d(16, 16, 3), lambda: nn.GroupNorm(4, 16), nn.ReLU),
        lambda model: model(torch.ones(16, 16, 32, 32)).float().square().mean(),
        -1,
    ),
    "encoder": (
        lambda: nn.Sequential(
            *[nn.TransformerEncoderLayer(64, 4, 256, 0.0, batch_first=True) for _ in range(4)]
        ),
        lambda model: model(torch.ones(8, 128, 64)).float().square().mean(),
        1,
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_the_receipt_says_rightly_whether_the_peak_falls_or_rises(backend, case):
    make, loss_of, sign = CASES[case]
    torch.manual_seed(0)
    plain, _ = step_peak(make(), loss_of, nullcontext)
    half, ac = step_peak(make(), loss_of, BF16)
    expected, measured = ac.receipt.expected_saving_bytes, plain - half
    print(case, expected, measured)
    assert expected * sign > 0, (expected, measured)
    assert measured * sign > 0, (expected, measured)
    assert ("raises" in ac.receipt.note) == (sign < 0)
    if case == "heavy weights":
        assert "It pays where activations are larger" in ac.receipt.note
        log = ac._log
        for size in (log.half_bytes, log.weight_bytes, log.float32_bytes):
            assert format_size(size) in ac.receipt.note


def test_the_receipt_of_the_gpt_is_what_is_measured(backend):
    plain, _ = step_peak(gpt(), language_loss, nullcontext)
    half, ac = step_peak(gpt(), language_loss, BF16)
    expected = ac.receipt.expected_saving_bytes
    assert expected == pytest.approx(plain - half, rel=0.01), (expected, plain - half)


def test_the_receipt_of_regions_counts_only_what_they_leave(backend):
    whole = step_peak(gpt(), language_loss, BF16)[1].receipt.expected_saving_bytes
    regions = step_peak(gpt(), language_loss, BF16, "every")[1].receipt.expected_saving_bytes
    assert abs(regions) < whole / 20, (regions, whole)


def test_bytes_are_counted_where_gradients_are_recorded(backend):
    layer = nn.Linear(8, 8)
    with torch.no_grad(), xmem.autocast("bfloat16") as ac:
        layer(X)
    assert ac.receipt.expected_saving_bytes == 0
    with xmem.autocast("bfloat16") as ac:
        layer(layer(X))
    # Left: a half copy of X and of one weight, and the first result, which is half.
    assert ac.receipt.expected_saving_bytes == 256 - (128 + 128 + 128)


COMPILER = "aot_eager_decomp_partition"


@pytest.fixture
def _fresh_compiler():
    import torch._dynamo

    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Norms(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, 32), nn.LayerNorm(32), nn.Linear(32, 8)

    def forward(self, x):
        return functional.softmax(self.last(functional.gelu(self.norm(self.first(x)))), -1)


@pytest.mark.usefixtures("_fresh_compiler")
@pytest.mark.parametrize("where", ["around", "inside"])
@pytest.mark.parametrize("keep", [(), ("gelu",)])
def test_a_compiled_model_computes_as_an_eager_one(backend, where, keep):
    """One graph, no warning of nothing in any of three blocks."""
    net = Norms()
    block = partial(xmem.autocast, "bfloat16", keep_fp32=keep)

    def inside(x):
        with block():
            return net(x)

    def step(run):
        net.zero_grad()
        with block() if where == "around" else nullcontext():
            y = run(X)
        y.square().sum().backward()
        return [y.detach(), *(p.grad.clone() for p in net.parameters())]

    expected = step(net if where == "around" else inside)
    run = torch.compile(net if where == "around" else inside, backend=COMPILER, fullgraph=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error", xmem.XmemWarning)
        for _ in range(3):
            found = step(run)
            for a, b in zip(found, expected, strict=True):
                assert a.dtype == b.dtype
                assert torch.allclose(a, b, rtol=1e-2, atol=1e-4)
