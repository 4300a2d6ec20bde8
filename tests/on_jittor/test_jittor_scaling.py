"""Loss scaling on Jittor, against torch.amp.GradScaler; what a skipped step leaves as it was."""

import gc

import numpy as np
import pytest
from chain import chain, normal, through, trained
from hypothesis import given, settings
from hypothesis import strategies as st

import xmem

MAKERS = ("SGD", "Adam", "AdamW", "RMSprop", "ours")


def make(kind, parameters):
    import jittor as jt
    from xmem_jittor.training import Adam

    if kind == "ours":
        return Adam(parameters, 1e-2)
    options = {"momentum": 0.9} if kind == "SGD" else {}
    return getattr(jt.optim, kind)(parameters, 1e-2, **options)


def ones(*shape, dtype="float32"):
    import jittor as jt

    return jt.array(np.ones(shape, dtype))


def loss_of(weight, gradient):
    """Return a loss whose gradient with respect to a weight is `gradient`."""
    import jittor as jt

    return (weight * jt.array(gradient)).sum()


def gradient_of(optimizer):
    return optimizer.param_groups[0]["grads"][0]


def state(optimizer):
    """Return copies of everything an optimizer has, parameters included."""
    found = {"n_step": optimizer.n_step, "updates": getattr(optimizer, "updates", None)}
    for i, group in enumerate(optimizer.param_groups):
        for name, held in group.items():
            if isinstance(held, list) and name != "grads":
                for j, v in enumerate(held):
                    found[f"{name}.{i}.{j}"] = v.numpy().tobytes()
    return found


def live(backend):
    import jittor as jt

    gc.collect()
    backend.measure.synchronize()
    return backend.measure.counters().allocated_bytes, jt.liveness_info()["lived_vars"]


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("place", [0, 500, 999])
def test_a_gradient_that_is_not_finite_is_found_wherever_it_is(backend, dtype, bad, place):
    weight = ones(1000, dtype=dtype)
    optimizer = make("SGD", [weight])
    scaler = xmem.GradScaler(4.0)
    gradient = np.ones(1000, dtype)
    gradient[place] = bad
    xmem.backward(loss_of(weight, gradient), optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0
    assert (weight.numpy() == 1).all()


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_the_largest_and_smallest_numbers_are_finite(backend, dtype):
    weight = ones(6, dtype=dtype)
    optimizer = make("SGD", [weight])
    scaler = xmem.GradScaler(4.0)
    limits = np.finfo(dtype)
    extremes = [limits.max, limits.min, limits.tiny, limits.smallest_subnormal, 0.0, -0.0]
    xmem.backward(loss_of(weight, np.array(extremes, dtype)), optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 4.0
    assert weight.numpy()[0] != 1


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_unscaling_divides_by_the_scale(backend, dtype):
    weight = ones(3, dtype=dtype)
    optimizer = make("SGD", [weight])
    scaler = xmem.GradScaler(2.0**17)  # whose inverse is no normal number in float16
    gradient = np.array([1.0, -3.0, 0.125], dtype)
    xmem.backward(loss_of(weight, gradient * np.float32(2**13)), optimizer)
    scaler.unscale_(optimizer)
    found = gradient_of(optimizer)
    assert str(found.dtype) == str(np.result_type(gradient * np.float32(2**13)))
    assert (found.numpy() == gradient.astype(np.float32) / 16).all()


def test_a_half_loss_is_scaled_in_float32(backend):
    loss = xmem.GradScaler(2.0**30).scale(ones(1, dtype="float16"))
    assert str(loss.dtype) == "float32"
    assert loss.item() == 2.0**30


def test_frozen_parameters_are_passed_over(backend):
    weight, frozen = ones(3), ones(3).stop_grad()
    optimizer = make("Adam", [frozen, weight])
    scaler = xmem.GradScaler(4.0)
    xmem.backward(scaler.scale(loss_of(weight, np.ones(3, np.float32))), optimizer)
    scaler.unscale_(optimizer)
    assert (optimizer.param_groups[0]["grads"][1].numpy() == 1).all()
    scaler.step(optimizer)
    scaler.update()
    assert (weight.numpy() < 1).all()
    assert (frozen.numpy() == 1).all()


def test_unscaling_waits_for_nothing(backend):
    net, x = chain(2, 64), normal(64, 64)
    optimizer = make("ours", trained(net))
    backend.measure.synchronize()
    before = backend.measure.counters().allocated_bytes
    scaler = xmem.GradScaler()
    xmem.backward(scaler.scale((through(net, x) ** 2).mean()), optimizer)
    scaler.unscale_(optimizer)
    xmem.clip_grad_norm_(optimizer, 1.0)
    gradients = sum(p.nbytes for p in trained(net))
    # Not quite zero: numbers in expressions are tensors.
    assert backend.measure.counters().allocated_bytes - before < gradients / 50
    scaler.step(optimizer)
    assert backend.measure.counters().allocated_bytes - before >= gradients


def test_unscaling_comes_after_backward(backend):
    optimizer = make("SGD", [ones(3)])
    with pytest.raises(xmem.UsageError, match="before backward"):
        xmem.GradScaler().unscale_(optimizer)


def train(kind, *, pattern, calls, native, scaled=True):
    """Take a step for each character of a pattern; "x" is one that overflows.

    Args:
        kind: the optimizer.
        pattern: e.g. "..x.".
        calls: of backward for each step.
        native: by the optimizer's own backward.
        scaled: by a scaler; else the steps that overflow are left out.
    """
    generator = np.random.default_rng(1)
    weight, other = ones(4, 3), ones(5)
    optimizer = make(kind, [weight, other])
    scaler = xmem.GradScaler(8.0, growth_interval=10**6, enabled=scaled)
    snapshots = []
    for sign in pattern:
        gradients = generator.standard_normal((calls, 4, 3)).astype(np.float32)
        before = state(optimizer)
        if sign == "x":
            if not scaled:
                continue
            gradients[calls // 2, 2, 1] = np.inf
        for gradient in gradients:
            loss = loss_of(weight, gradient) + (other**2).sum()
            loss = scaler.scale(loss)
            if native:
                optimizer.backward(loss)
            else:
                xmem.backward(loss, optimizer)
        scaler.step(optimizer)
        scaler.update()
        if sign == "x":
            assert state(optimizer) == before
            assert "grads" not in optimizer.param_groups[0]
        xmem.zero_grad(optimizer)
        snapshots.append(scaler.get_scale())
    return state(optimizer), snapshots


@pytest.mark.parametrize("native", [False, True], ids=["xmem", "native"])
@pytest.mark.parametrize("calls", [1, 3])
@pytest.mark.parametrize("kind", MAKERS)
def test_a_skipped_step_is_as_if_it_had_not_been(backend, kind, calls, native):
    found, scales = train(kind, pattern="x..xx.x.", calls=calls, native=native)
    expected, _ = train(kind, pattern="x..xx.x.", calls=calls, native=native, scaled=False)
    assert scales == [4.0, 4.0, 4.0, 2.0, 1.0, 1.0, 0.5, 0.5]
    assert found == expected


@pytest.mark.parametrize("kind", MAKERS)
def test_a_skip_after_steps_without_a_scaler_takes_back_its_own_calls_only(backend, kind):
    weight = ones(3)
    optimizer = make(kind, [weight])
    for _ in range(3):
        optimizer.step(loss_of(weight, np.ones(3, np.float32)))
    scaler = xmem.GradScaler(2.0)
    for good, steps in ((False, 3), (True, 4), (False, 4)):
        gradient = np.full(3, 1.0 if good else np.nan, np.float32)
        optimizer.backward(scaler.scale(loss_of(weight, gradient)))
        scaler.step(optimizer)
        scaler.update()
        assert optimizer.n_step == steps
    optimizer.step(loss_of(weight, np.ones(3, np.float32)))
    optimizer.backward(scaler.scale(loss_of(weight, np.full(3, np.inf, np.float32))))
    scaler.step(optimizer)
    assert optimizer.n_step == 5


def test_a_skipped_step_keeps_no_memory(backend):
    net, x = chain(2, 64), normal(64, 64)
    optimizer = make("ours", trained(net))
    before, _ = live(backend)
    scaler = xmem.GradScaler()
    loss = scaler.scale((through(net, x) ** 2).mean() * np.inf)
    xmem.backward(loss, optimizer)
    del loss
    scaler.step(optimizer)
    after, _ = live(backend)
    assert after == before, f"{after} bytes after, {before} before"


def test_a_hundred_steps_leave_nothing_behind(backend):
    net, x = chain(2, 16), normal(8, 16)
    optimizer = make("Adam", trained(net))
    scaler = xmem.GradScaler(growth_interval=2)
    seen = []
    for step in range(106):
        factor = np.inf if step % 3 == 0 else 1.0
        xmem.backward(scaler.scale((through(net, x) ** 2).mean() * factor), optimizer)
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        xmem.zero_grad(optimizer)
        if step in (5, 105):
            seen.append(live(backend))
    assert seen[0] == seen[1], f"bytes and tensors after 6 steps {seen[0]}, after 106 {seen[1]}"


def torch_optimizer():
    import torch

    return torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1)


def give(optimizer, gradient):
    import torch

    optimizer.param_groups[0]["params"][0].grad = torch.tensor(gradient)


UPDATES = st.lists(
    st.one_of(
        st.lists(st.sampled_from([1.0, 1.0, np.inf, np.nan]), min_size=1, max_size=3),
        st.sampled_from([256.0, 3.0]),  # a new scale
    ),
    min_size=1,
    max_size=12,
)


@settings(max_examples=60, deadline=None)
@given(
    updates=UPDATES,
    interval=st.integers(1, 4),
    growth=st.sampled_from([2.0, 1.7, 1.001]),
    backoff=st.sampled_from([0.5, 0.3, 0.999]),
    init=st.sampled_from([65536.0, 1.0, 2.0**126, 3.3, 2.0**-100]),
)
def test_the_scale_is_that_of_pytorch(backend, updates, interval, growth, backoff, init):
    torch = pytest.importorskip("torch")
    options = {"growth_factor": growth, "backoff_factor": backoff, "growth_interval": interval}
    theirs = torch.amp.GradScaler("cpu", init_scale=init, **options)
    ours = xmem.GradScaler(init, **options)
    theirs.scale(torch.ones(1))  # it makes its scale when it is first used
    pairs = [(torch_optimizer(), make("SGD", [ones(2)])) for _ in range(3)]
    found, expected = [], []
    for update in updates:
        new = update if isinstance(update, float) else None
        for value, (their, our) in zip([] if new else update, pairs, strict=False):
            gradient = np.array([1.0, value], np.float32)
            give(their, gradient)
            theirs.step(their)
            weight = our.param_groups[0]["params"][0]
            xmem.backward(loss_of(weight, gradient), our)
            ours.step(our)
        theirs.update(new)
        ours.update(new)
        expected.append((theirs.get_scale(), theirs.state_dict()["_growth_tracker"]))
        found.append((ours.get_scale(), ours.state_dict()["_growth_tracker"]))
    assert found == expected
    for their, our in pairs:
        weights = [group["params"][0] for group in (*their.param_groups, *our.param_groups)]
        moved = [(w.detach().numpy() != 1).any() for w in weights]
        assert moved[0] == moved[1]


def test_one_overflow_among_several_optimizers_skips_that_one_only(backend):
    weights = [ones(3), ones(3)]
    optimizers = [make("Adam", [w]) for w in weights]
    scaler = xmem.GradScaler(16.0, growth_interval=1)
    for weight, optimizer, value in zip(weights, optimizers, (np.nan, 1.0), strict=True):
        gradient = np.full(3, value, np.float32)
        xmem.backward(scaler.scale(loss_of(weight, gradient)), optimizer)
        scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 8.0
    assert [o.n_step for o in optimizers] == [0, 1]
    assert (weights[0].numpy() == 1).all()
    assert (weights[1].numpy() < 1).all()


def test_an_unscaled_overflow_counts_without_a_step(backend):
    weight = ones(3)
    optimizer = make("Adam", [weight])
    scaler = xmem.GradScaler(16.0)
    xmem.backward(scaler.scale(loss_of(weight, np.full(3, np.inf, np.float32))), optimizer)
    scaler.unscale_(optimizer)
    scaler.update()
    assert scaler.get_scale() == 8.0


def test_the_state_is_one_that_pytorch_loads_and_gives(backend):
    torch = pytest.importorskip("torch")
    ours = xmem.GradScaler(1024.0, growth_interval=7)
    theirs = torch.amp.GradScaler("cpu")
    theirs.load_state_dict(ours.state_dict())
    assert theirs.state_dict() == ours.state_dict()
    again = xmem.GradScaler()
    again.load_state_dict({**theirs.state_dict(), "_growth_tracker": 6})
    weight = ones(2)
    optimizer = make("SGD", [weight])
    xmem.backward(again.scale(loss_of(weight, np.ones(2, np.float32))), optimizer)
    again.step(optimizer)
    again.update()
    assert again.get_scale() == 2048.0


def test_the_scale_keeps_an_inverse(backend):
    weight = ones(2)
    optimizer = make("SGD", [weight])
    scaler = xmem.GradScaler(2.0**-120, backoff_factor=0.25)
    for _ in range(6):
        xmem.backward(scaler.scale(loss_of(weight, np.full(2, np.inf, np.float32))), optimizer)
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == float(np.finfo(np.float32).tiny)


@pytest.mark.parametrize("native", [False, True], ids=["xmem", "native"])
@pytest.mark.parametrize("kind", MAKERS)
def test_half_precision_backs_off_from_a_huge_scale_and_then_trains(backend, kind, native):
    import jittor as jt
    from jittor import nn

    net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1))
    x = normal(64, 16)
    target = (x[:, :1] * x[:, 1:2]).stop_grad()
    optimizer = make(kind, trained(net))
    scaler = xmem.GradScaler(2.0**40)
    losses, scales = [], []
    for _ in range(60):
        with xmem.autocast("float16"):
            y = net(x)
        loss = (y.float32() - target).sqr().mean()
        if native:
            optimizer.backward(scaler.scale(loss))
        else:
            xmem.backward(scaler.scale(loss), optimizer)
        scaler.step(optimizer)
        scaler.update()
        xmem.zero_grad(optimizer)
        losses.append(xmem.log_value(loss))
        scales.append(scaler.get_scale())
    skipped = sum(a != b for a, b in zip([2.0**40, *scales], scales, strict=False))
    assert 10 < skipped < 40, scales
    assert optimizer.n_step == 60 - skipped
    assert losses[-1] < 0.8 * losses[0]
    assert all(bool(jt.isfinite(p).all().item()) for p in trained(net))


@pytest.mark.parametrize("native", [False, True], ids=["xmem", "native"])
@pytest.mark.parametrize("losses", ["one call", "two calls", "two in one"])
def test_each_of_two_optimizers_counts_its_own_updates(backend, native, losses):
    scaler = xmem.GradScaler(4.0)
    weights = [ones(2), ones(2)]
    first, second = optimizers = [make("SGD", [w]) for w in weights]
    good, bad = np.ones(2, np.float32), np.full(2, np.inf, np.float32)

    def backward(optimizer, weight, numbers):
        parts = [scaler.scale(loss_of(weight, numbers)) for _ in range(2)]
        calls = {"one call": parts[:1], "two calls": parts, "two in one": [parts[0] + parts[1]]}
        for loss in calls[losses]:
            if native:
                optimizer.backward(loss)
            else:
                xmem.backward(loss, optimizer)

    for _ in range(5):
        for optimizer, weight in zip(optimizers, weights, strict=True):
            optimizer.step(loss_of(weight, good))
    backward(first, weights[0], bad)
    backward(second, weights[1], good)
    scaler.step(first)
    scaler.step(second)
    scaler.update()
    assert first.n_step == 5
    assert second.n_step == 5 + (2 if native and losses == "two calls" else 1)


def test_jittor_is_as_it_was_when_the_last_scaler_is_gone(backend):
    import jittor as jt

    gc.collect()
    before = jt.optim.Optimizer.backward
    scalers = [xmem.GradScaler(4.0), xmem.GradScaler(4.0)]
    scalers.pop()
    assert jt.optim.Optimizer.backward is not before
    scalers.pop()
    gc.collect()
    assert jt.optim.Optimizer.backward is before


def test_a_skipped_and_a_made_step_under_no_grad_leave_parameters_trainable(backend):
    weight = ones(2)
    optimizer = make("Adam", [weight])
    scaler = xmem.GradScaler(4.0)
    for numbers in (np.full(2, np.inf, np.float32), np.ones(2, np.float32)):
        xmem.backward(scaler.scale(loss_of(weight, numbers)), optimizer)
        with xmem.no_grad():
            scaler.step(optimizer)
            scaler.update()
        assert not weight.is_stop_grad()
    assert (weight.numpy() != 1).all()
