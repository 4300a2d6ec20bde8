"""Memory per rank and communication per step, on paper up to 1,024 ranks, and measured at 2 and 4.

The measured model is a chain of 16 linear layers of 256 with GELU between them, Adam, float32. One
process gives what the formulas need: bytes of parameters and of activations per row, and what a
step takes besides. Each formula's figure is then held against ranks that really train. Where a
formula is not enough (the bubbles of a pipeline, the steps of a ring) the schedule is simulated.
Usage: python benchmarks/scale.py [FOLDER] [FRAMEWORK ...]
"""

import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path

from on_ranks import leave, measured, start

WORLDS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
CHECKED = (2, 4)
DEPTH, WIDTH, ROWS = 15, 256, 256
TECHNIQUES = ("data_parallel", "zero1", "zero3", "tensor_parallel", "pipeline")
MIB = 2**20

FORMULAS = {
    "data_parallel": (
        "(1 + k) P + max(A, P) + t; with gradients in buckets that stay: (2 + k) P + A + t",
        "2 r P",
    ),
    "zero1": (
        "(1 + k / n) P + max(A, P) + t; with buckets that stay: (2 + k / n) P + A + t",
        "3 r P: gradients to all (2), parameters from their owners (1); 2 r P where gradients"
        " go to their owners only",
    ),
    "zero3": (
        "(1 + k) P / n + max(A, P / n) + 2 B + t; where blocks are computed again, A is their"
        " inputs, R each",
        "3 r P: parameters for forward and for backward, gradients to their owners; PyTorch"
        " gathers the last block once",
    ),
    "tensor_parallel": (
        "(1 + k) Q + max(A (n + 1) / 2 n, Q) + t, Q = pairs / n + the rest",
        "4 r R for each pair of layers: the output and the gradient of the input, summed up",
    ),
    "pipeline": (
        "(2 + k) P_i + alive_i A_i / m + t, alive_i = min(m, n - i); on Jittor (3 + k) P_i: a"
        " micro-batch's gradients beside the sum",
        "R to the next stage, R to the one before",
    ),
}


@dataclass(frozen=True)
class Model:
    """A chain of equal layers, and how a framework trains it.

    Attributes:
        layers: how many.
        layer_bytes: parameters of one.
        activation_bytes: what a layer keeps of a whole batch.
        boundary_bytes: what goes from one layer to the next, of a whole batch (R).
        besides_bytes: what a step takes besides activations and gradients (t).
        buckets_stay: whether gradients lie in buckets that stay from step to step.
        gradients_to_all: whether ZeRO-1 sums gradients on all ranks, or on their owners only.
        width: of a layer.
        is_lazy: a framework that computes a step late: ZeRO-3 keeps what enters a block and
            computes it again, a pipeline has a micro-batch's gradients beside their sum.
    """

    layers: int
    layer_bytes: int
    activation_bytes: float
    boundary_bytes: int
    besides_bytes: float
    buckets_stay: bool
    gradients_to_all: bool
    width: int
    is_lazy: bool

    @property
    def parameter_bytes(self):
        return self.layers * self.layer_bytes


def peak_bytes(model, technique, n):
    """Return a rank's peak; None where the model cannot be divided so."""
    k, whole = 2, model.parameter_bytes
    kept, besides = (model.layers - 1) * model.activation_bytes, model.besides_bytes
    if n == 1:
        return (1 + k) * whole + max(kept, whole) + besides
    if technique in ("data_parallel", "zero1"):
        states = k / n if technique == "zero1" else k
        if model.buckets_stay:
            return (2 + states) * whole + kept + besides
        return (1 + states) * whole + max(kept, whole) + besides
    if technique == "zero3":
        if model.is_lazy:
            kept = (model.layers - 1) * model.boundary_bytes
        return (1 + k) * whole / n + max(kept, whole / n) + 2 * model.layer_bytes + besides
    if technique == "tensor_parallel":
        if model.width % n:
            return None
        pairs = model.layers // 2 * 2
        part = (pairs / n + model.layers - pairs) * model.layer_bytes
        return (1 + k) * part + max(kept * (n + 1) / (2 * n), part) + besides
    if n > model.layers:
        return None
    micro = 2 * n
    heaviest = -(-model.layers // n)  # the first stage keeps most micro-batches
    stage = heaviest * model.layer_bytes
    alive = min(micro, n)
    kept_here = heaviest * model.activation_bytes * (model.layers - 1) / model.layers
    gradients = 2 if model.is_lazy else 1
    return (1 + k + gradients) * stage + alive / micro * kept_here + besides / micro


def sent_bytes(model, technique, n):
    """Return what a rank sends in a step, the rank that sends most; None where it cannot be."""
    if n == 1:
        return 0
    share, whole = (n - 1) / n, model.parameter_bytes
    if technique == "data_parallel":
        return 2 * share * whole
    if technique == "zero1":
        return (3 if model.gradients_to_all else 2) * share * whole
    if technique == "zero3":
        return share * (3 * whole - (0 if model.is_lazy else model.layer_bytes))
    if technique == "tensor_parallel":
        if model.width % n:
            return None
        # The first pair's input is the batch, which wants no gradient.
        return (4 * (model.layers // 2) - 2) * share * model.boundary_bytes
    if n > model.layers:
        return None
    return (2 if n > 2 else 1) * model.boundary_bytes


def ring_all_reduce(n, chunks_of):
    """Pass the parts of a sum around a ring; returns steps and bytes that each rank sends.

    Every rank begins with its own numbers, and must end with the sum of all: that is asserted.
    """
    parts = [[float(rank + 1)] * n for rank in range(n)]
    steps = sent = 0
    for phase in ("reduce", "gather"):
        for step in range(n - 1):
            moving = []
            for rank in range(n):
                part = (rank - step + (phase == "gather")) % n
                moving.append(((rank + 1) % n, part, parts[rank][part]))
            for to, part, value in moving:
                parts[to][part] = value if phase == "gather" else parts[to][part] + value
            steps += 1
            sent += chunks_of / n
    assert all(value == n * (n + 1) / 2 for rank in parts for value in rank)
    return steps, sent


def simulate_pipeline(schedule, n, micro):
    """Run a schedule in ticks, backward twice as long as forward; returns idle share and alive."""
    from xmem.distributed.schedules import most_alive, order

    works = [order(schedule, s, stages=n, micro_batches=micro) for s in range(n)]
    alive = [most_alive(w) for w in works]
    works = [[w for w in stage if w.kind in ("forward", "backward")] for stage in works]
    done, free, at = {}, [0.0] * n, [0] * n
    while any(at[s] < len(works[s]) for s in range(n)):
        moved = False
        for s in range(n):
            while at[s] < len(works[s]):
                work = works[s][at[s]]
                if work.kind == "forward":
                    needs = done.get(("forward", s - 1, work.micro_batch), 0.0 if s == 0 else None)
                elif s == n - 1:
                    needs = done.get(("forward", s, work.micro_batch))
                else:
                    needs = done.get(("backward", s + 1, work.micro_batch))
                if needs is None:
                    break
                free[s] = max(free[s], needs) + (1 if work.kind == "forward" else 2)
                done[(work.kind, s, work.micro_batch)] = free[s]
                at[s] += 1
                moved = True
        assert moved, "the schedule waits in a circle"
    length = max(free)
    return 1 - 3 * micro / length, alive


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
    stays = ranks[0]["data_parallel"]["peak_bytes"] > small["peak_bytes"] + whole / 2
    zero1 = sum(ranks[0]["zero1"]["sent_bytes"].values())
    return Model(
        layers=DEPTH + 1,
        layer_bytes=layer,
        activation_bytes=kept / DEPTH,
        boundary_bytes=ROWS * WIDTH * 4,
        besides_bytes=small["peak_bytes"] - 3 * whole - max(kept, whole),
        buckets_stay=stays,
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


def check_lines(rows):
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


def schedule_lines():
    """Return the simulated schedules beside their formulas."""
    lines = [
        "| stages | micro-batches | idle, 1f1b | gpipe | (n - 1) / (m + n - 1) | alive, 1f1b |"
        " gpipe | ring: steps | 2 (n - 1) | bytes each rank sends of 1 MiB | 2 (n - 1) / n |",
        "|---:|---:|---:|---:|---:|---|---|---:|---:|---:|---:|",
    ]
    for n in (2, 4, 8, 16, 32, 64):
        for micro in (n, 4 * n):
            idle, alive = simulate_pipeline("1f1b", n, micro)
            idle_gpipe, alive_gpipe = simulate_pipeline("gpipe", n, micro)
            expected = (n - 1) / (micro + n - 1)
            assert abs(idle - expected) < 1e-9, (n, micro, idle, expected)
            assert abs(idle_gpipe - expected) < 1e-9
            steps, sent = ring_all_reduce(n, MIB)
            assert steps == 2 * (n - 1)
            lines.append(
                f"| {n} | {micro} | {idle:.3f} | {idle_gpipe:.3f} | {expected:.3f} |"
                f" {alive[0]} to {alive[-1]} | {alive_gpipe[0]} | {steps} | {2 * (n - 1)} |"
                f" {sent / MIB:.3f} MiB | {2 * (n - 1) / n:.3f} |"
            )
    return [*lines, ""]


def text_of(models, rows):
    """Return the page."""
    lines = [
        "# Memory and communication by number of ranks",
        "",
        "Per rank. n ranks, r = (n - 1) / n; P bytes of parameters, k P of optimizer states (Adam:"
        " k = 2), A of activations that a batch keeps, R of what goes from one layer to the next,"
        " B of the largest block, P_i and A_i of stage i, m micro-batches (here 2 n), t what a step"
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
    worst = max(
        abs(row[f"{name}_bytes"] / row[f"{name}_on_paper"] - 1)
        for row in rows
        for name in ("peak", "sent")
    )
    print(f"largest difference between measurement and paper: {worst:.1%}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        rank_part(*sys.argv[2:])
    else:
        main(sys.argv[1] if len(sys.argv) > 1 else None, sys.argv[2:] or ("torch", "jittor"))
