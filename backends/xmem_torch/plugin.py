"""The hooks of the PyTorch backend; nothing here imports PyTorch before `xmem_open`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from xmem.hookspecs import hookimpl
from xmem.protocols import Framework, Session

if TYPE_CHECKING:
    from xmem_torch.checkpoint import Checkpoint
    from xmem_torch.distributed import Distributed
    from xmem_torch.measure import Measure
    from xmem_torch.models import Models
    from xmem_torch.offload import Offload
    from xmem_torch.plans import Plans
    from xmem_torch.pool import Pool
    from xmem_torch.precision import Precision
    from xmem_torch.quantize import Quantize
    from xmem_torch.saved import Saved
    from xmem_torch.training import Training


@hookimpl
def xmem_framework() -> Framework:
    """Name PyTorch."""
    return Framework("torch", "torch", "pip install 'xmem-train[torch]'", launcher="torchrun")


@hookimpl
def xmem_open(device: str) -> Session:
    """Import PyTorch and choose the device."""
    from xmem_torch.environment import open_session

    return open_session(device)


@hookimpl
def xmem_measure(session: Session) -> Measure:
    """Count bytes through our c10 allocator, the profiler or the CUDA counters."""
    from xmem_torch.measure import Measure

    return Measure(session.device)


@hookimpl
def xmem_checkpoint(session: Session) -> Checkpoint:
    """Recompute through torch.utils.checkpoint."""
    from xmem_torch.checkpoint import Checkpoint

    return Checkpoint()


@hookimpl
def xmem_precision(session: Session) -> Precision:
    """Compute in half through torch.autocast."""
    from xmem_torch.precision import Precision

    return Precision(session.device)


@hookimpl
def xmem_training(session: Session) -> Training:
    """Step through torch.optim."""
    from xmem_torch.training import Training

    return Training()


@hookimpl
def xmem_models(session: Session) -> Models:
    """Build workloads from torch.nn."""
    from xmem_torch.models import Models

    return Models(session.device)


@hookimpl
def xmem_plans(session: Session) -> Plans:
    """Play plans on one graph, through saved-tensor hooks."""
    from xmem_torch.plans import Plans

    return Plans(session.device)


@hookimpl
def xmem_saved(session: Session) -> Saved:
    """Pack what backward will read, through saved-tensor hooks."""
    from xmem_torch.saved import Saved

    return Saved(session.device)


@hookimpl
def xmem_quantize(session: Session) -> Quantize:
    """Keep optimizer states and weights in few bits."""
    from xmem_torch.quantize import Quantize

    return Quantize(session.device)


@hookimpl
def xmem_pool(session: Session) -> Pool:
    """Control our allocator, or PyTorch's on CUDA."""
    from xmem_torch.pool import Pool

    return Pool(session.device)


@hookimpl
def xmem_distributed(session: Session) -> Distributed:
    """Reduce, gather and shard through torch.distributed."""
    from xmem_torch.distributed import Distributed

    return Distributed(session.device)


@hookimpl
def xmem_offload(session: Session) -> Offload:
    """Keep optimizer states and parameters away from the device."""
    from xmem_torch.offload import Offload

    return Offload(session.device)
