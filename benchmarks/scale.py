"""Memory per rank and communication per step, on paper up to 1,024 ranks, and measured at 2 and 4.

The measured model is a chain of 16 linear layers of 256 with GELU between them, Adam, float32. One
process gives what the formulas (`on_paper`) need: bytes of parameters and of activations per row,
and what a step takes besides. Each formula's figure is then held against ranks that really train.
Where a formula is not enough (the bubbles of a pipeline, the steps of a ring) the schedule is
simulated.
Usage: python benchmarks/scale.py [FOLDER] [FRAMEWORK ...]
"""

import json
import sys
from dataclasses import replace
from pathlib import Path

from on_paper import BUCKET, FORMULAS, MIB, Model, peak_bytes, schedule_lines, sent_bytes
from on_ranks import leave, measured, start

WORLDS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
CHECKED = (2, 4)
DEPTH, WIDTH, ROWS = 15, 256, 256
TECHNIQUES = ("data_parallel", "zero1", "zero3", "tensor_parallel", "pipeline")
MOST_APART = 0.1
"""How far a measurement may be from paper, relative."""


def chain(rows):
    """Return the measured workload."""
    from xmem.workloads.catalog import Workload
    from xmem.workloads.models import mlp

    shape = (rows, WIDTH)
    return Workload("chain", "quick", mlp(depth=DEPTH, width=WIDTH), "real", shape, shape, "mse", 0)


def rank_part(framework, folder):
    """Train on this rank: alone with two sizes of batch, or in every technique."""
    import xmem
    import xmem.distributed as xd

    backend = xmem.use(framework, device="cpu")
    here = xd.init(timeout=120)
    if here.size == 1:
        found = {
            str(rows): measured(backend, chain(rows), "data_parallel", here)
            for rows in (ROWS, 2 * ROWS)
        }
    else:
        found = {}
        for technique in TECHNIQUES:
            # Ranks that share the batch have as many rows each as one process has.
            shared = technique in ("data_parallel", "zero1", "zero3")
            rows = ROWS * here.size if shared else ROWS
            found[technique] = measured(backend, chain(rows), technique, here)
    leave(folder, here, found)


def model_of(framework, alone, ranks):
    """Return the model that one process shows, and how the framework keeps gradients."""
    layer = (WIDTH + 1) * WIDTH * 4
    small, large = (alone[0][str(rows)] for rows in (ROWS, 2 * ROWS))
    above = [run["peak_bytes"] - run["static_bytes"] for run in (small, large)]
    kept = above[1] - above[0]
    whole = (DEPTH + 1) * layer
    copies = ranks[0]["data_parallel"]["peak_bytes"] > small["peak_bytes"] + whole / 2
    zero1 = sum(ranks[0]["zero1"]["sent_bytes"].values())
    return Model(
        layers=DEPTH + 1,
        layer_bytes=layer,
        activation_bytes=kept / DEPTH,
        boundary_bytes=ROWS * WIDTH * 4,
        besides_bytes=small["peak_bytes"] - 3 * whole - max(kept, whole),
        copies_gradients=copies,
        gradients_to_all=zero1 > 2.5 * (len(ranks) - 1) / len(ranks) * whole,
        width=WIDTH,
        is_lazy=framework == "jittor",
    )


def paper(model, title, worlds=WORLDS):
    """Return the table of a model."""
    lines = [f"### {title}", "", "| technique | | " + " | ".join(map(str, worlds)) + " |"]
    lines.append("|---|---|" + "---:|" * len(worlds))
    for technique in TECHNIQUES:
        for name, figure in (("peak", peak_bytes), ("sent a step", sent_bytes)):
            cells = [shown(figure(model, technique, n)) for n in worlds]
            lines.append(f"| {technique} | {name} | {' | '.join(cells)} |")
    return [*lines, ""]


def shown(size):
    """Render bytes."""
    if size is None:
        return "-"
    return f"{size / MIB:.2f} MiB" if size < 1024 * MIB else f"{size / MIB / 1024:.2f} GiB"


def checks(framework, model, by_world):
    """Return rows of measured against predicted, and the largest differences."""
    rows = []
    for world, ranks in by_world.items():
        for technique in TECHNIQUES:
            peak = max(rank[technique]["peak_bytes"] for rank in ranks)
            sent = max(sum(rank[technique]["sent_bytes"].values()) for rank in ranks)
            rows.append(
                {
                    "framework": framework,
                    "ranks": world,
                    "technique": technique,
                    "peak_bytes": peak,
                    "peak_on_paper": peak_bytes(model, technique, world),
                    "sent_bytes": sent,
                    "sent_on_paper": sent_bytes(model, technique, world),
                }
            )
    return rows


def largest_difference(rows):
    """Return how far a measurement is from paper at most, relative."""
    return max(
        abs(row[f"{name}_bytes"] / row[f"{name}_on_paper"] - 1)
        for row in rows
        for name in ("peak", "sent")
    )


def check_lines(rows):
    """Return the table of measured against predicted."""
    lines = [
        "| framework | ranks | technique | peak, measured | on paper | measured / paper | sent,"
        " measured | on paper | measured / paper |",
        "|---|---:|---|---:|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        pairs = []
        for name in ("peak", "sent"):
            real, on_paper = row[f"{name}_bytes"], row[f"{name}_on_paper"]
            ratio = f"{real / on_paper:.3f}" if on_paper else "-"
            pairs.append(f"{shown(real)} | {shown(on_paper)} | {ratio}")
        lines.append(
            f"| {row['framework']} | {row['ranks']} | {row['technique']} | {' | '.join(pairs)} |"
        )
    return [*lines, ""]


def text_of(models, rows):
    """Return the page."""
    lines = [
        "# Memory and communication by number of ranks",
        "",
        "Per rank. n ranks, r = (n - 1) / n; P bytes of parameters, k P of optimizer states (Adam:"
        " k = 2), A of activations that a batch keeps, R of what goes from one layer to the next,"
        f" B of the largest block, b of a bucket (P, at most {BUCKET // MIB} MiB), P_i and A_i of"
        " stage i, m micro-batches (here 2 n), t what a step"
        " takes besides (the batch, one layer's scratch), measured in one process. Bytes sent are"
        " by the usual ring or pairwise algorithm.",
        "",
        "| technique | peak | sent a step |",
        "|---|---|---|",
        *(f"| {name} | {peak} | {sent} |" for name, (peak, sent) in FORMULAS.items()),
        "",
        f"Ranks of data_parallel, zero1 and zero3 have {ROWS} rows each; of tensor_parallel and"
        f" pipeline {ROWS} together.",
        "",
        "## Checked against ranks that train",
        "",
        f"The largest difference is {largest_difference(rows):.1%}.",
        "",
        *check_lines(rows),
        "## The measured model, up to 1,024 ranks",
        "",
    ]
    for framework, model in models.items():
        lines += paper(model, framework)
    first = next(iter(models.values()))
    large = replace(
        first,
        layers=1024,
        layer_bytes=(4096 + 1) * 4096 * 4,
        activation_bytes=first.activation_bytes * 2048 * 4096 / (ROWS * WIDTH),
        boundary_bytes=2048 * 4096 * 4,
        besides_bytes=first.besides_bytes * 2048 * 4096 / (ROWS * WIDTH),
        width=4096,
    )
    lines += paper(large, "On paper only: 1,024 layers of 4,096, 2,048 rows, as the first above")
    lines += [
        "## Schedules, simulated",
        "",
        "A backward takes twice as long as a forward; messages take no time. A ring passes n parts"
        " round twice, which is checked by values.",
        "",
        *schedule_lines(),
    ]
    return "\n".join(lines)


def main(folder, frameworks):
    models, rows, raw = {}, [], {}
    for framework in frameworks:
        alone = start(__file__, framework, 1)
        by_world = {world: start(__file__, framework, world) for world in CHECKED}
        models[framework] = model_of(framework, alone, by_world[2])
        rows += checks(framework, models[framework], by_world)
        raw[framework] = {"1": alone, **{str(world): ranks for world, ranks in by_world.items()}}
    text = text_of(models, rows)
    print(text)
    if folder:
        (Path(folder) / "scale.md").write_text(text)
        (Path(folder) / "scale.json").write_text(json.dumps({"rows": rows, "runs": raw}, indent=1))
    if largest_difference(rows) > MOST_APART:
        sys.exit("the formulas do not describe what was measured")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        rank_part(*sys.argv[2:])
    else:
        main(sys.argv[1] if len(sys.argv) > 1 else None, sys.argv[2:] or ("torch", "jittor"))
