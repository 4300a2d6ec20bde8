"""Weights and data from NumPy seeds: every framework starts from the same numbers."""

from __future__ import annotations

import math
import zlib
from typing import Any, TypeAlias

import numpy as np

from xmem.workloads.catalog import Workload
from xmem.workloads.spec import Parameter, parameters
from xmem.workloads.text import corpus

Array: TypeAlias = np.ndarray[Any, Any]


def _generator(workload: Workload, name: str) -> np.random.Generator:
    """Return a generator of its own for each name, so that adding one moves no other."""
    return np.random.default_rng([workload.seed, zlib.crc32(name.encode())])


def _start(parameter: Parameter, generator: np.random.Generator) -> Array:
    if parameter.start == "zeros":
        return np.zeros(parameter.shape, np.float32)
    if parameter.start == "constant":
        return np.full(parameter.shape, parameter.gain, np.float32)
    scale = 0.02 if parameter.start == "small" else parameter.gain / math.sqrt(parameter.fan_in)
    return (generator.standard_normal(parameter.shape, dtype=np.float32) * scale).astype(np.float32)


def make_weights(workload: Workload) -> dict[str, Array]:
    """Return every parameter of the model by name, float32."""
    return {
        name: _start(parameter, _generator(workload, name))
        for name, parameter in parameters(workload.model)
    }


def make_batch(workload: Workload, step: int = 0) -> tuple[Array, Array]:
    """Return inputs (float32, or int32 token ids) and targets (float32, or int32 classes).

    Args:
        workload: whose batch it is.
        step: which one, where each step has its own.
    """
    if workload.input_kind == "text":
        return _text(workload, step)
    if workload.input_kind == "patterns":
        return _patterns(workload, step)
    inputs = _generator(workload, "inputs")
    targets = _generator(workload, "targets")
    if workload.input_kind == "tokens":
        x: Array = inputs.integers(0, workload.classes, workload.input_shape, dtype=np.int32)
    else:
        x = inputs.standard_normal(workload.input_shape, dtype=np.float32)
    if workload.loss == "mse":
        return x, targets.standard_normal(workload.target_shape, dtype=np.float32)
    return x, targets.integers(0, workload.classes, workload.target_shape, dtype=np.int32)


def _text(workload: Workload, step: int) -> tuple[Array, Array]:
    batch, length = workload.input_shape
    characters = corpus()
    generator = _generator(workload, f"inputs {step}")
    starts = generator.integers(0, len(characters) - length - 1, batch)
    rows = characters[starts[:, None] + np.arange(length + 1)]
    return np.ascontiguousarray(rows[:, :-1]), np.ascontiguousarray(rows[:, 1:])


def _patterns(workload: Workload, step: int) -> tuple[Array, Array]:
    shape = workload.input_shape
    pictures = _generator(workload, "pictures").standard_normal(
        (workload.classes, *shape[1:]), dtype=np.float32
    )
    generator = _generator(workload, f"inputs {step}")
    classes = generator.integers(0, workload.classes, shape[0], dtype=np.int32)
    noise = generator.standard_normal(shape, dtype=np.float32)
    inputs = noise + _PATTERN * pictures[classes]
    wrong = generator.random(shape[0]) < _WRONG
    others = generator.integers(0, workload.classes, shape[0], dtype=np.int32)
    return inputs, np.where(wrong, others, classes)


_PATTERN = np.float32(0.5)
# So many labels say nothing: the loss ends on a plateau well above 0, where shares of it mean much.
_WRONG = 0.3
