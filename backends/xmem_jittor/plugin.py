"""The hooks of the Jittor backend; light, imports neither Jittor nor NumPy."""

from __future__ import annotations

import platform
from typing import TYPE_CHECKING

from xmem.hookspecs import hookimpl
from xmem.protocols import Framework, Session

if TYPE_CHECKING:
    from xmem_jittor.checkpoint import Checkpoint
    from xmem_jittor.distributed import Distributed
    from xmem_jittor.measure import Measure
    from xmem_jittor.models import Models
    from xmem_jittor.offload import Offload
    from xmem_jittor.plans import Plans
    from xmem_jittor.pool import Pool
    from xmem_jittor.precision import Precision
    from xmem_jittor.quantize import Quantize
    from xmem_jittor.saved import Saved
    from xmem_jittor.training import Training


@hookimpl
def xmem_framework() -> Framework:
    """Say which framework this backend drives."""
    from xmem_jittor import onednn

    has_wheels = (platform.system(), platform.machine()) == ("Linux", "x86_64")
    return Framework(
        "jittor",
        "jittor",
        "pip install 'xmem-train[jittor]'",
        companions=(onednn.LIBRARY_WHEEL, onednn.HEADER_WHEEL) if has_wheels else (),
        first_run_note="Jittor compiles itself and every new kernel: the first run of each case"
        " takes minutes, later ones take the kernels from its cache",
        launcher="mpirun",
    )


@hookimpl
def xmem_open(device: str) -> Session:
    """Prepare the environment, import Jittor and choose the device."""
    from xmem_jittor import environment

    return environment.open_session(device)


@hookimpl
def xmem_measure(session: Session) -> Measure:
    """Count bytes exactly."""
    from xmem_jittor.measure import Measure

    return Measure()


@hookimpl
def xmem_checkpoint(session: Session) -> Checkpoint:
    """Recompute instead of keeping."""
    from xmem_jittor.checkpoint import Checkpoint

    return Checkpoint()


@hookimpl
def xmem_precision(session: Session) -> Precision:
    """Compute in half precision."""
    from xmem_jittor.precision import Precision

    return Precision()


@hookimpl
def xmem_training(session: Session) -> Training:
    """Run the steps of a training loop under one name."""
    from xmem_jittor.training import Training

    return Training()


@hookimpl
def xmem_models(session: Session) -> Models:
    """Build the conformance workloads in Jittor."""
    from xmem_jittor.models import Models

    return Models()


@hookimpl
def xmem_plans(session: Session) -> Plans:
    """Play plans as one operation on the lazy graph."""
    from xmem_jittor.plans import Plans

    return Plans(session.device)


@hookimpl
def xmem_saved(session: Session) -> Saved:
    """Pack what backward will read, through a walk over an unexecuted backward."""
    from xmem_jittor.saved import Saved

    return Saved(session.device)


@hookimpl
def xmem_quantize(session: Session) -> Quantize:
    """Keep optimizer states and weights in few bits."""
    from xmem_jittor.quantize import Quantize

    return Quantize(session.device)


@hookimpl
def xmem_pool(session: Session) -> Pool:
    """Control Jittor's pool through our subclass of it."""
    from xmem_jittor.pool import Pool

    return Pool(session.device)


@hookimpl
def xmem_distributed(session: Session) -> Distributed:
    """Reduce, gather and shard over MPI."""
    from xmem_jittor.distributed import Distributed

    return Distributed(session.device)


@hookimpl
def xmem_offload(session: Session) -> Offload:
    """Keep optimizer states and parameters away from the device."""
    from xmem_jittor.offload import Offload

    return Offload(session.device)
