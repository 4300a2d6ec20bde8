"""What offloading stages costs in real steps, and whether the costs of several add up.

    python benchmarks/plans_offload.py [folder for plans_offload.json and .md] [backend ...]

A GPT-2 of the quick size with larger batches, to a scratch file in the page cache. Steps that keep
everything take turns with steps that offload one stage, several neighbours, every other stage; the
least of five each. "Predicted" is the sum of what the profile says of each stage alone. Were there
transfers that overlap with other stages, several would take less than the sum. On PyTorch also
with each tensor waited for where it is saved, instead of where the next one is. One process for
each backend, two threads.
"""

import json
import sys
from pathlib import Path

from plans import BACKENDS, declared
from processes import run_part

STEPS = 6  # the first warms up


def schedule(stages, away):
    """Return the operations of a step that keeps all, some stages by their second option."""
    from xmem.planner import Op

    ops = [Op("G", i, int(i in away)) for i in range(stages)]
    return [
        *ops,
        *(Op("G", stages), Op("L"), Op("B", stages)),
        *(Op("B", i) for i in reversed(range(stages))),
    ]


def waiting():
    """Let PyTorch wait for each tensor where it is saved; returns what undoes that."""
    from xmem_torch.leaving import Leaving

    before = Leaving._send

    def send(self, flat):
        elements = before(self, flat)
        self._arrived()
        return elements

    Leaving._send = send

    def undo():
        Leaving._send = before

    return undo


def measure(backend_name):
    """Return a row for each set of stages."""
    import xmem
    from xmem.planner import simulate
    from xmem.steps import play
    from xmem.workloads import make_batch, make_weights

    backend = xmem.use(backend_name)
    chosen = declared("gpt2")
    models = backend.models
    model = models.build(chosen.model, make_weights(chosen))
    batch = tuple(models.tensor(array) for array in make_batch(chosen, 0))

    def loss_fn(model, batch):
        return models.loss(chosen.loss, model(batch[0]), batch[1])

    profile = xmem.profile(model, batch, loss_fn, offload="disk")
    names = [[o.name for o in stage.options] for stage in profile.stages]
    several = [i for i, options in enumerate(names) if len(options) > 1]
    middle = len(several) // 2
    sets = {
        "none": [],
        "one": several[middle : middle + 1],
        "every other": several[::2],
        "neighbours": several[: (len(several) + 1) // 2],
        "all": several,
    }
    stages = len(profile) - 1
    ops = {name: schedule(stages, away) for name, away in sets.items()}

    def seconds():
        found = {name: [] for name in sets}
        for _ in range(STEPS):
            for name in sets:
                run = play(backend, profile.source, ops[name], options=names, traced=False)
                found[name].append(run.step.seconds)
        return {name: min(times[1:]) for name, times in found.items()}

    overlapped = seconds()
    alone = None
    if backend_name == "torch":
        undo = waiting()
        alone = seconds()
        undo()
    plain = simulate(profile, ops["none"])[0]
    rows = []
    for name, away in sets.items():
        seen = play(backend, profile.source, ops[name], options=names)
        predicted_seconds, predicted_bytes = simulate(profile, ops[name])
        rows.append(
            {
                "backend": backend_name,
                "offloaded": name,
                "stages": len(away),
                "of": len(several),
                "predicted_peak_bytes": predicted_bytes,
                "measured_peak_bytes": seen.peak_bytes + profile.batch_bytes,
                "predicted_more_seconds": predicted_seconds - plain,
                "measured_more_seconds": overlapped[name] - overlapped["none"],
                "waiting_more_seconds": None if alone is None else alone[name] - alone["none"],
                "step_seconds": overlapped["none"],
            }
        )
    return rows


def table(rows):
    """Return the rows as Markdown."""
    lines = [
        "| backend | offloaded | stages | peak predicted, MiB | measured | more ms predicted"
        " | measured | waiting at every tensor | of a step |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for r in rows:
        waits = r["waiting_more_seconds"]
        lines.append(
            f"| {r['backend']} | {r['offloaded']} | {r['stages']} of {r['of']} |"
            f" {r['predicted_peak_bytes'] / 2**20:.3f} | {r['measured_peak_bytes'] / 2**20:.3f} |"
            f" {1e3 * r['predicted_more_seconds']:.1f} | {1e3 * r['measured_more_seconds']:.1f} |"
            f" {'' if waits is None else f'{1e3 * waits:.1f}'} |"
            f" {r['measured_more_seconds'] / r['step_seconds']:+.0%} |"
        )
    return lines


def main(folder, backends):
    rows = [row for backend in backends for row in run_part(__file__, backend, "gpt2")]
    print("\n".join(table(rows)))
    if folder is not None:
        (folder / "plans_offload.json").write_text(json.dumps(rows, indent=1) + "\n")
        (folder / "plans_offload.md").write_text("\n".join(table(rows)) + "\n")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--run"]:
        print(json.dumps(measure(sys.argv[2])))
    else:
        given = [a for a in sys.argv[1:] if a not in BACKENDS]
        chosen = [a for a in sys.argv[1:] if a in BACKENDS] or BACKENDS
        main(Path(given[0]) if given else None, chosen)
