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
import weakref
from contextlib import AbstractContextManager
from typing import Any
from weakref import WeakKeyDictionary

import jittor as jt

from xmem.errors import UsageError
from xmem_jittor import halves

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
# While scalers live: Jittor's own backward, and an entry for each of them.
_counting: list[Any] = []


def are_new(optimizer: Any) -> bool:
    """Say whether backward has come since the last step or `zero_grad`."""
    if any("grads" not in group for group in optimizer.param_groups):
        return False
    return not getattr(optimizer, "_Optimizer__zero_grad", False)


def of(optimizer: Any, *, before: str) -> list[Any]:
    """Return the gradients of the parameters that are trained.

    Args:
        optimizer: a Jittor optimizer.
        before: the call that needs them, for the error.

    Raises:
        UsageError: there are none, a step has used them, or all parameters are frozen.
    """
    if not are_new(optimizer):
        raise UsageError(
            f"{before} came before backward: the optimizer has no gradients. Call"
            " xmem.backward(loss, optimizer) first."
        )
    found = [
        gradient
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
        result = optimizer.step()
        for parameter, dtype in before:
            if str(parameter.dtype) != dtype:
                parameter.update(halves.cast(parameter.detach(), dtype))
    _counts[optimizer] = optimizer.n_step
    return result


def backward(loss: Any, optimizer: Any) -> None:
    """Compute gradients, and count one update however many calls there are for it."""
    more = are_new(optimizer)
    if not more:
        _counts[optimizer] = optimizer.n_step
    optimizer.backward(loss)
    if more:
        optimizer.n_step -= 1


def take_back(optimizer: Any) -> None:
    """Forget the gradients and let `n_step` be what it was before they were computed."""
    optimizer.n_step = _counts.get(optimizer, optimizer.n_step - 1)
    _counts[optimizer] = optimizer.n_step
    forget(optimizer)


def count(scaler: Any) -> None:
    """Note, while a scaler lives, an optimizer's `n_step` whenever its first gradients come.

    The updates of a loop of Jittor's own are seen by nothing else, and for which optimizer a loss
    was scaled, only the call tells. Goes when Jittor counts updates itself.
    """
    if not _counting:
        original = jt.optim.Optimizer.backward

        @functools.wraps(original)
        def counted(self: Any, loss: Any, retain_graph: bool = False) -> None:
            if not are_new(self):
                _counts[self] = self.n_step
            original(self, loss, retain_graph)

        jt.optim.Optimizer.backward = counted
        _counting.append(original)
    _counting.append(None)
    weakref.finalize(scaler, _count_no_more).atexit = False


def _count_no_more() -> None:
    _counting.pop()
    if len(_counting) == 1:
        jt.optim.Optimizer.backward = _counting.pop()


def norm(held: list[Any], p: float) -> Any:
    """Return the p-norm over all gradients, in float32, of shape (1,).

    NaN and infinity come through. Under -Ofast Jittor's `max` passes over NaN; sums do not.
    """
    powers = [_powers(gradient, 1.0 if math.isinf(p) else p) for gradient in held]
    total = functools.reduce(_add, powers)
    if not math.isinf(p):
        return jt.sqrt(total) if p == 2 else total ** (1 / p)
    maxima = [halves.to_float32(gradient).abs().max() for gradient in held]
    largest = functools.reduce(lambda a, b: a.maximum(b).stop_fuse(), maxima)
    return jt.ternary(jt.isfinite(total), largest, total)


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
