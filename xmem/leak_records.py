"""What a watch for leaks finds, and what it says about it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

LeakKind = Literal[
    "retained graph",
    "growing container",
    "growing tensor",
    "accumulation without a cut",
    "pending operations",
    "reference cycles",
    "unexplained",
]
NoteKind = Literal[
    "cache growth", "fragmentation", "bounded container", "counts", "lines", "stopped"
]

_TEXTS: dict[LeakKind, tuple[str, str]] = {
    "retained graph": (
        "tensors are kept with the graph that made them, and with it all that backward would read",
        "Keep the number, or the tensor without its graph: xmem.log_value(loss), loss.item() or"
        " loss.detach(); evaluate inside xmem.no_grad()",
    ),
    "growing container": (
        "tensors without a graph are added in each step and nothing takes them out",
        "Keep what is needed of them as numbers, move them to disk, or bound the container"
        " (collections.deque(maxlen=...), clear() per epoch). A cache that will stop growing: set"
        " warm_up= to the number of steps until then",
    ),
    "growing tensor": (
        "a tensor is made larger in each step, e.g. by concatenation",
        "Collect numbers instead, write parts of it away, or allocate its final size once",
    ),
    "accumulation without a cut": (
        "a value that goes from one step to the next carries the graph of all steps before it",
        "Cut it where a step begins: hidden = hidden.detach(); compute gradients without a graph of"
        " their own (no create_graph, no retain_graph)",
    ),
    "pending operations": (
        "operations were asked for and nothing has run them, so that they and their inputs wait",
        "Have the value computed once per step or every few steps: .sync(), or xmem.log_value() of"
        " a scalar",
    ),
    "reference cycles": (
        "garbage: reference cycles hold tensors until Python's garbage collector finds them",
        "Break the cycle (weakref, del, no attribute that leads back), or call gc.collect() every"
        " few steps",
    ),
    "unexplained": (
        "allocated bytes grow and no Python object that holds the new ones was found",
        "Look at what holds tensors outside of Python: graph nodes in custom functions, extensions,"
        " worker threads",
    ),
}


@dataclass(frozen=True)
class Leak:
    """Memory that grows by the same amount in each step and is never given back.

    Attributes:
        kind: what it is.
        bytes_per_step: how fast allocated bytes grow by it; 0 where only the graph's own nodes
            grow, which are not in the framework's allocator.
        since_step: the first step, as far as is known, that grew.
        found_at_step: when it was sure.
        owner: who holds it, for people; "" where that was not found.
        holder_type: the type of the object that holds it.
        tensor_count: how many entries that has, or None where it is no container.
        made_at: "file:line" that keeps it, or None.
        explanation: what happens.
        remedy: what to do.
        figure: the figure that showed it ("allocated_bytes", "tensors", "live_ops", ...).
    """

    kind: LeakKind
    bytes_per_step: int
    since_step: int
    found_at_step: int
    owner: str
    holder_type: str
    tensor_count: int | None
    made_at: str | None
    explanation: str
    remedy: str
    figure: str

    def __str__(self) -> str:
        at = f" (kept at {self.made_at})" if self.made_at else ""
        count = f" It has {self.tensor_count} entries." if self.tensor_count else ""
        owner = f" by {self.owner}{at}" if self.owner else ""
        return (
            f"leak of {self.bytes_per_step} bytes per step since step {self.since_step}{owner}:"
            f" {self.kind}: {self.explanation}.{count} {self.remedy}."
        )


@dataclass(frozen=True)
class Note:
    """What grows and is no leak, or what the watch could not do.

    Attributes:
        kind: what it is.
        text: for people.
    """

    kind: NoteKind
    text: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.text}"


def texts_of(kind: LeakKind) -> tuple[str, str]:
    """Return the explanation and the remedy of a kind of leak."""
    return _TEXTS[kind]
