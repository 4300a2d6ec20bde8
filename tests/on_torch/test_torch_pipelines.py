"""Pipelines on PyTorch, on 2 and 4 ranks, beside one process."""

import json
import math

import pytest
import ranks
from on_torch import shared_ranks

MIB = 1 << 20
PROGRAM = """
sys.path[:0] = [sys.path[0] + "/on_torch"]
import torch
torch.set_num_threads(1)
import pipeline_programs
pipeline_programs.failing(here, report)
"""


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    return [found["stages"] for found in shared_ranks.split(tmp_path_factory)]


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    return [found["stages"] for found in shared_ranks.four(tmp_path_factory)]


@pytest.mark.parametrize("world", ["two", "four"])
def test_ten_steps_give_the_loss_and_the_parameters_of_one_process(world, request):
    for found in request.getfixturevalue(world):
        assert len(found["parities"]) == {"two": 4, "four": 2}[world]
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


def test_a_rank_needs_at_most_36_mib_for_13_mib_of_parameters(two):
    for found in two:
        for case in ("gpt", "blocks"):
            assert found["memory"][case]["peak"] <= 36 * MIB, (case, found["memory"])


def test_more_micro_batches_of_one_size_take_no_more_memory_in_1f1b(two):
    for found in two:
        memory = found["memory"]
        assert memory["1f1b 32"] - memory["1f1b 4"] < 4096, memory  # losses, and notes of PyTorch
        assert memory["gpipe 32"] > 3 * memory["1f1b 32"], memory


def test_running_statistics_count_each_micro_batch_once(two):
    assert [found["statistics"] for found in two] == [[3, True, True]] * 2


def test_batches_of_other_sizes_may_follow(two):
    for found in two:
        assert found["changing"] <= 1e-6, found["changing"]


def test_gradients_of_several_steps_add_up_and_their_norm_is_of_all_stages(two):
    for found in two:
        agree, norm, expected = found["adding"]
        assert agree
        assert norm == pytest.approx(expected, rel=1e-5)


def test_each_micro_batch_is_sent_once_in_each_direction(two):
    size_bytes = 2 * 16 * 32 * 4  # a quarter of the batch, length, width, float32
    for found in two:
        calls, sent, buffer_bytes, seconds = found["traffic"]
        assert (calls, sent) == ({"send": 4}, {"send": 4 * size_bytes})
        assert buffer_bytes == size_bytes  # the last stage has one input at a time
        assert seconds > 0


def test_dropout_is_drawn_again_alike_in_checkpointed_layers(two):
    for found in two:
        plain, checkpointed = found["dropout"]
        assert plain == checkpointed
        assert all(math.isfinite(loss) for loss in plain)


def test_what_makes_no_pipeline_is_refused_on_every_rank_before_anything_is_sent(two):
    for rank, found in enumerate(two):
        refused, loss = found["refusals"]
        assert "1 stages for 2 ranks" in refused["stages"]
        assert "is a int" in refused["module"]
        assert "less than the 2 stages" in refused["few"]
        assert "Did you mean '1f1b'" in refused["schedule"]
        assert refused["differs"].startswith("CollectiveMismatchError")
        assert "tensor_parallel" in refused["sharded"]
        assert "DistributedDataParallel" in refused["parallel"]
        assert "a batch of 6 cannot be cut into 4" in refused["batch"]
        assert "batch of 8, and targets one of 4" in refused["targets"]
        assert "list is not a torch.Tensor" in refused["tensor"]
        assert ("failed on rank 0" in refused["tensor"]) == (rank == 1)
        assert "is no optimizer" in refused["optimizer"]
        assert "inside xmem.accumulate" in refused["accumulating"]
        assert "ranks [1] do not" in refused["half"]
        assert "outside of torch.no_grad" in refused["no_grad"]
        assert "a GradScaler would divide them" in refused["scaler"]
        assert math.isfinite(loss)  # it goes on


def test_what_a_stage_raises_comes_out_as_it_is_and_the_other_rank_names_it(tmp_path):
    process = ranks.start("torch", PROGRAM, tmp_path)
    assert ranks.finish(process, limit=120) not in (0, None)
    first, last = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    assert last["error"] == "RuntimeError: no loss today"
    assert first["error"].startswith("RankLostError")
    assert first["ranks"] == [1]


def test_one_rank_runs_its_only_stage_in_micro_batches(backend):
    import pipeline_programs
    import torch

    import xmem
    import xmem.distributed as xd

    xd.init()
    try:
        whole, x, y = pipeline_programs.model(), *pipeline_programs.batches(1)[0]
        expected = pipeline_programs.mean_loss(whole(x), y)
        expected.backward()
        gradients = [p.grad for p in whole.parameters()]
        with pytest.warns(xmem.XmemWarning, match="There is one rank"):
            pipe = xd.pipeline(
                [pipeline_programs.model], micro_batches=4, loss_fn=pipeline_programs.mean_loss
            )
        loss = pipe.step(x, y, pipeline_programs.adam(pipe.module))
        assert loss == pytest.approx(expected.item(), abs=1e-6)
        for p, gradient in zip(pipe.module.parameters(), gradients, strict=True):
            assert torch.allclose(p.grad, gradient, atol=1e-6)
        with pytest.warns(xmem.XmemWarning, match="There is one rank"):
            odd = xd.pipeline([pipe.module], micro_batches=4, loss_fn=lambda output, target: 0.5)
        with pytest.raises(xmem.UsageError, match=r"loss_fn returned 0\.5"):
            odd.step(x, y, pipeline_programs.adam(odd.module))
    finally:
        xd.destroy()
