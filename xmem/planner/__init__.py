"""The planner: the fastest checkpoint layout for a byte budget, proven. Knows no framework.

`Chain` says what stages cost, `solve` returns a `Plan`, `simulate` checks any schedule. The model
of execution and the argument are in docs/planner.md.
"""

from xmem.planner.chain import LOSS_STAGE, OPTION_NAMES, Chain, Option, Skip, Stage
from xmem.planner.heuristics import HEURISTICS, heuristic
from xmem.planner.limits import Bounds, bounds
from xmem.planner.plan import Plan, Verified, plan_schema
from xmem.planner.schedule import Op, format_ops, parse_ops
from xmem.planner.simulation import simulate
from xmem.planner.solver import DEFAULT_GAP, least_budget_bytes, solve
from xmem.planner.tradeoff import Frontier, frontier

__all__ = [
    "DEFAULT_GAP",
    "HEURISTICS",
    "LOSS_STAGE",
    "OPTION_NAMES",
    "Bounds",
    "Chain",
    "Frontier",
    "Op",
    "Option",
    "Plan",
    "Skip",
    "Stage",
    "Verified",
    "bounds",
    "format_ops",
    "frontier",
    "heuristic",
    "least_budget_bytes",
    "parse_ops",
    "plan_schema",
    "simulate",
    "solve",
]
