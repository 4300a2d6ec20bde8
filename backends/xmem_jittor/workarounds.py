"""Every change to Jittor that lives longer than a call, with its version, reason and end.

All are for Jittor 1.3.11.0. Those for CUDA were found by compiling against the CUDA 13.0 toolkit
and a stand-in for its libraries; they have not been run on a GPU. What techniques patch while a
region runs (`jt.random`, `jt.grad`, operations under autocast) stands in their own modules and is
undone at the end of the region.
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Any

from xmem.errors import BackendUnavailableError


def set_cuda_environment(nvcc: str, capability: int) -> None:
    """Set what a build of Jittor with CUDA needs; variables the user has set stay.

    Args:
        nvcc: the path of the CUDA compiler.
        capability: the GPU's compute capability, e.g. 90.
    """
    os.environ.setdefault("nvcc_path", nvcc)
    os.environ.setdefault("cuda_archs", str(capability))
    # Each would be downloaded and built; none is needed for training.
    for name in ("use_cutt", "use_cutlass", "use_nccl"):
        os.environ.setdefault(name, "0")
    if not _has_cudnn8(nvcc):
        # Jittor loads cuDNN by the library names of version 8, and without them its convolutions
        # are missing; conv_opt=1 makes it use its generic kernels.
        # https://github.com/Jittor/jittor/issues/666
        os.environ.setdefault("conv_opt", "1")
    if toolkit_version(nvcc) >= (13, 0):
        _set_cuda13_environment()


def _set_cuda13_environment() -> None:
    # CUB of CUDA 13 needs C++17; Jittor passes -std=c++14. Gone when Jittor's nvcc_flags say 17.
    _append("NVCC_APPEND_FLAGS", "-std=c++17")
    # cudaDeviceProp lost computeMode and clockRate in CUDA 13; Jittor's helper_cuda.h reads both,
    # to choose among devices. Other integers of the struct stand in. Gone when
    # extern/cuda/inc/helper_cuda.h asks cudaDeviceGetAttribute instead.
    _append("cc_flags", "-DcomputeMode=major -DclockRate=minor")


def _append(name: str, value: str) -> None:
    before = os.environ.get(name, "")
    if value not in before:
        os.environ[name] = f"{before} {value} ".lstrip()


def _has_cudnn8(nvcc: str) -> bool:
    home = Path(nvcc).resolve().parent.parent
    folders = (home / "lib64", home / "targets/x86_64-linux/lib", Path("/usr/lib/x86_64-linux-gnu"))
    return any(list(folder.glob("libcudnn_ops_infer.so*")) for folder in folders)


def toolkit_version(nvcc: str) -> tuple[int, int]:
    """Return the version of the CUDA toolkit, e.g. (13, 0).

    Raises:
        BackendUnavailableError: nvcc does not run.
    """
    try:
        ran = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise BackendUnavailableError(
            f"the CUDA compiler {nvcc!r} does not run: {error}. Name a working one in the"
            " environment variable nvcc_path, or use device='cpu'."
        ) from error
    found = re.search(r"release (\d+)\.(\d+)", ran.stdout)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def patch_cuda_softmax(jt: Any) -> None:
    """Keep Jittor from its CUDA softmax kernel where that does not compile.

    It uses `cub::Max`, which CUDA 13 removed; its softmax of plain operations is taken instead.
    Gone when jittor/other/code_softmax.py no longer names cub::Max.
    """
    if toolkit_version(jt.compiler.nvcc_path) < (13, 0):
        return
    from jittor.other import code_softmax

    code_softmax.can_softmax_v1 = lambda *_args, **_kwargs: False
