"""The workloads: models, weights and data declared once, for every framework."""

from xmem.workloads.catalog import (
    DEFAULT_WORKLOADS,
    LEARNING_WORKLOADS,
    PRESETS,
    WORKLOADS,
    Workload,
    workload,
)
from xmem.workloads.data import make_batch, make_weights

__all__ = [
    "DEFAULT_WORKLOADS",
    "LEARNING_WORKLOADS",
    "PRESETS",
    "WORKLOADS",
    "Workload",
    "make_batch",
    "make_weights",
    "workload",
]
