"""Differentiate a call that has been recomputed, once.

The incoming gradient is fed to the recomputed output by an operation that passes it on, not by
(y * g).sum(), and waits for the recomputed output, or backward would be fused into it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jittor as jt

from xmem_jittor.graph import reached
from xmem_jittor.ordering import after
from xmem_jittor.regions import Feed


def differentiate(
    outputs: list[Any], gradients: Sequence[Any], targets: list[Any], *, gated: bool
) -> list[Any]:
    """Return the gradients of the targets, zeros where nothing flows.

    Not None there: Jittor 1.3.11 forgets what other operations have contributed to a gradient when
    one returns None for it (`grad = move(din)` in grad.cc).

    Args:
        outputs: of the call, recomputed.
        gradients: of the outputs; None where there is none.
        targets: the tensors.
        gated: let backward wait for the outputs.
    """
    pairs = [
        (output, gradient)
        for output, gradient in zip(outputs, gradients, strict=True)
        if gradient is not None and not output.is_stop_grad()
    ]
    flowing = reached([output for output, _ in pairs], targets)
    wanted = [target for target, flows in zip(targets, flowing, strict=True) if flows]
    if not wanted:
        return [_zeros(target) for target in targets]
    feed = Feed([after(g, output) if gated else g.detach() for output, g in pairs])
    loss = feed(*(output for output, _ in pairs))
    found = iter(jt.grad(loss, wanted, retain_graph=False))
    return [
        next(found).stop_fuse() if flows else _zeros(target)
        for target, flows in zip(targets, flowing, strict=True)
    ]


def _zeros(target: Any) -> Any:
    return jt.zeros(target.shape, target.dtype)
