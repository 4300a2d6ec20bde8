"""Renderings: everything is in them, and hostile text does no harm."""

import re
from html.parser import HTMLParser

import pytest
from fakes.results import make_bad, make_fake_report, make_result
from hypothesis import given, settings
from hypothesis import strategies as st

from xmem.report import facts, plots, tables
from xmem.report.html import html
from xmem.report.markdown import escape, markdown
from xmem.report.model import Report, read_json
from xmem.report.text import plain_line, plain_table, rich_table
from xmem.report.write import make_report, write_report

SEGFAULT = "killed by SIGSEGV; last output: a | b"
HOSTILE = [
    "<script>alert(1)</script>",
    "</script><script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    "a | b |\n| c",
    "`code` **bold** [link](javascript:alert(1)) ![i](http://x/y.png)",
    "\x1b[31mred\x1b[0m \x00 \u202eevil",
    "{{ 7 * 7 }} {% raw %}",
    "[red]markup[/red] [link=http://x]",
    '" onmouseover="alert(1)',
]


@pytest.fixture
def report():
    return make_fake_report(
        make_result(),
        make_result(backend="jittor", above_static_bytes=25 * 2**20, framework_version="1.3.11.0"),
        make_result(technique="checkpoint", above_static_bytes=5 * 2**20, step_seconds=0.75),
        make_bad("error", SEGFAULT, technique="checkpoint", backend="jittor"),
        make_bad("unsupported", "no float16 on a CPU", technique="autocast", backend="jittor"),
        make_bad("out_of_memory", "no room", workload="bert"),
        make_bad("timeout", "no result after 5 s", workload="gpt2"),
        make_bad("unavailable", "pip install it", workload="gpt2", backend="jittor"),
        make_result(technique="autocast", warnings=("applied to nothing",)),
    )


def hostile_report(text):
    return make_fake_report(
        make_result(),
        make_result(workload=text, technique=text, backend=text, warnings=(text,)),
        make_result(settings={text: text}, framework_version=text, distribution=text),
        make_result(by_category={text: 7, "parameter": 1}, technique="checkpoint"),
        make_bad("error", text, workload="bert"),
    )


class Parsed(HTMLParser):
    """What a browser would see: tags, attributes, and the text of cells."""

    def __init__(self, source):
        super().__init__()
        self.tags = []
        self.attributes = []
        self.cells = []
        self._in_cell = False
        self.feed(source)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, name, value) for name, value in attrs]
        if tag == "td":
            self._in_cell = True
            self.cells.append("")

    def handle_endtag(self, tag):
        if tag == "td":
            self._in_cell = False

    def handle_data(self, data):
        if self._in_cell:
            self.cells[-1] += data


@pytest.fixture
def without_plotly(monkeypatch):
    """Leave out plotly.js, whose megabytes are none of ours."""
    monkeypatch.setattr("xmem.report.html.plotly_script", lambda: "/* plotly.js */")


def test_markdown_has_every_status_every_reason_and_the_figures(report):
    text = markdown(report)
    for status in ("ok", "error", "unsupported", "out of memory", "timeout", "unavailable"):
        assert f"| {status} |" in text
    assert "killed by SIGSEGV; last output: a \\| b" in text
    figures = "10.00 MiB | 15.00 MiB | 5.00 MiB | 15.00 MiB | 4.00x | 750.0 ms | 1.50x"
    assert f"| mlp | checkpoint | torch | ok | {figures} | 0 (agrees) | yes |" in text
    assert "applied to nothing" in text
    assert "every request to the framework's allocator; exact, not sampled" in text
    assert "1.3.11.0" in text
    assert "torch (cpu) vs jittor (cpu)" in text


def test_html_has_every_table_figure_and_reason(report, without_plotly):
    source = html(report)
    cells = Parsed(source).cells
    for text in ("error", "out of memory", "no float16 on a CPU", "4.00x", SEGFAULT):
        assert text in cells
    for name in ("above_static", "tradeoff", "by_category"):
        assert f'id="figure-{name}"' in source


def test_html_loads_nothing_and_has_plotly_once(report):
    source = html(report)
    parsed = Parsed(source)
    assert source.count("plotly.js v") == 1
    assert not [a for a in parsed.attributes if a[1] in ("src", "href", "action", "srcset")]
    assert "default-src 'none'" in source
    assert "link" not in parsed.tags


def test_a_report_without_a_single_good_result_still_renders(without_plotly):
    report = make_fake_report(make_bad("error", "x"))
    assert "| error |" in markdown(report)
    assert "error" in Parsed(html(report)).cells


def test_an_empty_report_still_renders(without_plotly):
    assert "# Memory" in markdown(make_fake_report())
    assert "<h1>" in html(make_fake_report())


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_text_stays_text_in_html(text, without_plotly):
    plain = Parsed(html(hostile_report("harmless")))
    hostile = Parsed(html(hostile_report(text)))
    assert hostile.tags == plain.tags
    assert len(hostile.attributes) == len(plain.attributes)
    assert tables.clean(text) in hostile.cells


def strings(value):
    """Yield every string inside a figure."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for inner in value.values():
            yield from strings(inner)
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from strings(inner)


@pytest.mark.parametrize("name", ["above_static", "tradeoff", "by_category"])
def test_hostile_text_is_no_markup_in_figures(name):
    hostile = "<img src=x><a href='http://x'>y</a>"
    report = make_fake_report(
        make_result(backend=hostile, workload=hostile, by_category={hostile: 1}),
        make_result(backend=hostile, workload=hostile, technique="checkpoint"),
        make_result(backend=hostile, workload=hostile, technique=hostile),
    )
    figure = getattr(plots, name)(report).to_plotly_json()
    found = [s for s in strings(figure) if "img" in s]
    assert found
    assert not [s for s in found if "<img" in s or "<a" in s]


def test_figures_offer_no_button_that_sends_them_away(report, without_plotly):
    source = html(report)
    buttons = '"modeBarButtons": [["toImage", "zoom2d", "pan2d", "resetScale2d"]]'
    assert source.count(buttons) == 3


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_text_adds_no_line_cell_or_markup_to_markdown(text):
    plain = markdown(hostile_report("harmless")).splitlines()
    hostile = markdown(hostile_report(text)).splitlines()
    assert len(hostile) == len(plain)
    for a, b in zip(plain, hostile, strict=True):
        assert len(re.findall(r"(?<!\\)\|", a)) == len(re.findall(r"(?<!\\)\|", b))
        assert not re.search(r"(?<!\\)[<`\[]", b)


@given(st.text(max_size=60))
def test_escaped_text_reads_as_what_it_was(text):
    escaped = escape(text)
    assert re.sub(r"\\([!-/:-@\[-`{-~])", r"\1", escaped) == tables.clean(text)
    assert "\n" not in escaped


@given(st.text(max_size=60))
def test_clean_text_is_one_printable_line(text):
    cleaned = tables.clean(text)
    assert "\x1b" not in cleaned
    assert len(cleaned.splitlines()) <= 1
    assert tables.clean(cleaned) == cleaned


@settings(max_examples=10, deadline=None)
@given(st.text(st.characters(exclude_categories=("Cs",)), min_size=1, max_size=40))
def test_any_text_leaves_the_structure_of_html_alone(text):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("xmem.report.html.plotly_script", lambda: "/* plotly.js */")
        patch.setattr("xmem.report.html._figures", lambda report: [])
        plain, hostile = (Parsed(html(hostile_report(t))) for t in ("harmless", text))
    assert hostile.tags == plain.tags


def test_terminal_tables_show_markup_as_text():
    from rich.console import Console

    console = Console(width=300, color_system=None)
    table = tables.results_table(hostile_report("[red]x[/red]\x1b[31m"))
    with console.capture() as captured:
        console.print(rich_table(table))
    assert "[red]x[/red]" in captured.get()
    assert "\x1b" not in captured.get()
    assert "\x1b" not in plain_table(table)


def test_a_plain_line_says_bytes_saving_and_time(report):
    from xmem.report.compare import compare_techniques

    rows = compare_techniques(report)
    assert plain_line(rows[2]) == (
        "mlp / checkpoint / torch: ok; peak 15.00 MiB; above static 5.00 MiB; saving 4.00x;"
        " step 750.0 ms; time 1.50x"
    )
    assert plain_line(rows[3]) == f"mlp / checkpoint / jittor: error; {SEGFAULT}"


def test_a_plain_line_says_what_must_not_be_missed():
    from xmem.report.compare import compare_technique

    bad = make_result(losses=(None,), peaks_bytes=(1, 2), step_seconds_spread=0.5)
    line = plain_line(compare_technique(bad, None))
    assert "LOSSES ARE NOT FINITE; peaks differ between steps; times spread by 100%" in line


def test_allocated_reserved_and_process_bytes_stand_side_by_side():
    result = make_result(
        technique="checkpoint",
        peak_reserved_bytes=40 * 2**20,
        peak_process_bytes=2**30,
        applied_to=6,
        block_count=6,
        block_forward_calls=12,
        allocation_count=400,
    )
    (row,) = facts.counts_table(make_fake_report(result, make_bad("error", "x"))).rows
    assert [cell.text for cell in row[3:]] == [
        "-", "6", "12 / 6", "400", "30.00 MiB", "40.00 MiB", "1.00 GiB", "-",
    ]  # fmt: skip


def test_failures_with_one_reason_are_told_once():
    report = make_fake_report(
        make_bad("unavailable", "pip install it", workload="mlp"),
        make_bad("unavailable", "pip install it", workload="bert"),
    )
    (failure,) = facts.failures(report)
    assert failure.cases == ("mlp / baseline / torch", "bert / baseline / torch")


def test_results_of_two_framework_versions_are_a_warning():
    report = make_fake_report(make_result(), make_result(workload="bert", framework_version="2.0"))
    assert "different versions (1.0, 2.0)" in markdown(report)


def test_unknown_figures_are_dashes():
    row = tables.results_table(make_fake_report(make_bad("error", "x"))).rows[0]
    assert [cell.text for cell in row[4:]] == ["-"] * 9


def test_write_report_writes_three_files_that_agree(tmp_path):
    report = make_report([make_result()])
    paths = write_report(report, tmp_path / "new" / "folder")
    assert [p.name for p in paths] == ["report.json", "report.md", "report.html"]
    assert read_json(paths[0], Report) == report
    assert {p.name for p in paths[0].parent.iterdir()} == {p.name for p in paths}
