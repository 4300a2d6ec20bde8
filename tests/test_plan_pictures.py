"""`xmem plan`: what it takes, what it prints, what it draws."""

import random

import pytest
from click.testing import CliRunner
from planner_chains import load
from planning_fakes import unequal

from xmem.cli import main
from xmem.cli.plan import _budget
from xmem.planner import Plan, Verified, least_budget_bytes, simulate, solve
from xmem.planner.solver import store_all_peak_bytes
from xmem.planning import budget_in_bytes
from xmem.report.plan_plots import (
    plan_table,
    predicted_timeline,
    timeline_figure,
    tradeoff_figure,
    write_pictures,
)


@pytest.mark.parametrize(
    ("text", "budget"),
    [("64MiB", 64 << 20), ("30%", 0.3), ("0.3", 0.3), ("1.0", 1.0), ("4096", 4096)],
)
def test_a_budget_is_bytes_or_a_share(text, budget):
    chain = load("resnet50_B4")
    expected = budget if isinstance(budget, int) else int(budget * store_all_peak_bytes(chain))
    assert budget_in_bytes(_budget(text), chain) == expected


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--workload", "gpt3", "--budget", "1MiB"], "gpt2"),
        (["--workload", "gpt2", "--budget", "much"], "not a size"),
        (["--workload", "gpt2", "--budget", "1MiB", "--preset", "huge"], "preset"),
        (["--workload", "gpt2", "--budget", "1MiB", "--backend", "tensorflow"], "backend"),
        (["--budget", "1MiB"], "--workload"),
        (["--workload", "gpt2", "--budget", "1MiB", "-o", "plan.html"], "cannot be both"),
    ],
)
def test_a_wrong_command_line_is_named_before_anything_runs(arguments, message):
    ran = CliRunner().invoke(main, ["plan", *arguments])
    assert ran.exit_code == 2
    assert message in ran.output


@pytest.fixture(scope="module")
def planned():
    chain = load("resnet50_B4")
    return chain, solve(chain, store_all_peak_bytes(chain) // 2)


def test_the_timeline_is_what_the_checker_counts(planned):
    chain, plan = planned
    instants = predicted_timeline(chain, plan)
    seconds, peak = simulate(chain, plan.ops)
    assert max(i.peak_bytes for i in instants) == peak == plan.peak_bytes
    assert instants[-1].end_seconds == pytest.approx(seconds)
    assert [i.name for i in instants] == [str(o) for o in plan.ops if o.code in "NGBL"]
    assert all(i.before_bytes <= i.peak_bytes for i in instants)


def test_the_trade_off_shows_the_plan_beside_the_bound_and_uniform_layouts(planned):
    chain, plan = planned
    traces = {t.name: t for t in tradeoff_figure(chain, plan).data}
    assert set(traces) == {
        "best plan of each budget",
        "bound of every schedule",
        "uniform layouts",
        "this plan",
    }
    assert list(traces["this plan"].x) == [plan.peak_bytes / 2**20]
    assert list(traces["this plan"].y) == [pytest.approx(100 * plan.overhead)]
    assert len(traces["uniform layouts"].x) == len(chain)
    # No uniform layout is below the line, and the line is nowhere below the bound.
    line = traces["best plan of each budget"]
    best = dict(zip(line.x, line.y, strict=True))
    for size, more in zip(traces["uniform layouts"].x, traces["uniform layouts"].y, strict=True):
        fitting = [y for x, y in best.items() if x <= size + 1e-9]
        assert not fitting or min(fitting) <= more + 0.11
    bound = traces["bound of every schedule"]
    for size, more in zip(bound.x, bound.y, strict=True):
        fitting = [y for x, y in best.items() if x <= size + 1e-9]
        assert not fitting or min(fitting) >= more - 1e-6


def test_measured_instants_are_drawn_beside_predicted_ones(planned):
    chain, plan = planned
    instants = predicted_timeline(chain, plan)
    assert [t.name for t in timeline_figure(chain, plan).data] == ["predicted"]
    both = timeline_figure(chain, plan, instants)
    assert [t.name for t in both.data] == ["predicted", "measured"]
    assert list(both.data[0].y) == list(both.data[1].y)


def test_the_page_has_both_pictures_the_figures_and_loads_nothing(planned, tmp_path):
    chain, plan = planned
    write_pictures(chain, plan, tmp_path / "plan.html")
    page = (tmp_path / "plan.html").read_text()
    assert page.count("Plotly.newPlot(") >= 2
    assert str(plan).split()[0] in page
    assert "default-src 'none'" in page
    assert 'src="http' not in page


def test_the_table_says_what_was_measured_only_if_it_was():
    chain = unequal(random.Random(2), 5)
    plan = solve(chain, (least_budget_bytes(chain) + store_all_peak_bytes(chain)) // 2)
    assert "measured" not in str(plan_table(plan).rows)
    verified = Verified(
        predicted_peak_bytes=1000,
        measured_peak_bytes=1010,
        step_peak_bytes=5000,
        plain_step_seconds=2.0,
        planned_step_seconds=2.5,
        rounds=2,
    )
    from dataclasses import replace

    table = str(plan_table(replace(plan, verified=verified)).rows)
    assert "+1.000%" in table
    assert "+25.0%" in table
    again = Plan.from_json(replace(plan, verified=verified).to_json())
    assert again.verified == verified
