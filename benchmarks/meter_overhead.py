"""What measuring costs: a step of the quick transformer under the meter against one without.

Two peers. The same step in the same process outside of `xmem.measure`, the two in turn: what the
block costs. And the same step on the framework's own allocator, in processes where xmem's was never
installed, alternating with the others: what counting costs on top. Medians are compared. Usage:
python benchmarks/meter_overhead.py [FOLDER]
"""

import json
import statistics
import sys
import time
from pathlib import Path

from processes import run_part

ROUNDS = 5
STEPS = 12


def run(name, installed):
    import xmem
    from xmem.workloads import make_batch, make_weights, workload

    if installed:
        backend = xmem.use(name, device="cpu")
        models, training = backend.models, backend.training
        synchronize = backend.measure.synchronize
    else:  # the capabilities alone: the meter is never made, its allocator never installed
        from importlib import import_module

        session = import_module(f"xmem_{name}.environment").open_session("cpu")
        plugin = import_module(f"xmem_{name}.plugin")
        models, training = plugin.xmem_models(session), plugin.xmem_training(session)
        synchronize = _synchronize(name)
    declared = workload("gpt2", "quick")
    model = models.build(declared.model, make_weights(declared))
    optimizer = training.make_optimizer("adam", model, learning_rate=1e-4)
    batch = [models.tensor(a) for a in make_batch(declared)]

    def step():
        loss = models.loss(declared.loss, model(batch[0]), batch[1])
        training.backward(loss, optimizer)
        training.optimizer_step(optimizer)
        training.zero_grad(optimizer)
        synchronize()

    def measured_step():
        with xmem.measure(model=model, optimizer=optimizer, inputs=batch):
            step()

    kinds = {"bare": step} if not installed else {"outside": step, "measured": measured_step}
    for _ in range(3):
        for run_step in kinds.values():
            run_step()
    times = {kind: [] for kind in kinds}
    for _ in range(STEPS):
        for kind, run_step in kinds.items():
            begin = time.perf_counter()
            run_step()
            times[kind].append(time.perf_counter() - begin)
    print(json.dumps(times))


def _synchronize(name):
    if name == "jittor":
        import jittor

        return lambda: jittor.sync_all(True)
    return lambda: None


def main(folder):
    lines = [
        "| backend | framework's allocator | xmem's, outside | measured | block | in all |",
        "|---|---|---|---|---|---|",
    ]
    found = {}
    for name in ("torch", "jittor"):
        times = {"bare": [], "outside": [], "measured": []}
        for _ in range(ROUNDS):
            for kind in ("bare", "installed"):
                for key, values in run_part(__file__, name, kind).items():
                    times[key] += values
        bare, outside, measured = (statistics.median(times[k]) for k in times)
        found[name] = {"bare": bare, "outside": outside, "measured": measured}
        lines.append(
            f"| {name} | {bare * 1e3:.1f} ms | {outside * 1e3:.1f} ms | {measured * 1e3:.1f} ms"
            f" | {measured / outside:.3f} | {measured / bare:.3f} |"
        )
    text = "\n".join(lines) + "\n"
    print(text)
    if folder:
        (Path(folder) / "meter_overhead.json").write_text(json.dumps(found, indent=1) + "\n")
        (Path(folder) / "meter_overhead.md").write_text(text)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--run"]:
        run(sys.argv[2], sys.argv[3] == "installed")
    else:
        main(sys.argv[1] if len(sys.argv) > 1 else None)
