"""What backends and xmem tell each other: small frozen records.

The Protocols in `xmem.protocols` say who makes them and who reads them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

Category = Literal[
    "parameter", "buffer", "gradient", "optimizer", "input", "activation", "temporary", "other"
]
CATEGORIES: tuple[Category, ...] = (
    "temporary",
    "parameter",
    "buffer",
    "gradient",
    "optimizer",
    "input",
    "activation",
    "other",
)
"""All categories, in the order of their native codes (`temporary` is 0: what nobody claimed).

`activation`: allocated during forward and alive when backward begins. `temporary`: all else that
the block allocated, recomputed activations and scratch inside kernels included. `other`: alive at
entry and owned by nothing that was passed to `xmem.measure`.
"""


@dataclass(frozen=True)
class Framework:
    """How to recognise a framework without importing it.

    Attributes:
        module: the import name, e.g. "torch".
        distribution: the name on the package index, for its version.
        install_hint: the command that installs it.
        companions: distributions that it is slow or incomplete without on this system.
        first_run_note: what a person should know before it runs for the first time.
        launcher: what starts its ranks, "torchrun" or "mpirun"; "" where nothing does.
    """

    module: str
    distribution: str
    install_hint: str
    companions: tuple[str, ...] = ()
    first_run_note: str = ""
    launcher: str = ""


@dataclass(frozen=True)
class Session:
    """A framework that has been imported and made ready.

    Attributes:
        framework_version: the framework's own version.
        device: the device in use, "cpu" or "cuda".
    """

    framework_version: str
    device: str


@dataclass(frozen=True)
class Counters:
    """The allocator's counters at one instant, in bytes; what it cannot tell is None.

    Attributes:
        allocated_bytes: requested by live tensors now.
        peak_allocated_bytes: the highest `allocated_bytes` since `reset_peak`, scratch included;
            None where the source knows it inside `xmem.measure` only.
        reserved_bytes: held by the framework's pool from the system or driver.
        peak_reserved_bytes: the highest `reserved_bytes` since `reset_peak`.
        allocation_count: allocations since the meter was installed.
        out_of_memory_count: requests refused since the meter was installed.
    """

    allocated_bytes: int
    peak_allocated_bytes: int | None
    reserved_bytes: int | None
    peak_reserved_bytes: int | None
    allocation_count: int | None
    out_of_memory_count: int | None


@dataclass(frozen=True)
class Tagged:
    """What `Measure.tag` found.

    Attributes:
        tensors: how many distinct allocations now carry the category.
        size_bytes: their bytes.
        untracked_bytes: bytes of tensors that the meter did not allocate (made before
            `xmem.use`, shared memory, memory maps, NumPy's).
    """

    tensors: int
    size_bytes: int
    untracked_bytes: int


@dataclass(frozen=True)
class Recompute:
    """How a function is recomputed.

    Attributes:
        name: what errors call it, e.g. the path of a module; "" for the function's own name.
        preserve_rng: the second pass draws the same random numbers as the first.
        check_values: compare samples of the values of both passes; a debugging aid that waits
            for them.
    """

    name: str = ""
    preserve_rng: bool = True
    check_values: bool = False


@dataclass(frozen=True)
class Cost:
    """What keeping the inside of a module costs.

    Attributes:
        saved_bytes: what its forward leaves for backward, beyond its inputs and outputs.
        forward_seconds: the time of one forward pass.
    """

    saved_bytes: int
    forward_seconds: float


@dataclass(frozen=True)
class Cast:
    """What became of a model that was cast to half precision.

    Attributes:
        names: the paths of the parameters and buffers that were cast.
        saved_bytes: what they take less.
        master_bytes: the float32 masters that the optimizer holds.
        undo: puts float32 back, from the masters where there are any.
    """

    names: tuple[str, ...]
    saved_bytes: int
    master_bytes: int
    undo: Callable[[], None]


@dataclass(frozen=True)
class Mark:
    """What one operation of a schedule took, in a step that was traced; see `xmem.playing`.

    Attributes:
        op: its number in the script; `HEAD`: what came before the first stage; `TAIL`: from the
            end of the last stage's forward to its gradient, the loss included; `REST`: what came
            after the last backward.
        before_bytes: allocated when it began.
        peak_bytes: the most that was allocated while it ran.
        after_bytes: allocated when it had ended.
        gradient_bytes: of `before_bytes`, gradients of parameters that this step has made.
        seconds: how long it took.
    """

    op: int
    before_bytes: int
    peak_bytes: int
    after_bytes: int
    gradient_bytes: int
    seconds: float


HEAD, TAIL, REST = -1, -2, -3
"""Numbers of marks that belong to no operation."""


@dataclass(frozen=True)
class Step:
    """A step that was run aside: forward and backward, no update.

    Attributes:
        before_bytes: allocated when it began.
        peak_bytes: the most that was allocated in it.
        gradient_bytes: of the gradients that it made.
        seconds: how long it took.
        loss: its value.
        gradients: of each trained parameter by name, as float32 arrays, where asked for.
    """

    before_bytes: int
    peak_bytes: int
    gradient_bytes: int
    seconds: float
    loss: float
    gradients: Any = None
