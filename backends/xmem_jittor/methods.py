"""Methods of `jt.optim.Optimizer` that are replaced while something of xmem's needs that.

Started by mpirun, Jittor 1.3.11 averages gradients in every `backward` of an optimizer, one by one,
and sends parameters around each 10000 steps. Neither is done for an optimizer that is averaged by
xmem or holds shares of parameters; all others are left to Jittor's own methods.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import jittor as jt

from xmem.errors import UsageError
from xmem_jittor import gradients, shares, streamed_steps
from xmem_jittor.averaging import Averaging, averaging_of, known, register

# While methods are replaced: Jittor's own, and how many there are who need that.
_originals: dict[str, Callable[..., Any]] = {}
_holders = 0


def hold(holder: Any) -> None:
    """Replace methods of `jt.optim.Optimizer` while an object lives.

    `backward` notes an optimizer's `n_step` whenever its first gradients come (the updates of a
    loop of Jittor's own are seen by nothing else, and for which optimizer a loss was scaled, only
    the call tells) and lets gradients be averaged by us; `clip_grad_norm` knows of shares;
    `pre_step` refuses gradients that have not been averaged, and to update parameters that are
    away (`streamed_steps.py`).
    """
    global _holders
    if not _holders:
        kind = jt.optim.Optimizer
        for replaced in (backward_of, clip_grad_norm_of, pre_step_of):
            name = replaced.__name__.removesuffix("_of")
            _originals[name] = vars(kind)[name]
            setattr(kind, name, _method(name, replaced))
    _holders += 1
    weakref.finalize(holder, _let_go).atexit = False


def _method(name: str, replacement: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(_originals[name])
    def method(*args: Any, **kwargs: Any) -> Any:
        return replacement(*args, **kwargs)

    return method


def _let_go() -> None:
    global _holders
    _holders -= 1
    if not _holders:
        for name in list(_originals):
            setattr(jt.optim.Optimizer, name, _originals.pop(name))


def average(optimizer: Any, averaging: Averaging) -> None:
    """Let an optimizer's gradients be averaged, once, in whatever backward it is asked for."""
    register(optimizer, averaging)
    hold(optimizer)


def backward_of(optimizer: Any, loss: Any, retain_graph: bool = False) -> None:
    """See `hold`; the rest is as in `jt.optim.Optimizer.backward`."""
    adds = gradients.are_new(optimizer)
    gradients.note_count(optimizer)
    averaging = averaging_of(optimizer)
    if averaging is None:
        _originals["backward"](optimizer, loss, retain_graph)
        return
    places = [
        (group, i)
        for group in optimizer.param_groups
        for i, p in enumerate(group["params"])
        if not p.is_stop_grad()
    ]
    parameters = [group["params"][i] for group, i in places]
    inputs = [v for v in optimizer._Optimizer__input_params if not v.is_stop_grad()]
    jt.sync([*parameters, *inputs])
    found = jt.grad(loss, [*parameters, *inputs], retain_graph)[: len(parameters)]
    found = [gradient.stop_grad() for gradient in found]
    optimizer.n_step += 1
    gradients.make_room(optimizer)
    held = [group["grads"][i] for group, i in places]
    _put(averaging, parameters, found, held, adds=adds)
    optimizer._Optimizer__zero_grad = False


def _put(
    averaging: Averaging, parameters: list[Any], found: list[Any], held: list[Any], *, adds: bool
) -> None:
    """Average new gradients, and with them what has not been; add them to those that are held."""
    if adds and averaging.pending:
        found = [new + old for new, old in zip(found, held, strict=True)]
        adds = False
    averaging.pending = bool(averaging.apart)
    if not averaging.apart:
        numbers = _to_average(parameters)
        averages = averaging.average([found[i] for i in numbers])
        for i, gradient in zip(numbers, averages, strict=True):
            found[i] = gradient
    for old in held:
        new = found.pop(0)  # so that nothing else holds it
        old.update(new + old if adds else new)


def _to_average(parameters: Sequence[Any]) -> list[int]:
    """Return which gradients are averaged: not those of shares, nor beside parts of layers."""
    kinds = shares.kinds(parameters)
    if kinds & {"part", "equal"}:
        return []
    return [
        i
        for i, p in enumerate(parameters)
        if (share := shares.of(p)) is None or share.kind != "owned"
    ]


def clip_grad_norm_of(optimizer: Any, max_norm: float, norm_type: float = 2) -> None:
    """See `hold`."""
    if not gradients.are_new(optimizer) or not any(
        shares.is_apart(p) for group in optimizer.param_groups for p in group["params"]
    ):
        _originals["clip_grad_norm"](optimizer, max_norm, norm_type)
        return
    gradients.clip(optimizer, max_norm, norm_type, before="clip_grad_norm")


def pre_step_of(optimizer: Any, loss: Any, retain_graph: bool = False) -> None:
    """See `hold`."""
    streamed_steps.refuse_step(optimizer)
    averaging = known(optimizer)
    if averaging is not None and averaging.apart and loss is not None:
        raise UsageError(
            "step(loss) inside no_sync would step by this rank's own gradients. Call"
            " backward(loss) there, and step outside"
        )
    if loss is None:
        gradients.check_averaged(optimizer, "step")
    _originals["pre_step"](optimizer, loss, retain_graph)
