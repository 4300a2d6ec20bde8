"""A 24-layer GPT on PyTorch with every block checkpointed: against plain and against by hand.

Peers: the same model without checkpointing, and with `torch.utils.checkpoint` called by hand. All
three take turns in one process, in changing order, and ratios are taken turn by turn, so that what
else the machine does falls on all alike. Bytes are exact.
Usage: python benchmarks/checkpoint_overhead.py [FOLDER]
"""

import functools
import json
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

ROUNDS = 60
WAYS = ("plain", "by hand", "xmem")


def main(folder):
    import torch
    from on_torch.gpt import GPT, forward_and_backward
    from torch.utils.checkpoint import checkpoint

    import xmem

    xmem.use("torch", device="cpu")
    torch.set_num_threads(2)
    torch.manual_seed(0)
    models = {}
    for way in WAYS:
        models[way] = GPT(layers=24)
        for p in models[way].parameters():
            p.grad = torch.zeros_like(p)
    for layer in models["by hand"].layers:
        layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False)
    assert xmem.apply_checkpointing(models["xmem"], "every").applied_to == 24
    ids = torch.randint(0, 1000, (8, 128))
    peaks = {}
    for way, model in models.items():
        forward_and_backward(model, ids, ids)
        with xmem.measure(model=model, inputs=ids) as m:
            forward_and_backward(model, ids, ids)
        peaks[way] = m.peak_above_static_bytes
    seconds = {way: [] for way in WAYS}
    for turn in range(ROUNDS):
        for way in WAYS[turn % 3 :] + WAYS[: turn % 3]:
            model = models[way]
            start = time.perf_counter()
            forward_and_backward(model, ids, ids)
            seconds[way].append(time.perf_counter() - start)

    def ratio(way, peer):
        pairs = zip(seconds[way], seconds[peer], strict=True)
        return statistics.median(a / b for a, b in pairs)

    rows = [
        {
            "way": way,
            "peak_above_static_bytes": peaks[way],
            "median_seconds": statistics.median(seconds[way]),
            "time_to_plain": ratio(way, "plain"),
            "time_to_by_hand": ratio(way, "by hand"),
        }
        for way in WAYS
    ]
    lines = [
        "| 24-layer GPT | peak above static | time to plain | time to by hand |",
        "|---|---|---|---|",
    ]
    for row in rows:
        peak = row["peak_above_static_bytes"]
        lines.append(
            f"| {row['way']} | {peak} B ({peak / 2**20:.2f} MiB)"
            f" | {row['time_to_plain']:.3f} | {row['time_to_by_hand']:.3f} |"
        )
    text = "\n".join(lines) + "\n"
    print(text)
    if folder:
        (Path(folder) / "checkpoint_overhead.json").write_text(json.dumps(rows, indent=1) + "\n")
        (Path(folder) / "checkpoint_overhead.md").write_text(text)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else None)
