"""Sharded states on PyTorch: saved as one process would, loaded in any world."""

import pytest
import torch
from on_torch import shared_ranks, sharing, state_checks

import xmem.distributed as xd

KINDS = ("dp", "zero1", "zero3", "layers")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return shared_ranks.folder(tmp_path_factory)


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    return [found["states"] for found in shared_ranks.two(tmp_path_factory)]


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    return [found["states"] for found in shared_ranks.four(tmp_path_factory)]


def alike(results):
    for how, (loss, parameters) in results.items():
        assert loss <= 1e-6, (how, loss)
        assert parameters <= 1e-6, (how, parameters)
    return len(results)


def test_what_one_way_saves_the_others_take_up_and_train_alike(two):
    for found in two:
        assert alike(found["taken up"]) == 9
        assert alike(found["by layers"]) == 2


def test_twice_as_many_ranks_take_it_up(four):
    for found in four:
        assert alike(found["taken up"]) == 4


@pytest.mark.parametrize("kind", KINDS)
def test_one_process_takes_it_up_without_xmem(folder, two, backend, kind):
    state = torch.load(folder / f"{kind}.pt", weights_only=True)
    model, alone = sharing.model(), sharing.model()
    optimizer = sharing.optimizer(model.parameters())
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    losses = sharing.train_alone(model, optimizer, steps=range(state_checks.HALF, sharing.STEPS))
    expected = sharing.train_alone(alone, sharing.optimizer(alone.parameters()))
    assert sharing.furthest(losses, expected[state_checks.HALF :]) <= 1e-6
    assert sharing.furthest(dict(model.state_dict()), dict(alone.state_dict())) <= 1e-6


@pytest.mark.parametrize("kind", KINDS)
def test_one_rank_takes_it_up_and_saves_it_again(folder, two, backend, kind, tmp_path):
    xd.init()
    try:
        model = sharing.model()
        optimizer = sharing.optimizer(model.parameters())
        xd.load(folder / f"{kind}.pt", model, optimizer)
        xd.save(tmp_path / "again.pt", model, optimizer)
    finally:
        xd.destroy()
    first, again = (
        torch.load(path, weights_only=True)
        for path in (folder / f"{kind}.pt", tmp_path / "again.pt")
    )
    assert sharing.furthest(again["model"], first["model"]) == 0.0
    assert sharing.furthest(again["optimizer"]["state"], first["optimizer"]["state"]) == 0.0
    assert again["optimizer"]["param_groups"] == first["optimizer"]["param_groups"]


def test_states_in_eight_bits_come_back_whole_and_not_in_parts(two):
    for found in two:
        assert found["8 bits"] is True
        kind, message = found["8 bits of parts"]
        assert kind == "CompositionError"
        assert "do not make the whole's" in message


def test_the_first_rank_alone_has_the_whole(two):
    assert [found["none elsewhere"] for found in two] == [False, True]


def test_training_leaves_a_state_that_was_loaded_alone_and_a_save_leaves_training(two):
    for found in two:
        assert found["own"] is True
        assert alike({"after": found["goes on"]}) == 1


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("no folder", "there is no folder"),
        ("a folder", "is a folder"),
        ("no file", "is no file"),
        ("text", "no file of torch.save"),
        ("a list", "is no file that xmem.distributed.save wrote"),
        ("other names", "of another model"),
        ("other sizes", "of shape (16, 32), and the model's is (16, 16)"),
        ("no optimizer", "Load with optimizer=None"),
        ("nothing", "no full state to load"),
        ("other optimizer", "groups of [30] parameters, and this one has [1]"),
    ],
)
def test_what_is_wrong_on_the_first_rank_is_said_on_all(two, what, text):
    (kind, message), (other, there) = (found["refusals"][what] for found in two)
    assert kind == "UsageError"
    assert other == "DistributedError"
    assert text in message
    assert text in there
    assert "rank 0" in there


def test_other_calls_on_other_ranks_are_named_on_all(two):
    for found in two:
        assert found["refusals"]["no model"][0] == "UsageError"
        kind, message = found["refusals"]["another call"]
        assert kind == "CollectiveMismatchError"
        assert "full_state" in message
        assert "save" in message


def test_nothing_changes_and_nothing_is_left_where_it_was_refused(two):
    first = two[0]["refusals"]
    assert first["changed"] == 0.0
    expected = ["alone.pt", "disk", "list.pt", "text.pt", *(f"{kind}.pt" for kind in KINDS)]
    assert first["left"] == sorted(expected)


def test_a_write_that_fails_is_heard_of_and_leaves_the_old_file(two):
    (said, kept, left), (there, _, _) = (found["broken"] for found in two)
    assert said[0] == "OSError"
    assert there[0] == "DistributedError"
    assert "No space left" in there[1]
    assert kept
    assert left == ["kept.pt"]
