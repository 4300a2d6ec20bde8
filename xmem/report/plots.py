"""The figures of a report. Plotly is imported when a figure is made, not before."""

from __future__ import annotations

from html import escape
from typing import Any

from xmem.report.compare import compare_techniques, finite
from xmem.report.model import Report, Result
from xmem.report.tables import case_label, categories_in, clean, technique_label
from xmem.sizes import format_size

_MIB = 2**20
# Okabe and Ito's colours: told apart by people who see colours differently, on light and dark.
COLORS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#56B4E9", "#CC79A7", "#8C7A00", "#888888")
_CATEGORY_COLORS = {
    "parameter": "#0072B2",
    "buffer": "#56B4E9",
    "optimizer": "#8C7A00",
    "input": "#888888",
    "gradient": "#009E73",
    "activation": "#D55E00",
    "temporary": "#E69F00",
    "other": "#CC79A7",
}
_DASHES = ("solid", "dash", "dot", "dashdot")
_SYMBOLS = ("circle", "diamond", "square", "cross", "triangle-up", "star")


def label(text: str) -> str:
    """Return a label without markup: plotly.js reads a subset of HTML in text."""
    return escape(clean(text))


def _measured(report: Report) -> list[Result]:
    return [r for r in report.results if r.status == "ok"]


def _several(values: list[str]) -> dict[str, int]:
    return {value: index for index, value in enumerate(dict.fromkeys(values))}


def new_figure(title: str, *, height: int = 460) -> Any:
    """Return an empty figure in the style of all."""
    import plotly.graph_objects as go

    figure = go.Figure()
    figure.update_layout(
        template="none",
        title={"text": title, "font": {"size": 16}, "x": 0, "xref": "paper"},
        height=height,
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        margin={"l": 70, "r": 20, "t": 60, "b": 90},
        legend={"orientation": "h", "yanchor": "bottom", "y": 1.0, "xanchor": "right", "x": 1},
        modebar={"bgcolor": "rgba(0,0,0,0)", "color": "#888888", "activecolor": "#0072B2"},
        font={"family": "system-ui, sans-serif", "size": 13},
    )
    return figure


def above_static(report: Report) -> Any | None:
    """Bars of bytes above static for each workload and backend, one colour per technique."""
    import plotly.graph_objects as go

    results = [r for r in _measured(report) if r.peak_above_static_bytes is not None]
    if not results:
        return None
    figure = new_figure("Peak above static, by technique")
    for name, index in _several([technique_label(r.case) for r in results]).items():
        rows = [r for r in results if technique_label(r.case) == name]
        sizes = [r.peak_above_static_bytes or 0 for r in rows]
        figure.add_trace(
            go.Bar(
                name=label(name),
                x=[
                    [label(r.case.workload) for r in rows],
                    [label(r.case.backend) for r in rows],
                ],
                y=[size / _MIB for size in sizes],
                customdata=[[label(case_label(r)), format_size(r.peak_above_static_bytes)]
                            for r in rows],
                hovertemplate="%{customdata[0]}<br>%{customdata[1]}<extra></extra>",
                marker_color=COLORS[index % len(COLORS)],
            )
        )  # fmt: skip
    figure.update_layout(barmode="group", bargap=0.25)
    figure.update_yaxes(title="MiB above static", rangemode="tozero")
    return figure


def by_category(report: Report) -> Any | None:
    """Stacked bars of what each peak is made of."""
    import plotly.graph_objects as go

    results = [r for r in _measured(report) if r.by_category]
    if not results:
        return None
    figure = new_figure("What the peak is made of", height=520)
    x = [
        [label(r.case.workload) for r in results],
        [label(f"{r.case.backend} {technique_label(r.case)}") for r in results],
    ]
    for index, name in enumerate(categories_in(results)):
        sizes = [(r.by_category or {}).get(name, 0) for r in results]
        figure.add_trace(
            go.Bar(
                name=label(name),
                x=x,
                y=[size / _MIB for size in sizes],
                customdata=[[label(case_label(r)), format_size(size)]
                            for r, size in zip(results, sizes, strict=True)],
                hovertemplate=f"%{{customdata[0]}}<br>{label(name)}: %{{customdata[1]}}"
                "<extra></extra>",
                marker_color=_CATEGORY_COLORS.get(name, COLORS[index % len(COLORS)]),
            )
        )  # fmt: skip
    figure.update_layout(barmode="stack", bargap=0.2, margin_b=150)
    figure.update_yaxes(title="MiB at the peak", rangemode="tozero")
    return figure


def tradeoff(report: Report) -> Any | None:
    """Points of bytes above static against step time, both relative to the baseline."""
    import plotly.graph_objects as go

    rows = [
        c
        for c in compare_techniques(report)
        if c.above_static_saving_factor and c.time_ratio is not None
    ]
    if not rows:
        return None
    figure = new_figure("What memory costs in time")
    backends = _several([c.result.case.backend for c in rows])
    techniques = _several([technique_label(r.case) for r in _measured(report)])
    for name in techniques:
        for backend, symbol in backends.items():
            own = [
                c
                for c in rows
                if (technique_label(c.result.case), c.result.case.backend) == (name, backend)
            ]
            if not own:
                continue
            figure.add_trace(
                go.Scatter(
                    name=label(f"{name}, {backend}"),
                    x=[c.time_ratio for c in own],
                    y=[1 / (c.above_static_saving_factor or 1) for c in own],
                    mode="markers+text",
                    text=[label(c.result.case.workload) for c in own],
                    textposition="top center",
                    textfont_size=11,
                    marker={
                        "size": 11,
                        "symbol": _SYMBOLS[symbol % len(_SYMBOLS)],
                        "color": COLORS[techniques[name] % len(COLORS)],
                    },
                    hovertemplate=f"%{{text}}, {label(name)}, {label(backend)}<br>"
                    "time %{x:.2f}x, memory above static %{y:.2f}x<extra></extra>",
                )
            )
    figure.add_hline(y=1, line_dash="dot", line_color="#888888", line_width=1)
    figure.add_vline(x=1, line_dash="dot", line_color="#888888", line_width=1)
    figure.update_xaxes(title="step time, baseline = 1")
    figure.update_yaxes(title="bytes above static, baseline = 1", rangemode="tozero")
    return figure


def loss_curves(report: Report) -> Any | None:
    """Lines of the losses of long trainings, each the mean of the last ten steps."""
    import plotly.graph_objects as go

    results = [r for r in _measured(report) if r.case.steps is not None and finite(r)]
    if not results:
        return None
    figure = new_figure("Loss curves", height=520)
    techniques = _several([r.case.technique for r in results])
    for index, result in enumerate(results):
        losses = [loss for loss in result.losses if loss is not None]
        means = [sum(losses[max(0, i - 9) : i + 1]) / min(i + 1, 10) for i in range(len(losses))]
        figure.add_trace(
            go.Scatter(
                name=label(case_label(result)),
                x=list(range(1, len(means) + 1)),
                y=means,
                mode="lines",
                line={
                    "color": COLORS[index % len(COLORS)],
                    "dash": _DASHES[techniques[result.case.technique] % len(_DASHES)],
                },
                hovertemplate=f"{label(case_label(result))}<br>step %{{x}}: %{{y:.4f}}"
                "<extra></extra>",
            )
        )
    figure.update_xaxes(title="step")
    figure.update_yaxes(title="loss, mean of ten steps")
    return figure
