"""The solver on real chains: as good as is known, and never behind a uniform layout.

The U-Net is planned as if it had no skips; see test_planner_skips.py.
"""

import dataclasses

import pytest
from planner_chains import REAL, budget_at, load
from test_planner_solve import KERNELS

from xmem.errors import InfeasibleBudgetError
from xmem.planner import heuristic, least_budget_bytes, simulate, solve

# Overheads in percent at .1 .3 .5 .7: rotor on exact bytes, rotor+ (the proven optima).
KNOWN = {
    "gpt2s_B2_T256": ((16.139, 13.205, 8.831, 5.869), (16.139, 13.205, 8.803, 5.869)),
    "bert24_B4_T128": ((29.788, 20.581, 14.443, 8.425), (29.788, 20.581, 13.240, 8.425)),
    "resnet50_B4": ((20.646, 13.782, 9.016, 6.090), (19.316, 12.299, 8.997, 5.399)),
    "vgg16_B2": ((10.013, 8.045, 4.612, 4.282), (9.318, 5.585, 2.624, 1.009)),
    "unet3d_b16_S48": ((20.128, 11.634, 8.494, 3.824), (19.140, 8.494, 3.824, 3.824)),
}


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("name", REAL)
def test_real_chains_are_planned_as_well_as_is_known(name, kernel):
    chain = dataclasses.replace(load(name), skips=())
    least = least_budget_bytes(chain, kernel=kernel)
    for fraction, rotor, best in zip((0.1, 0.3, 0.5, 0.7), *KNOWN[name], strict=True):
        budget = budget_at(chain, fraction, least)
        plan = solve(chain, budget, kernel=kernel)
        rounded = round(100 * plan.overhead, 3)
        assert rounded <= best <= rotor, (fraction, rounded, best)
        assert plan.peak_bytes <= budget
        assert plan.bound_seconds <= plan.seconds
        try:
            uniform = simulate(chain, heuristic(chain, "uniform", budget_bytes=budget))[0]
        except InfeasibleBudgetError:
            continue
        assert plan.seconds <= uniform
