"""Recomputed regions on Jittor give the gradients of a plain call."""

import collections

import numpy as np
from chain import both, chain, error, gradients, learnt, normal, through, trained

import xmem


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


def test_the_loss_may_be_waited_for_before_backward(backend):
    net, x = chain(4, 32), normal(16, 32)
    found = []
    for checkpoint in (None, xmem.checkpoint):
        loss = (through(net, x, checkpoint) ** 2).mean()
        loss.sync()
        found.append(gradients(loss, trained(net)))
    assert error(found[1], found[0]) <= 1e-6


def test_what_one_region_does_not_reach_keeps_the_gradient_of_others(backend):
    """Jittor forgets a gradient when an operation returns None for one more share of it."""
    from jittor import nn

    shared, other, x = nn.Linear(8, 8), nn.Linear(8, 8), learnt(4, 8)

    def pair(x):
        return other(x), shared(x)

    def run(call):
        unread = call(pair, x)
        return gradients(
            (call(pair, unread[0])[1] ** 2).sum() + (call(shared, x) ** 2).sum(),
            [*trained(shared), *trained(other), x],
        )

    assert error(run(xmem.checkpoint), run(lambda f, v: f(v))) <= 1e-6
