"""Results of several ranks: gathered, kept, compared and shown by rank."""

import json
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner
from fakes.results import MIB, make_bad, make_fake_report, make_result

from xmem.cli import main
from xmem.cli.selection import choose_techniques
from xmem.conformance.gathering import gather, rank_path
from xmem.conformance.runner import matrix
from xmem.conformance.techniques import DISTRIBUTED_TECHNIQUES, TECHNIQUES
from xmem.errors import UsageError
from xmem.report import compare, plots, ranks
from xmem.report.diff import diff, diff_table, worse
from xmem.report.html import html
from xmem.report.markdown import markdown
from xmem.report.model import Case, RankResult, Report, Result, read_json, write_json
from xmem.report.text import plain_line, plain_table

RECORDED = Path(__file__).parent.parent / "benchmarks" / "results" / "cpu-quick.json"
CASE = Case(workload="mlp", technique="zero1", backend="torch", world=2)


def make_rank(rank, **changes):
    fields = {
        "rank": rank,
        "static_bytes": 6 * MIB,
        "peak_allocated_bytes": (14 + rank) * MIB,
        "peaks_bytes": ((14 + rank) * MIB,) * 3,
        "by_category": {"parameter": 3 * MIB, "gradient": (11 + rank) * MIB},
        "step_seconds": 0.25,
        "calls": {"all_reduce": 2, "broadcast": 4},
        "sent_bytes": {"all_reduce": 3 * MIB, "broadcast": 2 * MIB},
        "communication_seconds": 0.125,
        "buffer_bytes": MIB,
    }
    return RankResult(**{**fields, **changes})


def make_part(rank, **changes):
    """Return what one rank writes."""
    return make_result(**{"case": CASE, "engine": "gloo", "ranks": (make_rank(rank),), **changes})


def make_gathered(tmp_path, *parts):
    for rank, part in enumerate(parts):
        if part is not None:
            write_json(part, rank_path(tmp_path / "case.json", rank))
    failure = make_bad("error", "killed by SIGKILL; no output")
    failure = msgspec.structs.replace(failure, case=CASE)
    return gather(CASE, tmp_path / "case.json", failure)


def test_a_result_of_two_ranks_is_of_the_highest_and_has_the_mean_loss(tmp_path):
    losses = [(2.0, None), (3.0, 1.0)]
    found = make_gathered(
        tmp_path,
        *(make_part(rank, losses=losses[rank], step_seconds=1.0 - rank) for rank in (0, 1)),
    )
    assert found.status == "ok"
    assert found.losses == (2.5, None)
    assert found.step_seconds == 1.0
    assert found.peak_allocated_bytes == 15 * MIB
    assert found.peak_above_static_bytes == 9 * MIB
    assert found.by_category == {"parameter": 3 * MIB, "gradient": 12 * MIB}
    assert [rank.rank for rank in found.ranks] == [0, 1]
    assert not list(tmp_path.glob("*.rank*"))


def test_equal_losses_stay_as_they_are(tmp_path):
    third = (0.1 + 0.2,)
    assert make_gathered(tmp_path, *(make_part(r, losses=third) for r in (0, 1))).losses == third


@pytest.mark.parametrize(
    "consequence",
    [
        "RankLostError: rank 1 has failed",
        "CollectiveTimeoutError: rank 1 is late",
        "DistributedError: all_reduce failed: connection reset by peer",
    ],
)
def test_the_reason_is_the_failure_that_came_first_and_names_its_rank(tmp_path, consequence):
    lost = make_bad("error", consequence)
    own = make_bad("out_of_memory", "OutOfMemoryError: no room")
    found = make_gathered(tmp_path, lost, own)
    assert (found.status, found.reason) == ("out_of_memory", "rank 1: OutOfMemoryError: no room")


def test_a_rank_that_was_killed_is_named_by_the_others(tmp_path):
    found = make_gathered(tmp_path, make_bad("error", "RankLostError: rank 1 is dead"), None)
    assert found.status == "error"
    assert found.reason == ("rank 0: RankLostError: rank 1 is dead; killed by SIGKILL; no output")


def test_ranks_that_wrote_nothing_are_named_with_how_the_launcher_ended(tmp_path):
    found = make_gathered(tmp_path, make_part(0), None)
    assert (found.status, found.reason) == (
        "error",
        "nothing came from ranks 1: killed by SIGKILL; no output",
    )


def test_what_no_rank_can_do_is_unsupported_once(tmp_path):
    gap = make_bad("unsupported", "a batch of 1 cannot be shared out")
    found = make_gathered(tmp_path, gap, gap)
    assert (found.status, found.reason) == ("unsupported", gap.reason)


def test_a_file_cut_short_is_a_rank_that_wrote_nothing(tmp_path):
    rank_path(tmp_path / "case.json", 1).write_text('{"schema_ver', encoding="utf-8")
    assert make_gathered(tmp_path, make_part(0)).status == "error"


def test_files_of_the_version_before_ranks_are_read(tmp_path):
    raw = json.loads(RECORDED.read_text(encoding="utf-8"))
    raw["schema_version"] = 1
    for result in raw["results"]:
        result["schema_version"] = 1
        for name in ("ranks", "engine"):
            result.pop(name, None)
        result["case"].pop("world", None)
    path = tmp_path / "report.json"
    path.write_text(json.dumps(raw), encoding="utf-8")
    report = read_json(path, Report)
    assert {result.case.world for result in report.results} == {1}
    assert report.schema_version == report.results[0].schema_version == 2
    write_json(report, path)
    assert read_json(path, Report) == report


def make_two_worlds(**changes):
    gathered = make_result(
        case=CASE,
        static_bytes=6 * MIB,
        above_static_bytes=9 * MIB,
        engine="gloo",
        ranks=(make_rank(0, **changes), make_rank(1, **changes)),
    )
    return make_fake_report(make_result(), gathered)


def test_several_ranks_are_held_against_one_process_with_the_whole_batch():
    report = make_two_worlds()
    row = compare.compare_techniques(report)[1]
    assert row.baseline == report.results[0]
    assert row.peak_saving_factor == 2.0
    assert row.losses_agree is True
    assert plain_line(row).startswith("mlp / zero1 (2 ranks) / torch: ok; peak 15.00 MiB")


def test_losses_of_ranks_that_train_differently_are_seen():
    report = make_two_worlds()
    wrong = msgspec.structs.replace(report.results[1], losses=(2.0, 1.5, 1.25, 1.0, 0.49))
    row = compare.compare_techniques(make_fake_report(report.results[0], wrong))[1]
    assert row.losses_agree is False


def test_the_report_says_what_aggregation_costs_beside_one_process():
    (row,) = ranks.worlds_table(make_two_worlds()).rows
    assert [cell.text for cell in row] == [
        "mlp", "zero1", "torch", "2", "gloo", "6.00 MiB", "0.60x", "15.00 MiB", "0.50x",
        "5.00 MiB", "6", "1.00 MiB", "125.0 ms",
    ]  # fmt: skip


def test_each_rank_has_a_row_with_categories_and_bytes_by_kind():
    (table,) = ranks.rank_tables(make_two_worlds())
    assert table.title == "By rank: mlp / zero1 (2 ranks) / torch"
    assert [cell.text for cell in table.rows[1]] == [
        "1", "6.00 MiB", "15.00 MiB", "9.00 MiB", "3.00 MiB", "12.00 MiB", "3.00 MiB in 2",
        "2.00 MiB in 4", "1.00 MiB", "125.0 ms", "250.0 ms", "-",
    ]  # fmt: skip
    assert "Sent: all reduce" in plain_table(table)


def test_reports_of_one_process_have_no_table_of_ranks():
    report = make_fake_report(make_result())
    assert ranks.worlds_table(report) is None
    assert ranks.rank_tables(report) == ()


def test_unknown_figures_of_ranks_are_dashes_and_columns_without_any_are_left_out():
    report = make_two_worlds(
        peak_allocated_bytes=None, communication_seconds=None, buffer_bytes=None, calls={}
    )
    (table,) = ranks.rank_tables(report)
    assert [cell.text for cell in table.rows[0]][2:4] == ["-", "-"]
    for shown in (table, ranks.worlds_table(report)):
        assert not {"Buffers", "In communication"} & set(shown.columns)
        assert {len(row) for row in shown.rows} == {len(shown.columns)}
        assert shown.is_numeric(len(shown.columns) - 1)
    assert not ranks.worlds_table(report).is_numeric(4)
    some = make_two_worlds(communication_seconds=None)
    assert "Buffers" in ranks.worlds_table(some).columns


def test_markdown_html_and_figures_show_ranks(monkeypatch):
    monkeypatch.setattr("xmem.report.html.plotly_script", lambda: "/* plotly.js */")
    report = make_two_worlds()
    for source in (markdown(report), html(report)):
        assert "By rank: mlp / zero1 (2 ranks) / torch" in source
        assert "Several ranks beside one process" in source
    figure = plots.above_static(report).to_plotly_json()
    assert [trace["name"] for trace in figure["data"]] == ["baseline", "zero1 (2 ranks)"]


def test_a_diff_pairs_the_same_number_of_ranks_and_shows_what_is_sent():
    before = make_two_worlds()
    more = msgspec.structs.replace(
        before.results[1],
        peak_allocated_bytes=16 * MIB,
        ranks=tuple(make_rank(r, sent_bytes={"all_reduce": 9 * MIB}) for r in (0, 1)),
    )
    other = msgspec.structs.replace(more, case=msgspec.structs.replace(CASE, world=4))
    changes = diff(before, make_fake_report(before.results[0], more, other))
    assert [c.peak_change_bytes for c in changes] == [0, MIB, None]
    assert worse(changes, 0.01) == changes[1:2]
    table = diff_table(changes, 0.01)
    assert [cell.text for cell in table.rows[1]][-2:] == ["5.00 MiB", "9.00 MiB"]
    assert [cell.text for cell in table.rows[0]][-2:] == ["-", "-"]


@pytest.mark.usefixtures("crashy")
def test_only_techniques_of_several_ranks_run_on_them():
    cases = matrix(["crashy"], ["mlp"], ["baseline", "zero1"], world=4)
    assert [(case.technique, case.world) for case in cases] == [("baseline", 1), ("zero1", 4)]
    assert cases[1].name == "crashy-mlp-zero1-quick-auto-4-ranks"


def test_the_matrix_of_one_process_has_no_technique_of_several_ranks():
    assert not set(TECHNIQUES) & set(DISTRIBUTED_TECHNIQUES)
    assert choose_techniques((), None) == (list(TECHNIQUES), 1)
    assert choose_techniques((), 2) == (["baseline", *DISTRIBUTED_TECHNIQUES], 2)
    assert choose_techniques(("baseline", "zero3"), None) == (["baseline", "zero3"], 2)
    with pytest.raises(UsageError, match=r"--world 4, but checkpoint run in one process"):
        choose_techniques(("checkpoint",), 4)


@pytest.mark.usefixtures("crashy")
def test_a_backend_without_ranks_is_unsupported_with_the_reason(tmp_path):
    ran = CliRunner().invoke(
        main, ["compare", "--backend", "crashy", "--workload", "mlp", "--world", "2", "-o",
               str(tmp_path)]
    )  # fmt: skip
    assert ran.exit_code == 0, ran.output
    report = read_json(tmp_path / "report.json", Report)
    assert [result.status for result in report.results] == ["ok", *["unsupported"] * 5]
    assert report.results[1].reason == "backend 'crashy' names no launcher of ranks"


def test_a_rank_survives_its_file(tmp_path):
    write_json(make_part(1), tmp_path / "part.json")
    assert read_json(tmp_path / "part.json", Result) == make_part(1)
