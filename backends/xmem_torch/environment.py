"""Import PyTorch and choose the device."""

from __future__ import annotations

from xmem.errors import BackendUnavailableError
from xmem.protocols import Session


def open_session(device: str) -> Session:
    """Return the session for "auto", "cpu" or "cuda".

    Raises:
        BackendUnavailableError: "cuda" was asked for and this PyTorch sees no GPU.
    """
    import torch

    cuda = torch.cuda.is_available()
    if device == "cuda" and not cuda:
        built = torch.version.cuda
        why = (
            f"it was built for CUDA {built}, and finds no usable GPU (torch.cuda.is_available()"
            " is False): check the driver with nvidia-smi"
            if built
            else "it is a CPU build: install a CUDA build from pytorch.org"
        )
        raise BackendUnavailableError(
            f"device 'cuda' is not available to PyTorch {torch.__version__}: {why}."
            ' Or use device="cpu".'
        )
    return Session(str(torch.__version__), "cuda" if cuda and device != "cpu" else "cpu")
