"""How much memory is free on the GPU in use, from the driver itself.

Through CUDA's driver library, which numbers devices as the process sees them (NVML numbers them
as the machine has them, whatever CUDA_VISIBLE_DEVICES says).
"""

from __future__ import annotations

import ctypes


def free_device_bytes() -> int | None:
    """Return the bytes that are free on the current GPU, or None without a usable driver.

    The current one is that of this thread's CUDA context, or the first.
    """
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    if cuda.cuInit(0) != 0:
        return None
    current = ctypes.c_void_p()
    if cuda.cuCtxGetCurrent(ctypes.byref(current)) == 0 and current.value:
        return _free(cuda)
    device, context = ctypes.c_int(), ctypes.c_void_p()
    if cuda.cuDeviceGet(ctypes.byref(device), 0) != 0:
        return None
    # The context that frameworks use; it takes memory itself, so it is made before counting.
    if cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device) != 0:
        return None
    popped = ctypes.c_void_p()
    cuda.cuCtxPushCurrent_v2(context)
    try:
        return _free(cuda)
    finally:
        cuda.cuCtxPopCurrent_v2(ctypes.byref(popped))
        cuda.cuDevicePrimaryCtxRelease_v2(device)


def _free(cuda: ctypes.CDLL) -> int | None:
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    found: int = cuda.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total))
    return free.value if found == 0 else None
