"""xmem: train in the memory you have, on PyTorch or on Jittor.

`xmem.use("torch")` or `xmem.use("jittor")` picks the framework; model, optimizer and loop stay
native to it. Importing xmem imports no framework.
"""

from xmem.api import (
    active,
    apply_checkpointing,
    autocast,
    backends,
    backward,
    checkpoint,
    measure,
    observe,
    optimizer_step,
    use,
    zero_grad,
)
from xmem.errors import (
    BackendError,
    BackendLoadError,
    BackendNotFoundError,
    BackendUnavailableError,
    CapabilityError,
    CompositionError,
    InfeasibleBudgetError,
    InvalidScheduleError,
    MeasurementError,
    NativeBuildError,
    NoActiveBackendError,
    OutOfMemoryError,
    PlanError,
    RecomputeMismatchError,
    ReportError,
    SchemaError,
    UsageError,
    XmemError,
    XmemWarning,
)
from xmem.layouts import KeyLayers

__version__ = "0.1.0"

__all__ = [
    "BackendError",
    "BackendLoadError",
    "BackendNotFoundError",
    "BackendUnavailableError",
    "CapabilityError",
    "CompositionError",
    "InfeasibleBudgetError",
    "InvalidScheduleError",
    "KeyLayers",
    "MeasurementError",
    "NativeBuildError",
    "NoActiveBackendError",
    "OutOfMemoryError",
    "PlanError",
    "RecomputeMismatchError",
    "ReportError",
    "SchemaError",
    "UsageError",
    "XmemError",
    "XmemWarning",
    "__version__",
    "active",
    "apply_checkpointing",
    "autocast",
    "backends",
    "backward",
    "checkpoint",
    "measure",
    "observe",
    "optimizer_step",
    "use",
    "zero_grad",
]
