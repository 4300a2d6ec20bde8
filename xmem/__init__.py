"""xmem: train in the memory you have, on PyTorch or on Jittor.

`xmem.use("torch")` or `xmem.use("jittor")` picks the framework; model, optimizer and loop stay
native to it. Importing xmem imports no framework.
"""

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

__version__ = "0.1.0"

__all__ = [
    "BackendError",
    "BackendLoadError",
    "BackendNotFoundError",
    "BackendUnavailableError",
    "CapabilityError",
    "CompositionError",
    "GradScaler",
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
    "inference",
    "log_value",
    "measure",
    "no_grad",
    "observe",
    "optim",
    "optimizer_in_backward",
    "optimizer_step",
    "plan",
    "predict",
    "profile",
    "quantize_optimizer",
    "quantize_weights",
    "use",
    "zero_grad",
]
