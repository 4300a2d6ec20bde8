"""Tensor parallel on PyTorch, on 2 and 4 ranks, beside one process."""

import pytest
from on_torch import shared_ranks

MIB = 1 << 20


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    return [found["layers"] for found in shared_ranks.split(tmp_path_factory)]


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    return [found["layers"] for found in shared_ranks.four(tmp_path_factory)]


@pytest.mark.parametrize("world", ["two", "four"])
def test_ten_steps_give_the_loss_and_the_parameters_of_one_process(world, request):
    for found in request.getfixturevalue(world):
        cases = {"plain", "both"} | ({"accumulated", "checkpointed"} if world == "two" else set())
        assert found["parities"].keys() == cases
        for case, (loss, parameters) in found["parities"].items():
            assert loss <= 1e-6, (case, loss)
            assert parameters <= 1e-6, (case, parameters)


def test_autocast_and_compression_come_as_near_as_their_rounding_lets_them(two):
    for found in two:
        for case in ("half", "half_checkpointed", "compressed", "compressed_checkpointed"):
            loss, parameters = found[case]
            # Ten steps of 1e-3 in other directions would be apart 1e-2.
            assert loss < 2e-2, (case, loss)
            assert parameters < 5e-3, (case, parameters)


def test_a_rank_needs_at_most_38_mib_for_13_mib_of_parameters(two):
    for found in two:
        memory = found["memory"]
        layers = 4 * (2 * 256 * 1024 * 4 + 1024 * 4)  # two weights, and the bias of "out"
        assert memory["whole"] - memory["here"] == layers // 2
        assert memory["peak"] <= 38 * MIB, memory


def test_dropout_agrees_on_ranks_that_were_seeded_differently(two):
    (equal, losses), (equal_there, losses_there) = (found["dropout"] for found in two)
    assert equal
    assert equal_there
    assert losses == losses_there


def test_norms_count_every_part_once_and_all_ranks_skip_a_step_for_one_bad_part(two):
    for found in two:
        rows, stayed = found["norms"]
        for alone, together in rows:
            assert together == pytest.approx(alone, rel=1e-5)
        assert stayed


def test_a_pair_of_layers_costs_one_all_reduce_in_each_pass(two):
    for found in two:
        calls, sent, buffer_bytes, seconds = found["traffic"]
        assert calls == {"all_reduce": 6}  # three pairs, forward and backward
        assert sent == {"all_reduce": 6 * 8 * 16 * 32 * 4}  # batch, length, width, float32
        assert buffer_bytes == 0  # in place
        assert seconds > 0


def test_a_layer_alone_gives_or_takes_its_part(two):
    assert [found["single"] for found in two] == [[True] * 4] * 2


def test_what_cannot_be_cut_is_refused_on_every_rank_and_nothing_has_changed(two):
    for found in two:
        refused, stayed = found["refusals"]
        assert stayed
        assert "nearest linear layer is 'layers.0.expand'" in refused["path"]
        assert "5 outputs, which 2 ranks" in refused["sizes"]
        assert "together with token.weight" in refused["tied"]
        assert refused["differs"].startswith("CollectiveMismatchError")
        assert "LayerNorm is no torch.nn.Linear" in refused["norm"]
        assert "unknown dim 0" in refused["dim"]
        assert refused["averaged"].startswith("CompositionError")
        assert refused["accumulating"].startswith("CompositionError")
        assert "this rank's part of its 8 inputs" in refused["inputs"]


def test_one_rank_warns_and_keeps_the_model_whole(backend):
    import sharded_programs
    import torch

    import xmem
    import xmem.distributed as xd

    xd.init()
    try:
        model = sharded_programs.small()
        before = {name: tuple(p.shape) for name, p in model.named_parameters()}
        with pytest.warns(xmem.XmemWarning, match="There is one rank"):
            assert xd.tensor_parallel(model, sharded_programs.PLAN) is model
        assert before == {name: tuple(p.shape) for name, p in model.named_parameters()}
        layer = torch.nn.Linear(3, 3)
        assert xd.shard_linear(layer, dim="out") is layer
    finally:
        xd.destroy()
