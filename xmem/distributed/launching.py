"""Start the ranks of a script: torchrun or mpirun, whichever the backend needs.

Each rank has a keeper (`keeping`), through which `supervising` ends them all together.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from xmem.distributed import keeping
from xmem.distributed.supervising import Outcome, Supervisor
from xmem.errors import DistributedError, UsageError

_RANK_VARIABLES = {"torchrun": "RANK", "mpirun": "OMPI_COMM_WORLD_RANK"}
_SHARED_MEMORY = "/dev/shm"
_SHARED_MEMORY_BYTES = 32 << 20  # for each rank: MPI's segments, with room to spare
# Shared memory, else loopback: no rank of this command is on another host. PRRTE 3.0's own port
# cannot be kept to loopback (prte_if_include=lo: "no network interfaces were found").
_MPI_SETTINGS = {
    "OMPI_MCA_btl_tcp_if_include": "lo",
    "OMPI_MCA_pml": "ob1",
}


@dataclass(frozen=True)
class Job:
    """What is started.

    Attributes:
        backend: the backend's name.
        launcher: "torchrun" or "mpirun".
        ranks: how many processes.
        script: what stands behind `python`: a file or `-m module`, and its arguments.
        timeout_seconds: the default of `xmem.distributed.init`, or None for its own.
        grace_seconds: how long ranks may take to end by themselves when one has failed, or after a
            signal.
    """

    backend: str
    launcher: str
    ranks: int
    script: tuple[str, ...]
    timeout_seconds: float | None = None
    grace_seconds: float = 5.0


def command_for(launcher: str, ranks: int, script: Sequence[str]) -> list[str]:
    """Return the command that starts `python script...` on a number of ranks of this host.

    Raises:
        DistributedError: the launcher is not installed; it says how to get it.
    """
    if launcher == "torchrun":
        return [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--no-python",
            f"--nproc-per-node={ranks}",
            sys.executable,
            *script,
        ]
    return [
        find_mpirun(),
        "--allow-run-as-root",
        "--oversubscribe",
        "--bind-to",
        "none",
        "-n",
        str(ranks),
        sys.executable,
        *script,
    ]


def environment_for(launcher: str) -> Mapping[str, str]:
    """Return the environment of the ranks."""
    folder = str(Path(sys.executable).parent)  # has mpirun and mpicc, in a virtual environment
    found = {**os.environ, "PATH": folder + os.pathsep + os.environ.get("PATH", "")}
    if launcher == "mpirun":
        return {**_MPI_SETTINGS, **found}  # what the user has set wins
    return found


def find_mpirun() -> str:
    """Return the path of mpirun: beside this Python, else on PATH.

    Raises:
        DistributedError: there is none.
    """
    beside = Path(sys.executable).parent / "mpirun"
    found = str(beside) if beside.is_file() else shutil.which("mpirun")
    if found is None:
        raise DistributedError(
            "there is no mpirun, beside this Python or on PATH. Install Open MPI:"
            " pip install 'xmem-train[distributed]', or the system's (Debian, Ubuntu:"
            " apt-get install libopenmpi-dev openmpi-bin)"
        )
    return found


def launcher_version(launcher: str) -> str:
    """Return the version of a launcher, e.g. "mpirun (Open MPI) 5.0.11".

    Raises:
        DistributedError: it is missing, does not run, or is another MPI's.
    """
    if launcher == "torchrun":
        from importlib import metadata

        return f"torchrun of torch {metadata.version('torch')}"
    path = find_mpirun()
    try:
        ran = subprocess.run(
            [path, "--version"], capture_output=True, text=True, timeout=30, check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise DistributedError(
            f"{path} does not run: {error}. Install Open MPI anew:"
            " pip install --force-reinstall 'xmem-train[distributed]'"
        ) from error
    first = (ran.stdout.splitlines() or [""])[0]
    if "Open MPI" not in first:
        raise DistributedError(
            f"{path} is not Open MPI's but {first!r}; Jittor's ranks are started by Open MPI:"
            " pip install 'xmem-train[distributed]'"
        )
    return first


def launch(job: Job, *, output: IO[bytes], errors: IO[bytes]) -> Outcome:
    """Run a job to its end: nothing of it is left afterwards, whatever becomes of it.

    Args:
        job: what to start.
        output: where the ranks' stdout goes, each line behind "[rank] ".
        errors: the same for stderr.

    Raises:
        UsageError: a number of ranks below 1, seconds that are none, or an unknown launcher.
        DistributedError: the launcher is missing, or does not start the ranks; or what they print
            cannot be written.
    """
    _check(job)
    if job.launcher == "mpirun":
        launcher_version(job.launcher)
    folder = _made_folder(job.ranks)
    try:
        address = f"@xmem-launch-{secrets.token_hex(8)}"
        if sys.platform != "linux":
            address = str(Path(folder) / "socket")
        secret = secrets.token_hex(16)
        keeper = ["-I", keeping.__file__, address, *job.script]
        with Supervisor(address, secret, job.ranks, job.grace_seconds) as supervisor:
            return supervisor.run(
                command_for(job.launcher, job.ranks, keeper),
                _environment(job, folder, secret),
                output=output,
                errors=errors,
            )
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _check(job: Job) -> None:
    if job.ranks < 1:
        raise UsageError(f"{job.ranks} ranks: give a number from 1")
    if job.launcher not in _RANK_VARIABLES:
        raise UsageError(
            f"backend {job.backend!r} has no launcher: its ranks cannot be started. Those of"
            " 'torch' and 'jittor' can"
        )
    if not (math.isfinite(job.grace_seconds) and job.grace_seconds >= 0):
        raise UsageError(f"grace is {job.grace_seconds}: give a number of seconds from 0, e.g. 5")
    if job.timeout_seconds is not None:
        from xmem.distributed.world import given_timeout

        given_timeout(job.timeout_seconds)


def _environment(job: Job, folder: str, secret: str) -> dict[str, str]:
    """Return the launcher's environment, which says what the ranks' is.

    The launchers' own files go to a folder that is removed: torchrun leaves one behind every time,
    and mpirun when it is killed.
    """
    from xmem.distributed.world import LAUNCHED_VARIABLE, TIMEOUT_VARIABLE

    found = dict(environment_for(job.launcher))
    threads = max(1, _processors() // job.ranks)
    found.setdefault("OMP_NUM_THREADS", str(threads))  # torchrun's own default is 1
    found.setdefault("PYTHONUNBUFFERED", "1")  # lines come as they are printed
    if job.launcher == "mpirun":
        found.setdefault("OMPI_MCA_btl_sm_backing_directory", folder)
    rank_variables: dict[str, str | None] = {
        "TMPDIR": os.environ.get("TMPDIR"),
        LAUNCHED_VARIABLE: f"{job.ranks} {job.backend}",
    }
    if job.timeout_seconds is not None:
        rank_variables[TIMEOUT_VARIABLE] = f"{job.timeout_seconds:g}"
    told = {
        "folder": folder,
        "secret": secret,
        "rank_variable": _RANK_VARIABLES[job.launcher],
        "environment": rank_variables,
    }
    return {**found, "TMPDIR": folder, keeping.ENVIRONMENT: json.dumps(told)}


def _processors() -> int:
    """Return how many processors this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _made_folder(ranks: int) -> str:
    """Make the folder of the launchers' own files: in shared memory, if there is room.

    Raises:
        DistributedError: it cannot be made anywhere.
    """
    prefix = f"xmem-launch-{os.getpid()}-"
    with contextlib.suppress(OSError):  # there is none, or it is not for us
        if shutil.disk_usage(_SHARED_MEMORY).free >= ranks * _SHARED_MEMORY_BYTES:
            return tempfile.mkdtemp(prefix=prefix, dir=_SHARED_MEMORY)
    try:
        return tempfile.mkdtemp(prefix=prefix)
    except OSError as error:
        raise DistributedError(
            f"the launcher's files have no place: {error}. Let the environment variable TMPDIR name"
            " a folder that can be written to"
        ) from error
