"""The codec on one core, in warm memory: float32 packed and unpacked, in GB/s of float32.

Two peers in the same run. A copy of the same array, which is what memory allows; and the same
block-wise quantization written with PyTorch's own operations, nearest rounding and no care for
masks, NaN or denormals. The best of many rounds counts, of processor time. Usage:
python benchmarks/codec.py [FOLDER]
"""

import json
import os
import sys
import time
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"

import numpy as np

from xmem.codec import BITS, BLOCK, packed_bytes
from xmem.native import codec

COUNT = 1 << 18  # 1 MiB of float32: it and what it is packed into stay in the core's cache
ROUNDS = 300


def best(function):
    least = float("inf")
    for _ in range(ROUNDS):
        begin = time.process_time()
        function()
        least = min(least, time.process_time() - begin)
    return 4 * COUNT / least / 1e9


def eager(values):
    """Return what packs and unpacks by PyTorch's operations, at 8 bits."""
    import torch

    torch.set_num_threads(1)
    x = torch.from_numpy(values)

    def pack():
        rows = x.view(-1, BLOCK)
        scale = rows.abs().amax(1, keepdim=True) / 127
        return (rows / scale).round().to(torch.int8), scale

    codes, scale = pack()
    return pack, lambda: codes.to(torch.float32).mul_(scale).view(-1)


def main(folder):
    values = np.random.default_rng(0).standard_normal(COUNT).astype(np.float32)
    result = np.empty_like(values)
    copied = best(lambda: np.copyto(result, values))
    pack, unpack = eager(values)
    found = {"copy": copied, "PyTorch, 8 bits": [best(pack), best(unpack)]}
    for bits in BITS:
        packed = np.empty(packed_bytes(COUNT, bits), np.uint8)
        at, of, to = packed.ctypes.data, values.ctypes.data, result.ctypes.data
        found[f"xmem, {bits} bits"] = [
            best(lambda: codec.pack(of, "float32", COUNT, bits, 1, at)),  # noqa: B023
            best(lambda: codec.unpack(at, COUNT, bits, "float32", to)),  # noqa: B023
        ]
    lines = [
        f"One core, 1 MiB of float32; a copy runs at {copied:.1f} GB/s.",
        "",
        "| codec | pack GB/s | of a copy | unpack GB/s | of a copy |",
        "|---|---|---|---|---|",
    ]
    for name, speeds in found.items():
        if name != "copy":
            cells = (f"{s:.1f} | {s / copied:.2f}" for s in speeds)
            lines.append(f"| {name} | {' | '.join(cells)} |")
    text = "\n".join(lines) + "\n"
    print(text)
    if folder:
        (Path(folder) / "codec.json").write_text(json.dumps(found, indent=1) + "\n")
        (Path(folder) / "codec.md").write_text(text)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else None)
