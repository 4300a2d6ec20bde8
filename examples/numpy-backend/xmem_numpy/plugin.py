"""The hooks. Light: NumPy is imported when the backend is opened, not before."""

from __future__ import annotations

from typing import Any

from xmem.errors import BackendUnavailableError
from xmem.hookspecs import hookimpl
from xmem.protocols import Framework, Session


@hookimpl
def xmem_framework() -> Framework:
    """Name the framework and how to get it."""
    return Framework("numpy", "numpy", "pip install numpy")


@hookimpl
def xmem_open(device: str) -> Session:
    """Import the framework."""
    import numpy as np

    if device == "cuda":
        raise BackendUnavailableError('NumPy has no GPU. Use device="cpu".')
    return Session(np.__version__, "cpu")


@hookimpl
def xmem_measure(session: Session) -> Any:
    """Count bytes."""
    from xmem_numpy.measure import Measure

    return Measure()


@hookimpl
def xmem_training(session: Session) -> Any:
    """Step."""
    from xmem_numpy.training import Training

    return Training()


@hookimpl
def xmem_models(session: Session) -> Any:
    """Build workloads."""
    from xmem_numpy.models import Models

    return Models()
