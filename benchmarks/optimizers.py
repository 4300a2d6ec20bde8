"""Optimizers with states in few bits: bytes, time and loss, against float32 and other libraries.

    python benchmarks/optimizers.py [folder for optimizers.json and optimizers.md] [backend ...]

Peers are the framework's own AdamW in float32 (PyTorch: fused), and on PyTorch bitsandbytes and
torchao, if they can be imported; else they are named as missing. To have them without installing
them: pip install --target FOLDER --no-deps torchao bitsandbytes, and FOLDER in PYTHONPATH.

Of a GPT with 3.5 million parameters: the bytes that an optimizer's states take, the bytes that a
step takes for itself at its peak, and its time. An optimizer and the framework's own take turns in
one process, and the ratio is the median over turns. Then 300 steps of the small GPT on characters
(`gpt2-text`): the mean loss of the last 20. One process for each optimizer, two threads.
"""

import gc
import importlib.util
import json
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path

from processes import run_part

TURNS = 40
STEPS = 300
LAST = 20
OWN = "framework's own"
WAYS = {
    "torch": (
        OWN, "xmem 32", "xmem 8", "xmem 4", "xmem lion 8", "xmem adafactor", "bitsandbytes 8",
        "torchao 8", "torchao 4",
    ),
    "jittor": (OWN, "xmem 32", "xmem 8", "xmem 4", "xmem lion 8", "xmem adafactor"),
}  # fmt: skip
RATES = {"lion": 1e-4, "adafactor": 1e-2}


def make(backend, way, parameters, rate):
    """Return an optimizer."""
    from xmem import optim

    words = way.split()
    if way == OWN:
        if backend == "torch":
            import torch

            return torch.optim.AdamW(parameters, lr=rate, fused=True)
        import jittor

        return jittor.optim.AdamW(parameters, lr=rate, weight_decay=0.01)
    if "lion" in words:
        return optim.Lion(parameters, RATES["lion"], state_bits=8)
    if "adafactor" in words:
        return optim.Adafactor(parameters, RATES["adafactor"])
    return optim.AdamW(parameters, rate, state_bits=int(words[1]), engine=_engine(words[0]))


def _engine(word):
    return "auto" if word == "xmem" else word


class Stepped:
    """A model and its optimizer."""

    def __init__(self, backend, declared, way, rate):
        from xmem.workloads import make_batch, make_weights

        self.backend, self.declared, self.make_batch = backend, declared, make_batch
        self.model = backend.models.build(declared.model, make_weights(declared))
        self.synchronize = backend.measure.synchronize
        self.synchronize()
        gc.collect()
        before = backend.measure.counters().allocated_bytes
        self.optimizer = make(backend.name, way, list(self.model.parameters()), rate)
        self.gradients(0)
        self.step()
        gc.collect()
        self.state_bytes = backend.measure.counters().allocated_bytes - before

    def gradients(self, step):
        """Return the loss, once gradients are there."""
        batch = [self.backend.models.tensor(a) for a in self.make_batch(self.declared, step)]
        loss = self.backend.models.loss(self.declared.loss, self.model(batch[0]), batch[1])
        self.backend.training.backward(loss, self.optimizer)
        self.synchronize()
        return self.backend.training.value(loss)

    def step(self):
        """Return the seconds of a step."""
        start = time.perf_counter()
        self.backend.training.optimizer_step(self.optimizer)
        self.synchronize()
        seconds = time.perf_counter() - start
        self.backend.training.zero_grad(self.optimizer)
        self.synchronize()
        return seconds


def run(name, way, steps):
    """Print what one optimizer comes to."""
    import xmem
    from xmem.workloads import models, workload
    from xmem.workloads.spec import parameters

    backend = xmem.use(name, device="cpu")
    if name == "torch":
        import torch

        torch.set_num_threads(2)
    gpt = models.gpt2(layers=4, width=256, heads=4, vocabulary=1000, positions=64)
    shape = (1, 16)
    declared = replace(
        workload("gpt2", "quick"), model=gpt, classes=1000, input_shape=shape, target_shape=shape
    )
    measured, peer = (Stepped(backend, declared, w, 1e-5) for w in (way, OWN))
    count = sum(_size(p.shape) for _, p in parameters(gpt))
    measured.gradients(0)
    with xmem.measure(model=measured.model) as m:  # states of others may be no plain tensors
        backend.training.optimizer_step(measured.optimizer)
        measured.synchronize()
    backend.training.zero_grad(measured.optimizer)
    seconds = {True: [], False: []}
    for turn in range(TURNS):
        for own in (turn % 2 == 0, turn % 2 == 1):
            stepped = peer if own else measured
            stepped.gradients(0)
            seconds[own].append(stepped.step())
    ratios = [a / b for a, b in zip(seconds[False], seconds[True], strict=True)]
    print(
        json.dumps(
            {
                "parameters": count,
                "state_bytes": measured.state_bytes,
                "temporary_bytes": m.peak_above_static_bytes,
                "step_seconds": statistics.median(seconds[False]),
                "time_to_own": statistics.median(ratios),
                "loss": _final_loss(backend, way, steps),
            }
        )
    )


def _final_loss(backend, way, steps):
    from xmem.workloads import workload

    trained = Stepped(backend, workload("gpt2-text", "quick"), way, 1e-3)
    losses = []
    for step in range(1, steps):
        losses.append(trained.gradients(step))
        trained.step()
    return statistics.mean(losses[-LAST:])


def _size(shape):
    size = 1
    for n in shape:
        size *= n
    return size


def main(folder, backends, steps):
    rows, missing = [], []
    for backend in backends:
        for way in WAYS[backend]:
            library = _engine(way.split()[0])
            if library in ("bitsandbytes", "torchao") and not importlib.util.find_spec(library):
                missing.append(f"{way}: {library} cannot be imported")
                continue
            found = run_part(__file__, backend, way, str(steps))
            rows.append({"backend": backend, "way": way, **found})
            print(rows[-1], file=sys.stderr)
    own = {row["backend"]: row for row in rows if row["way"] == OWN}
    lines = [
        "| backend | optimizer | state, bytes a parameter | a step's own bytes | step | time to the"
        f" framework's own | loss after {steps} steps | to its own |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        loss = row["loss"] / own[row["backend"]]["loss"] - 1
        lines.append(
            f"| {row['backend']} | {row['way']} | {row['state_bytes'] / row['parameters']:.3f}"
            f" | {row['temporary_bytes']} | {row['step_seconds'] * 1e3:.2f} ms"
            f" | {row['time_to_own']:.2f} | {row['loss']:.4f} | {100 * loss:+.2f} % |"
        )
    text = "\n".join([*lines, *(f"\nMissing: {reason}" for reason in missing)]) + "\n"
    print(text)
    if folder:
        (Path(folder) / "optimizers.json").write_text(json.dumps(rows, indent=1) + "\n")
        (Path(folder) / "optimizers.md").write_text(text)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--run"]:
        run(sys.argv[2], sys.argv[3], int(sys.argv[4]))
    else:
        given = sys.argv[1:]
        chosen = [word for word in given if word in WAYS]
        folders = [word for word in given if word not in WAYS]
        main(folders[0] if folders else None, chosen or list(WAYS), STEPS)
