"""24 x (Linear(256) + GELU), batch 4096: plain and in segments of 1 to 12 blocks, on both.

Peer: the same framework without xmem's checkpointing. Each row is a process of its own, in which
plain steps and checkpointed ones take turns for the time; bytes are exact. Usage: python
benchmarks/chain.py [FOLDER]
"""

import json
import statistics
import sys
import time
from pathlib import Path

from processes import run_part

STEPS = 3
TURNS = 12
BLOCKS = 24
SEGMENTS_OF = (1, 2, 4, 6, 12)


def torch_chain():
    import torch

    model = torch.nn.Sequential(
        *[torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.GELU()) for _ in range(BLOCKS)]
    )
    return model, torch.randn(4096, 256)


def jittor_chain():
    import jittor

    model = jittor.nn.Sequential(
        *[jittor.nn.Sequential(jittor.nn.Linear(256, 256), jittor.nn.GELU()) for _ in range(BLOCKS)]
    )
    return model, jittor.randn(4096, 256)


def run(name, blocks_in_a_segment):
    import xmem

    size = int(blocks_in_a_segment)
    backend = xmem.use(name, device="cpu")
    model, x = {"torch": torch_chain, "jittor": jittor_chain}[name]()
    optimizer = backend.training.make_optimizer("adam", model, learning_rate=1e-4)
    backend.measure.synchronize()

    def apply():
        receipt = xmem.apply_checkpointing(model, BLOCKS // size)
        assert receipt.applied_to == BLOCKS
        return receipt

    def step():
        loss = (model(x) ** 2).mean()
        xmem.backward(loss, optimizer)
        xmem.optimizer_step(optimizer)
        xmem.zero_grad(optimizer)

    def timed_step():
        backend.measure.synchronize()
        start = time.perf_counter()
        step()
        backend.measure.synchronize()
        return time.perf_counter() - start

    receipt = apply() if size else None
    step()
    step()
    peaks = []
    for _ in range(STEPS):
        with xmem.measure(model=model, optimizer=optimizer, inputs=x) as m:
            step()
        peaks.append(m.peak_above_static_bytes)
    assert len(set(peaks)) == 1, peaks
    seconds, ratios = [], []
    for _ in range(TURNS):
        seconds.append(timed_step())
        if receipt is not None:
            receipt.undo()
            ratios.append(seconds[-1] / timed_step())
            receipt = apply()
    found = {
        "peak_above_static_bytes": peaks[0],
        "step_seconds": statistics.median(seconds),
        "time_to_plain": statistics.median(ratios[2:]) if ratios else 1.0,
    }
    print(json.dumps(found))


def main(folder):
    rows = [
        {"backend": name, "blocks_in_a_segment": size, **run_part(__file__, name, str(size))}
        for name in ("torch", "jittor")
        for size in (0, *SEGMENTS_OF)
    ]
    lines = [
        "| backend | blocks in a segment | peak above static | ratio | step time ratio |",
        "|---|---|---|---|---|",
    ]
    for row in rows:
        plain = next(r for r in rows if r["backend"] == row["backend"])
        peak = row["peak_above_static_bytes"]
        lines.append(
            f"| {row['backend']} | {row['blocks_in_a_segment'] or 'plain'}"
            f" | {peak} B ({peak / 2**20:.2f} MiB)"
            f" | {plain['peak_above_static_bytes'] / peak:.2f}"
            f" | {row['time_to_plain']:.2f} |"
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
