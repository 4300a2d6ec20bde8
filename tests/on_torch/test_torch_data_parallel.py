"""data_parallel on PyTorch: the training of one process, whatever it is combined with."""

import pytest
from on_torch import shared_ranks, sharing

import xmem
import xmem.distributed as xd


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """Return what the first of two ranks found."""
    first, _ = shared_ranks.two(tmp_path_factory)
    return {**first["dp"], **first["parallel"]}


def refused(result, text):
    kind, message = result
    assert kind == "CompositionError", message
    assert text in message
    return True


def test_ten_steps_give_the_loss_and_the_parameters_of_one_process(found):
    assert len(found["parities"]) == 4
    for how, (loss, parameters) in found["parities"].items():
        assert loss <= 1e-6, (how, loss)
        assert parameters <= 1e-6, (how, parameters)


@pytest.mark.parametrize("what", ["by hand", "segment", "segment after", "plan", "plan after"])
def test_no_sync_segments_and_plans_train_alike(found, what):
    loss, parameters = found[what]
    assert loss <= 1e-6
    assert parameters <= 1e-6


@pytest.mark.parametrize("what", ["schedule", "frozen", "no zeroing", "held gradients"])
def test_schedules_frozen_layers_and_gradients_that_are_kept_train_alike(found, what):
    loss, parameters = found[what]
    assert loss <= 2e-6
    assert parameters <= 1e-6


@pytest.mark.parametrize("what", ["clip", "clip by largest"])
def test_gradients_are_clipped_by_their_norm_over_the_whole_batch(found, what):
    assert max(found[what]) <= 1e-6


@pytest.mark.parametrize("what", ["scaler", "fused scaler"])
def test_all_ranks_skip_a_step_in_which_one_overflowed(found, what):
    same_scales, scales, parameters = found[what]
    assert same_scales
    assert scales[1:3] == [256.0, 128.0]
    assert parameters <= 1e-6


def test_autocast_rounds_as_in_one_process(found):
    loss, parameters = found["autocast"]
    assert loss <= 2e-3  # bfloat16 of other batches: 8 bits, in losses of 4
    assert parameters <= 2e-3


@pytest.mark.parametrize("what", ["packed", "packed in regions", "packed frozen"])
def test_compressed_activations_give_gradients_within_their_bound(found, what):
    error, note = found[what]
    assert error <= 0.01
    assert "KiB in" in note


def test_optimizer_states_in_eight_bits_go_on(found):
    loss, parameters = found["8 bits"]
    assert loss <= 1e-4
    assert parameters <= 1e-3


def test_half_models_train_and_masters_are_refused(found):
    assert found["halves"] < 0.05
    assert refused(found["masters"], "float32 masters")


@pytest.mark.parametrize("what", ["in backward", "already in backward"])
def test_an_optimizer_in_backward_is_refused_before_and_after(found, what):
    assert refused(found[what], "averaged over")


@pytest.mark.parametrize(
    "what", ["past the wrapper", "all forward first", "unaveraged at last", "backward twice"]
)
def test_a_step_with_gradients_that_were_not_averaged_is_refused(found, what):
    assert refused(found[what], "have not been averaged")


def test_two_forward_passes_before_a_backward_are_averaged_together(found):
    assert found["forward twice"] <= 1e-6


def test_parameters_that_are_thawed_afterwards_are_refused(found):
    assert refused(found["thawed"], "are not averaged over ranks")


def test_parameters_that_take_no_part_are_waited_for_or_named(found):
    assert found["unused"] == 0.0
    for how in ("unused unsaid", "unused unsaid in buckets"):
        assert refused(found[how], "unused_parameters=True")


def test_a_second_wrapper_and_other_models_parameters_are_refused(found):
    assert refused(found["twice"], "data-parallel already")
    kind, message = found["foreign"]
    assert kind == "UsageError"
    assert "that are not the model's" in message


def test_ranks_with_other_models_are_told_so(found):
    for what, sizes in (("mismatch", ("(8, 4)", "(8, 5)")), ("frozen mismatch", ("(5", "(6"))):
        kind, message = found[what]
        assert kind == "CollectiveMismatchError"
        assert all(size in message for size in sizes), message


def test_all_start_with_the_first_ranks_parameters_and_buffers(found):
    assert found["start"] == 0.0


@pytest.mark.parametrize(("how", "distance"), [("bf16", 1e-3), ("fp16", 1e-3), ("int8", 2e-3)])
def test_compressed_gradients_train_nearly_alike(found, how, distance):
    loss, parameters, sent = found[how]
    assert 0 < loss < distance
    assert 0 < parameters < distance
    assert sent <= {"bf16": 0.501, "fp16": 0.501, "int8": 0.27}[how]


def test_with_error_feedback_300_steps_in_8_bits_reach_the_loss(found):
    plain, packed = found["300 steps"]
    assert packed <= 1.01 * plain, (packed, plain)


def test_what_is_sent_is_counted(found):
    assert found["traffic"]["counted"] == found["traffic"]["expected"]


def test_nothing_is_left_of_a_wrapper_that_is_gone(found):
    assert found["gone"] == [False, 0, 0]


def test_one_rank_is_told_that_nothing_is_shared(backend):
    xd.init()
    try:
        model, alone = sharing.model(), sharing.model()
        optimizer = sharing.optimizer(model.parameters())
        with pytest.warns(xmem.XmemWarning, match="data_parallel was applied to nothing.*one rank"):
            called = xd.data_parallel(model, optimizer)
        with xd.no_sync(called):
            pass
        losses = sharing.train(called, optimizer, micro=2)
        expected = sharing.train_alone(alone, sharing.optimizer(alone.parameters()))
        assert sharing.furthest(losses, expected) <= 1e-6
        assert sharing.away(called, alone) <= 1e-6
        with pytest.raises(xmem.UsageError, match="Linear is not data-parallel"):
            xd.no_sync(model.head)
    finally:
        xd.destroy()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"compress": "int4"}, "compression 'int4'"),
        ({"bucket": 0}, "at least 1 byte"),
        ({"bucket": "many"}, "not a size"),
        ({"error_feedback": "yes"}, "error_feedback='yes'"),
        ({"optimizer": "sgd"}, "str is no optimizer"),
        ({"model": "gpt"}, "no module"),
    ],
)
def test_arguments_that_make_no_sense_are_named(backend, arguments, text):
    xd.init()
    try:
        model = sharing.model()
        given = {"model": model, "optimizer": sharing.optimizer(model.parameters()), **arguments}
        with pytest.raises(xmem.UsageError, match=text):
            xd.data_parallel(given.pop("model"), given.pop("optimizer"), **given)
    finally:
        xd.destroy()


def test_a_call_without_ranks_says_what_to_do(backend):
    model = sharing.model()
    with pytest.raises(xmem.DistributedError, match=r"xmem\.distributed\.init\(\)"):
        xd.data_parallel(model, sharing.optimizer(model.parameters()))
