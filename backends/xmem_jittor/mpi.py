"""MPI for Jittor: its compiler wrapper, found before Jittor is imported.

Jittor 1.3.11 takes OMPI_COMM_WORLD_SIZE for the sign that mpirun has started it, and builds a
module of its own with mpicc then. Without one its import ends in an AttributeError; with one of
another MPI than the launcher's every process is alone.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

from xmem.errors import BackendUnavailableError

_SIGN = "OMPI_COMM_WORLD_SIZE"
_LAUNCHERS = ("mpirun", "mpiexec", "prterun", "prte", "prted", "orterun", "orted")
_ANCESTORS = 8
_is_ours = False
_REMEDY = (
    "Install the one of pip (pip install 'xmem-train[distributed]') or the system's (Debian,"
    " Ubuntu: apt-get install libopenmpi-dev), or name it in the environment variable mpicc_path"
)


def is_launched() -> bool:
    """Say whether mpirun (of Open MPI) has started this process."""
    return _SIGN in os.environ


def count() -> int:
    """Return how many processes mpirun has started."""
    return int(os.environ.get(_SIGN, "1"))


def prepare() -> None:
    """Set the environment for an import of Jittor.

    Raises:
        BackendUnavailableError: inside of mpirun there is no mpicc, or the user wants no MPI there.
    """
    global _is_ours
    if not is_launched():
        if "use_mpi" not in os.environ:
            os.environ["use_mpi"] = "0"  # else it builds its MPI module wherever mpicc is
            _is_ours = True
        return
    if os.environ.get("use_mpi", "1") != "1":
        raise BackendUnavailableError(
            f"mpirun has started this process, and use_mpi={os.environ['use_mpi']!r} is in the"
            " environment: Jittor's import fails so. Take it away, or start the script without"
            " mpirun."
        )
    wrapper = os.environ.get("mpicc_path") or find_wrapper()
    if wrapper is None:
        raise BackendUnavailableError(
            f"mpirun has started this process, and there is no mpicc to build Jittor's MPI module"
            f" with. {_REMEDY}."
        )
    if shutil.which(wrapper) is None:
        raise BackendUnavailableError(
            f"mpicc_path is {wrapper!r}, and there is no such program. {_REMEDY}."
        )
    os.environ["mpicc_path"] = wrapper
    # Waits inside of MPI (Jittor's own operations, the end of the process) give the processor
    # away: there may be more ranks than processors.
    os.environ.setdefault("OMPI_MCA_mpi_yield_when_idle", "1")


def tidy() -> None:
    """Take away, after the import, what processes that this one starts with mpirun must not see."""
    global _is_ours
    if _is_ours:
        os.environ.pop("use_mpi", None)
    _is_ours = False


def find_wrapper() -> str | None:
    """Return mpicc: the launcher's own, that of this environment, or the one on PATH."""
    places = [_launcher_folder(), Path(sys.executable).parent]
    for place in places:
        if place is not None and (place / "mpicc").is_file():
            return str(place / "mpicc")
    return shutil.which("mpicc")


def _launcher_folder() -> Path | None:
    """Return where the launcher lies that has started this process, itself or through others."""
    process = os.getpid()
    for _ in range(_ANCESTORS):
        try:
            fields = Path(f"/proc/{process}/stat").read_text(encoding="utf-8", errors="replace")
            process = int(fields.rpartition(")")[2].split()[1])
            program = Path(f"/proc/{process}/exe").readlink()
        except (OSError, ValueError, IndexError):
            return None
        if program.name in _LAUNCHERS:
            return program.parent
    return None
