"""Running optimizers into few bits, their states to files and back, and the loop around them."""

import copy
import io
import pickle

import pytest
import torch
from on_torch.optimizing import (
    batches,
    gpt,
    loss_of,
    same,
    same_parameters,
    same_states,
    tensors,
    train,
)

import xmem
from xmem import optim
from xmem.errors import UsageError

PLAIN = {
    "adamw": lambda p: torch.optim.AdamW(p, 2e-3),
    "adamw fused": lambda p: torch.optim.AdamW(p, 2e-3, fused=True),
    "adam": lambda p: torch.optim.Adam(p, 2e-3, weight_decay=0.01, foreach=True),
    "sgd": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9, nesterov=True, weight_decay=1e-4),
}


def close(found, expected, within):
    return abs(found[-1] / expected[-1] - 1) <= within


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("name", PLAIN)
def test_a_running_optimizer_goes_on_in_few_bits(name, bits):
    plain, model = gpt(), gpt()
    expected = train(plain, PLAIN[name](plain.parameters()), 24)
    optimizer = PLAIN[name](model.parameters())
    train(model, optimizer, 12)
    full = sum(t.nbytes for t in tensors(optimizer))
    found = optim.quantize_optimizer(optimizer, bits)
    assert found is optimizer
    assert sum(t.nbytes for t in tensors(optimizer)) < full / (2.5 if bits == 8 else 4)
    state = next(iter(optimizer.state.values()))
    assert state["step"] == (1 if name == "sgd" else 12)
    assert found.param_groups[0]["lr"] == (0.05 if name == "sgd" else 2e-3)
    losses = []
    for i, batch in enumerate(batches(24)):
        if i < 12:
            continue
        loss = loss_of(model, batch)
        loss.backward()
        losses.append(float(loss.detach()))
        optimizer.step()
        optimizer.zero_grad()
    assert close(losses, expected, 0.02), (losses[-1], expected[-1])


def test_schedulers_and_hooks_that_hold_the_optimizer_go_on():
    model = gpt()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    seen = []
    optimizer.register_step_post_hook(lambda *_: seen.append(optimizer.param_groups[0]["lr"]))
    train(model, optimizer, 2, after=scheduler.step)
    optim.quantize_optimizer(optimizer, 8)
    optimizer._opt_called = False
    train(model, optimizer, 2, after=scheduler.step)
    assert seen == [1e-3, 5e-4, 2.5e-4, 1.25e-4]
    assert optimizer._opt_called
    assert any(t.dtype == torch.uint8 for t in tensors(optimizer))
    # The step that the scheduler had wrapped was the old rule's.
    before = [state["step"] for state in optimizer.state.values()]
    assert set(before) == {4}


def test_a_fused_optimizer_leaves_unscaling_to_the_scaler_from_then_on():
    [p] = [torch.nn.Parameter(torch.ones(80, 80))]
    optimizer = torch.optim.AdamW([p], 1e-3, fused=True)
    scaler = xmem.GradScaler(1024.0)

    def step(factor):
        xmem.zero_grad(optimizer)
        xmem.backward(scaler.scale((p * factor).sum()), optimizer)
        scaler.step(optimizer)
        scaler.update()

    step(1.0)
    optim.quantize_optimizer(optimizer, 8)
    before, state = p.detach().clone(), copy.deepcopy(optimizer.state[p])
    step(float("inf"))
    assert same(p.detach(), before)
    assert same(optimizer.state[p], state)
    step(1.0)
    assert optimizer.state[p]["step"] == 2
    assert torch.allclose(before - p, torch.full_like(p, 1e-3), rtol=0.05)


@pytest.mark.parametrize("state_bits", [32, 8])
def test_a_scaler_that_skips_the_first_step_makes_no_state(state_bits):
    p = torch.nn.Parameter(torch.ones(80, 80))
    optimizer = optim.AdamW([p], state_bits=state_bits)
    scaler = xmem.GradScaler(1024.0)
    xmem.backward(scaler.scale((p * float("inf")).sum()), optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(p, torch.ones(80, 80))
    assert not optimizer.state
    assert scaler.get_scale() == 512.0


def test_clipping_accumulation_and_masters_work_around_it():
    model, other = gpt(), gpt()
    made = [optim.AdamW(m.parameters(), 1e-3) for m in (model, other)]
    for batch in batches(3):
        with xmem.accumulate(2):
            for half in (slice(0, 4), slice(4, 8)):
                xmem.backward(loss_of(model, [t[half] for t in batch]), made[0])
        xmem.clip_grad_norm_(made[0], 0.5)
        total = torch.sqrt(sum(p.grad.square().sum() for p in model.parameters()))
        assert float(total) <= 0.5001
        xmem.optimizer_step(made[0])
        xmem.zero_grad(made[0])
        loss_of(other, batch).backward()
        torch.nn.utils.clip_grad_norm_(other.parameters(), 0.5)
        made[1].step()
        made[1].zero_grad()
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.allclose(p, q, atol=2e-3)
    receipt = xmem.cast_model(model, "bfloat16", optimizer=made[0])
    assert all(p.dtype == torch.float32 for p in made[0].param_groups[0]["params"])
    loss_of(model, next(batches(1))).backward()
    xmem.optimizer_step(made[0])
    assert {state["step"] for state in made[0].state.values()} == {4}
    receipt.undo()


def test_groups_have_their_own_options():
    shapes = [(80, 80)] * 4
    made = [torch.nn.Parameter(torch.ones(s)) for s in shapes]
    optimizer = optim.AdamW(
        [
            {"params": made[:1]},
            {"params": made[1:2], "lr": 0.1, "weight_decay": 0.5},
            {"params": made[2:3], "state_bits": 4},
            {"params": made[3:], "min_elements": 10**6},
        ],
        lr=0.01,
        weight_decay=0.0,
    )
    for p in made:
        p.grad = torch.ones_like(p)
    optimizer.step()
    values = [float(p.detach().mean()) for p in made]
    assert values[0] == pytest.approx(0.99, abs=1e-4)
    assert values[1] == pytest.approx(1 - 0.1 * 0.5 - 0.1, abs=1e-3)
    sizes = [optimizer.state[p]["exp_avg"].nbytes for p in made]
    assert sizes == [6400 + 100, 6400 + 100, 3200 + 100, 25600]


@pytest.mark.parametrize("bits", [32, 8, 4])
@pytest.mark.parametrize("name", ["AdamW", "Lion", "Adafactor"])
def test_a_run_resumed_from_a_file_goes_on_bit_for_bit(name, bits):
    def make(model):
        given = {"beta1": 0.9} if name == "Adafactor" else {}
        return getattr(optim, name)(model.parameters(), **given, state_bits=bits)

    model = gpt()
    optimizer = make(model)
    train(model, optimizer, 3)
    file = io.BytesIO()
    torch.save([model.state_dict(), optimizer.state_dict()], file)
    file.seek(0)
    weights, state = torch.load(file, weights_only=True)
    resumed = gpt()
    resumed.load_state_dict(weights)
    second = make(resumed)
    second.load_state_dict(state)
    assert same_states(optimizer, second)
    for m, o in ((model, optimizer), (resumed, second)):
        train(m, o, 3, seed=2)
    assert same_parameters(model.parameters(), resumed.parameters())
    assert same_states(optimizer, second)


def test_a_loaded_state_is_a_copy_and_hooks_see_tensors():
    model = gpt()
    optimizer = optim.AdamW(model.parameters())
    train(model, optimizer, 1)
    state = optimizer.state_dict()
    second = optim.AdamW(gpt().parameters())
    seen = []
    second.register_load_state_dict_pre_hook(
        lambda _, s: seen.append(s["state"][1]["exp_avg"].dtype)
    )
    second.register_load_state_dict_post_hook(
        lambda o: seen.append(list(o.state.values())[1]["exp_avg"].dtype)
    )
    second.load_state_dict(state)
    assert seen == [torch.uint8, torch.uint8]
    before = state["state"][1]["exp_avg"].clone()
    list(second.state.values())[1]["exp_avg"].zero_()
    assert same(state["state"][1]["exp_avg"], before)


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_states_of_half_parameters_are_loaded_without_rounding(half):
    made = [torch.nn.Parameter(torch.randn(100, 100).to(half)) for _ in range(2)]
    first, second = (optim.AdamW([p]) for p in made)
    made[0].grad = torch.randn(100, 100).to(half)
    first.step()
    second.load_state_dict(first.state_dict())
    assert same_states(first, second)


def test_other_bits_sizes_and_kinds_are_refused_and_change_nothing():
    model = gpt()
    optimizer = optim.AdamW(model.parameters())
    train(model, optimizer, 1)
    state = optimizer.state_dict()
    target = optim.AdamW(gpt().parameters(), state_bits=4)
    with pytest.raises(UsageError, match="in 8 bits, and this AdamW keeps 4"):
        target.load_state_dict(state)
    assert not target.state
    assert target.param_groups[0]["state_bits"] == 4
    with pytest.raises(UsageError, match="of another model"):
        optim.AdamW(gpt(width=128).parameters()).load_state_dict(state)
    lion = optim.Lion(gpt().parameters())
    train(gpt(), lion, 0)
    for p in lion.param_groups[0]["params"]:
        p.grad = torch.ones_like(p)
    lion.step()
    with pytest.raises(UsageError, match="exp_avg_sq"):
        optim.AdamW(gpt().parameters()).load_state_dict(lion.state_dict())
    with pytest.raises(ValueError, match="size of optimizer's group"):
        optim.AdamW(gpt(layers=1).parameters()).load_state_dict(state)


@pytest.mark.parametrize("name", PLAIN)
def test_a_plain_state_goes_in_and_comes_out(name):
    model = gpt()
    plain = PLAIN[name](model.parameters())
    train(model, plain, 3)
    other = copy.deepcopy(model)
    quantized = optim.quantize_optimizer(PLAIN[name](other.parameters()), 8)
    quantized.load_state_dict(plain.state_dict())
    converted = optim.quantize_optimizer(copy.deepcopy(plain), 8)
    assert same_states(quantized, converted)
    back = PLAIN[name](copy.deepcopy(model).parameters())
    back.load_state_dict(quantized.plain_state_dict())
    for found, expected in zip(back.state.values(), plain.state.values(), strict=True):
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            if key != "step":
                assert found[key].shape == value.shape
                assert found[key].dtype == value.dtype
                assert (found[key] - value).abs().max() <= value.abs().max() / 60
            elif name != "sgd":
                assert float(found[key]) == float(value)
    assert back.param_groups[0].keys() == plain.param_groups[0].keys()
    train(copy.deepcopy(model), back, 1)


def test_optimizers_are_pickled_and_copied():
    model = gpt()
    optimizer = optim.AdamW(model.parameters())
    train(model, optimizer, 2)
    for again in (pickle.loads(pickle.dumps(optimizer)), copy.deepcopy(optimizer)):
        assert same_states(again, optimizer)
        for p, q in zip(
            again.param_groups[0]["params"], optimizer.param_groups[0]["params"], strict=True
        ):
            p.grad = q.grad = torch.ones_like(p)
        again.step()


def test_a_closure_runs_with_gradients():
    p = torch.nn.Parameter(torch.ones(70, 70))
    optimizer = optim.AdamW([p])

    def closure():
        optimizer.zero_grad()
        loss = p.square().sum()
        loss.backward()
        return loss

    assert float(optimizer.step(closure).detach()) == 4900
    assert (p < 1).all()


def test_what_cannot_be_quantized_is_refused_by_name_and_left_alone():
    p = torch.nn.Parameter(torch.ones(70, 70))
    cases = {
        "RMSprop": torch.optim.RMSprop([p]),
        "without momentum": torch.optim.SGD([p], 0.1),
        "amsgrad": torch.optim.AdamW([p], amsgrad=True),
        "differentiable": torch.optim.AdamW([p], differentiable=True),
        "float64": torch.optim.Adam([torch.nn.Parameter(p.detach().double())]),
        "8 bits already": optim.AdamW([p]),
        "Mine": type("Mine", (torch.optim.AdamW,), {})([p]),
    }
    replaced = torch.optim.AdamW([p])
    replaced.step = lambda: None
    cases["replaced on the instance"] = replaced
    capturable = torch.optim.AdamW([p])
    capturable.param_groups[0]["capturable"] = True
    cases["capturable"] = capturable
    for words, optimizer in cases.items():
        kind, groups = type(optimizer), [dict(g) for g in optimizer.param_groups]
        with pytest.raises(UsageError, match=words):
            optim.quantize_optimizer(optimizer)
        assert type(optimizer) is kind
        assert [dict(g) for g in optimizer.param_groups] == groups
    with pytest.raises(UsageError, match="object"):
        optim.quantize_optimizer(object())
