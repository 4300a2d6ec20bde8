"""What the system says of this process: bytes on the host and on the GPU."""

from __future__ import annotations

import os
from pathlib import Path


def peak_process_bytes() -> int | None:
    """Return the resident high-water mark of this process in bytes (VmHWM), or None.

    VmHWM and not ru_maxrss: a child inherits its parent's ru_maxrss across fork and exec.
    """
    return _status_bytes("VmHWM")


def process_bytes() -> int | None:
    """Return what is resident of this process now, in bytes (VmRSS), or None."""
    return _status_bytes("VmRSS")


def _status_bytes(key: str) -> int | None:
    try:
        lines = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    for line in lines.splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    return None


def gpu_process_bytes() -> int | None:
    """Return the bytes that the driver counts for this process on all GPUs (NVML), or None.

    Needs the `nvidia-ml-py` distribution; None without it, without a driver, or where the
    driver does not tell (in some containers).
    """
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    try:
        total = 0
        for index in range(pynvml.nvmlDeviceGetCount()):
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            for entry in pynvml.nvmlDeviceGetComputeRunningProcesses(handle):
                if entry.pid == os.getpid() and entry.usedGpuMemory is not None:
                    total += int(entry.usedGpuMemory)
    except pynvml.NVMLError:
        return None
    else:
        return total or None
    finally:
        pynvml.nvmlShutdown()
