"""Programs that offload until they are killed; nothing of them may stay behind."""

import os
import random
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

PROGRAMS = {
    "depot": """
        import ctypes, threading
        from xmem.offload.depot import Depot
        data = ctypes.create_string_buffer(1 << 20)
        print("ready", flush=True)
        def work():
            while True:
                depot = Depot("disk")
                for number in range(20):
                    depot.put(number, ctypes.addressof(data), len(data))
        for _ in range(2):
            threading.Thread(target=work).start()
    """,
    "torch": """
        import torch, xmem
        xmem.use("torch", device="cpu")
        blocks = [m for _ in range(6) for m in (torch.nn.Linear(256, 256), torch.nn.GELU())]
        model, x = torch.nn.Sequential(*blocks), torch.randn(512, 256)
        optimizer = torch.optim.AdamW(model.parameters())
        def step():
            with xmem.offload_activations("disk", model=model):
                loss = model(x).square().mean()
            xmem.backward(loss, optimizer)
            xmem.optimizer_step(optimizer)
            xmem.zero_grad(optimizer)
    """,
    "jittor": """
        import xmem
        xmem.use("jittor", device="cpu")
        import jittor as jt
        blocks = [m for _ in range(6) for m in (jt.nn.Linear(256, 256), jt.nn.GELU())]
        model, x = jt.nn.Sequential(*blocks), jt.randn(512, 256)
        optimizer = jt.optim.Adam(model.parameters(), lr=1e-3)
        def step():
            with xmem.offload_activations("disk", model=model):
                loss = (model(x) ** 2).mean()
            xmem.backward(loss, optimizer)
            xmem.optimizer_step(optimizer)
            xmem.zero_grad(optimizer)
            jt.sync_all()
    """,
}
STEPS = """
        step()
        xmem.offload_optimizer(optimizer, "disk", block="64KiB")
        xmem.offload_parameters(model, "disk")
        step()
        print("ready", flush=True)
        while True:
            step()
"""


def killed(name, folder, *, seed, within=0.5):
    """Run a program in a folder, kill it at a random point; returns the files that stay behind."""
    code = textwrap.dedent(PROGRAMS[name] + ("" if name == "depot" else STEPS))
    folder.mkdir(exist_ok=True)
    before = _shared_memory()
    program = subprocess.Popen(
        [sys.executable, "-c", code],
        env={**os.environ, "XMEM_OFFLOAD_DIR": str(folder), "TMPDIR": str(folder)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        said = next((line for line in program.stdout if line.strip() == "ready"), "")
        time.sleep(random.Random(seed).uniform(0, within))
    finally:
        program.send_signal(signal.SIGKILL)
        _, errors = program.communicate(timeout=60)
    assert said, errors
    assert program.returncode == -signal.SIGKILL, errors
    left = [p for p in folder.rglob("*") if not _of_a_framework(p)]
    return left + sorted(_shared_memory() - before)


def _of_a_framework(path):
    """Say whether it is what a framework itself keeps among temporary files."""
    return any(name in str(path) for name in ("torchinductor", "jittor"))


def _shared_memory():
    """Return what offload could have left there; ranks that run beside have their folders."""
    found = Path("/dev/shm").glob("*xmem*")
    return {path for path in found if not path.name.startswith("xmem-launch-")}
