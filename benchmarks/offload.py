"""Offload to a file in the page cache: peaks and times against the plain step.

Each part in a process of its own; peaks are exact. Plain and offloaded steps take turns, and time
ratios are taken turn by turn. On PyTorch gradients are there already, so that they count in neither
peak; on Jittor they are made in the step, and both peaks have them. Parts: activations that leave
(`activations`), and with checkpointing so that only the inputs of blocks do, by the number of
blocks (`depth`), and optimizer states that a step streams (`optimizer`). Usage: python
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

        torch.set_num_threads(2)
    random = np.random.default_rng(0)
    return active, lambda *s: active.models.tensor(random.standard_normal(s, dtype=np.float32))


def turns(steps, rounds=ROUNDS):
    """Let steps take turns; returns each one's median time relative to the first."""
    seconds = {name: [] for name in steps}
    names = list(steps)
    for turn in range(rounds):
        at = turn % len(names)
        for name in names[at:] + names[:at]:
            start = time.perf_counter()
            steps[name]()
            seconds[name].append(time.perf_counter() - start)
    return {
        name: statistics.median(a / b for a, b in zip(found, seconds[names[0]], strict=True))
        for name, found in seconds.items()
    }


def steps_of(backend, name):
    """Return a model, its batch, and a step: forward in a block, and backward."""
    if backend == "torch":
        model, loss, batch = torch_model(name)

        def step(block):
            with block:
                value = loss()
            value.backward()

        return model, batch, step
    import jittor as jt
    from on_jittor.chain import trained

    model, x = jittor_model(name)

    def step(block):
        with block:
            value = (model(x) ** 2).mean()
        jt.sync(jt.grad(value, trained(model), retain_graph=False))

    return model, x, step


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
    model, batch, step = steps_of(backend, name)
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


def transformer(backend, depth):
    """Return blocks of attention and a wide layer, one after another."""
    if backend == "jittor":
        from on_jittor.chain import transformer as made

        return made(depth)
    import torch
    from torch import nn

    torch.manual_seed(0)
    layer = [
        nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True, norm_first=True)
        for _ in range(depth)
    ]
    return nn.Sequential(*layer)


def run_depth(backend, depth):
    from contextlib import nullcontext

    import xmem

    active, normal = use(backend)
    # A block's input is twice its gradients: otherwise these hide what leaves.
    model, x = transformer(backend, int(depth)), normal(48, 128, 256)
    optimizer = active.training.make_optimizer("sgd", model, learning_rate=0.0)
    xmem.apply_checkpointing(model, "every")

    def step(block):
        with block:
            loss = (model(x) ** 2).mean()
        xmem.backward(loss, optimizer)
        active.measure.synchronize()

    def away():
        return xmem.offload_activations("disk", model=model, prefetch=0)

    rows = []
    for how, block in (("checkpoint", nullcontext), ("checkpoint and offload", away)):
        step(block())
        xmem.zero_grad(optimizer)
        with xmem.measure(model=model, optimizer=optimizer, inputs=x) as m:
            step(block())
        gradients = sum(p.numel() for p in model.parameters()) * 4
        rows.append(
            {
                "how": how,
                "peak_above_static_bytes": m.peak_above_static_bytes,
                "gradient_bytes": gradients,
            }
        )
        xmem.zero_grad(optimizer)
    return rows


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
        before = m.by_category["optimizer"] if m.by_category else None
        with xmem.measure(model=model, optimizer=optimizer, inputs=x) as m:
            step()
        rows.append(
            {
                "how": how,
                "state_bytes": before,
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
