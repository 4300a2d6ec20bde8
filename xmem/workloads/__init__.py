"""The workloads: models, weights and data declared once, for every framework."""

from xmem.workloads.catalog import PRESETS, WORKLOADS, Workload, workload
from xmem.workloads.data import make_batch, make_weights

__all__ = ["PRESETS", "WORKLOADS", "Workload", "make_batch", "make_weights", "workload"]
