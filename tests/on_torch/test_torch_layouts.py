"""Layouts on PyTorch: which blocks become one region, and that the result never changes."""

import copy
import warnings

import pytest
import torch
from on_torch.gpt import GPT, forward_and_backward
from on_torch.loops import HOWS, Block, Loop, run, same
from torch import nn

import xmem


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize(
    "layout", ["every", "sqrt", 1, 2, 4, [["blocks.1", "blocks.2"], "blocks.4"]]
)
def test_the_result_is_the_same_however_the_blocks_are_called(backend, how, layout):
    torch.manual_seed(0)
    model, x = Loop(how), torch.randn(8, 16)
    other = copy.deepcopy(model)
    expected = run(model, x)
    xmem.apply_checkpointing(other, layout)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", xmem.XmemWarning)
        assert same(run(other, x), expected)


@pytest.mark.parametrize(
    ("layout", "segments"),
    [
        ("every", [1] * 6), ("sqrt", [3, 3]), (1, [6]), (4, [2, 1, 2, 1]), (6, [1] * 6),
        ([["blocks.0", "blocks.1", "blocks.2"], ["blocks.3", "blocks.4", "blocks.5"]], [3, 3]),
    ],
)  # fmt: skip
def test_every_block_of_every_segment_runs_once_more(backend, layout, segments):
    model, x = Loop(), torch.randn(8, 16)
    regions = count_regions(backend)
    receipt = xmem.apply_checkpointing(model, layout)
    run(model, x)
    assert [b.calls for b in model.blocks] == [2] * 6
    assert regions.lengths == segments
    assert receipt.applied_to == 6
    assert receipt.names == tuple(f"blocks.{i}" for i in range(6))
    receipt.undo()
    run(model, x)
    assert [b.calls for b in model.blocks] == [3] * 6
    regions.stop()


class count_regions:  # noqa: N801
    """Notes of how many blocks each region consists."""

    def __init__(self, backend):
        self.lengths = []
        capability = backend.checkpoint
        original = capability.checkpoint

        def counting(function, args, kwargs, how):
            self.lengths.append(len(getattr(function, "forwards", "1")))
            return original(function, args, kwargs, how)

        capability.checkpoint = counting
        self.stop = lambda: capability.__dict__.pop("checkpoint")


def test_several_lists_of_blocks_share_the_segments(backend):
    model = nn.ModuleDict({"encoder": Loop(depth=6), "decoder": Loop(depth=2)})
    assert xmem.apply_checkpointing(model, 4).note == "4 segments of 2, 2, 2, 2 blocks"
    with pytest.raises(xmem.UsageError, match=r"1 segments cannot be made of 8 blocks in 2 list"):
        xmem.apply_checkpointing(model, 1)


@pytest.mark.parametrize(
    ("layout", "said"),
    [
        ("sqr", "Did you mean 'sqrt'"),
        (0, "give a number from 1 to 6"),
        (7, "7 segments cannot be made of 6 blocks"),
        (True, "True is no layout"),
        (2.0, "2.0 is no layout"),
        (None, "None is no layout"),
        ([["blocks.0", "blocks.9"]], "unknown module 'blocks.9'"),
        ([[]], "segment 0 is empty"),
        ([[nn.Linear(2, 2), 3]], "3 is no module"),
    ],
)
def test_a_layout_that_cannot_be_is_named_and_nothing_changes(backend, layout, said):
    model = Loop()
    with pytest.raises(xmem.UsageError, match=said):
        xmem.apply_checkpointing(model, layout)
    assert not any("forward" in m.__dict__ for m in model.modules())


@pytest.mark.parametrize(
    ("layout", "said"),
    [
        (["blocks.0", ["blocks.1", "blocks.0"]], "listed twice"),
        (["blocks", "blocks.0"], "lies inside 'blocks'"),
    ],
)
def test_a_module_in_two_segments_is_refused(backend, layout, said):
    model = Loop()
    with pytest.raises(xmem.CompositionError, match=said):
        xmem.apply_checkpointing(model, layout)
    assert not any("forward" in m.__dict__ for m in model.modules())


def test_an_empty_list_of_segments_warns(backend):
    with pytest.warns(xmem.XmemWarning, match="applied to nothing"):
        assert xmem.apply_checkpointing(Loop(), []).applied_to == 0


@pytest.mark.parametrize(
    ("layers", "names"),
    [
        (xmem.KeyLayers(types=(Block,)), [f"blocks.{i}" for i in range(6)]),
        (
            xmem.KeyLayers(types=("BatchNorm1d",), names=("blocks.[12].*",)),
            ["blocks.1.norm", "blocks.2.norm"],
        ),
        (xmem.KeyLayers(names=("blocks.3", "blocks.3.norm")), ["blocks.3"]),
    ],
)
def test_key_layers_are_chosen_by_type_and_name(backend, layers, names):
    torch.manual_seed(0)
    model, x = Loop(), torch.randn(8, 16)
    other = copy.deepcopy(model)
    expected = run(model, x)
    assert list(xmem.apply_checkpointing(other, layers).names) == names
    assert same(run(other, x), expected)


def test_key_layers_with_large_insides_are_found_by_measuring(backend):
    """Wide blocks keep more; the costs are measured without a trace."""
    model = nn.Sequential(
        *[nn.Sequential(nn.Linear(8, w), nn.Tanh(), nn.Linear(w, 8)) for w in (8, 512, 16, 256)]
    )
    x, calls = torch.randn(64, 8), torch.get_rng_state()
    layers = xmem.KeyLayers(min_saved_bytes="64KiB")
    receipt = xmem.apply_checkpointing(model, layers, inputs=(x,))
    assert receipt.names == ("1", "3")
    assert receipt.expected_saving_bytes == 64 * (512 + 256) * 4
    assert torch.equal(torch.get_rng_state(), calls)
    receipt.undo()
    assert not any("forward" in m.__dict__ for m in model.modules())
    layers = xmem.KeyLayers(min_saved_bytes=1, max_recompute_seconds=1e-9)
    with pytest.warns(xmem.XmemWarning, match="No module meets KeyLayers"):
        xmem.apply_checkpointing(model, layers, inputs=x)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: xmem.KeyLayers(), "chooses by nothing"),
        (lambda: xmem.KeyLayers(types=Block), "takes sequences"),
        (lambda: xmem.KeyLayers(names="blocks.0"), "takes sequences"),
        (lambda: xmem.KeyLayers(min_saved_bytes="many"), "many"),
        (lambda: xmem.KeyLayers(max_recompute_seconds=0), "no time above 0"),
        (
            lambda: xmem.apply_checkpointing(Loop(), xmem.KeyLayers(names=("block.0",))),
            "Did you mean 'blocks.0'",
        ),
        (
            lambda: xmem.apply_checkpointing(Loop(), xmem.KeyLayers(min_saved_bytes=1)),
            "give its inputs",
        ),
        (
            lambda: xmem.apply_checkpointing(Loop(), "every", inputs=(1,)),
            "inputs= is for KeyLayers",
        ),
        (lambda: xmem.apply_checkpointing(Loop(), ["blocks.0"], blocks=[]), "leave blocks= out"),
    ],
)
def test_key_layers_that_cannot_be_are_named(backend, make, said):
    with pytest.raises(xmem.UsageError, match=said):
        make()


@pytest.mark.parametrize("segments", [5, 6, 8, 12])
def test_all_segments_are_checkpointed_also_the_last_and_the_remainder(backend, segments):
    """PyTorch's checkpoint_sequential leaves those out: its 5 segments take more than its 4."""
    model, ids = GPT(layers=24), torch.randint(0, 1000, (8, 128))
    peaks = {}
    for layout in (segments, 4):
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        receipt = xmem.apply_checkpointing(model, layout)
        with xmem.measure(model=model, inputs=ids) as m:
            forward_and_backward(model, ids, ids)
        peaks[layout] = m.peak_above_static_bytes
        receipt.undo()
    print(peaks)
    assert peaks[segments] < peaks[4], peaks
    most = {5: 49.5, 6: 41.5, 8: 33.5, 12: 26.5}[segments]  # MiB; written by hand it is as much
    assert peaks[segments] <= most * 2**20, peaks
