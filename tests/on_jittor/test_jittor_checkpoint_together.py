"""Regions together with everything else in a training loop on Jittor."""

import functools

import numpy as np
import pytest
from chain import chain, error, gradients, learnt, normal, through, trained

import xmem


def test_the_autocast_of_forward_is_entered_again_in_backward(backend):
    import jittor as jt
    from jittor import nn

    seen = []

    class Spy(nn.Linear):
        def execute(self, x):
            y = super().execute(x)
            seen.append(str(y.dtype))
            return y

    layer, x = Spy(16, 16), normal(4, 16)
    with xmem.autocast("float16"):
        y = xmem.checkpoint(layer, x).float32()
    jt.sync(jt.grad((y**2).sum(), trained(layer), retain_graph=False), True)
    assert seen == ["float16", "float16"]


def test_training_goes_the_same_way_with_an_optimizer(backend):
    import jittor as jt

    start = [p.numpy() for p in chain(4, 32).parameters()]
    x = normal(64, 32)
    found = []
    for checkpoint in (None, xmem.checkpoint):
        net = chain(4, 32)
        for p, value in zip(net.parameters(), start, strict=True):
            p.assign(jt.array(value))
        optimizer = jt.optim.Adam(trained(net), 1e-3)
        for _ in range(5):
            optimizer.step(((through(net, x, checkpoint) - x) ** 2).mean())
        found.append([p.numpy() for p in trained(net)])
    assert error(found[1], found[0]) <= 1e-6


@pytest.mark.parametrize("named", ["module", "closure"])
def test_running_statistics_are_updated_once(backend, named):
    from jittor import nn

    x = learnt(32, 8)
    found = []
    for wrap in (False, True):
        norm = nn.BatchNorm1d(8)
        function = norm if named == "module" else (lambda x, norm=norm: norm(x) * 2)
        y = xmem.checkpoint(function, x) if wrap else function(x)
        found.append([*gradients((y**3).sum(), trained(norm)), norm.running_mean.numpy()])
        found[-1].append(norm.running_var.numpy())
    assert np.abs(found[0][2]).max() > 0
    assert error(found[1], found[0]) <= 1e-6


@pytest.mark.parametrize("named", ["module", "closure"])
def test_a_parameter_that_is_updated_in_between_is_recomputed_as_it_was(backend, named):
    import jittor as jt
    from jittor import nn

    layer, x = nn.Linear(8, 8), learnt(4, 8)
    function = layer if named == "module" else (lambda x: layer(x))
    start = layer.weight.numpy()
    found = []
    for call in (function, functools.partial(xmem.checkpoint, function)):
        layer.weight.assign(jt.array(start))
        y = call(x)
        layer.weight.update(layer.weight * 0 + 1)
        found += gradients((y**2).sum(), [x])
    assert error([found[1]], [found[0]]) <= 1e-6


def twins(make):
    """Return a plain model and a checkpointed one of the same weights."""
    import jittor as jt

    plain, checkpointed = make(), make()
    for p, q in zip(plain.parameters(), checkpointed.parameters(), strict=True):
        q.assign(p.detach().clone() if p.is_stop_grad() else jt.array(p.numpy()))
        if p.is_stop_grad():
            q.stop_grad()
    return plain, checkpointed


def test_micro_batches_add_up_and_step_the_same_with_clipped_gradients(backend):
    import jittor as jt

    batches, ended = [normal(16, 32) for _ in range(4)], []
    for net, layout in zip(twins(lambda: chain(6, 32)), (None, 2), strict=True):
        if layout:
            xmem.apply_checkpointing(net, layout)
        optimizer = jt.optim.Adam(trained(net), 1e-2)
        for _ in range(2):
            for x in batches:
                optimizer.backward(((net(x) - x) ** 2).mean())
            optimizer.clip_grad_norm(0.05)
            optimizer.step()
        ended.append([p.numpy() for p in trained(net)])
    assert error(ended[1], ended[0]) <= 1e-6


def test_accumulated_steps_of_xmem_are_the_same(backend):
    import jittor as jt

    ended = []
    x = normal(16, 32)
    for net, layout in zip(twins(lambda: chain(4, 32)), (None, "sqrt"), strict=True):
        if layout:
            xmem.apply_checkpointing(net, layout)
        optimizer = jt.optim.SGD(trained(net), 0.1)
        for _ in range(3):
            backend.training.backward((net(x) ** 2).mean(), optimizer)
        backend.training.optimizer_step(optimizer)
        ended.append([p.numpy() for p in trained(net)])
    assert error(ended[1], ended[0]) <= 1e-6


def test_autocast_inside_segments_gives_the_gradients_of_a_plain_run(backend):
    x, found = normal(64, 32), []
    for net, layout in zip(twins(lambda: chain(4, 32)), (None, 2), strict=True):
        if layout:
            xmem.apply_checkpointing(net, layout)
        with xmem.autocast("float16"):
            y = net(x).float32()
        found.append(gradients((y**2).mean(), trained(net)))
    assert error(found[1], found[0]) <= 1e-6


def test_a_segment_does_not_go_on_in_another_precision(backend):
    net, x = chain(2, 16), normal(8, 16)
    xmem.apply_checkpointing(net, 1)
    from xmem_jittor.segments import ambient

    assert ambient() is not None
    with xmem.autocast("float16"):
        half = ambient()
        y = net[0](x)
    assert half != ambient()
    with pytest.warns(xmem.XmemWarning, match="cut short after block '0'"):
        gradients((net[1](y.float32()) ** 2).sum(), trained(net))


@pytest.mark.parametrize("frozen", [[0], [1], [3], [0, 1, 2], [0, 1, 2, 3]])
def test_frozen_layers_get_no_gradient_and_the_others_the_same(backend, frozen):
    x, found = normal(16, 32), []
    for net, layout in zip(twins(lambda: chain(4, 32)), (None, 2), strict=True):
        for index in frozen:
            for p in net[index].parameters():
                p.stop_grad()
        if layout:
            xmem.apply_checkpointing(net, layout)
        input_ = x.detach().start_grad()
        found.append(gradients((net(input_) ** 2).mean(), [*trained(net), input_]))
        assert all(p.is_stop_grad() for index in frozen for p in net[index].parameters())
        assert len(found[-1]) == 2 * (4 - len(frozen)) + 1
    assert error(found[1], found[0]) <= 1e-6


def model_with_modes():
    from jittor import nn

    return nn.Sequential(
        *[
            nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Dropout(0.5, is_train=True))
            for _ in range(4)
        ]
    )


def test_evaluating_between_steps_changes_nothing(backend):
    import jittor as jt

    x, ended = normal(32, 16), []
    for net, layout in zip(twins(lambda: chain(4, 16)), (None, 2), strict=True):
        if layout:
            xmem.apply_checkpointing(net, layout)
        optimizer = jt.optim.SGD(trained(net), 0.1)
        for _ in range(3):
            optimizer.step((net(x) ** 2).mean())
            net.eval()
            with jt.no_grad():
                score = net(x).numpy()
            net.train()
        ended.append([score, *(p.numpy() for p in net.parameters())])
    assert error(ended[1], ended[0]) <= 1e-6


def test_switching_to_eval_between_forward_and_backward_recomputes_what_forward_did(backend):
    import jittor as jt
    from jittor import nn

    class Mode(nn.Module):
        def execute(self, x):
            return x * (2 if self.is_training() else 5)

    net = nn.Sequential(Mode(), nn.Dropout(0.5, is_train=True), nn.BatchNorm1d(16, affine=False))
    x = learnt(32, 16)
    expected: list[np.ndarray] = []
    for later in (lambda: None, net.eval):
        net.train()
        jt.set_global_seed(1)
        loss = (xmem.checkpoint(net, x) ** 3).sum()
        statistics = net[2].running_mean.numpy()
        later()
        found = gradients(loss, [x])
        assert np.array_equal(net[2].running_mean.numpy(), statistics)
        if later is net.eval:
            assert error(found, expected) <= 1e-6
            assert not net[0].is_training()
        expected = found
    assert np.abs(expected[0]).max() > 0


def test_two_models_in_one_process_train_the_same(backend):
    """A generator and its critic: gradients pass through the critic into the generator."""
    import jittor as jt

    noise, real = normal(16, 32), normal(16, 32)
    pairs = list(zip(twins(lambda: chain(4, 32)), twins(lambda: chain(4, 32)), strict=True))
    ended = []
    for (generator, critic), layout in zip(pairs, (None, 2), strict=True):
        if layout:
            xmem.apply_checkpointing(generator, layout)
            xmem.apply_checkpointing(critic, layout)
        of_generator = jt.optim.Adam(trained(generator), 1e-3)
        of_critic = jt.optim.Adam(trained(critic), 1e-3)
        for _ in range(3):
            fake = generator(noise)
            of_critic.step(critic(fake.detach()).mean() - critic(real).mean())
            of_generator.step(-critic(fake).mean())
        ended.append([p.numpy() for p in (*trained(generator), *trained(critic))])
    assert error(ended[1], ended[0]) <= 1e-5


def test_a_buffer_that_a_block_reads_and_writes_is_recomputed_as_it_was(backend):
    import jittor as jt
    from jittor import nn

    class Running(nn.Module):
        def __init__(self):
            self.scale = jt.ones((4,)).stop_grad()

        def execute(self, x):
            y = x * self.scale
            self.scale.update(self.scale * 2)
            return y

    block, x = Running(), learnt(3, 4)
    y = xmem.checkpoint(block, xmem.checkpoint(block, x))
    assert np.allclose(gradients(y.sum(), [x])[0], 2)  # 1 by the first call, 2 by the second
    assert np.allclose(block.scale.numpy(), 4)
