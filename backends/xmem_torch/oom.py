"""Running out of memory on PyTorch: xmem's error, and how PyTorch's are recognised."""

from __future__ import annotations

import torch

from xmem import errors


class OutOfMemoryError(errors.OutOfMemoryError, torch.OutOfMemoryError):
    """xmem's error, which `except torch.OutOfMemoryError` catches too."""


# `DefaultCPUAllocator: not enough memory` is a plain RuntimeError: there is no type where our
# allocator is not in place. TorchScript keeps the text of the error inside it, and not its type.
_TEXTS = ("DefaultCPUAllocator: ", "torch.OutOfMemoryError: ", "CPU out of memory. ")


def is_out_of_memory(error: BaseException) -> bool:
    """Say whether an error means that memory ran out; by type, where there is one."""
    if isinstance(error, (errors.OutOfMemoryError, torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _TEXTS)
