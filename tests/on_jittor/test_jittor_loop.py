"""Accumulation, clipping, evaluation and logging on Jittor, by exact counts and bytes."""

import gc
import math

import numpy as np
import pytest
from chain import chain, normal, trained

import xmem

MAKERS = ("Optimizer", "SGD", "Adam", "AdamW", "RMSprop", "ours")


def make(kind, parameters, rate=1e-2):
    import jittor as jt
    from xmem_jittor.training import Adam

    if kind == "ours":
        return Adam(parameters, rate)
    options = {"momentum": 0.9} if kind == "SGD" else {}
    return getattr(jt.optim, kind)(parameters, rate, **options)


def twins(depth=3, width=32):
    """Return two models with the same weights."""
    nets = chain(depth, width), chain(depth, width)
    nets[1].load_state_dict(nets[0].state_dict())
    return nets


def convolutions():
    """A model whose batch norm keeps running statistics, pending until they are computed."""
    from jittor import nn

    layers = [nn.Conv(3, 8, 3, padding=1), nn.BatchNorm(8), nn.ReLU(), nn.Conv(8, 8, 3, padding=1)]
    return nn.Sequential(*layers, nn.BatchNorm(8), nn.ReLU())


def live(backend):
    import jittor as jt

    gc.collect()
    backend.measure.synchronize()
    alive = jt.liveness_info()
    return (
        backend.measure.counters().allocated_bytes,
        alive["lived_vars"],
        alive["lived_ops"],
    )


def live_bytes(backend):
    return live(backend)[0]


def relative(found, expected):
    return max(float(np.linalg.norm(found[n] - e) / np.linalg.norm(e)) for n, e in expected.items())


def values(net):
    return {name: p.numpy() for name, p in net.named_parameters()}


def mean_loss(net, x):
    return (net(x) ** 2).mean()


@pytest.mark.parametrize("steps", [1, 2, 4, 8])
def test_accumulated_gradients_are_those_of_one_batch(backend, steps):
    net, x = chain(3, 32), normal(64, 32)
    optimizer = make("ours", trained(net))
    xmem.backward(mean_loss(net, x), optimizer)
    expected = backend.training.gradients(net, optimizer)
    xmem.zero_grad(optimizer)
    with xmem.accumulate(steps) as micro:
        for part in x.reshape(steps, -1, 32):
            xmem.backward(mean_loss(net, part), optimizer)
    assert micro.done == steps
    assert relative(backend.training.gradients(net, optimizer), expected) <= 1e-6


@pytest.mark.parametrize("kind", MAKERS)
def test_accumulation_makes_the_updates_of_one_batch_and_counts_them_once(backend, kind):
    nets, x = twins(), normal(64, 32)
    optimizers = [make(kind, trained(net), 1e-3) for net in nets]
    for _ in range(3):
        with xmem.accumulate(4, optimizers[0]):
            for part in x.reshape(4, -1, 32):
                xmem.backward(mean_loss(nets[0], part), optimizers[0])
        optimizers[1].step(mean_loss(nets[1], x))
    assert [o.n_step for o in optimizers] == [3, 3]
    if kind == "ours":
        assert [o.updates for o in optimizers] == [3, 3]
    assert "grads" not in optimizers[0].param_groups[0]
    # Adam divides by sqrt(v), so that gradients near 0 turn rounding into whole steps of 1e-3.
    assert relative(values(nets[0]), values(nets[1])) <= (1e-6 if kind in MAKERS[:2] else 1e-3)


def test_accumulation_with_scaler_and_clipping_is_one_clipped_batch(backend):
    nets, x = twins(), normal(64, 32)
    optimizers = [make("SGD", trained(net)) for net in nets]
    scaler = xmem.GradScaler(1024.0)
    for _ in range(3):
        with xmem.accumulate(4):
            for part in x.reshape(4, -1, 32):
                xmem.backward(scaler.scale(mean_loss(nets[0], part)), optimizers[0])
        scaler.unscale_(optimizers[0])
        norms = [xmem.clip_grad_norm_(optimizers[0], 0.01)]
        scaler.step(optimizers[0])
        scaler.update()
        xmem.zero_grad(optimizers[0])
        xmem.backward(mean_loss(nets[1], x), optimizers[1])
        norms.append(xmem.clip_grad_norm_(optimizers[1], 0.01))
        xmem.optimizer_step(optimizers[1])
        xmem.zero_grad(optimizers[1])
        assert norms[0].item() > 0.01
        assert norms[0].item() == pytest.approx(norms[1].item(), rel=1e-5)
    assert relative(values(nets[0]), values(nets[1])) <= 1e-6


@pytest.mark.parametrize("kind", MAKERS)
def test_an_overflow_in_one_micro_batch_skips_the_update(backend, kind):
    net, x = chain(2, 32), normal(64, 32)
    optimizer = make(kind, trained(net))
    scaler = xmem.GradScaler(1024.0)
    before = values(net)
    with xmem.accumulate(4, optimizer, scaler=scaler):
        for i, part in enumerate(x.reshape(4, -1, 32)):
            loss = mean_loss(net, part) * (math.inf if i == 1 else 1.0)
            xmem.backward(scaler.scale(loss), optimizer)
    assert scaler.get_scale() == 512.0
    assert optimizer.n_step == 0
    assert all((p == before[name]).all() for name, p in values(net).items())


def test_too_few_micro_batches_are_refused(backend):
    net, x = chain(1, 8), normal(4, 8)
    optimizer = make("ours", trained(net))
    with (
        pytest.raises(xmem.UsageError, match="has had 1 micro-batches"),
        xmem.accumulate(2, optimizer),
    ):
        xmem.backward(mean_loss(net, x), optimizer)
    assert optimizer.updates == 0


def test_too_many_micro_batches_are_refused(backend):
    net, x = chain(1, 8), normal(4, 8)
    optimizer = make("ours", trained(net))
    with xmem.accumulate(1, optimizer):
        xmem.backward(mean_loss(net, x), optimizer)
        with pytest.raises(xmem.UsageError, match="one more would weigh too much"):
            xmem.backward(mean_loss(net, x), optimizer)


def test_a_step_between_micro_batches_is_refused(backend):
    net, x = chain(1, 8), normal(4, 8)
    optimizer = make("ours", trained(net))
    with xmem.accumulate(2, optimizer):
        xmem.backward(mean_loss(net, x), optimizer)
        with pytest.raises(xmem.UsageError, match="after 1 of 2 micro-batches"):
            xmem.optimizer_step(optimizer)
        assert optimizer.updates == 0
        xmem.backward(mean_loss(net, x), optimizer)
    assert optimizer.updates == 1


def test_blocks_of_accumulation_do_not_nest(backend):
    net, x = chain(1, 8), normal(4, 8)
    optimizer = make("ours", trained(net))
    for _ in range(2):  # and afterwards one can be begun again
        with xmem.accumulate(1, optimizer):
            with pytest.raises(xmem.CompositionError, match="inside accumulate"):
                xmem.accumulate(1).__enter__()
            xmem.backward(mean_loss(net, x), optimizer)
    assert optimizer.updates == 2


def test_a_model_of_one_process_is_not_data_parallel(backend):
    net = chain(1, 8)
    with pytest.raises(xmem.UsageError, match="not data-parallel"):
        xmem.accumulate(2, model=net).__enter__()
    assert "unreduced" not in backend.training.gaps
    with xmem.accumulate(1, model=net):  # nothing of the refused block is left
        xmem.backward(mean_loss(net, normal(4, 8)), make("ours", trained(net)))


def test_an_update_needs_new_gradients(backend):
    net, x = chain(1, 8), normal(4, 8)
    optimizer = make("ours", trained(net))
    xmem.backward(mean_loss(net, x), optimizer)
    xmem.optimizer_step(optimizer)
    with pytest.raises(xmem.UsageError, match="before backward"):
        xmem.optimizer_step(optimizer)
    with pytest.raises(xmem.UsageError, match="before backward"):
        xmem.clip_grad_norm_(optimizer, 1.0)


@pytest.mark.parametrize("kind", MAKERS)
def test_native_loops_stay_what_they_were(backend, kind):
    nets, x = twins(), normal(16, 32)
    optimizers = [make(kind, trained(net)) for net in nets]
    for step in range(4):
        optimizers[0].step(mean_loss(nets[0], x))
        if step % 2:
            optimizers[1].step(mean_loss(nets[1], x))
        else:
            xmem.backward(mean_loss(nets[1], x), optimizers[1])
            xmem.optimizer_step(optimizers[1])
    assert [o.n_step for o in optimizers] == [4, 4]
    found = values(nets[1])
    assert all((p == found[name]).all() for name, p in values(nets[0]).items())


@pytest.mark.parametrize("build", ["chain", "convolutions"])
def test_the_peak_does_not_grow_with_the_number_of_micro_batches(backend, build):
    net = chain(6, 128) if build == "chain" else convolutions()
    shape = (256, 128) if build == "chain" else (4, 3, 32, 32)
    optimizer = make("ours", trained(net))
    peaks = {}
    for steps in (2, 2, 8):  # once to warm up
        inputs = normal(steps, *shape)
        start = live_bytes(backend)
        backend.measure.reset_peak()
        with xmem.accumulate(steps, optimizer):
            for part in range(steps):
                loss = mean_loss(net, inputs[part])
                xmem.backward(loss, optimizer)
        backend.measure.synchronize()
        peaks[steps] = backend.measure.counters().peak_allocated_bytes - start
        del inputs, loss
    assert peaks[8] <= 1.05 * peaks[2], f"peak above static bytes by micro-batches: {peaks}"


def with_gradients(gradients, dtype="float32"):
    """Return an optimizer with these gradients."""
    import jittor as jt

    parameters = [jt.array(np.ones(g.shape, dtype)) for g in gradients]
    optimizer = make("Optimizer", parameters)
    products = [(p * jt.array(g)).sum() for p, g in zip(parameters, gradients, strict=True)]
    xmem.backward(sum(products), optimizer)
    return optimizer


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("largest", [0.01, 1.0, 1000.0])
@pytest.mark.parametrize("p", [0.5, 1.0, 2.0, 3.0, math.inf])
def test_clipping_is_that_of_pytorch(backend, p, largest, dtype):
    torch = pytest.importorskip("torch")
    generator = np.random.default_rng(3)
    gradients = [generator.standard_normal(s).astype(dtype) for s in [(7, 5), (3,), (2, 3, 4)]]
    optimizer = with_gradients(gradients, dtype)
    found = xmem.clip_grad_norm_(optimizer, largest, norm_type=p)
    parameters = [torch.nn.Parameter(torch.ones(g.shape)) for g in gradients]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = torch.tensor(gradient.astype(np.float32))
    expected = torch.nn.utils.clip_grad_norm_(parameters, largest, norm_type=p)
    assert found.item() == pytest.approx(expected.item(), rel=1e-5)
    tolerance = 1e-5 if dtype == "float32" else 1e-3
    for g, parameter in zip(optimizer.param_groups[0]["grads"], parameters, strict=True):
        assert np.allclose(g.numpy(), parameter.grad.numpy(), rtol=tolerance, atol=1e-7)


@pytest.mark.parametrize("p", [1.0, 2.0, math.inf])
@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_the_norm_tells_of_gradients_that_are_not_finite(backend, bad, p):
    gradient = np.ones(1000, np.float32)
    gradient[500] = bad
    found = xmem.clip_grad_norm_(with_gradients([gradient]), 1.0, norm_type=p).item()
    assert math.isnan(found) if math.isnan(bad) else found == bad


def test_the_norm_of_huge_gradients_for_infinity_is_finite(backend):
    gradient = np.full(100, 1e30, np.float32)
    found = xmem.clip_grad_norm_(with_gradients([gradient]), 1.0, norm_type=math.inf)
    assert found.item() == pytest.approx(1e30)


@pytest.mark.parametrize("shape", [(2048, 1024), (64, 64, 512), (4, 1 << 19), (1 << 21,)])
def test_the_norm_of_many_numbers_is_exact(backend, shape):
    gradient = np.random.default_rng(1).random(shape).astype(np.float32)
    found = xmem.clip_grad_norm_(with_gradients([gradient]), 1e9).item()
    expected = np.linalg.norm(gradient.astype(np.float64).reshape(-1))
    assert found == pytest.approx(expected, rel=1e-6)


def test_clipping_scales_by_the_coefficient_of_pytorch(backend):
    gradient = np.full((4,), 3.0, np.float32)
    optimizer = with_gradients([gradient])
    assert xmem.clip_grad_norm_(optimizer, 3.0).item() == 6.0
    expected = np.float32(3.0) * (np.float32(3.0) / (np.float32(6.0) + np.float32(1e-6)))
    assert np.allclose(optimizer.param_groups[0]["grads"][0].numpy(), expected, rtol=2e-7)


def test_clipping_takes_the_optimizer_not_parameters(backend):
    net = chain(1, 8)
    with pytest.raises(xmem.UsageError, match="takes the optimizer on Jittor"):
        xmem.clip_grad_norm_(net.parameters(), 1.0)


def various():
    """A model with modules in different modes, with a frozen parameter, and with dropout."""
    from jittor import nn

    net = nn.Sequential(
        nn.Linear(16, 16), nn.Dropout(0.5), nn.BatchNorm(16), nn.Sequential(nn.Linear(16, 16))
    )
    net.train()
    net[2].is_train = False
    for module in (net[0], net[3]):
        vars(module).pop("is_train")
    net[0].weight.stop_grad()
    return net


def modes(net):
    flags = [vars(module).get("is_train") for module in net.modules()]
    return flags, [p.is_stop_grad() for p in net.parameters()], [id(p) for p in net.parameters()]


def test_evaluation_mode_is_entered_and_left_exactly(backend):
    net = various()
    before = modes(net)
    with xmem.inference(net) as receipt:
        assert not any(module.is_train for module in net.modules())
        with xmem.inference(net):
            pass
        assert not any(module.is_train for module in net.modules())
    assert receipt.applied_to == 6
    assert modes(net) == before
    assert not hasattr(net, "backup_grad_state")
    with pytest.raises(KeyError), xmem.inference(net):
        raise KeyError
    assert modes(net) == before


def test_a_loss_made_before_evaluation_has_its_gradients(backend):
    net, x = various(), normal(8, 16)
    net[1].is_train = False  # the same numbers twice
    targets = trained(net)
    import jittor as jt

    expected = [g.numpy() for g in jt.grad(mean_loss(net, x), targets, retain_graph=False)]
    loss = mean_loss(net, x)
    with xmem.inference(net):
        net(x).sync()
    found = [g.numpy() for g in jt.grad(loss, targets, retain_graph=False)]
    assert len(found) == 5
    assert all((f == e).all() and e.any() for f, e in zip(found, expected, strict=True))


def test_dropout_is_off_in_inference_only(backend):
    net, x = various(), normal(8, 16)
    with xmem.inference(net):
        first, second = net(x).numpy(), net(x).numpy()
    assert (first == second).all()
    assert (net(x).numpy() != net(x).numpy()).any()


@pytest.mark.parametrize("block", ["inference", "no_grad"])
def test_outputs_hold_no_graph(backend, block):
    net, x = chain(6, 128), normal(256, 128)
    enter = (lambda: xmem.inference(net)) if block == "inference" else xmem.no_grad
    before = live(backend)
    with enter():
        y = net(x)
    after = live(backend)
    assert y.is_stop_grad()
    grown = [a - b for a, b in zip(after, before, strict=True)]
    assert grown == [y.nbytes, 1, 0], f"bytes, tensors, operations: {grown}"
    kept = net(x)
    assert live_bytes(backend) - after[0] >= 6 * kept.nbytes  # where gradients are wanted


def test_the_receipt_says_what_forward_would_have_left(backend):
    net, x = chain(6, 128), normal(256, 128)
    net(x).sync()
    with xmem.inference(net, inputs=[x]) as receipt:
        net(x).sync()
    before = live_bytes(backend)
    kept = net(x)
    measured = live_bytes(backend) - before - kept.nbytes
    # Numbers in expressions are tensors, of 4 bytes each.
    assert abs(receipt.expected_saving_bytes - measured) <= 100, (
        f"{receipt.expected_saving_bytes} bytes expected, {measured} measured"
    )
    assert measured > 5 * x.nbytes


def test_logged_values_hold_no_graph(backend):
    net, x = chain(6, 128), normal(256, 128)
    before = live_bytes(backend)
    logged = []
    for _ in range(5):
        loss = mean_loss(net, x)
        logged.append(xmem.log_value(loss))
        expected = loss.item()
    del loss
    after = live_bytes(backend)
    assert after == before, f"{after - before} bytes in {logged}"
    assert logged[-1] == expected
    assert all(type(value) is float for value in logged)
    kept = [mean_loss(net, x) for _ in range(5)]
    held = live_bytes(backend) - before
    assert held > 5 * 6 * x.nbytes, f"{held} bytes held by {len(kept)} losses"


def test_a_loop_that_logs_grows_by_nothing(backend):
    net, x = chain(3, 64), normal(64, 64)
    optimizer = make("ours", trained(net))
    seen, logged = [], []
    for step in range(24):
        loss = mean_loss(net, x)
        xmem.backward(loss, optimizer)
        xmem.optimizer_step(optimizer)
        xmem.zero_grad(optimizer)
        logged.append(xmem.log_value(loss))
        if step in (3, 23):
            seen.append(live(backend))
    assert seen[0] == seen[1], f"bytes, tensors, operations after 4 steps {seen[0]}, 24 {seen[1]}"
    assert logged[-1] < logged[0]


def test_gradients_looked_up_by_parameter_are_forgotten_too(backend):
    net, x = chain(2, 64), normal(64, 64)
    optimizer = make("ours", trained(net))
    before = live_bytes(backend)
    xmem.backward(mean_loss(net, x), optimizer)
    assert trained(net)[0].opt_grad(optimizer).shape == trained(net)[0].shape
    xmem.zero_grad(optimizer)
    assert live_bytes(backend) == before


@pytest.mark.parametrize("kind", ["SGD", "Adam", "AdamW", "RMSprop", "ours"])
def test_parameters_that_are_updated_under_no_grad_stay_trainable(backend, kind):
    net, x = chain(2, 8), normal(8, 8)
    optimizer = make(kind, trained(net))
    before = [p.numpy().copy() for p in trained(net)]
    for _ in range(2):
        xmem.backward(mean_loss(net, x), optimizer)
        with xmem.no_grad():
            xmem.optimizer_step(optimizer)
        assert not any(p.is_stop_grad() for p in net.parameters())
        after = [p.numpy().copy() for p in trained(net)]
        assert all((a != b).any() for a, b in zip(after, before, strict=True))
        before = after


def test_where_all_is_frozen_there_are_no_gradients(backend):
    net, x = chain(2, 8), normal(8, 8)
    optimizer = make("SGD", trained(net))
    xmem.backward(mean_loss(net, x), optimizer)
    for p in net.parameters():
        p.stop_grad()
    with pytest.raises(xmem.UsageError, match="no gradients, for all of the"):
        xmem.clip_grad_norm_(optimizer, 1.0)
    with pytest.raises(xmem.UsageError, match="frozen"):
        xmem.GradScaler().unscale_(optimizer)


@pytest.mark.parametrize("shape", [(2,), (3, 1), (0,)])
def test_the_value_of_what_is_no_scalar_is_refused(backend, shape):
    import jittor as jt

    with pytest.raises(xmem.UsageError, match="Give a scalar"):
        xmem.log_value(jt.zeros(shape))
