"""xmem: train in the memory you have, on PyTorch or on Jittor.

`xmem.use("torch")` or `xmem.use("jittor")` picks the framework; model, optimizer and loop stay
native to it. Importing xmem imports no framework.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from xmem import optim
from xmem.activations import choose_bits, compress_activations
from xmem.api import (
    active,
    apply_checkpointing,
    backends,
    checkpoint,
    measure,
    observe,
    plan,
    profile,
    use,
)
from xmem.errors import (
    BackendError,
    BackendLoadError,
    BackendNotFoundError,
    BackendUnavailableError,
    CapabilityError,
    CollectiveMismatchError,
    CollectiveTimeoutError,
    CompositionError,
    DistributedError,
    InfeasibleBudgetError,
    InvalidScheduleError,
    LeakError,
    MeasurementError,
    NativeBuildError,
    NoActiveBackendError,
    OffloadError,
    OutOfMemoryError,
    PlanError,
    RankLostError,
    RecomputeMismatchError,
    ReportError,
    SchemaError,
    UsageError,
    XmemError,
    XmemWarning,
)
from xmem.layouts import KeyLayers
from xmem.loop import (
    accumulate,
    autocast,
    backward,
    cast_model,
    clip_grad_norm_,
    inference,
    log_value,
    no_grad,
    optimizer_step,
    zero_grad,
)
from xmem.optim import optimizer_in_backward, quantize_optimizer
from xmem.predicting import predict
from xmem.scaling import GradScaler
from xmem.weights import dequantize, quantize_weights

if TYPE_CHECKING:
    from xmem import distributed
    from xmem.batch_size import find_batch_size
    from xmem.leaks import watch_leaks
    from xmem.monitor import Monitor
    from xmem.offload.activations import offload_activations
    from xmem.offload.streaming import offload_optimizer, offload_parameters
    from xmem.out_of_memory import oom_guard
    from xmem.pool_control import pool

__version__ = "0.1.0"

# Imported when they are first used: `import xmem` is to take no time that a script would notice.
# Name and module; "" for a module of that name itself.
_LATER = {
    "Monitor": "xmem.monitor",
    "distributed": "",
    "find_batch_size": "xmem.batch_size",
    "offload_activations": "xmem.offload.activations",
    "offload_optimizer": "xmem.offload.streaming",
    "offload_parameters": "xmem.offload.streaming",
    "oom_guard": "xmem.out_of_memory",
    "pool": "xmem.pool_control",
    "watch_leaks": "xmem.leaks",
}

__all__ = [
    "BackendError",
    "BackendLoadError",
    "BackendNotFoundError",
    "BackendUnavailableError",
    "CapabilityError",
    "CollectiveMismatchError",
    "CollectiveTimeoutError",
    "CompositionError",
    "DistributedError",
    "GradScaler",
    "InfeasibleBudgetError",
    "InvalidScheduleError",
    "KeyLayers",
    "LeakError",
    "MeasurementError",
    "Monitor",
    "NativeBuildError",
    "NoActiveBackendError",
    "OffloadError",
    "OutOfMemoryError",
    "PlanError",
    "RankLostError",
    "RecomputeMismatchError",
    "ReportError",
    "SchemaError",
    "UsageError",
    "XmemError",
    "XmemWarning",
    "__version__",
    "accumulate",
    "active",
    "apply_checkpointing",
    "autocast",
    "backends",
    "backward",
    "cast_model",
    "checkpoint",
    "choose_bits",
    "clip_grad_norm_",
    "compress_activations",
    "dequantize",
    "distributed",
    "find_batch_size",
    "inference",
    "log_value",
    "measure",
    "no_grad",
    "observe",
    "offload_activations",
    "offload_optimizer",
    "offload_parameters",
    "oom_guard",
    "optim",
    "optimizer_in_backward",
    "optimizer_step",
    "plan",
    "pool",
    "predict",
    "profile",
    "quantize_optimizer",
    "quantize_weights",
    "use",
    "watch_leaks",
    "zero_grad",
]


def __getattr__(name: str) -> Any:
    """Import what is imported later (PEP 562)."""
    if name not in _LATER:
        raise AttributeError(f"module 'xmem' has no attribute {name!r}")
    module = _LATER[name]
    found = getattr(import_module(module), name) if module else import_module(f"xmem.{name}")
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *_LATER})
