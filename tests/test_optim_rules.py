"""Update rules in few bits: the native kernels are their definition in NumPy, and that is sound."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xmem import optim
from xmem import optim_rules as rules
from xmem.codec import packed_bytes
from xmem.errors import UsageError
from xmem.native import optimizers as native


def numbers(rule, step, *, lr=1e-3):
    if rule == "adam":
        return rules.adam_numbers(
            step, lr=lr, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01, decoupled=step % 2 == 0
        )
    if rule == "lion":
        return rules.lion_numbers(lr=lr, betas=(0.9, 0.99), weight_decay=0.1)
    return rules.sgd_numbers(lr=lr, momentum=0.9, dampening=0.1, weight_decay=0.01)


def zeros(count, bits):
    return np.zeros(count, np.float32) if bits == 32 else np.zeros(packed_bytes(count, bits), "u1")


def step_natively(rule, p, g, states, *, bits, seed, given, flags):
    """Step in place."""
    second = states[1].ctypes.data if len(states) > 1 else None
    native.load().xmem_optim_step(
        rules.RULES.index(rule), p.ctypes.data, g.ctypes.data, 0, p.size, states[0].ctypes.data,
        second, bits, seed, flags, *given.values(),
    )  # fmt: skip


def gradients(rng, count):
    """Return numbers of all sizes."""
    return (rng.standard_normal(count) * 10.0 ** rng.integers(-7, 3, count)).astype(np.float32)


@settings(deadline=None, max_examples=60)
@given(
    rule=st.sampled_from(rules.RULES),
    bits=st.sampled_from(rules.STATE_BITS),
    count=st.sampled_from([0, 1, 2, 255, 256, 257, 700, 20000]),
    draw=st.integers(0, 2**31),
    special=st.sampled_from([None, np.nan, np.inf, -np.inf, 0.0, 1e-42, 3e38]),
)
def test_native_steps_are_the_definition_bit_for_bit(rule, bits, count, draw, special):
    rng = np.random.default_rng(draw)
    p = rng.standard_normal(count).astype(np.float32)
    stepped = p.copy()
    kept = tuple(zeros(count, bits) for _ in range(2 if rule == "adam" else 1))
    held = [state.copy() for state in kept]
    for step in range(1, 5):
        g = gradients(rng, count)
        if special is not None and count and step == 3:
            g[rng.integers(0, count, 3)] = special
        flags = rules.MAXIMIZE * (step % 2)
        if rule == "sgd":
            flags += rules.FIRST_STEP * (step == 1) + rules.NESTEROV * (draw % 2)
        how = {"bits": bits, "seed": rules.seed_of(step, draw % 50), "flags": flags}
        p, kept = rules.step(rule, p, g, kept, numbers=numbers(rule, step), **how)
        step_natively(rule, stepped, g, held, given=numbers(rule, step), **how)
        np.testing.assert_array_equal(stepped, p)
        for found, expected in zip(held, kept, strict=True):
            if bits == 32:
                np.testing.assert_array_equal(found, expected)
            else:
                assert found.tobytes() == expected.tobytes()


@pytest.mark.parametrize("bits", rules.STATE_BITS)
def test_many_tensors_in_one_call_are_as_one_at_a_time(bits):
    rng = np.random.default_rng(0)
    counts = [70000, 1, 0, 256, 8191, 300000, 5]
    parameters = [rng.standard_normal(n).astype(np.float32) for n in counts]
    single = [p.copy() for p in parameters]
    states = [[zeros(n, bits), zeros(n, bits)] for n in counts]
    alone = [[state.copy() for state in pair] for pair in states]
    for step in (1, 2):
        rows = []
        for i, p in enumerate(parameters):
            g, given, seed = gradients(rng, p.size), numbers("adam", step), rules.seed_of(step, i)
            step_natively(
                "adam", single[i], g, alone[i], bits=bits, seed=seed, given=given, flags=0
            )
            addresses = (p.ctypes.data, g.ctypes.data, *(s.ctypes.data for s in states[i]))
            rows.append((g, (*addresses, p.size, *given.values(), seed, 0, bits, 0)))
        native.step_many("adam", np.array([row for _, row in rows], native.TASK), len(rows))
    for found, expected in zip(parameters, single, strict=True):
        np.testing.assert_array_equal(found, expected)
    for found, expected in zip(states, alone, strict=True):
        for a, b in zip(found, expected, strict=True):
            assert a.tobytes() == b.tobytes()


@pytest.mark.parametrize(
    ("moment", "bits", "power", "levels"),
    [("first", 8, 1, 127), ("first", 4, 2, 7), ("second", 4, 4, 15)],
)
def test_the_mean_of_what_comes_back_is_the_moment(moment, bits, power, levels):
    """Over seeds: within five standard errors, and a few of them for what is drawn rarely."""
    rng = np.random.default_rng(1)
    x = np.exp(rng.normal(0, 2, 256)).astype(np.float32)
    if moment == "first":
        x *= rng.choice(np.array([-1, 1], np.float32), 256)
    draws = 3000
    drawn = np.array(
        [
            rules.unpack_state(rules.pack_state(x, moment, bits, seed), 256, moment, bits)
            for seed in range(draws)
        ]
    )
    away = np.abs(drawn.mean(0) - x)
    scale = np.abs(x).max() / levels**power
    k = np.floor((np.abs(x) / scale) ** (1 / power))
    gap = ((k + 1) ** power - k**power) * scale
    # What is below the least code of v is lifted to it.
    counted = k > 0 if moment == "second" else k >= 0
    allowed = 5 * drawn.std(0) / np.sqrt(draws) + 10 * gap / draws
    assert (away <= allowed)[counted].all(), (away / gap)[counted].max()
    assert (drawn.std(0) > 0.05 * gap)[counted].mean() > 0.5  # it is rounded at all


@pytest.mark.parametrize("bits", [8, 4])
def test_a_second_moment_above_0_never_becomes_0_and_0_stays_0(bits):
    v = np.zeros(256, np.float32)
    v[0], v[1:100] = 1.0, 1e-12
    back = rules.unpack_state(rules.pack_state(v, "second", bits, 7), 256, "second", bits)
    assert (back[:100] > 0).all()
    assert not back[100:].any()
    m = np.zeros(256, np.float32)
    m[0] = -1.0
    back = rules.unpack_state(rules.pack_state(m, "first", bits, 7), 256, "first", bits)
    assert not back[1:].any()
    assert back[0] < 0


def test_states_take_at_most_2_06_bytes_a_parameter_at_8_bits_and_1_1_at_4():
    count = 1_000_000
    assert 2 * rules.state_bytes(count, 8) / count <= 2.06
    assert 2 * rules.state_bytes(count, 4) / count <= 1.1
    assert rules.state_bytes(count, 32) == 4 * count


def test_seeds_differ_by_step_parameter_and_state():
    seeds = {rules.seed_of(step, index) for step in range(1, 200) for index in range(200)}
    assert len(seeds) >= 199 * 200 - 2
    assert rules.seed_of_state(5, "first") != rules.seed_of_state(5, "second")


@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (40, 300), (257, 1000), (70, 1), (5000,)])
@pytest.mark.parametrize(("beta1", "bits"), [(None, 32), (0.9, 32), (0.9, 8), (0.9, 4)])
def test_native_adafactor_is_the_definition(shape, beta1, bits):
    """Sums are of another order, so factors and steps agree to their last bits."""
    rng = np.random.default_rng(2)
    p = rng.standard_normal(shape).astype(np.float32)
    stepped, matrix = p.copy(), len(shape) == 2
    rows, columns = shape if matrix else (1, shape[0])
    factors = (np.zeros(rows, np.float32) if matrix else None, np.zeros(columns, np.float32))
    held = tuple(None if f is None else f.copy() for f in factors)
    momentum = None if beta1 is None else zeros(p.size, bits)
    held_momentum = None if momentum is None else momentum.copy()

    def address(array):
        return None if array is None else array.ctypes.data

    for step in range(1, 4):
        g = gradients(rng, p.size).reshape(shape)
        seed = rules.seed_of(step, 3)
        p, factors, momentum = rules.adafactor(
            p, g, factors, momentum, step=step, lr=1e-2, beta2_decay=-0.8, eps=(1e-7, 1e-3),
            weight_decay=0.1, clip=1.0, beta1=beta1 or 0.0, bits=bits, seed=seed,
        )  # fmt: skip
        native.load().xmem_optim_adafactor(
            address(stepped), address(g), 0, rows, columns, address(held[0]), address(held[1]),
            address(held_momentum), bits, seed, 0, beta1 or 0.0, step**-0.8, 1e-7, 1e-3,
            1 - 1e-2 * 0.1, min(1e-2, step**-0.5), 1.0,
        )  # fmt: skip
        # A momentum's code may be the next one where the step's last bit differs.
        loose = 1e-6 if bits == 32 else 3e-4
        np.testing.assert_allclose(stepped, p, rtol=1e-5, atol=loose)
        for found, expected in zip(held, factors, strict=True):
            if expected is not None:
                np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_options_out_of_their_range_are_refused_by_name():
    for name, wrong in {
        "lr": [-1, float("nan"), "fast", True, None],
        "weight_decay": [-0.1, None],
        "betas": [(0.9,), (0.9, 1.0), (-0.1, 0.9), 0.9],
        "eps": [-1e-8, float("inf"), "small", None, (1e-8,), (None, None)],
        "d": [0.5],
        "beta1": [1.0, -0.1, "0.9"],
        "beta2_decay": [0.5],
        "state_bits": [16, 2, True, "8", 8.0],
        "min_elements": [-1, 2.5, True],
    }.items():
        for value in wrong:
            with pytest.raises(UsageError, match=name):
                optim.check_options({name: value})
    with pytest.raises(UsageError, match=r"eps=0\.001: give two"):
        optim.check_options({"beta2_decay": -0.8, "eps": 1e-3})
    with pytest.raises(UsageError, match="give a number from 0"):
        optim.check_options({"betas": (0.9, 0.999), "eps": (None, 1e-3)})
    optim.check_options({"beta2_decay": -0.8, "eps": [None, 1e-3]})
    optim.check_options({"lr": 0, "eps": (None, 1e-3), "beta1": None, "anything": object()})


def test_bits_that_are_not_offered_are_refused_before_any_backend():
    for bits in (32, 2, True, "8", 8.0):
        with pytest.raises(UsageError, match="8 or 4"):
            optim.quantize_optimizer(object(), bits)
    with pytest.raises(UsageError, match="state_bits"):
        optim.AdamW([], state_bits=16)
