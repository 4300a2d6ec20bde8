"""Out of memory on Jittor: a lazy step fails inside its block, as a whole, and leaves nothing."""

import copy
import gc
import random
import warnings
import weakref

import numpy as np
import pytest

import xmem
from xmem.out_of_memory import oom_guard

WIDTH, BATCH, DEPTH = 64, 512, 3
ACTIVATION = BATCH * WIDTH * 4
WEIGHT = WIDTH * WIDTH * 4


def net(width=WIDTH, depth=DEPTH):
    import jittor as jt

    class Block(jt.Module):
        def __init__(self):
            self.linear = jt.nn.Linear(width, width, bias=False)
            self.gelu = jt.nn.GELU()

        def execute(self, x):
            return x + self.gelu(self.linear(x))

    class Net(jt.Module):
        def __init__(self):
            self.blocks = jt.nn.ModuleList([Block() for _ in range(depth)])
            self.head = jt.nn.Linear(width, width, bias=False)

        def execute(self, x):
            for block in self.blocks:
                x = block(x)
            return self.head(x)

    return Net()


class Run:
    """A model in training with Jittor's own loop: one lazy graph a step."""

    def __init__(self, backend, *, width=WIDTH, batch=BATCH, optimizer="Adam", **options):
        import jittor as jt

        gc.collect()
        jt.sync_all(True)
        jt.set_global_seed(0)
        self.backend = backend
        self.model = net(width)
        kind = xmem.optim.AdamW if optimizer == "few bits" else getattr(jt.optim, optimizer)
        self.optimizer = kind(self.model.parameters(), lr=1e-3, **options)
        self.x = jt.array(np.random.RandomState(0).randn(batch, width).astype("float32"))
        jt.sync_all(True)

    def step(self):
        loss = self.model(self.x).sqr().mean()
        self.optimizer.step(loss)
        return loss

    def guarded(self, **given):
        with oom_guard(model=self.model, optimizer=self.optimizer, **given):
            loss = self.step()
        return loss.item()

    def allocated(self):
        """What lives; nothing is run or collected, for a guard has to have done that."""
        return self.backend.pool.stats().allocated_bytes

    def peak(self):
        self.backend.measure.reset_peak()
        self.guarded()
        return self.backend.measure.counters().peak_allocated_bytes

    def failed(self, limit, **given):
        self.backend.pool.set_limit(limit)
        try:
            with pytest.raises(xmem.OutOfMemoryError) as caught:
                self.guarded(**given)
        finally:
            self.backend.pool.set_limit(None)
        return caught.value

    def pending(self):
        from xmem_jittor import recovery

        return recovery.pending_tensors()


def sizes(found, category):
    return {o.name: o.size_bytes for o in found.owners if o.category == category}


def test_forward_names_the_module_that_asked_and_those_that_hold(backend):
    run = Run(backend)
    run.guarded()
    static = run.allocated()
    found = run.failed(static + 3 * ACTIVATION + 10_000).diagnosis
    assert found.phase == "forward"
    assert found.module.startswith("blocks.1")
    held = sizes(found, "activation")
    assert held["blocks.0.linear"] >= ACTIVATION
    large = {name for name, size in held.items() if size >= ACTIVATION}
    assert large <= {f"blocks.{n}{inside}" for n in range(2) for inside in ("", ".linear", ".gelu")}
    assert sum(found.by_category.values()) == found.allocated_bytes


def test_backward_still_names_what_forward_made(backend):
    run = Run(backend)
    run.guarded()
    found = run.failed(run.peak() - 1).diagnosis
    assert (found.phase, found.module, found.may_be_updated) == ("backward", "", False)
    held = sizes(found, "activation")
    assert all(held[f"blocks.{n}.linear"] >= ACTIVATION for n in range(DEPTH))


def test_parameters_gradients_and_states_have_their_names_and_sizes(backend):
    run = Run(backend, batch=8, width=256)
    weight = 256 * 256 * 4
    run.guarded()
    # the loop has left its gradients, which the next backward takes the place of
    found = run.failed(run.peak() - 1).diagnosis
    names = [*(f"blocks.{n}.linear.weight" for n in range(DEPTH)), "head.weight"]
    assert sizes(found, "parameter") == dict.fromkeys(names, weight)
    states = sizes(found, "optimizer")
    states.pop("optimizer", None)  # the new ones, of the update that was under way
    assert states == {f"optimizer state of {name}": 2 * weight for name in names}
    for name in sizes(found, "gradient"):
        assert name.removeprefix("gradient of ") in names


def test_it_is_caught_as_the_frameworks_error_too(backend):
    run = Run(backend)
    run.guarded()
    backend.pool.set_limit(run.allocated() + ACTIVATION)
    with pytest.raises(RuntimeError, match="out of memory") as caught:
        run.guarded()
    assert isinstance(caught.value, xmem.OutOfMemoryError)


def test_what_the_block_asked_for_fails_inside_it(backend):
    run = Run(backend)
    run.guarded()
    backend.pool.set_limit(run.allocated() + ACTIVATION)
    guard = oom_guard(model=run.model, optimizer=run.optimizer)
    with pytest.raises(xmem.OutOfMemoryError), guard:
        run.step()  # runs nothing
    assert guard.diagnosis.phase == "forward"


@pytest.mark.parametrize("optimizer", ["Adam", "SGD"])
def test_nothing_stays_at_ten_random_limits_and_losses_go_on(backend, optimizer):
    plain = Run(backend, optimizer=optimizer)
    expected = [plain.guarded() for _ in range(14)]
    del plain
    run = Run(backend, optimizer=optimizer)
    found = [run.guarded(), run.guarded()]
    peak = run.peak()
    found += [expected[2], run.guarded()]
    static = run.allocated()
    gradients = sum(g.nbytes for group in run.optimizer.param_groups for g in group["grads"])
    draw = random.Random(3)
    held, counts = [], (run.optimizer.n_step, backend.pool.live_counts())
    for _ in range(10):
        held.append(run.failed(draw.randrange(static + 1, peak)))
        # the gradients that Jittor keeps after a step are dropped
        assert run.allocated() == static - gradients, held[-1]
        assert run.pending() == 0
        assert run.optimizer.n_step == counts[0]
        assert not held[-1].diagnosis.may_be_updated
        found.append(run.guarded())
        counts = (run.optimizer.n_step, backend.pool.live_counts())
    assert found == expected


def test_without_whole_steps_an_update_may_have_run_and_that_is_told(backend):
    run = Run(backend)
    run.guarded()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", xmem.XmemWarning)
        backend.measure.reset_peak()
        run.guarded(whole=False)
        loose = backend.measure.counters().peak_allocated_bytes
        error = run.failed(loose - 1, whole=False)
    assert error.diagnosis.may_be_updated
    assert run.pending() == 0


def test_optimizers_in_few_bits_never_wait_for_all_gradients(backend):
    run = Run(backend, optimizer="few bits", batch=64, width=256)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", xmem.XmemWarning)
        run.guarded()
        peak = run.peak()
        backend.measure.reset_peak()
        run.guarded(whole=False)
        loose = backend.measure.counters().peak_allocated_bytes
        assert abs(loose - peak) < 256 * 256 * 4, "no gradient more than without"
        assert run.failed(peak - 1).diagnosis.may_be_updated
    found = run.failed(run.allocated() + 100_000).diagnosis
    assert "quantize_optimizer" not in {a.technique for a in found.advice}


def test_what_modules_execute_is_put_back(backend):
    import jittor as jt

    run = Run(backend)
    before = jt.grad, jt.optim.Optimizer.pre_step, jt.optim.Optimizer.post_step
    run.guarded()
    run.failed(run.allocated() + ACTIVATION)
    with pytest.raises(ValueError, match="mine"), oom_guard(model=run.model):
        raise ValueError("mine")
    assert (jt.grad, jt.optim.Optimizer.pre_step, jt.optim.Optimizer.post_step) == before
    assert not any("execute" in vars(module) for module in run.model.modules())


def test_a_guard_takes_several_models_and_optimizers(backend):
    runs = [Run(backend), Run(backend)]

    def steps():
        for run in runs:
            run.step()

    models, optimizers = [run.model for run in runs], [run.optimizer for run in runs]
    with oom_guard(model=models, optimizer=optimizers):
        steps()
    before = runs[0].allocated()
    backend.pool.set_limit(before + ACTIVATION)
    guard = oom_guard(model=models, optimizer=optimizers)
    with pytest.raises(xmem.OutOfMemoryError), guard:
        steps()
    backend.pool.set_limit(None)
    found = {o.name for o in guard.diagnosis.owners}
    for number in (0, 1):
        assert f"optimizer state of {number}.head.weight" in found
    assert runs[0].allocated() <= before, "gradients of before are dropped, too"
    steps()


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


def test_a_module_that_is_used_twice_is_followed_once(backend):
    run = Run(backend)
    run.model.again = run.model.blocks[0]
    before = run.model(run.x).numpy()
    with oom_guard(model=run.model):
        kinds = {type(vars(module)["execute"].forward).__name__ for module in run.model.modules()}
        found = run.model(run.x)
    assert kinds == {"OwnExecute"}
    assert np.array_equal(found.numpy(), before)
    assert "execute" not in vars(run.model.again)


def test_a_model_is_copied_inside_a_block(backend):
    run = Run(backend)
    with oom_guard(model=run.model):
        twin = copy.deepcopy(run.model)
    expected, found = run.model(run.x).numpy(), twin(run.x).numpy()
    assert np.array_equal(expected, found)
    assert twin.blocks[0].execute.__self__ is twin.blocks[0]


@pytest.mark.parametrize("outer", ["guard", "meter"])
def test_a_guard_and_a_meter_stand_in_each_other(backend, outer):
    run = Run(backend)
    run.guarded()
    peak = run.peak()
    guard = oom_guard(model=run.model, optimizer=run.optimizer)
    meter = xmem.measure(model=run.model, optimizer=run.optimizer, inputs=run.x)
    first, second = (guard, meter) if outer == "guard" else (meter, guard)
    with first, second:
        run.step()
    assert meter.peak_allocated_bytes == peak
    assert [phase.name for phase in meter.timeline] == ["backward"]
    assert sum(meter.by_category.values()) == peak


@pytest.mark.parametrize("technique", ["checkpoint", "compress", "autocast"])
def test_techniques_stand_inside_a_block_and_are_not_advised_again(backend, technique):
    run = Run(backend)
    names = {"checkpoint": "checkpoint", "compress": "compress_activations", "autocast": "autocast"}
    if technique == "checkpoint":
        xmem.apply_checkpointing(run.model, "every")

    def step():
        with oom_guard(model=run.model, optimizer=run.optimizer):
            if technique == "compress":
                with xmem.compress_activations(min_bytes=0):
                    loss = run.model(run.x).sqr().mean()
            elif technique == "autocast":
                with xmem.autocast():
                    loss = run.model(run.x).sqr().mean()
            else:
                loss = run.model(run.x).sqr().mean()
            run.optimizer.step(loss)

    step()
    step()
    before = run.allocated()
    backend.pool.set_limit(before + 2 * ACTIVATION)
    with pytest.raises(xmem.OutOfMemoryError) as caught:
        step()
    backend.pool.set_limit(None)
    assert names[technique] not in {a.technique for a in caught.value.diagnosis.advice}
    step()
    assert run.pending() == 0
