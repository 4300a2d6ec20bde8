"""Layouts on PyTorch: which blocks become one region, and that the result never changes."""

import copy
import pickle
import random
import warnings

import pytest
import torch
from on_torch.gpt import GPT, forward_and_backward
from torch import nn

import xmem


class Block(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.layer = nn.Linear(width, width)
        self.norm = nn.BatchNorm1d(width)
        self.dropout = nn.Dropout(0.2)
        self.calls = 0

    def forward(self, x, scale=1.0, *, shift=None):
        self.calls += 1
        y = self.dropout(torch.tanh(self.norm(self.layer(x)))) * scale
        return y if shift is None else y + shift


class Loop(nn.Module):
    """Calls its blocks by itself, in one of several ways."""

    def __init__(self, how="plain", depth=6):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.how = how
        self.shift = nn.Parameter(torch.zeros(16))

    def forward(self, x):
        kept = []
        for i, block in enumerate(self.blocks):
            if self.how == "arguments":
                x = block(x, i / 2, shift=self.shift)
            elif self.how == "residual":
                x = x + block(x)
            elif self.how == "skips":
                x = block(x)
                kept.append(x)
            elif self.how == "random depth":
                x = block(x) if random.random() < 0.6 else x
            elif self.how == "no_grad first":
                with torch.set_grad_enabled(i > 2):
                    x = block(x)
            elif self.how == "autocast in between":
                with torch.autocast("cpu", dtype=torch.bfloat16, enabled=i % 3 == 1):
                    x = block(x).float()
            elif self.how == "early exit":
                x = block(x)
                if i == 3:
                    break
            elif self.how == "text":
                x = block(x)
                assert "Tensor" in type(x).__name__ or x.shape[0] == 8
            else:
                x = block(x)
        return x + sum(kept[:-1]) if kept else x


HOWS = [
    "plain", "arguments", "residual", "skips", "random depth", "no_grad first",
    "autocast in between", "early exit", "text",
]  # fmt: skip


def run(model, x):
    model.zero_grad(set_to_none=True)
    torch.manual_seed(1)
    random.seed(1)
    y = model(x)
    y.square().sum().backward()
    gradients = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    return [y.detach(), *gradients, *(b.clone() for b in model.buffers())]


def same(found, expected):
    return all(
        (a is None and b is None) or torch.equal(a, b) for a, b in zip(found, expected, strict=True)
    )


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
