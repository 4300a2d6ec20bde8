"""Optimizers with states in few bits on PyTorch: what they compute, hold and refuse."""

import warnings

import numpy as np
import pytest
import torch
from on_torch.optimizing import (
    MAKERS,
    batches,
    bytes_a_parameter,
    expected_bytes,
    gpt,
    loss_of,
    same,
    same_parameters,
    same_states,
    tensors,
    train,
)

import xmem
from xmem import optim, optim_rules
from xmem.errors import NativeBuildError, UsageError, XmemWarning
from xmem.native import optimizers as native


@pytest.fixture
def without_compiler(monkeypatch):
    """PyTorch's own operations, as on a device without kernels."""
    from xmem_torch import updates

    def fail():
        raise NativeBuildError("none", command="", output="")

    def use():
        updates.is_compiled.cache_clear()
        monkeypatch.setattr(native, "load", fail)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", XmemWarning)
            assert not updates.is_compiled()

    yield use
    updates.is_compiled.cache_clear()


def parameters(*shapes, dtype=torch.float32, seed=3):
    generator = torch.Generator().manual_seed(seed)
    made = [torch.nn.Parameter(torch.randn(s, generator=generator).to(dtype)) for s in shapes]
    for p in made:
        p.grad = torch.zeros_like(p)
    return made


def give_gradients(made, step):
    for i, p in enumerate(made):
        generator = torch.Generator().manual_seed(1000 * step + i)
        size = torch.randint(-6, 2, p.shape, generator=generator)
        p.grad = (torch.randn(p.shape, generator=generator) * 10.0**size).to(p.dtype)


SHAPES = [(70, 300), (9000,), (5000, 3), (257,), (), (2, 64, 3, 3), (0, 4)]


@pytest.mark.parametrize(
    ("ours", "theirs", "options"),
    [
        (optim.AdamW, torch.optim.AdamW, {"weight_decay": 0.1}),
        (optim.AdamW, torch.optim.AdamW, {"maximize": True, "betas": (0.8, 0.9), "eps": 1e-4}),
        (optim.Adafactor, torch.optim.Adafactor, {"weight_decay": 0.1}),
        (optim.Adafactor, torch.optim.Adafactor, {"d": 1.5, "eps": (1e-5, 1e-2), "lr": 0.1}),
    ],
)
def test_at_32_bits_100_steps_are_those_of_torch_optim(ours, theirs, options):
    shapes = [s for s in SHAPES if ours is optim.AdamW or (len(s) < 3 and 0 not in s)]
    mine, other = parameters(*shapes), parameters(*shapes)
    a, b = ours(mine, **options, state_bits=32), theirs(other, **options)
    for step in range(100):
        give_gradients(mine, step)
        give_gradients(other, step)
        a.step()
        b.step()
    # Adafactor's steps are of sums, which PyTorch has in float32.
    close = 2e-6 if ours is optim.AdamW else 1e-5
    for p, q in zip(mine, other, strict=True):
        assert torch.allclose(p, q, rtol=close, atol=close), (p - q).abs().max()


@pytest.mark.parametrize("bits", [8, 4, 32])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["adamw", "lion"])
def test_native_steps_and_those_of_pytorch_operations_are_equal(
    name, dtype, bits, without_compiler
):
    mine, other = parameters(*SHAPES, dtype=dtype), parameters(*SHAPES, dtype=dtype)
    made = [MAKERS[name](p, state_bits=bits, weight_decay=0.1) for p in (mine, other)]
    for step in range(3):
        give_gradients(mine, step)
        made[0].step()
    without_compiler()
    for step in range(3):
        give_gradients(other, step)
        made[1].step()
    assert same_parameters(mine, other)
    assert same_states(*made)


@pytest.mark.parametrize("options", [{}, {"nesterov": True, "weight_decay": 0.1}])
def test_native_sgd_is_that_of_pytorch_operations(options, without_compiler):
    mine, other = parameters(*SHAPES), parameters(*SHAPES)
    made = [
        optim.quantize_optimizer(torch.optim.SGD(p, 0.1, momentum=0.9, **options), bits=8)
        for p in (mine, other)
    ]
    for step in range(3):
        give_gradients(mine, step)
        made[0].step()
    without_compiler()
    for step in range(3):
        give_gradients(other, step)
        made[1].step()
    assert same_parameters(mine, other)
    assert same_states(*made)


@pytest.mark.parametrize(("beta1", "bits"), [(None, 32), (0.9, 8)])
def test_native_adafactor_is_that_of_pytorch_operations(beta1, bits, without_compiler):
    """Sums are of another order, so they agree to the last bits, and codes to the next one."""
    shapes = SHAPES[:-1]
    mine, other = parameters(*shapes), parameters(*shapes)
    made = [optim.Adafactor(p, beta1=beta1, state_bits=bits) for p in (mine, other)]
    for step in range(3):
        give_gradients(mine, step)
        made[0].step()
    without_compiler()
    for step in range(3):
        give_gradients(other, step)
        made[1].step()
    for p, q in zip(mine, other, strict=True):
        assert torch.allclose(p, q, rtol=1e-5, atol=1e-6 if bits == 32 else 1e-4)


@pytest.mark.parametrize("bits", [8, 4])
def test_states_are_the_definition_in_numpy(bits):
    made = parameters((70, 300), (9000,))
    start = [p.detach().numpy().reshape(-1).copy() for p in made]
    optimizer = optim.AdamW(made, state_bits=bits)
    expected = [(x, (np.zeros(optim_rules.state_bytes(x.size, bits), "u1"),) * 2) for x in start]
    for step in (1, 2, 3):
        give_gradients(made, step)
        optimizer.step()
        for i, (x, held) in enumerate(expected):
            expected[i] = optim_rules.step(
                "adam", x, made[i].grad.numpy().reshape(-1), held, bits=bits,
                seed=optim_rules.seed_of(step, i),
                numbers=optim_rules.adam_numbers(
                    step, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01, decoupled=True
                ),
            )  # fmt: skip
    for p, (x, held) in zip(made, expected, strict=True):
        assert np.array_equal(p.detach().numpy().reshape(-1), x)
        state = optimizer.state[p]
        assert state["step"] == 3
        for name, packed in zip(("exp_avg", "exp_avg_sq"), held, strict=True):
            assert np.array_equal(state[name].numpy(), packed)


@pytest.mark.parametrize("bits", [8, 4])
def test_results_do_not_depend_on_the_number_of_threads(bits):
    made = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        held = parameters((300, 700), (70000,))
        optimizers = [optim.AdamW(held, state_bits=bits), optim.Adafactor(held, beta1=0.9)]
        for step in range(2):
            give_gradients(held, step)
            for optimizer in optimizers:
                optimizer.step()
        made.append((held, optimizers))
    torch.set_num_threads(2)
    assert same_parameters(made[0][0], made[1][0])
    for a, b in zip(made[0][1], made[1][1], strict=True):
        assert same_states(a, b)


@pytest.mark.parametrize(("bits", "most"), [(8, 2.06), (4, 1.1), (32, 8.0)])
def test_states_take_what_they_should(bits, most):
    model = gpt(width=256)
    optimizer = optim.AdamW(model.parameters(), state_bits=bits)
    loss_of(model, next(batches(1))).backward()
    optimizer.step()
    found = sum(t.nbytes for t in tensors(optimizer))
    assert found == expected_bytes(optimizer, 2, bits)
    large = sum(p.numel() for p in model.parameters() if p.numel() >= 4096)
    packed = sum(t.nbytes for t in tensors(optimizer) if t.dtype == torch.uint8)
    print(found, packed, large, bytes_a_parameter(optimizer))
    if bits != 32:
        assert packed / large <= most
    lion = optim.Lion(model.parameters(), state_bits=bits)
    lion.step()
    assert sum(t.nbytes for t in tensors(lion)) == expected_bytes(lion, 1, bits)


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("bits", [8, 4])
def test_a_step_allocates_nothing_and_200_steps_do_not_grow(name, bits, backend):
    model = gpt()
    optimizer = MAKERS[name](model.parameters(), state_bits=bits)
    loss_of(model, next(batches(1))).backward()
    optimizer.step()
    with xmem.measure(model=model, optimizer=optimizer) as m:
        held = backend.measure.counters().allocated_bytes
        for _ in range(200):
            optimizer.step()
        assert backend.measure.counters().allocated_bytes == held
    assert m.peak_above_static_bytes == 0, m.peak_above_static_bytes
    expected = sum(t.nbytes for t in tensors(optimizer))
    assert m.by_category["optimizer"] == expected, m.by_category


@pytest.mark.parametrize("name", MAKERS)
def test_temporaries_of_pytorch_operations_do_not_grow_with_the_parameter(name, without_compiler):
    made = parameters((150, 1000), (600, 1000))
    optimizers = [MAKERS[name]([p], state_bits=8) for p in made]
    for optimizer in optimizers:
        optimizer.step()
    without_compiler()
    peaks = []
    for optimizer in optimizers:
        with xmem.measure(optimizer=optimizer) as m:
            optimizer.step()
        peaks.append(m.peak_above_static_bytes)
    assert peaks[1] < 1.05 * peaks[0], peaks


@pytest.mark.parametrize(("bits", "within"), [(8, 0.01), (4, 0.03)])
def test_60_steps_end_where_float32_does(bits, within):
    ends = []
    for make in (
        lambda p: torch.optim.AdamW(p, 2e-3),
        lambda p: optim.AdamW(p, 2e-3, state_bits=bits),
    ):
        model = gpt()
        losses = train(model, make(model.parameters()), 60)
        ends.append(np.mean(losses[-10:]))
        assert ends[-1] < 0.9 * losses[0]
    print(ends)
    assert abs(ends[1] / ends[0] - 1) <= within, ends


@pytest.mark.parametrize("name", ["lion", "adafactor"])
def test_other_rules_in_few_bits_end_where_they_do_in_float32(name):
    options = {"lion": {"lr": 5e-4}, "adafactor": {"lr": 1e-2, "beta1": 0.9}}[name]
    ends = []
    for bits in (32, 8):
        model = gpt()
        losses = train(model, MAKERS[name](model.parameters(), **options, state_bits=bits), 60)
        ends.append(np.mean(losses[-10:]))
        assert ends[-1] < 0.9 * losses[0]
    assert abs(ends[1] / ends[0] - 1) <= 0.01, ends


def test_a_parameter_that_is_not_contiguous_steps_like_its_copy():
    base = torch.randn(90, 100)
    made = [
        torch.nn.Parameter(base.t().contiguous().t()),
        torch.nn.Parameter(base.clone()),
        torch.nn.Parameter(torch.randn(8, 16, 9, 9).to(memory_format=torch.channels_last)),
    ]
    made.append(torch.nn.Parameter(made[2].detach().contiguous()))
    assert not made[0].is_contiguous()
    first, second = optim.AdamW(made[::2]), optim.AdamW(made[1::2])
    for _ in range(2):
        for p, q in ((made[0], made[1]), (made[2], made[3])):
            p.grad = torch.randn(p.shape)
            q.grad = p.grad.clone(memory_format=torch.preserve_format)
        first.step()
        second.step()
    assert same_parameters(made[::2], made[1::2])
    assert same_states(first, second)


def test_a_step_marks_parameters_as_changed():
    """Or a backward that reads one as it was would go wrong in silence."""
    p = torch.nn.Parameter(torch.randn(80, 80))
    y = (torch.randn(80, 80, requires_grad=True) @ p).sum()
    p.grad = torch.randn(80, 80)
    optim.AdamW([p]).step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


@pytest.mark.parametrize("bits", [32, 8, 4])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_gradients_that_are_not_finite_are_not_hidden(bits, bad):
    [p] = parameters((100, 100))
    optimizer = optim.AdamW([p], state_bits=bits)
    p.grad[3, 4] = bad
    optimizer.step()
    assert not p[3, 4].isfinite()
    assert p.isfinite().sum() == p.numel() - 1
    p.grad = torch.ones_like(p)
    optimizer.step()
    assert not p[3, 4].isfinite()


def test_what_the_rules_cannot_take_is_refused_by_name_and_changes_nothing():
    with pytest.raises(UsageError, match="float64"):
        optim.AdamW([torch.nn.Parameter(torch.zeros(3, dtype=torch.float64))])
    with pytest.raises(UsageError, match="complex64"):
        optim.Lion([torch.nn.Parameter(torch.zeros(3, dtype=torch.complex64))])
    with pytest.raises(UsageError, match="lazy"):
        optim.AdamW(torch.nn.LazyLinear(3).parameters())
    with pytest.raises(UsageError, match="empty"):
        optim.AdamW([])
    with pytest.raises(UsageError, match="amsgrad"):
        optim.AdamW([{"params": parameters((3,)), "amsgrad": True}])
    with pytest.raises(UsageError, match="lr"):
        optim.AdamW([{"params": parameters((3,)), "lr": -1.0}])
    first, table = parameters((3,))[0], torch.nn.Embedding(100, 50, sparse=True)
    optimizer = optim.AdamW([first, table.weight])
    before = first.detach().clone()
    table(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(UsageError, match="sparse"):
        optimizer.step()
    assert same(first.detach(), before)
    assert not optimizer.state


def test_adding_a_group_that_is_refused_leaves_the_optimizer_as_it_was():
    optimizer = optim.AdamW(parameters((3,)))
    for group in ({"betas": (2, 0)}, {"state_bits": 16}):
        with pytest.raises(UsageError):
            optimizer.add_param_group({"params": parameters((4,)), **group})
    wrong = torch.nn.Parameter(torch.zeros(3, dtype=torch.float64))
    with pytest.raises(UsageError, match="float64"):
        optimizer.add_param_group({"params": [wrong]})
    assert len(optimizer.param_groups) == 1


def test_engines_are_chosen_by_name_and_missing_ones_say_what_to_install(monkeypatch):
    with pytest.raises(UsageError, match="bitsandbytes"):
        optim.AdamW(parameters((3,)), engine="bitsandbits")
    for engine, bits in (("bitsandbytes", 4), ("torchao", 32)):
        with pytest.raises(UsageError, match=f"in {bits} bits"):
            optim.AdamW(parameters((3,)), engine=engine, state_bits=bits)
    with pytest.raises(UsageError, match="4096"):
        optim.AdamW(parameters((3,)), engine="torchao", min_elements=1)
    monkeypatch.setitem(__import__("sys").modules, "bitsandbytes", None)
    with pytest.raises((xmem.CapabilityError, ImportError)):
        optim.AdamW(parameters((3,)), engine="bitsandbytes")
    assert type(optim.AdamW(parameters((3,)), engine="xmem")).__module__ == "xmem_torch.optimizers"
