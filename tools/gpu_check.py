"""Run the quick matrix on CUDA for every framework that can, within 8 minutes.

Results go to benchmarks/results/. Runs from a source tree: neither an installation of xmem nor a
virtual environment is needed, only the frameworks and xmem's own dependencies. Without an NVIDIA
GPU it says so and ends well.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
BUDGET_SECONDS = 480.0
CASE_SECONDS = 240.0


def gpu_name() -> str | None:
    """Return the first NVIDIA GPU's name by its driver, or None."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    count = ctypes.c_int()
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return None
    name = ctypes.create_string_buffer(100)
    if count.value == 0 or driver.cuDeviceGetName(name, 100, 0) != 0:
        return None
    return name.value.decode()


def make_visible(folder: Path) -> None:
    """Let this source tree's entry points be found where xmem-train is not installed."""
    try:
        metadata.distribution("xmem-train")
    except metadata.PackageNotFoundError:
        sys.path.insert(0, str(ROOT / "tests"))
        from distributions import install_project

        install_project(ROOT, folder)
        parts = [folder, ROOT, ROOT / "backends", os.environ.get("PYTHONPATH", "")]
        os.environ["PYTHONPATH"] = os.pathsep.join(map(str, parts))
        sys.path[:0] = [str(p) for p in parts[:3]]


def run_matrix(
    device: str,
    backends: Sequence[str] = ("torch", "jittor"),
    workloads: Sequence[str] | None = None,
) -> int:
    """Run the matrix on a device and write the report; returns the exit status."""
    from xmem.conformance.runner import matrix, run_cases
    from xmem.plugins import backend_infos
    from xmem.report.markdown import markdown
    from xmem.report.model import write_json
    from xmem.report.write import make_report
    from xmem.workloads.catalog import DEFAULT_WORKLOADS

    usable = [i.name for i in backend_infos() if i.usable and i.name in backends]
    for info in backend_infos():
        if info.name in backends and not info.usable:
            print(f"{info.name}: {info.reason}")
    if not usable:
        print("No framework is installed here; nothing was run.")
        return 0
    begin = time.monotonic()
    results = []
    techniques = ["baseline", "checkpoint", "autocast"]
    cases = matrix(usable, workloads or DEFAULT_WORKLOADS, techniques, device=device)
    RESULTS.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        for case in sorted(cases, key=lambda c: usable.index(c.backend)):
            left = BUDGET_SECONDS - (time.monotonic() - begin)
            if left < 5:
                print(f"{case.name}: not run, the {BUDGET_SECONDS:g} s are used up")
                continue
            [result] = run_cases([case], Path(folder), timeout_seconds=min(left, CASE_SECONDS))
            peak = result.peak_above_static_bytes
            print(f"{case.name}: {result.status} {peak} bytes above static {result.reason}")
            sys.stdout.flush()
            results.append(result)
    report = make_report(results)
    write_json(report, RESULTS / f"{device}-quick.json")
    (RESULTS / f"{device}-quick.md").write_text(markdown(report), encoding="utf-8")
    print(f"{len(results)} of {len(cases)} cases; results in {RESULTS}")
    bad = [r for r in results if r.status not in ("ok", "unsupported")]
    return 1 if bad or len(results) < len(cases) else 0


def main() -> int:
    """Find a GPU, run, report."""
    name = gpu_name()
    if name is None:
        print("gpu-check: no NVIDIA GPU with a working driver is here; nothing was run.")
        return 0
    print(f"gpu-check: {name}")
    subprocess.run(["nvidia-smi", "-L"], check=False)
    with tempfile.TemporaryDirectory() as folder:
        make_visible(Path(folder))
        return run_matrix("cuda")


if __name__ == "__main__":
    sys.exit(main())
