"""Segments on PyTorch: blocks that wait for the last one, and all that may happen meanwhile."""

import copy
import pickle
import warnings

import pytest
import torch
from on_torch.loops import Block, Loop, run, same
from torch import nn

import xmem


@pytest.mark.parametrize(("how", "read"), [("residual", "its value"), ("text", "shape")])
def test_a_segment_that_is_cut_short_warns_and_names_the_block(backend, how, read):
    model = Loop(how)
    xmem.apply_checkpointing(model, 2)
    with pytest.warns(xmem.XmemWarning, match=r"after block 'blocks\.\d'.*" + read):
        run(model, torch.randn(8, 16))


def test_an_output_inside_a_segment_may_be_read_later_and_has_its_gradient(backend):
    found = []
    for layout in ([], [["blocks.0", "blocks.1", "blocks.2"]]):
        torch.manual_seed(0)
        model, x = Loop(), torch.randn(8, 16)
        if layout:
            xmem.apply_checkpointing(model, layout)
        first = model.blocks[0](x)
        second = model.blocks[1](first)
        third = model.blocks[2](second)
        (first * third).sum().backward()
        found.append([p.grad for b in model.blocks[:3] for p in b.parameters()])
        assert [b.calls for b in model.blocks[:3]] == ([2] * 3 if layout else [1] * 3)
    assert same(*found)


def test_without_gradients_blocks_run_when_they_are_called(backend):
    model, x = Loop().eval(), torch.randn(8, 16)
    expected = model(x)
    xmem.apply_checkpointing(model, 2)
    with torch.no_grad():
        assert isinstance(model.blocks[0](x), torch.Tensor)
        assert torch.equal(model(x), expected)
    assert torch.equal(model(x), expected)


def test_blocks_that_return_tuples_go_through_a_segment(backend):
    class Pair(Block):
        def forward(self, x):
            return super().forward(x), "cache"

    class Taking(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(Pair() for _ in range(4))

        def forward(self, x):
            for block in self.blocks:
                outputs = block(x)
                x = outputs[0]
            return x

    torch.manual_seed(0)
    model, x = Taking(), torch.randn(8, 16)
    other = copy.deepcopy(model)
    expected = run(model, x)
    xmem.apply_checkpointing(other, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert same(run(other, x), expected)
    assert [b.calls for b in other.blocks] == [2] * 4


def test_a_shared_block_ends_a_segment_wherever_it_is_called(backend):
    shared = Block()
    model = nn.Sequential(Block(), shared, Block(), shared, Block())
    other = copy.deepcopy(model)
    x = torch.randn(8, 16)
    expected = run(model, x)
    receipt = xmem.apply_checkpointing(other, 2)
    assert receipt.applied_to == 4
    assert same(run(other, x), expected)


def test_a_copy_of_a_model_in_segments_runs_its_own_blocks(backend):
    model, x = Loop().eval(), torch.randn(8, 16)
    xmem.apply_checkpointing(model, 2)
    expected = model(x).detach()
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(copied(x), expected)
        with torch.no_grad():
            for p in copied.parameters():
                p.zero_()
        assert not copied(x).any()
        assert torch.equal(model(x), expected)


def test_hooks_of_blocks_inside_a_segment_see_the_right_values(backend):
    model, x = Loop().eval(), torch.randn(8, 16)
    seen = []

    def note(module, inputs, output):
        seen.append(output + 0)

    handles = [block.register_forward_hook(note) for block in model.blocks]
    model(x)
    expected = list(seen)
    seen.clear()
    xmem.apply_checkpointing(model, 1)
    with pytest.warns(xmem.XmemWarning, match="cut short"):
        model(x)
    assert same(seen, expected)
    for handle in handles:
        handle.remove()


class Dense(nn.Module):
    """Hands every block a list, which it extends in between; blocks add to another list."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(16, 16)

        def forward(self, inputs, penalties):
            hidden = torch.tanh(self.layer(sum(inputs)))
            penalties.append(hidden.square().mean())
            return hidden

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(self.Block() for _ in range(6))

    def forward(self, x):
        outputs, penalties = [x], []
        for block in self.blocks:
            outputs.append(block(outputs, penalties))
        y = outputs[-1]
        return torch.stack([y, *outputs[1:-1]]).sum(0) + sum(penalties)


@pytest.mark.parametrize("layout", ["every", 1, 3])
def test_lists_that_the_loop_and_the_blocks_fill_are_those_of_plain_training(backend, layout):
    model, x = Dense(), torch.randn(8, 16)
    expected = run(model, x)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", xmem.XmemWarning)
        xmem.apply_checkpointing(model, layout)
        assert same(run(model, x), expected)


def test_a_list_that_blocks_fill_is_filled_once_though_their_segment_is_cut_short(backend):
    model, x = Dense(), torch.randn(8, 16)
    xmem.apply_checkpointing(model, 1)
    penalties = []
    first = model.blocks[0]([x], penalties)
    second = model.blocks[1]([first], penalties)
    with pytest.warns(xmem.XmemWarning, match="cut short"):
        first.shape  # noqa: B018
    assert len(penalties) == 1
    with pytest.warns(xmem.XmemWarning, match="cut short"):
        second.sum().backward()
    assert len(penalties) == 2


def test_a_block_that_is_given_a_list_of_tensors_and_appends_to_it(backend):
    layer, x, before = nn.Linear(4, 4), torch.randn(2, 4), [torch.ones(2, 4)]

    def function(x, kept):
        kept.append(layer(x).tanh())
        return kept[-1] * kept[0]

    y = xmem.checkpoint(function, x, before)
    assert len(before) == 2
    (y.sum() + before[1].sum()).backward()
    assert len(before) == 2


@pytest.mark.parametrize("changed", ["the input", "the output of a block that has run"])
def test_what_is_changed_in_place_before_a_segment_runs_is_refused(backend, changed):
    model, x = Loop(), torch.randn(8, 16)
    xmem.apply_checkpointing(model, 1)
    y = model.blocks[0](x)
    z = model.blocks[1](y)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", xmem.XmemWarning)
        if changed == "the input":
            x.mul_(2)
        else:
            y += 1
    with pytest.raises(xmem.CompositionError, match="changed in place before its segment ran"):
        z.sum()


def test_an_output_changed_in_place_inside_a_segment_is_changed_for_all_who_hold_it(backend):
    model, x = Loop(), torch.randn(8, 16)
    xmem.apply_checkpointing(model, 1)
    y = model.blocks[0](x)
    kept = y
    with pytest.warns(xmem.XmemWarning, match="cut short"):
        y += 1
    assert torch.equal(torch.as_tensor(y), kept + 0)


def test_backward_hooks_of_blocks_are_called_or_refused(backend):
    seen = []
    model, x = Loop(), torch.randn(8, 16)
    model.blocks[0].register_full_backward_hook(lambda *_: seen.append(1))
    receipt = xmem.apply_checkpointing(model, "every")
    run(model, x)
    assert seen == [1]
    receipt.undo()
    xmem.apply_checkpointing(model, 1)
    with pytest.raises(xmem.CompositionError, match="backward hooks"):
        run(model, x)


@pytest.mark.filterwarnings("ignore::xmem.XmemWarning")
def test_a_region_of_the_loop_gets_what_it_is_given_before_it_begins(backend):
    found = []
    for layout in ([], 1):
        torch.manual_seed(0)
        model, x = Loop(), torch.randn(8, 16)
        if layout:
            xmem.apply_checkpointing(model, layout)
        y = model.blocks[0](x)
        for block in model.blocks[1:]:
            y = xmem.checkpoint(block, y)
        y.square().sum().backward()
        found.append([p.grad for p in model.parameters()])
    assert same(*found)


@pytest.mark.filterwarnings("ignore::xmem.XmemWarning")
def test_a_block_that_waits_is_not_run_inside_another_checkpoint(backend):
    """PyTorch's own, in the model's loop: the second pass would not run the block again."""
    from torch.utils.checkpoint import checkpoint

    model, x = Loop(), torch.randn(8, 16)
    xmem.apply_checkpointing(model, 1)
    with pytest.raises(xmem.CompositionError, match=r"'blocks\.0' waits for the rest"):
        checkpoint(lambda y: y * 2, model.blocks[0](x), use_reentrant=False)


def test_a_copy_of_an_output_that_waits_is_a_copy_of_its_value(backend):
    model, x = Loop().eval(), torch.randn(8, 16)
    expected = model.blocks[0](x)
    xmem.apply_checkpointing(model, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", xmem.XmemWarning)
        assert torch.equal(copy.copy(model.blocks[0](x)), expected)
        with pytest.raises(RuntimeError, match="deepcopy"):  # as of any tensor with a graph
            copy.deepcopy(model.blocks[0](x))


def test_a_block_runs_when_its_output_is_dropped_and_not_before(backend):
    model, x = Loop(), torch.randn(8, 16)
    xmem.apply_checkpointing(model, 1)
    y = model.blocks[0](x)
    assert model.blocks[0].calls == 0
    del y
    assert model.blocks[0].calls == 1


def test_an_output_that_is_dropped_after_its_input_was_changed_warns(backend):
    model, x = Loop(), torch.randn(8, 16)
    xmem.apply_checkpointing(model, 1)
    y = model.blocks[0](x)
    x.mul_(2)
    with pytest.warns(xmem.XmemWarning, match="changed in place before its segment ran"):
        del y


def test_a_segment_that_has_failed_is_not_run_again_when_it_is_dropped(backend):
    model, x = Loop(), torch.randn(8, 16)
    xmem.apply_checkpointing(model, 1)
    model.blocks[1].layer = nn.Linear(3, 3)
    y = model.blocks[1](model.blocks[0](x))
    with pytest.raises(RuntimeError, match="shapes"):
        y.sum()
    calls = model.blocks[0].calls
    del y
    assert model.blocks[0].calls == calls == 1
