"""The oracle of the tests of `xmem.find_batch_size`: plain bisection under the same limit."""

import dataclasses
import gc

import xmem
from xmem.workloads import make_batch, make_weights, workload

STEPS_BEFORE_STEADY = 2


def make_step(size, name, counts=None):
    """Return a training step of a quick workload at a batch size, with a model of its own."""
    backend = xmem.active()
    declared = workload(name)
    sized = dataclasses.replace(
        declared,
        input_shape=(size, *declared.input_shape[1:]),
        target_shape=(size, *declared.target_shape[1:]),
    )
    model = backend.models.build(sized.model, make_weights(sized))
    optimizer = backend.training.make_optimizer(
        sized.optimizer, model, learning_rate=sized.learning_rate
    )
    inputs, targets = (backend.models.tensor(array) for array in make_batch(sized))

    def step():
        if counts is not None:
            counts.append(size)
        loss = backend.models.loss(sized.loss, model(inputs), targets)
        xmem.backward(loss, optimizer)
        xmem.optimizer_step(optimizer)
        xmem.zero_grad(optimizer)
        return loss

    return step


class Oracle:
    """Runs sizes under a limit, as a person would do it by hand."""

    def __init__(self, backend, make, steps):
        self.backend = backend
        self.make = make
        self.steps = steps
        self.peaks = {}

    def run(self, size, limit_bytes, steps=None):
        """Return the peak of a size, or None if it was refused."""
        meter = self.backend.measure
        refused = meter.counters().out_of_memory_count
        meter.set_limit(limit_bytes)
        meter.reset_peak()
        peak = 0
        step = None
        try:
            step = self.make(size)
            meter.synchronize()
            for _ in range(steps or self.steps):
                held = step()
                meter.synchronize()
                del held
                peak = max(peak, meter.counters().peak_allocated_bytes)
        except Exception:
            if meter.counters().out_of_memory_count == refused:
                raise
            peak = None
        finally:
            meter.set_limit(None)
        del step
        gc.collect()
        if peak is None:
            self.backend.pool.recover()
        meter.synchronize()
        self.peaks[size] = peak
        return peak

    def bisect(self, minimum, limit_bytes):
        """Return the largest size that fits: doubles until one does not, then halves the gap."""
        low, high = minimum, 2 * minimum
        assert self.run(low, limit_bytes) is not None
        while self.run(high, limit_bytes) is not None:
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            if self.run(middle, limit_bytes) is None:
                high = middle
            else:
                low = middle
        return low


def peaks_of(*found):
    """Return the tries of several searches side by side, those that have a peak."""
    return [tries for tries in zip(*(f.tries for f in found), strict=True) if tries[0].peak_bytes]
