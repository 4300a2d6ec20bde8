"""Tensor parallel on Jittor, on 2 and 4 ranks, beside one process."""

import pytest
import ranks

PROGRAM = """
sys.path[:0] = [sys.path[0] + "/on_jittor"]
import parts_programs
parts_programs.{what}
"""


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    program = PROGRAM.format(what="all_of_it(here, report)")
    return ranks.run("jittor", program, tmp_path_factory.mktemp("two"), limit=600)


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    what = "xmem\nreport(parities=parts_programs.parities())\nxd.destroy()"
    return ranks.run(
        "jittor", PROGRAM.format(what=what), tmp_path_factory.mktemp("four"), ranks=4, limit=600
    )


@pytest.mark.parametrize("world", ["two", "four"])
def test_ten_steps_give_the_loss_and_the_parameters_of_one_process(world, request):
    for found in request.getfixturevalue(world):
        assert found["parities"].keys() == {"plain", "accumulated", "checkpointed", "both"}
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


def test_a_rank_needs_at_most_six_tenths_of_one_process(two):
    for found in two:
        alone, parts = found["memory"]["alone"], found["memory"]["parts"]
        # All but the biases of the second layers of four pairs are halved.
        biases = 4 * 256 * 4
        assert parts["parameters"] == (alone["parameters"] - biases) // 2 + biases
        assert parts["peak"] <= 0.6 * alone["peak"], found["memory"]


def test_dropout_agrees_on_ranks_that_were_seeded_differently(two):
    assert two[0]["dropout"] == two[1]["dropout"]
    for agree in two[0]["dropout"][1::2]:
        assert agree == 4 * 3 + 2  # of each block norm and the second bias, and the head


def test_norms_count_every_part_once_and_all_ranks_skip_a_step_for_one_bad_part(two):
    for found in two:
        rows, stayed = found["norms"]
        for alone, together in rows:
            assert together == pytest.approx(alone, rel=1e-5)
        assert stayed


def test_a_pair_of_layers_costs_one_all_reduce_in_each_pass_also_with_packed_activations(two):
    for found in two:
        for calls, sent in found["traffic"]:
            assert calls == {"all_reduce": 8}  # four pairs, forward and backward
            assert sent == {"all_reduce": 8 * 16 * 32 * 4}  # batch, width, float32


def test_a_layer_alone_gives_or_takes_its_part(two):
    assert [found["single"] for found in two] == [[True] * 3] * 2


def test_what_cannot_be_cut_is_refused_on_every_rank_and_nothing_has_changed(two):
    for found in two:
        refused, stayed = found["refusals"]
        assert stayed
        assert "nearest linear layer is 'blocks.0.up'" in refused["path"]
        assert "5 outputs, which 2 ranks" in refused["sizes"]
        assert "together with 0.weight" in refused["tied"]
        assert refused["differs"].startswith("CollectiveMismatchError")
        assert "LayerNorm is no jt.nn.Linear" in refused["norm"]
        assert "unknown dim 0" in refused["dim"]
        assert refused["averaged"].startswith("CompositionError")
        assert refused["done"].startswith("CompositionError")
        assert refused["accumulating"].startswith("CompositionError")
        assert "this rank's part of its 8 inputs" in refused["inputs"]


def test_one_rank_warns_and_keeps_the_model_whole(backend):
    import parts_programs
    from jittor import nn

    import xmem
    import xmem.distributed as xd

    xd.init()
    try:
        model = parts_programs.Net()
        before = [tuple(p.shape) for p in model.parameters()]
        with pytest.warns(xmem.XmemWarning, match="There is one rank"):
            assert xd.tensor_parallel(model, parts_programs.PLAN) is model
        assert before == [tuple(p.shape) for p in model.parameters()]
        layer = nn.Linear(3, 3)
        assert xd.shard_linear(layer, dim="out") is layer
    finally:
        xd.destroy()
