"""Gradient checkpointing on Jittor: a call is taped as one operation and recomputed in backward.

Tianqi Chen, Bing Xu, Chiyuan Zhang, Carlos Guestrin, "Training Deep Nets with Sublinear Memory
Cost", 2016. Relies on `jt.tape_together` and the lazy graph of Jittor 1.3.11: `calls.py` makes one
call twice, `segments.py` joins calls to regions, `replay.py` draws random numbers twice the same,
`cost.py` measures.

Limits: a write into raw memory (`x.data[...] = `) between forward and backward cannot be seen, in
plain Jittor neither. Only first derivatives; second ones are refused. Gradients come once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jittor as jt

from xmem.records import Cost, Recompute
from xmem_jittor import cost, native
from xmem_jittor.segments import Segment, ambient, continued


class Checkpoint:
    """Recompute instead of keeping; see `xmem.protocols.Checkpoint`."""

    def __init__(self) -> None:
        self.gaps: Mapping[str, str] = {
            "second derivatives": "a region gives its inputs back when it is differentiated",
        }
        native.graph()  # compiled now, not inside the first step

    def checkpoint(
        self,
        function: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        how: Recompute,
    ) -> Any:
        """Call a function and keep only its inputs; under `jt.no_grad` this is a plain call."""
        now = ambient()
        if now is None:
            return function(*args, **kwargs)
        return Segment(now).add(function, args, kwargs, how)

    def checkpoint_block(
        self,
        function: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        how: Recompute,
        *,
        ends: bool,
    ) -> Any:
        """Add a call to the region that its inputs come from; it hands on tensors (`segments.py`).

        No placeholders as on PyTorch: Jittor's functions take nothing but tensors, which are lazy
        anyway.
        """
        now = ambient()
        if now is None:
            return function(*args, **kwargs)
        return continued(args, kwargs, now).add(function, args, kwargs, how, ends=ends)

    def obstacle(self, module: Any) -> str | None:
        """None: Jittor has no module that cannot be called twice."""
        return None

    def cost(
        self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Cost:
        """Count what is allocated when forward has run, in one execution with backward."""
        return cost.measured(function, args, kwargs)

    def is_module(self, value: Any) -> bool:
        """Say whether a value is a jt.Module."""
        return isinstance(value, jt.Module)

    def children(self, module: Any) -> Sequence[tuple[str, Any]]:
        """Return the direct submodules with their names."""
        held = module.layers if isinstance(module, jt.nn.Sequential) else module.__dict__
        return [(name, child) for name, child in held.items() if isinstance(child, jt.Module)]

    def is_container(self, module: Any) -> bool:
        """Sequential, which `nn.ModuleList` is another name of."""
        return isinstance(module, jt.nn.Sequential)

    def replace_forward(
        self, module: Any, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]
    ) -> Callable[[], None]:
        """Set an instance attribute `execute`, which `Module.__call__` finds first."""
        before = module.__dict__.get("execute")
        module.execute = wrap(OwnExecute(module) if before is None else before)

        def undo() -> None:
            if before is None:
                module.__dict__.pop("execute", None)
            else:
                module.execute = before

        return undo


@dataclass(frozen=True)
class OwnExecute:
    """A module's own `execute`, bound to it.

    Looked up in each call: autocast replaces the class's while it is in force. Not a method, which
    would be pickled by its name, and found again as the module's attribute.
    """

    __self__: Any

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run it."""
        module = self.__self__
        return type(module).execute(module, *args, **kwargs)
