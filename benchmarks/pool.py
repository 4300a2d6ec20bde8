"""The CPU memory pool against PyTorch's own allocator: CPU time per step, and bytes reserved.

Peer: PyTorch's default allocator, in a process where xmem's was never installed. Beside it xmem's
allocator with each strategy and its default settings, and glibc told to keep what is freed
(`mallopt`, what xmem does without a compiler). Workloads: elementwise operations on 64 MB tensors,
an MLP with cheap layers at batch 65536, a small GPT, a 3D U-Net. One process for each cell, the
ways in turn, several rounds, one thread; the best step of all rounds is compared. Reserved / peak
is over the whole run, the building of the model included.
Usage: python benchmarks/pool.py [FOLDER]
"""

import json
import os
import statistics
import sys
import time
from pathlib import Path

from processes import run_part

ROUNDS = 3
STEPS = 5
WAYS = ("default", "passthrough", "size_class", "bfc", "mallopt")
WORKLOADS = ("elementwise", "mlp", "gpt", "unet")
ASKED = {"elementwise": 5.0, "mlp": 1.7, "gpt": 1.0, "unet": 1.2}
RESERVED_AT_MOST = 1.3
NEVER_BELOW = 0.99


def elementwise(torch):
    x = torch.randn(16 * 2**20)

    def step():
        for _ in range(6):
            doubled = x * 2
            added = doubled + 1
            positive = added.relu()
            del doubled, added, positive

    return step


def mlp(torch):
    nn = torch.nn
    layers = [nn.Sequential(nn.Linear(128, 128), nn.LayerNorm(128), nn.GELU()) for _ in range(6)]
    model = nn.Sequential(*layers, nn.Linear(128, 10))
    batch = torch.randn(65536, 128), torch.randint(0, 10, (65536,))
    return training(torch, model, batch, torch.optim.SGD(model.parameters(), 1e-3))


def gpt(torch, vocabulary=4000, width=256, heads=4, layers=4, length=256):
    nn, functional = torch.nn, torch.nn.functional

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
            self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
            self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

        def forward(self, x):
            qkv = self.qkv(self.norms[0](x)).unflatten(-1, (3, heads, -1))
            q, k, v = qkv.permute(2, 0, 3, 1, 4)
            seen = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.out(seen.transpose(1, 2).flatten(2))
            return x + self.down(functional.gelu(self.up(self.norms[1](x))))

    class GPT(nn.Module):
        def __init__(self):
            super().__init__()
            self.tokens = nn.Embedding(vocabulary, width)
            self.positions = nn.Parameter(torch.zeros(length, width))
            self.blocks = nn.Sequential(*(Block() for _ in range(layers)))
            self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, vocabulary))

        def forward(self, ids):
            return self.head(self.blocks(self.tokens(ids) + self.positions)).flatten(0, 1)

    model = GPT()
    ids, targets = (torch.randint(0, vocabulary, (8, length)) for _ in range(2))
    return training(torch, model, (ids, targets.flatten()), torch.optim.AdamW(model.parameters()))


def unet(torch, width=8):
    nn, functional = torch.nn, torch.nn.functional

    def double(inside, out):
        layers = []
        for channels in (inside, out):
            layers += [nn.Conv3d(channels, out, 3, 1, 1), nn.InstanceNorm3d(out), nn.LeakyReLU()]
        return nn.Sequential(*layers)

    class UNet(nn.Module):
        def __init__(self):
            super().__init__()
            self.down = nn.ModuleList([double(1, width), double(width, 2 * width)])
            self.bottom = double(2 * width, 4 * width)
            self.raise_ = nn.ModuleList(
                nn.ConvTranspose3d(2 * c, c, 2, 2) for c in (2 * width, width)
            )
            self.up = nn.ModuleList([double(4 * width, 2 * width), double(2 * width, width)])
            self.out = nn.Conv3d(width, 3, 1)

        def forward(self, x):
            first = self.down[0](x)
            second = self.down[1](functional.max_pool3d(first, 2))
            y = self.bottom(functional.max_pool3d(second, 2))
            for raised, up, beside in zip(self.raise_, self.up, (second, first), strict=True):
                y = up(torch.cat([raised(y), beside], 1))
            return self.out(y)

    model = UNet()
    batch = torch.randn(1, 1, 64, 64, 64), torch.randint(0, 3, (1, 64, 64, 64))
    return training(torch, model, batch, torch.optim.AdamW(model.parameters()))


def training(torch, model, batch, optimizer):
    def step():
        optimizer.zero_grad(set_to_none=True)
        torch.nn.functional.cross_entropy(model(batch[0]), batch[1]).backward()
        optimizer.step()

    return step


def part(name, way):
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)
    pool = None
    if way == "mallopt":
        from xmem_torch.heap_pool import keep_freed

        keep_freed()
    elif way != "default":
        import xmem

        pool = xmem.use("torch", device="cpu").pool
        pool.configure({"strategy": way}, None)
    step = {"elementwise": elementwise, "mlp": mlp, "gpt": gpt, "unet": unet}[name](torch)
    step()
    step()
    seconds = []
    for _ in range(STEPS):
        begin = time.process_time()
        step()
        seconds.append(time.process_time() - begin)
    stats = pool and pool.stats()
    ratio = stats and stats.peak_reserved_bytes / stats.peak_allocated_bytes
    print(json.dumps({"seconds": seconds, "reserved_to_peak": ratio}))


def measure(workload):
    """Return, for each way, the best step, the ratio by rounds, and bytes reserved."""
    rounds = []
    for turn in range(ROUNDS):
        order = WAYS[turn % len(WAYS) :] + WAYS[: turn % len(WAYS)]
        rounds.append({way: run_part(__file__, workload, way) for way in order})
    best = {way: min(min(r[way]["seconds"]) for r in rounds) for way in WAYS}
    return {
        way: {
            "best_seconds": best[way],
            "faster": best["default"] / best[way],
            "faster_by_round": [
                min(r["default"]["seconds"]) / min(r[way]["seconds"]) for r in rounds
            ],
            "reserved_to_peak": rounds[0][way]["reserved_to_peak"],
        }
        for way in WAYS
    }


def main(folder):
    os.environ["OMP_NUM_THREADS"] = "1"
    lines = [
        "| workload | way | ms a step | times faster | median of rounds | reserved / peak |",
        "|---|---|---|---|---|---|",
    ]
    found, short = {}, []
    for workload in WORKLOADS:
        found[workload] = measure(workload)
        for way, row in found[workload].items():
            reserved = row["reserved_to_peak"]
            lines.append(
                f"| {workload} | {way} | {row['best_seconds'] * 1e3:.0f} | {row['faster']:.2f}"
                f" | {statistics.median(row['faster_by_round']):.2f}"
                f" | {'not counted' if reserved is None else f'{reserved:.2f}'} |"
            )
            if way != "default" and row["faster"] < NEVER_BELOW:
                short.append(f"{workload} {way}: {row['faster']:.3f} < {NEVER_BELOW}")
        bfc = found[workload]["bfc"]
        if bfc["faster"] < ASKED[workload]:
            short.append(f"{workload} bfc: {bfc['faster']:.2f} < {ASKED[workload]}")
        if bfc["reserved_to_peak"] > RESERVED_AT_MOST:
            short.append(f"{workload} bfc reserved / peak: {bfc['reserved_to_peak']:.2f}")
    lines += ["", f"Short of what was asked for: {'; '.join(short) or 'nothing'}."]
    text = "\n".join(lines) + "\n"
    print(text)
    if folder:
        (Path(folder) / "pool.json").write_text(json.dumps(found, indent=1) + "\n")
        (Path(folder) / "pool.md").write_text(text)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--run"]:
        part(*sys.argv[2:])
    else:
        main(sys.argv[1] if len(sys.argv) > 1 else None)
