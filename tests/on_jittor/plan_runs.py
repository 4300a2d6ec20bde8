"""Models of stages that schedules are played on, and schedules of every kind."""

import gc

import numpy as np
from chain import gradients

from xmem.planner import Chain, Op, Option, Stage, simulate
from xmem.planner.simulation import World
from xmem.playing import script
from xmem.records import HEAD, TAIL, Recompute

PLANS = {
    "every": "N0 N1 N2 N3 L Da4 G3.0 B3 Da3 G2.0 B2 Da2 G1.0 B1 Da1 G0.0 B0",
    # Keeps stage 1 and drops it again, keeps stage 2 without its input, runs stage 0 three times.
    "mixed": "N0 G1.0 Da1 G2.0 Ds1 G3.0 L B3 N0 N1 B2 Da2 G1.0 B1 Da1 G0.0 B0",
}


def every(n):
    """Return the schedule that keeps nothing in the sweep: each stage again before its backward."""
    ops = [Op("N", i) for i in range(n)] + [Op("L")]
    for i in reversed(range(n)):
        ops += [Op("G", i), Op("B", i)] + ([Op("Da", i)] if i else [])
    return tuple(ops)


def keeping_all(n):
    ops = [Op("G", i) for i in range(n)]
    return (*ops, Op("L"), *(Op("B", i) for i in reversed(range(n))))


def unit_chain(n):
    stage = Stage("", 1, 1, (Option("keep all", 1, 1, 2, 1, 1),))
    return Chain("unit", (stage,) * n, (1,) * (n + 1))


def drawn(rand, n):
    """Return a valid schedule of whatever kind: what is not there is made again when needed."""
    ops, values, kept = [], {0}, set()

    def run(i, codes="NG"):
        code = rand.choice([c for c in codes if c != "N" or i + 1 not in values])
        ops.append(Op(code, i))
        values.add(i + 1) if code == "N" else kept.add(i)

    def drop(top, spare=()):
        for j in sorted(values - {0} - set(spare)):
            if j <= top and rand.random() < 0.35:
                values.remove(j)
                ops.append(Op("Da", j))
        for i in sorted(kept - set(spare)):
            if i < top and i + 1 not in spare and rand.random() < 0.1:
                kept.remove(i)
                ops.append(Op("Ds", i))

    def there(j):
        return j in values or j - 1 in kept

    def make(j):
        if not there(j):
            make(j - 1)
            run(j - 1, "NG" if j - 1 not in kept else "N")

    for i in range(n):
        run(i)
        if i + 1 < n:
            drop(i, spare=[i + 1])
    ops.append(Op("L"))
    for i in reversed(range(n)):
        if n in values and rand.random() < 0.8:
            values.remove(n)
            ops.append(Op("Da", n))
        if i not in kept:
            make(i)
            run(i, "G")
        if rand.random() < 0.5:
            drop(i, spare=[i])
        make(i)
        ops.append(Op("B", i))
        kept.discard(i)
    simulate(unit_chain(n), ops)
    return tuple(ops)


def counts(ops, n):
    return [sum(op.code in "NG" and op.index == i for op in ops) for i in range(n)]


def planned(plans, stages, *, head=None, tail=None, skips=None):
    """Return a model that runs its stages one by one, by a schedule where `ops` is one.

    Args:
        skips: by stage, the number of the value that it reads besides its own.
    """
    from jittor import nn

    class Planned(nn.Module):
        def __init__(self):
            self.stages = nn.Sequential(*stages)
            self.head, self.tail = head, tail
            self.ops, self.traced, self.how = None, False, Recompute()
            self.run, self.seen = None, None

        def execute(self, x):
            x = self.head(x) if self.head else x
            x = self.through(x)
            return self.tail(x) if self.tail else x

        def through(self, x):
            if self.ops is not None:
                names = [f"stage{i}" for i in range(len(stages))]
                cut = script(self.ops, len(stages))
                self.run = plans.open(cut, names, self.how, traced=self.traced)
            values = [x]
            for i, stage in enumerate(stages):
                args = (values[-1],)
                if skips and i in skips:
                    args += (values[skips[i]],)
                y = stage(*args) if self.ops is None else self.run.first(i, stage, args, {})
                values.append(y)
                if self.seen is not None:
                    self.seen.append(float(y.sum().item()))
            return values[-1]

    return Planned()


def linear(depth=5, width=24):
    """Return stages, all alike."""
    from jittor import nn

    return [nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(depth)]


def mixed(n, *, batch=32):
    """Return n <= 8 stages of every kind, and a batch for them."""
    from chain import normal
    from jittor import nn

    class Flattened(nn.Module):
        def execute(self, x):
            return x.reshape((x.shape[0], -1))

    stages = [
        nn.Sequential(nn.Conv(3, 16, 3, padding=1, bias=False), nn.BatchNorm(16), nn.ReLU()),
        nn.Sequential(nn.Conv(16, 8, 3, stride=2, padding=1), nn.GELU()),
        nn.Sequential(Flattened(), nn.Linear(8 * 64, 256), nn.GELU()),
        nn.LayerNorm(256),
        nn.Sequential(nn.Dropout(0.3, is_train=True), nn.Linear(256, 384), nn.GELU()),
        nn.Sequential(nn.Linear(384, 64, bias=False), nn.BatchNorm1d(64)),
        nn.Sequential(nn.Linear(64, 256), nn.GELU()),
        nn.Linear(256, 64),
    ]
    if n > 6:
        return stages[:n], normal(batch, 3, 16, 16)
    return stages[2 : 2 + n], normal(batch, 8, 8, 8)


def loss_of(model, batch):
    """Return a loss that is not the same for all that BatchNorm gives."""
    return (model(batch) ** 4).mean()


def distances(found, expected):
    """Return for each gradient its distance from its twin, relative to the twin's norm."""
    assert found.keys() == expected.keys()
    return {
        name: float(np.linalg.norm(found[name] - g) / (np.linalg.norm(g) + 1e-30))
        for name, g in expected.items()
    }


def profiled(run, ops):
    """Return the chain that marks of the schedule `every` show; what follows is its last stage."""
    n = len(run.forwards)
    a = run.value_bytes
    by_number = {mark.op: mark for mark in run.marks()}
    marks = {(op.code, op.index): by_number.get(k) for k, op in enumerate(ops)}
    stages = []
    for i in range(n):
        plain, kept, back = marks["N", i], marks["G", i], marks["B", i]
        abar = kept.after_bytes - kept.before_bytes
        option = Option(
            "keep all",
            kept.seconds,
            back.seconds,
            abar,
            kept.peak_bytes - kept.after_bytes,
            back.peak_bytes - back.before_bytes,
        )
        temporary = plain.peak_bytes - plain.before_bytes - a[i + 1]
        stages.append(Stage(str(i), plain.seconds, temporary, (option,)))
    tail = by_number[TAIL]
    extra = tail.peak_bytes - tail.before_bytes
    last = Option("keep all", tail.seconds, 0.0, 0, extra, extra)
    stages.append(Stage("tail", tail.seconds, 0, (last,)))
    return Chain("profiled", tuple(stages), (a[0] + stays(run), *a[1:], 0))


def stays(run):
    """Return the bytes that the tail leaves beside gradients: the loss."""
    [k] = [k for k, mark in enumerate(run.marks()) if mark.op == TAIL]
    tail, after = run.marks()[k : k + 2]
    made = run.value_bytes[-1] + after.gradient_bytes
    return tail.after_bytes - tail.before_bytes - made


def measured_peak(run):
    """Return what the chain took at most in a traced run, the batch included."""
    marks = run.marks()
    base = next(mark for mark in marks if mark.op == HEAD).before_bytes
    inside = [mark for mark in marks if mark.op >= 0 or mark.op == TAIL]
    return max(m.peak_bytes - m.gradient_bytes for m in inside) - base + run.value_bytes[0]


def with_tail(ops, n):
    """Return a schedule with what follows the chain as its last stage."""
    for op in ops:
        yield from (Op("G", n), op, Op("B", n)) if op.code == "L" else (op,)


def peaks_by_operation(chain, ops):
    """Return the most that the model holds in each operation on the chain, by number."""
    n = len(chain.stages) - 1
    world, found, number = World(chain), {}, -1
    for op in with_tail(ops, n):
        world.peak_bytes = 0
        world.run(op, number)
        number += op.index < n or op.code in ("L", "Da")
        if op.code in "NGB" and op.index < n:
            found[number] = world.peak_bytes
    return found


def _above_base(run, name, loss_bytes):
    marks = run.marks()
    [tail] = [k for k, m in enumerate(marks) if m.op == TAIL]
    static = run.value_bytes[0] - marks[0].before_bytes
    # The model holds the loss from the beginning on.
    return {
        m.op: getattr(m, name) - m.gradient_bytes + static + loss_bytes * (k < tail)
        for k, m in enumerate(marks)
        if m.op >= 0
    }


def peaks_in_marks(run, loss_bytes):
    """Return the most that was allocated in each operation, counted as the model counts."""
    return _above_base(run, "peak_bytes", loss_bytes)


def begun_in_marks(run, loss_bytes):
    """Return what was allocated when each operation began, counted as the model counts."""
    return _above_base(run, "before_bytes", loss_bytes)


def both(model, ops, x, targets, loss=loss_of):
    """Return gradients of a plain run and of a planned one; both draw the same numbers."""
    import jittor as jt

    found = []
    for schedule in (None, ops):
        jt.set_global_seed(5)
        model.ops = schedule
        found.append(gradients(loss(model, x), targets))
    return found


def live(backend):
    import jittor as jt

    gc.collect()
    jt.sync_all(True)
    counted = jt.liveness_info()
    return backend.measure.counters().allocated_bytes, counted["hold_vars"], counted["lived_ops"]


def opened(backend, stages, ops):
    model = planned(backend.plans, stages)
    model.ops = ops
    names = [f"stage{i}" for i in range(len(stages))]
    return backend.plans.open(script(ops, len(stages)), names, Recompute(), traced=False)
