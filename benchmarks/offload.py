"""Offload to a file in the page cache: peaks and times against the plain step.

Each part in a process of its own; peaks are exact. Plain and offloaded steps take turns, and time
ratios are taken turn by turn. On PyTorch gradients are there already, so that they count in neither
peak; on Jittor they are made in the step, and both peaks have them. Parts: activations that leave
(`activations`), and with checkpointing so that only the inputs of blocks do, by the number of
blocks (`depth`), and optimizer states that a step streams (`optimizer`): the blocks of it that are
there in a step come on top of static memory, which the states have left. Usage: python
benchmarks/offload.py [FOLDER] [BACKEND ...]; with `--render FOLDER` the page is made anew of the
recorded figures.
"""

import gc
import json
import statistics
import sys
import time
from pathlib import Path

from compress import jittor_model, torch_model
from processes import run_part

ROUNDS = 9
DEPTHS = (12, 24, 48)
PREFETCH = {"torch": (0, "64MiB"), "jittor": (0,)}
ACTIVATIONS = {"torch": ("gpt8", "cnn"), "jittor": ("chain",)}


def use(backend):
    """Return the backend, and what makes a tensor of normal values of a shape."""
    import numpy as np

    import xmem

    active = xmem.use(backend, device="cpu")
    if backend == "torch":
        import torch

        torch.manual_seed(0)
        torch.set_num_threads(2)
    random = np.random.default_rng(0)
    return active, lambda *s: active.models.tensor(random.standard_normal(s, dtype=np.float32))


def turns(steps):
    """Let steps take turns; returns each one's median time relative to the first."""
    seconds = {name: [] for name in steps}
    names = list(steps)
    for turn in range(ROUNDS):
        at = turn % len(names)
        for name in names[at:] + names[:at]:
            start = time.perf_counter()
            steps[name]()
            seconds[name].append(time.perf_counter() - start)
    return {
        name: statistics.median(a / b for a, b in zip(found, seconds[names[0]], strict=True))
        for name, found in seconds.items()
    }


def step_of(backend, model, loss):
    """Return a step: forward in a block, and backward."""
    if backend == "torch":

        def step(block):
            with block:
                value = loss()
            value.backward()

        return step
    import jittor as jt
    from on_jittor.chain import trained

    def step(block):
        with block:
            value = loss()
        jt.sync(jt.grad(value, trained(model), retain_graph=False))

    return step


def workload(backend, name):
    """Return a model, its loss as a function, and its batch."""
    if backend == "torch":
        return torch_model(name)
    model, x = jittor_model(name)
    return model, lambda: (model(x) ** 2).mean(), x


def transformer(backend, depth, normal):
    """Return blocks of attention and a wide layer, so narrow that their inputs matter."""
    if backend == "jittor":
        from on_jittor.chain import transformer as made

        model, x = made(depth, width=64), normal(16, 128, 64)
        return model, lambda: (model(x) ** 2).mean(), x, list(model)
    import torch
    from on_torch.gpt import GPT
    from torch.nn import functional

    model, ids = GPT(layers=depth, dropout=0.0, length=64), torch.randint(0, 1000, (4, 64))

    def loss():
        return functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())

    return model, loss, ids, list(model.layers)


def peak(model, batch, step):
    """Return the peak above static of a step, once it has run and been warmed up."""
    import xmem

    step()
    gc.collect()
    with xmem.measure(model=model, inputs=batch) as m:
        step()
    return m.peak_above_static_bytes


def run_activations(backend, name):
    from contextlib import nullcontext

    import xmem

    use(backend)
    model, loss, batch = workload(backend, name)
    step = step_of(backend, model, loss)
    steps = {"plain": lambda: step(nullcontext())}
    for prefetch in PREFETCH[backend]:
        steps[f"prefetch {prefetch}"] = lambda prefetch=prefetch: step(
            xmem.offload_activations("disk", model=model, prefetch=prefetch)
        )
    peaks = {name: peak(model, batch, call) for name, call in steps.items()}
    times = turns(steps)
    return [
        {"how": how, "peak_above_static_bytes": peaks[how], "time_to_plain": times[how]}
        for how in steps
    ]


def run_depth(backend, depth):
    from contextlib import nullcontext

    import xmem

    _, normal = use(backend)
    model, loss, batch, blocks = transformer(backend, int(depth), normal)
    xmem.apply_checkpointing(model, "every", blocks=blocks)
    step = step_of(backend, model, loss)
    gradients = sum(p.numel() for p in model.parameters()) * 4 if backend == "jittor" else 0

    def away():
        return xmem.offload_activations("disk", model=model, prefetch=0)

    return [
        {
            "how": how,
            "peak_above_static_bytes": peak(model, batch, lambda block=block: step(block())),
            "gradient_bytes": gradients,
        }
        for how, block in (("checkpoint", nullcontext), ("checkpoint and offload", away))
    ]


def run_optimizer(backend, name):
    import xmem

    active, normal = use(backend)
    if backend == "torch":
        from torch import nn
    else:
        from jittor import nn
    rows, steps, kept = [], {}, []
    for how in ("plain", "disk"):
        model, x = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(8))), normal(64, 1024)
        optimizer = active.training.make_optimizer("adam", model, learning_rate=1e-3)

        def step(model=model, x=x, optimizer=optimizer):
            xmem.backward((model(x) ** 2).mean(), optimizer)
            xmem.optimizer_step(optimizer)
            xmem.zero_grad(optimizer)
            active.measure.synchronize()

        step()
        if how == "disk":
            xmem.offload_optimizer(optimizer, "disk")
        step()
        gc.collect()
        with xmem.measure(model=model, optimizer=optimizer, inputs=x) as m:
            pass
        # Those of the optimizer before, which is there too, count as states still.
        states = m.by_category["optimizer"] - sum(row["state_bytes"] for row in rows)
        with xmem.measure(model=model, optimizer=optimizer, inputs=x) as m:
            step()
        rows.append(
            {
                "how": how,
                "state_bytes": states,
                "peak_above_static_bytes": m.peak_above_static_bytes,
            }
        )
        steps[how] = step
        kept.append((model, optimizer))
    times = turns(steps)
    return [{**row, "time_to_plain": times[row["how"]]} for row in rows]


RUN = {"activations": run_activations, "depth": run_depth, "optimizer": run_optimizer}


def parts(backend):
    """Return what is run of a backend: kinds and their arguments."""
    return [
        *(("activations", name) for name in ACTIVATIONS[backend]),
        *(("depth", str(depth)) for depth in DEPTHS),
        ("optimizer", "adam"),
    ]


def _bytes(value):
    return "" if value is None else f"{value} B ({value / 2**20:.2f} MiB)"


def render(found):
    """Return the page of recorded figures."""
    lines = [
        "| backend | part | how | peak above static | to the first | states | time |",
        "|---|---|---|---|---|---|---|",
    ]
    for part, rows in found.items():
        backend, name = part.split(" ", 1)
        for row in rows:
            peak_bytes = row["peak_above_static_bytes"]
            share = peak_bytes / rows[0]["peak_above_static_bytes"]
            less = row.get("gradient_bytes")
            ratio = row.get("time_to_plain")
            lines.append(
                f"| {backend} | {name} | {row['how']} | {_bytes(peak_bytes)}"
                + (f", {_bytes(peak_bytes - less)} without gradients" if less else "")
                + f" | {share:.3f} | {_bytes(row.get('state_bytes'))}"
                + f" | {'' if ratio is None else f'{ratio:.3f}'} |"
            )
    return "\n".join(lines) + "\n"


def main(folder, backends):
    found = {
        f"{backend} {kind} {name}": run_part(__file__, backend, kind, name)
        for backend in backends
        for kind, name in parts(backend)
    }
    print(render(found))
    if folder:
        text = json.dumps(found, indent=1) + "\n"
        (Path(folder) / "offload.json").write_text(text, encoding="utf-8")
        (Path(folder) / "offload.md").write_text(render(found), encoding="utf-8")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--run"]:
        print(json.dumps(RUN[sys.argv[3]](sys.argv[2], sys.argv[4])))
    elif sys.argv[1:2] == ["--render"]:
        recorded = Path(sys.argv[2]) / "offload.json"
        page = render(json.loads(recorded.read_text(encoding="utf-8")))
        recorded.with_suffix(".md").write_text(page, encoding="utf-8")
    else:
        given = [a for a in sys.argv[1:] if a not in ACTIVATIONS]
        chosen = [a for a in sys.argv[1:] if a in ACTIVATIONS] or list(ACTIVATIONS)
        main(given[0] if given else None, chosen)
