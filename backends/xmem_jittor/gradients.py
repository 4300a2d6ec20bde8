"""The gradients of an optimizer, where Jittor keeps them, and the updates that it counts.

Relies on `jt.optim.Optimizer` of Jittor 1.3.11: `param_groups[i]["grads"]` holds the gradients,
beside "params", from the first backward on, also after a step; `__zero_grad` says whether the next
backward overwrites them; `n_step`, from which `jt.optim.Adam` and its like correct their bias,
counts calls of `backward`. `Var.update` under `jt.no_grad` freezes what it writes to, for good, so
updates run with the flag off.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any
from weakref import WeakKeyDictionary

import jittor as jt

from xmem.distributed.counting import note
from xmem.distributing import Op
from xmem.errors import UsageError
from xmem_jittor import halves, messages, ranks, shares
from xmem_jittor.averaging import known

_SUM = """
    const double p = data["p"];
    double total = 0;
    if (p == 2) {
        #pragma omp parallel for reduction(+:total) if (in0->num > 100000)
        for (int64 i = 0; i < in0->num; i++) total += (double)in0_p[i] * in0_p[i];
    } else {
        #pragma omp parallel for reduction(+:total) if (in0->num > 100000)
        for (int64 i = 0; i < in0->num; i++) total += std::pow(std::abs((double)in0_p[i]), p);
    }
    out0_p[0] = total;
"""
# The n_step at an optimizer's last update, where we have seen that.
_counts: WeakKeyDictionary[Any, int] = WeakKeyDictionary()


def are_new(optimizer: Any) -> bool:
    """Say whether backward has come since the last step or `zero_grad`."""
    if any("grads" not in group for group in optimizer.param_groups):
        return False
    return not getattr(optimizer, "_Optimizer__zero_grad", False)


def of(optimizer: Any, *, before: str, apart: bool = False) -> list[Any]:
    """Return the gradients of the parameters that are trained.

    Args:
        optimizer: a Jittor optimizer.
        before: the call that needs them, for the error.
        apart: they may be this rank's own.

    Raises:
        UsageError: there are none, a step has used them, all parameters are frozen, or they have
            been added up under `no_sync` and are not averaged yet.
    """
    return [gradient for _, gradient in _pairs(optimizer, before=before, apart=apart)]


def _pairs(optimizer: Any, *, before: str, apart: bool = False) -> list[tuple[Any, Any]]:
    if not are_new(optimizer):
        raise UsageError(
            f"{before} came before backward: the optimizer has no gradients. Call"
            " xmem.backward(loss, optimizer) first."
        )
    if not apart:
        check_averaged(optimizer, before)
    found = [
        (parameter, gradient)
        for group in optimizer.param_groups
        for parameter, gradient in zip(group["params"], group["grads"], strict=True)
        if not parameter.is_stop_grad()
    ]
    if not found:
        raise UsageError(
            f"{before}: there are no gradients, for all of the optimizer's parameters are frozen."
            " Let some be trained: parameter.start_grad()"
        )
    return found


def check_averaged(optimizer: Any, before: str) -> None:
    """Refuse to go on with gradients that were added up under `no_sync`.

    Raises:
        UsageError: they are this rank's own.
    """
    averaging = known(optimizer)
    if averaging is not None and averaging.pending and are_new(optimizer):
        raise UsageError(
            f"{before} came while gradients are this rank's own: they were added up under no_sync."
            " Compute the last micro-batch's gradients outside of it"
        )


def make_room(optimizer: Any) -> None:
    """Let groups without gradients have some, of zeros, as Jittor's own backward does."""
    for group in optimizer.param_groups:
        if "grads" not in group:
            zeros = [jt.zeros(p.shape, p.dtype) for p in group["params"]]
            group["grads"] = [zero.stop_grad().stop_fuse() for zero in zeros]


def note_count(optimizer: Any) -> None:
    """Note `n_step` where the next backward is an optimizer's first since its last update."""
    if not are_new(optimizer):
        _counts[optimizer] = optimizer.n_step


def forget(optimizer: Any) -> None:
    """Forget the gradients, memory included, which Jittor's `zero_grad` keeps."""
    optimizer.zero_grad()
    for group in optimizer.param_groups:
        group.pop("grads", None)
    optimizer._grad_map = {}  # what Var.opt_grad has looked up


def updating() -> AbstractContextManager[Any]:
    """Let what is trainable stay so where it is updated, also inside of `jt.no_grad`."""
    scope: AbstractContextManager[Any] = jt.flag_scope(no_grad=0)
    return scope


def put(tensor: Any, value: Any) -> None:
    """Give a tensor another value, and let it ask for gradients as it did."""
    value = value.detach()
    with updating():
        tensor.update(value.stop_grad() if tensor.is_stop_grad() else value.start_grad())


def step(optimizer: Any) -> Any:
    """Update the parameters, each in its own type.

    `Var.update` of Jittor 1.3.11 gives a parameter the type of what it is computed from: a half
    parameter with a float32 gradient or state would become float32.
    """
    with updating():
        for group in optimizer.param_groups:
            for parameter, gradient in zip(group["params"], group["grads"], strict=True):
                if str(gradient.dtype) != str(parameter.dtype):
                    gradient.update(halves.cast(gradient, parameter.dtype))
        before = [(p, str(p.dtype)) for group in optimizer.param_groups for p in group["params"]]
        result = _stepped(optimizer, [p for p, _ in before])
        for parameter, dtype in before:
            if str(parameter.dtype) != dtype:
                parameter.update(halves.cast(parameter.detach(), dtype))
    _counts[optimizer] = optimizer.n_step
    return result


def _stepped(optimizer: Any, parameters: list[Any]) -> Any:
    """Step; where parameters are sharded, without a graph, and let them be trained on.

    With one, an update that reads its parameter for the gradient too (weight decay in `jt.optim`)
    keeps the old parameters until all are updated.
    """
    trained = [p for p in parameters if not p.is_stop_grad()]
    if not any(shares.is_apart(p) for p in trained):
        return optimizer.step()
    with jt.flag_scope(no_grad=1):
        result = optimizer.step()
    for p in trained:
        p.start_grad()
    return result


def backward(loss: Any, optimizer: Any) -> None:
    """Compute gradients, and count one update however many calls there are for it."""
    more = are_new(optimizer)
    note_count(optimizer)
    optimizer.backward(loss)
    if more:
        optimizer.n_step -= 1


def take_back(optimizer: Any) -> None:
    """Forget the gradients and let `n_step` be what it was before they were computed."""
    optimizer.n_step = _counts.get(optimizer, optimizer.n_step - 1)
    _counts[optimizer] = optimizer.n_step
    forget(optimizer)


def clip(optimizer: Any, max_norm: float, p: float, *, before: str) -> Any:
    """Scale gradients down to a norm over all of them, on all ranks; returns the norm before."""
    held = _pairs(optimizer, before=before)
    total = norm(held, p)
    coefficient = (max_norm / (total + 1e-6)).minimum(1.0)
    for _, gradient in held:
        clipped = halves.to_float32(gradient) * coefficient
        gradient.update(halves.cast(clipped, gradient.dtype))
    return total


def norm(held: Sequence[tuple[Any, Any]], p: float) -> Any:
    """Return the p-norm over all gradients, in float32, of shape (1,).

    NaN and infinity come through. Under -Ofast Jittor's `max` passes over NaN; sums do not.

    Args:
        held: parameters and their gradients; where ranks hold shares, all shares count.
        p: which norm.
    """
    power = 1.0 if math.isinf(p) else p
    total = _over_ranks(held, lambda g: _powers(g, power), _add, "sum")
    if not math.isinf(p):
        return jt.sqrt(total) if p == 2 else total ** (1 / p)
    largest = _over_ranks(held, lambda g: halves.to_float32(g).abs().max(), _larger, "max")
    return jt.ternary(jt.isfinite(total), largest, total)


def _over_ranks(
    held: Sequence[tuple[Any, Any]],
    number: Callable[[Any], Any],
    join: Callable[[Any, Any], Any],
    op: Op,
) -> Any:
    """Return a number over all gradients: over those of shares on all ranks, others once."""
    apart = [number(g) for p, g in held if shares.is_apart(p)]
    found = [number(g) for p, g in held if not shares.is_apart(p)]
    if apart:
        found.append(agreed(functools.reduce(join, apart), op))
    return functools.reduce(join, found)


def agreed(value: Any, op: Op) -> Any:
    """Return one number for all ranks."""
    size = ranks.size()
    if size == 1:
        return value
    note("all_reduce", value.nbytes, size)
    return messages.all_reduce(value.reshape((1,)), op).stop_grad()


def _powers(gradient: Any, p: float) -> Any:
    """Return the sum of |g|^p, of shape (1,).

    On a CPU `sum` of Jittor 1.3.11 adds into a single float32: 3e-3 off for 4 million numbers.
    """
    values = halves.to_float32(gradient)
    if jt.flags.use_cuda:
        return (values.sqr() if p == 2 else values.abs() ** p).sum()
    return jt.code((1,), "float32", [values], cpu_src=_SUM, data={"p": p})


def _add(total: Any, more: Any) -> Any:
    # Unfused: else the sum over all parameters is one kernel, new for each number of them.
    return (total + more).stop_fuse()


def _larger(largest: Any, more: Any) -> Any:
    return largest.maximum(more).stop_fuse()
