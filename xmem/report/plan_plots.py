"""Pictures of a plan: the trade-off it lies on, and its memory over the step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from xmem.planner import Chain, Op, Plan, bounds, frontier, simulate
from xmem.planner.heuristics import segmented, uniform_starts
from xmem.planner.simulation import Instant, World
from xmem.report.html import CONFIG, plotly_script, render
from xmem.report.model import write_whole
from xmem.report.plots import COLORS, label, new_figure
from xmem.report.tables import Cell, Table
from xmem.sizes import format_size

_MIB = 2**20
_BOUND_POINTS = 60


def predicted_timeline(chain: Chain, plan: Plan) -> list[Instant]:
    """Return what the model of execution says of each forward and backward of a plan."""
    world, instants = World(chain), []
    for number, op in enumerate(plan.ops):
        before, begun = world.held_bytes, world.total_seconds
        world.peak_bytes = before
        world.run(op, number)
        if op.code in ("N", "G", "B", "L"):
            instants.append(
                Instant(_named(op, plan), begun, world.total_seconds, before, world.peak_bytes)
            )
    return instants


def _named(op: Op, plan: Plan) -> str:
    """Return an operation as it is written, with its option's name where that is another one."""
    names = plan.option_names[op.index] if op.index < len(plan.option_names) else ()
    return f"{op} ({names[op.option]})" if op.option and op.option < len(names) else str(op)


def tradeoff_figure(chain: Chain, plan: Plan) -> Any:
    """Seconds against bytes: every budget's best plan, the bound, uniform layouts, this plan."""
    import plotly.graph_objects as go

    figure = new_figure(f"What memory costs in time: {label(chain.name)}")
    least = plan.store_all_seconds
    best = frontier(chain)

    def add(name: str, points: Sequence[tuple[int, float]], **style: Any) -> None:
        figure.add_trace(
            go.Scatter(
                name=name,
                x=[size / _MIB for size, _ in points],
                y=[100 * (seconds / least - 1) for _, seconds in points],
                text=[format_size(size) for size, _ in points],
                hovertemplate=f"{name}<br>%{{text}}<br>%{{y:.2f}} %<extra></extra>",
                **style,
            )
        )

    last = max(plan.store_all_peak_bytes, best.points[-1][0])
    line = [*best.points, (last, best.points[-1][1])]
    add("best plan of each budget", line, mode="lines", line={"shape": "hv", "color": COLORS[0]})
    step = max((last - best.points[0][0]) // _BOUND_POINTS, 1)
    sizes = range(best.points[0][0], last + 1, step)
    bound = [(size, bounds(chain, size).least_seconds) for size in sizes]
    reached = [(size, seconds) for size, seconds in bound if seconds is not None]
    add("bound of every schedule", reached, mode="lines", line={"color": COLORS[7], "dash": "dot"})
    uniform = [
        simulate(chain, segmented(chain, uniform_starts(len(chain), k)))[::-1]
        for k in range(1, len(chain) + 1)
    ]
    add("uniform layouts", uniform, mode="markers", marker={"color": COLORS[1]})
    chosen = [(plan.peak_bytes, plan.seconds)]
    star = {"color": COLORS[3], "size": 14, "symbol": "star"}
    add("this plan", chosen, mode="markers", marker=star)
    figure.add_vline(x=plan.budget_bytes / _MIB, line={"dash": "dash", "color": COLORS[7]})
    figure.update_xaxes(title="peak, MiB (activations, their gradients, the batch)")
    figure.update_yaxes(title="more time than keeping everything, %", rangemode="tozero")
    return figure


def timeline_figure(chain: Chain, plan: Plan, measured: Sequence[Instant] | None = None) -> Any:
    """Bytes over the step, operation by operation: predicted, and measured where it was run."""
    import plotly.graph_objects as go

    figure = new_figure("Memory over the step, one operation after another")
    series = [("predicted", predicted_timeline(chain, plan), COLORS[0], "solid")]
    if measured:
        series.append(("measured", list(measured), COLORS[1], "dot"))
    for name, instants, color, dash in series:
        figure.add_trace(
            go.Scatter(
                name=name,
                x=list(range(len(instants))),
                y=[i.peak_bytes / _MIB for i in instants],
                text=[f"{i.name}: {format_size(i.peak_bytes)}" for i in instants],
                hovertemplate=f"{name} %{{text}}<extra></extra>",
                mode="lines",
                line={"shape": "hvh", "color": color, "dash": dash},
            )
        )
    figure.add_hline(y=plan.budget_bytes / _MIB, line={"dash": "dash", "color": COLORS[7]})
    figure.update_xaxes(title="operation")
    figure.update_yaxes(title="most held while it runs, MiB", rangemode="tozero")
    return figure


def plan_table(plan: Plan) -> Table:
    """Return what a plan promises and, where it was run, kept."""
    rows = [
        ("budget", format_size(plan.budget_bytes)),
        ("peak, everything kept", format_size(plan.store_all_peak_bytes)),
        ("peak, predicted", format_size(plan.peak_bytes)),
        ("more time, predicted", f"{plan.overhead:.2%}"),
        ("more time, bound", f"{plan.bound_seconds / plan.store_all_seconds - 1:.2%}"),
        ("at most slower than the best plan by", f"{plan.gap:.2%}" if plan.gap else "0"),
    ]
    rows += [(f"stages by {name!r}", str(count)) for name, count in _options(plan).items()]
    found = plan.verified
    if found is not None:
        rows += [
            ("peak, measured", format_size(found.measured_peak_bytes)),
            ("measured beyond predicted", f"{found.error:+.3%}"),
            ("peak of the whole step", format_size(found.step_peak_bytes)),
            ("plans that were run", str(found.rounds)),
            ("seconds of a step, measured", f"{found.planned_step_seconds:.4f}"),
        ]
        if found.measured_overhead is not None:
            rows.append(("more time, measured", f"{found.measured_overhead:+.1%}"))
    return Table(
        title="What the plan comes to",
        columns=("", ""),
        numeric=1,
        rows=tuple((Cell(name), Cell(value)) for name, value in rows),
        note="More time: as a share of a step that keeps everything.",
    )


def _options(plan: Plan) -> dict[str, int]:
    """Return how many stages are kept in which way, where there is more than one."""
    counts = Counter(
        name for name, names in zip(plan.options, plan.option_names, strict=False) if len(names) > 1
    )
    return dict(counts)


def write_pictures(
    chain: Chain, plan: Plan, path: Path, measured: Sequence[Instant] | None = None
) -> None:
    """Write the pictures of a plan as one HTML file that loads nothing from anywhere."""
    import plotly.io

    figures = [tradeoff_figure(chain, plan), timeline_figure(chain, plan, measured)]
    page = render(
        "plan.html",
        name=chain.name,
        ops=str(plan),
        table=plan_table(plan),
        figures=[
            plotly.io.to_html(f, full_html=False, include_plotlyjs=False, config=CONFIG)
            for f in figures
        ],
        plotly=plotly_script(),
        budget=format_size(plan.budget_bytes),
    )
    write_whole(page.encode(), path)
