"""A framework of numbers: modules that only have sizes, steps that the checker plays."""

from types import SimpleNamespace

from xmem.containers import leaves
from xmem.planner.chain import LOSS_STAGE, Chain, Option, Stage
from xmem.planner.schedule import Op
from xmem.planner.simulation import World
from xmem.playing import script
from xmem.records import HEAD, REST, TAIL, Mark, Step
from xmem.steps import every

BASE_BYTES = 1000


class Tensor:
    def __init__(self, size_bytes):
        self.nbytes = size_bytes


class Module:
    """A module whose forward returns a tensor of its size, or calls its children one by one."""

    def __init__(self, size_bytes=0, children=(), *, glue=False):
        self.size_bytes, self.parts, self.glue = size_bytes, list(children), glue
        self.forward = self.own_forward

    def own_forward(self, x):
        for part in self.parts:
            x = part(x)
            if self.glue:
                x = Tensor(x.nbytes)
        return x if self.parts else Tensor(self.size_bytes)

    def __call__(self, *args):
        return self.forward(*args)


class Checkpoint:
    def is_module(self, value):
        return isinstance(value, Module)

    def children(self, module):
        return [(str(i), part) for i, part in enumerate(module.parts)]

    def is_container(self, module):
        return False

    def obstacle(self, module):
        return None

    def replace_forward(self, module, wrap):
        before, module.forward = module.forward, wrap(module.forward)

        def undo():
            module.forward = before

        return undo


class Run:
    def __init__(self, plans, script):
        self.plans, self.script = plans, script
        n = len(script)
        self.value_bytes, self.reads = [], []
        runs = [op.index for op in script.ops if op.code in "NG"]
        self.forwards = [runs.count(i) + plans.more_forwards for i in range(n)]
        self.differentiated = [True] * n
        self.holds = plans.outputs_hold

    def first(self, stage, function, args, kwargs):
        self.plans.called.append(stage)
        if stage == 0:
            self.value_bytes.append(args[0].nbytes)
        output = function(*args, **kwargs)
        self.value_bytes.append(output.nbytes)
        return output

    def marks(self):
        if len(self.script) > len(self.plans.chain.stages) - 1:
            return []
        chain, n = self.plans.chain, len(self.script)
        world = World(chain)
        batch = chain.value_bytes[0]
        base = BASE_BYTES - batch
        more = 0 if self.plans.is_profile(self.script.ops) else self.plans.more_bytes
        marks = [Mark(HEAD, BASE_BYTES, BASE_BYTES, BASE_BYTES, 0, 0.0)]
        for number, op in enumerate(self.script.ops):
            before, seconds = world.held_bytes, world.total_seconds
            world.peak_bytes = before
            played = [Op("G", n), op, Op("B", n)] if op.code == "L" else [op]
            for one in played:
                world.run(one, number)
            if op.code in ("N", "G", "B", "L"):
                marks.append(
                    Mark(
                        TAIL if op.code == "L" else number,
                        base + before,
                        base + world.peak_bytes + more,
                        base + world.held_bytes,
                        0,
                        world.total_seconds - seconds,
                    )
                )
        marks.append(Mark(REST, BASE_BYTES, BASE_BYTES, BASE_BYTES, 0, 0.0))
        return marks


class Plans:
    """Steps take what the chain says, and `more_bytes` where it is not the profile's schedule."""

    gaps = {}  # noqa: RUF012

    def __init__(self, chain):
        self.chain, self.more_bytes, self.more_forwards = chain, 0, 0
        self.called, self.steps, self.records = [], 0, True
        self.outputs_hold, self.step_seconds = False, 0.0

    def is_profile(self, ops):
        n = len(self.chain.stages) - 1
        return ops == script(every(n), n).ops

    def recording(self):
        return self.records

    def open(self, script, names, how, *, traced):
        return Run(self, script)

    def traced(self, model):
        return None

    def tensors(self, tree):
        return leaves(tree, Tensor)

    def bytes_of(self, tensors):
        return sum({id(t): t.nbytes for t in tensors}.values())

    def forward_aside(self, model, batch, loss_fn):
        loss_fn(model, batch)

    def step(self, model, batch, loss_fn, *, gradients=False):
        self.steps += 1
        loss_fn(model, batch)
        return Step(BASE_BYTES, BASE_BYTES, 0, self.step_seconds, 0.0)


def fake(monkeypatch, chain):
    """Return a backend on which steps take what a chain says, active until the test ends."""
    from xmem import api

    backend = SimpleNamespace(
        name="fake", device="cpu", checkpoint=Checkpoint(), plans=Plans(chain), measure=None
    )
    monkeypatch.setattr(api, "active", lambda: backend)
    monkeypatch.setattr(api, "loaded", lambda name: backend)
    return backend


def unequal(rand, n):
    """Return a chain of n stages, all of different bytes, and the loss."""
    sizes = sorted((rand.randint(50, 500) for _ in range(n + 1)), reverse=True)
    stages = []
    for i in range(n):
        kept = sizes[i + 1] + rand.randint(100, 2000)
        option = Option("keep all", 1.0 + i, 2.0 + i, kept, rand.randint(0, 50), 700 + i)
        stages.append(Stage(str(i), 1.0 + i, rand.randint(0, 100), (option,)))
    loss = Option("keep all", 0.5, 0.0, 0, 900, 900)
    stages.append(Stage(LOSS_STAGE, 0.5, 900, (loss,)))
    return Chain("true", tuple(stages), (*sizes, 0))
