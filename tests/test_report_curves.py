"""Long trainings in reports: their ends are held against each other, their curves are shown."""

import math

import numpy as np
import pytest
from fakes.results import make_fake_report, make_result

from xmem.report import plots
from xmem.report.compare import compare_frameworks, compare_techniques, final_loss
from xmem.report.html import html
from xmem.report.markdown import markdown
from xmem.report.model import Case
from xmem.workloads import LEARNING_WORKLOADS, WORKLOADS, make_batch, workload
from xmem.workloads.text import CHARACTERS, corpus


def trained(technique, losses, backend="torch"):
    case = Case(workload="gpt2-text", technique=technique, backend=backend, steps=len(losses))
    return make_result(case=case, losses=tuple(losses))


def curve(end, *, wiggle=0.0):
    losses = np.linspace(4.0, end, 100)
    return (losses + wiggle * (-1.0) ** np.arange(100)).tolist()


def test_the_end_of_a_curve_is_the_mean_of_its_last_tenth():
    assert final_loss(curve(2.0, wiggle=0.5)) == pytest.approx(2.0 + 4.5 * 2 / 99)
    assert final_loss([3.0]) == 3.0
    assert final_loss([3.0, None]) is None
    assert final_loss([]) is None


@pytest.mark.parametrize(("end", "agree"), [(2.0, True), (2.03, True), (2.1, False)])
def test_ends_of_long_trainings_are_compared_and_single_steps_are_not(end, agree):
    report = make_fake_report(
        trained("baseline", curve(2.0)),
        trained("autocast", curve(end, wiggle=0.3)),
        trained("baseline", curve(end, wiggle=0.3), backend="jittor"),
    )
    assert compare_techniques(report)[1].losses_agree is agree
    assert compare_frameworks(report)[0].losses_agree is agree


@pytest.mark.parametrize("losses", [[*curve(2.0)[:-1], None], curve(2.0)[:50]])
def test_a_curve_that_ends_in_no_number_or_early_does_not_agree(losses):
    report = make_fake_report(
        trained("baseline", curve(2.0)),
        make_result(case=trained("autocast", curve(2.0)).case, losses=tuple(losses)),
    )
    assert compare_techniques(report)[1].losses_agree is not True


def test_curves_are_in_the_report():
    report = make_fake_report(
        trained("baseline", curve(2.0)), trained("autocast", curve(2.01)), make_result()
    )
    assert "Loss curves" in markdown(report)
    assert "| gpt2-text | autocast | torch | - | 100 | 4.0000 |" in markdown(report)
    assert "figure-loss_curves" in html(report)
    figure = plots.loss_curves(report)
    assert [len(line.x) for line in figure.data] == [100, 100]
    assert figure.data[0].y[-1] == pytest.approx(final_loss(curve(2.0)))


def test_reports_of_short_runs_have_no_curves():
    report = make_fake_report(make_result())
    assert "Loss curves" not in markdown(report)
    assert "figure-loss_curves" not in html(report)


@pytest.mark.parametrize("name", LEARNING_WORKLOADS)
def test_every_step_has_data_of_its_own_and_the_same_in_every_run(name):
    found = [make_batch(workload(name), step) for step in (0, 1, 1)]
    assert not np.array_equal(found[0][0], found[1][0])
    assert all(np.array_equal(a, b) for a, b in zip(*found[1:], strict=True))
    inputs, targets = found[0]
    assert inputs.shape == workload(name).input_shape
    assert targets.shape == workload(name).target_shape
    assert 0 <= targets.min() <= targets.max() < workload(name).classes


def test_text_is_to_be_continued():
    inputs, targets = make_batch(workload("gpt2-text"), 7)
    assert np.array_equal(inputs[:, 1:], targets[:, :-1])
    assert corpus().min() == 0
    assert corpus().max() < CHARACTERS
    counts = np.bincount(corpus(), minlength=CHARACTERS) / len(corpus())
    entropy = -sum(p * math.log(p) for p in counts if p)
    assert 2.5 < entropy < 3.6  # English and code, in nats; as good as a model of single letters


def test_workloads_whose_memory_is_compared_have_one_batch():
    first, second = (make_batch(workload(WORKLOADS[0]), step)[0] for step in (0, 1))
    assert np.array_equal(first, second)
