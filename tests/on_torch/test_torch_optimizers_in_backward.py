"""Parameters step inside backward: they come out the same, with fewer gradients alive."""

import copy
import gc
import weakref

import pytest
import torch
from on_torch.optimizing import (
    batches,
    gpt,
    loss_of,
    same_parameters,
    same_states,
    train,
)

import xmem
from xmem import optim
from xmem.errors import CompositionError, UsageError

MAKERS = {
    "torch AdamW": lambda p: torch.optim.AdamW(p, 1e-3),
    "torch AdamW fused": lambda p: torch.optim.AdamW(p, 1e-3, fused=True),
    "torch SGD": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
    "torch RMSprop": lambda p: torch.optim.RMSprop(p, 1e-3),
    "torch Adafactor": lambda p: torch.optim.Adafactor(p),
    "xmem AdamW": lambda p: optim.AdamW(p, 1e-3),
    "xmem AdamW 4": lambda p: optim.AdamW(p, 1e-3, state_bits=4),
    "xmem Adafactor": lambda p: optim.Adafactor(p, beta1=0.9),
}


def groups(model):
    parameters = list(model.parameters())
    return [{"params": parameters[:5]}, {"params": parameters[5:], "lr": 3e-3}]


@pytest.mark.parametrize("name", MAKERS)
def test_parameters_and_states_come_out_bit_for_bit_and_no_gradient_stays(name):
    model, other = gpt(), gpt()
    plain, optimizer = MAKERS[name](groups(model)), MAKERS[name](groups(other))
    receipt = optim.optimizer_in_backward(other, optimizer)
    assert receipt.applied_to == len(list(other.parameters()))
    assert receipt.names == tuple(n for n, _ in other.named_parameters())
    train(model, plain, 3)
    for batch in batches(3):
        xmem.backward(loss_of(other, batch), optimizer)
        assert all(p.grad is None for p in other.parameters())
    assert same_parameters(model.parameters(), other.parameters())
    by_name = {
        n: (plain.state[p], optimizer.state[q])
        for (n, p), (_, q) in zip(model.named_parameters(), other.named_parameters(), strict=True)
    }
    for a, b in by_name.values():
        assert a.keys() == b.keys()
        for key, value in a.items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(b[key]))
    receipt.undo()
    receipt.undo()
    for m, o in ((model, plain), (other, optimizer)):
        train(m, o, 1, seed=5)
    assert same_parameters(model.parameters(), other.parameters())


def test_the_peak_of_a_step_falls_by_most_of_the_gradients():
    peaks = []
    for applied in (False, True):
        model = gpt(width=128, layers=3)
        optimizer = optim.AdamW(model.parameters())
        train(model, optimizer, 1)
        if applied:
            receipt = optim.optimizer_in_backward(model, optimizer)
        batch = [t[:1] for t in next(batches(1))]
        with xmem.measure(model=model, optimizer=optimizer, inputs=batch) as m:
            xmem.backward(loss_of(model, batch), optimizer)
            if not applied:
                xmem.optimizer_step(optimizer)
                xmem.zero_grad(optimizer)
        peaks.append(m.peak_above_static_bytes)
    gradients = sum(p.nbytes for p in model.parameters())
    print(peaks, gradients, receipt.expected_saving_bytes)
    # Activations of the first layers live on beside the gradients of the last ones.
    assert peaks[0] - peaks[1] > 0.5 * gradients, (peaks, gradients)
    assert 0.6 * gradients < receipt.expected_saving_bytes < gradients


def test_schedules_and_loaded_states_hold_in_backward():
    models = [gpt(), gpt()]
    made = [torch.optim.AdamW(m.parameters(), 1e-3) for m in models]
    schedulers = [torch.optim.lr_scheduler.StepLR(o, 1, gamma=0.5) for o in made]
    optim.optimizer_in_backward(models[1], made[1])
    for batch in batches(2):
        loss_of(models[0], batch).backward()
        made[0].step()
        made[0].zero_grad()
        loss_of(models[1], batch).backward()
        for scheduler in schedulers:
            scheduler.step()
    assert same_parameters(models[0].parameters(), models[1].parameters())
    for optimizer in made:
        optimizer.load_state_dict(copy.deepcopy(made[0].state_dict()))
        optimizer.param_groups[0]["lr"] = 0.01
    train(models[0], made[0], 1)
    loss_of(models[1], next(batches(1))).backward()
    assert same_parameters(models[0].parameters(), models[1].parameters())
    assert same_states(*made)


def test_a_parameter_that_is_used_twice_steps_once():
    model, other = gpt(), gpt()
    made = []
    for m in (model, other):
        m.head.weight = m.token.weight
        made.append(optim.AdamW(m.parameters()))
    optim.optimizer_in_backward(other, made[1])
    train(model, made[0], 2)
    for batch in batches(2):
        loss_of(other, batch).backward()
    assert same_parameters(model.parameters(), other.parameters())


def test_an_optimizer_that_nobody_else_holds_steps_and_goes_with_its_model():
    model, other = gpt(), gpt()
    train(model, optim.AdamW(model.parameters()), 2)
    optimizer = optim.AdamW(other.parameters())
    gone = [weakref.ref(optimizer), weakref.ref(other.token.weight)]
    optim.optimizer_in_backward(other, optimizer)
    del optimizer
    gc.collect()
    for batch in batches(2):
        loss_of(other, batch).backward()
    assert same_parameters(model.parameters(), other.parameters())
    copied = copy.deepcopy(other)
    layer = other.layers[0].expand
    del other
    gc.collect()
    assert [ref() for ref in gone] == [None, None]
    loss_of(copied, next(batches(1))).backward()
    assert all(p.grad is not None for p in copied.parameters())
    with pytest.raises(UsageError, match="its optimizer went with the model"):
        layer(torch.ones(1, 64)).sum().backward()


def test_frozen_parameters_stay_and_nothing_to_step_warns():
    model = gpt()
    for p in model.parameters():
        p.requires_grad_(False)
    optimizer = optim.AdamW(model.parameters())
    with pytest.warns(xmem.XmemWarning, match="applied to nothing"):
        optim.optimizer_in_backward(model, optimizer).undo()


def test_what_cannot_step_in_backward_is_refused_before_anything_changes():
    model, parameters = gpt(), list(gpt().parameters())
    cases = [
        (UsageError, "not the model's", lambda m: (m, torch.optim.SGD(parameters, 0.1))),
        (UsageError, "LBFGS", lambda m: (m, torch.optim.LBFGS(m.parameters()))),
        (UsageError, "Mine", lambda m: (m, _foreign(m))),
        (UsageError, "is no module", lambda m: (3, torch.optim.SGD(m.parameters(), 0.1))),
        (UsageError, "gradients already", _with_gradients),
        (CompositionError, "hooks on its step", _with_a_hook),
        (CompositionError, "reduces gradients", _data_parallel),
    ]
    for kind, words, make in cases:
        model = gpt()
        given, optimizer = make(model)
        with pytest.raises(kind, match=words):
            optim.optimizer_in_backward(given, optimizer)
        assert not any(p._post_accumulate_grad_hooks for p in model.parameters())
    model = gpt()
    optimizer = optim.AdamW(model.parameters())
    with pytest.raises(CompositionError, match="accumulate"), xmem.accumulate(2):
        optim.optimizer_in_backward(model, optimizer)
    receipt = optim.optimizer_in_backward(model, optimizer)
    with pytest.raises(UsageError, match="already"):
        optim.optimizer_in_backward(model, optimizer)
    with pytest.raises(UsageError, match="already"):
        optim.optimizer_in_backward(model, torch.optim.SGD(model.parameters(), 0.1))
    receipt.undo()
    half = gpt()
    optimizer = optim.AdamW(half.parameters())
    xmem.cast_model(half, "bfloat16", optimizer=optimizer)
    with pytest.raises(CompositionError, match="masters"):
        optim.optimizer_in_backward(half, optimizer)


def _foreign(model):
    return type("Mine", (torch.optim.SGD,), {"__module__": "mine"})(model.parameters(), 0.1)


def _with_gradients(model):
    loss_of(model, next(batches(1))).backward()
    return model, optim.AdamW(model.parameters())


def _with_a_hook(model):
    optimizer = optim.AdamW(model.parameters())
    optimizer.register_step_post_hook(lambda *_: None)
    return model, optimizer


def _data_parallel(model):
    model.no_sync = lambda: None
    return model, optim.AdamW(model.parameters())


def test_what_needs_all_gradients_is_refused_while_it_is_applied():
    model = gpt()
    optimizer = optim.AdamW(model.parameters())
    receipt = optim.optimizer_in_backward(model, optimizer)
    before = [p.detach().clone() for p in model.parameters()]
    scaler = xmem.GradScaler()
    loss = loss_of(model, next(batches(1)))
    calls = {
        "clip_grad_norm_": lambda: xmem.clip_grad_norm_(optimizer, 1.0),
        "clip_grad_norm_ ": lambda: xmem.clip_grad_norm_(list(model.parameters()), 1.0),
        "optimizer_step": lambda: xmem.optimizer_step(optimizer),
        "GradScaler": lambda: scaler.scale(loss),
        "accumulate": lambda: _accumulated(loss, optimizer),
    }
    for name, call in calls.items():
        with pytest.raises(CompositionError, match=name.strip()):
            call()
    assert same_parameters(before, list(model.parameters()))
    receipt.undo()
    xmem.backward(scaler.scale(loss), optimizer)
    xmem.clip_grad_norm_(optimizer, 1.0)


def _accumulated(loss, optimizer):
    with xmem.accumulate(2):
        xmem.backward(loss, optimizer)
