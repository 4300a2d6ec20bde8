"""24 x (Linear(256) + GELU), batch 4096: plain and with every block checkpointed, on both.

Peer: the same framework without xmem's checkpointing. Each run is a process of its own; bytes are
exact. Usage: python benchmarks/chain.py [FOLDER]
"""

import json
import sys
from pathlib import Path

from processes import run_part

STEPS = 3


def torch_chain():
    import torch

    model = torch.nn.Sequential(
        *[torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.GELU()) for _ in range(24)]
    )
    return model, torch.randn(4096, 256)


def jittor_chain():
    import jittor

    model = jittor.nn.Sequential(
        *[jittor.nn.Sequential(jittor.nn.Linear(256, 256), jittor.nn.GELU()) for _ in range(24)]
    )
    return model, jittor.randn(4096, 256)


def run(name, technique):
    import xmem

    backend = xmem.use(name, device="cpu")
    model, x = {"torch": torch_chain, "jittor": jittor_chain}[name]()
    optimizer = backend.training.make_optimizer("adam", model, learning_rate=1e-4)
    backend.measure.synchronize()
    if technique == "checkpoint":
        assert xmem.apply_checkpointing(model, "every").applied_to == 24

    def step():
        loss = (model(x) ** 2).mean()
        xmem.backward(loss, optimizer)
        xmem.optimizer_step(optimizer)
        xmem.zero_grad(optimizer)

    step()
    step()
    peaks, seconds = [], []
    for _ in range(STEPS):
        with xmem.measure(model=model, optimizer=optimizer, inputs=x) as m:
            step()
        peaks.append(m.peak_above_static_bytes)
        seconds.append(m.seconds)
    assert len(set(peaks)) == 1, peaks
    print(json.dumps({"peak_above_static_bytes": peaks[0], "step_seconds": sorted(seconds)[1]}))


def main(folder):
    rows = []
    for name in ("torch", "jittor"):
        for technique in ("baseline", "checkpoint"):
            found = run_part(__file__, name, technique)
            rows.append({"backend": name, "technique": technique, **found})
    lines = [
        "| backend | technique | peak above static | ratio | step time ratio |",
        "|---|---|---|---|---|",
    ]
    for plain, kept in (rows[:2], rows[2:]):
        for row in (plain, kept):
            peak = row["peak_above_static_bytes"]
            lines.append(
                f"| {row['backend']} | {row['technique']} | {peak} B ({peak / 2**20:.2f} MiB)"
                f" | {plain['peak_above_static_bytes'] / peak:.2f}"
                f" | {row['step_seconds'] / plain['step_seconds']:.2f} |"
            )
    text = "\n".join(lines) + "\n"
    print(text)
    if folder:
        (Path(folder) / "chain.json").write_text(json.dumps(rows, indent=1) + "\n")
        (Path(folder) / "chain.md").write_text(text)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--run"]:
        run(*sys.argv[2:4])
    else:
        main(sys.argv[1] if len(sys.argv) > 1 else None)
