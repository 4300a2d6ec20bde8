"""What a region puts elsewhere than into its result: refused, warned of, or as without a region."""

from collections import defaultdict, deque

import numpy as np
import pytest
from chain import both, gradients, learnt

import xmem

KEPT = []
LAST = None


def put_globally(value):
    KEPT.append(value)


class Keeper:
    def __init__(self):
        self.items = []


def keeping(place, tensor):
    """Return a function of x that computes y and puts `tensor(x, y)` somewhere; it returns y."""
    import jittor as jt

    kept, named, nested, recent = [], {}, {"a": ([], None)}, deque(maxlen=2)
    grouped, keeper, state = defaultdict(list), Keeper(), [jt.zeros(4).stop_grad()]
    made = {}

    def put(x, y, kept_by_default=[]):  # noqa: B006  on purpose
        value = tensor(x, y)
        if place == "default":
            kept_by_default.append(value)
        elif place == "global":
            KEPT.append(value)
        elif place == "helper":
            put_globally(value)
        elif place == "object":
            keeper.items.append(value)
        elif place == "list":
            kept.append(value)
        elif place == "dict":
            named["y"] = value
        elif place == "nested":
            nested["a"][0].append([value])
        elif place == "deque":
            recent.append((value, 1))
        elif place == "dict of lists":
            grouped["y"].append(value)
        elif place == "new list":
            made["y"] = [value]
        elif place == "state":
            state[0] = value

    class Block(jt.Module):
        def __init__(self):
            super().__init__()
            self.cache = []

        def execute(self, x):
            y = (x * x).tanh()
            if place == "module":
                self.cache.append(tensor(x, y))
            elif place == "new list of a module":
                self.seen = [tensor(x, y)]
            elif place == "tuple of a module":
                self.seen = (tensor(x, y), 1)
            elif place == "list of a class's closure":
                kept.append(tensor(x, y))
            return y

    KEPT.clear()
    if place == "bound method":
        return method_keeping(tensor)
    if "module" in place or "class" in place:
        return jt.nn.Sequential(Block())

    def function(x):
        y = (x * x).tanh()
        put(x, y)
        return y

    return function


def method_keeping(tensor):
    class Bound(Keeper):
        def run(self, x):
            y = (x * x).tanh()
            self.items.append(tensor(x, y))
            return y

    return Bound().run


PLACES = [
    "default",
    "global",
    "helper",
    "object",
    "list",
    "dict",
    "nested",
    "deque",
    "dict of lists",
    "new list",
    "state",
    "module",
    "new list of a module",
    "tuple of a module",
    "list of a class's closure",
    "bound method",
]
WITH_GRADIENT = {
    "another tensor": lambda x, y: (y * 2).sum(),
    "an output": lambda x, y: y,
    "an input": lambda x, y: x,
}
WITHOUT_GRADIENT = {
    "detached": lambda x, y: (y * 2).detach(),
    "of a detached": lambda x, y: y.detach() * 2,
    "stopped": lambda x, y: (y * 2).stop_grad(),
    "under no_grad": lambda x, y: without_gradients(y),
    "integers": lambda x, y: y > 0,
    "a number": lambda x, y: float(y.sum()),
    "an array": lambda x, y: y.numpy(),
}


def without_gradients(y):
    import jittor as jt

    with jt.no_grad():
        return y * 2


@pytest.mark.parametrize("tensor", WITH_GRADIENT)
@pytest.mark.parametrize("place", PLACES)
def test_a_tensor_that_a_region_keeps_in_a_container_is_refused(backend, place, tensor):
    """It would carry no gradient, and a loss made of it would silently lack that."""
    function = keeping(place, WITH_GRADIENT[tensor])
    with pytest.raises(xmem.CompositionError, match="Let the function return it"):
        xmem.checkpoint(function, learnt(4))


@pytest.mark.parametrize("tensor", WITHOUT_GRADIENT)
@pytest.mark.parametrize("place", PLACES)
def test_what_asks_for_no_gradient_may_be_kept_in_a_container(backend, recwarn, place, tensor):
    x = learnt(4)
    plain, ours = (
        gradients((call(keeping(place, WITHOUT_GRADIENT[tensor]), x) ** 2).sum(), [x])[0]
        for call in (lambda f, x: f(x), xmem.checkpoint)
    )
    assert np.allclose(plain, ours, rtol=1e-6)
    assert not [w for w in recwarn if issubclass(w.category, xmem.XmemWarning)]


def test_a_tensor_kept_in_a_container_names_region_and_place(backend):
    from jittor import nn

    class Remembers(nn.Module):
        def __init__(self):
            self.layer, self.seen = nn.Linear(4, 4), {"outputs": []}

        def execute(self, x):
            self.seen["outputs"].append(self.layer(x))
            return self.seen["outputs"][-1] * 2

    net = nn.Sequential(Remembers(), Remembers())
    xmem.apply_checkpointing(net, "every")
    with pytest.raises(xmem.CompositionError, match=r"checkpointed '0' .* in Remembers\.seen"):
        net(learnt(2, 4))


def test_a_parameter_may_be_kept_in_a_container(backend):
    weight, used, x = learnt(4), [], learnt(2, 4)

    def function(x):
        used.extend([weight, (x * 2).detach()])
        return x * weight

    plain, ours = both(function, x, targets=[x, weight])
    assert all(np.allclose(a, b, rtol=1e-5) for a, b in zip(plain, ours, strict=True))
    assert all(kept is weight for kept in used[::2])


@pytest.mark.parametrize("kind", ["list", "dict", "variable", "attribute"])
def test_the_second_pass_reads_the_state_that_the_first_one_read(backend, recwarn, kind):
    """A state that is carried on, cut off from its past, as in truncated backpropagation."""
    import jittor as jt

    class Recurrent(jt.Module):
        def __init__(self):
            super().__init__()
            self.weight = jt.ones(4) * 0.5
            self.state = jt.ones(4)

        def execute(self, x):
            h = (self.state * self.weight + x).tanh()
            self.state = h.detach()
            return h

    def recurrent():
        module = Recurrent()
        if kind == "attribute":
            return module, module.weight, lambda: module.state
        weight, held, state = module.weight, [jt.ones(4)], jt.ones(4)
        held = {"state": held[0]} if kind == "dict" else held
        key = "state" if kind == "dict" else 0

        def in_container(x):
            h = (held[key] * weight + x).tanh()
            held[key] = h.detach()
            return h

        def in_variable(x):
            nonlocal state
            h = (state * weight + x).tanh()
            state = h.detach()
            return h

        if kind == "variable":
            return in_variable, weight, lambda: state
        return in_container, weight, lambda: held[key]

    x, found = learnt(4), []
    for call in (lambda f, x: f(x), xmem.checkpoint):
        function, weight, state = recurrent()
        loss = sum((call(function, x) ** 2).sum() for _ in range(3))
        found.append([*gradients(loss, [x, weight]), state().numpy()])
    for plain, ours in zip(*found, strict=True):
        assert np.allclose(plain, ours, rtol=1e-5)
    assert not [w for w in recwarn if issubclass(w.category, xmem.XmemWarning)]


def test_a_log_that_a_region_fills_has_one_entry_for_each_call(backend):
    log, x = [], learnt(4)
    for _ in range(2):
        y = xmem.checkpoint(lambda x: log.append((x * 2).detach()) or x**2, x)
        gradients(y.sum(), [x])
    assert len(log) == 2
    assert all(np.allclose(entry.numpy(), 2 * x.numpy()) for entry in log)


@pytest.mark.parametrize("kind", ["mask", "detached"])
def test_what_surely_asks_for_no_gradient_costs_no_third_call(backend, kind):
    import jittor as jt

    calls, kept, x = [], [], learnt(4)

    def function(x):
        calls.append(1)
        mask = jt.rand(4)
        kept.append(mask if kind == "mask" else (x.tanh() * 2).detach() + 1)
        return x * mask

    gradients(xmem.checkpoint(function, x).sum(), [x])
    assert len(calls) == 2


@pytest.mark.parametrize(
    ("kind", "named"),
    [
        ("variable", "'s variable last."),
        ("global", "'s variable LAST."),
        ("object", "Keeper.last."),
        ("attribute that was there", "Module.kept_before."),
    ],
)
def test_a_tensor_kept_in_a_variable_is_warned_of_once(backend, recwarn, kind, named):
    import jittor as jt

    last, keeper = None, Keeper()
    keeper.last = None
    module = jt.Module()
    module.kept_before = jt.zeros(3)

    def function(x):
        nonlocal last
        global LAST
        y = x.tanh()
        if kind == "variable":
            last = y
        elif kind == "global":
            LAST = y
        elif kind == "object":
            keeper.last = y
        else:
            module.kept_before = y
        return y * 2

    for _ in range(3):
        xmem.checkpoint(function, jt.ones(3))
    told = [str(w.message) for w in recwarn if issubclass(w.category, xmem.XmemWarning)]
    assert len(told) == 1
    assert named in told[0]
