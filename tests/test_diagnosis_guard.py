"""The guard and its diagnosis on a backend that is a ledger: what it promises, whatever fails."""

import gc
import sys
import warnings
import weakref
from dataclasses import replace
from pathlib import Path

import pytest
from fakes.memory import FakeError, FakeMemory, FakeOutOfMemoryError, fake_backend

import xmem
from xmem.diagnosis import read
from xmem.hookspecs import hookimpl
from xmem.out_of_memory import OomGuard, write_bundle


@pytest.fixture
def memory():
    return FakeMemory()


def guard(memory, path=None, *, model=None, optimizer=None):
    return OomGuard(fake_backend(memory), path, model, optimizer, whole=True)


class Big:
    """Something whose life is watched."""


class Optimizer:
    param_groups = ()


def failing_step(memory, alive=None, phase=None):
    big = Big()
    if phase is not None:
        memory.trail.begin(memory.birth, phase)
    if alive is not None:
        alive.append(weakref.ref(big))
    memory.allocate(300)
    memory.allocate(5000)


def failed(memory, path=None, **given):
    with pytest.raises(FakeOutOfMemoryError) as caught, guard(memory, path, **given):
        failing_step(memory)
    return caught.value


def test_a_block_that_ends_well_changes_nothing(memory):
    with guard(memory) as g:
        memory.allocate(10)
    assert g.diagnosis is None
    assert memory.done == ["finished", "watched"]


def test_the_error_is_both_types_and_has_a_diagnosis(memory):
    error = failed(memory)
    assert isinstance(error, xmem.OutOfMemoryError)
    assert isinstance(error, FakeError)
    found = error.diagnosis
    assert (found.requested_bytes, found.allocated_bytes, found.limit_bytes) == (5000, 300, 1000)
    assert found.missing_bytes == 4300
    assert (found.phase, found.settings) == (
        "forward",
        {"threads": "1", "pool.strategy": "ledger"},
    )
    assert found.message == "no 5000 bytes"
    assert str(error) == str(found)


def test_what_fails_only_at_the_end_of_the_block_is_its_error(memory):
    memory.late = FakeError("late")
    with pytest.raises(FakeOutOfMemoryError), guard(memory):
        pass
    memory.late = ValueError("of another kind")
    with pytest.raises(ValueError, match="of another kind"), guard(memory):
        pass


def test_other_errors_pass_untouched(memory):
    with pytest.raises(ValueError, match="mine") as caught, guard(memory):
        raise ValueError("mine")
    assert caught.value.__traceback__ is not None
    assert memory.done == ["watched"]


def test_nothing_that_the_step_held_lives_on_while_the_error_is_held(memory):
    alive = []

    def step():
        try:
            failing_step(memory, alive)
        except FakeError as error:  # a user's own handling, with a cause
            raise FakeError("again") from error

    with pytest.raises(FakeOutOfMemoryError) as caught, guard(memory):
        step()
    gc.collect()
    assert alive[0]() is None
    assert caught.value.__context__ is None
    assert caught.value.__cause__ is None


def test_memory_is_recovered_while_it_is_watched_and_when_the_step_holds_nothing(memory):
    alive, seen = [], []
    memory.recover = lambda: seen.append((alive[0](), list(memory.done)))
    with pytest.raises(FakeOutOfMemoryError), guard(memory):
        failing_step(memory, alive)
    assert seen == [(None, [])]
    assert memory.done == ["watched"]


def test_the_frameworks_error_holds_nothing_where_the_user_keeps_it(memory):
    kept, alive = [], []

    def guarded():
        big = Big()
        alive.append(weakref.ref(big))
        with guard(memory):
            try:
                failing_step(memory)
            except FakeError as error:
                kept.append(error)
                raise

    with pytest.raises(FakeOutOfMemoryError):
        guarded()
    gc.collect()
    assert str(kept[0]) == "no 5000 bytes"
    assert alive[0]() is None


def test_locals_are_gone_where_something_keeps_the_traceback(memory):
    kept, alive = [], []

    def step():
        try:
            failing_step(memory, alive)
        except FakeError as error:
            kept.append(error.__traceback__)
            raise

    with pytest.raises(FakeOutOfMemoryError), guard(memory):
        step()
    gc.collect()
    assert kept
    assert alive[0]() is None


def test_gradients_are_dropped_once_backward_has_begun(memory):
    with pytest.raises(FakeOutOfMemoryError), guard(memory, optimizer=Optimizer()):
        failing_step(memory)
    assert "gradients dropped" not in memory.done
    with pytest.raises(FakeOutOfMemoryError), guard(memory, optimizer=Optimizer()):
        failing_step(memory, phase="backward")
    assert "gradients dropped" in memory.done


def test_an_update_that_ran_out_is_told(memory):
    with pytest.raises(FakeOutOfMemoryError) as caught, guard(memory):
        failing_step(memory, phase="optimizer")
    assert caught.value.diagnosis.may_be_updated
    assert not failed(memory).diagnosis.may_be_updated


def test_guards_nest_and_the_inner_one_explains(memory, tmp_path):
    outer, inner = guard(memory, tmp_path), guard(memory, tmp_path)
    with pytest.raises(FakeOutOfMemoryError) as caught, outer, inner:
        failing_step(memory)
    assert caught.value.diagnosis is inner.diagnosis
    assert outer.diagnosis is outer.bundle is None
    assert [p.name for p in tmp_path.iterdir()] == ["oom-0001"]


def test_a_guard_can_be_used_again_and_not_inside_itself(memory):
    one = guard(memory)
    with pytest.raises(FakeOutOfMemoryError), one:
        failing_step(memory)
    with one:
        assert one.diagnosis is None
        with pytest.raises(xmem.UsageError, match="open already"):
            one.__enter__()


def test_an_error_from_before_the_block_is_not_taken_for_its_own(memory):
    with pytest.raises(FakeError):
        memory.allocate(5000)
    with pytest.raises(FakeOutOfMemoryError) as caught, guard(memory):
        raise FakeError("by hand")
    assert caught.value.diagnosis.requested_bytes is None
    assert caught.value.diagnosis.allocated_bytes == 0


def test_bytes_go_to_their_owners_and_all_sums_agree(memory):
    weight = memory.allocate(100)
    memory.names = {weight: "w"}
    memory.owned_by = {"parameter": [weight]}
    memory.allocate(40)  # the batch

    def step():
        memory.trail.numbers.append(memory.birth)
        memory.trail.marks.append(Big())
        memory.allocate(200)
        memory.trail.begin(memory.birth, "backward")
        memory.allocate(60)
        memory.allocate(5000)

    with pytest.raises(FakeOutOfMemoryError) as caught, guard(memory, model=object()):
        step()
    found = caught.value.diagnosis
    assert found.by_category == {
        "parameter": 100,
        "other": 40,
        "activation": 200,
        "temporary": 60,
    }
    assert {(o.name, o.category): o.size_bytes for o in found.owners} == {
        ("w", "parameter"): 100,
        ("made before", "other"): 40,
        ("Big", "activation"): 200,
        ("backward", "temporary"): 60,
    }
    assert sum(found.by_category.values()) == found.allocated_bytes == 400


@pytest.mark.parametrize("listed", [True, False])
def test_blocks_that_are_gone_are_counted_as_they_were(memory, listed):
    """Whether the refusal lists them or not: it has the largest only."""

    def step():
        scratch = memory.allocate(50)
        try:
            memory.allocate(5000)
        finally:
            del memory.blocks[scratch]
            if not listed:
                memory.last = replace(memory.last, blocks=())

    with pytest.raises(FakeOutOfMemoryError) as caught, guard(memory):
        step()
    found = caught.value.diagnosis
    assert found.by_category == {"temporary": 50}
    assert [(o.name, o.size_bytes) for o in found.owners] == [
        ("forward" if listed else "gone since", 50)
    ]


@pytest.mark.parametrize("listed", [True, False])
def test_a_source_without_categories_tells_what_is_owned_and_the_rest(memory, listed):
    weight, gradient = memory.allocate(100), memory.allocate(90)
    memory.owned_by = {"parameter": [weight, weight], "gradient": [gradient]}
    memory.names = {weight: "w", gradient: "gradient of w"}
    refusal = memory.refusal

    def without_categories():
        found = refusal()
        return replace(found, by_category=None, blocks=found.blocks if listed else (), birth=0)

    memory.refusal = without_categories
    with pytest.raises(FakeOutOfMemoryError) as caught, guard(memory, model=object()):
        failing_step(memory, phase="backward")
    found = caught.value.diagnosis
    assert found.by_category == {"parameter": 100, "gradient": 90, "other": 300}
    assert found.phase == "backward"
    names = ("w", "gradient of w") if listed else ("parameter tensors", "gradient tensors")
    assert [(o.name, o.category, o.size_bytes) for o in found.owners] == [
        ("activations, temporaries and other tensors", "other", 300),
        (names[0], "parameter", 100),
        (names[1], "gradient", 90),
    ]


def test_bundles_are_numbered_and_whole(memory, tmp_path):
    for number in (1, 2, 3):
        with pytest.raises(FakeOutOfMemoryError), guard(memory, tmp_path / "new") as g:
            failing_step(memory)
        assert g.bundle.name == f"oom-{number:04d}"
        assert read(g.bundle) == g.diagnosis
        assert (g.bundle / "report.md").read_text().startswith("# Out of memory")
        memory.blocks.clear()
    assert len(list((tmp_path / "new").iterdir())) == 3


def test_a_bundle_never_overwrites_another(memory, tmp_path):
    found = failed(memory).diagnosis
    (tmp_path / "oom-0001").mkdir()
    (tmp_path / "oom-0002").write_text("a file of the user's")
    assert write_bundle(found, tmp_path).name == "oom-0003"
    assert list((tmp_path / "oom-0001").iterdir()) == []


def test_a_report_that_cannot_be_written_warns_and_the_error_comes(memory, tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    with pytest.warns(xmem.XmemWarning, match="no report"):
        error = failed(memory, blocked)
    assert error.diagnosis is not None
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # even then
        failed(memory, blocked)


@pytest.mark.parametrize("failure", [OSError("odd"), ValueError("odd"), MemoryError("odd")])
def test_whatever_a_report_fails_by_warns_and_the_error_comes(
    memory, tmp_path, monkeypatch, failure
):
    def fail(diagnosis):
        raise failure

    monkeypatch.setattr("xmem.out_of_memory.markdown", fail)
    with pytest.warns(xmem.XmemWarning, match="odd"):
        error = failed(memory, tmp_path)
    assert error.diagnosis is not None
    assert list(tmp_path.iterdir()) == []


def test_a_path_that_no_file_can_have_warns_and_the_error_comes(memory):
    with pytest.warns(xmem.XmemWarning, match="no report .* ValueError: .*null byte"):
        assert failed(memory, Path("a\0b")).diagnosis is not None


def test_memory_of_python_is_not_explained_by_what_the_pool_refused_before(memory):
    def step():
        with pytest.raises(FakeError):
            memory.allocate(5000)
        raise MemoryError("Unable to allocate 4.00 PiB")

    with pytest.raises(FakeOutOfMemoryError) as caught, guard(memory):
        step()
    assert caught.value.diagnosis.requested_bytes is None
    assert caught.value.diagnosis.message == "Unable to allocate 4.00 PiB"


def test_of_a_deep_stack_both_ends_are_told(memory):
    def deep(calls):
        if calls:
            deep(calls - 1)
        else:
            failing_step(memory)

    with pytest.raises(FakeOutOfMemoryError), guard(memory) as g:
        deep(100)
    stack = g.diagnosis.stack
    assert stack[0].endswith("in test_of_a_deep_stack_both_ends_are_told")
    assert stack[-1].endswith("in allocate")
    assert "... 74 more" in stack
    assert len(stack) == 31


def test_colours_are_not_part_of_what_the_framework_said(memory):
    with pytest.raises(FakeOutOfMemoryError), guard(memory) as g:
        raise FakeError("\x1b[38;5;1mno bytes\x1b[m")
    assert g.diagnosis.message == "no bytes"


@pytest.mark.parametrize("kind", [list, tuple, lambda pair: dict(enumerate(pair))])
def test_of_several_optimizers_all_gradients_are_dropped(memory, kind):
    with (
        pytest.raises(FakeOutOfMemoryError),
        guard(memory, optimizer=kind([Optimizer(), Optimizer()])),
    ):
        failing_step(memory, phase="backward")
    assert memory.done.count("gradients dropped") == 2


@pytest.mark.parametrize("optimizer", [3, [object()], "adam"])
def test_what_is_no_optimizer_is_refused_before_the_block(optimizer):
    with pytest.raises(xmem.UsageError, match="has no param_groups; pass an optimizer"):
        xmem.oom_guard(optimizer=optimizer)


def test_observers_are_told_and_cannot_hide_the_error(memory):
    before = failed(memory).diagnosis
    seen, broken = [], []

    class Watcher:
        @hookimpl
        def xmem_oom(self, diagnosis):
            seen.append(diagnosis)
            if broken:
                raise KeyError("a bug")

    stop = xmem.observe(Watcher())
    try:
        assert before in seen, "who registers late is told, too"
        assert failed(memory).diagnosis is seen[-1]
        broken.append(True)
        with pytest.warns(xmem.XmemWarning, match="an observer's xmem_oom raised KeyError"):
            failed(memory)
    finally:
        stop()


def test_a_report_has_no_lines_of_source_and_no_variables_of_the_environment(
    memory, tmp_path, monkeypatch
):
    monkeypatch.setenv("MY_TOKEN", "hunter2")
    with pytest.raises(FakeOutOfMemoryError), guard(memory, tmp_path) as g:
        failing_step(memory)  # this comment is source
    written = "".join(p.read_text() for p in g.bundle.iterdir())
    assert "hunter2" not in written
    assert "this comment" not in written
    assert str(tmp_path) not in written
    assert "test_diagnosis_guard.py" in written
    assert any(line.endswith("in failing_step") for line in g.diagnosis.stack)
    assert sys.prefix not in written


def test_a_diagnosis_that_fails_warns_and_the_error_comes(memory):
    def broken():
        raise ZeroDivisionError("a bug")

    memory.segments = broken
    with pytest.warns(xmem.XmemWarning, match="the diagnosis failed by ZeroDivisionError: a bug"):
        error = failed(memory)
    assert error.diagnosis.message == "no 5000 bytes"
    assert error.diagnosis.may_be_updated, "nobody knows"
    assert "recovered" in memory.done
