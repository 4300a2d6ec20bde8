"""Which workloads there are, and how large each is in each preset.

`quick`: seconds per case on two cores. `standard`: minutes. `paper`: the published sizes, for a
GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

from xmem.errors import UsageError, unknown
from xmem.workloads import models
from xmem.workloads.spec import Layer
from xmem.workloads.text import CHARACTERS

LossName = Literal["mse", "cross_entropy", "cross_entropy_channels"]
PRESETS = ("quick", "standard", "paper")


@dataclass(frozen=True)
class Workload:
    """A model, its data and its update rule.

    Attributes:
        name: e.g. "gpt2".
        preset: "quick", "standard" or "paper".
        model: the declaration.
        input_kind: "real" (normal numbers), "tokens" (ids below `classes`); and what there is to
            learn something from, new in every step: "text" (ids of characters, the targets are the
            next ones) and "patterns" (one picture for each class, under noise).
        input_shape: the batch's shape.
        target_shape: the target's shape.
        loss: the loss, see `xmem.protocols.Models.loss`.
        classes: classes or vocabulary; 0 for "mse".
        optimizer: the update rule, see `xmem.protocols.Training.make_optimizer`.
        learning_rate: its step.
        seed: where weights and data come from.
    """

    name: str
    preset: str
    model: Layer
    input_kind: Literal["real", "tokens", "text", "patterns"]
    input_shape: tuple[int, ...]
    target_shape: tuple[int, ...]
    loss: LossName
    classes: int
    optimizer: str = "adam"
    learning_rate: float = 1e-3
    seed: int = 20260


def _mlp(preset: str, *, depth: int, width: int, batch: int) -> Workload:
    shape = (batch, width)
    model = models.mlp(depth=depth, width=width)
    return Workload("mlp", preset, model, "real", shape, shape, "mse", 0, learning_rate=1e-4)


def _resnet(
    name: str, preset: str, *, width: int, image: int, batch: int, classes: int
) -> Workload:
    counts = {"resnet18": (2, 2, 2, 2), "resnet50": (3, 4, 6, 3)}[name]
    model = models.resnet(
        counts=counts, bottleneck=name == "resnet50", width=width, classes=classes
    )
    shape = (batch, 3, image, image)
    return Workload(
        name, preset, model, "real", shape, (batch,), "cross_entropy", classes, learning_rate=1e-4
    )


def _transformer(
    name: str,
    preset: str,
    *,
    layers: int,
    width: int,
    heads: int,
    vocabulary: int,
    sequence: int,
    batch: int,
) -> Workload:
    declare = {"bert": models.bert, "gpt2": models.gpt2}[name]
    model = declare(
        layers=layers, width=width, heads=heads, vocabulary=vocabulary, positions=sequence
    )
    shape = (batch, sequence)
    return Workload(name, preset, model, "tokens", shape, shape, "cross_entropy", vocabulary)


def _unet3d(preset: str, *, channels: int, levels: int, side: int, batch: int) -> Workload:
    model = models.unet3d(channels=channels, levels=levels, classes=3)
    space = (side,) * 3
    return Workload(
        "unet3d",
        preset,
        model,
        "real",
        (batch, 1, *space),
        (batch, *space),
        "cross_entropy_channels",
        3,
        # at 1e-3 PyTorch's float32 is 1.7e-4 from float64 after five steps, at 1e-4 1.3e-6
        learning_rate=1e-4,
    )


_SIZES: dict[str, tuple[Callable[..., Workload], dict[str, dict[str, Any]]]] = {
    "mlp": (
        _mlp,
        {
            "quick": {"depth": 16, "width": 256, "batch": 1024},
            "standard": {"depth": 24, "width": 256, "batch": 4096},
            "paper": {"depth": 48, "width": 1024, "batch": 16384},
        },
    ),
    "resnet18": (
        lambda preset, **size: _resnet("resnet18", preset, **size),
        {
            "quick": {"width": 16, "image": 64, "batch": 32, "classes": 10},
            "standard": {"width": 64, "image": 128, "batch": 8, "classes": 100},
            "paper": {"width": 64, "image": 224, "batch": 64, "classes": 1000},
        },
    ),
    "resnet50": (
        lambda preset, **size: _resnet("resnet50", preset, **size),
        {
            "quick": {"width": 16, "image": 64, "batch": 16, "classes": 10},
            "standard": {"width": 64, "image": 128, "batch": 4, "classes": 100},
            "paper": {"width": 64, "image": 224, "batch": 32, "classes": 1000},
        },
    ),
    "bert": (
        lambda preset, **size: _transformer("bert", preset, **size),
        {
            "quick": {
                "layers": 6, "width": 128, "heads": 4, "vocabulary": 512, "sequence": 128,
                "batch": 8,
            },
            "standard": {
                "layers": 12, "width": 256, "heads": 8, "vocabulary": 2048, "sequence": 128,
                "batch": 8,
            },
            "paper": {
                "layers": 24, "width": 1024, "heads": 16, "vocabulary": 30522, "sequence": 512,
                "batch": 8,
            },
        },
    ),
    "gpt2": (
        lambda preset, **size: _transformer("gpt2", preset, **size),
        {
            "quick": {
                "layers": 6, "width": 128, "heads": 4, "vocabulary": 512, "sequence": 128,
                "batch": 8,
            },
            "standard": {
                "layers": 12, "width": 256, "heads": 8, "vocabulary": 2048, "sequence": 256,
                "batch": 4,
            },
            "paper": {
                "layers": 12, "width": 768, "heads": 12, "vocabulary": 50257, "sequence": 1024,
                "batch": 4,
            },
        },
    ),
    "unet3d": (
        lambda preset, **size: _unet3d(preset, **size),
        {
            "quick": {"channels": 8, "levels": 3, "side": 32, "batch": 1},
            "standard": {"channels": 16, "levels": 4, "side": 48, "batch": 1},
            "paper": {"channels": 32, "levels": 4, "side": 128, "batch": 1},
        },
    ),
}  # fmt: skip

# Trained for hundreds of steps, to see where losses end.
_LEARNING: dict[str, tuple[Callable[..., Workload], dict[str, dict[str, Any]]]] = {
    "gpt2-text": (
        lambda preset, **size: replace(
            _transformer("gpt2", preset, vocabulary=CHARACTERS, **size),
            name="gpt2-text", input_kind="text",
        ),
        {
            "quick": {"layers": 2, "width": 64, "heads": 4, "sequence": 64, "batch": 16},
            "standard": {"layers": 6, "width": 256, "heads": 8, "sequence": 256, "batch": 16},
            "paper": {"layers": 12, "width": 768, "heads": 12, "sequence": 1024, "batch": 8},
        },
    ),
    "resnet18-patterns": (
        lambda preset, **size: replace(
            _resnet("resnet18", preset, **size),
            name="resnet18-patterns", input_kind="patterns", learning_rate=1e-3,
        ),
        {
            "quick": {"width": 8, "image": 32, "batch": 32, "classes": 10},
            "standard": {"width": 64, "image": 64, "batch": 32, "classes": 100},
            "paper": {"width": 64, "image": 224, "batch": 64, "classes": 1000},
        },
    ),
}  # fmt: skip
WORKLOADS: tuple[str, ...] = tuple(_SIZES)
"""Those whose memory is compared; every step is given the same batch."""
LEARNING_WORKLOADS: tuple[str, ...] = tuple(_LEARNING)
"""Those that are trained for many steps; every step is given a batch of its own."""
DEFAULT_WORKLOADS: tuple[str, ...] = ("mlp", "resnet18", "bert", "gpt2", "unet3d")
"""What a comparison runs where none is named: one of each kind of architecture."""


def workload(name: str, preset: str = "quick") -> Workload:
    """Return a workload by name and preset.

    Raises:
        UsageError: the workload or the preset does not exist.
    """
    known = {**_SIZES, **_LEARNING}
    if name not in known:
        raise UsageError(unknown("workload", name, known))
    if preset not in PRESETS:
        raise UsageError(unknown("preset", preset, PRESETS))
    make, sizes = known[name]
    return make(preset, **sizes[preset])
