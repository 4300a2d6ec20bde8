"""Compressed activations: peak, gradient error and step time against the plain step.

Each model in a process of its own. On PyTorch gradients are there already, so that they count in
neither peak; on Jittor they are made in the step, and both peaks have them. Peaks are exact. Errors
are relative L2 norms against the plain step's gradients: of all together, and of the worst
parameter. Plain and compressed steps take turns, and time ratios are taken turn by turn. Usage:
python benchmarks/compress.py [FOLDER] [BACKEND ...]
"""

import json
import statistics
import sys
import time
from pathlib import Path

from processes import run_part

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

ROUNDS = 15
MODELS = {"torch": ("mlp", "cnn", "gpt8"), "jittor": ("chain", "conv", "transformer")}
BITS = (8, 4, 2)


def torch_model(name):
    """Return a model, its loss as a function of it, and its batch."""
    import torch
    from on_torch.gpt import GPT
    from torch import nn
    from torch.nn import functional

    torch.manual_seed(0)
    if name == "mlp":  # 1024 rows of 1024, 6 layers
        layers = [m for _ in range(6) for m in (nn.Linear(1024, 1024), nn.ReLU())]
        model, x = nn.Sequential(*layers, nn.Linear(1024, 10)), torch.randn(1024, 1024)
    elif name == "cnn":

        def block(i, o, stride=1):
            conv = nn.Conv2d(i, o, 3, stride, 1, bias=False)
            return nn.Sequential(conv, nn.BatchNorm2d(o), nn.ReLU())

        sizes = ((3, 32), (32, 32), (32, 64, 2), (64, 64), (64, 128, 2), (128, 128))
        head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10))
        model, x = nn.Sequential(*(block(*s) for s in sizes), *head), torch.randn(16, 3, 64, 64)
    else:
        model, x = GPT(layers=8, dropout=0.0), torch.randint(0, 1000, (8, 128))
    y = torch.randint(0, 10, (len(x),)) if name != "gpt8" else torch.randint(0, 1000, (8 * 128,))

    def loss():
        return functional.cross_entropy(model(x).reshape(len(y), -1), y)

    return model, loss, (x, y)


def run_torch(name):
    import gc

    import torch

    import xmem

    xmem.use("torch", device="cpu")
    torch.set_num_threads(2)
    model, loss, batch = torch_model(name)

    def step(bits, seed=0):
        if bits is None:
            value = loss()
        else:
            with xmem.compress_activations(bits, seed=seed):
                value = loss()
        value.backward()

    def gradients(bits, seed=0):
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        step(bits, seed)
        return [p.grad.clone() for p in model.parameters()]

    exact = gradients(None)
    norms = [float(g.norm()) for g in exact]
    rows = []
    for bits in (None, *BITS):
        together, worst = [], []
        for seed in range(3):
            found = gradients(bits, seed)
            off = [float((a - b).norm()) for a, b in zip(found, exact, strict=True)]
            together.append((sum(o**2 for o in off) / sum(n**2 for n in norms)) ** 0.5)
            worst.append(max(o / n for o, n in zip(off, norms, strict=True) if n))
        del found
        gc.collect()
        with xmem.measure(model=model, inputs=batch) as m:
            step(bits)
        rows.append(
            {
                "bits": bits,
                "peak_above_static_bytes": m.peak_above_static_bytes,
                "error": statistics.median(together),
                "worst_parameter_error": statistics.median(worst),
            }
        )
    print(json.dumps(timed(rows, step)))


def jittor_model(name):
    """Return a model and its input, which asks for no gradient."""
    import numpy as np
    from jittor import nn
    from on_jittor.chain import chain, normal, transformer

    np.random.seed(0)
    if name == "chain":  # 24 x (Linear 256 and GELU)
        return chain(), normal(4096, 256)
    if name == "conv":
        layers = [m for _ in range(10) for m in (nn.Conv(32, 32, 3, padding=1), nn.ReLU())]
        return nn.Sequential(*layers), normal(24, 32, 32, 32)
    return transformer(6), normal(4, 128, 256)


def run_jittor(name):
    import numpy as np

    import xmem

    backend = xmem.use("jittor", device="cpu")
    import jittor as jt
    from on_jittor.chain import peak_above_static_bytes, trained

    jt.set_global_seed(0)
    model, x = jittor_model(name)

    def step(bits, seed=0):
        if bits is None:
            value = (model(x) ** 2).mean()
        else:
            with xmem.compress_activations(bits, seed=seed, model=model):
                value = (model(x) ** 2).mean()
        found = jt.grad(value, trained(model), retain_graph=False)
        jt.sync(found)
        return found

    def gradients(bits, seed=0):
        return [g.numpy().astype(np.float64) for g in step(bits, seed)]

    exact = gradients(None)
    norms = [np.linalg.norm(g) for g in exact]
    rows = []
    for bits in (None, *BITS):
        together, worst = [], []
        for seed in range(3):
            pairs = zip(gradients(bits, seed), exact, strict=True)
            off = [np.linalg.norm(a - b) for a, b in pairs]
            together.append(float((sum(o**2 for o in off) / sum(n**2 for n in norms)) ** 0.5))
            worst.append(float(max(o / n for o, n in zip(off, norms, strict=True) if n)))
        rows.append(
            {
                "bits": bits,
                "peak_above_static_bytes": peak_above_static_bytes(
                    backend.measure,
                    lambda: step(bits),  # noqa: B023
                ),
                "error": statistics.median(together),
                "worst_parameter_error": statistics.median(worst),
            }
        )
    print(json.dumps(timed(rows, step)))


def timed(rows, step):
    """Let the steps take turns, and add their times and shares to the rows."""
    seconds = {bits: [] for bits in (None, *BITS)}
    for turn in range(ROUNDS):
        order = (None, *BITS)
        for bits in order[turn % 4 :] + order[: turn % 4]:
            start = time.perf_counter()
            step(bits)
            seconds[bits].append(time.perf_counter() - start)
    for row in rows:
        pairs = zip(seconds[row["bits"]], seconds[None], strict=True)
        row["time_to_plain"] = statistics.median(a / b for a, b in pairs)
        row["peak_to_plain"] = row["peak_above_static_bytes"] / rows[0]["peak_above_static_bytes"]
    return rows


RUN = {"torch": run_torch, "jittor": run_jittor}


def main(folder, backends):
    lines = [
        "| backend | model | bits | peak above static | of plain | error | worst | time |",
        "|---|---|---|---|---|---|---|---|",
    ]
    found = {}
    for backend in backends:
        for name in MODELS[backend]:
            found[f"{backend} {name}"] = rows = run_part(__file__, backend, name)
            for row in rows:
                peak = row["peak_above_static_bytes"]
                lines.append(
                    f"| {backend} | {name} | {row['bits'] or 'plain'}"
                    f" | {peak} B ({peak / 2**20:.2f} MiB) | {row['peak_to_plain']:.3f}"
                    f" | {row['error']:.2%} | {row['worst_parameter_error']:.2%}"
                    f" | {row['time_to_plain']:.3f} |"
                )
    text = "\n".join(lines) + "\n"
    print(text)
    if folder:
        (Path(folder) / "compress.json").write_text(json.dumps(found, indent=1) + "\n")
        (Path(folder) / "compress.md").write_text(text)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--run"]:
        RUN[sys.argv[2]](sys.argv[3])
    else:
        given = [a for a in sys.argv[1:] if a not in RUN]
        main(given[0] if given else None, [a for a in sys.argv[1:] if a in RUN] or list(RUN))
