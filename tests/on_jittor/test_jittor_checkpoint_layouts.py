"""Checkpointing put on models by a layout, on Jittor."""

import copy

import numpy as np
import pytest
from chain import chain, counted, error, gradients, learnt, normal, trained

import xmem


def test_a_replaced_forward_is_undone(backend):
    from jittor import nn

    layer, x = nn.Linear(4, 4), normal(2, 4)
    expected = layer(x).numpy()
    calls = []

    def counting(forward):
        def run(*args):
            calls.append(1)
            return forward(*args)

        return run

    undo_first = backend.checkpoint.replace_forward(layer, counting)
    undo_second = backend.checkpoint.replace_forward(layer, counting)
    assert np.array_equal(layer(x).numpy(), expected)
    assert len(calls) == 2
    undo_second()
    layer(x)
    assert len(calls) == 3
    undo_first()
    layer(x)
    assert len(calls) == 3
    assert "execute" not in layer.__dict__
    assert sorted(name for name, _ in layer.named_parameters()) == ["bias", "weight"]


def test_children_and_containers(backend):
    from jittor import nn

    net = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.ReLU()))
    assert [name for name, _ in backend.checkpoint.children(net)] == ["0", "1"]
    assert backend.checkpoint.is_container(net)
    assert not backend.checkpoint.is_container(net[0])
    assert list(backend.checkpoint.children(net[0])) == []


def test_a_copy_of_a_checkpointed_model_runs_its_own_blocks(backend):
    import jittor as jt
    from jittor import nn

    model = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(3)])
    xmem.apply_checkpointing(model, "every")
    x = jt.randn(4, 8)
    copied = copy.deepcopy(model)
    np.testing.assert_array_equal(copied(x).numpy(), model(x).numpy())
    for p in copied.parameters():
        p.update(jt.zeros_like(p))
    assert not copied(x).numpy().any()
    assert model(x).numpy().any()


def test_what_is_checkpointed_already_is_refused_and_nothing_changes(backend):
    from jittor import nn

    model = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(3)])
    receipt = xmem.apply_checkpointing(model, "every", blocks=[model[1]])
    with pytest.raises(xmem.CompositionError, match="checkpointed or planned already"):
        xmem.apply_checkpointing(model, "every", blocks=[model[0], model[1]])
    assert "execute" not in model[0].__dict__
    with pytest.raises(xmem.UsageError, match="unknown module 'x'"):
        xmem.apply_checkpointing(model, "every", blocks=[model[0], "x"])
    with pytest.raises(xmem.UsageError, match="is no module"):
        xmem.apply_checkpointing(model, "every", blocks=[model[0], 3])
    assert "execute" not in model[0].__dict__
    receipt.undo()
    assert "execute" not in model[1].__dict__


def loops(skip=None):
    """Return a model that calls its blocks itself, with skip connections of its own."""
    from jittor import nn

    class Loops(nn.Module):
        def __init__(self):
            self.blocks = nn.ModuleList(
                [nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(6)]
            )
            self.head = nn.Linear(32, 8)

        def execute(self, x):
            kept = []
            for block in self.blocks:
                y = block(x)
                x = y if skip is None else skip(x, y, kept)
                kept.append(y)
            return self.head(x)

    return Loops()


def skips():
    import jittor as jt
    from jittor import nn

    return {
        "none": None,
        "added left": lambda x, y, kept: x + y,
        "added right": lambda x, y, kept: y + x,
        "concatenated": lambda x, y, kept: jt.concat([x[:, :16], y[:, 16:]], 1),
        "from two before": lambda x, y, kept: kept[-2] + y if len(kept) > 1 else y,
        "by functions": lambda x, y, kept: nn.relu(y) + jt.tanh(y).mean(),
        "in place": lambda x, y, kept: y.add(x).stop_fuse(),
        "numbers read": lambda x, y, kept: y * (1 if float(y.numpy().sum()) < 1e9 else 2),
        "looked at": lambda x, y, kept: y if y.shape[1] == 32 and len(y) and y.dtype else x,
    }


@pytest.mark.filterwarnings("ignore:a segment was cut short:xmem.XmemWarning")
@pytest.mark.parametrize(
    "kind",
    [
        "none",
        "added left",
        "added right",
        "concatenated",
        "from two before",
        "by functions",
        "in place",
        "numbers read",
        "looked at",
    ],
)
@pytest.mark.parametrize("layout", ["every", "sqrt", 3, 1])
def test_whatever_reads_the_output_of_a_block_gets_the_right_gradient(backend, kind, layout):
    model, x = loops(skips()[kind]), normal(16, 32)
    targets = trained(model)
    expected = gradients((model(x) ** 2).sum(), targets)
    receipt = xmem.apply_checkpointing(model, layout)
    counts = counted([block[0] for block in model.blocks])
    found = gradients((model(x) ** 2).sum(), targets)
    assert counts == [2] * 6
    receipt.undo()
    assert error(found, expected) <= 1e-6


def test_a_segment_that_is_cut_short_is_warned_of(backend):
    model, x = loops(skips()["added left"]), normal(16, 32)
    xmem.apply_checkpointing(model, 2)
    with pytest.warns(xmem.XmemWarning, match="cut short after block 'blocks.1'"):
        gradients((model(x) ** 2).sum(), trained(model))


def test_a_segment_that_is_whole_is_not_warned_of(backend, recwarn):
    model, x = loops(), normal(16, 32)
    xmem.apply_checkpointing(model, 2)
    gradients((model(x) ** 2).sum(), trained(model))
    assert not [w for w in recwarn if issubclass(w.category, xmem.XmemWarning)]


def test_an_output_that_somebody_keeps_inside_a_segment_is_a_tensor_with_its_gradient(backend):
    model, x, kept = chain(4, 32), normal(16, 32), []
    xmem.apply_checkpointing(model, 1)
    y = x
    for block in model:
        y = block(y)
        kept.append(y)
    loss = (y**2).sum() + (kept[1] ** 2).sum() + kept[2].sum()
    found = gradients(loss, [*trained(model), kept[1]])
    plain = x
    outputs = []
    for block in model:
        plain = block[1](block[0](plain))
        outputs.append(plain)
    loss = (plain**2).sum() + (outputs[1] ** 2).sum() + outputs[2].sum()
    assert error(found, gradients(loss, [*trained(model), outputs[1]])) <= 1e-6


def test_a_list_of_segments_and_lists_inside(backend):
    model, x = loops(), normal(16, 32)
    expected = gradients((model(x) ** 2).sum(), trained(model))
    receipt = xmem.apply_checkpointing(
        model, [["blocks.0", "blocks.1"], model.blocks[3], [model.blocks[4], "blocks.5", "head"]]
    )
    assert receipt.applied_to == 6
    assert error(gradients((model(x) ** 2).sum(), trained(model)), expected) <= 1e-6


def test_blocks_that_hand_on_several_tensors_are_one_segment(backend):
    import jittor as jt
    from jittor import nn

    class Pair(nn.Module):
        def __init__(self):
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

        def execute(self, state, mask, scale=1.0):
            x, y, count = state["x"], state["y"], state["count"]
            return {"x": self.a(x) * mask + y, "y": self.b(y) * scale, "count": count + 1}

    class Model(nn.Module):
        def __init__(self):
            self.blocks = nn.ModuleList([Pair() for _ in range(4)])

        def execute(self, x, mask):
            state = {"x": x, "y": x * 2, "count": jt.zeros((1,), dtype="int32")}
            for index, block in enumerate(self.blocks):
                state = block(state, mask, scale=float(index))
            return state["x"] + state["y"] + state["count"]

    model, x, mask = Model(), learnt(4, 8), normal(4, 8)
    targets = [*trained(model), x]
    expected = gradients((model(x, mask) ** 2).sum(), targets)
    xmem.apply_checkpointing(model, 1)
    assert error(gradients((model(x, mask) ** 2).sum(), targets), expected) <= 1e-6


def test_key_layers_are_chosen_by_type_by_name_and_by_what_they_keep(backend):
    from jittor import nn

    def chosen(**criteria):
        model = loops()
        measured = {"min_saved_bytes", "max_recompute_seconds"} & criteria.keys()
        inputs = (x,) if measured else None
        receipt = xmem.apply_checkpointing(model, xmem.KeyLayers(**criteria), inputs=inputs)
        found = gradients((model(x) ** 2).sum(), trained(model))
        receipt.undo()
        assert error(found, gradients((model(x) ** 2).sum(), trained(model))) <= 1e-6
        return receipt

    x = normal(1024, 32)
    assert chosen(types=(nn.GELU,)).applied_to == 6
    assert chosen(names=("blocks.[0-2].0",)).names == ("blocks.0.0", "blocks.1.0", "blocks.2.0")
    assert chosen(types=("Linear",), max_recompute_seconds=60).applied_to == 7
    assert chosen(names=("head",), max_recompute_seconds=60).expected_saving_bytes == 0


def test_blocks_that_share_a_parameter_and_return_what_the_model_keeps(backend):
    from jittor import nn

    class Tied(nn.Module):
        def __init__(self, layer, kept):
            self.layer, self.kept = layer, kept

        def execute(self, x, *_):
            return nn.gelu(self.layer(x)), self.layer.weight, self.kept

    layer, kept, x = nn.Linear(8, 8), normal(3).int32(), normal(4, 8)
    model = nn.Sequential(*[Tied(layer, kept) for _ in range(3)])

    def loss():
        y = (x,)
        for block in model:
            y = block(*y)
        return (y[0] ** 2).sum() + (y[1] ** 2).sum() + y[2].sum()

    expected = gradients(loss(), trained(layer))
    xmem.apply_checkpointing(model, 1)
    assert error(gradients(loss(), trained(layer)), expected) <= 1e-6
    assert not hasattr(kept, "_xmem_place")
    assert not hasattr(layer.weight, "_xmem_place")


def test_a_hook_may_wait_for_the_outputs_inside_a_segment(backend):
    """What the next block has read is dropped after that block ran: Jittor crashed there."""
    import jittor as jt

    found = []
    for layout in (None, 1):
        jt.set_global_seed(0)
        layers = [jt.nn.Sequential(jt.nn.Linear(4, 4), jt.nn.Tanh()) for _ in range(4)]
        model = jt.nn.Sequential(*layers)
        if layout is not None:
            xmem.apply_checkpointing(model, layout)
        for layer in layers:
            layer.register_forward_hook(lambda module, inputs, output: output.sync())
        loss = model(jt.ones((2, 4))).sum()
        found.append([g.numpy() for g in jt.grad(loss, model.parameters())])
    for a, b in zip(*found, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
