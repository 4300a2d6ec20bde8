"""States in few bits on Jittor: saved, taken up again, and from and to those of `jt.optim`."""

import copy

import numpy as np
import pytest
from chain import chain, normal, trained

import xmem
from xmem import optim

WIDTH = 96
MAKERS = {
    "adamw 8": lambda p: optim.AdamW(p, 1e-3),
    "adamw 4": lambda p: optim.AdamW(p, 1e-3, state_bits=4),
    "adamw 32": lambda p: optim.AdamW(p, 1e-3, state_bits=32),
    "lion": lambda p: optim.Lion(p, 1e-4),
    "adafactor": lambda p: optim.Adafactor(p, 1e-3, beta1=0.9),
}
PLAIN = {
    "AdamW": {"lr": 1e-3, "weight_decay": 0.1},
    "Adam": {"lr": 1e-3, "weight_decay": 0.01},
    "SGD": {"lr": 1e-2, "momentum": 0.9, "weight_decay": 0.01, "dampening": 0.5},
    "Optimizer": {"lr": 1e-2},
}


def model():
    import jittor as jt

    jt.set_global_seed(0)
    np.random.seed(0)
    return chain(2, WIDTH)


def batches(count, seed=0):
    generator = np.random.RandomState(seed)
    return [generator.randn(16, WIDTH).astype(np.float32) for _ in range(count)]


def train(net, optimizer, data):
    import jittor as jt

    losses = []
    for x in data:
        loss = (net(jt.array(x)) - 1).sqr().mean()
        optimizer.step(loss)
        losses.append(xmem.log_value(loss))
    return losses


def values(net):
    return [p.numpy() for p in net.parameters()]


def plain(kind, net):
    import jittor as jt

    return getattr(jt.optim, kind)(trained(net), **PLAIN[kind])


def distance(found, expected, start):
    """Return how far two ends are apart, relative to the way."""
    apart = sum(float(((a - b) ** 2).sum()) for a, b in zip(found, expected, strict=True))
    way = sum(float(((a - b) ** 2).sum()) for a, b in zip(expected, start, strict=True))
    return (apart / way) ** 0.5


@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize("way", ["at once", "through a file", "deep copy"])
def test_a_state_that_is_taken_up_goes_on_exactly(backend, maker, way, tmp_path):
    import jittor as jt

    net = model()
    optimizer = MAKERS[maker](trained(net))
    train(net, optimizer, batches(3))
    state, weights = optimizer.state_dict(), values(net)
    if way == "through a file":
        jt.save(state, str(tmp_path / "state.pkl"))
        state = jt.load(str(tmp_path / "state.pkl"))
    elif way == "deep copy":
        state = copy.deepcopy(state)
    expected = train(net, optimizer, batches(3, seed=1)), values(net)
    for _ in range(2):  # what was loaded is not changed by the steps that follow
        other = model()
        for p, value in zip(other.parameters(), weights, strict=True):
            p.update(jt.array(value))
        again = MAKERS[maker](trained(other))
        again.load_state_dict(state)
        found = train(other, again, batches(3, seed=1)), values(other)
        assert found[0] == expected[0]
        assert all((a == b).all() for a, b in zip(found[1], expected[1], strict=True))
        assert again.param_groups[0]["steps"] == optimizer.param_groups[0]["steps"]


def test_a_state_is_a_snapshot(backend):
    net = model()
    optimizer = optim.AdamW(trained(net))
    train(net, optimizer, batches(1))
    held = optimizer.state_dict()["defaults"]["param_groups"][0]
    before = [state.numpy() for state in held["m"]]
    train(net, optimizer, batches(2))
    assert all((a.numpy() == b).all() for a, b in zip(held["m"], before, strict=True))
    now = optimizer.param_groups[0]["m"]
    assert all((a.numpy() != b).any() for a, b in zip(now, before, strict=True))
    assert not {"params", "grads"} & set(held)


def test_options_and_rates_are_taken_up(backend):
    net = model()
    optimizer = optim.AdamW([{"params": trained(net), "lr": 0.5}], betas=(0.5, 0.6), eps=1e-3)
    train(net, optimizer, batches(1))
    again = optim.AdamW(trained(net), state_bits=4)
    again.load_state_dict(optimizer.state_dict())
    assert (again.betas, again.eps, again.param_groups[0]["lr"]) == ((0.5, 0.6), 1e-3, 0.5)
    assert again.state_bits == 4
    assert again.param_groups[0]["m"][0].shape[0] == 36 * 4 + WIDTH * WIDTH // 2


@pytest.mark.parametrize(("bits", "apart"), [(32, 1e-5), (8, 0.05), (4, 0.3)])
@pytest.mark.parametrize("kind", PLAIN)
def test_training_goes_on_where_an_optimizer_of_jittor_is(backend, kind, bits, apart):
    ends = []
    for quantized in (False, True):
        net = model()
        optimizer = plain(kind, net)
        train(net, optimizer, batches(4))
        start = values(net)
        if quantized:
            made = xmem.active().quantize.quantize_optimizer(optimizer, bits, min_elements=4096)
            assert made is optimizer
        train(net, optimizer, batches(6, seed=1))
        ends.append(values(net))
        assert optimizer.n_step == 10
    assert distance(ends[1], ends[0], start) <= apart


def test_the_adam_of_the_suite_goes_on_too(backend):
    net = model()
    optimizer = backend.training.make_optimizer("adam", net, learning_rate=1e-3)
    train(net, optimizer, batches(3))
    start, other = values(net), copy.deepcopy(optimizer.param_groups[0]["m"][0].numpy())
    optim.quantize_optimizer(optimizer, 8)
    group = optimizer.param_groups[0]
    assert group["steps"] == [3] * len(group["params"])
    assert "v" not in group
    from xmem_jittor import states

    found = states.unpack(group["m"][0].numpy(), other.size, "first", 8)
    assert np.abs(found - other.reshape(-1)).max() <= np.abs(other).max() / 127
    train(net, optimizer, batches(1))
    assert all((a != b).any() for a, b in zip(values(net), start, strict=True))


@pytest.mark.parametrize("bits", [8, 4])
def test_schedules_and_gradients_survive_quantizing(backend, bits):
    from jittor import lr_scheduler

    net = model()
    optimizer = plain("AdamW", net)
    schedule = lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    train(net, optimizer, batches(2))
    optimizer.backward(net(normal(4, WIDTH)).sqr().mean())
    gradients = optimizer.param_groups[0]["grads"]
    optim.quantize_optimizer(optimizer, bits)
    assert optimizer.param_groups[0]["grads"] is gradients
    before = values(net)
    optimizer.step()
    assert all((a != b).any() for a, b in zip(values(net), before, strict=True))
    rate = optimizer.lr
    schedule.step()
    schedule.step()
    assert optimizer.lr < rate
    optim.quantize_optimizer(optimizer, 12 - bits)
    assert optimizer.state_bits == 12 - bits
    train(net, optimizer, batches(2))


def test_an_optimizer_with_masters_is_quantized(backend):
    net = model()
    optimizer = plain("AdamW", net)
    x = normal(16, WIDTH)
    xmem.cast_model(net, "float16", optimizer=optimizer)
    optim.quantize_optimizer(optimizer)
    losses = []
    for _ in range(10):
        loss = (net(x.cast("float16")).float32() - 1).sqr().mean()
        xmem.backward(loss, optimizer)
        xmem.optimizer_step(optimizer)
        losses.append(xmem.log_value(loss))
    assert losses[-1] < losses[0]
    assert {str(p.dtype) for p in trained(net)} == {"float16"}


@pytest.mark.parametrize("kind", ["AdamW", "Adam", "SGD"])
@pytest.mark.parametrize("bits", [32, 8])
def test_a_state_of_jittor_is_taken_up_and_given_back(backend, kind, bits):
    net = model()
    theirs = plain(kind, net)
    train(net, theirs, batches(4))
    ours = plain(kind, net)
    optim_of = xmem.active().quantize.quantize_optimizer
    optim_of(ours, bits, min_elements=0)
    ours.load_state_dict(theirs.state_dict())
    back = plain(kind, net)
    back.load_state_dict(ours.plain_state_dict())
    assert back.n_step == 4
    assert back.lr == PLAIN[kind]["lr"]
    for name in ("m", "values"):
        held = theirs.param_groups[0].get(name, ())
        for a, b in zip(back.param_groups[0].get(name, ()), held, strict=True):
            assert a.shape == b.shape
            x, wanted = a.numpy(), b.numpy()
            # v is kept as its root, to a 255th of the largest.
            error = np.abs(np.sqrt(np.abs(x)) - np.sqrt(np.abs(wanted)))
            largest = np.sqrt(np.abs(wanted).max())
            if bits == 32:
                assert (x == wanted).all()
            elif name == "values" and kind != "SGD":
                assert error.max() <= 1.01 * largest / 255
            else:
                assert np.abs(x - wanted).max() <= 1.01 * np.abs(wanted).max() / 127
    train(net, back, batches(1))


def test_a_packed_state_is_not_silently_taken_up_by_jittor(backend):
    net = model()
    optimizer = optim.AdamW(trained(net))
    train(net, optimizer, batches(2))
    back = plain("AdamW", net)
    back.load_state_dict(optimizer.state_dict())
    with pytest.raises(RuntimeError):
        train(net, back, batches(1))


def test_what_has_no_rule_here_is_named(backend):
    import jittor as jt

    net = model()

    class Mine(jt.optim.AdamW):
        pass

    for kind in (jt.optim.RMSprop, jt.optim.Adan, Mine):
        optimizer = kind(trained(net), 1e-3)
        with pytest.raises(xmem.UsageError, match=rf"{kind.__name__}; it has those of .*AdamW"):
            optim.quantize_optimizer(optimizer)
        assert type(optimizer) is kind
    with pytest.raises(xmem.UsageError, match="no Lion"):
        optim.Lion(trained(net)).plain_state_dict()


def test_states_of_others_are_refused_before_anything_changes(backend):
    net, other = model(), chain(2, 80)
    optimizer = optim.AdamW(trained(net))
    train(net, optimizer, batches(1))
    before = [state.numpy() for state in optimizer.param_groups[0]["m"]]
    strange = optim.AdamW(trained(other))
    train_x = normal(4, 80)
    strange.step(other(train_x).sqr().mean())
    lion = optim.Lion(trained(net))
    short = optim.AdamW(trained(net)[:-1])
    groups = optim.AdamW([{"params": [p]} for p in trained(net)])
    for state, said in (
        (strange.state_dict(), "not of a parameter of shape"),
        (lion.state_dict(), "no 'values'"),
        (short.state_dict(), "of 3 parameters"),
        (groups.state_dict(), "of 4 groups"),
    ):
        with pytest.raises(xmem.UsageError, match=said):
            optimizer.load_state_dict(state)
    now = optimizer.param_groups[0]["m"]
    assert all((a.numpy() == b).all() for a, b in zip(now, before, strict=True))
