"""Peak and static bytes per rank of every technique on two ranks, beside others and one process.

Two models, Adam, float32: a GPT of 13.1 MiB of parameters (4 blocks of 256, 64 tokens, 2 rows a
rank), as the bars for PyTorch were set on, and a chain of 8 linear layers of 512 (64 rows a rank),
as those for Jittor were. Ranks that share the batch have so many rows each, a pipeline as many as
they have together, in 4 micro-batches; tensor parallel has so many on all ranks.
Usage: python benchmarks/distributed.py [FOLDER] [FRAMEWORK ...]
"""

import json
import sys
from pathlib import Path

from on_ranks import leave, measured, start

MIB = 2**20
WORLD = 2
TECHNIQUES = ("data_parallel", "zero1", "zero3", "tensor_parallel", "pipeline")
TITLE = "# Memory per rank of each technique, on two ranks"
BUFFERS = (
    "Buffers: the most that buckets and packed copies took at once; a dash where tensors are sent"
    " from where they lie."
)
# Peak MiB per rank of the GPT on PyTorch.
PEAKS = {
    "data_parallel": 62.0,
    "zero1": 49.0,
    "zero3": 41.0,
    "tensor_parallel": 38.0,
    "pipeline": 36.0,
}
# On Jittor, the chain: a figure of the technique over another, and the most that it may be.
RATIOS = {
    "zero1: optimizer's states, of one process": 0.51,
    "zero3: static, of data parallel": 0.52,
    "zero3: peak, of data parallel": 0.5,
    "tensor_parallel: peak, of data parallel": 0.6,
    "pipeline: peak, of data parallel": 0.6,
}


def workload(model, rows):
    """Return a workload with a number of rows in its batch."""
    from xmem.workloads import models
    from xmem.workloads.catalog import Workload

    if model == "gpt":
        spec = models.gpt2(layers=4, width=256, heads=4, vocabulary=500, positions=64)
        shape = (rows, 64)
        return Workload("gpt", "quick", spec, "tokens", shape, shape, "cross_entropy", 500)
    shape = (rows, 512)
    spec = models.mlp(depth=7, width=512)
    return Workload("chain", "quick", spec, "real", shape, shape, "mse", 0)


def rank_part(framework, folder, model):
    import xmem
    import xmem.distributed as xd

    backend = xmem.use(framework, device="cpu")
    here = xd.init(timeout=200)
    rows = {"gpt": 2, "chain": 64}[model]
    found = {}
    for technique in TECHNIQUES if here.size > 1 else ("data_parallel",):
        shared = technique in ("data_parallel", "zero1", "zero3")
        factor = here.size if shared or technique == "pipeline" else 1
        found[technique] = measured(backend, workload(model, factor * rows), technique, here)
    leave(folder, here, found)


def highest(ranks, technique, name):
    return max(rank[technique][name] for rank in ranks)


def states(ranks, technique):
    """Return the bytes of optimizer states on the rank that has most; None if unknown."""
    found = [(rank[technique]["by_category"] or {}).get("optimizer") for rank in ranks]
    return None if None in found else max(found)


def judged(framework, model, alone, ranks):
    """Return the bars with what was measured."""
    bars = []
    if (framework, model) == ("torch", "gpt"):
        for technique, most in PEAKS.items():
            peak = highest(ranks, technique, "peak_bytes") / MIB
            bars.append((f"PyTorch, GPT: {technique}, peak MiB", peak, most))
    if (framework, model) == ("jittor", "chain"):
        for bar, most in RATIOS.items():
            technique, what = bar.split(": ")
            if what.startswith("optimizer"):
                ratio = states(ranks, technique) / states(alone, "data_parallel")
            else:
                name = f"{what.split(',')[0]}_bytes"
                ratio = highest(ranks, technique, name) / highest(ranks, "data_parallel", name)
            bars.append((f"Jittor, chain: {bar}", ratio, most))
    return bars


def lines_of(framework, model, alone, ranks):
    whole = highest(alone, "data_parallel", "peak_bytes")
    parallel = highest(ranks, "data_parallel", "peak_bytes")
    lines = [
        f"| {framework} | {model} | one process |"
        f" {highest(alone, 'data_parallel', 'static_bytes') / MIB:.2f} | {whole / MIB:.2f} |"
        f" {whole / parallel:.2f} | 1.00 | - | - |"
    ]
    for technique in TECHNIQUES:
        peak = highest(ranks, technique, "peak_bytes")
        static = highest(ranks, technique, "static_bytes")
        sent = max(sum(rank[technique]["sent_bytes"].values()) for rank in ranks)
        buffers = highest(ranks, technique, "buffer_bytes")
        held = f"{buffers / MIB:.2f}" if buffers else "-"
        lines.append(
            f"| {framework} | {model} | {technique} | {static / MIB:.2f} | {peak / MIB:.2f} |"
            f" {peak / parallel:.2f} | {peak / whole:.2f} | {sent / MIB:.2f} | {held} |"
        )
    return lines


def main(folder, frameworks):
    lines = [
        "| framework | model | technique | static MiB | peak MiB | of data parallel |"
        " of one process | sent MiB a step | buffers MiB |",
        "|---|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    bars, raw = [], {}
    for framework in frameworks:
        for model in ("gpt", "chain"):
            alone = start(__file__, framework, 1, model)
            ranks = start(__file__, framework, WORLD, model)
            lines += lines_of(framework, model, alone, ranks)
            bars += judged(framework, model, alone, ranks)
            raw[f"{framework} {model}"] = {"one process": alone, "two ranks": ranks}
    lines += ["", "| bar | measured | at most | |", "|---|---:|---:|---|"]
    for bar, value, most in bars:
        lines.append(
            f"| {bar} | {value:.3f} | {most:g} | {'holds' if value <= most else 'MISSED'} |"
        )
    text = "\n".join([TITLE, "", BUFFERS, "", *lines, ""])
    print(text)
    if folder:
        (Path(folder) / "distributed.md").write_text(text)
        (Path(folder) / "distributed.json").write_text(json.dumps(raw, indent=1))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        rank_part(*sys.argv[2:])
    else:
        main(sys.argv[1] if len(sys.argv) > 1 else None, sys.argv[2:] or ("torch", "jittor"))
