"""What to try, with every number computed by hand."""

import pytest

from xmem.advice import Evidence, advise

KIB = 1024


def evidence(**changes):
    given = {
        "phase": "backward",
        "requested_bytes": 100,
        "missing_bytes": 60,
        "by_category": {
            "parameter": 400,
            "gradient": 300,
            "optimizer": 800,
            "activation": 1000,
            "temporary": 200,
        },
        # inside: 250 - 50, 250 - 50, 500 - 100
        "blocks": ((250, 50), (250, 50), (500, 100)),
        "large_activation_bytes": 900,
        "largest_gradient_bytes": 120,
    }
    return Evidence(**{**given, **changes})


def savings(**changes):
    limit = changes.pop("limit_bytes", 2760)
    return {a.technique: a.expected_bytes for a in advise(evidence(**changes), limit)}


def test_savings_are_those_of_the_bytes_that_were_there():
    assert savings() == {
        "on_oom=offload": 900,
        "compress_activations": 675,  # 900 x 0.75
        "quantize_optimizer": 584,  # 800 x 0.73
        "checkpoint": 400,  # 200 + 200 + 400, less the largest inside
        "autocast": 300,  # (1000 - 400) / 2
        "optimizer_in_backward": 180,  # 300 - 120
        "smaller batch": 60,  # 1200 x (1 - 0.95)
        "limit": 0,
    }


@pytest.mark.parametrize(("running", "saved"), [(None, 400), (0, 800), (200, 600), (400, 400)])
def test_the_block_that_runs_is_what_checkpointing_does_not_save(running, saved):
    assert savings(running_bytes=running)["checkpoint"] == saved


def test_what_saves_little_is_named_only_where_it_is_enough():
    few = {"activation": 1000, "optimizer": 10}
    assert savings(by_category=few, missing_bytes=7)["quantize_optimizer"] == 7
    assert "quantize_optimizer" not in savings(by_category=few, missing_bytes=8)


def test_the_largest_saving_comes_first_and_a_higher_limit_last():
    found = advise(evidence(), 2760)
    sizes = [a.expected_bytes for a in found]
    assert sizes == sorted(sizes, reverse=True)
    assert found[-1].technique == "limit"
    assert found[-1].call == "xmem.pool.configure(limit=2820)"


def test_enough_is_what_lets_the_request_through():
    enough = {a.technique: a.is_enough for a in advise(evidence(missing_bytes=400), 2760)}
    assert enough == {
        "on_oom=offload": True,
        "compress_activations": True,
        "quantize_optimizer": True,
        "checkpoint": True,
        "autocast": False,
        "optimizer_in_backward": False,
        "smaller batch": True,
        "limit": True,
    }


@pytest.mark.parametrize(
    "technique", ["compress_activations", "quantize_optimizer", "checkpoint", "autocast"]
)
def test_what_is_in_force_is_not_advised(technique):
    assert technique in savings()
    assert technique not in savings(in_force=frozenset({technique}))


def test_the_batch_that_would_fit_is_named():
    # 1200 + 100 grow with the batch and 60 are missing: 1 - 60/1300 = 0.953
    [batch] = [a for a in advise(evidence(), 2760) if a.technique == "smaller batch"]
    assert batch.why.startswith("0.95 of this batch")
    # in the optimizer's step the request does not shrink: 1 - 60/1200 = 0.95 exactly
    [batch] = [a for a in advise(evidence(phase="optimizer"), 1) if a.technique == "smaller batch"]
    assert batch.why.startswith("0.95 of this batch")
    assert batch.expected_bytes == 60
    assert batch.is_enough


def test_where_no_batch_is_small_enough_that_is_said():
    [batch] = [a for a in advise(evidence(missing_bytes=5000), 1) if a.technique == "smaller batch"]
    assert (batch.expected_bytes, batch.is_enough) == (600, False)
    assert "no batch is small enough" in batch.why


def test_gradients_that_are_left_over_are_given_back_before_forward():
    found = savings(phase="forward")
    assert found["zero_grad"] == 300
    assert "optimizer_in_backward" not in found
    # between micro-batches they are needed
    found = savings(phase="forward", in_force=frozenset({"accumulate"}))
    assert "zero_grad" not in found


def test_a_model_without_known_blocks_is_told_to_name_them():
    found = advise(evidence(blocks=()), 2760)
    [checkpoint] = [a for a in found if a.technique == "checkpoint"]
    assert "blocks=[...]" in checkpoint.call
    assert checkpoint.expected_bytes is checkpoint.is_enough is None
    assert found.index(checkpoint) == len(found) - 2, "what is unknown comes before the limit only"


def test_a_plan_is_not_told_to_checkpoint():
    assert "checkpoint" not in savings(blocks=(), in_force=frozenset({"plan"}))


@pytest.mark.parametrize(
    ("free", "largest", "named"), [(150, 80, True), (150, 120, False), (90, 80, False)]
)
def test_trimming_is_advised_where_pieces_are_too_small_and_would_do_together(free, largest, named):
    found = savings(free_bytes=free, largest_free_bytes=largest, limit_bytes=None)
    assert found.get("trim") == (150 if named else None)
    assert "limit" not in found


def test_nothing_is_advised_where_there_is_nothing_to_save():
    assert advise(evidence(by_category={}, blocks=(), large_activation_bytes=0), None) == ()
