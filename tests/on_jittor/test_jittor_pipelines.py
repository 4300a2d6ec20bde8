"""Pipelines on Jittor, on 2 and 4 ranks, beside one process."""

import json
import math

import pytest
import ranks

PROGRAM = """
sys.path[:0] = [sys.path[0] + "/on_jittor"]
import stages_programs
stages_programs.{what}
"""


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    program = PROGRAM.format(what="all_of_it(here, report)")
    return ranks.run("jittor", program, tmp_path_factory.mktemp("two"), limit=600)


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    what = "xmem\nreport(parities=stages_programs.parities(here))\nxd.destroy()"
    return ranks.run(
        "jittor", PROGRAM.format(what=what), tmp_path_factory.mktemp("four"), ranks=4, limit=600
    )


@pytest.mark.parametrize("world", ["two", "four"])
def test_ten_steps_give_the_loss_and_the_parameters_of_one_process(world, request):
    for found in request.getfixturevalue(world):
        assert len(found["parities"]) == 4
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


def test_a_rank_needs_at_most_six_tenths_of_gpipe_and_of_one_process(two):
    for rank, found in enumerate(two):
        memory = found["memory"]
        above = {name: row["peak"] - row["static"] for name, row in memory.items()}
        assert memory["1f1b"]["peak"] <= 0.6 * memory["gpipe"]["peak"], memory
        assert memory["1f1b"]["peak"] <= 0.6 * memory["alone"]["peak"], memory
        # Two of eight micro-batches are alive on the first of two stages, and one on the last.
        assert above["1f1b"] <= (0.3, 0.17)[rank] * above["gpipe"], above
        assert above["1f1b checkpointed"] < above["1f1b"], above


def test_a_micro_batch_s_gradients_are_added_up_one_by_one(two):
    for found in two:
        bytes_of = found["heavy"]
        # The sum of all, a gradient, the sum that takes it up, and activations.
        most = bytes_of["gradients"] + 2 * bytes_of["layer"] + (128 << 10)
        assert bytes_of["peak"] - bytes_of["static"] <= most, (bytes_of, most)


def test_running_statistics_count_each_micro_batch_once(two):
    assert [found["statistics"] for found in two] == [[True, True]] * 2


def test_batches_of_other_sizes_may_follow(two):
    for found in two:
        assert found["changing"] <= 1e-6, found["changing"]


def test_gradients_of_several_steps_add_up_and_their_norm_is_of_all_stages(two):
    for found in two:
        agree, norm, expected, updates = found["adding"]
        assert agree
        assert norm == pytest.approx(expected, rel=1e-5)
        assert updates == 1


def test_each_micro_batch_is_sent_once_in_each_direction(two):
    size_bytes = 4 * 32 * 4  # a quarter of the batch, width, float32
    assert [found["traffic"] for found in two] == [[{"send": 4}, {"send": 4 * size_bytes}]] * 2


def test_dropout_works_also_in_checkpointed_blocks(two):
    for found in two:
        for losses in found["dropout"]:
            assert all(math.isfinite(loss) for loss in losses)
            assert len(set(losses)) == 3


def test_what_makes_no_pipeline_is_refused_on_every_rank_before_anything_is_sent(two):
    for rank, found in enumerate(two):
        refused, loss = found["refusals"]
        assert "1 stages for 2 ranks" in refused["stages"]
        assert "is a int" in refused["module"]
        assert "less than the 2 stages" in refused["few"]
        assert "Did you mean '1f1b'" in refused["schedule"]
        assert refused["differs"].startswith("CollectiveMismatchError")
        assert "shared out over the ranks" in refused["sharded"]
        assert "a batch of 6 cannot be cut into 4" in refused["batch"]
        assert "batch of 16, and targets one of 4" in refused["targets"]
        assert "ndarray is not a jittor.Var" in refused["tensor"]
        assert ("failed on rank 0" in refused["tensor"]) == (rank == 1)
        assert "is no optimizer" in refused["optimizer"]
        assert "are not those of this rank's stage" in refused["strange"]
        assert "inside xmem.accumulate" in refused["accumulating"]
        assert "ranks [1] do not" in refused["half"]
        assert "outside of jt.no_grad" in refused["no_grad"]
        assert math.isfinite(loss)  # it goes on


def test_what_a_stage_raises_comes_out_as_it_is_and_the_other_rank_names_it(tmp_path):
    program = PROGRAM.format(what="failing(here, report)")
    process = ranks.start("jittor", program, tmp_path)
    assert ranks.finish(process, limit=120) not in (0, None)
    first, last = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    assert last["error"] == "RuntimeError: no loss today"
    assert first["error"].startswith("RankLostError")
    assert first["ranks"] == [1]


def test_one_rank_runs_its_only_stage_in_micro_batches(backend):
    import jittor as jt
    import stages_programs

    import xmem
    import xmem.distributed as xd

    xd.init()
    try:
        [(x, y)] = stages_programs.batches(1)
        whole = stages_programs.Net()
        expected = stages_programs.mean_loss(whole(jt.array(x)), jt.array(y)).item()
        with pytest.warns(xmem.XmemWarning, match="There is one rank"):
            pipe = xd.pipeline(
                [stages_programs.Net], micro_batches=4, loss_fn=stages_programs.mean_loss
            )
        optimizer = stages_programs.adam(pipe.module)
        losses = []
        for _ in range(5):
            xmem.zero_grad(optimizer)
            losses.append(pipe.step(jt.array(x), jt.array(y), optimizer))
            xmem.optimizer_step(optimizer)
        assert losses[0] == pytest.approx(expected, abs=1e-6)
        assert losses == sorted(losses, reverse=True)
    finally:
        xd.destroy()
