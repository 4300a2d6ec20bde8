"""From a budget to a plan that a real step has kept to."""

from __future__ import annotations

import math
import numbers
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec

from xmem.errors import InfeasibleBudgetError, InvalidScheduleError, UsageError
from xmem.planner.chain import Chain
from xmem.planner.plan import Plan, Verified
from xmem.planner.simulation import Instant
from xmem.planner.solver import DEFAULT_GAP, least_budget_bytes, solve, store_all_peak_bytes
from xmem.profiling import Profile
from xmem.records import HEAD, REST, TAIL
from xmem.sizes import format_size, parse_size
from xmem.steps import Played, Source, check_step, play

if TYPE_CHECKING:
    from xmem.backend import Backend

_ROUNDS = 4
_COMPARED_STEPS = 6  # of each kind; the first warms up


def budget_in_bytes(budget: Any, chain: Chain) -> int:
    """Return a budget in bytes.

    Args:
        budget: bytes, text such as "2GiB", or a share of what a step takes that keeps everything:
            a float up to 1.0, or text such as "30%".
        chain: what is to be planned.

    Raises:
        UsageError: it is none of these.
    """
    if isinstance(budget, str) and budget.strip().endswith("%"):
        try:
            budget = float(budget.strip()[:-1]) / 100
        except ValueError:
            raise UsageError(f"budget={budget!r} is no share; write it like '30%'") from None
    if isinstance(budget, bool):
        return parse_size(budget)  # which refuses it
    if isinstance(budget, numbers.Integral):
        return parse_size(int(budget))
    if isinstance(budget, numbers.Real):
        share = float(budget)
        if not 0 < share <= 1:
            raise UsageError(
                f"budget={budget!r} is no share of the step that keeps everything; give a number"
                " above 0 and up to 1.0, or bytes as an int or text ('2GiB')"
            )
        return math.floor(share * whole_bytes(chain))
    return parse_size(budget)


def whole_bytes(chain: Chain) -> int:
    """Return what a step takes that keeps everything, before and after the stages too."""
    around = chain.around_bytes if isinstance(chain, Profile) else 0
    return max(store_all_peak_bytes(chain), around)


def least_bytes(chain: Chain) -> int:
    """Return the least budget that has a plan, before and after the stages too."""
    if not isinstance(chain, Profile):
        return least_budget_bytes(chain)
    return max(least_budget_bytes(chain, keeps=chain.keeps), chain.around_bytes)


def make_plan(
    profile: Profile | Chain,
    budget: float | str,
    *,
    gap: float = DEFAULT_GAP,
    verify: bool = True,
    compare: bool = False,
) -> Plan:
    """Plan a profile; see `xmem.plan`."""
    asked = budget_in_bytes(budget, profile)
    runs = isinstance(profile, Profile) and profile.source is not None and verify
    if compare and not runs:
        raise UsageError("compare=True runs steps: give a profile of a model, and verify=True")
    if not isinstance(profile, Profile):
        return solve(profile, asked, gap=gap)
    if profile.around_bytes > asked:
        least = least_bytes(profile)
        raise InfeasibleBudgetError(
            f"no plan of {profile.name!r} fits {asked} bytes: what comes before and after its"
            f" stages alone takes {profile.around_bytes}. What helps: give {least} bytes; make the"
            " batch smaller.",
            budget_bytes=asked,
            minimum_bytes=least,
        )
    if profile.source is None or not verify:
        return _solved(profile, asked, gap)
    from xmem import api

    backend = api.loaded(profile.backend)
    check_step(backend, profile.source.model, profile.source.loss_fn, "xmem.plan")
    plan = _remembered(profile.source, _verified(backend, profile, profile.source, asked, gap))
    return _compared(backend, profile.source, plan) if compare else plan


def _solved(profile: Profile, budget_bytes: int, gap: float) -> Plan:
    plan = solve(profile, budget_bytes, gap=gap, keeps=profile.keeps)
    return replace(plan, traced=profile.traced, store_all_peak_bytes=whole_bytes(profile))


def _verified(backend: Backend, profile: Profile, source: Source, asked: int, gap: float) -> Plan:
    """Run plans until one is within the budget; what a step took more comes off the next."""
    most = asked
    measured: list[int] = []
    for rounds in range(1, _ROUNDS + 1):
        try:
            plan = _solved(profile, most, gap)
        except InfeasibleBudgetError as error:
            if not measured:
                raise
            over, least = asked - most, least_bytes(profile)
            raise InfeasibleBudgetError(
                f"no plan of {profile.name!r} fits {asked} bytes: a real step takes up to {over}"
                f" bytes more than predicted, and the least that is predicted is"
                f" {least}. What helps: give {least + over} bytes; make the batch smaller.",
                budget_bytes=asked,
                minimum_bytes=least + over,
            ) from error
        seen, seconds = _run(backend, source, plan)
        peak = seen.peak_bytes + profile.batch_bytes
        measured.append(peak)
        if peak <= asked:
            found = Verified(
                predicted_peak_bytes=max(plan.peak_bytes, profile.around_bytes),
                measured_peak_bytes=peak,
                step_peak_bytes=max(seen.step.peak_bytes, *(m.peak_bytes for m in seen.marks)),
                plain_step_seconds=None,
                planned_step_seconds=seconds,
                rounds=rounds,
            )
            return replace(plan, budget_bytes=asked, verified=found)
        most = min(most, plan.peak_bytes) - (peak - asked)
    raise InfeasibleBudgetError(
        f"after {_ROUNDS} plans of {profile.name!r} the step still takes"
        f" {format_size(min(measured))} instead of {format_size(asked)}: its bytes differ from step"
        " to step. Give a larger budget, or find what differs (shapes of the batch?).",
        budget_bytes=asked,
        minimum_bytes=min(measured),
    )


def measured_timeline(profile: Profile, plan: Plan) -> list[Instant]:
    """Run a plan for a step and return what was held in each of its operations, in their order.

    Counted as the plan counts: without what was there before the step but the batch, and without
    gradients of parameters.
    """
    from xmem import api

    if profile.source is None:
        raise UsageError("the profile was read from a file and has no model to run")
    seen = play(api.loaded(profile.backend), profile.source, plan.ops, options=plan.option_names)
    base = seen.before_bytes - profile.batch_bytes
    found, at = [], 0.0
    for mark in seen.marks:
        if mark.op not in (HEAD, REST):
            less = base + mark.gradient_bytes
            held, most = mark.before_bytes - less, mark.peak_bytes - less
            name = "loss" if mark.op == TAIL else str(seen.ops[mark.op])
            found.append(Instant(name, at, at + mark.seconds, held, most))
        at += mark.seconds
    return found


def _run(backend: Backend, source: Source, plan: Plan) -> tuple[Played, float]:
    """Run a plan twice: one step is traced, the other, untraced, says how long it takes."""
    options = plan.option_names
    seen = play(backend, source, plan.ops, options=options)
    timed = play(backend, source, plan.ops, options=options, traced=False)
    come = seen.differentiated
    counted = [n if c else 0 for n, c in zip(_forwards(plan, len(come)), come, strict=True)]
    ran = [n if c else 0 for n, c in zip(seen.forwards, come, strict=True)]
    if ran != counted:
        raise InvalidScheduleError(
            f"the plan runs its stages forward {counted} times, the step did {ran}"
        )
    return seen, timed.step.seconds


def _compared(backend: Backend, source: Source, plan: Plan) -> Plan:
    """Let plain and planned steps take turns, and put the least of their times in the plan."""
    plain, planned = [], []
    for _ in range(_COMPARED_STEPS):
        plain.append(backend.plans.step(source.model, source.batch, source.loss_fn).seconds)
        run = play(backend, source, plan.ops, options=plan.option_names, traced=False)
        planned.append(run.step.seconds)
    verified = plan.verified
    assert verified is not None
    found = msgspec.structs.replace(
        verified,
        plain_step_seconds=min(plain[1:]),
        planned_step_seconds=min(planned[1:]),
    )
    return replace(plan, verified=found)


def _forwards(plan: Plan, stages: int) -> list[int]:
    """Return how often a plan runs each stage forward."""
    runs = [op.index for op in plan.ops if op.code in ("N", "G")]
    return [runs.count(i) for i in range(stages)]


def _remembered(source: Source, plan: Plan) -> Plan:
    """Return the fastest plan that has kept to the budget, of this call and those before.

    Measured differences between steps, and the gap, could else make a plan of a larger budget the
    slower one.
    """
    fits = [
        p
        for p in source.plans
        if p.verified is not None and p.verified.measured_peak_bytes <= plan.budget_bytes
    ]
    source.plans.append(plan)
    best = min([plan, *fits], key=lambda p: p.seconds)
    return replace(
        best, budget_bytes=plan.budget_bytes, bound_seconds=plan.bound_seconds, gap=plan.gap
    )
