"""What a plan of tensor parallelism means."""

import pytest

from xmem.distributed.layer_plans import Layer, check_sizes, chosen
from xmem.errors import UsageError

LAYERS = [
    Layer("blocks.0.up", 8, 32),
    Layer("blocks.0.down", 32, 8),
    Layer("blocks.1.up", 8, 32),
    Layer("blocks.1.down", 32, 8),
    Layer("head", 8, 10, "embedding.weight"),
]
OTHERS = {"blocks": "ModuleList", "blocks.0": "Block", "embedding": "Embedding"}


def test_patterns_and_paths_choose_layers_in_the_order_of_the_model():
    plan = {"blocks.*.down": "in", "blocks.*.up": "out"}
    assert list(chosen(plan, LAYERS, OTHERS, 2).items()) == [
        ("blocks.0.up", "out"),
        ("blocks.0.down", "in"),
        ("blocks.1.up", "out"),
        ("blocks.1.down", "in"),
    ]
    assert chosen({"blocks.1.up": "out"}, LAYERS, OTHERS, 4) == {"blocks.1.up": "out"}


def test_a_pattern_that_matches_other_modules_too_means_the_linear_layers():
    assert list(chosen({"blocks.0*": "out"}, LAYERS, OTHERS, 2)) == ["blocks.0.up", "blocks.0.down"]


def test_two_entries_may_say_the_same_of_a_layer():
    plan = {"blocks.*.up": "out", "blocks.0.up": "out"}
    assert set(chosen(plan, LAYERS, OTHERS, 2)) == {"blocks.0.up", "blocks.1.up"}


@pytest.mark.parametrize(
    ("plan", "world_size", "message"),
    [
        ({}, 2, "is no plan"),
        ([("blocks.0.up", "out")], 2, "is no plan"),
        ({"blocks.0.upp": "out"}, 2, "path matches no module.*nearest.*'blocks.0.up'"),
        ({"block.*.up": "out"}, 2, "pattern matches no module.*nearest linear layer"),
        ({"blocks.0": "out"}, 2, "'blocks.0', which is a Block and no linear layer"),
        ({"blocks.0.up": "output"}, 2, "Did you mean 'out'"),
        ({"blocks.0.up": None}, 2, "unknown dim None"),
        ({0: "out"}, 2, "path in the model, as text"),
        ({"blocks.*.up": "out", "*.0.up": "in"}, 2, "'out' by 'blocks.*.up'.*'in' by"),
        ({"blocks.0.up": "out"}, 3, "32 outputs, which 3 ranks cannot share"),
        ({"blocks.0.down": "in"}, 5, "32 inputs, which 5 ranks cannot share"),
        ({"head": "out"}, 2, "together with embedding.weight"),
    ],
)
def test_a_plan_that_cannot_be_carried_out_is_refused_with_what_is_wrong(plan, world_size, message):
    with pytest.raises(UsageError, match=message):
        chosen(plan, LAYERS, OTHERS, world_size)


def test_a_model_without_linear_layers_says_so():
    with pytest.raises(UsageError, match="no linear layers"):
        chosen({"up": "out"}, [], {}, 2)


def test_one_rank_keeps_what_is_tied():
    check_sizes(LAYERS[4], "out", 1)
