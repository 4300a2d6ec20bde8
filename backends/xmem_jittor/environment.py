"""What has to be set before Jittor is imported, and the import itself.

Jittor 1.3.11 reads environment variables at import. What the user has set always wins; the rest
is set here: no CUDA where there is no driver (a Jittor with CUDA aborts the process there), MPI
inside of mpirun and only there, no surprise import of PyTorch, oneDNN from the wheels, one cache
for all git branches, and little noise. The CUDA part is written from Jittor's source and from
builds against CUDA 13.0 without a GPU; it has not been run on one.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xmem.errors import BackendUnavailableError
from xmem.protocols import Session
from xmem_jittor import mpi, onednn, workarounds

_CORE_FILES = 300
_CORE_SECONDS = 210
_QUIET_SECONDS = 3.0
_STATUS_SECONDS = 10.0


@dataclass(frozen=True)
class Driver:
    """The NVIDIA driver.

    Attributes:
        devices: how many GPUs it offers.
        capability: the first one's compute capability, e.g. 90.
    """

    devices: int
    capability: int


def open_session(device: str) -> Session:
    """Prepare the environment, import Jittor quietly, and switch it to the device.

    Raises:
        BackendUnavailableError: "cuda" was asked for and cannot be had.
    """
    loaded = sys.modules.get("jittor")
    chosen = _device_of(loaded, device) if loaded is not None else prepare(device)
    try:
        jt = loaded if loaded is not None else import_jittor()
    finally:
        mpi.tidy()
    if chosen == "cuda":
        workarounds.patch_cuda_softmax(jt)
    jt.flags.use_cuda = int(chosen == "cuda")
    return Session(framework_version=jt.__version__, device=chosen)


def prepare(device: str) -> str:
    """Set the environment for an import of Jittor; returns the device that it will have.

    Args:
        device: "auto", "cpu" or "cuda".
    """
    chosen = _choose(device)
    if chosen == "cpu":
        # Without a driver a Jittor that finds nvcc fails to import, or dies of SIGABRT.
        os.environ.setdefault("nvcc_path", "")
    else:
        workarounds.set_cuda_environment(_nvcc(), _driver_or_raise().capability)
    mpi.prepare()
    os.environ.setdefault("FIX_TORCH_ERROR", "0")  # else `import jittor` imports torch
    # Jittor names its cache after the git branch that site-packages lies in, if it lies in one,
    # and compiles its core again on every other branch.
    os.environ.setdefault("cache_name", "default")
    onednn.prepare()
    return chosen


def _choose(device: str) -> str:
    if device == "cpu":
        return "cpu"
    driver = find_driver()
    if driver is not None and _nvcc():
        return "cuda"
    if device == "auto":
        return "cpu"
    if driver is None:
        raise BackendUnavailableError(
            "device 'cuda' was asked for, but there is no usable NVIDIA driver (libcuda.so.1 does"
            " not load, or shows no GPU). Install the driver, look at CUDA_VISIBLE_DEVICES, or use"
            " device='cpu'."
        )
    raise BackendUnavailableError(
        "device 'cuda' was asked for, but no nvcc was found, which Jittor compiles its kernels"
        " with. Install the CUDA toolkit and put nvcc on PATH, or name it in the environment"
        " variable nvcc_path."
    )


def _driver_or_raise() -> Driver:
    driver = find_driver()
    if driver is None:
        raise BackendUnavailableError("the NVIDIA driver has gone away")
    return driver


def _device_of(jt: Any, device: str) -> str:
    """Return the device for a Jittor that somebody else has already imported."""
    usable = bool(jt.has_cuda)
    if device == "cuda" and not usable:
        raise BackendUnavailableError(
            "device 'cuda' was asked for, but Jittor is already imported in this process without"
            " CUDA. Call xmem.use('jittor', device='cuda') in a fresh process, before anything"
            " imports jittor, and with no nvcc_path='' in the environment."
        )
    return "cuda" if usable and device != "cpu" else "cpu"


def find_driver() -> Driver | None:
    """Return the NVIDIA driver, or None if it does not load or shows no GPU."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    count = ctypes.c_int(0)
    if library.cuInit(0) != 0 or library.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return None
    if count.value == 0:
        return None
    major, minor = ctypes.c_int(0), ctypes.c_int(0)
    # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR of the first device
    library.cuDeviceGetAttribute(ctypes.byref(major), 75, 0)
    library.cuDeviceGetAttribute(ctypes.byref(minor), 76, 0)
    return Driver(devices=count.value, capability=10 * major.value + minor.value)


def _nvcc() -> str:
    """Return the nvcc that Jittor will find, or "" if there is none."""
    if "nvcc_path" in os.environ:
        return os.environ["nvcc_path"]
    found = shutil.which("nvcc")
    places = ("/usr/local/cuda/bin/nvcc", "/usr/bin/nvcc", "/opt/cuda/bin/nvcc")
    return found or next((place for place in places if Path(place).is_file()), "")


def import_jittor() -> Any:
    """Import Jittor without its log lines, and say so when it compiles its core for minutes."""
    with _quiet(), _progress():
        try:
            import jittor
            from jittor_utils import LOG
        except SystemExit as leaving:
            # Jittor 1.3.11 ends the process, with status 0, once it has compiled its utilities
            # again (compiler.py, check_cache_compile). Other ranks would wait for this one.
            raise BackendUnavailableError(
                "Jittor has compiled its utilities again, for another Jittor, compiler or cache"
                " folder than before, and needs a fresh process. Start the program once more."
            ) from leaving
    if _is_quiet():
        # Warnings ("has no gradient") are for the user again; only the import's noise was not.
        LOG.log_silent = 0
        jittor.flags.log_silent = 0
    return jittor


def _is_quiet() -> bool:
    return not any(name in os.environ for name in ("log_silent", "log_v"))


@contextmanager
def _quiet() -> Iterator[None]:
    """Hide Jittor's log of its import, which would also go to stdout, unless the user wants it."""
    if not _is_quiet():
        yield
        return
    os.environ["log_silent"] = "1"
    try:
        yield
    finally:
        del os.environ["log_silent"]


@contextmanager
def _progress() -> Iterator[None]:
    """Print a status line on stderr now and then, if the import takes long."""
    done = threading.Event()
    thread = threading.Thread(target=_report, args=(done,), name="xmem-progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _report(done: threading.Event) -> None:
    started = time.monotonic()
    if done.wait(_QUIET_SECONDS):
        return
    while True:
        sys.stderr.write(status_line(time.monotonic() - started, _object_files()))
        sys.stderr.flush()
        if done.wait(_STATUS_SECONDS):
            return


def status_line(seconds: float, files: int | None) -> str:
    """Return the line that says how far the compilation of Jittor's core is.

    Args:
        seconds: since the import began.
        files: how many parts of the core are compiled, or None where the core is there already.
    """
    if files is None:
        return (
            f"xmem: Jittor is being imported: {seconds:.0f} s; it compiles its operators, or waits"
            " for another process that compiles\n"
        )
    return (
        f"xmem: Jittor compiles its core for the first time: {seconds:.0f} s (about"
        f" {_CORE_SECONDS} s on two cores), {files} of about {_CORE_FILES} files\n"
    )


def _object_files() -> int | None:
    # Modules that are being imported; their cache paths are known before anything is compiled.
    for module in ("jittor.compiler", "jittor_utils"):
        folder = getattr(sys.modules.get(module), "cache_path", None)
        if folder is not None:
            if any(Path(folder).glob("jittor_core*.so")):
                return None
            return sum(1 for _ in Path(folder).glob("obj_files/*.o"))
    return None
