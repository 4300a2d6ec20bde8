"""The checker: what it counts, and every kind of schedule that it refuses."""

import random

import pytest
from planner_chains import draw_chain, load, oracle, store_all_peak

from xmem.errors import InfeasibleBudgetError, InvalidScheduleError, UsageError
from xmem.planner import HEURISTICS, Chain, Option, Stage, format_ops, heuristic, simulate

# Two stages, sizes that name themselves: a_0 = 1, a_1 = 10, a_2 = 100.
CHAIN = Chain(
    "two",
    (
        Stage("0", 1.0, 1000, (Option("keep all", 2.0, 4.0, 30, 5000, 7000),)),
        Stage(
            "1",
            8.0,
            2000,
            (
                Option("keep all", 16.0, 32.0, 300, 6000, 9000),
                Option("compressed", 64.0, 128.0, 150, 20000, 30000),
            ),
        ),
    ),
    (1, 10, 100),
)


def test_storing_all_takes_each_time_once():
    seconds, peak = simulate(CHAIN, "G0.0 G1.0 L B1 B0")
    assert seconds == 2 + 16 + 32 + 4
    assert peak == 1 + 30 + 300 + 100 + 9000  # at B1: a_0, both abar, delta_2, tb


def test_an_option_has_its_own_bytes_and_seconds():
    seconds, peak = simulate(CHAIN, "G0.0 G1.1 L B1 B0")
    assert seconds == 2 + 64 + 128 + 4
    assert peak == 1 + 30 + 150 + 100 + 30000


@pytest.mark.parametrize(
    ("ops", "peak"),
    [
        ("N0 G1.0 L B1 Da1 G0.0 B0", 1 + 10 + 300 + 100 + 9000),
        ("N0 N1 Da2 G1.0 L B1 G0.0 B0", 1 + 10 + 300 + 100 + 9000),
        # a_1 is made again beside abar_1; the heaviest instant is still B1
        ("N0 G1.0 L Da1 N0 B1 Da1 G0.0 B0", 1 + 10 + 300 + 100 + 9000),
    ],
)
def test_a_recomputed_stage_is_held_only_as_its_input(ops, peak):
    assert simulate(CHAIN, ops)[1] == peak


@pytest.mark.parametrize(
    ("ops", "where", "reason"),
    [
        ("N1", "operation 0, N1", "a_1 is not there"),
        ("N0 N0", "operation 1, N0", "a_1 is there already"),
        ("G0.0 G0.0", "operation 1, G0.0", "kept already"),
        ("G1.0", "operation 0, G1.0", "a_1 is not there"),
        ("G0.1", "operation 0, G0.1", "1 option"),
        ("N2", "operation 0, N2", "2 stages"),
        ("Da3", "operation 0, Da3", "2 stages"),
        ("L", "operation 0, L", "a_2 is not there"),
        ("G0.0 G1.0 L L", "operation 3, L", "has been run"),
        ("G0.0 G1.0 B1", "operation 2, B1", "gradient of a_2"),
        ("G0.0 G1.0 L B0", "operation 3, B0", "gradient of a_1"),
        ("N0 N1 L B1", "operation 3, B1", "not kept"),
        ("N0 G1.0 Da1 L B1", "operation 4, B1", "a_1 is not there"),
        ("G0.0 Da1", "operation 1, Da1", "a_1 is not there"),
        ("Da0", "operation 0, Da0", "batch"),
        ("Ds0", "operation 0, Ds0", "not kept"),
        ("G0.0 Ds0 G1.0", "operation 2, G1.0", "a_1 is not there"),
        ("G0.0 G1.0 L B1", "ends", "backward of stage 0"),
        ("G0.0 G1.0", "ends", "the loss"),
        ("", "ends", "the loss"),
    ],
)
def test_a_schedule_that_is_not_valid_is_refused_by_name(ops, where, reason):
    with pytest.raises(InvalidScheduleError) as caught:
        simulate(CHAIN, ops)
    assert where in str(caught.value)
    assert reason in str(caught.value)


def test_the_schedules_of_the_oracle_keep_its_promises():
    for chain, known in oracle():
        for kind in ("persistent", "any"):
            if known[kind] is None:
                continue
            seconds, peak = simulate(chain, known[f"{kind}_ops"])
            assert seconds == pytest.approx(known[kind], rel=1e-12), chain.name
            assert peak <= known["budget"], (chain.name, peak, known["budget"])
            if kind == "persistent":
                assert peak == known["persistent_peak"]


# ---------------------------------------------------------------- heuristics
@pytest.mark.parametrize("name", HEURISTICS)
def test_every_heuristic_is_a_valid_schedule(name):
    rand = random.Random(3)
    for n in (1, 2, 3, 7, 24):
        chain = draw_chain(rand, n, 2)
        seconds, peak = simulate(chain, heuristic(chain, name))
        assert seconds >= chain.store_all_seconds
        assert peak <= store_all_peak(chain) or name == "none"


def test_storing_all_recomputes_nothing_and_every_stage_recomputes_all_but_the_last():
    chain = load("bert24_B4_T128")
    seconds = {name: simulate(chain, heuristic(chain, name))[0] for name in HEURISTICS}
    again = [s.forward_seconds for s in chain.stages]
    assert seconds["none"] == pytest.approx(chain.store_all_seconds)
    assert seconds["every"] == pytest.approx(chain.store_all_seconds + sum(again[:-1]))
    assert seconds["sqrt"] < seconds["every"]
    assert seconds["uniform"] == seconds["none"]  # without a budget nothing is faster


def test_the_best_uniform_layout_fits_and_says_what_fits():
    chain = load("bert24_B4_T128")
    half = store_all_peak(chain) // 2
    seconds, peak = simulate(chain, heuristic(chain, "uniform", budget_bytes=half))
    assert peak <= half
    assert seconds > chain.store_all_seconds
    with pytest.raises(InfeasibleBudgetError) as caught:
        heuristic(chain, "uniform", budget_bytes=1)
    least = caught.value.minimum_bytes
    assert simulate(chain, heuristic(chain, "uniform", budget_bytes=least))[1] == least


def interval(sizes, times):
    stages = tuple(
        Stage("", t, 0, (Option("keep all", t, t, size, 0, size),))
        for size, t in zip(sizes, times, strict=True)
    )
    return format_ops(heuristic(Chain("c", stages, (1, *sizes)), "interval"))


def test_the_interval_is_one_layer_where_all_are_alike():
    assert interval([1] * 3, [1.0] * 3) == (
        "N0 N1 G2.0 L B2 Da2 G1.0 B1 Da1 G0.0 B0"  # T = sqrt(2)
    )


def test_the_interval_grows_with_bytes_and_falls_with_seconds():
    # M = 10 / (20/6) = 3 and C = 1 / (16/6) = .375, so T = 4; then sqrt(2 * .6 / 1.125) = 1
    heavy = interval([10, 2, 2, 2, 2, 2], [1.0, 3.0, 3.0, 3.0, 3.0, 3.0])
    assert heavy.startswith("N0 N1 Da1 N2 Da2 N3 Da3 N4 G5.0 L B5 Da5 G4.0 B4 Da4 G0.0 G1.0")


def test_an_unknown_heuristic_is_named_with_the_valid_ones():
    with pytest.raises(UsageError, match="Did you mean 'sqrt'"):
        heuristic(CHAIN, "sqr")
