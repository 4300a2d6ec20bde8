"""Any schedule gives the gradients of plain training, and runs what it says."""

import json
import random
from pathlib import Path

import pytest
import torch
from planned import (
    KINDS,
    Chained,
    Drawn,
    batch,
    counts,
    equal,
    make_stages,
    mean_square,
    result,
    soaked,
)

from xmem.planner import Chain, Option, Stage, least_budget_bytes, parse_ops, simulate, solve

DATA = Path(__file__).parents[1] / "data" / "planner"


def played(plans, stages, ops, loss_fn=mean_square, x=None):
    """Return whether a schedule's results equal the plain ones bit by bit, and the run."""
    x = batch() if x is None else x
    plain = result(Chained(plans, stages), loss_fn, x)
    model = Chained(plans, stages, ops)
    return equal(plain, result(model, loss_fn, x)), model.run


def drawn_chain(rng, stages):
    made = [
        Stage(
            "", 1.0, rng.randrange(9), (Option("keep all", 1.0, 2.0, rng.randrange(9, 60), 5, 9),)
        )
        for _ in range(stages)
    ]
    return Chain("drawn", tuple(made), tuple(rng.randrange(1, 9) for _ in range(stages + 1)))


@pytest.mark.parametrize("seed", [*range(15), *soaked(range(15, 300))])
def test_random_schedules_give_the_very_gradients_of_plain_training(backend, seed):
    rng = random.Random(seed)
    stages = make_stages(rng, rng.randint(4, 7))
    ops = Drawn(rng, len(stages)).ops
    simulate(drawn_chain(rng, len(stages)), ops)
    same, run = played(backend.plans, stages, ops)
    assert same, (stages, " ".join(map(str, ops)))
    assert run.forwards == counts(ops, len(stages))


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_of_stage_is_recomputed_and_kept(backend, kind):
    torch.manual_seed(1)
    stages = [KINDS[0](), *(kind() for _ in range(3))]
    ops = parse_ops("N0 N1 Da1 G2.0 Da2 N3 L Da4 G3.0 B3 N0 N1 Da1 B2 Da2 N0 G1.0 B1 Da1 G0.0 B0")
    same, run = played(backend.plans, stages, ops)
    assert same
    assert run.forwards == [4, 3, 1, 2]


@pytest.mark.parametrize("fraction", [0.0, 0.15, 0.3, 0.5, 0.8, 1.0])
def test_solved_plans_are_played(backend, fraction):
    rng = random.Random(int(fraction * 100))
    for _ in range(6):
        stages = make_stages(rng, rng.randint(4, 7))
        chain = drawn_chain(rng, len(stages))
        least = least_budget_bytes(chain)
        plan = solve(chain, int(least + fraction * 200))
        same, run = played(backend.plans, stages, plan.ops)
        assert same, str(plan)
        assert run.forwards == counts(plan.ops, len(stages))


def test_the_best_of_all_schedules_are_played(backend):
    """Those of the oracle that no persistent schedule equals."""
    results = json.loads((DATA / "oracle.json").read_text())["results"]
    texts = {
        (r["chain"]["n"], b["any_ops"])
        for r in results
        for b in r["budgets"]
        if b["any_ops"] and b["any_ops"] != b["persistent_ops"] and r["chain"]["n"] <= 7
    }
    rng = random.Random(0)
    tried = 0
    for count, text in sorted(texts):
        ops = parse_ops(text)
        if any(op.option for op in ops):
            continue
        stages = make_stages(rng, count)
        same, run = played(backend.plans, stages, ops)
        assert same, text
        assert run.forwards == counts(ops, count)
        tried += 1
    assert tried > 10
