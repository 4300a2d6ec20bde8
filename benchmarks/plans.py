"""Plans in reality: what is predicted, and what real steps come to, on both frameworks.

    python benchmarks/plans.py [folder for plans.json and plans.md] [backend ...]

Five workloads, of the quick sizes of `xmem compare` with larger batches, each at four budgets
between the least that has a plan and what keeps everything; and GPT of 24 blocks at 15.84 MiB (or
its least, where that is more). In every cell: the peak predicted and measured (exact bytes), the
calls of each stage's forward (`xmem.plan` refuses a step that makes others), gradients against the
plain step's, and time against plain steps that take turns with planned ones, the least of five
each. One process for each backend and workload, two threads.
"""

import json
import sys
from pathlib import Path

import numpy as np
from processes import run_part

FRACTIONS = (0.1, 0.3, 0.5, 0.7)
# By how much batches are larger than in `xmem compare`: a stage that is recomputed costs some
# tenths of a millisecond in Python, which would drown in steps of 30 ms.
BATCHES = {"mlp": 4, "resnet18": 4, "bert": 2, "gpt2": 2, "unet3d": 2}
WORKLOADS = tuple(BATCHES)
GPT26 = "gpt26"
GPT26_BYTES = int(15.84 * 2**20)
COST = "cost"
BACKENDS = ("torch", "jittor")


def difference(planned, plain):
    """Return the largest difference of a gradient, relative to its largest value."""
    return max(
        float(np.abs(planned[name] - plain[name]).max() / (np.abs(plain[name]).max() + 1e-30))
        for name in plain
    )


def declared(name):
    """Return a workload."""
    from dataclasses import replace

    from xmem.workloads import models, workload

    if name != GPT26:
        quick = workload(name, "quick")
        more = BATCHES[name]
        inputs, targets = quick.input_shape, quick.target_shape
        return replace(
            quick,
            input_shape=(more * inputs[0], *inputs[1:]),
            target_shape=(more * targets[0], *targets[1:]),
        )
    model = models.gpt2(layers=24, width=128, heads=4, vocabulary=1000, positions=128)
    gpt = workload("gpt2", "quick")
    shape = (8, 128)
    return replace(
        gpt, name=GPT26, model=model, input_shape=shape, target_shape=shape, classes=1000
    )


def measure(backend_name, name):
    """Return the rows of a workload."""
    import xmem
    from xmem.planning import least_bytes, whole_bytes
    from xmem.workloads import make_batch, make_weights

    backend = xmem.use(backend_name)
    chosen = declared(name)
    models = backend.models
    model = models.build(chosen.model, make_weights(chosen))
    batch = tuple(models.tensor(array) for array in make_batch(chosen, 0))

    def loss_fn(model, batch):
        return models.loss(chosen.loss, model(batch[0]), batch[1])

    plain = backend.plans.step(model, batch, loss_fn, gradients=True)
    profile = xmem.profile(model, batch, loss_fn, name=name)
    whole = whole_bytes(profile)
    least = least_bytes(profile)
    if name == GPT26:
        budgets = [max(GPT26_BYTES, least)]
    else:
        budgets = [int(least + f * (whole - least)) for f in FRACTIONS]
    rows = []
    for budget in budgets:
        plan = xmem.plan(profile, budget=budget, compare=True)
        found = plan.verified
        receipt = plan.apply(model)
        planned = backend.plans.step(model, batch, loss_fn, gradients=True)
        receipt.undo()
        rows.append(
            {
                "backend": backend_name,
                "workload": name,
                "stages": len(profile.stages),
                "skips": len(profile.skips),
                "traced": profile.traced,
                "budget_bytes": budget,
                "share": budget / whole,
                "store_all_peak_bytes": whole,
                "predicted_peak_bytes": found.predicted_peak_bytes,
                "measured_peak_bytes": found.measured_peak_bytes,
                "rounds": found.rounds,
                "forward_calls": sum(1 for op in plan.ops if op.code in "NG"),
                "gradient_difference": difference(planned.gradients, plain.gradients),
                "loss_difference": abs(planned.loss - plain.loss),
                "predicted_overhead": plan.overhead,
                "measured_overhead": found.measured_overhead,
                "bound_overhead": plan.bound_seconds / plan.store_all_seconds - 1,
                "plain_step_seconds": found.plain_step_seconds,
            }
        )
    return rows


def bookkeeping(backend_name):
    """Return what a plan costs in Python: milliseconds of a stage that is kept, and run again.

    On a model of 17 stages that compute next to nothing; forward's own time is taken off.
    """
    import dataclasses

    import xmem
    from xmem.planner import solve
    from xmem.steps import every
    from xmem.workloads import make_batch, make_weights, workload

    backend = xmem.use(backend_name)
    chosen = workload("mlp", "quick")
    width = chosen.input_shape[1]
    chosen = dataclasses.replace(chosen, input_shape=(8, width), target_shape=(8, width))
    models = backend.models
    model = models.build(chosen.model, make_weights(chosen))
    batch = tuple(models.tensor(array) for array in make_batch(chosen, 0))

    def loss_fn(model, batch):
        return models.loss(chosen.loss, model(batch[0]), batch[1])

    def seconds(plan=None):
        receipt = plan.apply(model) if plan else None
        found = [backend.plans.step(model, batch, loss_fn).seconds for _ in range(30)]
        if receipt:
            receipt.undo()
        return min(found)

    profile = xmem.profile(model, batch, loss_fn)
    stages = len(profile) - 1
    keeping = solve(profile, 1 << 40)
    recomputing = dataclasses.replace(keeping, ops=tuple(every(stages)))
    plain = seconds()
    forward = min(s.options[0].forward_seconds for s in profile.stages[:-1])
    return {
        "backend": backend_name,
        "kept_ms": 1e3 * (seconds(keeping) - plain) / stages,
        "recomputed_ms": 1e3 * ((seconds(recomputing) - plain) / stages - forward),
    }


def table(rows):
    """Return the rows as Markdown."""
    mib = 2**20
    lines = [
        "| backend | workload | stages | budget | predicted | measured | error | overhead predicted"
        " | measured | bound | gradients differ by |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for r in rows:
        error = r["measured_peak_bytes"] / r["predicted_peak_bytes"] - 1
        lines.append(
            f"| {r['backend']} | {r['workload']} | {r['stages']} |"
            f" {r['budget_bytes'] / mib:.2f} MiB ({r['share']:.0%}) |"
            f" {r['predicted_peak_bytes'] / mib:.3f} | {r['measured_peak_bytes'] / mib:.3f} |"
            f" {error:+.3%} | {r['predicted_overhead']:.1%} | {r['measured_overhead']:.1%} |"
            f" {r['bound_overhead']:.1%} | {r['gradient_difference']:.1e} |"
        )
    return lines


def summary(rows):
    """Return what the issue of trust is: medians and worst cases, for each backend."""
    lines = []
    for backend in dict.fromkeys(r["backend"] for r in rows):
        mine = [r for r in rows if r["backend"] == backend]
        errors = [abs(r["measured_peak_bytes"] / r["predicted_peak_bytes"] - 1) for r in mine]
        over = sum(r["measured_peak_bytes"] > r["budget_bytes"] for r in mine)
        times = [abs(r["measured_overhead"] - r["predicted_overhead"]) for r in mine]
        lines.append(
            f"{backend}: {len(mine)} cells. Predicted and measured peak differ by"
            f" {np.median(errors):.4%} in the median, {max(errors):.4%} at most; {over} are over"
            f" budget. Gradients differ by {max(r['gradient_difference'] for r in mine):.1e} at"
            f" most. Predicted and measured overhead differ by {100 * np.median(times):.1f} points"
            f" in the median, {100 * max(times):.1f} at most. At most"
            f" {max(r['rounds'] for r in mine)} round(s)."
        )
    return lines


def main(folder, backends):
    rows = []
    for backend in backends:
        for workload in (*WORKLOADS, GPT26):
            found = run_part(__file__, backend, workload)
            rows += found
            print("\n".join(table(found)[2:]), flush=True)
    lines = summary(rows)
    for backend in backends:
        cost = run_part(__file__, backend, COST)
        lines.append(
            f"{backend}: in Python a stage costs {cost['kept_ms']:.2f} ms where it is kept and"
            f" {cost['recomputed_ms']:.2f} ms where it is run again, on 17 tiny stages."
        )
    print("\n".join(["", *lines]))
    if folder is not None:
        (folder / "plans.json").write_text(json.dumps(rows, indent=1) + "\n")
        (folder / "plans.md").write_text("\n".join([*table(rows), "", *lines]) + "\n")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--run"]:
        backend, workload = sys.argv[2:]
        print(json.dumps(bookkeeping(backend) if workload == COST else measure(backend, workload)))
    else:
        main(Path(sys.argv[1]) if len(sys.argv) > 1 else None, sys.argv[2:] or BACKENDS)
