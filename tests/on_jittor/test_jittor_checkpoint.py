"""Recomputed regions on Jittor: the same gradients, less memory, no side effects."""

import collections
import copy
import functools

import numpy as np
import pytest
from chain import MIB, chain, error, gradients, normal, peak_above_static_bytes, through, trained

import xmem


def both(function, *inputs, targets, reduce=None, **options):
    """Return gradients without and with a region."""
    found = []
    for call in (function, functools.partial(xmem.checkpoint, function)):
        y = call(*inputs, **options)
        loss = (reduce or (lambda y: (y**2).sum()))(y)
        found.append(gradients(loss, targets))
    return found


def learnt(*shape):
    import jittor as jt

    return jt.array(np.random.randn(*shape).astype(np.float32))


def test_the_standard_chain_keeps_inputs_only(backend):
    import jittor as jt

    net, x = chain(), normal(4096, 256)
    targets = trained(net)

    def step(checkpoint):
        loss = (through(net, x, checkpoint) ** 2).mean()
        return jt.grad(loss, targets, retain_graph=False)

    found, peaks = {}, {}
    for name, checkpoint in (("plain", None), ("checkpointed", xmem.checkpoint)):
        peaks[name] = [
            peak_above_static_bytes(backend.measure, lambda c=checkpoint: step(c)) for _ in range(3)
        ]
        found[name] = [g.numpy() for g in step(checkpoint)]
    shown = {name: [bytes_ / MIB for bytes_ in of] for name, of in peaks.items()}
    assert len(set(peaks["plain"])) == len(set(peaks["checkpointed"])) == 1, shown
    assert shown["plain"][0] == pytest.approx(192.25, abs=0.5), shown
    assert shown["checkpointed"][0] <= 105, shown
    assert error(found["checkpointed"], found["plain"]) <= 1e-6


def test_a_module_and_its_method_give_the_gradients_of_a_plain_call(backend):
    from jittor import nn

    net, x = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4)), learnt(5, 8)
    for function in (net, net.execute):
        plain, again = both(function, x, targets=[*trained(net), x])
        assert error(again, plain) <= 1e-6


def test_several_outputs_of_which_one_is_not_read(backend):
    from jittor import nn

    first, second, x = nn.Linear(8, 8), nn.Linear(8, 8), learnt(4, 8)

    def pair(x, factor):
        hidden = nn.gelu(first(x))
        return hidden, second(hidden) * factor

    targets = [*trained(first), *trained(second), x]
    for reduce in (
        lambda y: (y[0] ** 2).sum() + (y[1] ** 3).sum(),
        lambda y: (y[1] ** 2).sum(),
    ):
        plain, again = both(pair, x, 2.0, targets=targets, reduce=reduce)
        assert error(again, plain) <= 1e-6


def test_what_is_not_reached_gets_no_gradient(backend):
    from jittor import nn

    first, second, x = nn.Linear(8, 8), nn.Linear(8, 8), learnt(4, 8)

    def pair(x):
        return first(x), second(x)

    plain, again = both(
        pair, x, targets=[*trained(first), *trained(second)], reduce=lambda y: (y[0] ** 2).sum()
    )
    assert error(again[:2], plain[:2]) <= 1e-6
    assert not again[2].any()
    assert not again[3].any()


def test_a_region_in_a_region(backend):
    from jittor import nn

    layer, x = nn.Linear(8, 8), learnt(4, 8)

    def once(x):
        return nn.gelu(layer(x))

    def twice(x):
        return xmem.checkpoint(once, xmem.checkpoint(once, x))

    plain, again = both(lambda x: once(once(x)), x, targets=[*trained(layer), x])
    nested = both(twice, x, targets=[*trained(layer), x])
    assert error(again, plain) <= 1e-6
    assert error(nested[0], plain) <= 1e-6
    assert error(nested[1], plain) <= 1e-6


def test_a_tensor_of_the_closure_gets_its_gradient(backend):
    scale, x = learnt(8), learnt(4, 8)
    plain, again = both(lambda x: (x * scale).exp(), x, targets=[scale, x])
    assert error(again, plain) <= 1e-6
    assert np.abs(again[0]).max() > 0


def test_a_tensor_that_two_handles_hold_gets_its_gradient_once(backend):
    import jittor as jt

    scale, x = learnt(8), learnt(4, 8)
    same = jt.wrap_var_addr(scale.var_ptr)
    plain, again = both(lambda x: x * scale + same, x, targets=[scale, x])
    assert error(again, plain) <= 1e-6


def test_integers_and_constants_are_inputs_too(backend):
    import jittor as jt
    from jittor import nn

    embedding, ids = nn.Embedding(10, 8), jt.array(np.arange(6, dtype=np.int32) % 10)
    mask = normal(6, 8)
    plain, again = both(
        lambda ids, mask: embedding(ids) * mask, ids, mask, targets=[embedding.weight]
    )
    assert error(again, plain) <= 1e-6


def test_containers_and_keywords_come_through(backend):
    pair = collections.namedtuple("pair", "left right")
    x, y, z = learnt(4), learnt(4), learnt(4)

    def mix(batch, *, extra, power):
        total = batch["x"] * batch["both"][0] + extra.left**power
        return {"sum": total, "parts": [batch["x"] * 2, "text"], "pair": pair(total, None)}

    def reduce(y):
        assert y["parts"][1] == "text"
        assert isinstance(y["pair"], pair)
        assert y["pair"].right is None
        return y["sum"].sum() + (y["parts"][0] ** 2).sum() + y["pair"].left.sum()

    plain, again = both(
        mix, {"x": x, "both": (y, 1)}, targets=[x, y, z], reduce=reduce, extra=pair(z, 0), power=3
    )
    assert error(again, plain) <= 1e-6


def test_an_input_that_is_passed_on_keeps_its_gradient(backend):
    x, scale = learnt(4), learnt(4)
    for function in (lambda x: (x, x * scale), lambda x: (scale, x * scale)):
        plain, again = both(
            function, x, targets=[x, scale], reduce=lambda y: (y[0] ** 2).sum() + y[1].sum()
        )
        assert error(again, plain) <= 1e-6
    assert not scale.is_stop_grad()
    assert not x.is_stop_grad()


def test_without_gradients_it_is_a_plain_call(backend):
    import jittor as jt

    calls = []

    def function(x):
        calls.append(1)
        return x * 2

    with jt.no_grad():
        y = xmem.checkpoint(function, normal(4))
    assert y.is_stop_grad()
    assert len(calls) == 1


@pytest.mark.parametrize("kind", ["dropout", "uniform", "normal"])
def test_random_numbers_are_drawn_again_the_same(backend, kind):
    import jittor as jt
    from jittor import nn

    x, dropout = learnt(64, 32), nn.Dropout(0.5, is_train=True)
    noise = {
        "dropout": lambda x: dropout(x),
        "uniform": lambda x: x * jt.rand(64, 32),
        "normal": lambda x: x * jt.randn(64, 32),
    }[kind]
    y = xmem.checkpoint(noise, x)
    factor = y.numpy() / x.numpy()
    [found] = gradients(y.sum(), [x])
    # y = x * factor, so the gradient of the sum is the factor that was drawn.
    assert np.allclose(found, factor, rtol=1e-4, atol=1e-6)
    assert factor.std() > 0.1


def test_random_numbers_of_a_nested_region_are_drawn_again_the_same(backend):
    from jittor import nn

    x, dropout = learnt(64, 32), nn.Dropout(0.5, is_train=True)

    def inner(x):
        return dropout(x)

    def outer(x):
        return dropout(xmem.checkpoint(inner, dropout(x)))

    y = xmem.checkpoint(outer, x)
    [found] = gradients(y.sum(), [x])
    assert np.allclose(found, y.numpy() / x.numpy(), rtol=1e-4)


def test_replayed_numbers_are_random(backend):
    import jittor as jt
    from xmem_jittor import replay

    with replay.recorded() as seeds:
        uniform, normal_ = jt.rand(1000, 1000), jt.randn(1000, 1000)
    u, z = uniform.numpy(), normal_.numpy()
    assert len(seeds) == 3
    assert u.min() >= 0
    assert u.max() < 1
    assert u.mean() == pytest.approx(0.5, abs=2e-3)
    assert u.std() == pytest.approx(12**-0.5, abs=2e-3)
    assert abs(np.corrcoef(u[:-1].ravel(), u[1:].ravel())[0, 1]) < 5e-3
    assert z.mean() == pytest.approx(0, abs=5e-3)
    assert z.std() == pytest.approx(1, abs=5e-3)
    assert (z**4).mean() == pytest.approx(3, abs=0.05)


def test_the_seed_fixes_what_regions_draw(backend):
    import jittor as jt

    found = []
    for _ in range(2):
        jt.set_global_seed(5)
        found.append(xmem.checkpoint(lambda x: x * jt.rand(16), learnt(16) * 0 + 1).numpy())
    assert np.array_equal(*found)


def test_jittors_random_is_its_own_outside_of_regions(backend):
    import jittor as jt

    original = jt.random
    with pytest.raises(KeyError):
        xmem.checkpoint(lambda x: {}["missing"], normal(4))
    xmem.checkpoint(lambda x: x * jt.rand(4), learnt(4)).sync()
    assert jt.random is original


@pytest.mark.parametrize("named", ["module", "closure"])
def test_running_statistics_are_updated_once(backend, named):
    from jittor import nn

    x = learnt(32, 8)
    found = []
    for wrap in (False, True):
        norm = nn.BatchNorm1d(8)
        function = norm if named == "module" else (lambda x, norm=norm: norm(x) * 2)
        y = xmem.checkpoint(function, x) if wrap else function(x)
        found.append([*gradients((y**3).sum(), trained(norm)), norm.running_mean.numpy()])
        found[-1].append(norm.running_var.numpy())
    assert np.abs(found[0][2]).max() > 0
    assert error(found[1], found[0]) <= 1e-6


@pytest.mark.parametrize("named", ["module", "closure"])
def test_a_parameter_that_is_updated_in_between_is_recomputed_as_it_was(backend, named):
    import jittor as jt
    from jittor import nn

    layer, x = nn.Linear(8, 8), learnt(4, 8)
    function = layer if named == "module" else (lambda x: layer(x))
    start = layer.weight.numpy()
    found = []
    for call in (function, functools.partial(xmem.checkpoint, function)):
        layer.weight.assign(jt.array(start))
        y = call(x)
        layer.weight.update(layer.weight * 0 + 1)
        found += gradients((y**2).sum(), [x])
    assert error([found[1]], [found[0]]) <= 1e-6


def test_a_value_that_is_waited_for_inside_does_not_lose_gradients(backend):
    from jittor import nn

    layer, x = nn.Linear(8, 8), learnt(4, 8)

    def nosy(x):
        y = layer(x)
        y.sync()
        return nn.gelu(y) * (1 if y.sum().item() < 1e9 else 2)

    plain, again = both(nosy, x, targets=[*trained(layer), x])
    assert error(again, plain) <= 1e-6
    assert np.abs(again[0]).max() > 0


def test_without_lazy_execution_gradients_are_right_too(backend):
    import jittor as jt
    from jittor import nn

    net, x = nn.Sequential(nn.Linear(8, 8), nn.GELU()), learnt(4, 8)
    with jt.flag_scope(lazy_execution=0):
        plain, again = both(net, x, targets=[*trained(net), x])
    assert error(again, plain) <= 1e-6
    assert np.abs(again[0]).max() > 0


def test_the_loss_may_be_waited_for_before_backward(backend):
    net, x = chain(4, 32), normal(16, 32)
    found = []
    for checkpoint in (None, xmem.checkpoint):
        loss = (through(net, x, checkpoint) ** 2).mean()
        loss.sync()
        found.append(gradients(loss, trained(net)))
    assert error(found[1], found[0]) <= 1e-6


def test_training_goes_the_same_way_with_an_optimizer(backend):
    import jittor as jt

    start = [p.numpy() for p in chain(4, 32).parameters()]
    x = normal(64, 32)
    found = []
    for checkpoint in (None, xmem.checkpoint):
        net = chain(4, 32)
        for p, value in zip(net.parameters(), start, strict=True):
            p.assign(jt.array(value))
        optimizer = jt.optim.Adam(trained(net), 1e-3)
        for _ in range(5):
            optimizer.step(((through(net, x, checkpoint) - x) ** 2).mean())
        found.append([p.numpy() for p in trained(net)])
    assert error(found[1], found[0]) <= 1e-6


def test_a_second_backward_through_a_region_says_why_it_cannot(backend):
    import jittor as jt

    x = learnt(4)
    loss = xmem.checkpoint(lambda x: x**3, x).sum()
    jt.grad(loss, [x], retain_graph=True)
    with pytest.raises(Exception) as caught:  # noqa: PT011  Jittor makes it a RuntimeError
        jt.grad(loss, [x], retain_graph=True)
    assert "twice" in _whole(caught.value)


def test_a_region_that_draws_more_the_second_time_is_told(backend):
    import jittor as jt

    x, counter = learnt(4), []

    def unsteady(x):
        counter.append(1)
        return functools.reduce(lambda y, _: y * jt.rand(4), counter, x)

    loss = xmem.checkpoint(unsteady, x).sum()
    with pytest.raises(Exception) as caught:  # noqa: PT011
        jt.grad(loss, [x], retain_graph=False)
    assert "draws more random tensors" in _whole(caught.value)


def _whole(error):
    parts = []
    while error is not None:
        parts.append(str(error))
        error = error.__cause__ or error.__context__
    return "\n".join(parts)


def test_the_autocast_of_forward_is_entered_again_in_backward(backend):
    import jittor as jt
    from jittor import nn

    seen = []

    class Spy(nn.Linear):
        def execute(self, x):
            y = super().execute(x)
            seen.append(str(y.dtype))
            return y

    layer, x = Spy(16, 16), normal(4, 16)
    with xmem.autocast("float16"):
        y = xmem.checkpoint(layer, x).float32()
    jt.sync(jt.grad((y**2).sum(), trained(layer), retain_graph=False), True)
    assert seen == ["float16", "float16"]


def test_a_replaced_forward_is_undone(backend):
    from jittor import nn

    layer, x = nn.Linear(4, 4), normal(2, 4)
    expected = layer(x).numpy()
    calls = []

    def counting(forward):
        def run(*args):
            calls.append(1)
            return forward(*args)

        return run

    undo_first = backend.checkpoint.replace_forward(layer, counting)
    undo_second = backend.checkpoint.replace_forward(layer, counting)
    assert np.array_equal(layer(x).numpy(), expected)
    assert len(calls) == 2
    undo_second()
    layer(x)
    assert len(calls) == 3
    undo_first()
    layer(x)
    assert len(calls) == 3
    assert "execute" not in layer.__dict__
    assert sorted(name for name, _ in layer.named_parameters()) == ["bias", "weight"]


def test_children_and_containers(backend):
    from jittor import nn

    net = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.ReLU()))
    assert [name for name, _ in backend.checkpoint.children(net)] == ["0", "1"]
    assert backend.checkpoint.is_container(net)
    assert not backend.checkpoint.is_container(net[0])
    assert list(backend.checkpoint.children(net[0])) == []


def test_a_copy_of_a_checkpointed_model_runs_its_own_blocks(backend):
    import jittor as jt
    from jittor import nn

    model = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(3)])
    xmem.apply_checkpointing(model, "every")
    x = jt.randn(4, 8)
    copied = copy.deepcopy(model)
    np.testing.assert_array_equal(copied(x).numpy(), model(x).numpy())
    for p in copied.parameters():
        p.update(jt.zeros_like(p))
    assert not copied(x).numpy().any()
    assert model(x).numpy().any()


def test_what_is_checkpointed_already_is_refused_and_nothing_changes(backend):
    from jittor import nn

    model = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(3)])
    receipt = xmem.apply_checkpointing(model, "every", blocks=[model[1]])
    with pytest.raises(xmem.CompositionError, match="checkpointed already"):
        xmem.apply_checkpointing(model, "every", blocks=[model[0], model[1]])
    assert "execute" not in model[0].__dict__
    with pytest.raises(xmem.UsageError, match="is no module"):
        xmem.apply_checkpointing(model, "every", blocks=[model[0], "x"])
    assert "execute" not in model[0].__dict__
    receipt.undo()
    assert "execute" not in model[1].__dict__
