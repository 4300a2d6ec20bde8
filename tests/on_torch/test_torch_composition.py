"""Checkpointing on PyTorch together with all else that a training loop does."""

import copy
import os
import socket
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from on_torch.gpt import GPT, peak_bytes
from torch import nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import xmem


def blocks(count=4, width=16):
    torch.manual_seed(0)
    return nn.Sequential(
        *[
            nn.Sequential(
                nn.Linear(width, width), nn.BatchNorm1d(width), nn.GELU(), nn.Dropout(0.2)
            )
            for _ in range(count)
        ]
    )


def twins(layout="every", make=blocks):
    """Return two equal models, of which the second is checkpointed."""
    models = make(), make()
    xmem.apply_checkpointing(models[1], layout)
    return models


def state(model):
    """Return parameters, statistics and gradients."""
    return [*model.state_dict().values(), *(p.grad for p in model.parameters())]


def assert_equal(models):
    for a, b in zip(*map(state, models), strict=True):
        assert (a is None and b is None) or torch.equal(a, b)


def train(models, step, steps=4):
    """Run the same steps on each model, from the same seed."""
    for model in models:
        torch.manual_seed(7)
        optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], 1e-2)
        for _ in range(steps):
            optimizer.zero_grad()
            step(model, optimizer)
    assert_equal(models)


LAYOUTS = ["every", 2]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_training_goes_the_same_way(backend, layout):
    def step(model, optimizer):
        model(torch.randn(8, 16)).square().mean().backward()
        optimizer.step()

    train(twins(layout), step)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("keep_fp32", [(), ("linear",)])
def test_with_autocast(backend, layout, keep_fp32):
    def step(model, optimizer):
        with xmem.autocast("bfloat16", keep_fp32=keep_fp32):
            loss = model(torch.randn(8, 16)).float().square().mean()
        loss.backward()
        optimizer.step()

    train(twins(layout), step)


def test_pytorchs_own_autocast_keeps_no_half_weights_through_regions(backend):
    """Its cache of weight casts is switched off inside, and is as it was afterwards."""
    model, x = nn.Sequential(*[nn.Linear(256, 256) for _ in range(6)]), torch.randn(16, 256)
    xmem.apply_checkpointing(model, "every", blocks=list(model))
    peaks = []
    for autocast in (partial(torch.autocast, "cpu"), xmem.autocast):
        for _ in range(2):
            with xmem.measure(model=model, inputs=x) as m:
                with autocast(dtype="bfloat16" if autocast is xmem.autocast else torch.bfloat16):
                    before = torch.is_autocast_cache_enabled()
                    loss = model(x).float().square().mean()
                    assert torch.is_autocast_cache_enabled() == before
                loss.backward()
                del loss
        peaks.append(m.peak_above_static_bytes)
    assert peaks[0] == peaks[1], peaks


@pytest.mark.parametrize("layout", LAYOUTS)
def test_with_accumulation_and_gradient_clipping(backend, layout):
    def step(model, optimizer):
        for _ in range(3):
            (model(torch.randn(8, 16)).square().mean() / 3).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-2)
        optimizer.step()

    train(twins(layout), step)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_with_frozen_layers(backend, layout):
    models = twins(layout)
    for model in models:
        model[0].requires_grad_(False)
        model[2][0].weight.requires_grad_(False)

    def step(model, optimizer):
        model(torch.randn(8, 16)).square().mean().backward()
        optimizer.step()

    train(models, step)
    assert all(p.grad is None for p in models[1][0].parameters())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_with_evaluation_in_between(backend, layout):
    """Between steps, and between forward and backward."""

    def step(model, optimizer):
        loss = model(torch.randn(8, 16)).square().mean()
        model.eval()
        with torch.no_grad():
            model(torch.randn(8, 16))
        model.train()
        loss.backward()
        optimizer.step()
        model.eval()
        with torch.inference_mode():
            model(torch.randn(8, 16))
        model.train()

    train(twins(layout), step)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_with_two_models_that_train_each_other(backend, layout):
    """A generator and a critic, stepped in turn."""
    found = []
    for checkpointed in (False, True):
        generator, critic = blocks(), blocks(3)
        if checkpointed:
            xmem.apply_checkpointing(generator, layout)
            xmem.apply_checkpointing(critic, layout)
        first, second = (torch.optim.SGD(m.parameters(), 0.1) for m in (generator, critic))
        torch.manual_seed(3)
        for _ in range(3):
            made = generator(torch.randn(8, 16))
            critic(made.detach()).mean().backward()
            second.step()
            generator.zero_grad()
            (-critic(made).mean()).backward()
            first.step()
            first.zero_grad()
            second.zero_grad()
        found.append(nn.ModuleList([generator, critic]))
    assert_equal(found)


def test_the_statistics_of_a_residual_network_are_bit_equal_after_ten_steps(backend):
    from xmem.conformance.small import SmallRun
    from xmem.workloads import workload

    found = []
    for checkpointed in (False, True):
        run = SmallRun(backend, workload("resnet18", "quick"))
        if checkpointed:
            blocks_ = backend.models.blocks(run.model)
            assert xmem.apply_checkpointing(run.model, "every", blocks=blocks_).applied_to == 8
        for _ in range(10):
            run.step()
        run.loss().backward()
        found.append(run.model)
    assert any("running_var" in name for name in found[0].state_dict())
    assert_equal(found)


@pytest.mark.parametrize("layout", ["every", 2])
def test_under_data_parallel_in_two_processes(backend, layout, tmp_path):
    """Gradients are reduced once, as without checkpointing, also after no_sync."""
    found = []
    for name, chosen in (("plain", None), ("regions", layout)):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        path = tmp_path / f"{name}.pt"
        script = Path(__file__).with_name("data_parallel.py")
        ranks = [
            subprocess.Popen(
                [sys.executable, str(script), str(rank), port, repr(chosen), str(path)],
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(2)
        ]
        for rank in ranks:
            try:
                _, said = rank.communicate(timeout=120)
            finally:
                rank.kill()
            assert rank.returncode == 0, said
        found.append(torch.load(path))
    assert found[0].keys() == found[1].keys()
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


@pytest.fixture
def _fresh_compiler():
    import torch._dynamo

    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


COMPILER = "aot_eager_decomp_partition"  # the partitioner that recomputes, without C++


@pytest.mark.usefixtures("_fresh_compiler")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_compiled_model_recomputes_its_regions(backend, layout):
    """Compiled with and without regions: one graph, the same numbers, a lower peak."""
    peaks = []
    models = twins(layout, make=partial(blocks, 6, 64))
    x = torch.randn(512, 64)
    for model in models:
        compiled = torch.compile(model, backend=COMPILER, fullgraph=True)
        for _ in range(2):
            model.zero_grad()
            torch.manual_seed(1)
            compiled(x).square().mean().backward()
        with xmem.measure(model=model, inputs=x) as m:
            model.zero_grad()
            torch.manual_seed(1)
            compiled(x).square().mean().backward()
        peaks.append(m.peak_above_static_bytes)
    assert_equal(models)
    assert peaks[1] < 0.75 * peaks[0], peaks


@pytest.mark.parametrize("how", ["torch.compile", "module.compile", "deep inside"])
def test_what_is_compiled_cannot_be_inside_a_region(backend, how):
    model = blocks()
    if how == "torch.compile":
        model[1] = torch.compile(model[1], backend="eager")
    else:
        (model[1] if how == "module.compile" else model[1][0]).compile(backend="eager")
    before = [block.__dict__.get("forward") for block in model]
    with pytest.raises(xmem.CompositionError, match=r"it is compiled.*Compile the whole model"):
        xmem.apply_checkpointing(model, "every")
    assert [block.__dict__.get("forward") for block in model] == before
    with pytest.raises(xmem.CompositionError, match="it is compiled"):
        xmem.checkpoint(model[1], torch.randn(8, 16))


class Breaking(nn.Module):
    def forward(self, x):
        import torch._dynamo

        torch._dynamo.graph_break()
        return x


@pytest.mark.usefixtures("_fresh_compiler")
def test_a_graph_that_breaks_inside_a_region_is_refused(backend):
    model = blocks(2)
    model[1].append(Breaking())
    xmem.apply_checkpointing(model, "every")
    loss = torch.compile(model, backend=COMPILER)(torch.randn(8, 16)).mean()
    with pytest.raises(xmem.CompositionError, match="broke off inside the checkpointed '1'"):
        loss.backward()


def test_every_block_of_the_24_layer_gpt_takes_what_pytorch_takes_by_hand(backend):
    """229.5 MiB plain, at most 25 with every block; not a byte more than by hand."""
    model, ids = GPT(layers=24), torch.randint(0, 1000, (8, 128))
    by_hand = copy.deepcopy(model)
    for layer in by_hand.layers:
        layer.forward = partial(torch_checkpoint, layer.forward, use_reentrant=False)
    peaks = {"plain": peak_bytes(model, ids), "by hand": peak_bytes(by_hand, ids)}
    xmem.apply_checkpointing(model, "every")
    peaks["xmem"] = peak_bytes(model, ids)
    print(peaks)
    assert peaks["xmem"] == peaks["by hand"], peaks
    assert peaks["xmem"] <= 25 * 2**20, peaks
    assert peaks["plain"] >= 229 * 2**20, peaks
