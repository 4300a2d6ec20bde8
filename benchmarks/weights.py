"""Weights in few bits: bytes, error and seconds against float32 and the framework's own.

Peers on PyTorch: float32, `torch.ao.quantization.quantize_dynamic` (deprecated there) and torchao's
`Int8WeightOnlyConfig`, where they can be imported. Linear(1024, 2048), ReLU, Linear(2048, 1024): 16
MiB in float32; one row, a few and many. All take turns in one process, and ratios are taken turn by
turn. Another row has weights from a normal distribution, as training leaves them.
Usage: python benchmarks/weights.py [FOLDER]
"""

import copy
import json
import statistics
import sys
import time
import warnings
from pathlib import Path

import numpy as np
from processes import run_part

ROUNDS = 15
BATCHES = (1, 16, 256)
WAYS = [(8, "weight_only"), (8, "dynamic"), (4, "weight_only"), (4, "dynamic")]


def arrays(kind):
    generator = np.random.default_rng(0)
    found = {}
    for name, shape in (("0", (2048, 1024)), ("2", (1024, 2048))):
        bound = shape[1] ** -0.5
        weight = (
            generator.uniform(-bound, bound, shape)
            if kind == "uniform"
            else generator.standard_normal(shape) * bound
        )
        found[f"{name}.weight"] = weight.astype(np.float32)
        found[f"{name}.bias"] = np.zeros(shape[0], np.float32)
    return found


def torch_models(kind):
    import torch
    from torch import nn

    from xmem.weights import quantize_weights

    plain = nn.Sequential(nn.Linear(1024, 2048), nn.ReLU(), nn.Linear(2048, 1024))
    plain.load_state_dict({k: torch.from_numpy(v) for k, v in arrays(kind).items()})
    models = {"float32": (plain, 4.0)}
    for bits, scheme in WAYS:
        model = copy.deepcopy(plain)
        models[f"xmem {bits} bits {scheme}"] = (
            model,
            per_weight(quantize_weights(model, bits, scheme=scheme)),
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            ao = torch.ao.quantization.quantize_dynamic(plain, {nn.Linear}, torch.qint8)
            models["torch.ao quantize_dynamic"] = ao, None
        except (AttributeError, ImportError, RuntimeError):
            pass
        try:
            from torchao.quantization import Int8WeightOnlyConfig, quantize_

            model = copy.deepcopy(plain)
            quantize_(model, Int8WeightOnlyConfig())
            models["torchao Int8WeightOnlyConfig"] = model, None
        except ImportError:
            pass
    return models


def jittor_models(kind):
    from jittor import nn

    from xmem.weights import quantize_weights

    def make():
        model = nn.Sequential(nn.Linear(1024, 2048), nn.ReLU(), nn.Linear(2048, 1024))
        model.load_parameters(arrays(kind))
        return model

    models = {"float32": (make(), 4.0)}
    for bits, scheme in WAYS:
        model = make()
        models[f"xmem {bits} bits {scheme}"] = (
            model,
            per_weight(quantize_weights(model, bits, scheme=scheme)),
        )
    return models


def per_weight(receipt):
    return receipt.after_bytes / sum(layer.elements for layer in receipt.layers)


def part(framework, kind):
    import xmem

    xmem.use(framework, device="cpu")
    if framework == "torch":
        import torch

        models = torch_models(kind)
        tensor, run = torch.from_numpy, lambda m, x: m(x).detach().numpy()
    else:
        import jittor as jt

        models = jittor_models(kind)
        tensor, run = jt.array, lambda m, x: m(x).numpy()
    rows = {name: {"way": name, "bytes_per_weight": size} for name, (_, size) in models.items()}
    with xmem.no_grad():
        for batch in BATCHES:
            values = np.random.default_rng(1).standard_normal((batch, 1024), dtype=np.float32)
            measure(models, tensor(values), run, rows, batch)
    print(json.dumps(list(rows.values())))


def measure(models, x, run, rows, batch):
    seconds = {name: [] for name in models}
    outputs = {name: run(model, x) for name, (model, _) in models.items()}
    for turn in range(ROUNDS):
        names = list(models)
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            start = time.perf_counter()
            for _ in range(4):
                run(models[name][0], x)
            seconds[name].append(time.perf_counter() - start)
    for name in models:
        difference = outputs[name] - outputs["float32"]
        pairs = zip(seconds[name], seconds["float32"], strict=True)
        rows[name][f"error_{batch}"] = float(
            np.linalg.norm(difference) / np.linalg.norm(outputs["float32"])
        )
        rows[name][f"seconds_to_float32_{batch}"] = statistics.median(a / b for a, b in pairs)


def main(folder):
    found = {}
    lines = [
        "| framework | weights | way | bytes a weight | output error | time to float32: "
        + ", ".join(f"{b} rows" if b > 1 else "1 row" for b in BATCHES)
        + " |",
        "|---|---|---|---|---|---|",
    ]
    for framework in ("torch", "jittor"):
        for kind in ("uniform", "normal"):
            rows = run_part(__file__, framework, kind)
            found[f"{framework} {kind}"] = rows
            for row in rows:
                size = row["bytes_per_weight"]
                times = ", ".join(f"{row[f'seconds_to_float32_{b}']:.2f}" for b in BATCHES)
                lines.append(
                    f"| {framework} | {kind} | {row['way']} |"
                    f" {'not counted' if size is None else f'{size:.4f}'} |"
                    f" {100 * row[f'error_{BATCHES[-1]}']:.2f} % | {times} |"
                )
    text = "\n".join(lines) + "\n"
    print(text)
    if folder:
        (Path(folder) / "weights.json").write_text(json.dumps(found, indent=1) + "\n")
        (Path(folder) / "weights.md").write_text(text)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--run"]:
        part(*sys.argv[2:])
    else:
        main(sys.argv[1] if len(sys.argv) > 1 else None)
