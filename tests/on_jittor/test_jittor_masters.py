"""Models in half precision on Jittor: what is cast, what the optimizer then holds, and the undo."""

import gc

import numpy as np
import pytest
from chain import normal

import xmem

MAKERS = ("Optimizer", "SGD", "Adam", "AdamW", "RMSprop", "ours")


def make(kind, parameters, rate=1e-3):
    import jittor as jt
    from xmem_jittor.training import Adam

    if kind == "ours":
        return Adam(parameters, rate)
    options = {"momentum": 0.9} if kind == "SGD" else {}
    return getattr(jt.optim, kind)(parameters, rate, **options)


def model():
    """Return a model with norms, running statistics and tied weights; the same each time."""
    import jittor as jt
    from jittor import nn

    jt.set_global_seed(0)
    np.random.seed(0)
    net = nn.Sequential(
        nn.Linear(16, 64), nn.BatchNorm(64), nn.GELU(), nn.LayerNorm(64),
        nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.Linear(64, 1),
    )  # fmt: skip
    net[6].weight = net[4].weight
    net.train()
    return net


def batch():
    x = normal(128, 16)
    return x, (x[:, :1] * x[:, 1:2]).stop_grad()


def loss_of(net, x, target, dtype="float32"):
    return (net(x.cast(dtype)).float32() - target).sqr().mean()


def values(net):
    return {name: p.numpy().astype(np.float32) for name, p in net.named_parameters()}


def types(net):
    return {name: str(p.dtype) for name, p in net.named_parameters()}


def masters(optimizer):
    return [p for group in optimizer.param_groups for p in group["params"]]


def live_bytes(backend):
    gc.collect()
    backend.measure.synchronize()
    return backend.measure.counters().allocated_bytes


def test_all_but_running_statistics_is_cast_in_place(backend):
    net = model()
    before = net.parameters()
    expected = values(net)
    receipt = xmem.cast_model(net, "float16")
    statistics = {"1.running_mean", "1.running_var"}
    assert {n for n, t in types(net).items() if t == "float32"} == statistics
    assert set(receipt.names) == set(types(net)) - statistics
    assert all(a is b for a, b in zip(net.parameters(), before, strict=True))
    assert net[6].weight is net[4].weight
    assert [p.is_stop_grad() for p in net.parameters()].count(True) == 2
    for name, found in values(net).items():
        assert np.abs(found - expected[name]).max() <= 2**-11 * max(1, np.abs(found).max())


@pytest.mark.parametrize("kind", MAKERS)
def test_with_masters_training_follows_float32(backend, kind):
    losses = {}
    for dtype in ("float32", "float16"):
        net = model()
        x, target = batch()
        # RMSprop's first step is ten times its rate.
        rate = {"Optimizer": 1e-2, "SGD": 1e-2, "RMSprop": 1e-4}.get(kind, 1e-3)
        optimizer = make(kind, net.parameters(), rate)
        if dtype == "float16":
            xmem.cast_model(net, dtype, optimizer=optimizer)
        losses[dtype] = []
        for _ in range(20):
            loss = loss_of(net, x, target, dtype)
            xmem.backward(loss, optimizer)
            xmem.optimizer_step(optimizer)
            xmem.zero_grad(optimizer)
            losses[dtype].append(xmem.log_value(loss))
    assert losses["float16"][-1] < losses["float16"][0]
    close = np.abs(np.subtract(losses["float16"], losses["float32"])) / losses["float32"][0]
    assert close.max() <= 0.01, losses


@pytest.mark.parametrize("kind", MAKERS)
def test_after_each_step_the_parameters_are_the_masters_rounded(backend, kind):
    net = model()
    x, target = batch()
    trained = [p for p in net.parameters() if not p.is_stop_grad()]
    optimizer = make(kind, trained, 1e-2)
    optimizer.step(loss_of(net, x, target))  # so that there is state
    state = {k: v for k, v in optimizer.param_groups[0].items() if k not in ("params", "grads")}
    xmem.cast_model(net, "float16", optimizer=optimizer)
    for step in range(3):
        loss = loss_of(net, x, target, "float16")
        if step == 1:
            optimizer.step(loss)  # a native loop
        else:
            xmem.backward(loss, optimizer)
            xmem.optimizer_step(optimizer)
        held = masters(optimizer)
        assert {str(m.dtype) for m in held} == {"float32"}
        assert {str(g.dtype) for g in optimizer.param_groups[0]["grads"]} == {"float32"}
        for p, m in zip(trained, held, strict=True):
            assert str(p.dtype) == "float16"
            assert not p.is_stop_grad()
            assert (p.numpy() == m.numpy().astype(np.float16)).all()
    assert optimizer.n_step == 4
    found = optimizer.param_groups[0]
    assert all(found[name] is held for name, held in state.items())
    assert {str(v.dtype) for held in state.values() if isinstance(held, list) for v in held} <= {
        "float32"
    }


def test_masters_are_what_the_parameters_were_before(backend):
    net = model()
    before = values(net)
    trained = [(n, p) for n, p in net.named_parameters() if not p.is_stop_grad()]
    optimizer = make("SGD", [p for _, p in trained])
    xmem.cast_model(net, "float16", optimizer=optimizer)
    for (name, p), master in zip(trained, masters(optimizer), strict=True):
        assert p is not master
        assert (master.numpy() == before[name]).all()


def weights_of_one():
    import jittor as jt
    from jittor import nn

    net = nn.Linear(8, 4, bias=False)
    net.weight.update(jt.ones((4, 8)))
    return net


@pytest.mark.parametrize("native", [False, True], ids=["xmem", "native"])
def test_small_updates_are_kept_by_masters_only(backend, native):
    import jittor as jt

    x = jt.ones((2, 8))
    moved = {}
    for kept in (True, False):
        net = weights_of_one()
        optimizer = make("Optimizer", [net.weight], 1e-4)
        xmem.cast_model(net, "float16", optimizer=optimizer if kept else None)
        for _ in range(50):
            loss = net(x.float16()).float32().sum() / 2  # whose gradients are 1
            if native and kept:
                optimizer.step(loss)
            else:
                xmem.backward(loss, optimizer)
                xmem.optimizer_step(optimizer)
        assert str(net.weight.dtype) == "float16"
        moved[kept] = 1 - net.weight.numpy().astype(np.float32)
    # 50 steps of 1e-4, each less than half of the 4.9e-4 between numbers below 1.
    assert np.abs(moved[True] - 5e-3).max() <= 2.5e-4
    assert (moved[False] == 0).all()


@pytest.mark.parametrize("kind", [None, *MAKERS])
def test_bytes_are_what_the_record_says(backend, kind):
    net = model()
    optimizer = make(kind, net.parameters()) if kind else None
    sizes = {n: p.nbytes for n, p in net.named_parameters() if "running" not in n}
    before = live_bytes(backend)
    cast = backend.precision.cast_model(net, "float16", optimizer)
    after = live_bytes(backend)
    assert cast.saved_bytes == sum(sizes.values()) // 2
    assert cast.master_bytes == (sum(sizes.values()) if kind else 0)
    assert before - after == cast.saved_bytes - cast.master_bytes, f"{before} before, {after} after"
    cast.undo()
    assert live_bytes(backend) == before


@pytest.mark.parametrize("kind", [None, *MAKERS])
def test_undo_restores_what_was_learnt(backend, kind):
    net = model()
    x, target = batch()
    before = net.parameters()
    optimizer = make(kind or "SGD", net.parameters(), 1e-2)
    receipt = xmem.cast_model(net, "float16", optimizer=optimizer if kind else None)
    for _ in range(3):
        xmem.backward(loss_of(net, x, target, "float16"), optimizer)
        xmem.optimizer_step(optimizer)
    assert str(net(x.float16()).dtype) == "float16"
    expected = [m.numpy().astype(np.float32) for m in masters(optimizer)]
    receipt.undo()
    receipt.undo()
    assert set(types(net).values()) == {"float32"}
    assert all(a is b for a, b in zip(net.parameters(), before, strict=True))
    assert all(a is b for a, b in zip(masters(optimizer), before, strict=True))
    assert all((a.numpy() == e).all() for a, e in zip(before, expected, strict=True))
    assert not {"backward", "step"} & set(vars(optimizer))
    assert "execute" not in vars(net)
    optimizer.step(loss_of(net, x, target))
    assert set(types(net).values()) == {"float32"}
    assert any((a.numpy() != e).any() for a, e in zip(before, expected, strict=True))


def test_undo_has_the_masters_of_an_optimizer_that_is_gone(backend):
    net = weights_of_one()
    optimizer = make("Optimizer", [net.weight], 1e-4)
    receipt = xmem.cast_model(net, "float16", optimizer=optimizer)
    xmem.backward(net(normal(2, 8).float16()).float32().sum(), optimizer)
    xmem.optimizer_step(optimizer)
    expected = masters(optimizer)[0].numpy()
    del optimizer
    receipt.undo()
    assert (net.weight.numpy() == expected).all()


def test_an_optimizer_with_masters_is_freed_without_the_collector(backend):
    import weakref

    net = weights_of_one()
    optimizer = make("Optimizer", [net.weight])
    xmem.cast_model(net, "float16", optimizer=optimizer)
    gone = weakref.ref(optimizer)
    gc.disable()
    try:
        del optimizer
        assert gone() is None
    finally:
        gc.enable()


def test_gradients_add_up_in_float32_and_have_the_parameters_names(backend):
    net = model()
    x, target = batch()
    optimizer = make("ours", [p for p in net.parameters() if not p.is_stop_grad()])
    xmem.cast_model(net, "float16", optimizer=optimizer)
    xmem.backward(loss_of(net, x, target, "float16"), optimizer)
    once = backend.training.gradients(net, optimizer)
    xmem.backward(loss_of(net, x, target, "float16"), optimizer)
    twice = backend.training.gradients(net, optimizer)
    assert set(once) == {n for n, t in types(net).items() if t == "float16"}
    for name, gradient in once.items():
        assert gradient.any() or name == "0.bias"  # batch norm takes the mean away
        assert np.abs(twice[name] - 2 * gradient).max() <= 1e-2 * np.abs(gradient).max() + 1e-6
    weight = net[7].weight
    assert (weight.opt_grad(optimizer).numpy() == twice["7.weight"]).all()
    before = live_bytes(backend)
    xmem.zero_grad(optimizer)
    assert before - live_bytes(backend) >= sum(g.nbytes for g in once.values())


@pytest.mark.parametrize("kind", MAKERS)
def test_scaling_accumulating_and_clipping_work_on_masters(backend, kind):
    net = model()
    x, target = batch()
    optimizer = make(kind, net.parameters(), 1e-2)
    xmem.cast_model(net, "float16", optimizer=optimizer)
    scaler = xmem.GradScaler(2.0**40)
    first = xmem.log_value(loss_of(net, x, target, "float16"))
    skipped = 0
    for _ in range(50):
        before = [p.numpy() for p in (*net.parameters()[:1], *masters(optimizer)[:1])]
        scale = scaler.get_scale()
        with xmem.accumulate(2):
            for part, wanted in zip(x.reshape(2, 64, 16), target.reshape(2, 64, 1), strict=True):
                loss = loss_of(net, part, wanted, "float16")
                xmem.backward(scaler.scale(loss), optimizer)
        scaler.unscale_(optimizer)
        norm = xmem.clip_grad_norm_(optimizer, 1.0)
        scaler.step(optimizer)
        scaler.update()
        xmem.zero_grad(optimizer)
        after = [p.numpy() for p in (*net.parameters()[:1], *masters(optimizer)[:1])]
        if scaler.get_scale() < scale:
            skipped += 1
            assert all((a == b).all() for a, b in zip(before, after, strict=True))
        else:
            assert norm.item() < 1e3
    assert 5 < skipped < 30
    assert optimizer.n_step == 50 - skipped
    assert xmem.log_value(loss_of(net, x, target, "float16")) < first


def test_a_parameter_that_is_frozen_later_stays(backend):
    net = model()
    x, target = batch()
    optimizer = make("SGD", net.parameters(), 1e-2)
    xmem.cast_model(net, "float16", optimizer=optimizer)
    net[0].weight.stop_grad()
    before = values(net)
    xmem.backward(loss_of(net, x, target, "float16"), optimizer)
    xmem.optimizer_step(optimizer)
    after = values(net)
    assert (after["0.weight"] == before["0.weight"]).all()
    assert (after["7.weight"] != before["7.weight"]).any()


def test_float32_inputs_are_taken_too(backend):
    net = model()
    x = normal(128, 16)
    xmem.cast_model(net, "float16")
    with xmem.autocast("float16"):
        inside = net(x).numpy()
    assert np.abs(net(x).numpy() - net(x.float16()).numpy()).max() <= 0.01
    assert np.abs(net(x).numpy() - inside).max() <= 0.01


def test_fifty_steps_leave_nothing_behind(backend):
    import jittor as jt

    net = model()
    x, target = batch()
    optimizer = make("ours", net.parameters())
    xmem.cast_model(net, "float16", optimizer=optimizer)
    seen = []
    for step in range(55):
        xmem.backward(loss_of(net, x, target, "float16"), optimizer)
        xmem.optimizer_step(optimizer)
        xmem.zero_grad(optimizer)
        if step in (4, 54):
            seen.append((live_bytes(backend), jt.liveness_info()["lived_vars"]))
    assert seen[0] == seen[1], f"bytes and tensors after 5 steps {seen[0]}, after 55 {seen[1]}"


def test_a_model_in_half_precision_is_refused(backend):
    net = model()
    xmem.cast_model(net, "float16")
    with pytest.raises(xmem.UsageError, match=r"0\.weight is float16 already"):
        xmem.cast_model(net, "float16")


def test_an_optimizer_of_other_parameters_is_refused_and_nothing_is_changed(backend):
    net, other = model(), model()
    optimizer = make("SGD", [*net.parameters(), *other.parameters()])
    with pytest.raises(xmem.UsageError, match="parameters are not the model's"):
        xmem.cast_model(net, "float16", optimizer=optimizer)
    assert set(types(net).values()) == {"float32"}
    assert masters(optimizer)[0] is net.parameters()[0]
    with pytest.raises(xmem.UsageError, match=r"give a jt\.optim\.Optimizer"):
        xmem.cast_model(net, "float16", optimizer="adam")
    assert "execute" not in vars(net)


def test_bfloat16_is_refused(backend):
    net = model()
    with pytest.raises(xmem.CapabilityError, match="bfloat16"):
        xmem.cast_model(net, "bfloat16")
    assert set(types(net).values()) == {"float32"}


def halved(kind="SGD", rate=0.0):
    """Return a cast model, its optimizer and the receipt."""
    net = model()
    optimizer = make(kind, [p for p in net.parameters() if not p.is_stop_grad()], rate)
    return net, optimizer, xmem.cast_model(net, "float16", optimizer=optimizer)


def take_a_step(net, optimizer):
    xmem.backward(loss_of(net, *batch(), "float16"), optimizer)
    xmem.optimizer_step(optimizer)
    xmem.zero_grad(optimizer)


@pytest.mark.parametrize("where", ["cast", "step", "undo"])
@pytest.mark.parametrize("kept", [True, False], ids=["masters", "none"])
def test_what_is_trainable_stays_so_under_no_grad(backend, where, kept):
    net = model()
    net[0].weight.stop_grad()
    frozen = [p.is_stop_grad() for p in net.parameters()]
    optimizer = make("SGD", [p for p in net.parameters() if not p.is_stop_grad()], 1e-2)

    def inside(name, call):
        if name != where:
            return call()
        with xmem.no_grad():
            return call()

    given = optimizer if kept else None
    receipt = inside("cast", lambda: xmem.cast_model(net, "float16", optimizer=given))
    assert [p.is_stop_grad() for p in net.parameters()] == frozen
    before = values(net)
    for _ in range(2):
        xmem.backward(loss_of(net, *batch(), "float16"), optimizer)
        inside("step", lambda: xmem.optimizer_step(optimizer))
    assert (values(net)["7.weight"] != before["7.weight"]).any()
    inside("undo", receipt.undo)
    assert [p.is_stop_grad() for p in net.parameters()] == frozen
    assert set(types(net).values()) == {"float32"}


def load(net, way):
    """Write other numbers, in float32 except where the way says otherwise; returns them."""
    import jittor as jt

    found = {n: p for n, p in net.named_parameters() if "running" not in n}
    numbers = {n: np.full(p.shape, 1 + 1e-4, np.float32) for n, p in found.items()}
    if way == "load_state_dict":
        net.load_state_dict(numbers)
    elif way == "load_parameters, half":
        net.load_parameters({n: v.astype(np.float16) for n, v in numbers.items()})
    else:
        for name, p in found.items():
            getattr(p, way)(jt.array(numbers[name]))
    if "half" in way:
        numbers = {n: v.astype(np.float16).astype(np.float32) for n, v in numbers.items()}
    return numbers


WAYS = ("load_state_dict", "load_parameters, half", "assign", "update")


@pytest.mark.parametrize("then", ["forward", "step", "native step", "undo"])
@pytest.mark.parametrize("way", WAYS)
def test_what_is_loaded_goes_into_the_masters(backend, way, then):
    if then == "forward" and "half" in way:
        pytest.skip("half numbers are right for forward, and taken up before a step")
    net, optimizer, receipt = halved()
    trained = [n for n, p in net.named_parameters() if not p.is_stop_grad()]
    take_a_step(net, optimizer)
    loss = loss_of(net, *batch(), "float16")
    numbers = load(net, way)
    if then == "forward":
        net(batch()[0].float16())
    elif then == "step":
        xmem.backward(loss, optimizer)
        xmem.optimizer_step(optimizer)
    elif then == "native step":
        optimizer.step(loss)
    else:
        receipt.undo()
    for name, p in zip(trained, masters(optimizer), strict=True):
        assert (p.numpy() == numbers[name]).all(), name
    for name in trained:
        expected = numbers[name] if then == "undo" else numbers[name].astype(np.float16)
        assert (dict(net.named_parameters())[name].numpy() == expected).all(), name


@pytest.mark.parametrize("way", WAYS)
def test_what_is_loaded_without_an_optimizer_is_in_half_when_it_is_used(backend, way):
    net = model()
    xmem.cast_model(net, "float16")
    before = types(net)
    numbers = load(net, way)
    net(batch()[0].float16())
    assert types(net) == before
    assert (net[0].weight.numpy() == numbers["0.weight"].astype(np.float16)).all()


def test_masters_keep_what_rounding_cuts_off_where_a_parameter_keeps_its_numbers(backend):
    net, optimizer, _ = halved(rate=1e-3)
    take_a_step(net, optimizer)
    expected = [m.numpy().copy() for m in masters(optimizer)]
    for p in net.parameters():
        if not p.is_stop_grad():
            p.stop_grad()
            p.start_grad()  # another tensor
    xmem.backward(loss_of(net, *batch(), "float16"), optimizer)
    found = [m.numpy() for m in masters(optimizer)]
    assert all((f == e).all() for f, e in zip(found, expected, strict=True))


@pytest.mark.parametrize("kind", ["Optimizer", "SGD", "Adam", "ours"])
@pytest.mark.parametrize("when", ["before backward", "after a step"])
def test_a_group_that_is_added_gets_masters(backend, kind, when):
    net = model()
    optimizer = make(kind, net[0].parameters(), 1e-6)
    receipt = xmem.cast_model(net, "float16", optimizer=optimizer)
    if when == "after a step":
        take_a_step(net, optimizer)
    optimizer.add_param_group({"params": net[7].parameters()})
    before = [m.numpy().copy() for m in masters(optimizer)]
    for _ in range(3):
        take_a_step(net, optimizer)
    assert {str(m.dtype) for m in masters(optimizer)} == {"float32"}
    assert str(net[7].weight.dtype) == "float16"
    assert all(
        (m.numpy() != b).any() for m, b in zip(masters(optimizer)[2:], before[2:], strict=True)
    )
    expected = masters(optimizer)[2].numpy()
    receipt.undo()
    assert masters(optimizer)[2] is net[7].weight
    assert (net[7].weight.numpy() == expected).all()
    assert "add_param_group" not in vars(optimizer)


def test_each_of_several_optimizers_gets_masters(backend):
    net = model()
    both = [make("SGD", net[0].parameters(), 1e-2), make("Adam", net[7].parameters(), 1e-2)]
    cast = backend.precision.cast_model(net, "float16", both)
    held = [m for optimizer in both for m in masters(optimizer)]
    assert cast.master_bytes == sum(m.nbytes for m in held)
    before = [m.numpy().copy() for m in held]
    for optimizer in both:
        take_a_step(net, optimizer)
    assert all((m.numpy() != b).any() for m, b in zip(held[::2], before[::2], strict=True))
    for layer, optimizer in zip((net[0], net[7]), both, strict=True):
        assert (layer.weight.numpy() == masters(optimizer)[0].numpy().astype(np.float16)).all()
    expected = [m.numpy() for m in held]
    cast.undo()
    found = [p.numpy() for p in (*net[0].parameters(), *net[7].parameters())]
    assert all((f == e).all() for f, e in zip(found, expected, strict=True))


@pytest.mark.parametrize("way", ["deepcopy", "pickle"])
def test_a_copy_computes_with_its_own_weights(backend, way):
    import copy
    import pickle

    from jittor import nn

    net = nn.Sequential(nn.Linear(16, 8), nn.Linear(8, 4))  # modules that pickle
    xmem.cast_model(net, "float16", optimizer=make("SGD", net.parameters()))
    x = batch()[0].float16()
    before = net(x).numpy()
    copied = copy.deepcopy(net) if way == "deepcopy" else pickle.loads(pickle.dumps(net))
    for p in net.parameters():
        p.update(p * 0)
    assert (copied(x).numpy() == before).all()
    assert (net(x).numpy() != before).any()
    again = copied(x).numpy()
    for p in copied.parameters():
        p.update(p * 0)
    assert (copied(x).numpy() != again).any()
