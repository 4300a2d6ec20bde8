"""How workloads are divided over ranks: nothing lost, nothing twice, equal for every framework."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from xmem.conformance import partition, sharded
from xmem.errors import CapabilityError
from xmem.workloads import WORKLOADS, make_weights, workload
from xmem.workloads.spec import parameters


class Gaps:
    """A backend of which only the gaps are asked for."""

    name = "some"

    def __init__(self, **gaps):
        self.distributed = self
        self.gaps = gaps


@given(st.integers(1, 8), st.integers(1, 12))
def test_shares_are_equal_and_together_the_batch(world, rows):
    batch = np.arange(rows * world)
    parts = [partition.share(batch, rank, world) for rank in range(world)]
    assert {len(part) for part in parts} == {rows}
    assert np.concatenate(parts).tolist() == batch.tolist()


def test_a_batch_that_leaves_a_remainder_is_refused():
    with pytest.raises(CapabilityError, match="a batch of 5 cannot be shared out evenly over 2"):
        partition.share(np.zeros(5), 0, 2)


@pytest.mark.parametrize("name", WORKLOADS)
@pytest.mark.parametrize("count", [2, 4])
def test_stages_have_every_parameter_once_under_its_name(name, count):
    whole = workload(name)
    weights = make_weights(whole)
    stages = partition.stages(whole, count)
    found = [partition.stage_weights(stage, weights) for stage in stages]
    assert len(stages) == count
    assert [key for part in found for key in part] == list(weights)
    assert all(name in weights for stage in stages for name, _ in parameters(stage))


def test_stages_of_equal_layers_are_even():
    weights = make_weights(workload("mlp"))
    sizes = [
        sum(array.size for array in partition.stage_weights(stage, weights).values())
        for stage in partition.stages(workload("mlp"), 4)
    ]
    assert max(sizes) - min(sizes) <= 256 * 257


def test_more_stages_than_layers_are_refused():
    with pytest.raises(CapabilityError, match="is a chain of 17 layers; 18 stages cannot be cut"):
        partition.stages(workload("mlp"), 18)


def test_pairs_are_two_linear_layers_with_an_activation_between():
    assert list(partition.linear_pairs(workload("mlp").model, 2).items())[:2] == [
        ("blocks.0.body.linear", "out"),
        ("blocks.1.body.linear", "in"),
    ]
    plan = partition.linear_pairs(workload("gpt2").model, 2)
    assert len(plan) == 12
    assert plan["blocks.5.body.mlp.body.mlp.expand"] == "out"
    assert plan["blocks.5.body.mlp.body.mlp.contract"] == "in"
    for name, ranks in (("resnet18", 2), ("mlp", 3)):
        with pytest.raises(CapabilityError, match="no two linear layers"):
            partition.linear_pairs(workload(name).model, ranks)


@pytest.mark.parametrize(
    ("name", "technique", "reason"),
    [
        ("unet3d", "data_parallel", "a batch of 1 cannot be shared out"),
        ("unet3d", "pipeline", "a batch of 1 cannot be cut into 4 micro-batches"),
        ("resnet18", "tensor_parallel", "no two linear layers"),
        ("resnet18", "pipeline", "normalises over its batch"),
    ],
)
def test_what_would_have_other_losses_is_unsupported_with_the_reason(name, technique, reason):
    with pytest.raises(CapabilityError, match=reason):
        sharded.check(Gaps(), workload(name), technique, 2)


def test_batch_statistics_are_a_gap_of_the_backend():
    sharded.check(Gaps(), workload("resnet18"), "zero1", 2)
    with pytest.raises(CapabilityError, match="on GPUs only"):
        sharded.check(Gaps(batch_statistics="on GPUs only"), workload("resnet18"), "zero1", 2)
    sharded.check(Gaps(batch_statistics="on GPUs only"), workload("resnet18"), "zero1", 1)


def test_a_technique_that_is_declared_missing_is_unsupported():
    with pytest.raises(CapabilityError, match="declares zero3 missing: no shards"):
        sharded.check(Gaps(zero3="no shards"), workload("mlp"), "zero3", 2)
