"""Optimizers with states in few bits on Jittor: their rules, and what else a loop does to them."""

import numpy as np
import pytest
from chain import chain, normal, trained

import xmem
from xmem import optim
from xmem import optim_rules as rules

SHAPES = ((70, 100), (8, 4, 3, 3), (5000,))
MAKERS = {
    "adamw": lambda p, **k: optim.AdamW(p, 1e-2, **k),
    "lion": lambda p, **k: optim.Lion(p, 1e-2, **k),
    "adafactor": lambda p, **k: optim.Adafactor(p, 1e-2, **k),
    "adafactor with momentum": lambda p, **k: optim.Adafactor(p, 1e-2, beta1=0.9, **k),
}


def parameters():
    """Return parameters of several shapes, of which one is small; the same each time."""
    import jittor as jt

    generator = np.random.RandomState(1)
    return [jt.array(generator.randn(*shape).astype(np.float32)) for shape in SHAPES]


def gradients_of(steps):
    generator = np.random.RandomState(2)
    return [[generator.randn(*s).astype(np.float32) for s in SHAPES] for _ in range(steps)]


def run(optimizer, held, steps=5):
    """Step with given gradients; returns the parameters."""
    import jittor as jt

    for gradients in gradients_of(steps):
        # The gradient of sum(p * g) is g.
        optimizer.step(sum((p * jt.array(g)).sum() for p, g in zip(held, gradients, strict=True)))
    return [p.numpy() for p in held]


def states(optimizer):
    return {
        (number, name, i): state.numpy()
        for number, group in enumerate(optimizer.param_groups)
        for name in ("m", "values", "row", "column")
        for i, state in enumerate(group.get(name, ()))
        if state is not None
    }


@pytest.mark.parametrize("bits", [32, 8, 4])
@pytest.mark.parametrize("rule", ["adam", "lion"])
def test_parameters_and_states_are_those_of_the_rule_in_numpy(backend, rule, bits):
    held = parameters()
    make = MAKERS["adamw" if rule == "adam" else rule]
    optimizer = make(held, weight_decay=0.1, state_bits=bits)
    found = run(optimizer, held)
    names = ("m", "values") if rule == "adam" else ("m",)
    for i, start in enumerate(p.numpy().reshape(-1) for p in parameters()):
        own = bits if start.size >= 4096 else 32
        size = rules.state_bytes(start.size, own)
        zeros = np.zeros(size, np.uint8).view(np.float32 if own == 32 else np.uint8)
        expected, state = start, (zeros,) * len(names)
        for step, gradients in enumerate(gradients_of(5), start=1):
            numbers = (
                rules.adam_numbers(
                    step, lr=1e-2, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.1, decoupled=True
                )
                if rule == "adam"
                else rules.lion_numbers(lr=1e-2, betas=(0.9, 0.99), weight_decay=0.1)
            )
            expected, state = rules.step(
                rule, expected, gradients[i].reshape(-1), state,
                bits=own, seed=rules.seed_of(step, i), numbers=numbers,
            )  # fmt: skip
        assert (found[i].reshape(-1) == expected).all()
        for name, wanted in zip(names, state, strict=True):
            assert (optimizer.param_groups[0][name][i].numpy().reshape(-1) == wanted).all()


@pytest.mark.parametrize("beta1", [None, 0.9])
def test_adafactor_is_the_rule_in_numpy(backend, beta1):
    held = parameters()
    optimizer = optim.Adafactor(held, 1e-2, beta1=beta1, weight_decay=0.1)
    found = run(optimizer, held)
    for i, p in enumerate(parameters()):
        x = p.numpy()
        shape = (x.shape[0], x.size // x.shape[0]) if x.ndim > 1 else x.shape
        expected = x.reshape(shape)
        row = np.zeros(shape[0], np.float32) if x.ndim > 1 else None
        factors = row, np.zeros(shape[-1], np.float32)
        bits = 8 if x.size >= 4096 else 32
        momentum = None
        if beta1 is not None:
            empty = np.zeros(rules.state_bytes(x.size, bits), np.uint8)
            momentum = empty if bits == 8 else empty.view(np.float32)
        for step, gradients in enumerate(gradients_of(5), start=1):
            expected, factors, momentum = rules.adafactor(
                expected, gradients[i].reshape(shape), factors, momentum, step=step, lr=1e-2,
                beta2_decay=-0.8, eps=(2.0**-23, 1e-3), weight_decay=0.1, clip=1.0,
                beta1=beta1 or 0.0, bits=bits, seed=rules.seed_of(step, i),
            )  # fmt: skip
        assert np.abs(found[i].reshape(shape) - expected).max() <= 2e-6


def test_in_32_bits_adamw_is_the_one_of_jittor_over_50_steps(backend):
    import jittor as jt

    mine, theirs = parameters(), parameters()
    found = run(optim.AdamW(mine, 1e-2, weight_decay=0.1, state_bits=32), mine, 50)
    expected = run(jt.optim.AdamW(theirs, 1e-2, weight_decay=0.1), theirs, 50)
    for a, b in zip(found, expected, strict=True):
        assert np.abs(a - b).max() <= 1e-6


@pytest.mark.parametrize("maker", MAKERS)
def test_parameters_stay_the_same_objects_and_trainable(backend, maker):
    model = chain(2, 64)
    before = model.parameters()
    optimizer = MAKERS[maker](before)
    for _ in range(2):
        optimizer.step(model(normal(8, 64)).sqr().mean())
    assert all(a is b for a, b in zip(before, model.parameters(), strict=True))
    assert not any(p.is_stop_grad() for p in before)
    assert all(str(p.dtype) == "float32" for p in before)


def test_a_step_under_no_grad_freezes_nothing(backend):
    import jittor as jt

    [p, *_] = held = parameters()
    optimizer = optim.AdamW(held)
    optimizer.backward(sum(q.sum() for q in held))
    with jt.no_grad():
        optimizer.step()
    assert not p.is_stop_grad()
    assert np.abs(jt.grad((p * p).sum(), [p])[0].numpy() - 2 * p.numpy()).max() <= 1e-6


def test_a_step_drops_the_gradients_and_a_second_one_is_refused(backend):
    held = parameters()
    optimizer = optim.AdamW(held)
    optimizer.backward(held[0].sum())
    assert float(held[0].opt_grad(optimizer).sum().item()) == held[0].numel()
    optimizer.step()
    assert "grads" not in optimizer.param_groups[0]
    with pytest.raises(xmem.UsageError, match="step came before backward"):
        optimizer.step()
    with pytest.raises(xmem.UsageError, match="between backward and step"):
        held[0].opt_grad(optimizer)


def test_micro_batches_add_up_and_count_as_one_update(backend):
    import jittor as jt

    found = []
    for kind in ("whole", "own loop", "accumulate"):
        held = parameters()
        optimizer = optim.AdamW(held, 1e-2)
        for gradients in gradients_of(3):

            def loss(gradients=gradients, held=held):
                return sum((p * jt.array(g)).sum() for p, g in zip(held, gradients, strict=True))

            if kind == "whole":
                optimizer.step(loss())
            elif kind == "own loop":
                for _ in range(2):
                    optimizer.backward(loss() / 2)
                optimizer.step()
            else:
                with xmem.accumulate(2, optimizer):
                    for _ in range(2):
                        xmem.backward(loss(), optimizer)
        assert optimizer.param_groups[0]["steps"] == [3, 3, 3]
        found.append([p.numpy() for p in held])
    for other in found[1:]:
        for a, b in zip(other, found[0], strict=True):
            assert (a == b).all()


def test_groups_have_options_of_their_own(backend):
    import jittor as jt

    for name, value in (("lr", 0.0), ("betas", (0.5, 0.6)), ("eps", 1.0), ("weight_decay", 0.5)):
        one, two, alone = parameters(), parameters(), parameters()
        groups = [{"params": one}, {"params": two, name: value}]
        optimizer = optim.AdamW(groups, 1e-2, state_bits=32)
        other = optim.AdamW(alone, **{"lr": 1e-2, name: value}, state_bits=32)
        for gradients in gradients_of(2):
            for opt, held in ((optimizer, one + two), (other, alone)):
                pairs = zip(held, gradients * 2, strict=False)
                opt.step(sum((p * jt.array(g)).sum() for p, g in pairs))
        for a, b, c in zip(one, two, alone, strict=True):
            assert (b.numpy() == c.numpy()).all(), name
            assert (a.numpy() != b.numpy()).any(), name


def test_frozen_parameters_are_left_alone_and_take_no_state(backend):
    held = parameters()
    held[0].stop_grad()
    before = held[0].numpy()
    optimizer = optim.AdamW(held)
    run(optimizer, held, 2)
    group = optimizer.param_groups[0]
    assert (held[0].numpy() == before).all()
    assert group["m"][0] is None
    assert group["steps"] == [0, 2, 2]
    held[0].start_grad()
    run(optimizer, held, 1)
    assert group["steps"] == [1, 3, 3]


def test_a_group_that_is_added_begins_its_own_count(backend):
    import jittor as jt

    held, more, alone = parameters(), parameters(), parameters()
    optimizer = optim.AdamW(held, 1e-2, state_bits=32)
    run(optimizer, held, 3)
    optimizer.add_param_group({"params": more})
    for gradients in gradients_of(2):
        pairs = zip(held + more, gradients * 2, strict=True)
        optimizer.step(sum((p * jt.array(g)).sum() for p, g in pairs))
    run(optim.AdamW(alone, 1e-2, state_bits=32), alone, 2)
    for a, b in zip(more, alone, strict=True):
        assert (a.numpy() == b.numpy()).all()


@pytest.mark.parametrize("scheduler", ["StepLR", "CosineAnnealingLR", "LambdaLR"])
def test_schedules_of_jittor_reach_the_step(backend, scheduler):
    import jittor as jt
    from jittor import lr_scheduler

    held = parameters()
    optimizer = optim.Lion(held, 1e-2)
    schedule = {
        "StepLR": lambda: lr_scheduler.StepLR(optimizer, 1, gamma=0.5),
        "CosineAnnealingLR": lambda: lr_scheduler.CosineAnnealingLR(optimizer, 4),
        "LambdaLR": lambda: jt.optim.LambdaLR(optimizer, lambda epoch: 0.5**epoch),
    }[scheduler]()
    rates = []
    for _ in range(4):
        before = held[2].numpy()
        optimizer.step(held[2].sum())
        rates.append(optimizer.param_groups[0].get("lr", optimizer.lr))
        # Lion moves every element by the rate.
        assert np.abs(before - held[2].numpy() - rates[-1]).max() <= 1e-6
        schedule.step()
    assert len(set(rates)) >= 3


@pytest.mark.parametrize("clip", ["ours", "theirs"])
def test_clipped_gradients_are_what_the_step_sees(backend, clip):
    import jittor as jt

    found = {}
    for scale in (1.0, 1e3):
        held = parameters()
        optimizer = optim.AdamW(held, 1e-2)
        for gradients in gradients_of(2):
            loss = sum((p * jt.array(g)).sum() for p, g in zip(held, gradients, strict=True))
            optimizer.backward(loss * scale)
            if clip == "ours":
                xmem.clip_grad_norm_(optimizer, 1.0)
            else:
                optimizer.clip_grad_norm(1.0)
            optimizer.step()
        found[scale] = [p.numpy() for p in held]
    for a, b in zip(found[1.0], found[1e3], strict=True):
        assert np.abs(a - b).max() <= 1e-4


def test_a_step_that_a_scaler_skips_changes_no_state_and_no_count(backend):
    held = parameters()
    optimizer = optim.AdamW(held, 1e-2)
    run(optimizer, held, 2)
    scaler = xmem.GradScaler(8.0)
    before, values = states(optimizer), [p.numpy() for p in held]
    counts = list(optimizer.param_groups[0]["steps"]), optimizer.n_step
    xmem.backward(scaler.scale(held[0].sum() * float("inf")), optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 4.0
    assert (list(optimizer.param_groups[0]["steps"]), optimizer.n_step) == counts
    assert all((states(optimizer)[k] == v).all() for k, v in before.items())
    assert all((p.numpy() == v).all() for p, v in zip(held, values, strict=True))
    xmem.backward(scaler.scale(held[0].sum()), optimizer)
    scaler.step(optimizer)
    assert optimizer.param_groups[0]["steps"] == [3, 3, 3]


def test_a_half_model_is_trained_on_masters_and_without(backend):
    import jittor as jt

    x, losses = normal(32, 64), {}
    for kind in ("float32", "masters", "none"):
        jt.set_global_seed(0)
        model = chain(2, 64)
        optimizer = optim.AdamW(trained(model), 1e-3)
        if kind != "float32":
            xmem.cast_model(model, "float16", optimizer=optimizer if kind == "masters" else None)
        if kind == "none":
            optimizer = optim.AdamW(trained(model), 1e-3)
        losses[kind] = []
        for _ in range(10):
            loss = model(x.cast("float32" if kind == "float32" else "float16")).float32()
            loss = (loss - 1).sqr().mean()
            xmem.backward(loss, optimizer)
            xmem.optimizer_step(optimizer)
            losses[kind].append(xmem.log_value(loss))
        wanted = "float32" if kind == "float32" else "float16"
        assert {str(p.dtype) for p in trained(model)} == {wanted}
    for kind in ("masters", "none"):
        assert abs(losses[kind][-1] - losses["float32"][-1]) <= 1e-2 * losses["float32"][0]
    assert losses["float32"][-1] < losses["float32"][0]


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda p: optim.AdamW([]), "params is empty"),
        (lambda p: optim.AdamW(p, state_bits=16), "state_bits is 16"),
        (lambda p: optim.AdamW([{"params": p, "lr": -1.0}]), "lr=-1.0"),
        (lambda p: optim.AdamW(p, engine="bitsandbytes"), "engine='bitsandbytes'"),
        (lambda p: optim.AdamW([q.cast("float64") for q in p]), "float64"),
    ],
)
def test_what_cannot_be_is_named(backend, make, said):
    with pytest.raises(xmem.UsageError, match=said):
        make(parameters())


def test_optimizer_in_backward_is_refused_with_what_to_do(backend):
    model = chain(1, 8)
    with pytest.raises(xmem.CapabilityError, match=r"lazy.*step\(loss\)"):
        optim.optimizer_in_backward(model, optim.AdamW(trained(model)))
