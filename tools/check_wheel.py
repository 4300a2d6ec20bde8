"""Build the wheel, install it into a fresh environment, and run `xmem backends` from it."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MUST_CONTAIN = (
    "xmem/py.typed",
    "xmem/conformance/test_matrix.py",
    "xmem/report/templates/head.html",
    "xmem/report/templates/plan.html",
    "xmem/report/templates/report.html",
    "xmem/report/templates/table.html",
    "xmem/native/codec.cc",
    "xmem/native/codec.h",
    "xmem/native/depot.cc",
    "xmem/native/depot_room.h",
    "xmem/native/exact.cc",
    "xmem/native/optimizers.cc",
    "xmem/native/planner.cc",
    "xmem/native/planner_problem.h",
    "xmem/native/planner_bands.h",
    "xmem/native/planner_fronts.h",
    "xmem/native/weights.cc",
    "xmem_torch/plugin.py",
    "xmem_torch/native/allocator.cpp",
    "xmem_torch/native/away.cpp",
    "xmem_jittor/plugin.py",
    "xmem_jittor/native/allocator.cc",
    "xmem_jittor/native/away.cc",
    "xmem_jittor/native/codec.cuh",
    "xmem_jittor/native/donating.cc",
    "xmem_jittor/native/emptying.cc",
    "xmem_jittor/native/message.cc",
    "xmem_jittor/native/mpi.cc",
    "xmem_jittor/native/mpi_together.h",
    "xmem_jittor/native/saving.cc",
    "xmem_jittor/native/streaming.cc",
)


def run(*command: str | Path, cwd: Path) -> str:
    """Run a command; its output is shown when it fails."""
    ran = subprocess.run(
        [str(c) for c in command],
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if ran.returncode != 0:
        sys.exit(f"{' '.join(map(str, command))} failed:\n{ran.stdout}")
    return ran.stdout


def main() -> None:
    """Check the wheel."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run(
            *(sys.executable, "-m", "build", "--wheel", "--no-isolation", "-o", folder, ROOT),
            cwd=folder,
        )
        [wheel] = folder.glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            names = set(archive.namelist())
        missing = [path for path in MUST_CONTAIN if path not in names]
        if missing:
            sys.exit(f"{wheel.name} lacks {', '.join(missing)}")
        run(sys.executable, "-m", "venv", folder / "fresh", cwd=folder)
        binaries = folder / "fresh" / "bin"
        run(binaries / "python", "-m", "pip", "install", "--quiet", wheel, cwd=folder)
        listed = run(binaries / "xmem", "backends", cwd=folder)
        for word in ("torch", "jittor", "xmem-train[torch]", "xmem-train[jittor]"):
            if word not in listed.replace("\n", ""):
                sys.exit(f"`xmem backends` from the wheel does not mention {word}:\n{listed}")
        run(binaries / "python", "-c", "import xmem_torch, xmem_jittor", cwd=folder)
        print(f"{wheel.name}: {len(names)} files, installs into a fresh environment and runs.")


if __name__ == "__main__":
    main()
