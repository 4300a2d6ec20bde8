"""Autocast on Jittor: whom it acts on, what it keeps, and what it says of that."""

import gc
import threading

import numpy as np
import pytest
from chain import (
    chain,
    error,
    gradients,
    learnt,
    normal,
    peak_above_static_bytes,
    through,
    trained,
    transformer,
)

import xmem

quiet = pytest.mark.filterwarnings("ignore:autocast:xmem.XmemWarning")


def test_a_block_acts_in_the_thread_that_entered_it_only(backend):
    """Jittor itself is not made for threads, so they take turns."""
    from jittor import nn

    layer, x = nn.Linear(4, 4), normal(2, 4)
    original = nn.Linear.execute
    entered, looked = threading.Event(), threading.Event()
    dtypes = {}

    def inside():
        with xmem.autocast("float16"):
            entered.set()
            assert looked.wait(30)
            dtypes["inside"] = str(layer(x).dtype)

    thread = threading.Thread(target=inside)
    thread.start()
    assert entered.wait(30)
    assert nn.Linear.execute is not original
    dtypes["outside"] = str(layer(x).dtype)
    looked.set()
    thread.join()
    assert dtypes == {"inside": "float16", "outside": "float32"}
    assert nn.Linear.execute is original


def test_blocks_of_two_threads_may_overlap(backend):
    from jittor import nn

    original = nn.Linear.execute
    first, second = xmem.autocast(), xmem.autocast()
    layer, x = nn.Linear(4, 4), normal(2, 4)
    found = []
    with first:
        entered, left = threading.Event(), threading.Event()

        def overlapping():
            with second:
                entered.set()
                assert left.wait(30)
                found.append(str(layer(x).dtype))

        thread = threading.Thread(target=overlapping)
        thread.start()
        assert entered.wait(30)
        found.append(str(layer(x).dtype))
    found.append(str(layer(x).dtype))
    left.set()
    thread.join()
    assert found == ["float16", "float32", "float16"]
    assert nn.Linear.execute is original


def test_a_decorated_function_runs_in_half_each_time(backend):
    from jittor import nn

    layer, x = nn.Linear(4, 4), normal(2, 4)
    decorated = xmem.autocast("float16")(lambda x: layer(x))
    assert [str(f(x).dtype) for f in (decorated, layer, decorated)] == [
        "float16", "float32", "float16",
    ]  # fmt: skip


@quiet
def test_a_function_imported_by_name_beforehand_is_not_replaced(backend):
    from jittor.nn import relu

    with xmem.autocast() as block:
        assert str(relu(normal(2, 4).float16()).dtype) == "float16"
    assert block.operations == {}


def test_what_ran_is_listed_once_and_a_disabled_block_as_float32(backend):
    net, x = chain(3, 8), learnt(4, 8)
    with xmem.autocast() as block:
        y = through(net, x, xmem.checkpoint).float32()
        with xmem.autocast(enabled=False) as plain:
            through(net, x)
    gradients((y**2).sum(), trained(net))
    assert block.operations == {
        "gelu": {"float16": 3, "float32": 3}, "linear": {"float16": 3, "float32": 3},
    }  # fmt: skip
    assert plain.operations == {"gelu": {"float32": 3}, "linear": {"float32": 3}}


def test_what_several_operations_read_is_kept_once(backend):
    """A query, a key and a value made from one float32 input."""
    import jittor as jt
    from jittor import nn

    layers, x = [nn.Linear(256, 16) for _ in range(3)], learnt(4096, 256)
    peaks = []
    for count in (1, 3):

        def step(count=count):
            with xmem.autocast() as block:
                y = sum(layer(x).float32() for layer in layers[:count])
            step.block = block
            return jt.grad((y**2).sum(), trained(layers[0]), retain_graph=False)

        peaks.append(peak_above_static_bytes(backend.measure, step))
        size = 4096 * 256
        assert step.block.receipt.expected_saving_bytes == 4 * size - 2 * size
    assert peaks[1] - peaks[0] < size, peaks  # another half of x would be twice that


@pytest.mark.parametrize("why", ["no_grad", "nothing asks for gradients"])
def test_nothing_is_counted_where_nothing_is_kept(backend, why):
    import jittor as jt

    make = learnt if why == "no_grad" else normal
    a, b = make(8, 8), make(8, 8)
    with jt.flag_scope(no_grad=int(why == "no_grad")), xmem.autocast() as block:
        a @ b
    assert block.operations == {"matmul": {"float16": 1}}
    assert block.receipt.expected_saving_bytes == 0


@quiet
@pytest.mark.parametrize("name", ["attention", "matmul", "softmax", "linear", "gelu"])
def test_a_kept_operation_runs_in_float32(backend, name):
    """Attention that user code makes of matmul and softmax is these."""
    parts = {"attention": ("matmul", "softmax")}.get(name, (name,))
    net, x = transformer(depth=1, width=16, heads=2), learnt(2, 4, 16)
    with xmem.autocast(keep_fp32=(name,)) as block:
        y = net(x)
    y.sync()
    ran = block.operations
    for part in parts:
        assert set(ran[part]) == {"float32"}, ran
    computed = {"matmul", "linear"} - set(parts)  # the others follow
    assert all("float16" in ran[other] for other in computed), ran


@quiet
def test_kept_attention_keeps_its_projections(backend):
    import jittor as jt

    module, x = jt.attention.MultiheadAttention(8, 2), learnt(3, 5, 8)
    plain = module(x, x, x)[0].numpy()
    with xmem.autocast(keep_fp32=("attention",)) as block:
        found = module(x, x, x)[0]
    assert np.array_equal(found.numpy(), plain)
    assert {t for types in block.operations.values() for t in types} == {"float32"}


@pytest.mark.filterwarnings("ignore:a segment was cut short:xmem.XmemWarning")
@pytest.mark.parametrize("region", ["none", "checkpoint", "every", "all in one"])
@pytest.mark.parametrize("by", ["itself", "its type", "its type's name", "its path"])
def test_a_kept_module_is_kept_in_recomputation_too(backend, by, region):
    from jittor import nn

    seen = []

    class Kept(nn.Module):
        def __init__(self):
            self.linear = nn.Linear(8, 8)

        def execute(self, x):
            y = self.linear(x)
            seen.append((str(x.dtype), str(y.dtype)))
            return y

    net, x = nn.Sequential(nn.Linear(8, 8), Kept(), nn.Linear(8, 8)), learnt(4, 8)
    named = {"itself": net[1], "its type": Kept, "its type's name": "Kept", "its path": "1"}[by]
    call = net
    if region == "checkpoint":
        call = lambda x: through(net, x, xmem.checkpoint)  # noqa: E731
    elif region != "none":
        layout = "every" if region == "every" else 1
        xmem.apply_checkpointing(net, layout, blocks=[net[i] for i in range(3)])
    with xmem.autocast(keep_fp32=(named,), model=net) as block:
        y = call(x)
    gradients((y.float32() ** 2).sum(), [*trained(net), x])
    assert seen == [("float32", "float32")] * (1 if region == "none" else 2)
    assert block.operations["linear"] == {"float16": 2, "float32": 1}
    assert ("execute" in vars(net[1])) == (region in ("every", "all in one"))


def test_raising_is_part_of_the_graph(backend):
    x = learnt(3, 4)
    half = x.float16()
    raised = backend.precision.raised(half)
    assert str(raised.dtype) == "float32"
    [gradient] = gradients((raised * 2).sum(), [x])
    assert np.array_equal(gradient, np.full((3, 4), 2, np.float32))
    assert backend.precision.raised(x) is x
    assert backend.precision.raised("text") == "text"


def test_small_gradients_do_not_vanish_on_a_cpu(backend):
    """1e-9 is below what float16 holds; gradients are float32, so no loss scale is needed."""
    from jittor import nn

    net, x = nn.Sequential(*chain(2, 16), nn.LayerNorm(16), nn.Linear(16, 16)), normal(32, 16)
    found = []
    for half in (False, True):
        with xmem.autocast(enabled=half):
            loss = nn.mse_loss(net(x), x) * 1e-9
        found.append([g * 1e9 for g in gradients(loss, trained(net))])
    assert error(found[1], found[0]) <= 1e-2


def both_peaks(backend, step):
    """Return the peaks in float32 and in half."""
    peaks = []
    for half in (False, True):
        for _ in range(2):
            peak = peak_above_static_bytes(backend.measure, lambda h=half: step(h))
        peaks.append(peak)
    return peaks


@quiet
@pytest.mark.parametrize("kind", ["mlp", "transformer", "large weights"])
def test_its_receipt_has_the_sign_of_what_is_measured(backend, kind):
    """Weights are used as they are on a CPU, so where they are large the peak does not rise."""
    import jittor as jt

    net, x = {
        "mlp": lambda: (chain(6, 128), normal(2048, 128)),
        "transformer": lambda: (transformer(depth=2, width=64), normal(8, 64, 64)),
        "large weights": lambda: (chain(3, 1024), normal(8, 1024)),
    }[kind]()
    blocks = []

    def step(half):
        with xmem.autocast(enabled=half) as block:
            loss = (through(net, x).float32() ** 2).sum()
        blocks.append(block)
        return jt.grad(loss, trained(net), retain_graph=False)

    peaks = both_peaks(backend, step)
    receipt = blocks[-1].receipt
    expected = receipt.expected_saving_bytes
    print(f"{kind}: {peaks[0]} bytes in float32, {peaks[1]} in half, expected {expected} less")
    assert expected > 0
    assert "linear" in receipt.names
    if kind == "large weights":
        # Its activations are 0.5 % of the peak; what is saved of them is lost in scratch.
        assert abs(peaks[1] - peaks[0]) <= 0.005 * peaks[0], peaks
    else:
        saved = peaks[0] - peaks[1]
        assert 0.5 * expected <= saved <= 1.3 * expected, (saved, expected)


@quiet
@pytest.mark.parametrize("normalised", [False, True])
def test_an_mlp_of_twelve_layers_takes_less(backend, normalised):
    """12 x (Linear(256), GELU), batch 4096; a whole step with Adam.

    With LayerNorm less is saved: in float32 Jittor fuses it with GELU and computes both again.
    """
    import jittor as jt
    from jittor import nn

    net = nn.Sequential(
        *[
            nn.Sequential(*[nn.LayerNorm(256)] * normalised, nn.Linear(256, 256), nn.GELU())
            for _ in range(12)
        ]
    )
    x = normal(4096, 256)
    optimizer = jt.optim.Adam(trained(net), 1e-3)

    def step(half):
        with xmem.autocast(enabled=half):
            loss = nn.mse_loss(net(x), x)
        optimizer.step(loss)
        optimizer.zero_grad()

    plain, half = both_peaks(backend, step)
    print(f"{plain} bytes in float32, {half} in half: {half / plain:.3f}")
    assert half <= (0.82 if normalised else 0.68) * plain, (plain, half)


@pytest.mark.parametrize("name", ["bert", "gpt2", "resnet18"])
def test_activations_of_a_workload_take_a_quarter_less(backend, name):
    """Bytes of category "activation" at the peak of a whole step; gradients of the first step."""
    import jittor as jt

    from xmem.conformance.worker import CaseRun
    from xmem.report.model import Case

    found = {}
    for technique in ("baseline", "autocast"):
        run = CaseRun(Case(workload=name, technique=technique, backend="jittor"), backend)
        loss = run.backward()
        wanted = backend.training.gradients(run.model, run.optimizer)
        run.finish()
        del loss
        run.measured_step()
        measured, loss = run.measured_step()
        found[technique] = measured, wanted
        del run, loss
        gc.collect()
        jt.sync_all(True)
    (plain, expected), (half, gradient) = found["baseline"], found["autocast"]
    kept, before = half.by_category["activation"], plain.by_category["activation"]
    joined = [np.concatenate([g[n].ravel() for n in expected]) for g in (gradient, expected)]
    wrong = error(joined[:1], joined[1:])
    print(f"{name}: {kept} bytes of activations, {before} in float32; gradients off by {wrong:.2e}")
    assert kept <= 0.75 * before, (kept, before)
    assert half.peak_above_static_bytes < plain.peak_above_static_bytes
    assert wrong <= 1e-2


@pytest.mark.parametrize("held", [False, True], ids=["dropped", "held"])
def test_a_block_around_a_whole_loop_counts_the_most_that_was_kept(backend, held):
    from xmem_jittor import ledger

    net, x = chain(3, 8), normal(4, 8)
    seen, losses = [], []
    with xmem.autocast() as block:
        for _ in range(6):
            loss = (net(x).float32() ** 2).sum()
            if held:
                losses.append(loss)
            else:
                gradients(loss, trained(net))
                del loss
            entries = sum(len(kept.kept) for kept in ledger._ledgers.values())
            seen.append((entries, block.receipt.expected_saving_bytes))
    once = seen[0][1]
    assert once > 0
    if held:
        assert seen[-1][1] > 5 * once, seen
    else:
        assert seen == [(0, once)] * 6
        assert block.operations["linear"] == {"float16": 18}


def test_a_block_inside_another_counts_what_it_keeps_itself(backend):
    net, x = chain(3, 8), normal(4, 8)
    found = []
    with xmem.autocast() as outer:
        for _ in range(3):
            with xmem.autocast() as block:
                loss = (net(x).float32() ** 2).sum()
            gradients(loss, trained(net))
            del loss
            found.append(block.receipt.expected_saving_bytes)
    assert found == [outer.receipt.expected_saving_bytes] * 3


@quiet
@pytest.mark.parametrize("masters", [True, False])
def test_a_kept_module_of_a_cast_model_computes_in_float32(backend, masters):
    import jittor as jt

    net, x = chain(3, 8), normal(4, 8)
    plain = net[1](x).numpy()
    optimizer = jt.optim.SGD(trained(net), 1e-2) if masters else None
    xmem.cast_model(net, "float16", optimizer=optimizer)
    seen = []
    net[1].register_forward_hook(lambda module, args, output: seen.append(str(output.dtype)))
    with xmem.autocast(keep_fp32=(net[1],)) as block:
        y = net(x)
    found = gradients((y.float32() ** 2).sum(), trained(net))
    assert seen == ["float32"]
    assert block.operations["linear"] == {"float16": 2, "float32": 1}
    assert all(np.isfinite(g).all() and g.any() for g in found)
    with xmem.autocast(enabled=False):
        assert np.abs(net[1](x).numpy() - plain).max() <= 2**-9 * np.abs(plain).max()
