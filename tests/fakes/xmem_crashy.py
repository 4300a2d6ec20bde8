"""A backend that trains one matrix in NumPy, counts made-up bytes, and breaks on demand.

The environment variable XMEM_CRASHY maps "workload/technique" to a way to break, as JSON. The
bytes are constants, so tests may assert them: static 1000, and above it 900, or 400 with
checkpointing.
"""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from xmem.errors import BackendUnavailableError
from xmem.hookspecs import hookimpl
from xmem.protocols import Cost, Counters, Framework, Session, Tagged

STATIC_BYTES = 1000
ABOVE_STATIC_BYTES = {"plain": 900, "checkpointed": 400}
BLOCKS = 3
NO_GAPS = {}


def mode():
    """Return how this process is to break, or None."""
    plan = json.loads(os.environ.get("XMEM_CRASHY", "{}"))
    if not plan or len(sys.argv) < 2:
        return None
    case = json.loads(sys.argv[1])
    return plan.get(f"{case['workload']}/{case['technique']}")


def hang():
    """Sleep with a child that sleeps too, and tell its process id."""
    child = subprocess.Popen(["sleep", "600"])
    Path(os.environ["XMEM_CRASHY_PIDS"]).write_text(f"{os.getpid()} {child.pid}")
    time.sleep(600)


def first_time():
    """Say whether no process before this one was asked about this result."""
    marker = Path(sys.argv[2]).with_suffix(".once")
    if marker.exists():
        return False
    marker.touch()
    return True


def break_down(state):
    """Break as told, in the middle of the first backward pass."""
    how = mode()
    if how in ("SIGKILL", "SIGSEGV", "SIGABRT"):
        print("about to be killed", flush=True)
        os.kill(os.getpid(), getattr(signal, how))
    elif how == "hang":
        hang()
    elif how == "exit":
        os._exit(3)
    elif how == "noise":
        print('{"status": "ok"}\x1b[31m' * 3)
        print("\udcff not text \x00", file=sys.stderr)
    elif how == "status":
        print("xmem: half way there", file=sys.stderr, flush=True)
        print("something else", flush=True)
    elif how == "raise" or (how == "raise_once" and first_time()):
        raise RuntimeError("first line <script>alert(1)</script>\nin between\nlast | line")
    elif how == "out_of_memory":
        state.refused += 1
        raise MemoryError("no room")


class State:
    """What the allocator would know."""

    def __init__(self):
        self.peak = STATIC_BYTES
        self.limit = None
        self.refused = 0
        self.checkpointed = False
        self.steps = 0

    def allocate(self, size):
        if self.limit is not None and STATIC_BYTES + size > self.limit:
            self.refused += 1
            raise MemoryError(f"{size} bytes are beyond the limit of {self.limit}")
        self.peak = max(self.peak, STATIC_BYTES + size)


class Block:
    def __init__(self):
        self.forward = lambda x: x


class Model:
    def __init__(self):
        self.blocks = [Block() for _ in range(BLOCKS)]
        self.weight = np.eye(4)

    def __call__(self, x):
        for block in self.blocks:
            x = block.forward(x)
        return SimpleNamespace(value=x @ self.weight, model=self, inputs=x)


class Measure:
    gaps = NO_GAPS
    source = "allocator"

    def __init__(self, state):
        self._state = state

    def synchronize(self):
        pass

    def counters(self):
        s = self._state
        return Counters(STATIC_BYTES, s.peak, None, None, 7, s.refused)

    def reset_peak(self):
        self._state.peak = STATIC_BYTES

    def set_limit(self, limit_bytes):
        self._state.limit = limit_bytes

    def owned(self, model, optimizer, inputs):
        return {}

    def tag(self, category, tensors):
        return Tagged(0, 0, 0)

    def tag_untagged(self, category):
        pass

    def peak_by_category(self):
        return {"parameter": STATIC_BYTES, "activation": self._state.peak - STATIC_BYTES}

    @contextmanager
    def watch(self, model, optimizer, record):
        yield
        record("optimizer_end")

    def settings(self):
        return {"flavour": 1 if mode() == "bad_settings" else "crashy"}


class Checkpoint:
    gaps = NO_GAPS

    def __init__(self, state):
        self._state = state
        self._pending = []

    def checkpoint_block(self, function, args, kwargs, how, *, ends):
        return self.checkpoint(function, args, kwargs, how)

    def obstacle(self, module):
        return None

    def cost(self, function, args, kwargs):
        return Cost(0, 0.0)

    def checkpoint(self, function, args, kwargs, how):
        self._state.checkpointed = True
        self._pending.append((function, args, kwargs))
        return function(*args, **kwargs)

    def recompute(self):
        while self._pending:
            function, args, kwargs = self._pending.pop()
            function(*args, **kwargs)

    def is_module(self, value):
        return isinstance(value, (Model, Block))

    def children(self, module):
        return []

    def is_container(self, module):
        return False

    def replace_forward(self, module, wrap):
        before = module.forward
        module.forward = wrap(before)
        return lambda: setattr(module, "forward", before)


class Training:
    gaps = NO_GAPS

    def __init__(self, state, checkpoint):
        self._state = state
        self._checkpoint = checkpoint

    def make_optimizer(self, name, model, *, learning_rate):
        return SimpleNamespace(model=model, learning_rate=learning_rate, gradient=None)

    def backward(self, loss, optimizer):
        break_down(self._state)
        self._checkpoint.recompute()
        self._state.steps += 1
        size = ABOVE_STATIC_BYTES["checkpointed" if self._state.checkpointed else "plain"]
        self._state.allocate(size + (self._state.steps if mode() == "uneven" else 0))
        optimizer.gradient = loss.gradient

    def optimizer_step(self, optimizer):
        optimizer.model.weight -= optimizer.learning_rate * optimizer.gradient

    def zero_grad(self, optimizer):
        optimizer.gradient = None

    def gradients(self, model, optimizer):
        return {"weight": np.asarray(optimizer.gradient, np.float32)}


class Models:
    gaps = NO_GAPS

    def build(self, spec, weights):
        return Model()

    def blocks(self, model):
        return model.blocks

    def tensor(self, array):
        return np.resize(array.astype(float), (8, 4))

    def loss(self, kind, output, target):
        difference = output.value - target
        value = float("nan") if mode() == "nan" else float((difference**2).mean())
        return SimpleNamespace(value=value, gradient=output.inputs.T @ difference / 16)

    def item(self, loss):
        return loss.value


STATE = State()
CHECKPOINT = Checkpoint(STATE)


@hookimpl
def xmem_framework():
    if os.environ.get("XMEM_CRASHY_MISSING"):
        return Framework("no_such_framework", "no-such-framework", "pip install crashy-framework")
    return Framework("numpy", "numpy", "pip install numpy", first_run_note="crashy warms up first")


@hookimpl
def xmem_open(device):
    if mode() == "unavailable":
        raise BackendUnavailableError("no such device here. Use device='cpu'.")
    return Session("1.0", "cpu")


@hookimpl
def xmem_measure(session):
    return Measure(STATE)


@hookimpl
def xmem_checkpoint(session):
    return CHECKPOINT


@hookimpl
def xmem_training(session):
    return Training(STATE, CHECKPOINT)


@hookimpl
def xmem_models(session):
    return Models()
