"""A recomputation that cannot be right says so, as an error of xmem."""

from collections import deque

import numpy as np
import pytest
from chain import both, gradients, learnt

import xmem


def test_a_second_backward_through_a_region_says_why_it_cannot(backend):
    import jittor as jt

    x = learnt(4)
    loss = xmem.checkpoint(lambda x: x**3, x).sum()
    jt.grad(loss, [x], retain_graph=True)
    with pytest.raises(xmem.CompositionError, match="twice"):
        jt.grad(loss, [x], retain_graph=True)


def changing(kind):
    """Return a function whose second call does something else."""
    import jittor as jt

    calls = []

    def function(x):
        calls.append(1)
        second = len(calls) == 2
        if kind == "more draws":
            return x * jt.rand(4) * (jt.rand(4) if second else 1)
        if kind == "fewer draws":
            return x * (1 if second else jt.rand(4))
        if kind == "shape":
            return x[:2] if second else x * 2
        if kind == "dtype":
            return (x * 2).float16() if second else x * 2
        if kind == "number":
            return (x * 2, x) if second else (x * 2,)
        if kind == "integers":
            return x * 2, jt.zeros((3 if second else 2,), dtype="int32")
        return x * (3 if second else 2)

    return function


@pytest.mark.parametrize(
    ("kind", "said", "cause"),
    [
        ("more draws", "more random tensors than the 1", "randomness"),
        ("fewer draws", "draws 0 random tensors, the first pass 1", "randomness"),
        ("shape", r"output 0 was \(4,\) float32 and is \(2,\) float32", "cache"),
        ("dtype", r"was \(4,\) float32 and is \(4,\) float16", "autocast"),
        ("number", "returns 2 tensors, the first pass 1", "cache"),
        ("integers", r"output 1 was \(2,\) int32 and is \(3,\) int32", "cache"),
    ],
)
def test_a_second_pass_that_differs_is_told_with_its_likely_cause(backend, kind, said, cause):
    import jittor as jt

    x, function = learnt(4), changing(kind)
    y = xmem.checkpoint(function, x)
    y = y if isinstance(y, jt.Var) else y[0]
    with pytest.raises(xmem.RecomputeMismatchError, match=said) as caught:
        jt.grad(y.sum(), [x], retain_graph=False)
    assert caught.value.cause == cause
    assert caught.value.module == "changing.<locals>.function"


def test_other_values_are_told_only_where_they_are_compared(backend):
    x = learnt(4)
    [found] = gradients(xmem.checkpoint(changing("values"), x).sum(), [x])
    assert np.allclose(found, 3)  # silently that of the second pass
    y = xmem.checkpoint(changing("values"), x, check_values=True)
    with pytest.raises(xmem.RecomputeMismatchError, match="has other values"):
        gradients(y.sum(), [x])


def test_comparing_values_finds_no_fault_with_what_is_right(backend):
    from jittor import nn

    net = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Dropout(0.5, is_train=True))
    x = learnt(256, 64)
    y = xmem.checkpoint(net, x, check_values=True)
    assert np.abs(gradients((y**2).sum(), [x])[0]).max() > 0


def test_numbers_that_are_not_replayed_are_named_as_the_cause(backend):
    import jittor as jt

    x = learnt(64)
    y = xmem.checkpoint(lambda x: x * jt.rand(64), x, preserve_rng=False, check_values=True)
    with pytest.raises(xmem.RecomputeMismatchError) as caught:
        gradients(y.sum(), [x])
    assert caught.value.cause == "randomness"


def test_a_block_is_called_by_its_path(backend):
    from jittor import nn

    class Odd(nn.Module):
        def __init__(self):
            self.inner, self.seen = nn.Linear(4, 4), []

        def execute(self, x):
            self.seen.append(1)
            return self.inner(x)[: 3 - len(self.seen)]

    net, x = nn.Sequential(Odd(), Odd()), learnt(4, 4)
    xmem.apply_checkpointing(net, "every")
    with pytest.raises(xmem.RecomputeMismatchError, match="recomputation of '1' differs"):
        gradients(net(x).sum(), [x])


def test_after_an_error_in_backward_the_next_step_is_right(backend):
    from jittor import nn

    layer, x = nn.Linear(4, 4), learnt(4, 4)
    plain = gradients((layer(x) ** 2).sum(), [x])[0]
    other = learnt(4)
    with pytest.raises(xmem.RecomputeMismatchError):
        gradients(xmem.checkpoint(changing("shape"), other).sum(), [other])
    [found] = gradients((xmem.checkpoint(layer, x) ** 2).sum(), [x])
    assert np.allclose(found, plain, rtol=1e-6)


def test_after_a_refusal_the_next_call_is_right(backend):
    kept, x = [], learnt(4)

    def function(x, keep):
        y = x.tanh()
        if keep:
            kept.append(y)
        return y

    with pytest.raises(xmem.CompositionError, match="'s variable kept"):
        xmem.checkpoint(function, x, keep=True)
    plain, ours = both(function, x, targets=[x], keep=False)
    assert np.allclose(plain[0], ours[0], rtol=1e-6)


@pytest.mark.parametrize("second", ["input", "inside", "before", "after"])
@pytest.mark.parametrize("first", ["input", "inside"])
def test_second_derivatives_are_refused(backend, first, second):
    """Also with respect to what only the incoming gradient depends on."""
    import jittor as jt
    from jittor import nn

    x = learnt(4, 8)
    before, inside, after = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
    found = {"input": x, "inside": inside.weight, "before": before.weight, "after": after.weight}

    def penalty(call):
        y = after(call(lambda v: jt.sin(inside(v)), before(x)))
        [g] = jt.grad((y**2).sum(), [found[first]], retain_graph=True)
        return jt.grad((g**2).sum(), [found[second]], retain_graph=True)[0]

    assert np.abs(penalty(lambda f, v: f(v)).numpy()).max() > 0
    with pytest.raises(xmem.CompositionError, match="second derivatives"):
        penalty(xmem.checkpoint)


def test_second_derivatives_through_several_regions_are_refused(backend):
    import jittor as jt
    from jittor import nn

    net, x = nn.Sequential(*[nn.Sequential(nn.Linear(4, 4)) for _ in range(4)]), learnt(4, 4)
    xmem.apply_checkpointing(net, 2)
    [g] = jt.grad((net(x) ** 3).sum(), [x], retain_graph=True)
    for target in (x, net[0][0].weight, net[3][0].weight):
        for _ in range(2):
            with pytest.raises(xmem.CompositionError, match="second derivatives"):
                jt.grad((g**2).sum(), [target], retain_graph=True)


def test_gradients_may_be_used_and_updated_with(backend):
    """The refusal of second derivatives does not stand in the way of first ones."""
    import jittor as jt

    x = learnt(4)
    [g] = jt.grad(xmem.checkpoint(lambda v: v**2, x).sum(), [x])
    unrelated = learnt(4)
    [found] = gradients((g * unrelated).sum(), [unrelated])
    assert np.allclose(found, 2 * x.numpy(), rtol=1e-6)
    x.update(x - 0.5 * g)
    assert not x.numpy().any()


@pytest.mark.parametrize("with_tensor", [False, True])
def test_a_list_that_a_region_fills_is_refused(backend, with_tensor):
    """What it appended in the first pass would carry no gradient, or be lost with a copy."""
    import jittor as jt

    x, kept = jt.ones((2, 3)), [jt.ones(1)] if with_tensor else []

    def function(x, kept):
        kept.append(x.sum())
        return x * 2

    with pytest.raises(xmem.CompositionError, match="changes a list"):
        xmem.checkpoint(function, x, kept)


@pytest.mark.parametrize("given", ["position", "keyword"])
def test_a_deque_that_a_region_fills_with_a_tensor_is_refused(backend, given):
    def function(x, kept):
        kept.append(x * 2)
        return x * 3

    args, kwargs = ([deque()], {}) if given == "position" else ([], {"kept": deque()})
    with pytest.raises(xmem.CompositionError, match="in an argument"):
        xmem.checkpoint(function, learnt(4), *args, **kwargs)


def test_a_tensor_that_a_region_keeps_in_an_attribute_is_warned_of_once(backend, recwarn):
    import jittor as jt

    class Aside(jt.Module):
        def __init__(self):
            super().__init__()
            self.layer = jt.nn.Linear(3, 3)
            self.norm = jt.nn.BatchNorm1d(3)

        def execute(self, x):
            hidden = self.norm(self.layer(x))
            self.penalty = (hidden * hidden).mean()
            return hidden

    module = Aside()
    for _ in range(3):
        xmem.checkpoint(module, jt.ones((2, 3)))
    told = [str(w.message) for w in recwarn if issubclass(w.category, xmem.XmemWarning)]
    assert len(told) == 1
    assert "Aside.penalty" in told[0]
