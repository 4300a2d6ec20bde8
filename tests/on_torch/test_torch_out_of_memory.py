"""Out of memory on PyTorch: each phase, exact owners, nothing left, and what guards must not do."""

import copy
import gc
import pickle
import random
import weakref

import pytest
import torch
from torch import nn
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

import xmem
from xmem.out_of_memory import oom_guard

WIDTH, BATCH, DEPTH = 64, 512, 3
ACTIVATION = BATCH * WIDTH * 4
WEIGHT = WIDTH * WIDTH * 4


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(width, width, bias=False)
        self.gelu = nn.GELU()

    def forward(self, x):
        return x + self.gelu(self.linear(x))


class Net(nn.Module):
    def __init__(self, width=WIDTH, depth=DEPTH):
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, width, bias=False)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Run:
    """A model in training whose steps are functions, so that what fails leaves no locals."""

    def __init__(self, backend, *, width=WIDTH, batch=BATCH, **options):
        gc.collect()  # what other tests have left
        torch.manual_seed(0)
        self.backend = backend
        self.model = Net(width)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), **options)
        self.x = torch.randn(batch, width)

    def step(self):
        loss = self.model(self.x).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()

    def guarded(self, **given):
        with oom_guard(model=self.model, optimizer=self.optimizer, **given):
            return self.step()

    def allocated(self):
        """What lives; nothing is collected, for a guard has to have done that."""
        return self.backend.pool.stats().allocated_bytes

    def peak(self):
        self.backend.measure.reset_peak()
        self.step()
        return self.backend.measure.counters().peak_allocated_bytes

    def failed(self, limit, **given):
        self.backend.pool.set_limit(limit)
        try:
            with pytest.raises(xmem.OutOfMemoryError) as caught:
                self.guarded(**given)
        finally:
            self.backend.pool.set_limit(None)
        return caught.value


def sizes(found, category):
    return {o.name: o.size_bytes for o in found.owners if o.category == category}


def test_forward_names_the_module_that_asked_and_those_that_hold(backend):
    run = Run(backend)
    run.step()
    static = run.allocated()
    # a block keeps its linear's output and the sum; the second block gets as far as its linear
    found = run.failed(static + 3 * ACTIVATION + 10).diagnosis
    assert (found.phase, found.module) == ("forward", "blocks.1.gelu")
    assert (found.requested_bytes, found.allocated_bytes) == (ACTIVATION, static + 3 * ACTIVATION)
    made = ("blocks.0.linear", "blocks.0", "blocks.1.linear")
    assert sizes(found, "activation") == dict.fromkeys(made, ACTIVATION)


def test_backward_still_names_what_forward_made(backend):
    run = Run(backend)
    run.step()
    static = run.allocated()
    found = run.failed(run.peak() - 1).diagnosis
    assert (found.phase, found.module, found.may_be_updated) == ("backward", "", False)
    held = sizes(found, "activation")
    for n in range(DEPTH):
        assert held[f"blocks.{n}.linear"] == held[f"blocks.{n}"] == ACTIVATION
    assert set(sizes(found, "temporary")) <= {"backward", "gone since"}
    assert found.by_category["optimizer"] == 2 * 4 * WEIGHT + 4 * 4  # moments, and four counts
    assert static < found.allocated_bytes


def test_gradients_and_states_are_named_by_their_parameters(backend):
    run = Run(backend, batch=8, width=256, foreach=False)
    weight = 256 * 256 * 4
    run.step()
    static = run.allocated()
    found = run.failed(static + 4 * weight + 100_000).diagnosis
    assert (found.phase, found.may_be_updated) == ("optimizer", True)
    names = [*(f"blocks.{n}.linear.weight" for n in range(DEPTH)), "head.weight"]
    assert sizes(found, "parameter") == dict.fromkeys(names, weight)
    assert sizes(found, "gradient") == {f"gradient of {name}": weight for name in names}
    assert sizes(found, "optimizer") == {
        f"optimizer state of {name}": 2 * weight + 4 for name in names
    }
    assert "go on from a checkpoint" in str(found)


def test_it_is_caught_as_the_frameworks_error_too(backend):
    run = Run(backend)
    run.step()
    backend.pool.set_limit(run.allocated() + ACTIVATION)
    with pytest.raises(torch.OutOfMemoryError, match="out of memory") as caught:
        run.guarded()
    assert isinstance(caught.value, xmem.OutOfMemoryError)


def test_nothing_stays_at_ten_random_limits_and_losses_go_on(backend):
    plain = Run(backend)
    expected = [plain.step() for _ in range(13)]
    run = Run(backend)
    found = [run.guarded(), run.guarded()]
    static, peak = run.allocated(), run.peak()
    found.append(expected[2])  # the step that measured the peak
    draw = random.Random(3)
    held = []
    for _ in range(10):
        held.append(run.failed(draw.randrange(static + 1, peak)))
        assert run.allocated() == static, held[-1]
        found.append(run.guarded())
    assert found == expected


def test_a_step_that_failed_in_the_optimizer_can_be_repeated_from_a_checkpoint(backend):
    run = Run(backend, batch=8, width=256, foreach=False)
    run.step()
    saved = copy.deepcopy((run.model.state_dict(), run.optimizer.state_dict()))
    expected = run.step()
    run.model.load_state_dict(saved[0])
    run.optimizer.load_state_dict(copy.deepcopy(saved[1]))
    error = run.failed(run.allocated() + 4 * 256 * 256 * 4 + 100_000)
    assert error.diagnosis.may_be_updated
    run.model.load_state_dict(saved[0])
    run.optimizer.load_state_dict(copy.deepcopy(saved[1]))
    assert run.guarded() == expected


def test_states_that_are_made_by_the_first_step_are_kept_if_it_got_that_far(backend):
    run = Run(backend, batch=8, width=256, foreach=False)
    weight = 256 * 256 * 4
    before = run.allocated()
    error = run.failed(before + 4 * weight + 3 * weight)
    assert error.diagnosis.phase == "optimizer"
    made = sum(
        t.untyped_storage().nbytes() for s in run.optimizer.state.values() for t in s.values()
    )
    assert run.allocated() == before + made
    assert all(p.grad is None for p in run.model.parameters())


def test_what_the_user_still_holds_is_his_own(backend):
    run = Run(backend)
    run.step()
    before = run.allocated()
    backend.pool.set_limit(before + 5 * ACTIVATION)
    kept = []

    def step():
        kept.append(run.model.blocks[0](run.x))
        run.step()

    with pytest.raises(xmem.OutOfMemoryError), oom_guard(model=run.model):
        step()
    backend.pool.set_limit(None)
    assert run.allocated() > before
    kept.clear()
    assert run.allocated() == before


def test_forwards_doors_and_hooks_are_gone_after_the_block(backend):
    run = Run(backend)
    doors = torch.autograd.backward, torch.autograd.grad
    run.guarded()
    run.failed(run.allocated() + ACTIVATION)
    with pytest.raises(ValueError, match="mine"), oom_guard(model=run.model):
        raise ValueError("mine")
    assert (torch.autograd.backward, torch.autograd.grad) == doors
    assert not _global_optimizer_pre_hooks
    assert not _global_optimizer_post_hooks
    assert not any("forward" in vars(module) for module in run.model.modules())


def test_blocks_of_threads_that_end_crosswise_leave_no_doors_and_no_model(backend):
    run = Run(backend)
    doors = torch.autograd.backward, torch.autograd.grad
    first, second = (oom_guard(model=run.model, optimizer=run.optimizer) for _ in range(2))
    first.__enter__()
    second.__enter__()
    run.step()
    first.__exit__(None, None, None)
    run.step()
    second.__exit__(None, None, None)
    assert (torch.autograd.backward, torch.autograd.grad) == doors
    model = weakref.ref(run.model)
    del run, first, second
    gc.collect()
    assert model() is None


def test_of_two_models_and_optimizers_all_is_named_and_dropped(backend):
    runs = [Run(backend), Run(backend)]

    def steps():
        for run in runs:
            run.step()
        for run in runs:
            run.model(run.x).square().mean().backward()
        run.model(torch.zeros(10_000_000, WIDTH))

    models, optimizers = [run.model for run in runs], [run.optimizer for run in runs]
    backend.pool.set_limit(100_000_000)
    guard = oom_guard(model=models, optimizer=optimizers)
    with pytest.raises(xmem.OutOfMemoryError), guard:
        steps()
    backend.pool.set_limit(None)
    found = {o.name for o in guard.diagnosis.owners}
    for number in (0, 1):
        assert f"gradient of {number}.head.weight" in found
        assert f"optimizer state of {number}.head.weight" in found
    assert guard.diagnosis.by_category["optimizer"] == 2 * (2 * 4 * WEIGHT + 4 * 4)
    assert all(p.grad is None for model in models for p in model.parameters())


def test_the_guard_holds_no_model_when_it_is_over(backend):
    run = Run(backend)
    with oom_guard(model=run.model, optimizer=run.optimizer):
        run.step()
    found = run.failed(run.allocated() + ACTIVATION).diagnosis
    model = weakref.ref(run.model)
    del run
    gc.collect()
    assert model() is None
    assert found.owners


def test_a_model_is_copied_and_pickled_inside_a_block(backend):
    run = Run(backend)
    with oom_guard(model=run.model):
        twins = [copy.deepcopy(run.model), pickle.loads(pickle.dumps(run.model))]
    for twin in twins:
        assert torch.equal(twin(run.x), run.model(run.x))
        assert twin.blocks[0].forward.__self__ is twin.blocks[0]


@pytest.mark.parametrize("outer", ["guard", "meter"])
def test_a_guard_and_a_meter_stand_in_each_other(backend, outer):
    run = Run(backend)
    run.step()
    peak = run.peak()
    guard = oom_guard(model=run.model, optimizer=run.optimizer)
    meter = xmem.measure(model=run.model, optimizer=run.optimizer, inputs=run.x)
    first, second = (guard, meter) if outer == "guard" else (meter, guard)
    with first, second:
        run.step()
    assert meter.peak_allocated_bytes == peak
    assert [phase.name for phase in meter.timeline] == ["backward", "backward_end", "optimizer_end"]
    assert sum(meter.by_category.values()) == peak


def test_a_checkpointed_model_is_not_told_to_checkpoint_and_recomputes_in_backward(backend):
    run = Run(backend)
    xmem.apply_checkpointing(run.model, "every")
    run.step()
    found = run.failed(run.peak() - 1).diagnosis
    assert "checkpoint" not in {a.technique for a in found.advice}
    assert found.phase == "backward"
    assert run.guarded() is not None


def test_checkpointing_is_expected_to_save_what_blocks_hold_inside(backend):
    run = Run(backend)
    run.step()
    found = run.failed(run.peak() - 1).diagnosis
    [advice] = [a for a in found.advice if a.technique == "checkpoint"]
    # each block holds two, and hands one on; the largest inside is there while it is recomputed
    assert advice.expected_bytes == (DEPTH - 1) * ACTIVATION


@pytest.mark.parametrize("loop", [1, 3])
def test_a_loop_inside_one_block_names_the_step_that_failed(backend, loop):
    run = Run(backend)
    run.step()
    static = run.allocated()

    def steps():
        for _ in range(loop):
            run.step()
        backend.pool.set_limit(static + 3 * ACTIVATION + 10)
        run.step()

    guard = oom_guard(model=run.model, optimizer=run.optimizer)
    with pytest.raises(xmem.OutOfMemoryError), guard:
        steps()
    found = guard.diagnosis
    assert (found.phase, found.module) == ("forward", "blocks.1.gelu")
    made = ("blocks.0.linear", "blocks.0", "blocks.1.linear")
    assert sizes(found, "activation") == dict.fromkeys(made, ACTIVATION)


def test_threads_of_backward_and_functions_of_autograd_are_backward(backend):
    """`torch.autograd.grad` taken by name before the block is a door that is not seen."""
    from torch.autograd import grad

    run = Run(backend)
    run.step()
    loss = run.model(run.x).square().mean()
    backend.pool.set_limit(run.allocated() + 100)
    with pytest.raises(xmem.OutOfMemoryError) as caught, oom_guard(model=run.model):
        grad(loss, list(run.model.parameters()))
    assert caught.value.diagnosis.phase == "backward"


def test_a_compiled_model_is_not_compiled_anew_by_each_block(backend):
    from torch._dynamo.utils import counters

    run = Run(backend)
    compiled = torch.compile(run.model, backend="eager", fullgraph=True)

    def graphs():
        return counters["stats"]["unique_graphs"]

    before = graphs()
    for _ in range(6):
        with oom_guard(model=run.model, optimizer=run.optimizer):
            compiled(run.x).sum().backward()
    assert graphs() - before <= 2
    seen = graphs()
    for _ in range(3):
        with oom_guard(model=compiled, optimizer=run.optimizer):
            compiled(run.x).sum().backward()
    assert graphs() == seen
    torch._dynamo.reset()
