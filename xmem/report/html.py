"""A report as one HTML file that loads nothing from anywhere."""

from __future__ import annotations

from typing import Any

from xmem.report import facts, ranks
from xmem.report.model import Report
from xmem.report.tables import (
    Table,
    categories_table,
    clean,
    frameworks_table,
    results_table,
)

_FIGURES = ("above_static", "tradeoff", "by_category", "loss_curves")
# Named one by one: plotly.js 4 brings a button that sends the figure to a server.
CONFIG = {
    "displaylogo": False,
    "responsive": True,
    "modeBarButtons": [["toImage", "zoom2d", "pan2d", "resetScale2d"]],
}


def html(report: Report) -> str:
    """Return the whole report, plotly.js included once."""
    figures = _figures(report)
    return render(
        "report.html",
        report=report,
        meaning=facts.MEANING,
        figures=figures,
        plotly=plotly_script() if figures else "",
        statuses=facts.statuses_table(report),
        tables=_present(
            results_table(report),
            facts.curves_table(report),
            frameworks_table(report),
            categories_table(report),
            facts.counts_table(report),
            ranks.worlds_table(report),
            *ranks.rank_tables(report),
        ),
        failures=facts.failures(report),
        warnings=facts.warnings(report),
        background=_present(
            facts.backends_table(report), facts.machine_table(report), facts.settings_table(report)
        ),
    )


def render(template: str, **values: Any) -> str:
    """Fill a template."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("xmem.report"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["clean"] = clean
    page: str = environment.get_template(template).render(**values)
    return page


def _present(*tables: Table | None) -> list[Table]:
    return [t for t in tables if t is not None]


def _figures(report: Report) -> list[str]:
    """Return each figure as a piece of HTML. plotly escapes `<` and `>` inside its JSON."""
    import plotly.io

    from xmem.report import plots

    pieces = []
    for name in _FIGURES:
        figure = getattr(plots, name)(report)
        if figure is not None:
            pieces.append(
                plotly.io.to_html(
                    figure,
                    full_html=False,
                    include_plotlyjs=False,
                    div_id=f"figure-{name}",
                    config=CONFIG,
                )
            )
    return pieces


def plotly_script() -> str:
    """Return plotly.js."""
    from plotly.offline import get_plotlyjs

    script: str = get_plotlyjs()
    return script
